//! MLX's memory counters and limits, in bytes.

use crate::Result;
use crate::bridge::ffi;

/// Bytes in live buffers. Mapped weights are not counted.
pub fn active() -> usize {
    ffi::active_memory()
}

/// The most that [`active`] has been since [`reset_peak`].
pub fn peak() -> usize {
    ffi::peak_memory()
}

/// Sets the peak to the present use.
pub fn reset_peak() {
    ffi::reset_peak_memory();
}

/// Bytes kept for reuse.
pub fn cache() -> usize {
    ffi::cache_memory()
}

/// Gives cached memory back to the system.
pub fn clear_cache() -> Result<()> {
    Ok(ffi::clear_cache()?)
}

/// Gives memory that the C allocator keeps for reuse back to the system, where it can be told to.
pub fn trim() {
    ffi::trim_memory();
}

/// Takes the code of the program and its libraries out of this process's memory, where the system has a way: what runs
/// again comes back from the system's cache of files, and what only starting up needed does not.
pub fn drop_code() {
    ffi::drop_code();
}

/// Sets the memory guideline; returns the previous one.
pub fn set_limit(bytes: usize) -> Result<usize> {
    Ok(ffi::set_memory_limit(bytes)?)
}

/// Sets the most that is kept for reuse; returns the previous value.
pub fn set_cache_limit(bytes: usize) -> Result<usize> {
    Ok(ffi::set_cache_limit(bytes)?)
}

/// Sets the memory that Metal keeps resident; returns the previous value. No effect elsewhere.
pub fn set_wired_limit(bytes: usize) -> Result<usize> {
    Ok(ffi::set_wired_limit(bytes)?)
}
