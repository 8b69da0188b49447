//! Gemma 4 in all its forms.

use serde_json::{Value, json};

use super::matrix::{grid, storage};
use super::{Case, case};
use crate::specification::FixtureSpec;

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

/// The forms, under a name: each the smallest that has all kinds of its layers.
pub fn gemma4_forms() -> Vec<(&'static str, FixtureSpec)> {
    let form = |arch, layers| {
        FixtureSpec { layers, ..FixtureSpec::new(arch) }
            .with("head_dim", json!(16))
            .with("global_head_dim", json!(32))
    };
    vec![
        ("12b", form("gemma4-dense", 3)),
        ("unified", form("gemma4-unified", 3)),
        // Of three layers with keys and values of their own, the last two give them to three others.
        ("e4b", form("gemma4-e4b", 6)),
        ("e2b", form("gemma4-e2b", 4)),
        ("26b-a4b", form("gemma4-moe", 3)),
        ("text", form("gemma4-text", 4)),
    ]
}

/// Checkpoints that differ from a form's plain one in one respect.
fn features() -> Vec<(&'static str, FixtureSpec)> {
    let form = |name: &str| {
        let found = gemma4_forms().into_iter().find(|(form, _)| *form == name);
        found.map_or_else(|| panic!("no form {name}"), |(_, fixture)| fixture)
    };
    let with = |name: &str, settings: Value| {
        let settings = settings.as_object().into_iter().flatten();
        settings.fold(form(name), |fixture, (key, value)| fixture.with(key, value.clone()))
    };
    let layers = |types: &[&str], fixture: FixtureSpec| {
        FixtureSpec { layers: types.len() as u32, ..fixture }.with("layer_types", json!(types))
    };
    let ropes = |full: Value, sliding: Value| json!({"full_attention": full, "sliding_attention": sliding});
    vec![
        ("12b with an untied head", with("12b", json!({"tie_word_embeddings": false}))),
        ("12b without a cap", with("12b", json!({"final_logit_softcapping": null}))),
        ("12b with a low cap", with("12b", json!({"final_logit_softcapping": 2}))),
        ("12b with values of their own", with("12b", json!({"attention_k_eq_v": false}))),
        ("12b with as many global key heads", with("12b", json!({"num_global_key_value_heads": null}))),
        ("12b with one width of heads", with("12b", json!({"global_head_dim": null}))),
        ("12b with one width of heads, by 0", with("12b", json!({"global_head_dim": 0}))),
        (
            "12b with layers by default",
            with("12b", json!({"layer_types": null, "sliding_window_pattern": 2})),
        ),
        ("12b with full layers only", layers(&[FULL, FULL], form("12b"))),
        ("12b with sliding layers only", layers(&[SLIDING, SLIDING], form("12b"))),
        ("12b with a full layer first", layers(&[FULL, SLIDING, SLIDING], form("12b"))),
        ("12b with a window of 256", with("12b", json!({"sliding_window": 256}))),
        ("12b with a window of 300", with("12b", json!({"sliding_window": 300}))),
        ("12b with ropes by default", with("12b", json!({"rope_parameters": null}))),
        ("12b with traditional ropes", with("12b", json!({"rope_traditional": true}))),
        ("12b with other ropes", {
            let full = json!({"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0,
                              "rope_theta": 5000.0});
            with(
                "12b",
                json!({"rope_parameters": ropes(full, json!({"rope_type": "linear", "factor": 4.0}))}),
            )
        }),
        ("12b without a rope for full layers", {
            with("12b", json!({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}))
        }),
        ("e4b with one shared layer", with("e4b", json!({"num_kv_shared_layers": 1}))),
        ("e4b with keys as values", {
            with("e4b", json!({"attention_k_eq_v": true, "num_global_key_value_heads": 1}))
        }),
        ("e4b without inputs of layers", with("e4b", json!({"hidden_size_per_layer_input": null}))),
        ("e4b with narrow inputs of layers", with("e4b", json!({"hidden_size_per_layer_input": 24}))),
        ("e4b with an untied head", with("e4b", json!({"tie_word_embeddings": null}))),
        ("e4b with a full donor first", {
            layers(&[FULL, SLIDING, SLIDING, FULL], form("e4b")).with("num_kv_shared_layers", json!(2))
        }),
        ("e4b with a longer table of inputs", with("e4b", json!({"vocab_size_per_layer_input": 600}))),
        ("e2b with shared layers no wider", with("e2b", json!({"use_double_wide_mlp": null}))),
        ("26b-a4b with one expert chosen", with("26b-a4b", json!({"top_k_experts": 1}))),
        ("26b-a4b with all experts chosen", with("26b-a4b", json!({"top_k_experts": 8}))),
        ("26b-a4b with shared keys and inputs of layers", {
            let shared = json!({"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 32});
            FixtureSpec { layers: 6, ..with("26b-a4b", shared) }
        }),
        ("26b-a4b with values of their own", with("26b-a4b", json!({"attention_k_eq_v": false}))),
    ]
}

/// Greedy decoding with every form, and with each feature.
pub fn gemma4_cases() -> Vec<Case> {
    let mut cases: Vec<Case> = gemma4_forms().iter().flat_map(|(_, plain)| grid(plain)).collect();
    for (i, (name, feature)) in features().into_iter().enumerate() {
        let fixture = FixtureSpec { seed: 600 + i as u64, ..storage(i, &feature).of(&feature) };
        cases.extend([1, 17, 270].map(|count| case(name, &fixture, count, 2048)));
    }
    cases
}
