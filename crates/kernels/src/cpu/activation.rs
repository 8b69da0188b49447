//! Activation functions, alone and gated.

#![allow(unsafe_code)]

use super::Cpu;
use super::buffer::SharedMut;
use super::error::{KernelError, check_len, parameter, product};
use super::norm::{GRAIN, load, save};
use super::simd::{Kernel, Simd, exp, sigmoid};

/// An activation function. Errors are below 2e-6 of the value plus 2e-7.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `1 / (1 + e⁻ˣ)`.
    Sigmoid,
    /// `x · sigmoid(x)`.
    Silu,
    /// `x (1 + erf(x / √2)) / 2`.
    Gelu,
    /// `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`.
    GeluTanh,
}

impl Activation {
    #[inline(always)]
    fn apply<S: Simd>(self, x: S::F32) -> S::F32 {
        match self {
            Self::Sigmoid => sigmoid::<S>(x),
            Self::Silu => S::mul(x, sigmoid::<S>(x)),
            Self::Gelu => {
                let half = S::mul(x, S::splat(0.5));
                S::mul(half, erfc::<S>(S::mul(x, S::splat(-std::f32::consts::FRAC_1_SQRT_2))))
            }
            Self::GeluTanh => {
                // (1 + tanh y) / 2 = sigmoid(2 y), without the cancellation.
                let cube = S::mul(S::mul(x, x), x);
                let y = S::mul(S::fma(cube, S::splat(0.044_715), x), S::splat(2.0 * 0.797_884_6));
                S::mul(x, sigmoid::<S>(y))
            }
        }
    }
}

/// 1 − erf x, by the rational exponential fit of Press et al., "Numerical Recipes" (relative error below 1.2e-7 but
/// for the rounding of x²).
#[inline(always)]
fn erfc<S: Simd>(x: S::F32) -> S::F32 {
    let one = S::splat(1.0);
    let z = S::abs(x);
    let t = S::div(one, S::fma(z, S::splat(0.5), one));
    let mut p = S::splat(0.170_872_77);
    for c in [
        -0.822_152_2,
        1.488_515_9,
        -1.135_204,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
        -1.265_512_2,
    ] {
        p = S::fma(p, t, S::splat(c));
    }
    let value = S::mul(t, exp::<S>(S::sub(p, S::mul(z, z))));
    S::select_lt(x, S::zero(), S::sub(S::splat(2.0), value), value)
}

/// `activation(x)`, element by element.
///
/// # Errors
/// Where the output has another length.
pub fn activate(cpu: &Cpu, activation: Activation, x: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
    check_len("activation output", out.len(), x.len())?;
    let out = SharedMut::new(out);
    cpu.pool().ranges(x.len(), GRAIN, |range| {
        // SAFETY: each range is of the one chunk that claimed it.
        let out = unsafe { out.slice(range.clone()) };
        cpu.isa().run(Gated { activation, gate: &x[range], up: None, out });
    })
}

/// `activation(gate) · up` for rows of `width`: with [`Activation::Silu`] swiglu, with the others geglu. Row i of
/// `gate` and of `up` begins at `i * stride`, so that both can be halves of one projection's output; the output is
/// `[rows, width]`.
///
/// # Errors
/// Where the inputs are shorter than the output's rows need, or the output is not whole rows.
pub fn gated(
    cpu: &Cpu,
    activation: Activation,
    gate: &[f32],
    up: &[f32],
    stride: usize,
    width: usize,
    out: &mut [f32],
) -> Result<(), KernelError> {
    if width == 0 || !out.len().is_multiple_of(width) || stride < width {
        return Err(parameter(
            "gated width",
            width,
            "a divisor of the output's length and at most the stride",
        ));
    }
    let rows = out.len() / width;
    let needed =
        product("gated rows", &[rows.saturating_sub(1), stride])?.saturating_add(width.min(out.len()));
    for (what, x) in [("gate", gate), ("gated input", up)] {
        if x.len() < needed {
            check_len(what, x.len(), needed)?;
        }
    }
    let out = SharedMut::new(out);
    cpu.pool().ranges(rows, GRAIN.div_ceil(width), |rows| {
        for row in rows {
            let from = row * stride..row * stride + width;
            // SAFETY: each row is of the one chunk that claimed it.
            let out = unsafe { out.slice(row * width..(row + 1) * width) };
            cpu.isa().run(Gated { activation, gate: &gate[from.clone()], up: Some(&up[from]), out });
        }
    })
}

