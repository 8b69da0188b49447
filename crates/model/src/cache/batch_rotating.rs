use russet_mlx::Array;
use russet_mlx::fast::Mask;

use super::rows::{Rows, Used, stack, stack_sequences};
use super::{RotatingKvCache, causal_mask};
use crate::{Error, Result};

/// Keys and values of the last tokens of several sequences (`mlx_lm.models.cache.BatchRotatingKVCache`).
///
/// One ring for all rows: a column is overwritten in all of them at once. Rows end in the same column; those
/// with fewer tokens than the ring has have padding on their left.
#[derive(Clone, Debug)]
pub struct BatchRotatingKvCache {
    /// The ring of all rows; what it counts as tokens are columns.
    columns: RotatingKvCache,
    rows: Rows,
}

impl TryFrom<RotatingKvCache> for BatchRotatingKvCache {
    type Error = Error;

    fn try_from(cache: RotatingKvCache) -> Result<Self> {
        check_keep(&cache)?;
        Ok(Self { rows: Rows::new(vec![0], vec![cache.offset]), columns: cache })
    }
}

fn check_keep(cache: &RotatingKvCache) -> Result<()> {
    match cache.keep {
        0 => Ok(()),
        keep => Err(Error::Input(format!(
            "a ring that keeps its first {keep} tokens can't be part of a batch: run the sequence alone"
        ))),
    }
}

fn other_size() -> Error {
    Error::Input("rings of different sizes can't be one batch".into())
}

impl BatchRotatingKvCache {
    /// A batch of sequences.
    pub(super) fn merge(caches: &[RotatingKvCache]) -> Result<Self> {
        let max_size = caches.first().map_or(0, |cache| cache.max_size);
        for cache in caches {
            check_keep(cache)?;
            if cache.max_size != max_size {
                return Err(other_size());
            }
        }
        let sequences = caches.iter().map(RotatingKvCache::last).collect::<Result<Vec<_>>>()?;
        let held: Vec<i32> = caches.iter().map(|cache| cache.offset.min(max_size)).collect();
        let longest = held.iter().copied().max().unwrap_or(0);
        let left = held.iter().map(|held| longest - held).collect();
        let tokens = caches.iter().map(RotatingKvCache::offset).collect();
        let columns = RotatingKvCache {
            buffer: stack_sequences(&sequences, longest)?,
            offset: longest,
            index: longest,
            ..RotatingKvCache::new(max_size, 0)
        };
        Ok(Self { columns, rows: Rows::new(left, tokens) })
    }

    /// See [`LayerCache::update`](super::LayerCache::update).
    pub fn update(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        let length = keys.dim(2)?;
        let dropped = self.dropped()?;
        self.rows.drop_first(dropped);
        self.rows.append(length);
        self.columns.update(keys, values)
    }

    /// Columns that the next update drops or overwrites.
    fn dropped(&self) -> Result<i32> {
        // So that each new token sees a ring full of columns, its own included.
        Ok((self.columns.held()? + 1 - self.columns.max_size).max(0))
    }

    /// See [`LayerCache::keys_values`](super::LayerCache::keys_values).
    pub fn keys_values(&self) -> Result<(Array, Array)> {
        self.columns.keys_values()
    }

    /// See [`LayerCache::mask`](super::LayerCache::mask).
    pub fn mask(&self, length: i32, window: Option<i32>) -> Result<Mask> {
        let RotatingKvCache { max_size, offset, index, .. } = self.columns;
        let former = offset.min(max_size - 1);
        let mask = causal_mask(length, former, Some(window.unwrap_or(max_size)))?;
        let mask = mask.bitwise_and(&self.rows.visible(former + length, self.dropped()?)?)?;
        if length > 1 || self.dropped()? == 0 {
            return Ok(Mask::Array(mask));
        }
        // One token is written over the oldest column: turn the mask to where columns lie.
        let index = if index >= max_size { 0 } else { index };
        Ok(Mask::Array(mask.roll(index + 1, -1)?))
    }

    /// Tokens that each row has consumed, including those no longer held.
    pub fn lengths(&self) -> &[i32] {
        self.rows.tokens()
    }

    /// The buffers, unused columns included.
    pub fn arrays(&self) -> Vec<Array> {
        self.columns.arrays()
    }

    /// Whether nothing has been overwritten yet.
    pub fn is_trimmable(&self) -> bool {
        self.columns.is_trimmable()
    }

    /// Forgets the last `count` tokens of each row. Exact while [`BatchRotatingKvCache::is_trimmable`].
    pub fn trim(&mut self, count: i32) -> i32 {
        let count = self.columns.trim(count.min(self.rows.tokens().iter().copied().min().unwrap_or(0)));
        self.rows.trim(count);
        count
    }

    /// These rows and those of `other` behind them.
    pub(super) fn extended(mut self, mut other: Self) -> Result<Self> {
        let max_size = self.columns.max_size;
        if other.columns.max_size != max_size {
            return Err(other_size());
        }
        // Rings turned alike stay so.
        let (a, b) = (&mut self.columns, &mut other.columns);
        if a.is_turned()? != b.is_turned()? || a.index != b.index {
            a.turn_back()?;
            b.turn_back()?;
        }
        let columns = RotatingKvCache {
            buffer: stack([self.used(), other.used()])?,
            offset: self.columns.offset.max(other.columns.offset),
            index: self.columns.index.max(other.columns.index),
            ..RotatingKvCache::new(max_size, 0)
        };
        self.rows.shift(columns.index - self.columns.index);
        other.rows.shift(columns.index - other.columns.index);
        self.rows.extend(other.rows);
        Ok(Self { columns, rows: self.rows })
    }

    fn used(&self) -> Used<'_> {
        let RotatingKvCache { buffer, index, .. } = &self.columns;
        Used { buffer: buffer.as_ref(), used: *index, rows: self.rows.count() }
    }

    /// Some of the rows. Padding stays: the ring's columns are those of all rows.
    pub(super) fn filtered(&self, rows: &[usize]) -> Result<Self> {
        let buffer = match &self.columns.buffer {
            Some(buffer) => Some(buffer.take_rows(rows)?),
            None => None,
        };
        let columns = RotatingKvCache { buffer, ..self.columns };
        Ok(Self { columns, rows: self.rows.filtered(rows) })
    }

    /// One row alone, in memory of its own, without columns that no token will see.
    pub(super) fn extract(&self, row: usize) -> Result<RotatingKvCache> {
        let (left, offset) = (self.rows.left(row), self.rows.tokens().get(row).copied().unwrap_or(0));
        let buffer = self.columns.buffer.as_ref().map(|buffer| buffer.slice_row(row)).transpose()?;
        let mut columns = RotatingKvCache { buffer, ..self.columns };
        columns.turn_back()?;
        let held = columns.index;
        let first = left.max(held - self.columns.max_size);
        let buffer = match columns.buffer {
            Some(buffer) if first < held => buffer.slice(first, held)?.copied()?,
            _ => return Ok(RotatingKvCache::new(self.columns.max_size, 0)),
        };
        Ok(RotatingKvCache { buffer: Some(buffer), offset, index: held - first, ..self.columns })
    }

    pub(super) fn begin_padded(&mut self, padding: &[i32]) {
        self.rows.begin_padded(padding);
    }

    pub(super) fn end_padded(&mut self) -> Result<()> {
        if let (Some(padding), Some(buffer)) = (self.rows.end_padded(), &mut self.columns.buffer) {
            *buffer = buffer.roll_rows(&padding)?;
        }
        Ok(())
    }
}
