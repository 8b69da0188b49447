use russet_kernels::ops::GatedInputCall;
use russet_mlx::Array;

use super::{Activation, Linear, Loader, Norm, NormKind, PlainActivation};
use crate::Result;

/// Adds a layer's own input, gated by the hidden states (`mlx_lm.models.gemma4_text.DecoderLayer`):
/// `x + norm(projection(gelu(gate(x)) * input))`.
pub struct PerLayerInput {
    gate: Linear,
    projection: Linear,
    norm: Norm,
    activation: PlainActivation,
}

impl PerLayerInput {
    /// Takes `path.per_layer_input_gate`, `path.per_layer_projection` and `path.post_per_layer_input_norm`.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(loader: &mut Loader<'_>, path: &str, hidden: i32, width: i32, eps: f64) -> Result<Self> {
        let mut linear = |name: &str, inputs, outputs| {
            Linear::load(loader, &format!("{path}.{name}"), inputs, outputs, false)
        };
        Ok(Self {
            gate: linear("per_layer_input_gate", hidden, width)?,
            projection: linear("per_layer_projection", width, hidden)?,
            norm: Norm::load(
                loader,
                &format!("{path}.post_per_layer_input_norm"),
                NormKind::Rms,
                hidden,
                eps,
            )?,
            activation: PlainActivation::new(Activation::GeluTanh)?,
        })
    }

    /// `x` is `[batch, seq, hidden]`; `inputs` are those of all layers `[batch, seq, layers, width]`, of which
    /// `layer` is added.
    pub fn forward_add(&self, x: &Array, inputs: &Array, layer: i32) -> Result<Array> {
        if let (Some((ops, gate)), Some((_, projection))) = (self.gate.kernel(), self.projection.kernel()) {
            let call = GatedInputCall {
                gate: gate.clone(),
                projection: projection.clone(),
                norm: self.norm.kernel().clone(),
                activation: self.activation.kind,
                layer: layer as usize,
            };
            return Ok(ops.gated_input(x, inputs, call)?);
        }
        let input = inputs.slice_axis(2, layer, layer + 1)?.squeeze([2])?;
        let gated = self.activation.forward(&self.gate.forward(x)?)?.multiply(&input)?;
        Ok(x.add(&self.norm.forward(&self.projection.forward(&gated)?)?)?)
    }
}
