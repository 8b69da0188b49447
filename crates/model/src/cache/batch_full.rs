use russet_mlx::Array;
use russet_mlx::fast::Mask;

use super::rows::{Rows, Used, stack, stack_sequences};
use super::{KvCache, causal_mask};
use crate::Result;

/// Keys and values of all tokens of several sequences (`mlx_lm.models.cache.BatchKVCache`).
///
/// All rows end in the same column; shorter ones have padding on their left.
#[derive(Clone, Debug)]
pub struct BatchKvCache {
    /// The buffer of all rows; what it counts as tokens are columns.
    columns: KvCache,
    rows: Rows,
}

impl From<KvCache> for BatchKvCache {
    fn from(cache: KvCache) -> Self {
        Self { rows: Rows::new(vec![0], vec![cache.offset]), columns: cache }
    }
}

impl BatchKvCache {
    /// A batch of sequences.
    pub(super) fn merge(caches: &[KvCache]) -> Result<Self> {
        let sequences = caches.iter().map(KvCache::used).collect::<Result<Vec<_>>>()?;
        let tokens: Vec<i32> = caches.iter().map(KvCache::offset).collect();
        let longest = tokens.iter().copied().max().unwrap_or(0);
        let left = tokens.iter().map(|tokens| longest - tokens).collect();
        let columns = KvCache { buffer: stack_sequences(&sequences, longest)?, offset: longest };
        Ok(Self { columns, rows: Rows::new(left, tokens) })
    }

    /// See [`LayerCache::update`](super::LayerCache::update).
    pub fn update(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        self.rows.append(keys.dim(2)?);
        self.columns.update(keys, values)
    }

    /// See [`LayerCache::keys_values`](super::LayerCache::keys_values).
    pub fn keys_values(&self) -> Result<(Array, Array)> {
        self.columns.keys_values()
    }

    /// See [`LayerCache::mask`](super::LayerCache::mask).
    pub fn mask(&self, length: i32, window: Option<i32>) -> Result<Mask> {
        let used = self.columns.offset;
        let mask = causal_mask(length, used, window)?;
        Ok(Mask::Array(mask.bitwise_and(&self.rows.visible(used + length, 0)?)?))
    }

    /// Tokens that each row has consumed.
    pub fn lengths(&self) -> &[i32] {
        self.rows.tokens()
    }

    /// The buffers, unused columns included.
    pub fn arrays(&self) -> Vec<Array> {
        self.columns.arrays()
    }

    /// Forgets the last `count` tokens of each row.
    pub fn trim(&mut self, count: i32) -> i32 {
        let count = self.columns.trim(count.min(self.rows.tokens().iter().copied().min().unwrap_or(0)));
        self.rows.trim(count);
        count
    }

    /// These rows and those of `other` behind them.
    pub(super) fn extended(mut self, mut other: Self) -> Result<Self> {
        let used = self.columns.offset.max(other.columns.offset);
        let buffer = stack([self.used(), other.used()])?;
        self.rows.shift(used - self.columns.offset);
        other.rows.shift(used - other.columns.offset);
        self.rows.extend(other.rows);
        Ok(Self { columns: KvCache { buffer, offset: used }, rows: self.rows })
    }

    fn used(&self) -> Used<'_> {
        let KvCache { buffer, offset } = &self.columns;
        Used { buffer: buffer.as_ref(), used: *offset, rows: self.rows.count() }
    }

    /// Some of the rows, without the padding that they share.
    pub(super) fn filtered(&self, rows: &[usize]) -> Result<Self> {
        let mut kept = self.rows.filtered(rows);
        let padding = kept.common_left();
        kept.drop_first(padding);
        let KvCache { buffer, offset } = &self.columns;
        let buffer = match buffer {
            Some(buffer) => Some(buffer.slice(padding, buffer.columns()?)?.take_rows(rows)?),
            None => None,
        };
        Ok(Self { columns: KvCache { buffer, offset: offset - padding }, rows: kept })
    }

    /// One row alone, in memory of its own.
    pub(super) fn extract(&self, row: usize) -> Result<KvCache> {
        let KvCache { buffer, offset } = &self.columns;
        let left = self.rows.left(row);
        match buffer {
            Some(buffer) if left < *offset => {
                let buffer = buffer.slice_row(row)?.slice(left, *offset)?.copied()?;
                Ok(KvCache { buffer: Some(buffer), offset: offset - left })
            }
            _ => Ok(KvCache::new()),
        }
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
