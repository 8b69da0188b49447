use russet_mlx::fast::Mask;
use russet_mlx::{Array, Dtype};

use super::{GROWTH, KeysValues, causal_mask, empty};
use crate::Result;

/// Keys and values of the last `max_size` tokens (`mlx_lm.models.cache.RotatingKVCache`).
///
/// One token at a time overwrites the oldest column in place, and the columns are attended to in ring
/// order. Several tokens are appended after the columns are put into temporal order, and may leave up to
/// `max_size + count - 1` columns, so that each of them sees a whole window.
#[derive(Clone, Debug)]
pub struct RotatingKvCache {
    pub(super) max_size: i32,
    /// First columns that are never overwritten.
    pub(super) keep: i32,
    pub(super) buffer: Option<KeysValues>,
    pub(super) offset: i32,
    /// Where the next token is written.
    pub(super) index: i32,
}

impl RotatingKvCache {
    /// An empty cache of `max_size` columns, the first `keep` of which stay.
    pub fn new(max_size: i32, keep: i32) -> Self {
        Self { max_size, keep, buffer: None, offset: 0, index: 0 }
    }

    /// See [`LayerCache::update`](super::LayerCache::update).
    pub fn update(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        let new = KeysValues { keys: keys.clone(), values: values.clone() };
        if new.columns()? == 1 { self.update_in_place(&new) } else { self.append(new) }
    }

    fn append(&mut self, new: KeysValues) -> Result<(Array, Array)> {
        let count = new.columns()?;
        let buffer = match self.buffer.take() {
            None => new,
            Some(ring) => {
                let ordered = self.temporal_order(ring)?;
                let excess = ordered.columns()? - self.max_size + 1;
                self.without_oldest(&ordered, excess, Some(&new))?
            }
        };
        self.offset += count;
        self.index = buffer.columns()?;
        self.buffer = Some(buffer.clone());
        Ok(buffer.into_pair())
    }

    fn update_in_place(&mut self, new: &KeysValues) -> Result<(Array, Array)> {
        let previous = self.offset;
        let mut buffer = match self.buffer.take() {
            Some(buffer) if previous < buffer.columns()? || buffer.columns()? >= self.max_size => buffer,
            short => {
                let fresh = new.zeros_like(GROWTH.min(self.max_size - previous))?;
                self.index = previous;
                match short {
                    None => fresh,
                    Some(old) => KeysValues::concatenate(&[&old, &fresh])?,
                }
            }
        };
        let excess = buffer.columns()? - self.max_size;
        if excess > 0 {
            buffer = self.without_oldest(&buffer, excess, None)?;
            self.index = self.max_size;
        }
        if self.index == self.max_size {
            self.index = self.keep;
        }
        buffer.write(new, self.index)?;
        self.offset += 1;
        self.index += 1;
        self.buffer.insert(buffer).used(self.offset)
    }

    /// See [`LayerCache::keys_values`](super::LayerCache::keys_values).
    pub fn keys_values(&self) -> Result<(Array, Array)> {
        self.buffer.as_ref().ok_or_else(empty)?.used(self.offset)
    }

    /// The columns from oldest to newest, without unused ones.
    fn temporal_order(&self, ring: KeysValues) -> Result<KeysValues> {
        let columns = ring.columns()?;
        if self.index == columns {
            return Ok(ring);
        }
        if self.index < self.offset {
            return KeysValues::concatenate(&[
                &ring.slice(0, self.keep)?,
                &ring.slice(self.index, columns)?,
                &ring.slice(self.keep, self.index)?,
            ]);
        }
        ring.slice(0, self.index)
    }

    /// Whether the oldest column is not the first.
    pub(super) fn is_turned(&self) -> Result<bool> {
        match &self.buffer {
            Some(buffer) => Ok(self.index < self.offset && self.index != buffer.columns()?),
            None => Ok(false),
        }
    }

    /// Columns of tokens.
    pub(super) fn held(&self) -> Result<i32> {
        match &self.buffer {
            Some(buffer) if self.is_turned()? => buffer.columns(),
            _ => Ok(self.index),
        }
    }

    /// Puts a ring that is turned into temporal order.
    pub(super) fn turn_back(&mut self) -> Result<()> {
        if self.is_turned()?
            && let Some(buffer) = self.buffer.take()
        {
            let ordered = self.temporal_order(buffer)?;
            self.index = ordered.columns()?;
            self.buffer = Some(ordered);
        }
        Ok(())
    }

    /// The columns of the last `max_size` tokens from oldest to newest, unless there are none.
    pub(super) fn last(&self) -> Result<Option<KeysValues>> {
        let Some(buffer) = self.buffer.clone().filter(|_| self.offset > 0) else { return Ok(None) };
        let ordered = self.temporal_order(buffer)?;
        let columns = ordered.columns()?;
        Ok(Some(ordered.slice(columns - self.offset.min(self.max_size), columns)?))
    }

    /// A copy in memory of its own, without unused columns and those that no token will see.
    pub(super) fn compacted(&self) -> Result<Self> {
        let Some(buffer) = self.buffer.as_ref().filter(|_| self.offset > 0) else {
            return Ok(Self::new(self.max_size, self.keep));
        };
        let held = self.held()?;
        let mut buffer = buffer.slice(0, held)?;
        if held > self.max_size {
            buffer = self.without_oldest(&buffer, held - self.max_size, None)?;
        }
        let index = self.index.min(self.max_size);
        Ok(Self { buffer: Some(buffer.copied()?), index, ..*self })
    }

    /// Drops `count` columns after the kept ones, and appends.
    fn without_oldest(
        &self,
        columns: &KeysValues,
        count: i32,
        append: Option<&KeysValues>,
    ) -> Result<KeysValues> {
        let mut parts = if count > 0 {
            vec![columns.slice(0, self.keep)?, columns.slice(count + self.keep, columns.columns()?)?]
        } else {
            vec![columns.clone()]
        };
        parts.extend(append.cloned());
        KeysValues::concatenate(&parts.iter().collect::<Vec<_>>())
    }

    /// See [`LayerCache::mask`](super::LayerCache::mask).
    pub fn mask(&self, length: i32, window: Option<i32>) -> Result<Mask> {
        if length > 1 {
            let window = window.unwrap_or(self.max_size);
            let offset = self.offset.min(self.max_size - 1);
            return Ok(if offset + length > window {
                Mask::Array(causal_mask(length, offset, Some(window))?)
            } else {
                Mask::Causal
            });
        }
        let Some(window) = window.filter(|&w| self.offset >= w && self.max_size > w) else {
            return Ok(Mask::None);
        };
        // A window smaller than the ring: mark its columns and turn them to where they lie.
        let index = if self.index >= self.max_size { 0 } else { self.index };
        let size = self.max_size.min(self.offset + 1);
        let columns = Array::arange(0.0, f64::from(size), 1.0, Dtype::I32)?;
        Ok(Mask::Array(columns.greater_equal(size - window)?.roll(index + 1, 0)?))
    }

    /// Tokens consumed, including those no longer held.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// The buffers, unused columns included.
    pub fn arrays(&self) -> Vec<Array> {
        self.buffer.iter().flat_map(|b| [b.keys.clone(), b.values.clone()]).collect()
    }

    /// Whether nothing has been overwritten yet.
    pub fn is_trimmable(&self) -> bool {
        self.offset < self.max_size
    }

    /// Forgets the last `count` tokens. Exact while [`RotatingKvCache::is_trimmable`].
    pub fn trim(&mut self, count: i32) -> i32 {
        let count = count.clamp(0, self.offset);
        self.offset -= count;
        self.index -= count;
        count
    }
}
