//! Sequence state: one [`Cache`] per sequence or per batch of sequences, one [`LayerCache`] per layer.
//!
//! Arrays are immutable, so a clone of a cache is a snapshot of it: it costs references, and a later
//! update of one copy leaves the other as it was.
//!
//! A sequence of a batch is a *row* of its caches, a position in the buffers a *column*.

mod batch_full;
mod batch_kernel;
mod batch_rotating;
mod file;
mod full;
mod kernel;
mod mask;
mod recurrent;
mod rotating;
mod rows;
mod segment;
#[cfg(test)]
mod tests;

pub use batch_full::BatchKvCache;
pub use batch_kernel::BatchKernelKvCache;
pub use batch_rotating::BatchRotatingKvCache;
pub use file::CacheKey;
pub(crate) use file::hex;
pub use full::KvCache;
pub use kernel::KernelKvCache;
pub use mask::causal_mask;
pub use recurrent::{Recurrence, RecurrentCache, RecurrentInputs, RecurrentState};
pub use rotating::RotatingKvCache;
pub use segment::{CacheSegment, CacheState};

use russet_mlx::{Array, Dtype, eval, fast::Mask};

use crate::{Error, Result};

/// Columns by which a buffer grows, as in mlx-lm.
const GROWTH: i32 = 256;

/// The state of a sequence, or of the sequences of a batch.
#[derive(Clone, Debug)]
pub struct Cache {
    /// One per layer, in the order of the graph. All are of one sequence, or all of the same batch.
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
    /// [`LayerCache::Full`] of several sequences.
    BatchFull(BatchKvCache),
    /// [`LayerCache::Rotating`] of several sequences.
    BatchRotating(BatchRotatingKvCache),
    /// [`LayerCache::Kernel`] of several sequences.
    BatchKernel(BatchKernelKvCache),
}

impl Cache {
    /// The state of a sequence without tokens.
    pub fn new(layers: Vec<LayerCache>) -> Self {
        Self { layers, round: None }
    }

    /// Tokens that the sequence has consumed, or the longest of the batch.
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

    /// Bytes of the buffers, unused columns included.
    pub fn nbytes(&self) -> usize {
        self.layers.iter().map(LayerCache::nbytes).sum()
    }

    /// Forgets the last `count` tokens of every sequence, exactly.
    ///
    /// # Errors
    /// Without a change, when a sequence has fewer tokens or a layer has overwritten what it would need.
    pub fn trim(&mut self, count: usize) -> Result<()> {
        let shortest = self.lengths().into_iter().min().unwrap_or(0);
        let count = i32::try_from(count).ok().filter(|&count| count <= shortest).ok_or_else(|| {
            Error::Input(format!("{count} tokens can't be taken from a sequence of {shortest}"))
        })?;
        if count > 0 && !self.layers.iter().all(LayerCache::is_trimmable) {
            let message = "a layer can't take back what the tokens did to it: go back to a snapshot instead";
            return Err(Error::Input(message.into()));
        }
        for layer in &mut self.layers {
            layer.trim(count);
        }
        Ok(())
    }

    /// A copy in memory of its own, as little as the state needs. A clone shares the buffers instead, and
    /// keeps all of them alive.
    ///
    /// # Errors
    /// For a batch, whose rows are copied by [`Cache::extract`], and when memory is refused.
    pub fn compacted(&self) -> Result<Self> {
        Ok(Self::new(self.layers.iter().map(LayerCache::compacted).collect::<Result<_>>()?))
    }
}

