use std::sync::Arc;

use russet_kernels::cpu::Rotations;
use russet_kernels::ops::{self, KvBuffer, Matrix};
use russet_mlx::fast::{Mask, scaled_dot_product_attention};
use russet_mlx::{Array, select};

use super::{Linear, Loader, Norm, NormKind, Positions, Residual, Rope};
use crate::cache::{KernelKvCache, LayerCache, causal_mask};
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
    /// Norm of each value head, without a gain, by what is added to the mean square.
    pub value_norm: Option<f64>,
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
    /// Of each query head alone, where the keys are those of another layer.
    PerQueryHead {
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
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
    v_norm: Option<Norm>,
    args: AttentionArgs,
}

/// The keys and values that a layer attended to in a call, for layers that have none of their own.
pub struct SharedKv(KeysValues);

enum KeysValues {
    Arrays(Array, Array),
    /// Those of each row for the CPU kernels, with what must have run before.
    Kernel(Vec<(KvBuffer, Option<Array>)>),
}

impl SharedKv {
    /// Those of the layer with `cache`, after it has run.
    ///
    /// # Errors
    /// When the layer has not run.
    pub fn of(cache: &LayerCache) -> Result<Self> {
        Ok(Self(match cache.kernel_rows() {
            Some(rows) => {
                KeysValues::Kernel(rows.iter().map(KernelKvCache::appended_rows).collect::<Result<_>>()?)
            }
            None => {
                let (keys, values) = cache.keys_values()?;
                KeysValues::Arrays(keys, values)
            }
        }))
    }
}

/// What all attention layers of one kind share in a call.
pub struct AttentionCall<'a> {
    rope: &'a Rope,
    mask: Mask,
    window: Option<i32>,
    positions: Positions,
    /// Those of each row for the CPU kernels, which need no mask.
    rotations: Vec<Arc<Rotations>>,
}

