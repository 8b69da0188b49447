use russet_kernels::ops::KvType;
use russet_mlx::Array;

use super::GROWTH;

/// Rows that are reserved at most; a longer sequence grows its buffers.
const MAX_RESERVED: i32 = 1 << 13;

/// Keys and values of all tokens as the CPU kernels keep them: `[kv_heads, capacity, head_dim]`, appended
/// in place.
///
/// A clone shares the buffers until one of the two is appended to, which then copies.
#[derive(Clone, Debug)]
pub struct KernelKvCache {
    kv: KvType,
    buffers: Option<(Array, Array)>,
    offset: i32,
    capacity: i32,
}

impl KernelKvCache {
    /// An empty cache.
    pub fn new(kv: KvType) -> Self {
        Self { kv, buffers: None, offset: 0, capacity: 0 }
    }

    /// What keys and values are kept in.
    pub fn kv_type(&self) -> KvType {
        self.kv
    }

    /// Tokens consumed.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// Makes the next buffers large enough for `tokens` tokens, so that they need not grow until then. A limit
    /// that may never be reached takes no memory: no more than 8192 rows are reserved.
    pub fn reserve(&mut self, tokens: i32) {
        self.capacity = self.capacity.max(round_up(tokens.min(MAX_RESERVED)));
    }

    /// Rows that the buffers shall have for `length` more tokens. Twice as many when they must grow, so that
    /// the copies of a long sequence add up to no more than its length.
    pub(crate) fn capacity_for(&mut self, length: i32) -> i32 {
        let needed = self.offset.saturating_add(length);
        if needed > self.capacity {
            self.capacity = round_up(needed.max(self.capacity.saturating_mul(2)));
        }
        self.capacity
    }

    /// The buffers, to be appended to.
    pub(crate) fn take(&mut self) -> Option<(Array, Array)> {
        self.buffers.take()
    }

    /// The buffers with `length` more rows.
    pub(crate) fn put(&mut self, keys: Array, values: Array, length: i32) {
        self.buffers = Some((keys, values));
        self.offset += length;
    }

    /// The buffers, unused rows included.
    pub fn arrays(&self) -> Vec<Array> {
        self.buffers.iter().flat_map(|(k, v)| [k.clone(), v.clone()]).collect()
    }

    /// Forgets the last `count` tokens; their rows stay in the buffers until overwritten.
    pub fn trim(&mut self, count: i32) -> i32 {
        let count = count.clamp(0, self.offset);
        self.offset -= count;
        count
    }
}

fn round_up(rows: i32) -> i32 {
    rows.max(1).saturating_add(GROWTH - 1) / GROWTH * GROWTH
}
