//! Qwen3.5: linear attention with a full-attention layer every few layers, dense and with experts.

use serde_json::{Value, json};

use super::matrix::{grid, storage};
use super::{Case, case};
use crate::specification::FixtureSpec;

/// Three linear layers and a full one.
pub fn qwen3_5_fixture() -> FixtureSpec {
    FixtureSpec { layers: 4, ..FixtureSpec::new("qwen3_5").with("vocab_size", json!(320)) }
}

/// The same with eight experts in each layer, of which each token takes two, and a shared one.
pub fn qwen3_5_moe_fixture() -> FixtureSpec {
    FixtureSpec { arch: "qwen3_5_moe", ..qwen3_5_fixture() }
}

/// `fixture` with `settings` in its config.
fn with(fixture: FixtureSpec, settings: Value) -> FixtureSpec {
    let settings = settings.as_object().into_iter().flatten();
    settings.fold(fixture, |fixture, (key, value)| fixture.with(key, value.clone()))
}

/// Fixtures that differ from the plain one in one respect.
fn features() -> Vec<(&'static str, FixtureSpec)> {
    let with = |settings: Value| with(qwen3_5_fixture(), settings);
    let rope = |kind: Value| {
        let plain = json!({"rope_theta": 1e4, "partial_rotary_factor": 0.5});
        let both = [plain, kind].map(|v| v.as_object().cloned().unwrap_or_default());
        with(json!({"rope_parameters": both.into_iter().flatten().collect::<serde_json::Map<_, _>>()}))
    };
    vec![
        ("every second layer full", with(json!({"full_attention_interval": 2}))),
        ("a linear layer last", FixtureSpec { layers: 5, ..with(json!({"full_attention_interval": 3})) }),
        ("a tied head", with(json!({"tie_word_embeddings": true}))),
        ("attention biases", with(json!({"attention_bias": true}))),
        ("one key head", with(json!({"linear_num_key_heads": 1, "num_key_value_heads": 1}))),
        ("as many value heads as key heads", with(json!({"linear_num_key_heads": 4}))),
        ("narrow keys and wide values", {
            with(json!({"linear_key_head_dim": 16, "linear_value_head_dim": 48}))
        }),
        ("a convolution over 2 rows", with(json!({"linear_conv_kernel_dim": 2}))),
        ("a convolution over 7 rows", with(json!({"linear_conv_kernel_dim": 7}))),
        ("heads as wide as hidden / heads", with(json!({"head_dim": null}))),
        ("a larger epsilon", with(json!({"rms_norm_eps": 1e-3}))),
        ("linear rope over half a head", rope(json!({"rope_type": "linear", "factor": 4.0}))),
        ("mrope by its name", rope(json!({"type": "mrope", "mrope_section": [3, 3, 2]}))),
        ("rope without a type", rope(json!({}))),
        ("no rope_parameters", qwen3_5_fixture().without("rope_parameters")),
    ]
}

/// Greedy decoding with every spelling of the config, and with each feature.
pub fn qwen3_5_cases() -> Vec<Case> {
    let spelling = |arch| FixtureSpec { arch, ..qwen3_5_fixture() };
    let spellings = ["qwen3_5", "qwen3_5-flat", "qwen3_5_text"].map(spelling);
    let mut cases: Vec<Case> = spellings.iter().flat_map(grid).collect();
    for (i, (name, feature)) in features().into_iter().enumerate() {
        let fixture = FixtureSpec { seed: 600 + i as u64, ..storage(i, &feature).of(&feature) };
        cases.extend([1, 3, 70].map(|count| case(name, &fixture, count, 2048)));
    }
    cases
}

/// Fixtures with experts that differ from the plain one in one respect.
fn sparse_features() -> Vec<(&'static str, FixtureSpec)> {
    let moe = |settings: Value| with(qwen3_5_moe_fixture(), settings);
    // Sizes alone make a model sparse, whatever it is called.
    let sizes = json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                       "shared_expert_intermediate_size": 64});
    let called = |arch| with(FixtureSpec { arch, ..qwen3_5_fixture() }, sizes.clone());
    vec![
        ("a tied head", moe(json!({"tie_word_embeddings": true}))),
        ("scores as they are", moe(json!({"norm_topk_prob": false}))),
        ("scores by default", qwen3_5_moe_fixture().without("norm_topk_prob")),
        ("every second layer full", moe(json!({"full_attention_interval": 2}))),
        ("no experts", moe(json!({"num_experts": 0}))),
        ("one expert chosen", moe(json!({"num_experts_per_tok": 1}))),
        ("all experts chosen", moe(json!({"num_experts_per_tok": 8}))),
        ("many experts", moe(json!({"num_experts": 40, "num_experts_per_tok": 6}))),
        ("wide experts", moe(json!({"moe_intermediate_size": 192}))),
        ("a wide shared expert", moe(json!({"shared_expert_intermediate_size": 192}))),
        ("experts", called("qwen3_5")),
        ("experts", called("qwen3_5-flat")),
        ("experts", called("qwen3_5_text")),
    ]
}

/// Greedy decoding with experts: the plain checkpoint, and with each feature.
pub fn qwen3_5_moe_cases() -> Vec<Case> {
    let mut cases = grid(&qwen3_5_moe_fixture());
    for (i, (name, feature)) in sparse_features().into_iter().enumerate() {
        let storage = storage(i, &qwen3_5_moe_fixture());
        let fixture = FixtureSpec { seed: 600 + i as u64, ..storage.of(&feature) };
        cases.extend([1, 33, 70].map(|count| case(name, &fixture, count, 2048)));
    }
    cases
}
