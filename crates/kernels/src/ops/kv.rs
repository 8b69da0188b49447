//! Keys and values out of the memory that operations append to, and into such memory.

use half::f16;
use russet_mlx::{Array, Element, Error, Result};

use super::{KvBuffer, KvType, Rows, wrong_type, zeroed};

impl KvBuffer {
    /// The first `length` rows of each head in memory for no more than those. What was to write them must have
    /// run.
    ///
    /// # Errors
    /// When there are fewer, or memory is refused.
    pub fn compacted(&self, length: usize) -> Result<Self> {
        let rows = &*self.lock()?;
        let (kv, heads) = match rows {
            Rows::F16 { keys, .. } => (KvType::F16, self.heads(keys, length)?),
            Rows::F32 { keys, .. } => (KvType::F32, self.heads(keys, length)?),
        };
        let copy = Self::new(kv, heads, length, self.head_dim)?;
        match (rows, &mut *copy.lock()?) {
            (Rows::F16 { keys, values }, Rows::F16 { keys: k, values: v }) => {
                self.copy_rows(keys, length, k);
                self.copy_rows(values, length, v);
            }
            (Rows::F32 { keys, values }, Rows::F32 { keys: k, values: v }) => {
                self.copy_rows(keys, length, k);
                self.copy_rows(values, length, v);
            }
            _ => return Err(wrong_type()),
        }
        Ok(copy)
    }

    /// Key and value heads, and the width of a head.
    pub fn heads_and_width(&self) -> Result<[usize; 2]> {
        let heads = match &*self.lock()? {
            Rows::F16 { keys, .. } => self.heads(keys, self.capacity)?,
            Rows::F32 { keys, .. } => self.heads(keys, self.capacity)?,
        };
        Ok([heads, self.head_dim])
    }

    /// Keys and values of the first `length` rows, each `[1, kv_heads, length, head_dim]`. What was to write them
    /// must have run.
    ///
    /// # Errors
    /// When there are fewer, or memory is refused.
    pub fn to_arrays(&self, length: usize) -> Result<[Array; 2]> {
        match &*self.lock()? {
            Rows::F16 { keys, values } => Ok([self.array(keys, length)?, self.array(values, length)?]),
            Rows::F32 { keys, values } => Ok([self.array(keys, length)?, self.array(values, length)?]),
        }
    }

    fn array<T: Element>(&self, rows: &[T], length: usize) -> Result<Array> {
        let heads = self.heads(rows, length)?;
        let mut used = zeroed(heads * length * self.head_dim)?;
        self.copy_rows(rows, length, &mut used);
        let [heads, length, dim] = [heads, length, self.head_dim].map(|n| n as i32);
        Array::from_slice(&used, [1, heads, length, dim])
    }

    /// The heads that `rows` are of, once it is clear that each has `length`.
    fn heads<T>(&self, rows: &[T], length: usize) -> Result<usize> {
        let head = self.capacity * self.head_dim;
        if length == 0 || length > self.capacity || head == 0 {
            return Err(Error::new(format!("a cache of {} rows has no {length}", self.capacity)));
        }
        Ok(rows.len() / head)
    }

    /// Copies the first `length` rows of each head.
    fn copy_rows<T: Copy>(&self, rows: &[T], length: usize, out: &mut [T]) {
        let used = length * self.head_dim;
        for (head, out) in rows.chunks_exact(self.capacity * self.head_dim).zip(out.chunks_exact_mut(used)) {
            out.copy_from_slice(&head[..used]);
        }
    }

    /// Memory with the rows of `keys` and `values`, each `[1, kv_heads, length, head_dim]` in the type that they
    /// are kept in.
    ///
    /// # Errors
    /// When their shapes or types differ or are none of a cache, or memory is refused.
    pub fn from_arrays(keys: &Array, values: &Array) -> Result<Self> {
        let shape = keys.shape();
        let sizes: Option<Vec<usize>> =
            shape.iter().map(|&n| usize::try_from(n).ok().filter(|&n| n > 0)).collect();
        let &[1, heads, length, dim] = &sizes.unwrap_or_default()[..] else {
            return Err(Error::new(format!("{shape:?} is no shape of cached keys")));
        };
        if values.shape() != shape {
            let message = format!("values have the shape {:?}, keys {shape:?}", values.shape());
            return Err(Error::new(message));
        }
        let kv = match (keys.dtype(), values.dtype()) {
            (f16::DTYPE, f16::DTYPE) => KvType::F16,
            (f32::DTYPE, f32::DTYPE) => KvType::F32,
            (keys, values) => {
                return Err(Error::new(format!(
                    "keys are {keys} and values {values}: a cache has float16 or float32"
                )));
            }
        };
        let buffer = Self::new(kv, heads, length, dim)?;
        match &mut *buffer.lock()? {
            Rows::F16 { keys: k, values: v } => {
                k.copy_from_slice(&keys.to_vec()?);
                v.copy_from_slice(&values.to_vec()?);
            }
            Rows::F32 { keys: k, values: v } => {
                k.copy_from_slice(&keys.to_vec()?);
                v.copy_from_slice(&values.to_vec()?);
            }
        }
        Ok(buffer)
    }
}
