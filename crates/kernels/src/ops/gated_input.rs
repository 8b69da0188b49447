//! Inputs of single layers as an operation.

use std::sync::Arc;

use russet_mlx::{Array, CpuOp, Dtype, Error, Input, Output, OutputSpec, Result, custom};

use super::{
    Matrix, Norm, Ops, Residual, SCRATCH, Scratch, add_product, error, one, rows_of, sequence_rows, take,
    wrong_count,
};
use crate::cpu::{self, Activation};

/// Arguments of [`Ops::gated_input`].
pub struct GatedInputCall {
    /// The projection of the hidden states that is activated and multiplies the input.
    pub gate: Arc<Matrix>,
    /// The projection of the result.
    pub projection: Arc<Matrix>,
    /// The norm of that.
    pub norm: Arc<Norm>,
    /// The activation.
    pub activation: Activation,
    /// Which of the inputs.
    pub layer: usize,
}

impl Ops {
    /// `x` `[.., hidden]` with `norm(projection(activation(gate(x)) * input))` added, where `input` is number
    /// `layer` of `inputs` `[.., layers, width]`.
    pub fn gated_input(self: &Arc<Self>, x: &Array, inputs: &Array, call: GatedInputCall) -> Result<Array> {
        let op = GatedInput { ops: self.clone(), call };
        let output = OutputSpec::in_place(x.shape(), Dtype::F32, 0);
        one(custom(op, &[x.clone(), inputs.clone()], vec![output])?)
    }
}

struct GatedInput {
    ops: Arc<Ops>,
    call: GatedInputCall,
}

impl CpuOp for GatedInput {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        // The output starts as the hidden states.
        let ([inputs], [x]) = (inputs, outputs) else { return Err(wrong_count()) };
        let GatedInputCall { gate, projection, norm, activation, layer } = &self.call;
        let inputs = inputs.as_slice::<f32>()?;
        let width = gate.rows();
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch { prepared, normalized: buffer, first, second, third, .. } = scratch;
            let sequence = sequence_rows(x.shape());
            let hidden = x.as_mut_slice::<f32>()?;
            let rows = rows_of(hidden, gate.columns())?;
            let layers = inputs.len() / (rows * width).max(1);
            if *layer >= layers || inputs.len() != rows * layers * width {
                return Err(Error::new("the inputs are not those of the rows and layers"));
            }
            let gates = take(first, rows * width);
            self.ops.multiply(hidden, sequence, prepared, &mut [(gate, &mut *gates)])?;
            let own = take(second, rows * width);
            let wanted = inputs.chunks_exact(width).skip(*layer).step_by(layers);
            own.chunks_exact_mut(width).zip(wanted).for_each(|(own, input)| own.copy_from_slice(input));
            let gated = take(third, rows * width);
            cpu::gated(&self.ops.cpu, *activation, gates, own, width, width, gated).map_err(error)?;
            let residual = Residual::Norm(norm.clone());
            add_product(&self.ops, (projection, &residual), gated, prepared, [buffer, first], x)
        })
    }
}
