//! GGUF tensors as MLX tensors.
//!
//! A block-quantized GGUF tensor becomes MLX's affine triple with groups of 32: `weight` (codes packed into u32,
//! element i of a row in bits `i * bits` upwards), `scales` and `biases` (f16), where an element is
//! `code * scale + bias`. GGUF's own numbers fit that form without rounding:
//!
//! | GGUF | bits | code | scale | bias |
//! |---|---|---|---|---|
//! | Q4_0 | 4 | q | d | -8 d |
//! | Q4_1 | 4 | q | d | m |
//! | Q8_0 | 8 | q + 128 | d | -128 d |
//!
//! The products are by powers of two, so exact in f16 unless they overflow, which is an error.

use std::borrow::Cow;

use half::f16;
use safetensors::{Dtype, View};

use super::Error;
use crate::gguf::{Tensor, TensorType};

/// Group size of every converted tensor: the block length of GGUF's formats.
pub(crate) const GROUP_SIZE: usize = 32;

/// Bits of a code in MLX's packing, for quantized types.
pub(crate) fn bits(dtype: TensorType) -> Option<usize> {
    match dtype {
        TensorType::F32 | TensorType::F16 => None,
        TensorType::Q4_0 | TensorType::Q4_1 => Some(4),
        TensorType::Q8_0 => Some(8),
    }
}

/// Which row of the source becomes which row of the result.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RowOrder {
    /// As stored.
    Stored,
    /// GGUF stores the rows of each llama query and key head as interleaved rotary pairs (0, half, 1, half + 1,
    /// …); MLX checkpoints hold the first halves of the pairs, then the second ones.
    SplitPairs {
        /// Rows of a head.
        head_dim: usize,
    },
}

impl RowOrder {
    fn source(self, row: usize) -> usize {
        match self {
            RowOrder::Stored => row,
            RowOrder::SplitPairs { head_dim } => {
                let (head, row) = (row / head_dim, row % head_dim);
                let half = head_dim / 2;
                head * head_dim + 2 * (row % half) + row / half
            }
        }
    }
}

/// What of the source a tensor of the result holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Packed codes.
    Codes,
    /// A scale per group.
    Scales,
    /// A bias per group.
    Biases,
    /// The elements as they are.
    Elements,
    /// f32 elements as f16.
    Narrowed,
}

/// A tensor of the checkpoint, computed from its source when it is written.
#[derive(Debug, Clone)]
pub(crate) struct Weight<'a> {
    part: Part,
    dtype: Dtype,
    shape: Vec<usize>,
    source: &'a Tensor<'a>,
    rows: RowOrder,
}

impl<'a> Weight<'a> {
    /// The tensors that `source` becomes, each with its name in the checkpoint.
    pub(crate) fn convert(
        name: &str,
        module: &str,
        source: &'a Tensor<'a>,
        rows: RowOrder,
    ) -> Result<Vec<(String, Self)>, Error> {
        let weight = |suffix: &str, part, dtype, shape| {
            (format!("{module}.{suffix}"), Weight { part, dtype, shape, source, rows })
        };
        let with_columns = |columns| {
            let mut shape = source.shape.clone();
            if let Some(last) = shape.last_mut() {
                *last = columns;
            }
            shape
        };
        let columns = source.row_elements();
        Ok(match (source.dtype, bits(source.dtype)) {
            (_, Some(bits)) => {
                check_affine(name, source)?;
                let groups = columns / GROUP_SIZE;
                vec![
                    weight("weight", Part::Codes, Dtype::U32, with_columns(groups * bits)),
                    weight("scales", Part::Scales, Dtype::F16, with_columns(groups)),
                    weight("biases", Part::Biases, Dtype::F16, with_columns(groups)),
                ]
            }
            (TensorType::F32, None) if fits_f16(source.data) => {
                vec![weight("weight", Part::Narrowed, Dtype::F16, source.shape.clone())]
            }
            (TensorType::F32, None) => {
                vec![weight("weight", Part::Elements, Dtype::F32, source.shape.clone())]
            }
            (_, None) => vec![weight("weight", Part::Elements, Dtype::F16, source.shape.clone())],
        })
    }

