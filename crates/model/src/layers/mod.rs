//! Blocks that graphs share. With MLX each follows the operations of its counterpart in `mlx.nn` or
//! mlx-lm; with the CPU kernels the same block is one or two fused nodes. Graphs are written once.

mod activation;
mod attention;
mod embedding;
mod experts;
mod gated_delta;
mod linear;
mod mlp;
mod norm;
mod per_layer_input;
mod residual;
mod rope;

pub use activation::{Activation, GatedActivation, PlainActivation, Softcap};
pub use attention::{Attention, AttentionArgs, AttentionCall, QkNorm, SharedKv};
pub use embedding::Embedding;
pub use experts::{ExpertSizes, Experts, SparseArgs, SparseMlp, top_k};
#[cfg(test)]
pub(crate) use gated_delta::tests as delta_rules;
pub use gated_delta::{DeltaFunctions, DeltaSizes, GatedDeltaNet};
pub use linear::{Linear, Projections, project};
pub use mlp::{GatedMlp, MlpArgs, PlainMlp};
pub use norm::{Norm, NormKind};
pub use per_layer_input::PerLayerInput;
pub use residual::Residual;
pub use rope::{Positions, Rope};

use std::sync::Arc;

use russet_kernels::cpu::{FloatType, QuantFormat};
use russet_kernels::ops::{Matrix, Ops, StoredQuantized};
use russet_mlx::{Dtype, Quantization, QuantizationMode, Quantized};

use crate::quantization::infer;
use crate::{Numerics, QuantizationConfig, Result, Tensor, Weights};

/// What loading a module needs to know besides its own sizes.
pub struct Loader<'a> {
    /// The tensors that are left.
    pub weights: &'a mut Weights,
    /// Who computes.
    pub numerics: &'a Numerics,
    quantization: Option<&'a QuantizationConfig>,
    quantize_activations: bool,
    packed_elements: u64,
    /// Matrices for the CPU kernels.
    matrices: Vec<Arc<Matrix>>,
}

/// A weight matrix as stored.
enum Stored {
    Dense(Tensor),
    Quantized { weight: Tensor, scales: Tensor, biases: Option<Tensor>, quantization: Quantization },
}

impl<'a> Loader<'a> {
    /// Loads from `weights`. `quantize_activations` quantizes the inputs of linear layers as well.
    pub fn new(
        weights: &'a mut Weights,
        numerics: &'a Numerics,
        quantization: Option<&'a QuantizationConfig>,
        quantize_activations: bool,
    ) -> Self {
        Self {
            weights,
            numerics,
            quantization,
            quantize_activations,
            packed_elements: 0,
            matrices: Vec::new(),
        }
    }

    /// Elements of the packed matrices taken so far.
    pub(crate) fn packed_elements(&self) -> u64 {
        self.packed_elements
    }

    /// Interleaves the matrices of the CPU kernels, if they shall be; returns the bytes of memory that they
    /// take besides the mapped files.
    pub(crate) fn interleave(&self) -> Result<usize> {
        if let Numerics::Kernels { ops, interleave: true, .. } = self.numerics {
            ops.interleave(&self.matrices)?;
        }
        Ok(self.matrices.iter().map(|m| m.owned_bytes()).sum())
    }

    /// The packing of the module `path` with a dense last dimension of `columns`: what the config says
    /// of it, else what its tensors say, else none.
    fn quantization_of(&self, path: &str, columns: i32) -> Result<Option<Quantization>> {
        let Some(config) = self.quantization else { return Ok(None) };
        if let Some(choice) = config.module(path) {
            return Ok(choice);
        }
        let (weight, scales) = (format!("{path}.weight"), format!("{path}.scales"));
        let Some(scales) = self.weights.get(&scales) else { return Ok(None) };
        let packed = self.weights.get(&weight).and_then(|w| w.shape().last().copied()).unwrap_or(0);
        let groups = scales.shape().last().copied().unwrap_or(0);
        infer(columns, packed, groups, scales.dtype() != Dtype::U8)
            .map(Some)
            .map_err(|message| self.weights.error(path, message))
    }

    /// Takes the matrix `[rows, columns]` of the module `path`.
    fn stored(&mut self, path: &str, rows: i32, columns: i32) -> Result<Stored> {
        self.stored_stack(path, &[rows], columns)
    }

