//! Mixtures of experts as an operation.

use std::sync::Arc;

use russet_mlx::{Array, CpuOp, Dtype, Error, Input, Output, OutputSpec, Result, custom};

use super::{Matrix, Ops, SCRATCH, Scratch, Storage, error, one, rows_of, sequence_rows, take, wrong_count};
use crate::cpu::{self, Activation, DenseMatrix};

impl Ops {
    /// For each row of `x` `[.., hidden]` the sum of `weights` times
    /// `down(activation(gate(x)) * up(x))` over the experts that `indices` names. `indices` (u32) and
    /// `weights` (f32) are `[.., chosen]`; the matrices are stacks of experts.
    pub fn experts(
        self: &Arc<Self>,
        x: &Array,
        indices: &Array,
        weights: &Array,
        [gate, up, down]: [&Arc<Matrix>; 3],
        activation: Activation,
    ) -> Result<Array> {
        if gate.rows() != up.rows() || [up.experts, down.experts] != [gate.experts; 2] {
            return Err(Error::new("gate, up and down projections do not fit"));
        }
        let op =
            Experts { ops: self.clone(), gate: gate.clone(), up: up.clone(), down: down.clone(), activation };
        let inputs = [x.clone(), indices.clone(), weights.clone()];
        one(custom(op, &inputs, vec![OutputSpec::new(x.shape(), Dtype::F32)])?)
    }

    /// For each choice (row, expert) the product of a row of `x` with a matrix of the stack. With the choices stands
    /// whether the rows are single ones of several sequences.
    fn expert_products(
        &self,
        stack: &Matrix,
        x: &[f32],
        (choices, alone): (&[(usize, usize)], bool),
        scratch: &mut cpu::ExpertScratch,
        out: &mut [f32],
    ) -> Result<()> {
        let experts = match (stack.interleaved.get(), &stack.storage) {
            (Some(matrix), _) => cpu::Experts::Interleaved(matrix),
            (None, Storage::Dense { float, rows, columns, values }) => cpu::Experts::Stored(
                DenseMatrix::new(*float, *rows, *columns, values.bytes()).map_err(error)?.into(),
            ),
            (None, Storage::Quantized(stored)) => cpu::Experts::Stored(stored.view().map_err(error)?.into()),
        };
        let rows = stack.rows() / stack.experts;
        cpu::expert_matmul(&self.cpu, experts, rows, x, choices, alone, self.precision, scratch, out)
            .map_err(error)
    }
}

struct Experts {
    ops: Arc<Ops>,
    gate: Arc<Matrix>,
    up: Arc<Matrix>,
    down: Arc<Matrix>,
    activation: Activation,
}

impl CpuOp for Experts {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        let ([x, indices, weights], [out]) = (inputs, outputs) else { return Err(wrong_count()) };
        let alone = sequence_rows(x.shape()) == 1;
        let (x, out) = (x.as_slice::<f32>()?, out.as_mut_slice::<f32>()?);
        let (indices, weights) = (indices.as_slice::<u32>()?, weights.as_slice::<f32>()?);
        let (columns, width) = (self.gate.columns(), self.gate.rows() / self.gate.experts);
        let rows = rows_of(x, columns)?;
        if rows == 0 {
            return Ok(());
        }
        let chosen = indices.len() / rows;
        if chosen == 0 || indices.len() != rows * chosen || weights.len() != indices.len() {
            return Err(Error::new("not the same number of experts for each row"));
        }
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch { experts, choices, normalized: products, first, second, third, .. } = scratch;
            choices.clear();
            choices.extend(indices.iter().enumerate().map(|(i, &expert)| (i / chosen, expert as usize)));
            let (gate, up) = (take(first, choices.len() * width), take(second, choices.len() * width));
            self.ops.expert_products(&self.gate, x, (choices, alone), experts, gate)?;
            self.ops.expert_products(&self.up, x, (choices, alone), experts, up)?;
            let inner = take(third, choices.len() * width);
            cpu::gated(&self.ops.cpu, self.activation, gate, up, width, width, inner).map_err(error)?;
            // A row of its own for each choice now.
            choices.iter_mut().enumerate().for_each(|(i, choice)| choice.0 = i);
            let products = take(products, choices.len() * columns);
            self.ops.expert_products(&self.down, inner, (choices, alone), experts, products)?;
            out.fill(0.0);
            let rows = out.chunks_exact_mut(columns).zip(products.chunks_exact(chosen * columns));
            for ((out, products), weights) in rows.zip(weights.chunks_exact(chosen)) {
                for (product, &weight) in products.chunks_exact(columns).zip(weights) {
                    out.iter_mut().zip(product).for_each(|(y, p)| *y += weight * p);
                }
            }
            Ok(())
        })
    }
}
