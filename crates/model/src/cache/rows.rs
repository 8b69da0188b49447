//! Sequences in batches: how rows come together, leave, and where their tokens lie.

use russet_mlx::{Array, Dtype};

use super::{
    BatchKvCache, BatchRotatingKvCache, Cache, KernelKvCache, KeysValues, LayerCache, RecurrentCache,
};
use crate::{Error, Result};

/// Batches of sequences. A batch of one is the cache of its sequence: it computes as alone, bit for bit.
///
/// With MLX, rows come together as in mlx-lm: they end in the same column, and shorter ones have padding on
/// their left that no query sees. For the CPU kernels each row is a cache of its own.
impl Cache {
    /// Sequences.
    pub fn rows(&self) -> usize {
        self.layers.first().map_or(1, LayerCache::rows)
    }

    /// Tokens that each row has consumed.
    pub fn lengths(&self) -> Vec<i32> {
        self.layers.first().map_or_else(|| vec![0], LayerCache::lengths)
    }

    /// A batch of sequences.
    ///
    /// # Errors
    /// When there is none, or they are not all single sequences of the same model.
    pub fn merge(mut caches: Vec<Self>) -> Result<Self> {
        if caches.len() < 2 {
            return caches.pop().ok_or_else(|| Error::Input("a batch needs at least one sequence".into()));
        }
        let depth = caches.first().map_or(0, |cache| cache.layers.len());
        let layers = (0..depth).map(|i| {
            let of_all = caches.iter().map(|cache| cache.layers.get(i).cloned());
            LayerCache::merge(of_all.collect::<Option<_>>().ok_or_else(other_model)?)
        });
        Ok(Self::new(layers.collect::<Result<_>>()?))
    }

    /// Adds the rows of `other` behind these.
    ///
    /// # Errors
    /// When it is of another model.
    pub fn extend(&mut self, other: Self) -> Result<()> {
        if self.layers.len() != other.layers.len() {
            return Err(other_model());
        }
        let pairs = self.layers.iter().zip(&other.layers);
        self.layers = pairs.map(|(a, b)| LayerCache::extend(a, b)).collect::<Result<_>>()?;
        Ok(())
    }

    /// Keeps the given rows, named in ascending order.
    ///
    /// # Errors
    /// Without a change, when there is none, one does not exist, or they are not in order.
    pub fn filter(&mut self, rows: &[usize]) -> Result<()> {
        let count = self.rows();
        let Some(&last) = rows.last() else {
            return Err(Error::Input("a batch keeps at least one row: drop its cache instead".into()));
        };
        check_row(last, count)?;
        if !rows.is_sorted_by(|a, b| a < b) {
            return Err(Error::Input(format!("the rows to keep are not in ascending order: {rows:?}")));
        }
        if rows.len() == count {
            return Ok(());
        }
        self.layers = self.layers.iter().map(|layer| layer.filter(rows)).collect::<Result<_>>()?;
        Ok(())
    }

    /// A copy of one row as the cache of a single sequence, in memory of its own.
    ///
    /// # Errors
    /// When there is no such row, or memory is refused.
    pub fn extract(&self, row: usize) -> Result<Self> {
        check_row(row, self.rows())?;
        Ok(Self::new(self.layers.iter().map(|layer| layer.extract(row)).collect::<Result<_>>()?))
    }

    /// Prepares for one call in which row `i` has `lengths[i]` tokens and behind them padding up to the
    /// longest. [`Cache::end_padded`] follows the call.
    ///
    /// # Errors
    /// When the lengths are not those of this batch, and for the CPU kernels, which take no padding.
    pub fn begin_padded(&mut self, lengths: &[i32]) -> Result<()> {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if lengths.len() != self.rows() || lengths.iter().any(|&length| length < 1) {
            let message = format!("a batch of {} rows has no calls of {lengths:?} tokens", self.rows());
            return Err(Error::Input(message));
        }
        let padding: Vec<i32> = lengths.iter().map(|length| longest - length).collect();
        if padding.iter().all(|&padding| padding == 0) {
            return Ok(());
        }
        if self.layers.iter().any(|layer| matches!(layer, LayerCache::Kernel(_) | LayerCache::BatchKernel(_)))
        {
            let message = "the CPU kernels take rows of equal length: run prompts one by one";
            return Err(Error::Input(message.into()));
        }
        for layer in &mut self.layers {
            layer.begin_padded(&padding);
        }
        Ok(())
    }

