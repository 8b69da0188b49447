//! Test support: the Python oracle, its fixtures and the reference results it recorded.
//!
//! The oracle is mlx-lm on MLX, in a virtual environment that the first test to ask for it creates under
//! `target/oracle/`. This crate is for tests alone: a broken set-up or a failing job panics, with Python's
//! own words in the message. `RUSSET_SKIP_ORACLE=1` skips the tests that need the oracle.

mod environment;
mod oracle;

pub use oracle::Oracle;