    /// Takes the matrices `[.., columns]` of the module `path`; `rows` are the dimensions before the last.
    fn stored_stack(&mut self, path: &str, rows: &[i32], columns: i32) -> Result<Stored> {
        let shape = |last: i32| [rows, &[last]].concat();
        let Some(quantization) = self.quantization_of(path, columns)? else {
            return Ok(Stored::Dense(self.weights.take(&format!("{path}.weight"), &shape(columns))?));
        };
        if columns % quantization.group_size != 0 {
            let message =
                format!("{columns} columns are no multiple of group size {}", quantization.group_size);
            return Err(self.weights.error(path, message));
        }
        // A group always fills whole words, a row of nvfp4 groups not always a multiple of 32 elements.
        let groups = columns / quantization.group_size;
        let packed = shape(groups * (quantization.group_size * quantization.bits / 32));
        let groups = shape(groups);
        let weight = self.weights.take_as(&format!("{path}.weight"), &packed, &[Dtype::U32])?;
        let scales = format!("{path}.scales");
        let (scales, biases) = if quantization.mode == QuantizationMode::Affine {
            let scales = self.weights.take(&scales, &groups)?;
            let dtype = scales.array.dtype();
            let biases = self.weights.take_as(&format!("{path}.biases"), &groups, &[dtype])?;
            (scales, Some(biases))
        } else {
            (self.weights.take_as(&scales, &groups, &[Dtype::U8])?, None)
        };
        self.packed_elements += rows.iter().map(|&n| n as u64).product::<u64>() * columns as u64;
        Ok(Stored::Quantized { weight, scales, biases, quantization })
    }

    /// The CPU kernels, where they compute the linear layer `path`.
    fn linear_kernels(&self, path: &str) -> Result<Option<Arc<Ops>>> {
        match self.numerics.kernels() {
            Some(_) if self.quantize_activations => {
                let message = "quantize_activations has no CPU kernels: use fidelity l1";
                Err(self.weights.error(path, message))
            }
            ops => Ok(ops.cloned()),
        }
    }

    /// The matrix for the CPU kernels, with its bias if it has one.
    fn matrix(&mut self, path: &str, rows: i32, columns: i32, bias: Option<&Tensor>) -> Result<Arc<Matrix>> {
        let matrix = self.kernel_matrix(path, &[rows], columns)?;
        let matrix = match bias {
            Some(bias) => matrix.with_bias(bias.array.astype(Dtype::F32)?.to_vec()?)?,
            None => matrix,
        };
        Ok(self.keep(matrix))
    }

    /// The parts of the matrix of `total` rows that have `rows` rows each, for the CPU kernels.
    fn split_matrix<const N: usize>(
        &mut self,
        path: &str,
        total: i32,
        rows: [i32; N],
        columns: i32,
    ) -> Result<[Arc<Matrix>; N]> {
        let parts = self.kernel_matrix(path, &[total], columns)?.split(rows.map(|n| n as usize))?;
        Ok(parts.map(|part| self.keep(part)))
    }

    /// The matrices `[rows, columns]` of `experts` experts for the CPU kernels.
    fn expert_matrices(&mut self, path: &str, experts: i32, rows: i32, columns: i32) -> Result<Arc<Matrix>> {
        let matrix = self.kernel_matrix(path, &[experts, rows], columns)?.of_experts(experts as usize)?;
        Ok(self.keep(matrix))
    }

    fn keep(&mut self, matrix: Matrix) -> Arc<Matrix> {
        let matrix = Arc::new(matrix);
        self.matrices.push(matrix.clone());
        matrix
    }

    /// The matrices one under the other; `rows` are the dimensions before the last.
    fn kernel_matrix(&mut self, path: &str, rows: &[i32], columns: i32) -> Result<Matrix> {
        let (row_count, column_count) = (rows.iter().map(|&n| n as usize).product(), columns as usize);
        Ok(match self.stored_stack(path, rows, columns)? {
            Stored::Dense(weight) => {
                Matrix::dense(float_type(weight.array.dtype()), row_count, column_count, weight.data)?
            }
            Stored::Quantized { weight, scales, biases, quantization } => {
                Matrix::quantized(StoredQuantized {
                    format: quant_format(quantization, scales.array.dtype()),
                    rows: row_count,
                    columns: column_count,
                    codes: weight.data,
                    scales: scales.data,
                    biases: biases.map(|b| b.data),
                })?
            }
        })
    }
}

impl Numerics {
    /// The CPU kernels, where they compute.
    fn kernels(&self) -> Option<&Arc<Ops>> {
        match self {
            Self::Mlx => None,
            Self::Kernels { ops, .. } => Some(ops),
        }
    }
}

impl Stored {
    /// As MLX's operations take it, if it is packed.
    fn into_quantized(self) -> std::result::Result<Quantized, Tensor> {
        match self {
            Self::Dense(weight) => Err(weight),
            Self::Quantized { weight, scales, biases, quantization } => Ok(Quantized {
                weight: weight.array,
                scales: scales.array,
                biases: biases.map(|b| b.array),
                quantization,
            }),
        }
    }
}

fn float_type(dtype: Dtype) -> FloatType {
    match dtype {
        Dtype::F16 => FloatType::F16,
        Dtype::Bf16 => FloatType::Bf16,
        _ => FloatType::F32,
    }
}

fn quant_format(q: Quantization, scales: Dtype) -> QuantFormat {
    match q.mode {
        QuantizationMode::Affine => QuantFormat::Affine {
            bits: q.bits as u32,
            group: q.group_size as usize,
            scales: float_type(scales),
        },
        QuantizationMode::Mxfp4 => QuantFormat::Mxfp4,
        QuantizationMode::Mxfp8 => QuantFormat::Mxfp8,
        QuantizationMode::Nvfp4 => QuantFormat::Nvfp4,
    }
}