    /// Moves the padding of the last call out of the way. Does nothing when there was none.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn end_padded(&mut self) -> Result<()> {
        self.layers.iter_mut().try_for_each(LayerCache::end_padded)
    }
}

/// Where the tokens of a batch's rows lie among its columns.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    /// Columns before a row's first token.
    left: Vec<i32>,
    /// Tokens that a row has consumed; padding counts until it is moved.
    tokens: Vec<i32>,
    /// Columns behind a row's last token in a padded call.
    right: Option<Vec<i32>>,
}

impl Rows {
    pub(super) fn new(left: Vec<i32>, tokens: Vec<i32>) -> Self {
        Self { left, tokens, right: None }
    }

    pub(super) fn left(&self, row: usize) -> i32 {
        self.left.get(row).copied().unwrap_or(0)
    }

    pub(super) fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    pub(super) fn count(&self) -> i32 {
        self.left.len() as i32
    }

    /// The fewest columns before a first token.
    pub(super) fn common_left(&self) -> i32 {
        self.left.iter().copied().min().unwrap_or(0)
    }

    /// All rows get `count` more columns.
    pub(super) fn append(&mut self, count: i32) {
        self.tokens.iter_mut().for_each(|tokens| *tokens += count);
    }

    /// All rows lose their last `count` columns.
    pub(super) fn trim(&mut self, count: i32) {
        self.append(-count);
    }

    /// All rows lose their first `count` columns, and with them padding.
    pub(super) fn drop_first(&mut self, count: i32) {
        self.left.iter_mut().for_each(|left| *left = (*left - count).max(0));
    }

    /// All rows get `count` columns of padding before the others.
    pub(super) fn shift(&mut self, count: i32) {
        self.left.iter_mut().for_each(|left| *left += count);
    }

    pub(super) fn filtered(&self, rows: &[usize]) -> Self {
        let pick = |of: &[i32]| rows.iter().filter_map(|&row| of.get(row).copied()).collect();
        Self { left: pick(&self.left), tokens: pick(&self.tokens), right: None }
    }

    pub(super) fn extend(&mut self, other: Self) {
        self.left.extend(other.left);
        self.tokens.extend(other.tokens);
    }

    pub(super) fn begin_padded(&mut self, padding: &[i32]) {
        self.right = Some(padding.to_vec());
    }

    /// Notes that the padding behind the tokens is now before them; returns how much that was.
    pub(super) fn end_padded(&mut self) -> Option<Vec<i32>> {
        let right = self.right.take()?;
        for ((left, tokens), right) in self.left.iter_mut().zip(&mut self.tokens).zip(&right) {
            *left += right;
            *tokens -= right;
        }
        Some(right)
    }

    /// Which of the columns `0..columns` are no padding once the first `dropped` of them are gone,
    /// `[rows, 1, 1, columns]`.
    pub(super) fn visible(&self, columns: i32, dropped: i32) -> Result<Array> {
        let left: Vec<i32> = self.left.iter().map(|left| left - dropped).collect();
        let left = Array::from_slice(&left, [self.count(), 1, 1, 1])?;
        let columns = Array::arange(0.0, f64::from(columns), 1.0, Dtype::I32)?;
        Ok(left.less_equal(&columns)?)
    }
}

