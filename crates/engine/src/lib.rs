//! Generation: from requests to tokens.
//!
//! [`Steps`] is the token loop, bit-exact with mlx-lm's; [`generate()`] adds text, stop rules and
//! statistics. [`Batch`] runs several sequences at once.

mod batch;
mod embed;
mod error;
pub mod evaluate;
mod generate;
mod sampling;
mod steps;

pub use batch::{Batch, BatchOptions, BatchStep, SequenceId};
pub use embed::{Embedder, Purpose};
pub use error::{Error, Result};
pub use generate::{
    Event, FinishReason, Generation, LanguageModel, Request, Statistics, TextModel, generate, generate_with,
};
pub use sampling::Sampling;
pub use steps::{Step, StepOptions, Steps};
