use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use memmap2::{Mmap, MmapMut};

use crate::array::{IntoShape, wrap};
use crate::bridge::{Owner, ffi};
use crate::{Array, Dtype, Error, Result};

/// A file mapped into memory, from which arrays are made without copying.
///
/// The file must not be truncated while mapped: reading a page that no longer exists ends the
/// process, as with every program that maps files.
#[derive(Clone, Debug)]
pub struct MappedFile {
    map: Arc<Mmap>,
    /// Memory of its own otherwise, see [`MappedFile::of_parts`].
    is_file: bool,
}

/// Bytes that must lie in front of an array's data: MLX's CPU allocator keeps a size header there,
/// and some operations read it.
const HEADER: usize = 8;

impl MappedFile {
    /// Maps `path` read-only.
    ///
    /// # Errors
    /// When the file cannot be opened or mapped.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the mapping is private and read-only; the rule that the file is not truncated is
        // stated above.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map: Arc::new(map), is_file: true })
    }

    /// Where the parts begin in a mapping of [`MappedFile::of_parts`].
    pub const PARTS: usize = 64;

    /// Memory that holds `parts` one after the other from [`MappedFile::PARTS`] on, as a file with them
    /// would: for tensors that no file holds in one piece.
    ///
    /// # Errors
    /// When memory is refused.
    pub fn of_parts(parts: &[&[u8]]) -> std::io::Result<Self> {
        let length = parts.iter().fold(Self::PARTS, |n, part| n.saturating_add(part.len()));
        let mut map = MmapMut::map_anon(length)?;
        let mut rest = map.get_mut(Self::PARTS..).unwrap_or_default();
        for part in parts {
            let (head, tail) = rest.split_at_mut(part.len());
            head.copy_from_slice(part);
            rest = tail;
        }
        Ok(Self { map: Arc::new(map.make_read_only()?), is_file: false })
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Whether arrays of this mapping share its memory. MLX builds for a GPU copy instead.
    pub fn is_zero_copy() -> bool {
        !ffi::gpu_available()
    }

    /// `length` bytes from `offset`, to be read on any thread.
    ///
    /// # Errors
    /// When the range is not inside the file.
    pub fn slice(&self, offset: usize, length: usize) -> Result<MappedSlice> {
        match offset.checked_add(length) {
            Some(end) if end <= self.map.len() => {
                Ok(MappedSlice { map: self.map.clone(), is_file: self.is_file, offset, length })
            }
            _ => Err(Error::new(format!("bytes {offset}..+{length} are outside the mapping"))),
        }
    }

    /// An array over the bytes from `offset`, which may have any alignment. It keeps the mapping alive
    /// and is never written to.
    ///
    /// # Errors
    /// When the range is not inside the file, or starts within its first 8 bytes.
    pub fn array(&self, offset: usize, shape: impl IntoShape, dtype: Dtype) -> Result<Array> {
        let dims = shape.dims();
        let length = dims
            .iter()
            .try_fold(dtype.size(), |n, &d| n.checked_mul(usize::try_from(d).ok()?))
            .ok_or_else(|| Error::new(format!("shape {dims:?} is not a valid array shape")))?;
        let end = offset.checked_add(length).filter(|&end| end <= self.map.len());
        if end.is_none() || offset < HEADER {
            return Err(Error::new(format!(
                "bytes {offset}..+{length} are outside the usable part {HEADER}..{} of the mapping",
                self.map.len()
            )));
        }
        let owner = Box::new(Owner(self.map.clone()));
        // SAFETY: the range and the 8 bytes before it lie in the mapping, which `owner` keeps alive.
        // MLX does not take over buffers that it does not own, so nothing writes to it.
        wrap(unsafe { ffi::from_external(self.map.as_ptr().add(offset), dims, dtype as u8, owner) })
    }
}

/// A part of a mapped file; keeps the mapping alive.
#[derive(Clone)]
pub struct MappedSlice {
    map: Arc<Mmap>,
    is_file: bool,
    offset: usize,
    length: usize,
}

impl MappedSlice {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map[self.offset..self.offset + self.length]
    }

    /// `length` of the bytes, from `offset`.
    ///
    /// # Errors
    /// When the range is not inside the slice.
    pub fn part(&self, offset: usize, length: usize) -> Result<Self> {
        match offset.checked_add(length) {
            Some(end) if end <= self.length => {
                Ok(Self { offset: self.offset + offset, length, ..self.clone() })
            }
            _ => Err(Error::new(format!("bytes {offset}..+{length} are outside of {self:?}"))),
        }
    }

    /// Tells the system that the bytes are not needed soon, so that they no longer count as this
    /// process's memory. Reading them again fetches them from the file.
    pub fn release(&self) {
        #[cfg(unix)]
        if self.is_file {
            let page = 1 << 14;
            let start = self.offset.next_multiple_of(page);
            let end = (self.offset + self.length) / page * page;
            if start < end {
                // SAFETY: the mapping is read-only and backed by a file, so that dropped pages come back
                // with the same bytes. Whole pages inside the slice only.
                let advised = unsafe {
                    self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start)
                };
                // Advice that is not taken costs memory, nothing else.
                drop(advised);
            }
        }
    }
}

impl std::fmt::Debug for MappedSlice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MappedSlice({}..+{})", self.offset, self.length)
    }
}
