//! Sequence state: one [`Cache`] per sequence, one [`LayerCache`] per layer.
//!
//! Arrays are immutable, so a clone of a cache is a snapshot of it: it costs references, and a later
//! update of one copy leaves the other as it was.

mod full;
mod kernel;
mod mask;
mod recurrent;
mod rotating;

pub use full::KvCache;
pub use kernel::KernelKvCache;
pub use mask::causal_mask;
pub use recurrent::{Recurrence, RecurrentCache, RecurrentInputs, RecurrentState};
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
    /// Tokens before the round of speculation, in one.
    round: Option<i32>,
}

/// The state of one layer.
#[derive(Clone, Debug)]
pub enum LayerCache {
    /// Keys and values of all tokens.
    Full(KvCache),
    /// Keys and values of the last tokens, in a ring.
    Rotating(RotatingKvCache),
    /// Keys and values of all tokens, for the CPU kernels.
    Kernel(KernelKvCache),
    /// What a linear-attention layer carries from token to token.
    Recurrent(RecurrentCache),
}

impl Cache {
    /// The state of a sequence without tokens.
    pub fn new(layers: Vec<LayerCache>) -> Self {
        Self { layers, round: None }
    }

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

    /// Begins a round of speculation: one forward pass over tokens that may turn out wrong, then
    /// [`Cache::commit`] or [`Cache::rollback`]. A round that was not ended is dropped.
    pub fn begin_round(&mut self) {
        self.round = Some(self.offset());
        for layer in &mut self.layers {
            if let LayerCache::Recurrent(cache) = layer {
                cache.begin_round();
            }
        }
    }

    /// Ends the round and keeps all of its tokens.
    ///
    /// # Errors
    /// When there is no round.
    pub fn commit(&mut self) -> Result<()> {
        self.end_round().map(drop)
    }

    /// Ends the round and keeps its first `keep` tokens: the state has the bits that processing those alone
    /// would have left.
    ///
    /// # Errors
    /// Without a change, when there is no round, it had no forward pass or fewer than `keep` tokens, or a layer
    /// has overwritten what it would need.
    pub fn rollback(&mut self, keep: i32) -> Result<()> {
        let Some(start) = self.round else { return Err(no_round()) };
        let length = self.offset() - start;
        if length <= 0 || self.layers.iter().any(|layer| layer.offset() != start + length) {
            return Err(Error::Input("the round of speculation has no forward pass to roll back".into()));
        }
        if !(0..=length).contains(&keep) {
            return Err(Error::Input(format!("{keep} tokens to keep of a round of {length}")));
        }
        for layer in &self.layers {
            match layer {
                LayerCache::Recurrent(cache) => cache.check_round()?,
                layer if layer.is_trimmable() => {}
                _ => {
                    let message = "a rotating cache that has overwritten tokens can't be rolled back";
                    return Err(Error::Input(message.into()));
                }
            }
        }
        for layer in &mut self.layers {
            match layer {
                LayerCache::Recurrent(cache) => cache.rollback(keep)?,
                layer => drop(layer.trim(length - keep)),
            }
        }
        self.end_round().map(drop)
    }

    fn end_round(&mut self) -> Result<i32> {
        for layer in &mut self.layers {
            if let LayerCache::Recurrent(cache) = layer {
                cache.end_round();
            }
        }
        self.round.take().ok_or_else(no_round)
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
            Self::Recurrent(_) => Err(Error::Input("a recurrent layer has no keys and values".into())),
        }
    }

    /// What the last update returned.
    ///
    /// # Errors
    /// When there was none, or the layer's attention updates the cache itself.
    pub fn keys_values(&self) -> Result<(Array, Array)> {
        match self {
            Self::Full(cache) => cache.keys_values(),
            Self::Rotating(cache) => cache.keys_values(),
            Self::Kernel(_) | Self::Recurrent(_) => Err(empty()),
        }
    }

    /// The mask for a call with `length` new tokens, made before the update.
    pub fn mask(&self, length: i32, window: Option<i32>) -> Result<Mask> {
        match self {
            Self::Full(cache) => cache.mask(length, window),
            Self::Rotating(cache) => cache.mask(length, window),
            // The kernels derive what a query sees from its position.
            Self::Kernel(_) | Self::Recurrent(_) => Ok(Mask::None),
        }
    }

    /// Tokens consumed; the position of the next one.
    pub fn offset(&self) -> i32 {
        match self {
            Self::Full(cache) => cache.offset(),
            Self::Rotating(cache) => cache.offset(),
            Self::Kernel(cache) => cache.offset(),
            Self::Recurrent(cache) => cache.offset(),
        }
    }

    /// Bytes of the buffers, unused rows included.
    pub fn nbytes(&self) -> usize {
        match self {
            Self::Full(_) | Self::Rotating(_) | Self::Recurrent(_) => {
                self.arrays().iter().map(Array::nbytes).sum()
            }
            Self::Kernel(cache) => cache.nbytes(),
        }
    }

    /// The arrays whose evaluation completes the state: the buffers, if any token was consumed.
    pub fn arrays(&self) -> Vec<Array> {
        match self {
            Self::Full(cache) => cache.arrays(),
            Self::Rotating(cache) => cache.arrays(),
            Self::Kernel(cache) => cache.arrays(),
            Self::Recurrent(cache) => cache.arrays(),
        }
    }

    /// Whether [`LayerCache::trim`] is exact now.
    pub fn is_trimmable(&self) -> bool {
        match self {
            Self::Full(_) | Self::Kernel(_) => true,
            Self::Rotating(cache) => cache.is_trimmable(),
            Self::Recurrent(_) => false,
        }
    }

    /// Forgets the last `count` tokens; returns how many it forgot.
    pub fn trim(&mut self, count: i32) -> i32 {
        match self {
            Self::Full(cache) => cache.trim(count),
            Self::Rotating(cache) => cache.trim(count),
            Self::Kernel(cache) => cache.trim(count),
            Self::Recurrent(_) => 0,
        }
    }
}

fn no_round() -> Error {
    Error::Input("no round of speculation was begun".into())
}

fn empty() -> Error {
    Error::Input("the cache has no keys and values to share".into())
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

    /// The first `count` rows, which may be all.
    fn used(&self, count: i32) -> Result<(Array, Array)> {
        let used = if count < self.rows()? { self.slice(0, count)? } else { self.clone() };
        Ok(used.into_pair())
    }

    fn into_pair(self) -> (Array, Array) {
        (self.keys, self.values)
    }
}
