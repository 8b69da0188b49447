use russet_mlx::{Array, Dtype};

use crate::Result;

/// A bool mask `[length, offset + length]`: query `i` sees keys up to `offset + i`, and with a window
/// only the last `window` of them (`mlx_lm.models.base.create_causal_mask`).
pub fn causal_mask(length: i32, offset: i32, window: Option<i32>) -> Result<Array> {
    let keys = Array::arange(0.0, f64::from(offset + length), 1.0, Dtype::I32)?.expand_dims([0])?;
    let queries = Array::arange(f64::from(offset), f64::from(offset + length), 1.0, Dtype::I32)?;
    let queries = queries.expand_dims([1])?;
    let mask = queries.greater_equal(&keys)?;
    Ok(match window {
        Some(window) => mask.bitwise_and(&queries.less(&keys.add(window)?)?)?,
        None => mask,
    })
}
