//! Qwen3 with sparse layers.

use serde_json::{Value, json};

use super::matrix::{grid, storage};
use super::{Case, case};
use crate::specification::{FixtureSpec, Float};

/// A sparse layer, a dense one, and another sparse one.
pub fn qwen3_moe() -> FixtureSpec {
    FixtureSpec { layers: 3, ..FixtureSpec::new("qwen3_moe") }
        .with("vocab_size", json!(320))
        .with("head_dim", json!(32))
}

/// Checkpoints that differ from the plain one in one respect.
fn features() -> Vec<(&'static str, FixtureSpec)> {
    let with = |settings: Value| {
        let settings = settings.as_object().into_iter().flatten();
        settings.fold(qwen3_moe(), |fixture, (key, value)| fixture.with(key, value.clone()))
    };
    vec![
        ("tied head", with(json!({"tie_word_embeddings": true}))),
        ("scores as they are", with(json!({"norm_topk_prob": false}))),
        ("every second layer", with(json!({"decoder_sparse_step": 2, "mlp_only_layers": []}))),
        ("sparse layers only", with(json!({"mlp_only_layers": []}))),
        ("no experts", with(json!({"num_experts": 0}))),
        ("one expert chosen", with(json!({"num_experts_per_tok": 1}))),
        ("all experts chosen", with(json!({"num_experts_per_tok": 8}))),
        ("many experts", with(json!({"num_experts": 40, "num_experts_per_tok": 6}))),
        ("a rope scaling, which the reference ignores", {
            with(json!({"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500}))
        }),
        ("wide experts", with(json!({"moe_intermediate_size": 192, "num_key_value_heads": 1}))),
    ]
}

/// Greedy decoding with the plain checkpoint, and with each feature.
pub fn qwen3_moe_cases() -> Vec<Case> {
    let mut cases = grid(&qwen3_moe());
    for (i, (name, feature)) in features().into_iter().enumerate() {
        let fixture = FixtureSpec { seed: 600 + i as u64, ..storage(i, &feature).of(&feature) };
        cases.extend([1, 50, 270].map(|count| case(name, &fixture, count, 2048)));
    }
    let tied = FixtureSpec { hub: true, dtype: Float::Float32, ..qwen3_moe() };
    cases.push(case("tied", &tied.with("tie_word_embeddings", json!(true)), 40, 2048));
    cases
}
