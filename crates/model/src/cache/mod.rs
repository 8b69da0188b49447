//! Sequence state: one [`Cache`] per sequence, one [`LayerCache`] per attention layer.
//!
//! Arrays are immutable, so a clone of a cache is a snapshot of it: it costs references, and a later
//! update of one copy leaves the other as it was.

mod full;
mod kernel;
mod mask;
mod rotating;

pub use full::KvCache;
pub use kernel::KernelKvCache;
pub use mask::causal_mask;
pub use rotating::RotatingKvCache;

use russet_mlx::{Array, fast::Mask};

use crate::{Error, Result};

/// Rows by which a buffer grows, as in mlx-lm.
const GROWTH: i32 = 256;

/// The state of a sequence.
#[derive(Clone, Debug)]
pub struct Cache {
    /// One per layer, in the order of the graph.
    pub layers: Vec<LayerCache>,
}

/// The state of one attention layer.
#[derive(Clone, Debug)]
pub enum LayerCache {
    /// Keys and values of all tokens.
    Full(KvCache),
    /// Keys and values of the last tokens, in a ring.
    Rotating(RotatingKvCache),
    /// Keys and values of all tokens, for the CPU kernels.
    Kernel(KernelKvCache),
}

impl Cache {
    /// Tokens that the sequence has consumed.
    pub fn offset(&self) -> i32 {
        self.layers.first().map_or(0, LayerCache::offset)
    }

    /// Says how long the sequence will get, so that buffers need not grow on the way.
    pub fn reserve(&mut self, tokens: usize) {
        let tokens = i32::try_from(tokens).unwrap_or(i32::MAX);
        for layer in &mut self.layers {
            if let LayerCache::Kernel(cache) = layer {
                cache.reserve(tokens);
            }
        }
    }

    /// The arrays that hold the state, for evaluation.
    pub fn arrays(&self) -> Vec<Array> {
        self.layers.iter().flat_map(LayerCache::arrays).collect()
    }

    /// Bytes of the buffers, unused rows included.
    pub fn nbytes(&self) -> usize {
        self.layers.iter().map(LayerCache::nbytes).sum()
    }
}

impl LayerCache {
    /// Appends keys and values `[batch, kv_heads, seq, head_dim]` and returns those to attend to.
    pub fn update(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        match self {
            Self::Full(cache) => cache.update(keys, values),
            Self::Rotating(cache) => cache.update(keys, values),
            Self::Kernel(_) => {
                Err(Error::Input("the CPU kernels' cache is updated by their attention".into()))
            }
        }
    }

    /// The mask for a call with `length` new tokens, made before the update.
    pub fn mask(&self, length: i32, window: Option<i32>) -> Result<Mask> {
        match self {
            Self::Full(cache) => cache.mask(length, window),
            Self::Rotating(cache) => cache.mask(length, window),
            // The kernels derive what a query sees from its position.
            Self::Kernel(_) => Ok(Mask::None),
        }
    }

    /// Tokens consumed; the position of the next one.
    pub fn offset(&self) -> i32 {
        match self {
            Self::Full(cache) => cache.offset(),
            Self::Rotating(cache) => cache.offset(),
            Self::Kernel(cache) => cache.offset(),
        }
    }

    /// Bytes of the buffers, unused rows included.
    pub fn nbytes(&self) -> usize {
        match self {
            Self::Full(_) | Self::Rotating(_) => self.arrays().iter().map(Array::nbytes).sum(),
            Self::Kernel(cache) => cache.nbytes(),
        }
    }

    /// The arrays whose evaluation completes the state: the buffers, if any token was consumed.
    pub fn arrays(&self) -> Vec<Array> {
        match self {
            Self::Full(cache) => cache.arrays(),
            Self::Rotating(cache) => cache.arrays(),
            Self::Kernel(cache) => cache.arrays(),
        }
    }

    /// Whether [`LayerCache::trim`] is exact now.
    pub fn is_trimmable(&self) -> bool {
        match self {
            Self::Full(_) | Self::Kernel(_) => true,
            Self::Rotating(cache) => cache.is_trimmable(),
        }
    }

    /// Forgets the last `count` tokens; returns how many it forgot.
    pub fn trim(&mut self, count: i32) -> i32 {
        match self {
            Self::Full(cache) => cache.trim(count),
            Self::Rotating(cache) => cache.trim(count),
            Self::Kernel(cache) => cache.trim(count),
        }
    }
}

/// Keys and values, which always have the same number of rows.
#[derive(Clone, Debug)]
struct KeysValues {
    keys: Array,
    values: Array,
}

impl KeysValues {
    /// Rows of the buffer.
    fn rows(&self) -> Result<i32> {
        Ok(self.keys.dim(2)?)
    }

    /// Applies `f` to keys and to values.
    fn map(&self, f: impl Fn(&Array) -> russet_mlx::Result<Array>) -> Result<Self> {
        Ok(Self { keys: f(&self.keys)?, values: f(&self.values)? })
    }

    /// `count` rows of zeros, shaped and typed like these.
    fn zeros_like(&self, count: i32) -> Result<Self> {
        self.map(|a| {
            let mut shape = a.shape();
            shape[2] = count;
            Array::zeros(shape, a.dtype())
        })
    }

    fn concatenate(parts: &[&Self]) -> Result<Self> {
        let keys: Vec<Array> = parts.iter().map(|p| p.keys.clone()).collect();
        let values: Vec<Array> = parts.iter().map(|p| p.values.clone()).collect();
        Ok(Self { keys: russet_mlx::concatenate(&keys, 2)?, values: russet_mlx::concatenate(&values, 2)? })
    }

    /// Rows `start..stop`.
    fn slice(&self, start: i32, stop: i32) -> Result<Self> {
        self.map(|a| a.slice_axis(2, start, stop))
    }

    /// Writes `rows` from row `start` on.
    fn write(&mut self, rows: &Self, start: i32) -> Result<()> {
        let stop = start + rows.rows()?;
        self.keys = self.keys.slice_update_axis(&rows.keys, 2, start, stop)?;
        self.values = self.values.slice_update_axis(&rows.values, 2, start, stop)?;
        Ok(())
    }

    fn into_pair(self) -> (Array, Array) {
        (self.keys, self.values)
    }
}
