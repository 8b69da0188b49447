//! Memory that starts on a cache line, and on huge pages where the system gives them.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// A cache line of every processor in use, or two of it.
const ALIGN: usize = 128;

/// Buffers of at least this size begin on a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// A fixed-size, zeroed byte buffer.
pub(crate) struct Buffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer owns its memory; shared references only read it.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(crate) const fn empty() -> Self {
        Self { start: NonNull::dangling(), len: 0 }
    }

    /// `len` zero bytes. Aborts, as `Vec` does, where there is no memory left.
    pub(crate) fn zeroed(len: usize) -> Self {
        if len == 0 {
            return Self::empty();
        }
        let layout = Self::layout(len);
        // SAFETY: the layout is not empty.
        let Some(start) = NonNull::new(unsafe { alloc(layout) }) else { handle_alloc_error(layout) };
        advise_huge_pages(start.as_ptr(), len);
        // SAFETY: `len` bytes were allocated at `start`.
        unsafe { start.as_ptr().write_bytes(0, len) };
        Self { start, len }
    }

    /// Makes room for `len` bytes; the content is unspecified after a growth.
    pub(crate) fn ensure(&mut self, len: usize) {
        if self.len < len {
            *self = Self::zeroed(len);
        }
    }

    fn layout(len: usize) -> Layout {
        // A length beyond isize::MAX has no layout; no allocation could serve it either.
        let align = if len >= HUGE_PAGE { HUGE_PAGE } else { ALIGN };
        Layout::from_size_align(len, align).unwrap_or_else(|_| handle_alloc_error(Layout::new::<u8>()))
    }
}

impl std::ops::Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialized bytes belong to the buffer (none, where it is empty).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl std::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and the reference is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated in `zeroed` with the same layout.
            unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len)) }
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

/// Asks for huge pages, which spare address translations; without them all works as well, but slower.
#[cfg(target_os = "linux")]
fn advise_huge_pages(start: *mut u8, len: usize) {
    if len >= HUGE_PAGE {
        // SAFETY: the range lies in the allocation, which is aligned to huge pages; the advice changes no content.
        unsafe { libc::madvise(start.cast(), len / HUGE_PAGE * HUGE_PAGE, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_start: *mut u8, _len: usize) {}

/// A pointer that threads share because each writes a part of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedMut<T>(*mut T);

// SAFETY: only a pointer; each use says why its writes are disjoint.
unsafe impl<T: Send> Send for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T> SharedMut<T> {
    pub(crate) fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr())
    }

    pub(crate) fn at(self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }

    /// # Safety
    /// The range lies inside the slice, and no other thread touches it while the result lives.
    pub(crate) unsafe fn slice<'a>(self, range: std::ops::Range<usize>) -> &'a mut [T] {
        // SAFETY: by contract.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}