    fn row(&self, row: &[u8], out: &mut Vec<u8>) {
        let blocks = row.chunks_exact(self.source.dtype.block_bytes());
        match self.part {
            Part::Codes => blocks.for_each(|block| codes(self.source.dtype, block, out)),
            Part::Scales => {
                blocks.for_each(|block| out.extend(affine(self.source.dtype, block).0.to_le_bytes()))
            }
            Part::Biases => {
                blocks.for_each(|block| out.extend(affine(self.source.dtype, block).1.to_le_bytes()))
            }
            Part::Elements => out.extend(row),
            Part::Narrowed => out.extend(floats(row).flat_map(|value| f16::from_f32(value).to_le_bytes())),
        }
    }
}

impl View for Weight<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let row_bytes = self.source.row_bytes();
        let mut out = Vec::with_capacity(self.data_len());
        for row in 0..self.source.data.len() / row_bytes {
            let start = self.rows.source(row) * row_bytes;
            self.row(self.source.data.get(start..start + row_bytes).unwrap_or_default(), &mut out);
        }
        Cow::Owned(out)
    }

    fn data_len(&self) -> usize {
        // All dtypes used here are whole bytes, and no part is larger than its source.
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Appends a block's codes in MLX's packing.
fn codes(dtype: TensorType, block: &[u8], out: &mut Vec<u8>) {
    match dtype {
        TensorType::Q8_0 => out.extend(block.iter().skip(2).map(|code| code ^ 0x80)),
        _ => {
            let nibbles = block.get(dtype.block_bytes() - 16..).unwrap_or_default();
            // Byte i of GGUF holds elements i and i + 16; byte i of MLX holds elements 2 i and 2 i + 1.
            out.extend(nibbles.chunks_exact(2).map(|pair| (pair[0] & 0x0f) | (pair[1] << 4)));
            out.extend(nibbles.chunks_exact(2).map(|pair| (pair[0] >> 4) | (pair[1] & 0xf0)));
        }
    }
}

/// A block's scale and bias.
fn affine(dtype: TensorType, block: &[u8]) -> (f16, f16) {
    let number = |index: usize| {
        f16::from_le_bytes([
            block.get(2 * index).copied().unwrap_or_default(),
            block.get(2 * index + 1).copied().unwrap_or_default(),
        ])
    };
    let scale = number(0);
    let bias = match zero_code(dtype) {
        Some(code) => f16::from_f32(scale.to_f32() * -code),
        None => number(1),
    };
    (scale, bias)
}

/// The code that stands for zero, in formats that store no bias.
fn zero_code(dtype: TensorType) -> Option<f32> {
    match dtype {
        TensorType::Q4_0 => Some(8.0),
        TensorType::Q8_0 => Some(128.0),
        TensorType::Q4_1 | TensorType::F16 | TensorType::F32 => None,
    }
}

/// Checks that every scale is finite and every bias is exact in f16.
fn check_affine(name: &str, source: &Tensor<'_>) -> Result<(), Error> {
    for (index, block) in source.data.chunks_exact(source.dtype.block_bytes()).enumerate() {
        let (scale, bias) = affine(source.dtype, block);
        let exact = zero_code(source.dtype).is_none_or(|code| bias.to_f32() == scale.to_f32() * -code);
        if !(scale.is_finite() && bias.is_finite() && exact) {
            return Err(Error::Inexact {
                tensor: name.to_owned(),
                row: index * GROUP_SIZE / source.row_elements(),
                scale: scale.to_f32(),
            });
        }
    }
    Ok(())
}

/// Whether every f32 in `data` is exact in f16.
fn fits_f16(data: &[u8]) -> bool {
    floats(data).all(|value| f16::from_f32(value).to_f32() == value)
}

fn floats(data: &[u8]) -> impl Iterator<Item = f32> {
    data.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

#[cfg(test)]
mod tests;
