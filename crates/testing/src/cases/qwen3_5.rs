//! Qwen3.5: linear attention with a full-attention layer every few layers.

use serde_json::{Value, json};

use super::{Case, SHORT, STEPS};
use crate::specification::{FixtureSpec, Float, Format, ReferenceSpec, Tokens};

/// Three linear layers and a full one.
pub fn qwen3_5_fixture() -> FixtureSpec {
    FixtureSpec { layers: 4, ..FixtureSpec::new("qwen3_5").with("vocab_size", json!(320)) }
}

const AFFINE4: Format = Format::Affine { bits: 4, group: 64 };
const AFFINE8: Format = Format::Affine { bits: 8, group: 32 };

/// How checkpoints are stored, each at every prompt length.
fn storages() -> Vec<(&'static str, FixtureSpec)> {
    let stored = |dtype, format| FixtureSpec { dtype, format, ..qwen3_5_fixture() };
    let hub = |dtype| FixtureSpec { hub: true, ..stored(dtype, Format::Dense) };
    vec![
        ("float32", stored(Float::Float32, Format::Dense)),
        ("float32 of the hub", hub(Float::Float32)),
        ("bfloat16 of the hub in shards", FixtureSpec { shards: 3, ..hub(Float::Bfloat16) }),
        ("bfloat16 4-bit", stored(Float::Bfloat16, AFFINE4)),
        ("float16 8-bit", stored(Float::Float16, AFFINE8)),
        ("bfloat16 4-bit and 8-bit", {
            FixtureSpec { mixed: true, shards: 2, ..stored(Float::Bfloat16, AFFINE4) }
                .with("full_attention_interval", json!(2))
        }),
    ]
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
        ("a flat config", FixtureSpec { arch: "qwen3_5-flat", ..qwen3_5_fixture() }),
        ("the text model alone", FixtureSpec { arch: "qwen3_5_text", ..qwen3_5_fixture() }),
    ]
}

/// Greedy decoding with Qwen3.5 checkpoints: every way to store them at every prompt length, every other feature at
/// some, and prefill in chunks.
pub fn qwen3_5_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut push = |name: String, fixture: &FixtureSpec, count: usize, chunk: usize| {
        let tokens = Tokens::Random { count, seed: fixture.seed as u32 + count as u32 };
        let reference = ReferenceSpec { prefill_chunk: chunk as u32, ..ReferenceSpec::new(tokens, STEPS) };
        cases.push(Case { name, fixture: fixture.clone(), reference });
    };
    for (seed, (name, fixture)) in storages().into_iter().enumerate() {
        let fixture = FixtureSpec { seed: 500 + seed as u64, ..fixture };
        for count in SHORT {
            push(format!("{name}, {count} tokens"), &fixture, count, 2048);
        }
        for (count, chunk) in [(5, 1), (7, 7), (8, 7), (9, 7), (60, 16)] {
            push(format!("{name}, {count} tokens in chunks of {chunk}"), &fixture, count, chunk);
        }
        // The longest prompt that is one chunk, one token less, and one more.
        if name == "bfloat16 4-bit" {
            for count in [2048, 2049, 2050] {
                push(format!("{name}, {count} tokens"), &fixture, count, 2048);
            }
        }
    }
    for (seed, (name, fixture)) in features().into_iter().enumerate() {
        let (dtype, format) = match seed % 3 {
            0 => (Float::Bfloat16, Format::Dense),
            1 => (Float::Float16, AFFINE4),
            _ => (Float::Bfloat16, AFFINE8),
        };
        let fixture = FixtureSpec { seed: 600 + seed as u64, dtype, format, ..fixture };
        for count in [1, 3, 70] {
            push(format!("{dtype:?} {format:?}, {name}, {count} tokens"), &fixture, count, 2048);
        }
    }
    cases
}
