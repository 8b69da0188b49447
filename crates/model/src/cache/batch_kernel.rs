use russet_mlx::Array;

use super::KernelKvCache;
use super::rows::no_row;
use crate::Result;

/// Keys and values of several sequences as the CPU kernels keep them: each row in memory of its own, whatever
/// the others do.
#[derive(Clone, Debug)]
pub struct BatchKernelKvCache {
    rows: Vec<KernelKvCache>,
}

impl From<Vec<KernelKvCache>> for BatchKernelKvCache {
    fn from(rows: Vec<KernelKvCache>) -> Self {
        Self { rows }
    }
}

impl BatchKernelKvCache {
    /// The cache of each row.
    pub fn rows(&self) -> &[KernelKvCache] {
        &self.rows
    }

    pub(super) fn rows_mut(&mut self) -> &mut [KernelKvCache] {
        &mut self.rows
    }

    /// What is available once all columns are written.
    pub fn arrays(&self) -> Vec<Array> {
        self.rows.iter().flat_map(KernelKvCache::arrays).collect()
    }

    /// Bytes of the memory, unused columns included.
    pub fn nbytes(&self) -> usize {
        self.rows.iter().map(KernelKvCache::nbytes).sum()
    }

    /// Forgets the last `count` tokens of each row.
    pub fn trim(&mut self, count: i32) -> i32 {
        let count = count.min(self.rows.iter().map(KernelKvCache::offset).min().unwrap_or(0));
        self.rows.iter_mut().map(|row| row.trim(count)).min().unwrap_or(0)
    }

    pub(super) fn extended(mut self, other: Self) -> Self {
        self.rows.extend(other.rows);
        self
    }

    pub(super) fn filtered(&self, rows: &[usize]) -> Self {
        Self { rows: rows.iter().filter_map(|&row| self.rows.get(row).cloned()).collect() }
    }

    /// One row alone, in memory of its own.
    pub(super) fn extract(&self, row: usize) -> Result<KernelKvCache> {
        self.rows.get(row).ok_or_else(|| no_row(row, self.rows.len()))?.compacted()
    }
}
