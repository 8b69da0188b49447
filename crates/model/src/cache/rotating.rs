use russet_mlx::fast::Mask;
use russet_mlx::{Array, Dtype};

use super::{GROWTH, KeysValues, causal_mask, empty};
use crate::Result;

/// Keys and values of the last `max_size` tokens (`mlx_lm.models.cache.RotatingKVCache`).
///
/// One token at a time overwrites the oldest row in place, and the rows are attended to in ring
/// order. Several tokens are appended after the rows are put into temporal order, and may leave up to
/// `max_size + count - 1` rows, so that each of them sees a whole window.
#[derive(Clone, Debug)]
pub struct RotatingKvCache {
    max_size: i32,
    /// First rows that are never overwritten.
    keep: i32,
    buffer: Option<KeysValues>,
    offset: i32,
    /// Where the next token is written.
    index: i32,
}

impl RotatingKvCache {
    /// An empty cache of `max_size` rows, the first `keep` of which stay.
    pub fn new(max_size: i32, keep: i32) -> Self {
        Self { max_size, keep, buffer: None, offset: 0, index: 0 }
    }

    /// See [`LayerCache::update`](super::LayerCache::update).
    pub fn update(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        let new = KeysValues { keys: keys.clone(), values: values.clone() };
        if new.rows()? == 1 { self.update_in_place(&new) } else { self.append(new) }
    }

    fn append(&mut self, new: KeysValues) -> Result<(Array, Array)> {
        let count = new.rows()?;
        let buffer = match self.buffer.take() {
            None => new,
            Some(ring) => {
                let ordered = self.temporal_order(ring)?;
                let excess = ordered.rows()? - self.max_size + 1;
                self.without_oldest(&ordered, excess, Some(&new))?
            }
        };
        self.offset += count;
        self.index = buffer.rows()?;
        self.buffer = Some(buffer.clone());
        Ok(buffer.into_pair())
    }

    fn update_in_place(&mut self, new: &KeysValues) -> Result<(Array, Array)> {
        let previous = self.offset;
        let mut buffer = match self.buffer.take() {
            Some(buffer) if previous < buffer.rows()? || buffer.rows()? >= self.max_size => buffer,
            short => {
                let fresh = new.zeros_like(GROWTH.min(self.max_size - previous))?;
                self.index = previous;
                match short {
                    None => fresh,
                    Some(old) => KeysValues::concatenate(&[&old, &fresh])?,
                }
            }
        };
        let excess = buffer.rows()? - self.max_size;
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

    /// The rows from oldest to newest, without unused ones.
    fn temporal_order(&self, ring: KeysValues) -> Result<KeysValues> {
        let rows = ring.rows()?;
        if self.index == rows {
            return Ok(ring);
        }
        if self.index < self.offset {
            return KeysValues::concatenate(&[
                &ring.slice(0, self.keep)?,
                &ring.slice(self.index, rows)?,
                &ring.slice(self.keep, self.index)?,
            ]);
        }
        ring.slice(0, self.index)
    }

    /// Drops `count` rows after the kept ones, and appends.
    fn without_oldest(
        &self,
        rows: &KeysValues,
        count: i32,
        append: Option<&KeysValues>,
    ) -> Result<KeysValues> {
        let mut parts = if count > 0 {
            vec![rows.slice(0, self.keep)?, rows.slice(count + self.keep, rows.rows()?)?]
        } else {
            vec![rows.clone()]
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
        // A window smaller than the ring: mark its rows and turn them to where they lie.
        let index = if self.index >= self.max_size { 0 } else { self.index };
        let size = self.max_size.min(self.offset + 1);
        let rows = Array::arange(0.0, f64::from(size), 1.0, Dtype::I32)?;
        Ok(Mask::Array(rows.greater_equal(size - window)?.roll(index + 1, 0)?))
    }

    /// Tokens consumed, including those no longer held.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// The buffers, unused rows included.
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
