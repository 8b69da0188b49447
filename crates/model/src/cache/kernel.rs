use std::sync::Arc;

use russet_kernels::ops::{KvBuffer, KvType};
use russet_mlx::{Array, Dtype, eval};

use super::empty;
use crate::{Error, Result};

/// Buffers have a multiple of this many rows.
const GROWTH: usize = 32;

/// Keys and values of all tokens as the CPU kernels keep them: appended in place, in memory that grows by
/// doubling.
///
/// A clone shares the memory until one of the two is appended to; that one then goes on in a copy.
#[derive(Clone, Debug)]
pub struct KernelKvCache {
    kv: KvType,
    buffer: Option<KvBuffer>,
    /// Counts the caches that share `buffer`, which its handles in pending operations do not.
    sharers: Arc<()>,
    /// Available once the last rows are written.
    appended: Option<Array>,
    offset: i32,
    /// Rows of `buffer` that were written: those behind `offset` belong to tokens that were trimmed.
    written: i32,
    reserved: i32,
}

/// Where a call appends.
pub(crate) struct Append {
    pub(crate) buffer: KvBuffer,
    /// Where the former rows are, if not in `buffer`.
    pub(crate) copy_from: Option<KvBuffer>,
    /// What must have run before.
    pub(crate) after: Option<Array>,
}

impl KernelKvCache {
    /// An empty cache.
    pub fn new(kv: KvType) -> Self {
        Self { kv, buffer: None, sharers: Arc::new(()), appended: None, offset: 0, written: 0, reserved: 0 }
    }

    /// Tokens consumed.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// Makes the next buffer large enough for `tokens` tokens, so that it need not grow until then.
    pub fn reserve(&mut self, tokens: i32) {
        self.reserved = self.reserved.max(tokens);
    }

    /// Where to write `length` more rows of `kv_heads` heads.
    ///
    /// # Errors
    /// When memory is refused.
    pub(crate) fn begin_append(&mut self, length: i32, kv_heads: usize, head_dim: usize) -> Result<Append> {
        let needed = self.offset.saturating_add(length);
        let after = self.appended.take();
        // An operation that has not run yet may read the rows of trimmed tokens.
        let overwrites = self.offset < self.written;
        if let Some(buffer) = &self.buffer
            && Arc::strong_count(&self.sharers) == 1
            && needed as usize <= buffer.capacity()
            && !(overwrites && buffer.is_shared())
        {
            return Ok(Append { buffer: buffer.clone(), copy_from: None, after });
        }
        let former = self.buffer.as_ref().map_or(0, KvBuffer::capacity);
        let full = former < needed as usize;
        let grown = if full && self.offset > 0 { former.saturating_mul(2) } else { former };
        let rows = grown.max(needed as usize).max(self.reserved as usize).next_multiple_of(GROWTH);
        let buffer = KvBuffer::new(self.kv, kv_heads, rows, head_dim)?;
        let copy_from = self.buffer.replace(buffer.clone()).filter(|_| self.offset > 0);
        self.sharers = Arc::new(());
        Ok(Append { buffer, copy_from, after })
    }

    /// Notes that `length` rows will have been written when `appended` is available.
    pub(crate) fn end_append(&mut self, appended: Array, length: i32) {
        self.appended = Some(appended);
        self.offset += length;
        self.written = self.offset;
    }

    /// The memory with all rows, and what must have run before they are read.
    ///
    /// # Errors
    /// When there are none.
    pub(crate) fn appended_rows(&self) -> Result<(KvBuffer, Option<Array>)> {
        let buffer = self.buffer.clone().ok_or_else(empty)?;
        Ok((buffer, self.appended.clone()))
    }

    /// What is available once all rows are written.
    pub fn arrays(&self) -> Vec<Array> {
        self.appended.iter().cloned().collect()
    }

    /// Bytes of the memory, unused rows included.
    pub fn nbytes(&self) -> usize {
        self.buffer.as_ref().map_or(0, KvBuffer::nbytes)
    }

    /// Forgets the last `count` tokens; their rows stay in the buffer until overwritten.
    pub fn trim(&mut self, count: i32) -> i32 {
        let count = count.clamp(0, self.offset);
        self.offset -= count;
        count
    }

    /// A copy in memory of its own, without unused rows.
    pub(super) fn compacted(&self) -> Result<Self> {
        let buffer = match self.buffer.as_ref().filter(|_| self.offset > 0) {
            Some(buffer) => {
                eval(&self.arrays())?;
                Some(buffer.compacted(self.offset as usize)?)
            }
            None => None,
        };
        Ok(Self { buffer, offset: self.offset, written: self.offset, ..Self::new(self.kv) })
    }

    /// Keys and values of all tokens.
    pub(super) fn to_arrays(&self) -> Result<[Array; 2]> {
        eval(&self.arrays())?;
        Ok(self.filled()?.to_arrays(self.offset as usize)?)
    }

    /// The shape and type of keys and of values of `tokens` tokens.
    pub(super) fn form(&self, tokens: i32) -> Result<(Vec<i32>, Dtype)> {
        let [heads, width] = self.filled()?.heads_and_width()?.map(|n| n as i32);
        let dtype = match self.kv {
            KvType::F16 => Dtype::F16,
            KvType::F32 => Dtype::F32,
        };
        Ok((vec![1, heads, tokens, width], dtype))
    }

    /// The cache of a sequence with these keys and values.
    pub(super) fn of_arrays(keys: &Array, values: &Array) -> Result<Self> {
        let kv = if keys.dtype() == Dtype::F16 { KvType::F16 } else { KvType::F32 };
        let buffer = Some(KvBuffer::from_arrays(keys, values)?);
        let tokens = keys.dim(2)?;
        Ok(Self { buffer, offset: tokens, written: tokens, ..Self::new(kv) })
    }

    pub(super) fn filled(&self) -> Result<&KvBuffer> {
        self.buffer.as_ref().ok_or_else(|| Error::Input("the cache has no keys and values".into()))
    }
}
