//! Rows of an embedding table as f32.

#![allow(unsafe_code)]

use super::Cpu;
use super::buffer::SharedMut;
use super::error::{KernelError, check_len, parameter, product};
use super::matmul::Weights;
use super::norm::GRAIN;
use super::quant::{QuantFormat, QuantizedMatrix};
use super::simd::{Kernel, Simd};

/// Writes row `ids[i]` of the table as row i of the output, `[ids, columns]`.
///
/// # Errors
/// Where an id is no row of the table, or the output has another length.
pub fn embed(cpu: &Cpu, table: Weights<'_>, ids: &[u32], out: &mut [f32]) -> Result<(), KernelError> {
    let cols = table.cols();
    check_len("embedding output", out.len(), product("embedding output", &[ids.len(), cols])?)?;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= table.rows()) {
        return Err(parameter("token id", id, "a row of the embedding table"));
    }
    let out = SharedMut::new(out);
    cpu.pool().ranges(ids.len(), (GRAIN / 4).div_ceil(cols), |range| {
        for i in range {
            let row = ids[i] as usize;
            // SAFETY: each row of the output is of the one chunk that claimed it.
            let out = unsafe { out.slice(i * cols..(i + 1) * cols) };
            match &table {
                Weights::Dense(matrix) => {
                    let bytes = matrix.float.bytes();
                    let source = &matrix.data[row * cols * bytes..][..cols * bytes];
                    for (out, value) in out.iter_mut().zip(source.chunks_exact(bytes)) {
                        *out = matrix.float.read(value);
                    }
                }
                Weights::Quantized(matrix) => cpu.isa().run(Row { matrix, row, out }),
                Weights::Interleaved(matrix) => matrix.dequantize_row(row, out),
            }
        }
    })
}

struct Row<'a> {
    matrix: &'a QuantizedMatrix<'a>,
    row: usize,
    out: &'a mut [f32],
}

impl Kernel for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: `out` is as long as a row.
        unsafe { dequantize_row::<S>(self.matrix, self.row, self.out.as_mut_ptr()) }
    }
}

/// A row of a quantized matrix as f32.
///
/// # Safety
/// In a kernel of `S`; `row` is in the matrix, `out` has room for it.
#[inline(always)]
pub(crate) unsafe fn dequantize_row<S: Simd>(matrix: &QuantizedMatrix<'_>, row: usize, out: *mut f32) {
    let format = matrix.format;
    let (bits, group) = (format.bits(), format.group());
    let (scales, biases) = (matrix.row_part(matrix.scales, row), matrix.row_part(matrix.biases, row));
    let scale_bytes = scales.len() / (matrix.cols / group);
    let width = 4 * S::LANES;
    for (g, codes) in matrix.row_codes(row).chunks_exact(group * bits as usize / 8).enumerate() {
        let scale = format.read_scale(&scales[g * scale_bytes..]);
        let bias = match format {
            QuantFormat::Affine { scales: float, .. } => float.read(&biases[g * scale_bytes..]),
            _ => 0.0,
        };
        let mut column = 0;
        while column < group {
            let n = width.min(group - column);
            let source = &codes[column * bits as usize / 8..];
            let mut unpacked = [0u8; 64];
            // SAFETY: a whole vector of codes is read from the row, or a part of one from a copy; `n` floats
            // are written.
            unsafe {
                let mut last = [0u8; 64];
                let source = if n == width {
                    source.as_ptr()
                } else {
                    last[..source.len()].copy_from_slice(source);
                    last.as_ptr()
                };
                let codes = match bits {
                    2 => S::unpack::<2>(source),
                    3 => S::unpack::<3>(source),
                    4 => S::unpack::<4>(source),
                    5 => S::unpack::<5>(source),
                    6 => S::unpack::<6>(source),
                    _ => S::unpack::<8>(source),
                };
                S::store_i(unpacked.as_mut_ptr().cast(), codes);
                let out = out.add(g * group + column);
                if matches!(format, QuantFormat::Affine { .. }) {
                    for i in (0..n).step_by(S::LANES) {
                        let value =
                            S::fma(S::load_u8(unpacked.as_ptr().add(i)), S::splat(scale), S::splat(bias));
                        S::store(out.add(i), value);
                    }
                } else {
                    for (i, &code) in unpacked.iter().enumerate().take(n) {
                        out.add(i).write(scale * format.code_value(code));
                    }
                }
            }
            column += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{RandomMatrix, Rng, cpus, dequantized, stored};
    use crate::cpu::{DenseMatrix, FloatType, Interleaved};

    #[test]
    fn rows_equal_the_stored_weights_in_every_format() {
        let mut rng = Rng::new(1);
        let ids = [3, 0, 40, 3];
        let mut formats = vec![QuantFormat::Mxfp4, QuantFormat::Nvfp4, QuantFormat::Mxfp8];
        for (bits, group) in [(2, 32), (3, 64), (4, 128), (5, 32), (6, 32), (8, 64)] {
            formats.push(QuantFormat::Affine { bits, group, scales: FloatType::F16 });
        }
        for format in formats {
            let matrix = RandomMatrix::new(format, 41, 384, &mut rng);
            let exact = dequantized(&matrix.view());
            for cpu in cpus() {
                let interleaved = Interleaved::new(&cpu, &[matrix.view()]).unwrap();
                for table in [Weights::from(matrix.view()), Weights::from(&interleaved)] {
                    let mut out = vec![0.0; ids.len() * 384];
                    embed(&cpu, table, &ids, &mut out).unwrap();
                    for (id, out) in ids.iter().zip(out.chunks_exact(384)) {
                        for (y, exact) in out.iter().zip(&exact[*id as usize * 384..]) {
                            assert!(
                                (f64::from(*y) - exact).abs() <= 1e-7 * exact.abs() + 1e-7,
                                "{cpu:?} {format:?}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn dense_rows_are_converted_exactly() {
        let mut rng = Rng::new(2);
        let data = stored(FloatType::Bf16, &rng.normals(5 * 7), 1);
        let table = DenseMatrix::new(FloatType::Bf16, 5, 7, &data[1..]).unwrap();
        for cpu in cpus() {
            let mut out = [0.0; 14];
            embed(&cpu, table.into(), &[4, 1], &mut out).unwrap();
            for (i, &y) in out.iter().enumerate() {
                let at = [4, 1][i / 7] * 7 + i % 7;
                assert_eq!(y, FloatType::Bf16.read(&data[1 + 2 * at..]));
            }
        }
    }

    #[test]
    fn ids_outside_the_table_are_refused() {
        let data = [0; 40];
        let table = DenseMatrix::new(FloatType::F32, 5, 2, &data).unwrap();
        for cpu in cpus() {
            assert!(embed(&cpu, table.into(), &[5], &mut [0.0; 2]).is_err());
            assert!(embed(&cpu, table.into(), &[4], &mut [0.0; 3]).is_err());
            assert!(embed(&cpu, table.into(), &[], &mut []).is_ok());
        }
    }
}
