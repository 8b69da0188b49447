//! Qwen3.5: linear attention with a full-attention layer every few layers.

use serde_json::{Value, json};

use super::matrix::{grid, storage};
use super::{Case, case};
use crate::specification::FixtureSpec;

/// Three linear layers and a full one.
pub fn qwen3_5_fixture() -> FixtureSpec {
    FixtureSpec { layers: 4, ..FixtureSpec::new("qwen3_5").with("vocab_size", json!(320)) }
}

/// Fixtures that differ from the plain one in one respect.
fn features() -> Vec<(&'static str, FixtureSpec)> {
    let with = |settings: Value| {
        settings
            .as_object()
            .into_iter()
            .flatten()
            .fold(qwen3_5_fixture(), |fixture, (key, value)| fixture.with(key, value.clone()))
    };
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
