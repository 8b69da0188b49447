//! Random numbers for seeds and ids.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A random number; each has another.
pub(crate) fn random() -> u64 {
    // The hasher's keys come from the operating system's random numbers.
    RandomState::new().build_hasher().finish()
}

/// A name that nothing else has.
pub(crate) fn id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random(), random())
}