struct Gated<'a> {
    activation: Activation,
    gate: &'a [f32],
    up: Option<&'a [f32]>,
    out: &'a mut [f32],
}

impl Kernel for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { activation, gate, up, out } = self;
        for i in (0..out.len()).step_by(S::LANES) {
            // SAFETY: all slices are as long as the output.
            unsafe {
                let mut v = activation.apply::<S>(load::<S>(gate, i));
                if let Some(up) = up {
                    v = S::mul(v, load::<S>(up, i));
                }
                save::<S>(out, i, v);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{Rng, cpus};

    /// erf by its series, and by the continued fraction of its complement where that converges faster.
    fn erfc_f64(x: f64) -> f64 {
        if x < 0.0 {
            return 2.0 - erfc_f64(-x);
        }
        if x > 3.0 {
            let fraction = (1..60).rev().fold(0.0, |f, n| f64::from(n) / 2.0 / (x + f));
            return (-x * x).exp() / (x + fraction) / std::f64::consts::PI.sqrt();
        }
        let (mut term, mut sum) = (x, x);
        for n in 1..100 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        1.0 - sum * 2.0 / std::f64::consts::PI.sqrt()
    }

    fn exact(activation: Activation, x: f64) -> f64 {
        match activation {
            Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Gelu => x / 2.0 * erfc_f64(-x / 2f64.sqrt()),
            Activation::GeluTanh => {
                x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
            }
        }
    }

    const ALL: [Activation; 4] =
        [Activation::Sigmoid, Activation::Silu, Activation::Gelu, Activation::GeluTanh];

    #[test]
    fn activations_match_f64_over_their_range() {
        let x: Vec<f32> =
            (-3000..3000).map(|i| i as f32 * 0.01).chain([0.0, -0.0, 1e-30, 80.0, -80.0]).collect();
        for activation in ALL {
            for cpu in cpus() {
                let mut y = vec![0.0; x.len()];
                activate(&cpu, activation, &x, &mut y).unwrap();
                for (&x, &y) in x.iter().zip(&y) {
                    let exact = exact(activation, f64::from(x));
                    let error = (f64::from(y) - exact).abs();
                    assert!(
                        error <= 2e-6 * exact.abs() + 2e-7,
                        "{cpu:?} {activation:?} {x}: {y} for {exact}"
                    );
                }
            }
        }
    }

    #[test]
    fn activations_of_infinities_and_nan_are_their_limits() {
        for activation in ALL {
            for cpu in cpus() {
                let mut y = [0.0; 2];
                activate(&cpu, activation, &[f32::INFINITY, f32::NAN], &mut y).unwrap();
                let limit = if activation == Activation::Sigmoid { 1.0 } else { f32::INFINITY };
                assert_eq!(y[0], limit, "{cpu:?} {activation:?}");
                assert!(y[1].is_nan(), "{cpu:?} {activation:?}");
                let mut y = [0.0];
                activate(&cpu, activation, &[-1e30], &mut y).unwrap();
                assert_eq!(y[0], 0.0, "{cpu:?} {activation:?}");
            }
        }
    }

    #[test]
    fn gates_multiply_halves_of_rows() {
        let mut rng = Rng::new(1);
        let (rows, width) = (5, 37);
        let x = rng.normals(rows * 2 * width);
        for cpu in cpus() {
            let mut y = vec![0.0; rows * width];
            gated(&cpu, Activation::Silu, &x, &x[width..], 2 * width, width, &mut y).unwrap();
            for (i, &y) in y.iter().enumerate() {
                let at = i / width * 2 * width + i % width;
                let expected = exact(Activation::Silu, f64::from(x[at])) * f64::from(x[at + width]);
                assert!((f64::from(y) - expected).abs() < 1e-6);
            }
            assert!(gated(&cpu, Activation::Silu, &x, &x[width + 1..], 2 * width, width, &mut y).is_err());
            assert!(gated(&cpu, Activation::Silu, &x, &x, width - 1, width, &mut y).is_err());
            assert!(gated(&cpu, Activation::Silu, &x, &x, width, width, &mut y[1..]).is_err());
        }
    }
}
