use std::sync::Arc;

use russet_kernels::cpu::Rotations;
use russet_kernels::ops;
use russet_mlx::fast::{Mask, scaled_dot_product_attention};
use russet_mlx::{Array, select};

use super::{Linear, Loader, Norm, NormKind, Positions, Residual, Rope};
use crate::cache::{LayerCache, causal_mask};
use crate::{Error, Result};

/// Head counts and widths of an attention layer, and what it is made of.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs {
    /// Width of the hidden states.
    pub hidden: i32,
    /// Query heads.
    pub heads: i32,
    /// Key and value heads.
    pub kv_heads: i32,
    /// Width of a head.
    pub head_dim: i32,
    /// Factor of the scores.
    pub scale: f64,
    /// Whether queries and keys are rotated.
    pub rotary: bool,
    /// Norm of queries and keys.
    pub qk_norm: QkNorm,
    /// Where given, scores `s` become `softcap * tanh(s / softcap)`.
    pub softcap: Option<f64>,
    /// Whether each query has a gate beside it, whose sigmoid multiplies the head's output.
    pub output_gate: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
}

/// Root-mean-square norms of queries and keys before they are rotated (`q_norm`, `k_norm`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QkNorm {
    /// None.
    None,
    /// Of each head.
    PerHead {
        /// Added to the mean square.
        eps: f64,
    },
    /// Of all heads together.
    AllHeads {
        /// Added to the mean square.
        eps: f64,
    },
}

/// Attention over a cache, from projected queries, keys and values to the projected output.
pub struct Attention {
    o_proj: Linear,
    qk_norms: Option<[Norm; 2]>,
    args: AttentionArgs,
}

/// What all attention layers of one kind share in a call.
pub struct AttentionCall<'a> {
    rope: &'a Rope,
    mask: Mask,
    window: Option<i32>,
    positions: Positions,
    /// For the CPU kernels, which need no mask.
    rotations: Option<Arc<Rotations>>,
}

impl<'a> AttentionCall<'a> {
    /// Prepares a call with `length` new tokens for layers like the one with `cache`, before any of them
    /// is updated.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn new(rope: &'a Rope, cache: &LayerCache, length: i32, window: Option<i32>) -> Result<Self> {
        let (mask, positions) = (cache.mask(length, window)?, Positions::after(cache)?);
        let rotations = match cache {
            LayerCache::Kernel(cache) => Some(Arc::new(rope.rotations(cache.offset(), length))),
            _ => None,
        };
        Ok(Self { rope, mask, window, positions, rotations })
    }
}