/// A buffer in which `used` columns of `rows` rows are used.
#[derive(Clone, Copy)]
pub(super) struct Used<'a> {
    pub(super) buffer: Option<&'a KeysValues>,
    pub(super) used: i32,
    pub(super) rows: i32,
}

impl Used<'_> {
    fn columns(&self) -> Result<i32> {
        self.buffer.map_or(Ok(0), KeysValues::columns)
    }

    /// The buffer with the last used column at the end of `used` of `columns` columns, and what stands before
    /// it. `like` gives the shape of an empty one.
    fn aligned(&self, like: &KeysValues, used: i32, columns: i32) -> Result<KeysValues> {
        let left = used - self.used;
        let right = columns - left - self.columns()?;
        let buffer = match self.buffer {
            Some(buffer) if right < 0 => buffer.slice(0, columns - left)?,
            Some(buffer) => buffer.clone(),
            None => like.map(|a| {
                let shape = a.shape();
                Array::zeros([self.rows, shape[1], 0, shape[3]], a.dtype())
            })?,
        };
        if left == 0 && right <= 0 { Ok(buffer) } else { buffer.pad(left, right.max(0)) }
    }
}

/// The rows of both under one another, their last used columns in line. `None` when both are empty.
pub(super) fn stack([a, b]: [Used<'_>; 2]) -> Result<Option<KeysValues>> {
    let Some(like) = a.buffer.or(b.buffer) else { return Ok(None) };
    let (used, columns) = (a.used.max(b.used), a.columns()?.max(b.columns()?));
    let aligned = [a.aligned(like, used, columns)?, b.aligned(like, used, columns)?];
    Ok(Some(KeysValues::stack(&aligned.each_ref())?))
}

/// Sequences as rows that end in column `longest`. `None` when all are empty.
pub(super) fn stack_sequences(sequences: &[Option<KeysValues>], longest: i32) -> Result<Option<KeysValues>> {
    let Some(like) = sequences.iter().flatten().next() else { return Ok(None) };
    let rows = sequences.iter().map(|sequence| {
        let sequence = Used { buffer: sequence.as_ref(), used: 0, rows: 1 };
        Used { used: sequence.columns()?, ..sequence }.aligned(like, longest, longest)
    });
    let rows = rows.collect::<Result<Vec<_>>>()?;
    Ok(Some(KeysValues::stack(&rows.iter().collect::<Vec<_>>())?))
}

fn check_row(row: usize, count: usize) -> Result<()> {
    if row < count { Ok(()) } else { Err(no_row(row, count)) }
}

pub(super) fn no_row(row: usize, count: usize) -> Error {
    Error::Input(format!("there is no row {row} in a batch of {count}"))
}

fn other_model() -> Error {
    Error::Input("caches of different models can't be one batch".into())
}

impl LayerCache {
    fn rows(&self) -> usize {
        match self {
            Self::Full(_) | Self::Rotating(_) | Self::Kernel(_) => 1,
            Self::Recurrent(cache) => cache.lengths().len(),
            Self::BatchFull(cache) => cache.lengths().len(),
            Self::BatchRotating(cache) => cache.lengths().len(),
            Self::BatchKernel(cache) => cache.rows().len(),
        }
    }

    /// See [`Cache::lengths`].
    pub fn lengths(&self) -> Vec<i32> {
        match self {
            Self::Full(cache) => vec![cache.offset()],
            Self::Rotating(cache) => vec![cache.offset()],
            Self::Kernel(cache) => vec![cache.offset()],
            Self::Recurrent(cache) => cache.lengths().to_vec(),
            Self::BatchFull(cache) => cache.lengths().to_vec(),
            Self::BatchRotating(cache) => cache.lengths().to_vec(),
            Self::BatchKernel(cache) => cache.rows().iter().map(KernelKvCache::offset).collect(),
        }
    }

    fn merge(caches: Vec<Self>) -> Result<Self> {
        let all = caches.len();
        let (mut full, mut rotating, mut kernel, mut recurrent) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for cache in caches {
            match cache {
                Self::Full(cache) => full.push(cache),
                Self::Rotating(cache) => rotating.push(cache),
                Self::Kernel(cache) => kernel.push(cache),
                Self::Recurrent(cache) => recurrent.push(cache),
                Self::BatchFull(_) | Self::BatchRotating(_) | Self::BatchKernel(_) => {
                    return Err(Error::Input("batches are joined by extending one by the other".into()));
                }
            }
        }
        Ok(match all {
            n if n == full.len() => Self::BatchFull(BatchKvCache::merge(&full)?),
            n if n == rotating.len() => Self::BatchRotating(BatchRotatingKvCache::merge(&rotating)?),
            n if n == kernel.len() => Self::BatchKernel(kernel.into()),
            n if n == recurrent.len() => Self::Recurrent(RecurrentCache::stacked(&recurrent)?),
            _ => return Err(other_model()),
        })
    }

    /// This layer's cache as one of a batch.
    fn batched(&self) -> Result<Self> {
        Ok(match self.clone() {
            Self::Full(cache) => Self::BatchFull(cache.into()),
            Self::Rotating(cache) => Self::BatchRotating(cache.try_into()?),
            Self::Kernel(cache) => Self::BatchKernel(vec![cache].into()),
            batch => batch,
        })
    }

    fn extend(&self, other: &Self) -> Result<Self> {
        Ok(match (self.batched()?, other.batched()?) {
            (Self::BatchFull(a), Self::BatchFull(b)) => Self::BatchFull(a.extended(b)?),
            (Self::BatchRotating(a), Self::BatchRotating(b)) => Self::BatchRotating(a.extended(b)?),
            (Self::BatchKernel(a), Self::BatchKernel(b)) => Self::BatchKernel(a.extended(b)),
            (Self::Recurrent(a), Self::Recurrent(b)) => Self::Recurrent(RecurrentCache::stacked(&[a, b])?),
            _ => return Err(other_model()),
        })
    }

    fn filter(&self, rows: &[usize]) -> Result<Self> {
        Ok(match self {
            Self::BatchFull(cache) => Self::BatchFull(cache.filtered(rows)?),
            Self::BatchRotating(cache) => Self::BatchRotating(cache.filtered(rows)?),
            Self::BatchKernel(cache) => Self::BatchKernel(cache.filtered(rows)),
            Self::Recurrent(cache) => Self::Recurrent(cache.filtered(rows)?),
            single => single.clone(),
        })
    }

    fn extract(&self, row: usize) -> Result<Self> {
        Ok(match self {
            Self::BatchFull(cache) => Self::Full(cache.extract(row)?),
            Self::BatchRotating(cache) => Self::Rotating(cache.extract(row)?),
            Self::BatchKernel(cache) => Self::Kernel(cache.extract(row)?),
            Self::Recurrent(cache) => Self::Recurrent(cache.extract(row)?),
            single => single.compacted()?,
        })
    }

    fn begin_padded(&mut self, padding: &[i32]) {
        match self {
            Self::BatchFull(cache) => cache.begin_padded(padding),
            Self::BatchRotating(cache) => cache.begin_padded(padding),
            Self::Recurrent(cache) => cache.begin_padded(padding),
            // A single sequence has no padding.
            Self::Full(_) | Self::Rotating(_) | Self::Kernel(_) | Self::BatchKernel(_) => {}
        }
    }

    fn end_padded(&mut self) -> Result<()> {
        match self {
            Self::BatchFull(cache) => cache.end_padded(),
            Self::BatchRotating(cache) => cache.end_padded(),
            Self::Recurrent(cache) => {
                cache.end_padded();
                Ok(())
            }
            Self::Full(_) | Self::Rotating(_) | Self::Kernel(_) | Self::BatchKernel(_) => Ok(()),
        }
    }
}
