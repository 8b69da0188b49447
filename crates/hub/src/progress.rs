//! Progress of long work.

use std::fmt;

/// How far a piece of long work has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Bytes done in this phase.
    pub done: u64,
    /// Bytes to do in this phase, where that is known.
    pub total: Option<u64>,
}

/// A phase of long work. Its `Display` form is a word to show before a progress bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Another process is installing; waiting for it to finish.
    Waiting,
    /// Fetching over the network.
    Downloading,
    /// Decompressing what was fetched.
    Unpacking,
    /// Writing the checkpoint.
    Converting,
    /// Hashing files to compare them with what was installed.
    Verifying,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Phase::Waiting => "waiting",
            Phase::Downloading => "downloading",
            Phase::Unpacking => "unpacking",
            Phase::Converting => "converting",
            Phase::Verifying => "verifying",
        })
    }
}
