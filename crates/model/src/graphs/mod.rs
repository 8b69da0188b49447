//! Model graphs: one file per family, each read from top to bottom in the order data flows.
//!
//! To add an architecture, write its graph (or its description in `universal_dense/families.rs`), add its
//! line to the table below, and a parity case.

mod checks;
mod gemma4;
mod qwen3_5;
mod qwen3_moe;
mod universal_dense;

use russet_mlx::Array;

use self::universal_dense::{build as dense, families};
use crate::layers::Loader;
use crate::profile::{GraphKind, runs_as};
use crate::{Cache, Checkpoint, Result};

/// A model's computation. It holds weights and no sequence state.
pub trait Graph {
    /// Token ids `[batch, seq]` → hidden states `[batch, seq, hidden]` after the final norm. Appends
    /// the tokens to `cache`, and shows `each_layer` the output of every layer in order.
    fn forward(&self, tokens: &Array, cache: &mut Cache, each_layer: &mut dyn FnMut(&Array))
    -> Result<Array>;

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

/// A profile's graph and the `model_type` that mlx-lm runs a checkpoint as → what builds it.
const GRAPHS: &[(GraphKind, &str, Build)] = &[
    (GraphKind::Gemma4, "gemma4", gemma4::nested),
    (GraphKind::Gemma4, "gemma4_text", gemma4::text),
    (GraphKind::MiniCpm5, "llama", |c, l| dense(c, l, families::llama)),
    (GraphKind::Qwen3, "qwen3", |c, l| dense(c, l, families::qwen3)),
    (GraphKind::Qwen3Moe, "qwen3_moe", qwen3_moe::build),
    (GraphKind::Qwen35, "qwen3_5", qwen3_5::qwen3_5),
    (GraphKind::Qwen35, "qwen3_5_moe", qwen3_5::qwen3_5),
    (GraphKind::Qwen35, "qwen3_5_moe_text", qwen3_5::qwen3_5_text),
    (GraphKind::Qwen35, "qwen3_5_text", qwen3_5::qwen3_5_text),
    (GraphKind::UniversalDense, "gemma", |c, l| dense(c, l, families::gemma)),
    (GraphKind::UniversalDense, "gemma2", |c, l| dense(c, l, families::gemma2)),
    (GraphKind::UniversalDense, "glm4", |c, l| dense(c, l, families::glm4)),
    (GraphKind::UniversalDense, "granite", |c, l| dense(c, l, families::granite)),
    (GraphKind::UniversalDense, "llama", |c, l| dense(c, l, families::llama)),
    (GraphKind::UniversalDense, "olmo2", |c, l| dense(c, l, families::olmo2)),
    (GraphKind::UniversalDense, "phi3", |c, l| dense(c, l, families::phi3)),
    (GraphKind::UniversalDense, "qwen2", |c, l| dense(c, l, families::qwen2)),
    (GraphKind::UniversalDense, "qwen3", |c, l| dense(c, l, families::qwen3)),
    (GraphKind::UniversalDense, "smollm3", |c, l| dense(c, l, families::smollm3)),
    (GraphKind::UniversalDense, "starcoder2", |c, l| dense(c, l, families::starcoder2)),
];

/// Builds the graph of a checkpoint.
///
/// # Errors
/// When there is no such graph for the model type, or config and weights do not fit it.
pub(crate) fn build(
    graph: GraphKind,
    checkpoint: &Checkpoint,
    loader: &mut Loader<'_>,
) -> Result<Box<dyn Graph>> {
    find(graph, checkpoint)?(checkpoint, loader)
}

/// Checks that there is such a graph for the checkpoint, before weights are opened.
pub(crate) fn check_supported(graph: GraphKind, checkpoint: &Checkpoint) -> Result<()> {
    find(graph, checkpoint).map(drop)
}

/// The model types that the universal graph runs.
pub(crate) fn generic_types() -> impl Iterator<Item = &'static str> {
    GRAPHS.iter().filter(|(graph, ..)| *graph == GraphKind::UniversalDense).map(|(_, name, _)| *name)
}

fn find(graph: GraphKind, checkpoint: &Checkpoint) -> Result<Build> {
    let model_type = checkpoint.model_type()?;
    let fits = |(known, name, _): &&(GraphKind, &str, Build)| *known == graph && *name == runs_as(model_type);
    GRAPHS.iter().find(fits).map(|(.., build)| *build).ok_or_else(|| {
        let message = format!("graph {graph} does not run '{}' yet", model_type.escape_debug());
        checkpoint.config().error("model_type", message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Capability;

    /// Whoever adds a graph also says that the engine has it.
    #[test]
    fn the_engine_claims_the_graphs_that_there_are() {
        for graph in GraphKind::ALL {
            let here = GRAPHS.iter().any(|(known, ..)| known == graph);
            let mut needed = graph.capabilities();
            if *graph == GraphKind::Gemma4 {
                needed.insert(Capability::GeneratedGraph);
            }
            let claimed = needed.iter().all(|needed| Capability::ENGINE.contains(needed));
            assert_eq!(here, claimed, "{graph}: GRAPHS and Capability::ENGINE disagree");
        }
    }
}
