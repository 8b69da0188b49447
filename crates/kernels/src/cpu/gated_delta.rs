//! The gated delta rule of linear-attention layers (Yang et al., "Gated Delta Networks") and the causal depthwise
//! convolution before it, for one sequence.

#![allow(unsafe_code)]

use super::Cpu;
use super::buffer::SharedMut;
use super::error::{KernelError, check_len, parameter, product};
use super::norm::{load, save};
use super::simd::{Kernel, Simd, sigmoid};

/// `silu` of a causal depthwise convolution over `[len, channels]`, which continues where `tail`, the last
/// `taps − 1` rows before, ended; `tail` is moved on. `weight` is `[channels, taps]`, the last tap for the newest row.
///
/// # Errors
/// Where a length disagrees with the others.
pub fn causal_conv_silu(
    cpu: &Cpu,
    x: &[f32],
    channels: usize,
    weight: &[f32],
    tail: &mut [f32],
    out: &mut [f32],
) -> Result<(), KernelError> {
    if channels == 0 || !x.len().is_multiple_of(channels) || !weight.len().is_multiple_of(channels) {
        return Err(parameter(
            "convolution channels",
            channels,
            "a divisor of the input's and weight's lengths",
        ));
    }
    let (len, taps) = (x.len() / channels, weight.len() / channels);
    if taps == 0 {
        return Err(parameter("convolution taps", taps, "at least 1"));
    }
    check_len("convolution tail", tail.len(), (taps - 1) * channels)?;
    check_len("convolution output", out.len(), x.len())?;
    let out = SharedMut::new(out);
    let before = &*tail;
    cpu.pool().ranges(channels, 64, |range| {
        cpu.isa().run(Convolve { x, before, weight, len, taps, channels, range, out });
    })?;
    if len >= taps - 1 {
        tail.copy_from_slice(&x[(len + 1 - taps) * channels..]);
    } else {
        tail.copy_within(len * channels.., 0);
        tail[(taps - 1 - len) * channels..].copy_from_slice(x);
    }
    Ok(())
}

struct Convolve<'a> {
    x: &'a [f32],
    before: &'a [f32],
    weight: &'a [f32],
    len: usize,
    taps: usize,
    channels: usize,
    range: std::ops::Range<usize>,
    out: SharedMut<f32>,
}

impl Kernel for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { x, before, weight, len, taps, channels, range, out } = self;
        for row in 0..len {
            for c in range.clone().step_by(S::LANES) {
                let end = range.end.min(c + S::LANES);
                let mut sum = S::zero();
                for tap in 0..taps {
                    let mut weights = [0.0; 16];
                    for (w, channel) in weights.iter_mut().zip(c..end) {
                        *w = weight[channel * taps + tap];
                    }
                    // Row `row + tap` of the tail followed by the input.
                    let (source, from) =
                        if row + tap < taps - 1 { (before, row + tap) } else { (x, row + tap + 1 - taps) };
                    // SAFETY: the slice is in bounds; the local array holds a vector.
                    unsafe {
                        let v = load::<S>(&source[from * channels + c..from * channels + end], 0);
                        sum = S::fma(v, S::load(weights.as_ptr()), sum);
                    }
                }
                // SAFETY: these channels of a row are of the one chunk that claimed them.
                unsafe {
                    let out = out.slice(row * channels + c..row * channels + end);
                    save::<S>(out, 0, S::mul(sum, sigmoid::<S>(sum)));
                }
            }
        }
    }
}

/// What gates a token's update: `decay = exp(−exp(a_log) · softplus(a + dt_bias))` and `beta = sigmoid(b)`, for
/// `[len, heads]` of `a` and `b`.
///
/// # Errors
/// Where lengths disagree.
pub fn delta_gates(
    a: &[f32],
    b: &[f32],
    a_log: &[f32],
    dt_bias: &[f32],
    decay: &mut [f32],
    beta: &mut [f32],
) -> Result<(), KernelError> {
    let heads = a_log.len();
    if heads == 0 || !a.len().is_multiple_of(heads) {
        return Err(parameter("delta heads", heads, "a divisor of the gates' length"));
    }
    check_len("delta dt_bias", dt_bias.len(), heads)?;
    for (what, len) in [("delta b", b.len()), ("delta decay", decay.len()), ("delta beta", beta.len())] {
        check_len(what, len, a.len())?;
    }
    for i in 0..a.len() {
        let x = a[i] + dt_bias[i % heads];
        let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
        decay[i] = (-a_log[i % heads].exp() * softplus).exp();
        beta[i] = 1.0 / (1.0 + (-b[i]).exp());
    }
    Ok(())
}