impl LayerCache {
    /// Appends keys and values `[batch, kv_heads, seq, head_dim]` and returns those to attend to.
    pub fn update(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        match self {
            Self::Full(cache) => cache.update(keys, values),
            Self::Rotating(cache) => cache.update(keys, values),
            Self::BatchFull(cache) => cache.update(keys, values),
            Self::BatchRotating(cache) => cache.update(keys, values),
            Self::Kernel(_) | Self::BatchKernel(_) => {
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
            Self::BatchFull(cache) => cache.keys_values(),
            Self::BatchRotating(cache) => cache.keys_values(),
            Self::Kernel(_) | Self::BatchKernel(_) | Self::Recurrent(_) => Err(empty()),
        }
    }

    /// The mask for a call with `length` new tokens, made before the update.
    pub fn mask(&self, length: i32, window: Option<i32>) -> Result<Mask> {
        match self {
            Self::Full(cache) => cache.mask(length, window),
            Self::Rotating(cache) => cache.mask(length, window),
            Self::BatchFull(cache) => cache.mask(length, window),
            Self::BatchRotating(cache) => cache.mask(length, window),
            // The kernels derive what a query sees from its position.
            Self::Kernel(_) | Self::BatchKernel(_) | Self::Recurrent(_) => Ok(Mask::None),
        }
    }

    /// Tokens consumed; the position of the next one. For a batch, that of the longest row.
    pub fn offset(&self) -> i32 {
        match self {
            Self::Full(cache) => cache.offset(),
            Self::Rotating(cache) => cache.offset(),
            Self::Kernel(cache) => cache.offset(),
            Self::Recurrent(_) | Self::BatchFull(_) | Self::BatchRotating(_) | Self::BatchKernel(_) => {
                self.lengths().into_iter().max().unwrap_or(0)
            }
        }
    }

    /// Bytes of the buffers, unused columns included.
    pub fn nbytes(&self) -> usize {
        match self {
            Self::Kernel(cache) => cache.nbytes(),
            Self::BatchKernel(cache) => cache.nbytes(),
            Self::Full(_)
            | Self::Rotating(_)
            | Self::Recurrent(_)
            | Self::BatchFull(_)
            | Self::BatchRotating(_) => self.arrays().iter().map(Array::nbytes).sum(),
        }
    }

    /// The arrays whose evaluation completes the state: the buffers, if any token was consumed.
    pub fn arrays(&self) -> Vec<Array> {
        match self {
            Self::Full(cache) => cache.arrays(),
            Self::Rotating(cache) => cache.arrays(),
            Self::Kernel(cache) => cache.arrays(),
            Self::Recurrent(cache) => cache.arrays(),
            Self::BatchFull(cache) => cache.arrays(),
            Self::BatchRotating(cache) => cache.arrays(),
            Self::BatchKernel(cache) => cache.arrays(),
        }
    }

    /// Whether [`LayerCache::trim`] is exact now.
    pub fn is_trimmable(&self) -> bool {
        match self {
            Self::Full(_) | Self::Kernel(_) | Self::BatchFull(_) | Self::BatchKernel(_) => true,
            Self::Rotating(cache) => cache.is_trimmable(),
            Self::BatchRotating(cache) => cache.is_trimmable(),
            Self::Recurrent(_) => false,
        }
    }

    /// Forgets the last `count` tokens of each row; returns how many it forgot.
    pub fn trim(&mut self, count: i32) -> i32 {
        match self {
            Self::Full(cache) => cache.trim(count),
            Self::Rotating(cache) => cache.trim(count),
            Self::Kernel(cache) => cache.trim(count),
            Self::Recurrent(_) => 0,
            Self::BatchFull(cache) => cache.trim(count),
            Self::BatchRotating(cache) => cache.trim(count),
            Self::BatchKernel(cache) => cache.trim(count),
        }
    }

    /// The cache of each row, where the CPU kernels compute.
    pub(crate) fn kernel_rows(&self) -> Option<&[KernelKvCache]> {
        match self {
            Self::Kernel(cache) => Some(std::slice::from_ref(cache)),
            Self::BatchKernel(cache) => Some(cache.rows()),
            _ => None,
        }
    }

    /// The same, to be appended to.
    pub(crate) fn kernel_rows_mut(&mut self) -> Option<&mut [KernelKvCache]> {
        match self {
            Self::Kernel(cache) => Some(std::slice::from_mut(cache)),
            Self::BatchKernel(cache) => Some(cache.rows_mut()),
            _ => None,
        }
    }

    /// See [`Cache::compacted`].
    fn compacted(&self) -> Result<Self> {
        Ok(match self {
            Self::Full(cache) => Self::Full(cache.compacted()?),
            Self::Rotating(cache) => Self::Rotating(cache.compacted()?),
            Self::Kernel(cache) => Self::Kernel(cache.compacted()?),
            Self::Recurrent(cache) => Self::Recurrent(cache.extract(0)?),
            Self::BatchFull(_) | Self::BatchRotating(_) | Self::BatchKernel(_) => {
                return Err(Error::Input("a batch is copied row by row".into()));
            }
        })
    }
}

fn no_round() -> Error {
    Error::Input("no round of speculation was begun".into())
}

fn empty() -> Error {
    Error::Input("the cache has no keys and values to share".into())
}

/// The given rows, in memory of their own once evaluated: a gather never shares its input's buffer, as a slice
/// or a contiguous copy may.
fn take_rows(array: &Array, rows: &[usize]) -> russet_mlx::Result<Array> {
    let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
    array.take(&Array::from_slice(&rows, [rows.len() as i32])?, 0)
}

/// Keys and values `[rows, kv_heads, columns, head_dim]`, which agree in rows and columns.
#[derive(Clone, Debug)]
struct KeysValues {
    keys: Array,
    values: Array,
}

impl KeysValues {
    /// Columns of the buffer.
    fn columns(&self) -> Result<i32> {
        Ok(self.keys.dim(2)?)
    }

