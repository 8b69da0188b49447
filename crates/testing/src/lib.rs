//! Test support: the Python oracle, its fixtures and the reference results it recorded.
//!
//! The oracle is mlx-lm on MLX, in a virtual environment that the first test to ask for it creates under
//! `target/oracle/`. This crate is for tests alone: a broken set-up or a failing job panics, with Python's
//! own words in the message. `RUSSET_SKIP_ORACLE=1` skips the tests that need the oracle.
//!
//! ```no_run
//! use russet_testing::{FixtureSpec, Oracle, ReferenceSpec, Tokens};
//!
//! # fn test() {
//! let Some(oracle) = Oracle::get() else { return };
//! let model = oracle.fixture(&FixtureSpec::new("llama"));
//! let expected = oracle.reference(&model, &ReferenceSpec::new(Tokens::Random { count: 3, seed: 1 }, 24));
//! let bits: &[u8] = expected.array("step_logits").data();
//! # }
//! ```

mod cases;
mod checkpoint;
mod clients;
mod environment;
mod oracle;
mod reference;
mod specification;
mod worker;

pub use cases::{
    BatchCase, Case, batch_cases, cache_specs, dense_cases, dense_fixtures, gemma4_cases, gemma4_forms,
    greedy_cases, llama_cases, matrix_table, qwen3_5_cases, qwen3_5_fixture, qwen3_5_moe_cases,
    qwen3_5_moe_fixture, qwen3_moe, qwen3_moe_cases, rope_specs, sampler_specs, sampling_cases,
};
pub use checkpoint::{Tensor, TinyCheckpoint};
pub use clients::client_script;
pub use oracle::Oracle;
pub use reference::Reference;
pub use safetensors::{Dtype, tensor::TensorView};
pub use specification::{
    BatchRow, BatchSpec, CacheSpec, EmbeddingSpec, FixtureSpec, Float, Format, Processors, ReferenceSpec,
    RopeSpec, SamplerSpec, Sampling, Tokens,
};