impl Attention {
    /// Takes `path.o_proj`, and with norms `path.q_norm` and `path.k_norm`.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(loader: &mut Loader<'_>, path: &str, args: AttentionArgs) -> Result<Self> {
        let AttentionArgs { hidden, heads, kv_heads, head_dim, .. } = args;
        let o_proj = format!("{path}.o_proj");
        let o_proj = Linear::load(loader, &o_proj, heads * head_dim, hidden, args.output_bias)?;
        let mut norms = |eps, sizes: [i32; 2]| {
            let mut norm =
                |name: &str, size| Norm::load(loader, &format!("{path}.{name}"), NormKind::Rms, size, eps);
            Ok::<_, Error>([norm("q_norm", sizes[0])?, norm("k_norm", sizes[1])?])
        };
        let qk_norms = match args.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead { eps } => Some(norms(eps, [head_dim, head_dim])?),
            QkNorm::AllHeads { eps } => Some(norms(eps, [heads * head_dim, kv_heads * head_dim])?),
        };
        Ok(Self { o_proj, qk_norms, args })
    }

    /// `x` with `o_proj(attention(q, k, v))` added as `residual` says; `q`, `k`, `v` are
    /// `[batch, seq, heads * head_dim]`. With gates, `q` has that of each head behind its query.
    ///
    /// # Errors
    /// When the cache is not of the kind that computes here.
    pub fn forward_add(
        &self,
        qkv: &[Array; 3],
        x: &Array,
        residual: &Residual,
        call: &AttentionCall<'_>,
        cache: &mut LayerCache,
    ) -> Result<Array> {
        match (self.o_proj.kernel(), cache) {
            (Some((ops, output)), LayerCache::Kernel(cache)) => {
                let AttentionArgs { heads, kv_heads, head_dim, scale, rotary, softcap, .. } = self.args;
                let [queries, keys, values] = qkv;
                let length = queries.dim(1)?;
                let offset = cache.offset() as usize;
                let append = cache.begin_append(length, kv_heads as usize, head_dim as usize)?;
                let kernel_call = ops::AttentionCall {
                    qk_norms: self
                        .qk_norms
                        .as_ref()
                        .map(|norms| norms.each_ref().map(|n| n.kernel().clone())),
                    output: output.clone(),
                    heads: heads as usize,
                    kv_heads: kv_heads as usize,
                    head_dim: head_dim as usize,
                    scale: scale as f32,
                    softcap: softcap.map(|cap| cap as f32),
                    output_gate: self.args.output_gate,
                    window: call.window.map(|w| w as usize),
                    rotations: call.rotations.clone().filter(|_| rotary),
                    traditional: call.rope.is_traditional(),
                    cache: append.buffer,
                    copy_from: append.copy_from,
                    offset,
                    residual: residual.kernel(),
                };
                let out = ops.attention(kernel_call, [queries, keys, values], x, append.after)?;
                cache.end_append(out.appended, length);
                Ok(out.hidden)
            }
            (Some(_), _) | (None, LayerCache::Kernel(_)) => {
                Err(Error::Input("the cache was made for other numerics than the model's".into()))
            }
            (None, cache) => residual.add(x, &self.forward(qkv, call, cache)?),
        }
    }

    /// `o_proj(attention(q, k, v))` with MLX.
    fn forward(
        &self,
        [queries, keys, values]: &[Array; 3],
        call: &AttentionCall<'_>,
        cache: &mut LayerCache,
    ) -> Result<Array> {
        let AttentionArgs { heads, kv_heads, head_dim, scale, rotary, softcap, .. } = self.args;
        let (batch, length) = (queries.dim(0)?, queries.dim(1)?);
        let (queries, gates) = match self.args.output_gate {
            false => (queries.clone(), None),
            true => {
                let both = queries.reshape([batch, length, heads, -1])?;
                let gates = both.slice_axis(-1, head_dim, i32::MAX)?.reshape([batch, length, -1])?;
                (both.slice_axis(-1, 0, head_dim)?, Some(gates))
            }
        };
        let [q_norm, k_norm] = match &self.qk_norms {
            Some(norms) => norms.each_ref().map(Some),
            None => [None, None],
        };
        let mut queries = self.split_heads(&queries, heads, q_norm)?;
        let mut keys = self.split_heads(keys, kv_heads, k_norm)?;
        let values = self.split_heads(values, kv_heads, None)?;
        if rotary {
            queries = call.rope.forward(&queries, &call.positions)?;
            keys = call.rope.forward(&keys, &call.positions)?;
        }
        let (keys, values) = cache.update(&keys, &values)?;

        let out = match softcap {
            None => scaled_dot_product_attention(&queries, &keys, &values, scale as f32, &call.mask, None)?,
            Some(cap) => capped_attention(&queries, &keys, &values, scale, cap, &call.mask)?,
        };
        let out = out.transpose([0, 2, 1, 3])?.reshape([batch, length, -1])?;
        self.o_proj.forward(&match gates {
            None => out,
            Some(gates) => out.multiply(&gates.sigmoid()?)?,
        })
    }

    /// `[batch, seq, heads * head_dim]` → `[batch, heads, seq, head_dim]`, normalized.
    fn split_heads(&self, x: &Array, heads: i32, norm: Option<&Norm>) -> Result<Array> {
        let (batch, length) = (x.dim(0)?, x.dim(1)?);
        let split = |x: &Array| x.reshape([batch, length, heads, -1]);
        let x = match (norm, self.args.qk_norm) {
            (Some(norm), QkNorm::AllHeads { .. }) => split(&norm.forward(x)?)?,
            (Some(norm), _) => norm.forward(&split(x)?)?,
            (None, _) => split(x)?,
        };
        Ok(x.transpose([0, 2, 1, 3])?)
    }
}

/// Attention whose scores `s` become `cap * tanh(s / cap)` (`mlx_lm.models.gemma2`): MLX has no fused
/// operation for it.
fn capped_attention(
    queries: &Array,
    keys: &Array,
    values: &Array,
    scale: f64,
    cap: f64,
    mask: &Mask,
) -> Result<Array> {
    let shape = queries.shape();
    let (batch, heads, length, head_dim) = (shape[0], shape[1], shape[2], shape[3]);
    let (kv_heads, total) = (keys.dim(1)?, keys.dim(2)?);
    let mut queries = queries.multiply(scale)?;
    let (mut keys, mut values) = (keys.clone(), values.clone());
    if heads > kv_heads {
        queries = queries.reshape([batch, kv_heads, heads / kv_heads, length, head_dim])?;
        (keys, values) = (keys.expand_dims([2])?, values.expand_dims([2])?);
    }
    let scores = queries.matmul(&keys.swap_axes(-1, -2)?)?;
    let mut scores = scores.divide(cap)?.tanh()?.multiply(cap)?;
    let mask = match mask {
        Mask::None => None,
        Mask::Causal => Some(causal_mask(length, total - length, None)?),
        Mask::Array(mask) => Some(mask.clone()),
    };
    if let Some(mask) = mask {
        // A mask for each row of a batch needs the axis of grouped heads too.
        let mask = if mask.ndim() == 4 && heads > kv_heads { mask.expand_dims([2])? } else { mask };
        scores = select(&mask, &scores, scores.dtype().finite_min())?;
    }
    let out = scores.softmax(-1, true)?.matmul(&values)?;
    Ok(if heads > kv_heads { out.reshape([batch, heads, length, head_dim])? } else { out })
}
