use russet_kernels::ops::MlpCall;
use russet_mlx::Array;

use super::{
    Activation, GatedActivation, Linear, Loader, Norm, PlainActivation, Projections, Residual, project,
};
use crate::Result;

/// Sizes of an MLP, and what it is made of.
#[derive(Clone, Copy, Debug)]
pub struct MlpArgs {
    /// Width of the hidden states.
    pub hidden: i32,
    /// Width between its matrices.
    pub intermediate: i32,
    /// Whether its matrices have biases.
    pub bias: bool,
    /// What is applied between them.
    pub activation: Activation,
}

/// `down(activation(gate(x)) * up(x))`.
pub struct GatedMlp {
    gate_up: Projections<2>,
    down_proj: Linear,
    activation: GatedActivation,
}

impl GatedMlp {
    /// Takes `path.gate_proj`, `path.up_proj` and `path.down_proj`.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(loader: &mut Loader<'_>, path: &str, args: MlpArgs) -> Result<Self> {
        let MlpArgs { hidden, intermediate, bias, .. } = args;
        let mut linear =
            |name: &str| Linear::load(loader, &format!("{path}.{name}"), hidden, intermediate, bias);
        let gate_up = Projections::separate([linear("gate_proj")?, linear("up_proj")?]);
        Self::with_down(loader, path, gate_up, args)
    }

    /// Takes `path.gate_up_proj`, whose first half is the gate and which has no bias, and `path.down_proj`.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load_fused(loader: &mut Loader<'_>, path: &str, args: MlpArgs) -> Result<Self> {
        let rows = [args.intermediate; 2];
        let gate_up = Projections::load_fused(loader, &format!("{path}.gate_up_proj"), args.hidden, rows)?;
        Self::with_down(loader, path, gate_up, args)
    }

    fn with_down(
        loader: &mut Loader<'_>,
        path: &str,
        gate_up: Projections<2>,
        args: MlpArgs,
    ) -> Result<Self> {
        let MlpArgs { hidden, intermediate, bias, activation } = args;
        Ok(Self {
            gate_up,
            down_proj: Linear::load(loader, &format!("{path}.down_proj"), intermediate, hidden, bias)?,
            activation: GatedActivation::new(activation)?,
        })
    }

    /// The same with another activation.
    pub fn gated_by(self, activation: GatedActivation) -> Self {
        Self { activation, ..self }
    }

    /// `x` with `mlp(norm(x))` added as `residual` says.
    pub fn forward_add(&self, norm: Option<&Norm>, x: &Array, residual: &Residual) -> Result<Array> {
        if let (Some([(ops, gate), (_, up)]), Some((_, down))) =
            (self.gate_up.kernels(), self.down_proj.kernel())
        {
            let call = MlpCall {
                norm: norm.map(Norm::kernel).cloned(),
                inner: gate.clone(),
                gated: Some(up.clone()),
                output: down.clone(),
                activation: self.activation.kind,
                residual: residual.kernel(),
            };
            return Ok(ops.mlp(x, call)?);
        }
        let [gate, up] = self.gate_up.forward(norm, x)?;
        let y = self.down_proj.forward(&self.activation.forward(&gate, &up)?)?;
        residual.add(x, &y)
    }
}

/// `c_proj(activation(c_fc(x)))`.
pub struct PlainMlp {
    c_fc: Linear,
    c_proj: Linear,
    activation: PlainActivation,
}

impl PlainMlp {
    /// Takes `path.c_fc` and `path.c_proj`.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(loader: &mut Loader<'_>, path: &str, args: MlpArgs) -> Result<Self> {
        let MlpArgs { hidden, intermediate, bias, activation } = args;
        Ok(Self {
            c_fc: Linear::load(loader, &format!("{path}.c_fc"), hidden, intermediate, bias)?,
            c_proj: Linear::load(loader, &format!("{path}.c_proj"), intermediate, hidden, bias)?,
            activation: PlainActivation::new(activation)?,
        })
    }

    /// `x` with `mlp(norm(x))` added as `residual` says.
    pub fn forward_add(&self, norm: Option<&Norm>, x: &Array, residual: &Residual) -> Result<Array> {
        if let (Some((ops, inner)), Some((_, output))) = (self.c_fc.kernel(), self.c_proj.kernel()) {
            let call = MlpCall {
                norm: norm.map(Norm::kernel).cloned(),
                inner: inner.clone(),
                gated: None,
                output: output.clone(),
                activation: self.activation.kind,
                residual: residual.kernel(),
            };
            return Ok(ops.mlp(x, call)?);
        }
        let [inner] = project(norm, [&self.c_fc], x)?;
        let y = self.c_proj.forward(&self.activation.forward(&inner)?)?;
        residual.add(x, &y)
    }
}
