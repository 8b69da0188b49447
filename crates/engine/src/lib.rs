//! Generation: from requests to tokens.
//!
//! [`Steps`] is the token loop, bit-exact with mlx-lm's; [`generate()`] adds text, stop rules and
//! statistics. [`Batch`] runs several sequences at once. [`Engine`] has a thread of its own and takes requests from any
//! other.

mod answer;
mod batch;
mod embed;
mod engine;
mod error;
pub mod evaluate;
mod generate;
mod histogram;
mod memory_plan;
mod prompt_cache;
mod sampling;
mod scheduler;
mod steps;

pub use batch::{Batch, BatchOptions, BatchStep, Paused, SequenceId};
pub use embed::{Embedder, Embedding, Purpose};
pub use engine::{
    Answer, Embeddings, Engine, EngineOptions, EngineStatus, MemoryUse, ModelFacts, Output, Refusal,
    SubmitOptions, TokenLogprobs,
};
pub use error::{Error, Result};
pub use generate::{
    Event, FinishReason, Generation, LanguageModel, Request, Statistics, TextModel, generate, generate_with,
};
pub use histogram::Histogram;
pub use memory_plan::MemoryPlan;
pub use prompt_cache::{PromptCache, PromptCacheStatistics};
pub use sampling::Sampling;
pub use steps::{Step, StepOptions, Steps};
