use russet_mlx::Array;
use russet_mlx::fast::Mask;

use super::{GROWTH, KeysValues, causal_mask, empty};
use crate::Result;

/// Keys and values of all tokens (`mlx_lm.models.cache.KVCache`).
///
/// The buffer grows in steps of 256 columns; what is returned is a slice of it, because a GPU may choose
/// another kernel for another stride.
#[derive(Clone, Debug, Default)]
pub struct KvCache {
    pub(super) buffer: Option<KeysValues>,
    pub(super) offset: i32,
}

impl KvCache {
    /// An empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// See [`LayerCache::update`](super::LayerCache::update).
    pub fn update(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        let new = KeysValues { keys: keys.clone(), values: values.clone() };
        let (previous, count) = (self.offset, new.columns()?);
        let mut buffer = match self.buffer.take() {
            Some(buffer) if previous + count <= buffer.columns()? => buffer,
            full => {
                let fresh = new.zeros_like((GROWTH + count - 1) / GROWTH * GROWTH)?;
                match full {
                    None => fresh,
                    Some(old) if previous % GROWTH == 0 => KeysValues::concatenate(&[&old, &fresh])?,
                    Some(old) => KeysValues::concatenate(&[&old.slice(0, previous)?, &fresh])?,
                }
            }
        };
        buffer.write(&new, previous)?;
        self.offset += count;
        self.buffer.insert(buffer).used(self.offset)
    }

    /// See [`LayerCache::keys_values`](super::LayerCache::keys_values).
    pub fn keys_values(&self) -> Result<(Array, Array)> {
        self.buffer.as_ref().ok_or_else(empty)?.used(self.offset)
    }

    /// See [`LayerCache::mask`](super::LayerCache::mask).
    pub fn mask(&self, length: i32, window: Option<i32>) -> Result<Mask> {
        Ok(match window {
            Some(_) => Mask::Array(causal_mask(length, self.offset, window)?),
            None if length == 1 => Mask::None,
            None => Mask::Causal,
        })
    }

    /// Tokens consumed.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// The buffers, unused columns included.
    pub fn arrays(&self) -> Vec<Array> {
        self.buffer.iter().flat_map(|b| [b.keys.clone(), b.values.clone()]).collect()
    }

    /// Forgets the last `count` tokens; their columns stay in the buffer until overwritten.
    pub fn trim(&mut self, count: i32) -> i32 {
        let count = count.clamp(0, self.offset);
        self.offset -= count;
        count
    }

    /// The used columns, unless there are none.
    pub(super) fn used(&self) -> Result<Option<KeysValues>> {
        match &self.buffer {
            Some(buffer) if self.offset > 0 => Ok(Some(buffer.slice(0, self.offset)?)),
            _ => Ok(None),
        }
    }

    /// A copy in memory of its own, without unused columns.
    pub(super) fn compacted(&self) -> Result<Self> {
        let buffer = self.used()?.map(|used| used.copied()).transpose()?;
        Ok(Self { buffer, offset: self.offset })
    }
}
