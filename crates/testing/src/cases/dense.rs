//! The families of dense transformers besides llama.

use serde_json::{Value, json};

use super::matrix::{grid, storage};
use super::{Case, case};
use crate::specification::{FixtureSpec, Float};

/// The families; each fixture has what its family has of its own.
pub(super) const FAMILIES: [&str; 10] =
    ["smollm3", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "glm4", "granite", "starcoder2"];

/// A dense float32 fixture of each family, and of each feature of a config that changes what is computed, under a name.
pub fn dense_fixtures() -> Vec<(&'static str, FixtureSpec)> {
    let float32 = |(name, fixture)| (name, FixtureSpec { dtype: Float::Float32, ..fixture });
    FAMILIES.map(|arch| (arch, family(arch))).into_iter().chain(features()).map(float32).collect()
}

pub(super) fn family(arch: &'static str) -> FixtureSpec {
    // Every fourth layer of a smollm3 has no rope.
    let layers = if arch == "smollm3" { 4 } else { 2 };
    FixtureSpec { layers, ..FixtureSpec::new(arch).with("vocab_size", json!(320)) }
}

/// Fixtures that differ from their family's plain one in one respect.
fn features() -> Vec<(&'static str, FixtureSpec)> {
    let without = |arch, keys: &[&'static str]| keys.iter().fold(family(arch), |f, key| f.without(key));
    let with = |arch, settings: Value| {
        settings
            .as_object()
            .into_iter()
            .flatten()
            .fold(family(arch), |fixture, (key, value)| fixture.with(key, value.clone()))
    };
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128});
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128});
    let longrope = |kind: &str, half: usize| {
        let long: Vec<f64> = (0..half).map(|i| 1.0 + 0.25 * i as f64).collect();
        json!({"type": kind, "short_factor": vec![1.0; half], "long_factor": long})
    };
    vec![
        ("smollm3 with a list of layers", {
            FixtureSpec { layers: 3, ..with("smollm3", json!({"no_rope_layers": [0, 1, 0]})) }
        }),
        ("smollm3 without rope in every second layer", {
            with("smollm3", json!({"no_rope_layer_interval": 2, "tie_word_embeddings": false}))
        }),
        ("smollm3 with a window", {
            let types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"];
            with("smollm3", json!({"layer_types": types, "sliding_window": 20, "attention_bias": true}))
        }),
        ("qwen2 with an untied head", with("qwen2", json!({"tie_word_embeddings": false}))),
        ("qwen2 with yarn", with("qwen2", json!({"rope_scaling": yarn, "rope_traditional": true}))),
        ("qwen2 with dynamic rope and no limit", {
            let dynamic = json!({"type": "dynamic", "factor": 2.0});
            with("qwen2", json!({"rope_scaling": dynamic, "max_position_embeddings": 64, "rope_theta": 1e4}))
        }),
        ("qwen2 with one key head", with("qwen2", json!({"num_key_value_heads": 1}))),
        ("qwen3 with an untied head", with("qwen3", json!({"tie_word_embeddings": false}))),
        ("qwen3 with heads as wide as hidden / heads", with("qwen3", json!({"head_dim": 16}))),
        ("qwen3 with yarn", with("qwen3", json!({"rope_scaling": yarn}))),
        ("qwen3 with rope_parameters", {
            let parameters = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5});
            with("qwen3", json!({"rope_theta": null, "rope_parameters": parameters}))
        }),
        ("qwen3 with theta beside rope_parameters", {
            let parameters = json!({"rope_type": "default", "rope_theta": 5e5});
            with("qwen3", json!({"rope_theta": 1e4, "rope_parameters": parameters}))
        }),
        ("qwen3 with rope_scaling beside rope_parameters", {
            let parameters = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5});
            with("qwen3", json!({"rope_theta": null, "rope_scaling": llama3, "rope_parameters": parameters}))
        }),
        ("gemma with traditional rope", {
            with("gemma", json!({"rope_traditional": true, "rope_theta": 5e5, "num_key_value_heads": 4}))
        }),
        ("gemma that says it is untied", with("gemma", json!({"tie_word_embeddings": false}))),
        ("gemma2 with caps that bite", {
            with("gemma2", json!({"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}))
        }),
        ("gemma2 with its defaults", {
            without("gemma2", &["query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"])
        }),
        ("gemma2 with as many key heads as query heads", {
            with("gemma2", json!({"num_key_value_heads": 4, "query_pre_attn_scalar": 16.0}))
        }),
        ("phi3 without scaling", with("phi3", json!({"rope_scaling": null, "tie_word_embeddings": true}))),
        ("phi3 with su rope", with("phi3", json!({"rope_scaling": longrope("su", 8)}))),
        ("phi3 with longrope in a part of heads", {
            with("phi3", json!({"rope_scaling": longrope("longrope", 4), "partial_rotary_factor": 0.5}))
        }),
        ("phi3 within its original context", {
            with("phi3", json!({"rope_scaling": longrope("longrope", 8), "max_position_embeddings": 512}))
        }),
        ("phi3 with linear rope", {
            let linear = json!({"type": "linear", "factor": 4.0, "long_factor": []});
            with("phi3", json!({"rope_scaling": linear, "partial_rotary_factor": 0.75}))
        }),
        ("phi3 with traditional rope", {
            with("phi3", json!({"rope_scaling": {}, "rope_traditional": true, "num_key_value_heads": null}))
        }),
        ("olmo2 with biases", {
            with("olmo2", json!({"attention_bias": true, "mlp_bias": true, "tie_word_embeddings": true}))
        }),
        ("olmo2 with wide heads", with("olmo2", json!({"head_dim": 32, "rope_scaling": llama3}))),
        ("glm4 without biases", with("glm4", json!({"attention_bias": false}))),
        ("glm4 rotated in halves", {
            with("glm4", json!({"rope_traditional": false, "partial_rotary_factor": 0.25}))
        }),
        ("glm4 rotated in full", with("glm4", json!({"partial_rotary_factor": 1.0, "head_dim": 16}))),
        ("granite with an untied head", with("granite", json!({"tie_word_embeddings": false}))),
        ("granite with biases", with("granite", json!({"attention_bias": true, "mlp_bias": true}))),
        ("granite with yarn", {
            with("granite", json!({"rope_scaling": yarn, "logits_scaling": 3.0, "residual_multiplier": 1.7}))
        }),
        ("starcoder2 with an untied head", with("starcoder2", json!({"tie_word_embeddings": false}))),
        ("starcoder2 with its defaults", {
            without("starcoder2", &["norm_epsilon", "rope_theta", "tie_word_embeddings"])
        }),
        ("smollm3 with its defaults", {
            let keys = ["no_rope_layer_interval", "tie_word_embeddings", "num_key_value_heads", "rope_theta"];
            without("smollm3", &keys)
        }),
        ("qwen2 with its defaults", {
            without("qwen2", &["rope_theta", "max_position_embeddings", "tie_word_embeddings"])
        }),
        ("gemma with its defaults", without("gemma", &["rope_theta"])),
        ("phi3 with its defaults", {
            let keys = ["tie_word_embeddings", "original_max_position_embeddings", "max_position_embeddings"];
            without("phi3", &keys)
        }),
        ("olmo2 with its defaults", {
            without("olmo2", &["tie_word_embeddings", "num_key_value_heads", "max_position_embeddings"])
        }),
        ("granite with its defaults", without("granite", &["tie_word_embeddings"])),
    ]
}

/// Greedy decoding with every family, and with each of its features.
pub fn dense_cases() -> Vec<Case> {
    let mut cases: Vec<Case> = FAMILIES.map(family).iter().flat_map(grid).collect();
    for (i, (name, feature)) in features().into_iter().enumerate() {
        let fixture = FixtureSpec { seed: 600 + i as u64, ..storage(i, &feature).of(&feature) };
        cases.extend([3, 257].map(|count| case(name, &fixture, count, 100)));
    }
    cases
}
