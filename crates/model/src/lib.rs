//! From a checkpoint directory to logits: config, weights, layers, caches and model graphs.
//!
//! A [`Model`] holds weights and no sequence state; a [`Cache`] holds the state of one sequence.
//! Graphs follow mlx-lm's operations, their order and their dtypes, which is what makes their logits
//! equal to mlx-lm's in every bit.

pub mod cache;
mod checkpoint;
mod config;
mod embedding;
mod error;
mod fidelity;
pub mod graphs;
pub mod layers;
mod model;
mod numerics;
pub mod profile;
mod quantization;
mod weights;

pub use cache::Cache;
pub use checkpoint::Checkpoint;
pub use config::Fields;
pub use embedding::EmbeddingRecipe;
pub use error::{Error, Result};
pub use fidelity::{Fidelity, Tier};
pub use model::{Footprint, KvSizes, LoadOptions, Model};
pub use numerics::{CpuOptions, Numerics};
pub use quantization::QuantizationConfig;
pub use russet_kernels::cpu::Precision;
pub use russet_kernels::ops::KvType;
pub use weights::{Tensor, TensorInfo, WeightFiles, Weights};