    /// Applies `f` to keys and to values.
    fn map(&self, f: impl Fn(&Array) -> russet_mlx::Result<Array>) -> Result<Self> {
        Ok(Self { keys: f(&self.keys)?, values: f(&self.values)? })
    }

    /// `count` columns of zeros, shaped and typed like these.
    fn zeros_like(&self, count: i32) -> Result<Self> {
        self.map(|a| {
            let mut shape = a.shape();
            shape[2] = count;
            Array::zeros(shape, a.dtype())
        })
    }

    /// One behind the other, as columns.
    fn concatenate(parts: &[&Self]) -> Result<Self> {
        Self::join(parts, 2)
    }

    /// One under the other, as rows.
    fn stack(parts: &[&Self]) -> Result<Self> {
        Self::join(parts, 0)
    }

    fn join(parts: &[&Self], axis: i32) -> Result<Self> {
        let keys: Vec<Array> = parts.iter().map(|p| p.keys.clone()).collect();
        let values: Vec<Array> = parts.iter().map(|p| p.values.clone()).collect();
        Ok(Self {
            keys: russet_mlx::concatenate(&keys, axis)?,
            values: russet_mlx::concatenate(&values, axis)?,
        })
    }

    /// Columns `start..stop`.
    fn slice(&self, start: i32, stop: i32) -> Result<Self> {
        self.map(|a| a.slice_axis(2, start, stop))
    }

    /// Writes `new` from column `start` on.
    fn write(&mut self, new: &Self, start: i32) -> Result<()> {
        let stop = start + new.columns()?;
        self.keys = self.keys.slice_update_axis(&new.keys, 2, start, stop)?;
        self.values = self.values.slice_update_axis(&new.values, 2, start, stop)?;
        Ok(())
    }

    /// The first `count` columns, which may be all.
    fn used(&self, count: i32) -> Result<(Array, Array)> {
        let used = if count < self.columns()? { self.slice(0, count)? } else { self.clone() };
        Ok(used.into_pair())
    }

    /// See [`take_rows`].
    fn take_rows(&self, rows: &[usize]) -> Result<Self> {
        self.map(|a| take_rows(a, rows))
    }

    /// One row.
    fn slice_row(&self, row: usize) -> Result<Self> {
        self.map(|a| a.slice_axis(0, row as i32, row as i32 + 1))
    }

    /// The only row, copied now: the copy keeps nothing else alive.
    fn copied(&self) -> Result<Self> {
        let copy = self.take_rows(&[0])?;
        eval(&[copy.keys.clone(), copy.values.clone()])?;
        Ok(copy)
    }

    /// `left` columns of zeros before and `right` behind these.
    fn pad(&self, left: i32, right: i32) -> Result<Self> {
        self.map(|a| a.pad([0, 0, left, 0], [0, 0, right, 0], 0))
    }

    /// Each row turned to the right by its number of columns.
    fn roll_rows(&self, shifts: &[i32]) -> Result<Self> {
        let columns = self.columns()?;
        let shifts = Array::from_slice(shifts, [shifts.len() as i32, 1, 1, 1])?;
        let sources = Array::arange(0.0, f64::from(columns), 1.0, Dtype::I32)?.reshape([1, 1, columns, 1])?;
        let sources = sources.subtract(&shifts)?.remainder(columns)?;
        self.map(|a| a.take_along_axis(&sources, 2))
    }

    fn into_pair(self) -> (Array, Array) {
        (self.keys, self.values)
    }
}
