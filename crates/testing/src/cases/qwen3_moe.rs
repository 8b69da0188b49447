//! Qwen3 with sparse layers.

use serde_json::{Value, json};

use super::{Case, STEPS};
use crate::specification::{FixtureSpec, Float, Format, ReferenceSpec, Tokens};

/// A sparse layer, a dense one, and another sparse one.
pub fn qwen3_moe() -> FixtureSpec {
    FixtureSpec { layers: 3, ..FixtureSpec::new("qwen3_moe") }
        .with("vocab_size", json!(320))
        .with("head_dim", json!(32))
}

/// How weights are stored. MLX's CPU backend has unquantized experts in float32 only.
const STORAGES: [(&str, Float, Format, bool); 7] = [
    ("float32", Float::Float32, Format::Dense, false),
    ("bfloat16 4-bit", Float::Bfloat16, Format::Affine { bits: 4, group: 64 }, false),
    ("bfloat16 8-bit", Float::Bfloat16, Format::Affine { bits: 8, group: 32 }, false),
    ("bfloat16 4-bit and 8-bit", Float::Bfloat16, Format::Affine { bits: 4, group: 64 }, true),
    ("float16 3-bit and 8-bit", Float::Float16, Format::Affine { bits: 3, group: 32 }, true),
    ("bfloat16 mxfp4", Float::Bfloat16, Format::Mxfp4, false),
    ("float16 nvfp4", Float::Float16, Format::Nvfp4, false),
];

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

fn case(name: String, fixture: FixtureSpec, count: usize, chunk: usize) -> Case {
    let tokens = Tokens::Random { count, seed: fixture.seed as u32 + count as u32 };
    let reference = ReferenceSpec { prefill_chunk: chunk as u32, ..ReferenceSpec::new(tokens, STEPS) };
    Case { name, fixture, reference }
}

/// Greedy decoding: stored in every way at every prompt length, every feature at some lengths, prefilled in
/// chunks, from the hub's layout and from shards. From 32 tokens on the two experts of each are sorted.
pub fn qwen3_moe_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut push = |name: &str, fixture: &FixtureSpec, counts: &[usize], chunk: usize| {
        for &count in counts {
            let name = format!("{name}, {count} tokens in chunks of {chunk}");
            cases.push(case(name, fixture.clone(), count, chunk));
        }
    };
    for (name, dtype, format, mixed) in STORAGES {
        let fixture = FixtureSpec { seed: 700, dtype, format, mixed, ..qwen3_moe() };
        push(name, &fixture, &[1, 2, 32, 33, 34, 255, 256, 257], 2048);
    }
    let dense = FixtureSpec { seed: 700, dtype: Float::Float32, ..qwen3_moe() };
    push("float32", &dense, &[2048, 2049, 2050], 2048);
    let packed = FixtureSpec { seed: 700, format: Format::Affine { bits: 4, group: 64 }, ..qwen3_moe() };
    push("bfloat16 4-bit", &packed, &[3, 40], 1);
    push("bfloat16 4-bit", &packed, &[7, 8, 9, 70], 7);
    push("bfloat16 4-bit", &packed, &[70, 100], 33);
    push("bfloat16 4-bit in shards", &FixtureSpec { shards: 3, ..packed }, &[40], 7);
    push("float32 of the hub", &FixtureSpec { hub: true, ..dense.clone() }, &[1, 40], 2048);
    let tied = FixtureSpec { hub: true, ..dense.clone() }.with("tie_word_embeddings", json!(true));
    push("float32 of the hub, tied", &tied, &[40], 2048);
    push("float32 of the hub in shards", &FixtureSpec { hub: true, shards: 4, ..dense }, &[40], 7);
    for (i, (name, feature)) in features().into_iter().enumerate() {
        let (storage, dtype, format, mixed) = STORAGES[i % STORAGES.len()];
        let fixture = FixtureSpec { seed: 701 + i as u64, dtype, format, mixed, ..feature };
        push(&format!("{storage}, {name}"), &fixture, &[1, 50, 270], 2048);
    }
    cases
}
