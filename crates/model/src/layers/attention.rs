use std::sync::Arc;

use russet_kernels::cpu::Rotations;
use russet_kernels::ops;
use russet_mlx::Array;
use russet_mlx::fast::{Mask, scaled_dot_product_attention};

use super::{Linear, Loader, Rope};
use crate::cache::LayerCache;
use crate::{Error, Result};

/// Head counts and widths of an attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSizes {
    /// Width of the hidden states.
    pub hidden: i32,
    /// Query heads.
    pub heads: i32,
    /// Key and value heads.
    pub kv_heads: i32,
    /// Width of a head.
    pub head_dim: i32,
}

/// Rotary attention over a cache, from projected queries, keys and values to the projected output.
pub struct Attention {
    o_proj: Linear,
    sizes: AttentionSizes,
    scale: f32,
}

/// What all attention layers of one kind share in a call.
pub struct AttentionCall<'a> {
    rope: &'a Rope,
    mask: Mask,
    window: Option<i32>,
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
        Ok(match cache {
            LayerCache::Kernel(cache) => Self {
                rope,
                mask: Mask::None,
                window,
                rotations: Some(Arc::new(rope.rotations(cache.offset(), length))),
            },
            _ => Self { rope, mask: cache.mask(length, window)?, window, rotations: None },
        })
    }
}

impl Attention {
    /// Takes `path.o_proj`.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(
        loader: &mut Loader<'_>,
        path: &str,
        sizes: AttentionSizes,
        scale: f64,
        bias: bool,
    ) -> Result<Self> {
        let inputs = sizes.heads * sizes.head_dim;
        let o_proj = Linear::load(loader, &format!("{path}.o_proj"), inputs, sizes.hidden, bias)?;
        Ok(Self { o_proj, sizes, scale: scale as f32 })
    }

    /// `residual + o_proj(attention(q, k, v))`; `q`, `k`, `v` are `[batch, seq, heads * head_dim]`.
    ///
    /// # Errors
    /// When the cache is not of the kind that computes here.
    pub fn forward_add(
        &self,
        [queries, keys, values]: &[Array; 3],
        residual: &Array,
        call: &AttentionCall<'_>,
        cache: &mut LayerCache,
    ) -> Result<Array> {
        if let (Some((ops, output)), LayerCache::Kernel(cache)) = (self.o_proj.kernel(), &mut *cache) {
            let length = queries.dim(1)?;
            let (kv_heads, head_dim) = (self.sizes.kv_heads as usize, self.sizes.head_dim as usize);
            let offset = cache.offset() as usize;
            let append = cache.begin_append(length, kv_heads, head_dim)?;
            let kernel_call = ops::AttentionCall {
                output: output.clone(),
                heads: self.sizes.heads as usize,
                kv_heads,
                head_dim,
                scale: self.scale,
                window: call.window.map(|w| w as usize),
                rotations: call.rotations.clone(),
                traditional: call.rope.is_traditional(),
                cache: append.buffer,
                copy_from: append.copy_from,
                offset,
            };
            let out = ops.attention(kernel_call, [queries, keys, values], residual, append.after)?;
            cache.end_append(out.appended, length);
            return Ok(out.hidden);
        }
        if self.o_proj.kernel().is_some() || matches!(cache, LayerCache::Kernel(_)) {
            return Err(Error::Input("the cache was made for other numerics than the model's".into()));
        }

        let AttentionSizes { heads, kv_heads, .. } = self.sizes;
        let (queries, keys) = (split_heads(queries, heads)?, split_heads(keys, kv_heads)?);
        let values = split_heads(values, kv_heads)?;
        let offset = cache.offset();
        let queries = call.rope.forward(&queries, offset)?;
        let keys = call.rope.forward(&keys, offset)?;
        let (keys, values) = cache.update(&keys, &values)?;

        let out = scaled_dot_product_attention(&queries, &keys, &values, self.scale, &call.mask, None)?;
        let (batch, length) = (residual.dim(0)?, residual.dim(1)?);
        let out = out.transpose([0, 2, 1, 3])?.reshape([batch, length, -1])?;
        self.o_proj.forward_add(&out, residual)
    }
}

/// `[batch, seq, heads * head_dim]` → `[batch, heads, seq, head_dim]`.
fn split_heads(x: &Array, heads: i32) -> Result<Array> {
    let (batch, length) = (x.dim(0)?, x.dim(1)?);
    Ok(x.reshape([batch, length, heads, -1])?.transpose([0, 2, 1, 3])?)
}
