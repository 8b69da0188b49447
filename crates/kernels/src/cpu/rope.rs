//! Rotary position embeddings.

#![allow(unsafe_code)]

use super::Cpu;
use super::buffer::SharedMut;
use super::error::{KernelError, check_len, parameter, product};
use super::norm::GRAIN;
use super::simd::{Kernel, Simd};

/// Cosines and sines of a run of positions, computed once for all layers and heads.
#[derive(Debug, Default)]
pub struct Rotations {
    /// Half of the rotated dimensions.
    half: usize,
    len: usize,
    /// `[len, half]` each.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// The inverse frequencies `base^(−2i/dims)` of plain rotary embeddings, `dims / 2` of them.
pub fn inverse_frequencies(base: f32, dims: usize) -> Vec<f32> {
    let half = dims / 2;
    (0..half).map(|i| (-(i as f32) * (base.ln() / half as f32)).exp()).collect()
}

impl Rotations {
    /// Prepares positions `offset..offset + len`: the angle is `position · scale · inverse_frequencies[i]`, in f32
    /// as in `mx.fast.rope` (where that takes a table `freqs`, its elements' inverses). Rotated elements are
    /// also multiplied by `amplitude`, 1 but for some long-context scalings.
    pub fn prepare(
        &mut self,
        inverse_frequencies: &[f32],
        offset: usize,
        len: usize,
        scale: f32,
        amplitude: f32,
    ) {
        self.half = inverse_frequencies.len();
        self.len = len;
        self.cos.clear();
        self.sin.clear();
        for position in offset..offset.saturating_add(len) {
            for frequency in inverse_frequencies {
                let angle = f64::from(position as f32 * scale * frequency);
                self.cos.push(angle.cos() as f32 * amplitude);
                self.sin.push(angle.sin() as f32 * amplitude);
            }
        }
    }
}

/// Rotates the first dimensions, twice as many as there are frequencies, of `heads` heads at each prepared position,
/// in place: head h's row i begins at `h * strides.0 + i * strides.1`. Pairs are neighbours where `traditional`,
/// else a dimension and the one half of the rotated dimensions later.
///
/// # Errors
/// Where strides leave the buffer or make heads overlap, or a head has fewer dimensions than are rotated.
pub fn rope(
    cpu: &Cpu,
    x: &mut [f32],
    heads: usize,
    head_dim: usize,
    strides: (usize, usize),
    rotations: &Rotations,
    traditional: bool,
) -> Result<(), KernelError> {
    let Rotations { half, len, .. } = *rotations;
    if heads == 0 || len == 0 {
        return Ok(());
    }
    if 2 * half > head_dim {
        return Err(parameter("rotated dimensions", 2 * half, "at most a head's"));
    }
    let (by_head, by_row) = strides;
    let apart = (by_row >= head_dim && (heads == 1 || by_head >= by_row.saturating_mul(len)))
        || (by_head >= head_dim && (len == 1 || by_row >= by_head.saturating_mul(heads)));
    if !apart && heads * len > 1 {
        return Err(parameter("strides", format!("{strides:?}"), "such that heads do not overlap"));
    }
    let last = product("rotated rows", &[heads - 1, by_head])?
        .saturating_add(product("rotated rows", &[len - 1, by_row])?)
        .saturating_add(head_dim);
    if x.len() < last {
        check_len("rotated rows", x.len(), last)?;
    }
    let x = SharedMut::new(x);
    cpu.pool().ranges(len, GRAIN.div_ceil(heads * head_dim), |rows| {
        for row in rows {
            let (cos, sin) = (&rotations.cos[row * half..][..half], &rotations.sin[row * half..][..half]);
            for head in 0..heads {
                let at = head * by_head + row * by_row;
                // SAFETY: heads lie apart in the buffer; each row is of the one chunk that claimed it.
                let x = unsafe { x.slice(at..at + 2 * half) };
                if traditional {
                    for ((pair, c), s) in x.chunks_exact_mut(2).zip(cos).zip(sin) {
                        (pair[0], pair[1]) = (pair[0] * c - pair[1] * s, pair[0] * s + pair[1] * c);
                    }
                } else {
                    cpu.isa().run(Halves { x, cos, sin });
                }
            }
        }
    })
}

/// Pairs in two halves.
struct Halves<'a> {
    x: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Halves<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { x, cos, sin } = self;
        let half = cos.len();
        let (first, second) = x.split_at_mut(half);
        let whole = half / S::LANES * S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            // SAFETY: all four have `half` elements.
            unsafe {
                let (a, b) = (S::load(first.as_ptr().add(i)), S::load(second.as_ptr().add(i)));
                let (c, s) = (S::load(cos.as_ptr().add(i)), S::load(sin.as_ptr().add(i)));
                S::store(first.as_mut_ptr().add(i), S::sub(S::mul(a, c), S::mul(b, s)));
                S::store(second.as_mut_ptr().add(i), S::add(S::mul(a, s), S::mul(b, c)));
            }
        }
        for i in whole..half {
            let (a, b, c, s) = (first[i], second[i], cos[i], sin[i]);
            (first[i], second[i]) = (a * c - b * s, a * s + b * c);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{Rng, cpus, relative_error};

    #[test]
    fn rotations_match_f64_in_both_layouts_with_any_dims_offset_and_scale() {
        let mut rng = Rng::new(1);
        for (head_dim, dims, offset, scale) in [(64, 64, 0, 1.0), (64, 20, 7, 0.25), (128, 128, 999, 1.0)] {
            let frequencies = inverse_frequencies(10_000.0, dims);
            let (heads, len) = (3, 40);
            let x = rng.normals(heads * len * head_dim);
            for traditional in [false, true] {
                let mut expected: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                for (row, x) in expected.chunks_exact_mut(head_dim).enumerate() {
                    for (i, &f) in frequencies.iter().enumerate() {
                        let angle = f64::from((offset + row % len) as f32 * scale * f);
                        let (a, b) = if traditional { (2 * i, 2 * i + 1) } else { (i, i + dims / 2) };
                        let (c, s) = (angle.cos() * 1.5, angle.sin() * 1.5);
                        (x[a], x[b]) = (x[a] * c - x[b] * s, x[a] * s + x[b] * c);
                    }
                }
                let mut rotations = Rotations::default();
                rotations.prepare(&frequencies, offset, len, scale, 1.5);
                for cpu in cpus() {
                    let mut y = x.clone();
                    let strides = (len * head_dim, head_dim);
                    rope(&cpu, &mut y, heads, head_dim, strides, &rotations, traditional).unwrap();
                    assert!(relative_error(&y, &expected) < 2e-7, "{cpu:?} {dims} {traditional}");
                }
            }
        }
    }

    #[test]
    fn base_frequencies_are_powers_of_the_base() {
        for (i, f) in inverse_frequencies(500_000.0, 64).iter().enumerate() {
            let exact = 500_000f64.powf(-2.0 * i as f64 / 64.0);
            assert!((f64::from(*f) / exact - 1.0).abs() < 2e-6);
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let cpu = &cpus()[0];
        let mut rotations = Rotations::default();
        rotations.prepare(&[1.0; 8], 0, 2, 1.0, 1.0);
        let mut x = [0.0; 64];
        assert!(rope(cpu, &mut x, 2, 16, (32, 16), &rotations, false).is_ok());
        assert!(rope(cpu, &mut x, 2, 16, (33, 16), &rotations, false).is_err());
        assert!(rope(cpu, &mut x, 2, 16, (8, 16), &rotations, false).is_err());
        assert!(rope(cpu, &mut x, 2, 15, (32, 16), &rotations, false).is_err());
        assert!(rope(cpu, &mut x, usize::MAX, 16, (usize::MAX, 16), &rotations, false).is_err());
    }
}
