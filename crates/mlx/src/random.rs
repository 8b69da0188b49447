//! Random numbers from explicit keys.
//!
//! MLX's generator is a pure function of a key; [`KeySequence`] derives a fresh key per draw exactly
//! as MLX's global generator does after `mlx.core.random.seed`.

use crate::array::{IntoShape, Operand, wrap};
use crate::bridge::ffi;
use crate::{Array, Dtype, Result};

/// A stream of keys that starts from a seed.
#[derive(Clone, Debug)]
pub struct KeySequence {
    state: Array,
}

impl KeySequence {
    /// The sequence that `mlx.core.random.seed(seed)` starts.
    pub fn new(seed: u64) -> Result<Self> {
        Ok(Self { state: key(seed)? })
    }

    /// The next key: the state is split in two, the first half is the new state.
    pub fn next_key(&mut self) -> Result<Array> {
        let halves = split(&self.state, 2)?;
        self.state = halves.slice_axis(0, 0, 1)?.squeeze([0])?;
        halves.slice_axis(0, 1, 2)?.squeeze([0])
    }
}

/// The key `[seed >> 32, seed & 0xffffffff]`.
pub fn key(seed: u64) -> Result<Array> {
    wrap(ffi::random_key(seed))
}

/// Derives `count` keys, `[count, 2]`.
pub fn split(key: &Array, count: i32) -> Result<Array> {
    wrap(ffi::random_split(&key.0, count))
}

/// Uniform numbers in `[low, high)`.
pub fn uniform(low: f64, high: f64, shape: impl IntoShape, dtype: Dtype, key: &Array) -> Result<Array> {
    let low = Array::scalar(low, Dtype::F32)?;
    let high = Array::scalar(high, Dtype::F32)?;
    wrap(ffi::random_uniform(&low.0, &high.0, shape.dims(), dtype as u8, &key.0))
}

/// Standard normal numbers.
pub fn normal(shape: impl IntoShape, dtype: Dtype, key: &Array) -> Result<Array> {
    wrap(ffi::random_normal(shape.dims(), dtype as u8, &key.0))
}

/// Integers in `[low, high)`.
pub fn randint<'a>(
    low: &'a Array,
    high: impl Into<Operand<'a>>,
    shape: impl IntoShape,
    dtype: Dtype,
    key: &Array,
) -> Result<Array> {
    let high = high.into().meet(low)?;
    wrap(ffi::random_randint(&low.0, &high.0, shape.dims(), dtype as u8, &key.0))
}

/// Indices along `axis` drawn with probability proportional to `exp(logits)`.
pub fn categorical(logits: &Array, axis: i32, key: &Array) -> Result<Array> {
    wrap(ffi::random_categorical(&logits.0, axis, &key.0))
}

/// Standard Gumbel noise.
pub fn gumbel(shape: impl IntoShape, dtype: Dtype, key: &Array) -> Result<Array> {
    wrap(ffi::random_gumbel(shape.dims(), dtype as u8, &key.0))
}
