//! MLX's fused operations (`mlx.core.fast`).

use crate::array::{optional, wrap};
use crate::bridge::ffi;
use crate::{Array, Result};

/// `x / sqrt(mean(x²) + eps) * weight` over the last dimension.
pub fn rms_norm(x: &Array, weight: Option<&Array>, eps: f32) -> Result<Array> {
    wrap(ffi::rms_norm(&x.0, optional(weight), eps))
}

/// Layer normalization over the last dimension.
pub fn layer_norm(x: &Array, weight: Option<&Array>, bias: Option<&Array>, eps: f32) -> Result<Array> {
    wrap(ffi::layer_norm(&x.0, optional(weight), optional(bias), eps))
}

/// Where rotary frequencies come from.
#[derive(Clone, Copy, Debug)]
pub enum Frequencies<'a> {
    /// `base ** (-2 i / dims)`.
    Base(f32),
    /// Wavelengths divided by 2π, `[dims / 2]` in `f32`.
    Table(&'a Array),
}

/// The position of the first row.
#[derive(Clone, Copy, Debug)]
pub enum Offset<'a> {
    /// The same for all sequences.
    Scalar(i32),
    /// 0-d, or one per sequence of the batch, integer.
    Array(&'a Array),
}

impl From<i32> for Offset<'_> {
    fn from(offset: i32) -> Self {
        Self::Scalar(offset)
    }
}

/// Rotary position embedding of `x` `[batch, heads, seq, head_dim]` over its first `dims` channels.
///
/// `traditional` pairs neighbouring channels, otherwise channel `i` pairs with `i + dims / 2`.
pub fn rope(
    x: &Array,
    dims: i32,
    traditional: bool,
    frequencies: Frequencies<'_>,
    scale: f32,
    offset: Offset<'_>,
) -> Result<Array> {
    let (base, has_base, freqs) = match frequencies {
        Frequencies::Base(base) => (base, true, None),
        Frequencies::Table(table) => (0.0, false, Some(table)),
    };
    let freqs = optional(freqs);
    wrap(match offset {
        Offset::Scalar(n) => ffi::rope_at(&x.0, dims, traditional, base, has_base, scale, n, freqs),
        Offset::Array(a) => ffi::rope(&x.0, dims, traditional, base, has_base, scale, &a.0, freqs),
    })
}

/// Which keys a query may attend to.
#[derive(Clone, Debug)]
pub enum Mask {
    /// All.
    None,
    /// Query `i` of `L` sees keys up to `K - L + i` of `K`.
    Causal,
    /// True (or an additive float) where attention is allowed, broadcast to
    /// `[batch, heads, queries, keys]`.
    Array(Array),
}

/// Softmax attention of `q` `[batch, heads, queries, head_dim]` over `k` and `v`
/// `[batch, kv_heads, keys, head_dim]`; `heads` is a multiple of `kv_heads`.
pub fn scaled_dot_product_attention(
    q: &Array,
    k: &Array,
    v: &Array,
    scale: f32,
    mask: &Mask,
    sinks: Option<&Array>,
) -> Result<Array> {
    let (mode, array) = match mask {
        Mask::None => ("", None),
        Mask::Causal => ("causal", None),
        Mask::Array(array) => ("", Some(array)),
    };
    let (mask, sinks) = (optional(array), optional(sinks));
    wrap(ffi::scaled_dot_product_attention(&q.0, &k.0, &v.0, scale, mode, mask, sinks))
}