/// Shapes of [`gated_delta`].
#[derive(Debug, Clone, Copy)]
pub struct DeltaShape {
    /// Tokens.
    pub len: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of `key_heads`; head h uses key head `h / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Width of queries and keys.
    pub key_dim: usize,
    /// Width of values.
    pub value_dim: usize,
}

/// Runs the recurrence over `len` tokens, one (decoding) or many (prefill), moving `state`
/// `[value_heads, value_dim, key_dim]` on. For each token and head: `S ← decay S`; `d = beta (v − S k)`; `S ← S + d kᵀ`;
/// `y = S q`.
///
/// `q` and `k` are `[len, key_heads, key_dim]`, normalized and scaled; `v` and `out` `[len, value_heads, value_dim]`;
/// `decay` and `beta` `[len, value_heads]`. Rows of the state do not depend on each other, so each thread takes some
/// through all tokens while they stay in its cache.
///
/// # Errors
/// Where a length disagrees with the shape.
#[allow(clippy::too_many_arguments, reason = "the recurrence's operands")]
pub fn gated_delta(
    cpu: &Cpu,
    shape: DeltaShape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    decay: &[f32],
    beta: &[f32],
    state: &mut [f32],
    out: &mut [f32],
) -> Result<(), KernelError> {
    let DeltaShape { len, key_heads, value_heads, key_dim, value_dim } = shape;
    if key_heads == 0 || key_dim == 0 || value_dim == 0 || !value_heads.is_multiple_of(key_heads) {
        let rule = "without a zero, value heads a multiple of key heads";
        return Err(parameter("delta shape", format!("{shape:?}"), rule));
    }
    let (keys, values) = (
        product("delta keys", &[len, key_heads, key_dim])?,
        product("delta values", &[len, value_heads, value_dim])?,
    );
    check_len("delta q", q.len(), keys)?;
    check_len("delta k", k.len(), keys)?;
    check_len("delta v", v.len(), values)?;
    check_len("delta decay", decay.len(), len * value_heads)?;
    check_len("delta beta", beta.len(), len * value_heads)?;
    check_len("delta state", state.len(), product("delta state", &[value_heads, value_dim, key_dim])?)?;
    check_len("delta output", out.len(), values)?;
    let (state, out) = (SharedMut::new(state), SharedMut::new(out));
    // Rows of one head; a task never spans two.
    let blocks = value_dim.div_ceil(BLOCK_ROWS);
    cpu.pool().ranges(value_heads * blocks, 1, |tasks| {
        for task in tasks {
            let (head, block) = (task / blocks, task % blocks);
            let rows = block * BLOCK_ROWS..value_dim.min((block + 1) * BLOCK_ROWS);
            let at = (head * value_dim + rows.start) * key_dim;
            // SAFETY: these rows of the state are of the one chunk that claimed the task.
            let state = unsafe { state.slice(at..at + rows.len() * key_dim) };
            cpu.isa().run(Scan { shape, q, k, v, decay, beta, head, rows, state, out });
        }
    })
}

/// Rows of the state that a task takes through all tokens.
const BLOCK_ROWS: usize = 16;

struct Scan<'a> {
    shape: DeltaShape,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    decay: &'a [f32],
    beta: &'a [f32],
    head: usize,
    rows: std::ops::Range<usize>,
    state: &'a mut [f32],
    out: SharedMut<f32>,
}

impl Kernel for Scan<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { shape, q, k, v, decay, beta, head, rows, state, out } = self;
        let DeltaShape { len, key_heads, value_heads, key_dim, value_dim } = shape;
        let key_head = head / (value_heads / key_heads);
        for token in 0..len {
            let at = (token * key_heads + key_head) * key_dim;
            let (q, k) = (&q[at..at + key_dim], &k[at..at + key_dim]);
            let gate = token * value_heads + head;
            let (decay, beta) = (decay[gate], beta[gate]);
            let at = (token * value_heads + head) * value_dim;
            let v = &v[at..at + value_dim];
            let mut row = 0;
            while row < rows.len() {
                let n = if rows.len() - row >= 4 { 4 } else { 1 };
                let state = &mut state[row * key_dim..(row + n) * key_dim];
                let first = rows.start + row;
                let step = Step { q, k, decay, beta };
                // SAFETY: `n` rows of the state; the output elements are of this task alone.
                unsafe {
                    let y = if n == 4 {
                        step.update::<S, 4>(state, &v[first..first + 4])
                    } else {
                        step.update::<S, 1>(state, &v[first..first + 1])
                    };
                    out.slice(at + first..at + first + n).copy_from_slice(&y[..n]);
                }
                row += n;
            }
        }
    }
}

/// A token's part in a head.
#[derive(Clone, Copy)]
struct Step<'a> {
    q: &'a [f32],
    k: &'a [f32],
    decay: f32,
    beta: f32,
}

impl Step<'_> {
    /// Moves `ROWS` rows of the state on and returns their outputs.
    ///
    /// # Safety
    /// In a kernel of `S`; `state` is `[ROWS, q.len()]`, `k` as long as `q`, `v` of `ROWS`.
    #[inline(always)]
    unsafe fn update<S: Simd, const ROWS: usize>(self, state: &mut [f32], v: &[f32]) -> [f32; 4] {
        let Self { q, k, decay, beta } = self;
        let dim = q.len();
        let mut sums = [S::zero(); 4];
        // SAFETY: vectors are inside rows of `dim`.
        unsafe {
            for i in (0..dim).step_by(S::LANES) {
                let k = load::<S>(k, i);
                for (state, sum) in state.chunks_exact(dim).zip(&mut sums).take(ROWS) {
                    *sum = S::fma(load::<S>(state, i), k, *sum);
                }
            }
            let remembered = S::sum4(sums);
            let mut deltas = [S::zero(); ROWS];
            for ((delta, remembered), v) in deltas.iter_mut().zip(remembered).zip(v) {
                *delta = S::splat((v - decay * remembered) * beta);
            }
            let mut sums = [S::zero(); 4];
            for i in (0..dim).step_by(S::LANES) {
                let (k, q) = (load::<S>(k, i), load::<S>(q, i));
                for ((state, sum), &delta) in state.chunks_exact_mut(dim).zip(&mut sums).zip(&deltas) {
                    let new = S::fma(delta, k, S::mul(load::<S>(state, i), S::splat(decay)));
                    save::<S>(state, i, new);
                    *sum = S::fma(new, q, *sum);
                }
            }
            S::sum4(sums)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{Rng, cpus, relative_error};

    #[test]
    fn the_convolution_continues_from_its_tail() {
        let mut rng = Rng::new(1);
        for (channels, taps, len) in [(5, 4, 1), (70, 4, 2), (70, 4, 9), (16, 1, 3), (130, 2, 6)] {
            let tail = rng.normals((taps - 1) * channels);
            let (x, weight) = (rng.normals(len * channels), rng.normals(channels * taps));
            let all: Vec<f64> = tail.iter().chain(&x).map(|&x| f64::from(x)).collect();
            let mut expected = Vec::new();
            for row in 0..len {
                for c in 0..channels {
                    let sum: f64 = (0..taps)
                        .map(|t| all[(row + t) * channels + c] * f64::from(weight[c * taps + t]))
                        .sum();
                    expected.push(sum / (1.0 + (-sum).exp()));
                }
            }
            for cpu in cpus() {
                let (mut after, mut out) = (tail.clone(), vec![0.0; x.len()]);
                causal_conv_silu(&cpu, &x, channels, &weight, &mut after, &mut out).unwrap();
                assert!(relative_error(&out, &expected) < 1e-6, "{cpu:?} {channels} {taps} {len}");
                let moved: Vec<f64> = after.iter().map(|&x| f64::from(x)).collect();
                assert_eq!(moved, all[len * channels..]);
            }
        }
    }

    #[test]
    fn gates_match_f64_and_do_not_overflow() {
        let a = [-200.0, -1.0, 0.0, 3.0, 60.0, 200.0];
        let b = [-200.0, 0.0, 200.0, 1.0, -1.0, 0.5];
        let (a_log, dt_bias) = ([0.5, -1.0], [0.1, -0.2]);
        let (mut decay, mut beta) = ([0.0; 6], [0.0; 6]);
        delta_gates(&a, &b, &a_log, &dt_bias, &mut decay, &mut beta).unwrap();
        for i in 0..6 {
            let x = f64::from(a[i] + dt_bias[i % 2]);
            let softplus = if x > 50.0 { x } else { x.exp().ln_1p() };
            let exact = (-f64::from(a_log[i % 2]).exp() * softplus).exp();
            assert!((f64::from(decay[i]) - exact).abs() < 1e-6);
            assert!((f64::from(beta[i]) - 1.0 / (1.0 + (-f64::from(b[i])).exp())).abs() < 1e-7);
        }
    }

    #[test]
    fn the_scan_matches_the_recurrence_in_f64_and_can_be_cut_anywhere() {
        let mut rng = Rng::new(2);
        for (key_heads, value_heads, key_dim, value_dim) in [(2, 4, 32, 40), (1, 1, 7, 3), (2, 2, 128, 16)] {
            let len = 9;
            let shape = DeltaShape { len, key_heads, value_heads, key_dim, value_dim };
            let scale = 1.0 / (key_dim as f32).sqrt();
            let scaled = |x: Vec<f32>| -> Vec<f32> { x.iter().map(|x| x * scale).collect() };
            let q = scaled(rng.normals(len * key_heads * key_dim));
            let k = scaled(rng.normals(len * key_heads * key_dim));
            let v = rng.normals(len * value_heads * value_dim);
            let decay: Vec<f32> = (0..len * value_heads).map(|_| 0.5 + 0.5 * rng.unit()).collect();
            let beta: Vec<f32> = (0..len * value_heads).map(|_| rng.unit()).collect();
            let start = rng.normals(value_heads * value_dim * key_dim);

            let mut s: Vec<f64> = start.iter().map(|&x| f64::from(x)).collect();
            let mut expected = vec![0.0; v.len()];
            for t in 0..len {
                for h in 0..value_heads {
                    let at = (t * key_heads + h / (value_heads / key_heads)) * key_dim;
                    for r in 0..value_dim {
                        let row = &mut s[(h * value_dim + r) * key_dim..][..key_dim];
                        row.iter_mut().for_each(|s| *s *= f64::from(decay[t * value_heads + h]));
                        let m: f64 = row.iter().zip(&k[at..]).map(|(s, &k)| s * f64::from(k)).sum();
                        let i = (t * value_heads + h) * value_dim + r;
                        let d = (f64::from(v[i]) - m) * f64::from(beta[t * value_heads + h]);
                        row.iter_mut().zip(&k[at..]).for_each(|(s, &k)| *s += d * f64::from(k));
                        expected[i] = row.iter().zip(&q[at..]).map(|(s, &q)| s * f64::from(q)).sum();
                    }
                }
            }
            for cpu in cpus() {
                let (mut state, mut out) = (start.clone(), vec![0.0; v.len()]);
                gated_delta(&cpu, shape, &q, &k, &v, &decay, &beta, &mut state, &mut out).unwrap();
                assert!(relative_error(&out, &expected) < 1e-6, "{cpu:?} {shape:?}");
                assert!(relative_error(&state, &s) < 1e-6, "{cpu:?} {shape:?}");

                let (mut cut_state, mut cut) = (start.clone(), vec![0.0; v.len()]);
                for (from, to) in [(0, 4), (4, 5), (5, 9)] {
                    let part = |x: &[f32]| {
                        let per_token = x.len() / len;
                        x[from * per_token..to * per_token].to_vec()
                    };
                    let shape = DeltaShape { len: to - from, ..shape };
                    let per_token = v.len() / len;
                    let out = &mut cut[from * per_token..to * per_token];
                    let (q, k, v) = (part(&q), part(&k), part(&v));
                    gated_delta(&cpu, shape, &q, &k, &v, &part(&decay), &part(&beta), &mut cut_state, out)
                        .unwrap();
                }
                assert_eq!((cut_state, cut), (state, out));
            }
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let cpu = &cpus()[0];
        let shape = DeltaShape { len: 1, key_heads: 2, value_heads: 3, key_dim: 4, value_dim: 4 };
        let z = [0.0; 64];
        let (mut state, mut out) = ([0.0; 48], [0.0; 12]);
        assert!(
            gated_delta(cpu, shape, &z[..8], &z[..8], &z[..12], &z[..3], &z[..3], &mut state, &mut out)
                .is_err()
        );
        let shape = DeltaShape { key_heads: 1, ..shape };
        assert!(
            gated_delta(cpu, shape, &z[..4], &z[..4], &z[..12], &z[..3], &z[..3], &mut state, &mut out)
                .is_ok()
        );
        assert!(
            gated_delta(cpu, shape, &z[..4], &z[..4], &z[..12], &z[..3], &z[..2], &mut state, &mut out)
                .is_err()
        );
        assert!(causal_conv_silu(cpu, &z[..8], 4, &z[..16], &mut [0.0; 11], &mut [0.0; 8]).is_err());
        assert!(causal_conv_silu(cpu, &z[..8], 3, &z[..12], &mut [0.0; 9], &mut [0.0; 8]).is_err());
        assert!(causal_conv_silu(cpu, &z[..8], 4, &[], &mut [], &mut [0.0; 8]).is_err());
    }
}
