use std::sync::Arc;

use russet_kernels::ops::{Matrix, Ops};
use russet_mlx::{Array, Dtype, QuantizationMode, Quantized};

use super::{Activation, GatedActivation, GatedMlp, Linear, Loader, MlpArgs, Norm, Residual};
use crate::Result;

/// Sizes of the experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct ExpertSizes {
    /// Experts.
    pub count: i32,
    /// Width of the hidden states.
    pub hidden: i32,
    /// Width between the projections of an expert.
    pub intermediate: i32,
}

/// Gated MLPs of which a router chooses some for each token (`mlx_lm.models.switch_layers.SwitchGLU`):
/// `down(activation(gate(x)) * up(x))`, each projection a stack of matrices.
pub struct Experts {
    gate_proj: Stack,
    up_proj: Stack,
    down_proj: Stack,
    activation: GatedActivation,
}

/// The matrices `[experts, out, in]` of a projection (`SwitchLinear`, `QuantizedSwitchLinear`).
enum Stack {
    /// Transposed at load, `[experts, in, out]`.
    Dense(Array),
    /// With a factor for each expert, in some checkpoints of mode nvfp4.
    Quantized(Quantized, Option<Array>),
    /// For the CPU kernels.
    Kernel(Arc<Ops>, Arc<Matrix>),
}

/// Chosen rows from which the reference brings the rows of an expert together.
const SORTED_CHOICES: usize = 64;

impl Experts {
    /// Takes `path.gate_proj`, `path.up_proj` and `path.down_proj`.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(
        loader: &mut Loader<'_>,
        path: &str,
        sizes: ExpertSizes,
        activation: GatedActivation,
    ) -> Result<Self> {
        let ExpertSizes { count, hidden, intermediate } = sizes;
        let mut stack = |name: &str, inputs, outputs| {
            Stack::load(loader, &format!("{path}.{name}"), count, inputs, outputs)
        };
        Ok(Self {
            gate_proj: stack("gate_proj", hidden, intermediate)?,
            up_proj: stack("up_proj", hidden, intermediate)?,
            down_proj: stack("down_proj", intermediate, hidden)?,
            activation,
        })
    }

    /// `x` `[batch, seq, hidden]` through the experts `indices` `[batch, seq, chosen]` of each token, summed
    /// with `weights` of the same shape: `[batch, seq, hidden]`, in the type that weights and experts promote
    /// to.
    pub fn forward(&self, x: &Array, indices: &Array, weights: &Array) -> Result<Array> {
        self.mix(x, indices, weights, false)
    }

    /// [`Experts::forward`] in the type of the experts' outputs.
    pub fn forward_cast(&self, x: &Array, indices: &Array, weights: &Array) -> Result<Array> {
        self.mix(x, indices, weights, true)
    }

    fn mix(&self, x: &Array, indices: &Array, weights: &Array, cast: bool) -> Result<Array> {
        let stacks = [&self.gate_proj, &self.up_proj, &self.down_proj];
        if let [Stack::Kernel(ops, gate), Stack::Kernel(_, up), Stack::Kernel(_, down)] = stacks {
            // The router's choices are a view of all experts.
            let (indices, weights) = (indices.contiguous()?, weights.contiguous()?);
            return Ok(ops.experts(x, &indices, &weights, [gate, up, down], self.activation.kind)?);
        }
        let outputs = self.outputs(x, indices)?;
        let sum = outputs.multiply(&weights.expand_dims([-1])?)?.sum([-2], false)?;
        Ok(if cast { sum.astype(outputs.dtype())? } else { sum })
    }

    /// `[batch, seq, chosen, hidden]`
    fn outputs(&self, x: &Array, indices: &Array) -> Result<Array> {
        let x = x.expand_dims([-2, -3])?;
        if indices.size() < SORTED_CHOICES {
            return Ok(self.project(&x, indices, false)?.squeeze([-2])?);
        }
        let chosen = indices.dim(-1)?;
        let flat = indices.flatten(0, -1)?;
        let order = flat.argsort(0)?;
        let tokens = order.floor_divide(chosen)?;
        let x = x.flatten(0, -3)?.take(&tokens, 0)?;
        let y = self.project(&x, &flat.take(&order, 0)?, true)?;
        Ok(y.take(&order.argsort(0)?, 0)?.unflatten(0, indices.shape())?.squeeze([-2])?)
    }

    fn project(&self, x: &Array, indices: &Array, sorted: bool) -> Result<Array> {
        let up = self.up_proj.forward(x, indices, sorted)?;
        let gate = self.gate_proj.forward(x, indices, sorted)?;
        self.down_proj.forward(&self.activation.forward(&gate, &up)?, indices, sorted)
    }
}

