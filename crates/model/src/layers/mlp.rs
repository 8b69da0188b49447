use russet_kernels::cpu::Activation;
use russet_mlx::Array;

use super::{Linear, Loader, RmsNorm, Swiglu};
use crate::Result;

/// `down(swiglu(gate(x), up(x)))`.
pub struct GatedMlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    swiglu: Swiglu,
}

impl GatedMlp {
    /// Takes `path.gate_proj`, `path.up_proj` and `path.down_proj`.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(
        loader: &mut Loader<'_>,
        path: &str,
        hidden: i32,
        intermediate: i32,
        bias: bool,
    ) -> Result<Self> {
        let mut linear = |name: &str, inputs, outputs| {
            Linear::load(loader, &format!("{path}.{name}"), inputs, outputs, bias)
        };
        Ok(Self {
            gate_proj: linear("gate_proj", hidden, intermediate)?,
            up_proj: linear("up_proj", hidden, intermediate)?,
            down_proj: linear("down_proj", intermediate, hidden)?,
            swiglu: Swiglu::new()?,
        })
    }

    /// `x + mlp(norm(x))`.
    pub fn forward_add(&self, norm: &RmsNorm, x: &Array) -> Result<Array> {
        let kernels = (self.gate_proj.kernel(), self.up_proj.kernel(), self.down_proj.kernel());
        if let (Some((ops, gate)), Some((_, up)), Some((_, down))) = kernels {
            return Ok(ops.gated_mlp(x, norm.kernel(), [gate, up, down], Activation::Silu)?);
        }
        let normalized = norm.forward(x)?;
        let (gate, up) = (self.gate_proj.forward(&normalized)?, self.up_proj.forward(&normalized)?);
        self.down_proj.forward_add(&self.swiglu.forward(&gate, &up)?, x)
    }
}
