//! Model graphs: one file per family, each read from top to bottom in the order data flows.
//!
//! To add an architecture, write its graph (or its description in `universal_dense/families.rs`), add its
//! line to the table below, and a parity case.

mod qwen3_5;
mod universal_dense;

use russet_mlx::Array;

use self::universal_dense::{build as dense, families};
use crate::layers::Loader;
use crate::{Cache, Checkpoint, Result};

/// A model's computation. It holds weights and no sequence state.
pub trait Graph {
    /// Token ids `[batch, seq]` → hidden states `[batch, seq, hidden]` after the final norm. Appends
    /// the tokens to `cache`.
    fn forward(&self, tokens: &Array, cache: &mut Cache) -> Result<Array>;

    /// Hidden states `[.., hidden]` → logits `[.., vocabulary]`.
    fn logits(&self, hidden: &Array) -> Result<Array>;

    /// An empty cache of the kinds that the layers need.
    fn new_cache(&self) -> Cache;

    /// The sizes that callers need.
    fn shape(&self) -> Shape;
}

/// Sizes of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows of the embedding table.
    pub vocabulary: i32,
    /// Width of the hidden states.
    pub hidden: i32,
    /// Decoder layers.
    pub layers: i32,
    /// `max_position_embeddings`, if the config states it.
    pub max_positions: Option<i32>,
    /// Per layer: values (keys and values together) that one token adds to the cache, and the number
    /// of tokens after which the layer's cache stops growing.
    pub kv: Vec<(usize, Option<usize>)>,
}

type Build = fn(&Checkpoint, &mut Loader<'_>) -> Result<Box<dyn Graph>>;

/// `model_type` → the graph that runs it.
const GRAPHS: &[(&str, Build)] = &[
    ("gemma", |c, l| dense(c, l, families::gemma)),
    ("gemma2", |c, l| dense(c, l, families::gemma2)),
    ("glm4", |c, l| dense(c, l, families::glm4)),
    ("granite", |c, l| dense(c, l, families::granite)),
    ("iquestcoder", |c, l| dense(c, l, families::llama)),
    ("llama", |c, l| dense(c, l, families::llama)),
    ("mistral", |c, l| dense(c, l, families::llama)),
    ("olmo2", |c, l| dense(c, l, families::olmo2)),
    ("phi3", |c, l| dense(c, l, families::phi3)),
    ("qwen2", |c, l| dense(c, l, families::qwen2)),
    ("qwen3", |c, l| dense(c, l, families::qwen3)),
    ("qwen3_5", qwen3_5::qwen3_5),
    ("qwen3_5_text", qwen3_5::qwen3_5_text),
    ("smollm3", |c, l| dense(c, l, families::smollm3)),
    ("starcoder2", |c, l| dense(c, l, families::starcoder2)),
    ("xverse", |c, l| dense(c, l, families::llama)),
];

/// Builds the graph of a checkpoint.
///
/// # Errors
/// When the model type is unknown, or config and weights do not fit the graph.
pub(crate) fn build(checkpoint: &Checkpoint, loader: &mut Loader<'_>) -> Result<Box<dyn Graph>> {
    find(checkpoint)?(checkpoint, loader)
}

/// Checks that there is a graph for the checkpoint, before weights are opened.
pub(crate) fn check_supported(checkpoint: &Checkpoint) -> Result<()> {
    find(checkpoint).map(drop)
}

fn find(checkpoint: &Checkpoint) -> Result<Build> {
    let model_type = checkpoint.model_type()?;
    GRAPHS.iter().find(|(name, _)| *name == model_type).map(|(_, build)| *build).ok_or_else(|| {
        let known: Vec<&str> = GRAPHS.iter().map(|(name, _)| *name).collect();
        checkpoint.config().error(
            "model_type",
            format!("'{}' is not supported (supported: {})", model_type.escape_debug(), known.join(", ")),
        )
    })
}
