//! Products with the experts that a router chose for each token (`gather_qmm`, `gather_mm`): only their weights are
//! read.

use super::Cpu;
use super::error::{KernelError, check_len, parameter, product};
use super::input::{Precision, PreparedInput};
use super::matmul::{Product, Weights, matmul};
use super::quant::{Interleaved, PANEL};

/// The experts of a layer's projection, stacked: expert e has rows `e * rows..(e + 1) * rows`.
#[derive(Debug, Clone, Copy)]
pub enum Experts<'a> {
    /// As stored, dense or quantized.
    Stored(Weights<'a>),
    /// Interleaved at load; an expert's rows are whole panels of 16.
    Interleaved(&'a Interleaved),
}

/// Buffers of [`expert_matmul`], kept between calls.
#[derive(Debug, Default)]
pub struct ExpertScratch {
    order: Vec<usize>,
    x: Vec<f32>,
    y: Vec<f32>,
    inputs: Vec<PreparedInput>,
}

/// For each choice (token, expert), in order, row `token` of `x` times the expert's matrix of `rows` rows, to the
/// choice's row of `out`, `[choices, rows]`. The choices of one expert are one product. `alone` says that the tokens are
/// single ones of several sequences, each of which is computed as if it were alone.
///
/// # Errors
/// Where a token or an expert does not exist, the experts are not whole matrices of `rows` rows (of whole panels
/// where interleaved), or a length disagrees.
#[allow(clippy::too_many_arguments, reason = "the operands of a gathered product")]
pub fn expert_matmul(
    cpu: &Cpu,
    experts: Experts<'_>,
    rows: usize,
    x: &[f32],
    choices: &[(usize, usize)],
    alone: bool,
    precision: Precision,
    scratch: &mut ExpertScratch,
    out: &mut [f32],
) -> Result<(), KernelError> {
    let (all_rows, cols) = match experts {
        Experts::Stored(weights) => (weights.rows(), weights.cols()),
        Experts::Interleaved(weights) => (weights.rows(), weights.cols()),
    };
    if rows == 0 || !all_rows.is_multiple_of(rows) {
        return Err(parameter("expert rows", rows, "a divisor of the stack's"));
    }
    if matches!(experts, Experts::Interleaved(_)) && !rows.is_multiple_of(PANEL) {
        return Err(parameter("expert rows", rows, "a multiple of 16 where interleaved"));
    }
    if !x.len().is_multiple_of(cols) {
        return Err(parameter("expert input length", x.len(), "whole rows"));
    }
    check_len("expert output", out.len(), product("expert output", &[choices.len(), rows])?)?;
    let (tokens, count) = (x.len() / cols, all_rows / rows);
    if let Some(choice) = choices.iter().find(|&&(token, expert)| token >= tokens || expert >= count) {
        return Err(parameter("expert choice", format!("{choice:?}"), "of an existing token and expert"));
    }
    let expert_weights = |expert: usize| -> Result<Weights<'_>, KernelError> {
        let range = expert * rows..(expert + 1) * rows;
        match experts {
            Experts::Stored(weights) => weights.slice_rows(range),
            Experts::Interleaved(weights) => Ok(weights.slice_rows(range)?.into()),
        }
    };

    let ExpertScratch { order, x: gathered, y, inputs } = scratch;
    order.clear();
    order.extend(0..choices.len());
    order.sort_by_key(|&choice| choices[choice].1);
    y.resize(choices.len() * rows, 0.0);
    let runs = || order.chunk_by(|&a, &b| choices[a].1 == choices[b].1);
    let used = runs().count();
    if inputs.len() < used {
        inputs.resize_with(used, PreparedInput::default);
    }
    for (run, input) in runs().zip(&mut *inputs) {
        gathered.clear();
        for &choice in run {
            let token = choices[choice].0;
            gathered.extend_from_slice(&x[token * cols..(token + 1) * cols]);
        }
        let rows = (run.len(), if alone { 1 } else { run.len() });
        input.prepare_batch(cpu, gathered, rows, precision, expert_weights(choices[run[0]].1)?)?;
    }
    let mut products = Vec::with_capacity(used);
    let mut rest = y.as_mut_slice();
    for (run, input) in runs().zip(&*inputs) {
        let (y, after) = rest.split_at_mut(run.len() * rows);
        rest = after;
        products.push(Product::new(expert_weights(choices[run[0]].1)?, input, y)?);
    }
    matmul(cpu, &mut products)?;
    for (&choice, y) in order.iter().zip(y.chunks_exact(rows)) {
        out[choice * rows..(choice + 1) * rows].copy_from_slice(y);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{RandomMatrix, Rng, cpus, dequantized, stored};
    use crate::cpu::{DenseMatrix, FloatType, QuantFormat};

    #[test]
    fn each_choice_gets_its_token_times_its_expert() {
        let mut rng = Rng::new(1);
        let (experts, rows, cols, tokens) = (5, 32, 64, 7);
        let format = QuantFormat::Affine { bits: 4, group: 32, scales: FloatType::Bf16 };
        let quantized = RandomMatrix::new(format, experts * rows, cols, &mut rng);
        let data = stored(FloatType::F16, &rng.normals(experts * rows * cols), 1);
        let dense = DenseMatrix::new(FloatType::F16, experts * rows, cols, &data[1..]).unwrap();
        let dense_weights: Vec<f64> =
            data[1..].chunks_exact(2).map(|b| f64::from(FloatType::F16.read(b))).collect();
        let quantized_weights = dequantized(&quantized.view());
        let x = rng.normals(tokens * cols);
        for count in [0, 1, 2, 20] {
            let choices: Vec<(usize, usize)> =
                (0..count).map(|_| (rng.next() as usize % tokens, rng.next() as usize % experts)).collect();
            for cpu in cpus() {
                let interleaved = Interleaved::new(&cpu, &[quantized.view()]).unwrap();
                let mut scratch = ExpertScratch::default();
                for (stack, weights) in [
                    (Experts::Stored(quantized.view().into()), &quantized_weights),
                    (Experts::Interleaved(&interleaved), &quantized_weights),
                    (Experts::Stored(dense.into()), &dense_weights),
                ] {
                    let mut out = vec![f32::NAN; count * rows];
                    expert_matmul(
                        &cpu,
                        stack,
                        rows,
                        &x,
                        &choices,
                        false,
                        Precision::Int16,
                        &mut scratch,
                        &mut out,
                    )
                    .unwrap();
                    for (&(token, expert), y) in choices.iter().zip(out.chunks_exact(rows)) {
                        for (row, &y) in y.iter().enumerate() {
                            let w = &weights[(expert * rows + row) * cols..][..cols];
                            let terms = w.iter().zip(&x[token * cols..]).map(|(w, &x)| w * f64::from(x));
                            let (exact, size) = terms.fold((0.0, 0.0), |(s, m), t| (s + t, m + t.abs()));
                            assert!((f64::from(y) - exact).abs() <= 1e-4 * size, "{cpu:?} {stack:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn choices_outside_the_stack_are_refused() {
        let mut rng = Rng::new(2);
        let format = QuantFormat::Affine { bits: 4, group: 32, scales: FloatType::F16 };
        let matrix = RandomMatrix::new(format, 40, 32, &mut rng);
        let cpu = &cpus()[0];
        let mut scratch = ExpertScratch::default();
        let x = [0.0; 64];
        let stack = Experts::Stored(matrix.view().into());
        let mut run = |stack, rows, choices: &[(usize, usize)], out: &mut [f32]| {
            expert_matmul(cpu, stack, rows, &x, choices, false, Precision::Int16, &mut scratch, out)
        };
        assert!(run(stack, 20, &[(1, 1)], &mut [0.0; 20]).is_ok());
        assert!(run(stack, 20, &[(2, 1)], &mut [0.0; 20]).is_err());
        assert!(run(stack, 20, &[(1, 2)], &mut [0.0; 20]).is_err());
        assert!(run(stack, 20, &[(1, 1)], &mut [0.0; 19]).is_err());
        assert!(run(stack, 15, &[(1, 1)], &mut [0.0; 15]).is_err());
        let interleaved = Interleaved::new(cpu, &[matrix.view()]).unwrap();
        assert!(run(Experts::Interleaved(&interleaved), 20, &[(1, 1)], &mut [0.0; 20]).is_err());
    }
}
