//! Which family a config belongs to, and the profiles that come with the engine.

use std::collections::BTreeSet;

use super::{
    Artifact, ArtifactFingerprint, Capability, ConfigFingerprint, GraphKind, Profile, Specialization,
};
use crate::{Checkpoint, Fields, Result, Tier, graphs};

/// The families in the order in which they are asked whether a config is theirs. What no other family takes
/// goes to the universal graph.
const FAMILIES: [GraphKind; 8] = [
    GraphKind::Glm52,
    GraphKind::DiffusionGemma,
    GraphKind::MiniCpm5,
    GraphKind::Qwen35,
    GraphKind::Qwen3Moe,
    GraphKind::Qwen3,
    GraphKind::Gemma4,
    GraphKind::UniversalDense,
];

/// Configs of Gemma 4 that have a graph of their own: 12B, E4B and 26B-A4B.
const GENERATED: [ConfigFingerprint; 3] = [
    ConfigFingerprint::from_u64(0x9f81_2d2e_b461_fcbe),
    ConfigFingerprint::from_u64(0x418e_9adc_386e_a67c),
    ConfigFingerprint::from_u64(0xc9dd_67ed_5a52_5231),
];

impl GraphKind {
    /// Whether this graph computes the model that a config describes.
    pub(super) fn accepts(self, checkpoint: &Checkpoint) -> bool {
        let Ok(model_type) = checkpoint.model_type() else { return false };
        if is_drafter(model_type) {
            return false;
        }
        match self {
            Self::DiffusionGemma => model_type == "diffusion_gemma",
            Self::Gemma4 => model_type.starts_with("gemma4"),
            Self::Glm52 => model_type == "glm_moe_dsa",
            Self::MiniCpm5 => is_minicpm5(model_type, &checkpoint.config()),
            Self::Qwen3 => model_type == "qwen3",
            Self::Qwen3Moe => model_type == "qwen3_moe",
            Self::Qwen35 => {
                matches!(model_type, "qwen3_5" | "qwen3_5_moe" | "qwen3_5_moe_text" | "qwen3_5_text")
            }
            Self::UniversalDense => graphs::generic_types().any(|known| known == runs_as(model_type)),
        }
    }
}

/// MiniCPM5 calls itself llama; its shape tells.
fn is_minicpm5(model_type: &str, config: &Fields<'_>) -> bool {
    let sizes = [
        ("hidden_size", 1536),
        ("num_hidden_layers", 24),
        ("num_attention_heads", 16),
        ("num_key_value_heads", 2),
        ("head_dim", 128),
        ("vocab_size", 130_560),
    ];
    model_type == "llama"
        && sizes.iter().all(|&(field, size)| config.size(field).is_ok_and(|found| found == Some(size)))
        && config.flag("tie_word_embeddings").is_ok_and(|tied| tied == Some(false))
}

/// Whether a model only drafts tokens for another one.
fn is_drafter(model_type: &str) -> bool {
    model_type.ends_with("_assistant")
}

/// The model type whose code mlx-lm runs for a model type.
pub(crate) fn runs_as(model_type: &str) -> &str {
    match model_type {
        "mistral" | "iquestcoder" | "xverse" => "llama",
        "llava" => "mistral3",
        "phi-msft" => "phixtral",
        "falcon_mamba" => "mamba",
        "joyai_llm_flash" | "kimi_k2" => "deepseek_v3",
        "qwen2_5_vl" => "qwen2_vl",
        "minimax_m2" => "minimax",
        "gemma4_unified" => "gemma4",
        "deepseek_v41_text" => "deepseek_v41",
        other => other,
    }
}

/// The family that a config belongs to.
///
/// # Errors
/// Naming the model types that the families take, if there is none.
pub(super) fn family_of(checkpoint: &Checkpoint) -> Result<GraphKind> {
    if let Some(family) = FAMILIES.into_iter().find(|family| family.accepts(checkpoint)) {
        return Ok(family);
    }
    let model_type = checkpoint.model_type()?;
    let shown = model_type.escape_debug();
    let message = if is_drafter(model_type) {
        format!("'{shown}' is a drafter: it helps another model and can't be run on its own")
    } else {
        let alias = match runs_as(model_type) {
            same if same == model_type => String::new(),
            other => format!(" (mlx-lm runs it as '{other}')"),
        };
        let mut generic: Vec<&str> = graphs::generic_types().collect();
        generic.sort_unstable();
        format!(
            "'{shown}' is not supported{alias}; dedicated: gemma4*, diffusion_gemma, glm_moe_dsa, qwen3_5, \
             qwen3_5_moe, qwen3, qwen3_moe, MiniCPM5; generic: {}",
            generic.join(", ")
        )
    };
    Err(checkpoint.config().error("model_type", message))
}

/// The profile of a family. Gemma 4 has a second one for the configs it has graphs of their own for.
pub(super) fn family_profile(family: GraphKind, config: ConfigFingerprint) -> Profile {
    let dedicated = Specialization::Dedicated;
    let (id, tier, specialization) = match family {
        GraphKind::DiffusionGemma => ("diffusion-gemma-dedicated", Tier::L2, dedicated),
        GraphKind::Gemma4 if GENERATED.contains(&config) => {
            ("gemma4-generated", Tier::L1, Specialization::Generated)
        }
        GraphKind::Gemma4 => ("gemma4-dedicated", Tier::L1, dedicated),
        GraphKind::Glm52 => ("glm5.2-colibri", Tier::L3, dedicated),
        GraphKind::MiniCpm5 => ("minicpm5-dedicated", Tier::L1, dedicated),
        GraphKind::Qwen3 => ("qwen3-dedicated", Tier::L1, dedicated),
        GraphKind::Qwen3Moe => ("qwen3-moe-dedicated", Tier::L1, dedicated),
        GraphKind::Qwen35 => ("qwen3.5-dedicated", Tier::L1, dedicated),
        GraphKind::UniversalDense => ("universal-dense", Tier::L1, Specialization::Generic),
    };
    let required = Profile::implied(family, &specialization);
    Profile { id: id.to_owned(), artifact: None, tier, required, graph: family, specialization }
}

/// The exact profiles that come with the engine.
pub(super) fn built_in() -> [Profile; 2] {
    [
        exact(
            "qwen3.8-27b-optiq-4bit",
            "hf:mlx-community/Qwen3.8-27B-OptiQ-4bit@b04599de95d7a9bfbd7f208d347c0f10d9432a42",
            0x5011_7975_cb40_5944,
            Tier::L1,
            GraphKind::Qwen35,
            &[Capability::VisionSidecar],
        ),
        exact(
            "glm5.2-colibri-int4-int8-mtp",
            "hf:mateogrgic/GLM-5.2-colibri-int4-with-int8-mtp@3cc8db99b1b13fc79325d987ba3c1c430766b3b8",
            0x8b49_d094_1e18_f1b9,
            Tier::L3,
            GraphKind::Glm52,
            &[],
        ),
    ]
}

/// A built-in profile with the capabilities that its graph implies and `more`.
fn exact(
    id: &str,
    artifact: &str,
    config: u64,
    tier: Tier,
    graph: GraphKind,
    more: &[Capability],
) -> Profile {
    let specialization = Specialization::Artifact { implementation: None };
    let required: BTreeSet<Capability> =
        Profile::implied(graph, &specialization).into_iter().chain(more.iter().copied()).collect();
    let artifact = Artifact {
        fingerprint: ArtifactFingerprint::known(artifact),
        config: ConfigFingerprint::from_u64(config),
    };
    Profile { id: id.to_owned(), artifact: Some(artifact), tier, required, graph, specialization }
}