impl<'a> AttentionCall<'a> {
    /// Prepares a call with `length` new tokens for layers like the one with `cache`, before any of them
    /// is updated.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn new(rope: &'a Rope, cache: &LayerCache, length: i32, window: Option<i32>) -> Result<Self> {
        let (mask, positions) = (cache.mask(length, window)?, Positions::after(cache)?);
        let rows = cache.kernel_rows().unwrap_or_default();
        let rotations = rows.iter().map(|row| Arc::new(rope.rotations(row.offset(), length))).collect();
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
        let (q_size, k_size, eps) = match args.qk_norm {
            QkNorm::None => (None, None, 0.0),
            QkNorm::PerHead { eps } => (Some(head_dim), Some(head_dim), eps),
            QkNorm::PerQueryHead { eps } => (Some(head_dim), None, eps),
            QkNorm::AllHeads { eps } => (Some(heads * head_dim), Some(kv_heads * head_dim), eps),
        };
        let mut norm = |name: &str, size: Option<i32>| {
            let path = format!("{path}.{name}");
            size.map(|size| Norm::load(loader, &path, NormKind::Rms, size, eps)).transpose()
        };
        let (q_norm, k_norm) = (norm("q_norm", q_size)?, norm("k_norm", k_size)?);
        let v_norm = args.value_norm.map(|eps| Norm::without_gain(loader, head_dim, eps));
        Ok(Self { o_proj, q_norm, k_norm, v_norm, args })
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
        let (ops, output) = match (self.o_proj.kernel(), cache.kernel_rows().is_some()) {
            (Some(kernel), true) => kernel,
            (None, false) => return residual.add(x, &self.forward(qkv, call, cache)?),
            _ => return Err(other_numerics()),
        };
        let caches = cache.kernel_rows_mut().unwrap_or_default();
        let [queries, keys, values] = qkv;
        let length = queries.dim(1)?;
        check_rows(queries, caches.len())?;
        let (mut appends, mut after) = (Vec::new(), Vec::new());
        for cache in &mut *caches {
            let append =
                cache.begin_append(length, self.args.kv_heads as usize, self.args.head_dim as usize)?;
            after.extend(append.after);
            appends.push((append.buffer, append.copy_from));
        }
        let out = ops.attention(
            self.kernel_call(output, residual, call, appends),
            [queries, keys, values],
            x,
            after,
        )?;
        caches.iter_mut().for_each(|cache| cache.end_append(out.appended.clone(), length));
        Ok(out.hidden)
    }

    /// [`Attention::forward_add`] with the keys and values of another layer.
    ///
    /// # Errors
    /// When they are not of the kind that computes here.
    pub fn forward_shared_add(
        &self,
        queries: &Array,
        x: &Array,
        residual: &Residual,
        call: &AttentionCall<'_>,
        kv: &SharedKv,
    ) -> Result<Array> {
        match (self.o_proj.kernel(), &kv.0) {
            (Some((ops, output)), KeysValues::Kernel(rows)) => {
                check_rows(queries, rows.len())?;
                let buffers = rows.iter().map(|(buffer, _)| (buffer.clone(), None)).collect();
                let after = rows.iter().filter_map(|(_, appended)| appended.clone()).collect();
                let kernel_call = self.kernel_call(output, residual, call, buffers);
                Ok(ops.attention_shared(kernel_call, queries, x, after)?)
            }
            (None, KeysValues::Arrays(keys, values)) => {
                let mut queries = self.split_heads(queries, self.args.heads, self.q_norm.as_ref())?;
                if self.args.rotary {
                    queries = call.rope.forward(&queries, &call.positions)?;
                }
                let out = self.attend(&queries, keys, values, call)?;
                residual.add(x, &self.o_proj.forward(&out)?)
            }
            _ => Err(other_numerics()),
        }
    }

    /// `buffers` are those of the rows, each with where its former rows are if not in it.
    fn kernel_call(
        &self,
        output: &Arc<Matrix>,
        residual: &Residual,
        call: &AttentionCall<'_>,
        buffers: Vec<(KvBuffer, Option<KvBuffer>)>,
    ) -> ops::AttentionCall {
        let AttentionArgs { heads, kv_heads, head_dim, scale, rotary, softcap, .. } = self.args;
        let norms = [&self.q_norm, &self.k_norm, &self.v_norm];
        let sequence = |(row, (cache, copy_from))| ops::KvSequence {
            cache,
            copy_from,
            offset: call.positions.row(row) as usize,
            rotations: call.rotations.get(row).filter(|_| rotary).cloned(),
        };
        ops::AttentionCall {
            norms: norms.map(|norm| norm.as_ref().map(|norm| norm.kernel().clone())),
            output: output.clone(),
            heads: heads as usize,
            kv_heads: kv_heads as usize,
            head_dim: head_dim as usize,
            scale: scale as f32,
            softcap: softcap.map(|cap| cap as f32),
            output_gate: self.args.output_gate,
            window: call.window.map(|w| w as usize),
            traditional: call.rope.is_traditional(),
            sequences: buffers.into_iter().enumerate().map(sequence).collect(),
            residual: residual.kernel(),
        }
    }

    /// `o_proj(attention(q, k, v))` with MLX.
    fn forward(
        &self,
        [queries, keys, values]: &[Array; 3],
        call: &AttentionCall<'_>,
        cache: &mut LayerCache,
    ) -> Result<Array> {
        let AttentionArgs { heads, kv_heads, head_dim, rotary, .. } = self.args;
        let (batch, length) = (queries.dim(0)?, queries.dim(1)?);
        let (queries, gates) = match self.args.output_gate {
            false => (queries.clone(), None),
            true => {
                let both = queries.reshape([batch, length, heads, -1])?;
                let gates = both.slice_axis(-1, head_dim, i32::MAX)?.reshape([batch, length, -1])?;
                (both.slice_axis(-1, 0, head_dim)?, Some(gates))
            }
        };
        let mut queries = self.split_heads(&queries, heads, self.q_norm.as_ref())?;
        let mut keys = self.split_heads(keys, kv_heads, self.k_norm.as_ref())?;
        let values = self.split_heads(values, kv_heads, self.v_norm.as_ref())?;
        if rotary {
            queries = call.rope.forward(&queries, &call.positions)?;
            keys = call.rope.forward(&keys, &call.positions)?;
        }
        let (keys, values) = cache.update(&keys, &values)?;
        let out = self.attend(&queries, &keys, &values, call)?;
        self.o_proj.forward(&match gates {
            None => out,
            Some(gates) => out.multiply(&gates.sigmoid()?)?,
        })
    }

    /// `queries`, `keys` and `values` `[batch, heads, seq, head_dim]` → `[batch, seq, heads * head_dim]`.
    fn attend(
        &self,
        queries: &Array,
        keys: &Array,
        values: &Array,
        call: &AttentionCall<'_>,
    ) -> Result<Array> {
        let AttentionArgs { scale, softcap, .. } = self.args;
        let out = match softcap {
            None => scaled_dot_product_attention(queries, keys, values, scale as f32, &call.mask, None)?,
            Some(cap) => capped_attention(queries, keys, values, scale, cap, &call.mask)?,
        };
        let (batch, length) = (out.dim(0)?, out.dim(2)?);
        Ok(out.transpose([0, 2, 1, 3])?.reshape([batch, length, -1])?)
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

fn check_rows(queries: &Array, caches: usize) -> Result<()> {
    match queries.dim(0)? {
        rows if rows as usize == caches => Ok(()),
        rows => Err(Error::Input(format!("tokens of {rows} sequences for a cache of {caches}"))),
    }
}

fn other_numerics() -> Error {
    Error::Input("the cache was made for other numerics than the model's".into())
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