impl Stack {
    fn load(loader: &mut Loader<'_>, path: &str, experts: i32, inputs: i32, outputs: i32) -> Result<Self> {
        if let Some(ops) = loader.numerics.kernels() {
            return Ok(Self::Kernel(ops.clone(), loader.expert_matrices(path, experts, outputs, inputs)?));
        }
        let weight = match loader.stored_stack(path, &[experts, outputs], inputs)?.into_quantized() {
            Err(weight) => return Ok(Self::Dense(weight.array.swap_axes(-1, -2)?)),
            Ok(weight) => weight,
        };
        let scale = format!("{path}.global_scale");
        let global_scale = match loader.weights.get(&scale) {
            Some(_) if weight.quantization.mode == QuantizationMode::Nvfp4 => {
                Some(loader.weights.take_as(&scale, &[experts], &[Dtype::F32])?.array)
            }
            _ => None,
        };
        Ok(Self::Quantized(weight, global_scale))
    }

    fn forward(&self, x: &Array, indices: &Array, sorted: bool) -> Result<Array> {
        Ok(match self {
            Self::Dense(weights) => x.gather_mm(weights, None, Some(indices), sorted)?,
            Self::Quantized(weights, scale) => {
                weights.gather_matmul(x, None, Some(indices), true, scale.as_ref(), sorted)?
            }
            Self::Kernel(..) => {
                return Err(russet_mlx::Error::new("the CPU kernels run whole experts").into());
            }
        })
    }
}

/// The indices of the `count` largest of the last dimension in the order of the reference's partition, and
/// the values there.
pub fn top_k(scores: &Array, count: i32) -> Result<(Array, Array)> {
    let indices = scores.argpartition(-count, -1)?.slice_axis(-1, -count, i32::MAX)?;
    let values = scores.take_along_axis(&indices, -1)?;
    Ok((indices, values))
}

/// Sizes of a [`SparseMlp`], and what it does.
#[derive(Clone, Copy, Debug)]
pub struct SparseArgs {
    /// Sizes of the experts of which some are chosen.
    pub experts: ExpertSizes,
    /// Experts chosen for each token.
    pub chosen: i32,
    /// Whether the probabilities of the chosen experts are made to add up to 1.
    pub normalize: bool,
    /// Width between the projections of an expert that every token takes, if there is one.
    pub shared_intermediate: Option<i32>,
}

/// Experts behind a router that takes the most likely of all (`Qwen3MoeSparseMoeBlock`), and in some models one
/// for every token besides (`Qwen3NextSparseMoeBlock`).
pub struct SparseMlp {
    gate: Linear,
    switch_mlp: Experts,
    chosen: i32,
    normalize: bool,
    shared: Option<Box<SharedExpert>>,
}

/// An expert for every token, weighed by a gate of its own.
struct SharedExpert {
    mlp: GatedMlp,
    gate: Linear,
}

impl SparseMlp {
    /// Takes `path.gate` and `path.switch_mlp`, and of a shared expert `path.shared_expert` and
    /// `path.shared_expert_gate`.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(loader: &mut Loader<'_>, path: &str, args: SparseArgs) -> Result<Self> {
        let SparseArgs { experts, chosen, normalize, shared_intermediate } = args;
        let hidden = experts.hidden;
        let activation = GatedActivation::new(Activation::Silu)?;
        let shared = match shared_intermediate {
            None => None,
            Some(intermediate) => {
                let args = MlpArgs { hidden, intermediate, bias: false, activation: Activation::Silu };
                Some(Box::new(SharedExpert {
                    mlp: GatedMlp::load(loader, &format!("{path}.shared_expert"), args)?,
                    gate: Linear::load(loader, &format!("{path}.shared_expert_gate"), hidden, 1, false)?,
                }))
            }
        };
        Ok(Self {
            gate: Linear::load(loader, &format!("{path}.gate"), hidden, experts.count, false)?,
            switch_mlp: Experts::load(loader, &format!("{path}.switch_mlp"), experts, activation)?,
            chosen,
            normalize,
            shared,
        })
    }

    /// `x` `[batch, seq, hidden]` with `mlp(norm(x))` added.
    pub fn forward_add(&self, norm: &Norm, x: &Array) -> Result<Array> {
        Ok(x.add(&self.forward(&norm.forward(x)?)?)?)
    }

    fn forward(&self, x: &Array) -> Result<Array> {
        let probabilities = self.gate.forward(x)?.softmax(-1, true)?;
        let (indices, mut scores) = top_k(&probabilities, self.chosen)?;
        if self.normalize {
            scores = scores.divide(&scores.sum([-1], true)?)?;
        }
        match &self.shared {
            None => self.switch_mlp.forward_cast(x, &indices, &scores),
            Some(shared) => {
                let chosen = self.switch_mlp.forward(x, &indices, &scores)?;
                Ok(chosen.add(&shared.forward(x)?)?)
            }
        }
    }
}

impl SharedExpert {
    fn forward(&self, x: &Array) -> Result<Array> {
        let y = self.mlp.forward_add(None, x, &Residual::Replaced)?;
        Ok(self.gate.forward(x)?.sigmoid()?.multiply(&y)?)
    }
}
