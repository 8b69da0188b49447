//! Root-mean-square and layer normalization of rows.

#![allow(unsafe_code)]

use super::Cpu;
use super::buffer::SharedMut;
use super::error::{KernelError, check_len, parameter};
use super::simd::{Kernel, Simd};

/// Elements that are worth a thread.
pub(crate) const GRAIN: usize = 16_384;

/// `x / sqrt(mean(x²) + eps) · weight` for each row of `cols` (`mx.fast.rms_norm`); without a weight, 1.
///
/// # Errors
/// Where `x` is not whole rows, or the output or the weight has another length.
pub fn rms_norm(
    cpu: &Cpu,
    x: &[f32],
    cols: usize,
    weight: Option<&[f32]>,
    eps: f32,
    out: &mut [f32],
) -> Result<(), KernelError> {
    normalize(cpu, x, cols, weight, None, eps, false, out)
}

/// `(x − mean(x)) / sqrt(var(x) + eps) · weight + bias` for each row of `cols` (`mx.fast.layer_norm`).
///
/// # Errors
/// As [`rms_norm`].
pub fn layer_norm(
    cpu: &Cpu,
    x: &[f32],
    cols: usize,
    weight: Option<&[f32]>,
    bias: Option<&[f32]>,
    eps: f32,
    out: &mut [f32],
) -> Result<(), KernelError> {
    normalize(cpu, x, cols, weight, bias, eps, true, out)
}

#[allow(clippy::too_many_arguments, reason = "the union of the two norms' arguments")]
fn normalize(
    cpu: &Cpu,
    x: &[f32],
    cols: usize,
    weight: Option<&[f32]>,
    bias: Option<&[f32]>,
    eps: f32,
    centered: bool,
    out: &mut [f32],
) -> Result<(), KernelError> {
    if cols == 0 || !x.len().is_multiple_of(cols) {
        return Err(parameter("normalized row", cols, "a divisor of the input's length"));
    }
    check_len("norm output", out.len(), x.len())?;
    for (what, part) in [("norm weight", weight), ("norm bias", bias)] {
        if let Some(part) = part {
            check_len(what, part.len(), cols)?;
        }
    }
    let out = SharedMut::new(out);
    cpu.pool().ranges(x.len() / cols, GRAIN.div_ceil(cols), |rows| {
        let range = rows.start * cols..rows.end * cols;
        // SAFETY: rows of the output, each for the one chunk that claimed them.
        let out = unsafe { out.slice(range.clone()) };
        cpu.isa().run(Rows { x: &x[range], cols, weight, bias, eps, centered, out });
    })
}

struct Rows<'a> {
    x: &'a [f32],
    cols: usize,
    weight: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
    eps: f32,
    centered: bool,
    out: &'a mut [f32],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { x, cols, weight, bias, eps, centered, out } = self;
        for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
            // SAFETY: `load` and `save` touch the `n` columns from `i` on, which all rows have.
            unsafe {
                let mean = if centered {
                    let mut sum = S::zero();
                    for i in (0..cols).step_by(S::LANES) {
                        sum = S::add(sum, load::<S>(x, i));
                    }
                    S::sum(sum) / cols as f32
                } else {
                    0.0
                };
                let mut squares = S::zero();
                for i in (0..cols).step_by(S::LANES) {
                    let n = S::LANES.min(cols - i);
                    // Lanes beyond the row count as the mean.
                    let v = S::sub(
                        if n == S::LANES {
                            load::<S>(x, i)
                        } else {
                            S::load_first(x.as_ptr().add(i), n, mean)
                        },
                        S::splat(mean),
                    );
                    squares = S::fma(v, v, squares);
                }
                let factor = S::splat(1.0 / (S::sum(squares) / cols as f32 + eps).sqrt());
                for i in (0..cols).step_by(S::LANES) {
                    let mut v = S::mul(S::sub(load::<S>(x, i), S::splat(mean)), factor);
                    if let Some(weight) = weight {
                        v = S::mul(v, load::<S>(weight, i));
                    }
                    if let Some(bias) = bias {
                        v = S::add(v, load::<S>(bias, i));
                    }
                    save::<S>(out, i, v);
                }
            }
        }
    }
}

/// A vector of `x` from `i` on, zero beyond its end.
///
/// # Safety
/// In a kernel of `S`; `i < x.len()`.
#[inline(always)]
pub(crate) unsafe fn load<S: Simd>(x: &[f32], i: usize) -> S::F32 {
    // SAFETY: no more is read than there is.
    unsafe {
        if i + S::LANES <= x.len() {
            S::load(x.as_ptr().add(i))
        } else {
            S::load_first(x.as_ptr().add(i), x.len() - i, 0.0)
        }
    }
}

/// Writes a vector to `x` from `i` on, up to its end.
///
/// # Safety
/// In a kernel of `S`; `i < x.len()`.
#[inline(always)]
pub(crate) unsafe fn save<S: Simd>(x: &mut [f32], i: usize, v: S::F32) {
    // SAFETY: no more is written than there is room for.
    unsafe {
        if i + S::LANES <= x.len() {
            S::store(x.as_mut_ptr().add(i), v);
        } else {
            S::store_first(x.as_mut_ptr().add(i), v, x.len() - i);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{Rng, cpus, relative_error};

    #[test]
    fn norms_match_f64_for_any_width() {
        let mut rng = Rng::new(1);
        for cols in [1, 7, 16, 33, 576, 4096] {
            let x: Vec<f32> = rng.normals(5 * cols).iter().map(|x| x * 3.0 + 1.0).collect();
            let (w, b) = (rng.normals(cols), rng.normals(cols));
            for centered in [false, true] {
                let mut expected = Vec::new();
                for row in x.chunks_exact(cols) {
                    let n = cols as f64;
                    let mean =
                        if centered { row.iter().map(|&x| f64::from(x)).sum::<f64>() / n } else { 0.0 };
                    let square = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
                    for (i, &x) in row.iter().enumerate() {
                        let v = (f64::from(x) - mean) / (square + 1e-5).sqrt() * f64::from(w[i]);
                        expected.push(if centered { v + f64::from(b[i]) } else { v });
                    }
                }
                for cpu in cpus() {
                    let mut out = vec![0.0; x.len()];
                    if centered {
                        layer_norm(&cpu, &x, cols, Some(&w), Some(&b), 1e-5, &mut out).unwrap();
                    } else {
                        rms_norm(&cpu, &x, cols, Some(&w), 1e-5, &mut out).unwrap();
                    }
                    let error = relative_error(&out, &expected);
                    assert!(error < 1e-6, "{cpu:?} {cols} centered {centered}: {error:e}");
                }
            }
        }
    }

    #[test]
    fn rows_of_zeros_stay_zero_and_shapes_are_checked() {
        for cpu in cpus() {
            let mut out = [1.0; 20];
            rms_norm(&cpu, &[0.0; 20], 10, None, 1e-6, &mut out).unwrap();
            assert_eq!(out, [0.0; 20]);
            assert!(rms_norm(&cpu, &[0.0; 20], 0, None, 1e-6, &mut out).is_err());
            assert!(rms_norm(&cpu, &[0.0; 20], 15, None, 1e-6, &mut out).is_err());
            assert!(rms_norm(&cpu, &[0.0; 20], 10, Some(&[1.0; 9]), 1e-6, &mut out).is_err());
            assert!(layer_norm(&cpu, &[0.0; 20], 10, None, None, 1e-6, &mut out[1..]).is_err());
        }
    }
}
