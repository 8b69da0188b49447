//! The cases in which the engine must equal the oracle bit for bit.
//!
//! Checkpoints are tiny, because MLX's CPU backend is slow; prompts are long, because caches, masks and position tables
//! change behaviour with length. The formats are covered in full, the other features each with every dtype.

mod batch;
mod dense;
mod gemma4;
mod matrix;
mod qwen3_5;
mod qwen3_moe;

pub use batch::{BatchCase, batch_cases};
pub use dense::{dense_cases, dense_fixtures};
pub use gemma4::{gemma4_cases, gemma4_forms};
pub use matrix::matrix_table;
pub use qwen3_5::{qwen3_5_cases, qwen3_5_fixture, qwen3_5_moe_cases, qwen3_5_moe_fixture};
pub use qwen3_moe::{qwen3_moe, qwen3_moe_cases};

use std::collections::BTreeMap;

use serde_json::{Value, json};

use self::matrix::grid;
use crate::specification::{
    CacheSpec, FixtureSpec, Float, Format, Processors, ReferenceSpec, RopeSpec, SamplerSpec, Sampling, Tokens,
};

/// A generation on a fixture.
#[derive(Clone, Debug)]
pub struct Case {
    /// What the case is about; unique in its list.
    pub name: String,
    /// The checkpoint.
    pub fixture: FixtureSpec,
    /// The generation.
    pub reference: ReferenceSpec,
}

const FLOATS: [Float; 3] = [Float::Bfloat16, Float::Float16, Float::Float32];
/// One token has no prefill; two have a prefill of one; the cache grows by 256 rows.
const SHORT: [usize; 6] = [1, 2, 3, 255, 256, 257];
/// 2049 tokens are the longest prompt with a single prefill chunk; with 2048 that chunk is not full.
const LONG: [usize; 2] = [2048, 2049];
const STEPS: u32 = 24;

/// Every storage format, under a name.
fn formats() -> Vec<(String, Format)> {
    let mut formats = vec![("dense".to_owned(), Format::Dense)];
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            formats.push((format!("affine {bits}-bit group {group}"), Format::Affine { bits, group }));
        }
    }
    formats.push(("mxfp4".to_owned(), Format::Mxfp4));
    formats.push(("nvfp4".to_owned(), Format::Nvfp4));
    formats.push(("mxfp8".to_owned(), Format::Mxfp8));
    formats
}

/// Formats that the features other than the format itself are combined with, in turn.
const ROTATION: [Format; 5] = [
    Format::Dense,
    Format::Affine { bits: 4, group: 64 },
    Format::Mxfp4,
    Format::Affine { bits: 8, group: 32 },
    Format::Nvfp4,
];

/// A llama whose vocabulary is just wide enough for the fixtures' tokenizer.
fn llama(arch: &'static str) -> FixtureSpec {
    FixtureSpec::new(arch).with("vocab_size", json!(320))
}

fn llama_rope(scaling: Value) -> FixtureSpec {
    llama("llama").with("rope_scaling", scaling)
}

/// A greedy generation of 24 tokens: what is special about the checkpoint, which it is, and the prompt.
fn case(what: &str, fixture: &FixtureSpec, count: usize, chunk: usize) -> Case {
    let FixtureSpec { arch, dtype, format, mixed, hub, shards, .. } = fixture;
    let mut name = arch.to_string();
    for (there, part) in [
        (!what.is_empty(), what.to_owned()),
        (true, format!("{dtype:?} {format:?}")),
        (*mixed, "with overrides".to_owned()),
        (*hub, "hub's layout".to_owned()),
        (*shards > 1, format!("{shards} shards")),
        (true, format!("{count} tokens in chunks of {chunk}")),
    ] {
        if there {
            name = format!("{name}, {part}");
        }
    }
    // Prompts of different lengths begin differently too.
    let tokens = Tokens::Random { count, seed: fixture.seed as u32 + count as u32 };
    let reference = ReferenceSpec { prefill_chunk: chunk as u32, ..ReferenceSpec::new(tokens, STEPS) };
    Case { name, fixture: fixture.clone(), reference }
}

/// Every position embedding that mlx-lm's llama accepts, as `rope_scaling` over heads of 16 features.
fn rope_scalings() -> Vec<(&'static str, Value)> {
    vec![
        ("default rope", json!({"rope_type": "default"})),
        ("linear rope", json!({"type": "linear", "factor": 4.0})),
        ("linear rope with an integer factor", json!({"rope_type": "linear", "factor": 3})),
        ("dynamic rope", json!({"rope_type": "dynamic", "factor": 2.0})),
        (
            "llama3 rope",
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 256}),
        ),
        ("llama3 rope by its defaults", json!({"rope_type": "llama3", "factor": 32})),
        ("yarn rope", json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256})),
        (
            "deepseek_yarn rope",
            json!({"type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 256, "beta_fast": 16,
                   "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0}),
        ),
        (
            "telechat3-yarn rope",
            json!({"type": "telechat3-yarn", "factor": 2.0, "original_max_position_embeddings": 512,
                   "mscale": 1.5}),
        ),
        (
            "longrope",
            json!({"rope_type": "longrope", "original_max_position_embeddings": 256, "short_factor": vec![1.0; 8],
                   "long_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0]}),
        ),
        (
            "proportional rope",
            json!({"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}),
        ),
        ("mrope", json!({"type": "mrope", "mrope_section": [2, 3, 3]})),
    ]
}

/// Llamas that differ from the plain one in one respect.
fn llama_features() -> Vec<(&'static str, FixtureSpec)> {
    let plain = || llama("llama");
    let mut features: Vec<_> =
        rope_scalings().into_iter().map(|(name, scaling)| (name, llama_rope(scaling))).collect();
    for (name, fixture) in &mut features {
        if *name == "dynamic rope" {
            // So few that most positions are beyond.
            fixture.set.insert("max_position_embeddings".to_owned(), json!(64));
        }
    }
    features.extend([
        ("longrope within the original context", {
            let scaling = rope_scalings().into_iter().find(|(name, _)| *name == "longrope").map(|(_, s)| s);
            llama_rope(scaling.unwrap_or_default()).with("max_position_embeddings", json!(256))
        }),
        ("traditional rope", plain().with("rope_traditional", json!(true))),
        (
            "traditional llama3 rope",
            llama_rope(
                json!({"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 128}),
            )
            .with("rope_traditional", json!(true)),
        ),
        ("large rope theta", plain().with("rope_theta", json!(500_000))),
        ("rope_parameters, which llama ignores", {
            plain().with("rope_parameters", json!({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}))
        }),
        ("attention biases", plain().with("attention_bias", json!(true))),
        ("mlp biases", plain().with("mlp_bias", json!(true))),
        ("all biases", plain().with("attention_bias", json!(true)).with("mlp_bias", json!(true))),
        ("untied head", plain().with("tie_word_embeddings", json!(false))),
        ("as many key heads as query heads", plain().with("num_key_value_heads", json!(4))),
        ("one key head", plain().with("num_key_value_heads", json!(1))),
        ("heads wider than hidden / heads", plain().with("head_dim", json!(32))),
        ("larger epsilon", plain().with("rms_norm_eps", json!(1e-5))),
        ("hidden size that no power of two divides", {
            let heads = plain().with("num_attention_heads", json!(3)).with("num_key_value_heads", json!(3));
            FixtureSpec { hidden: 96, ..heads }
        }),
        ("three layers", FixtureSpec { layers: 3, ..plain() }),
        ("two shards", FixtureSpec { shards: 2, ..plain() }),
        ("five shards", FixtureSpec { shards: 5, ..plain() }),
        ("window 256", llama("llama-sliding").with("sliding_window", json!(256))),
        ("window 300, full layer first", {
            let layers = json!(["full_attention", "sliding_attention", "sliding_attention"]);
            FixtureSpec { layers: 3, ..llama("llama") }
                .with("layer_types", layers)
                .with("sliding_window", json!(300))
        }),
    ]);
    features
}

/// Greedy decoding with every model type that runs as llama, every format with every dtype at every prompt length, and
/// every feature of a config with every dtype at some.
pub fn llama_cases() -> Vec<Case> {
    let types = ["llama", "llama-sliding", "minicpm5", "mistral", "iquestcoder", "xverse"];
    let mut cases: Vec<Case> = types.into_iter().flat_map(|arch| grid(&llama(arch))).collect();
    for dtype in FLOATS {
        for (seed, (name, format)) in formats().into_iter().enumerate() {
            let mut fixture = FixtureSpec { seed: seed as u64, dtype, format, ..llama("llama") };
            // Groups do not straddle rows, so rows of 128 are needed; one layer makes up for the width.
            let wide = FixtureSpec { hidden: 128, layers: 1, ..fixture.clone() };
            if matches!(format, Format::Affine { group: 128, .. }) {
                fixture = wide.with("intermediate_size", json!(128));
            }
            cases.extend(SHORT.map(|count| case(&name, &fixture, count, 2048)));
            // MLX is slow here, so that long prompts get the smallest model there can be, and one of 16 bits is enough
            // for a chunk that is not full.
            let narrow = FixtureSpec { layers: 1, ..fixture };
            let narrow =
                if narrow.hidden == 64 { narrow.with("intermediate_size", json!(64)) } else { narrow };
            let long = if dtype == Float::Float16 { &LONG[1..] } else { &LONG[..] };
            cases.extend(long.iter().map(|&count| case(&name, &narrow, count, 2048)));
        }
        for (i, (name, feature)) in llama_features().into_iter().enumerate() {
            let format = ROTATION[(i + dtype as usize) % ROTATION.len()];
            let fixture = FixtureSpec { seed: 100 + i as u64, dtype, format, ..feature };
            cases.extend([1, 3, 257].map(|count| case(name, &fixture, count, 2048)));
            // Far positions, with each dtype in turn.
            if i % FLOATS.len() == dtype as usize {
                let dense = FixtureSpec { format: Format::Dense, ..fixture };
                cases.push(case(name, &dense, 2049, 2048));
            }
        }
        for (seed, (name, format)) in formats().into_iter().enumerate() {
            if matches!(format, Format::Dense | Format::Affine { group: 128, .. }) {
                continue;
            }
            let untied = seed % 2 == 0;
            let fixture =
                FixtureSpec { seed: 200 + seed as u64, dtype, format, mixed: true, ..llama("llama") }
                    .with("tie_word_embeddings", json!(!untied));
            cases.extend([1, 257].map(|count| case(&name, &fixture, count, 2048)));
        }
        for (i, (name, window)) in
            [("no window", None), ("window 16", Some(16)), ("window 100", Some(100))].into_iter().enumerate()
        {
            let fixture = match window {
                None => llama("llama"),
                Some(window) => llama("llama-sliding").with("sliding_window", json!(window)),
            };
            let format = ROTATION[(i + dtype as usize) % ROTATION.len()];
            let fixture = FixtureSpec { seed: 300 + i as u64, dtype, format, ..fixture };
            cases.extend(
                [1, 7, 16, 17, 100, 256].map(|chunk| case(name, &fixture, 5 * chunk.min(60) + 3, chunk)),
            );
        }
    }
    cases
}

/// Greedy decoding with every model type.
pub fn greedy_cases() -> Vec<Case> {
    let qwen = [qwen3_moe_cases(), qwen3_5_cases(), qwen3_5_moe_cases()].concat();
    [llama_cases(), dense_cases(), qwen, gemma4_cases()].concat()
}

/// Ways to pick a token: samplers and logits processors, alone and together.
fn generations() -> Vec<(&'static str, Sampling, Processors)> {
    let sampling = |change: fn(&mut Sampling)| {
        let mut sampling = Sampling { temp: 1.0, ..Sampling::default() };
        change(&mut sampling);
        (sampling, Processors::default())
    };
    let processors = |temp: f64, change: fn(&mut Processors)| {
        let mut processors = Processors::default();
        change(&mut processors);
        (Sampling { temp, ..Sampling::default() }, processors)
    };
    let all = |change: fn(&mut Sampling, &mut Processors)| {
        let (mut sampling, mut processors) =
            (Sampling { temp: 0.8, ..Sampling::default() }, Processors::default());
        change(&mut sampling, &mut processors);
        (sampling, processors)
    };
    [
        ("temperature 1", sampling(|_| {})),
        ("temperature 0.3", sampling(|s| s.temp = 0.3)),
        ("temperature 1.7", sampling(|s| s.temp = 1.7)),
        ("top-p 0.9", sampling(|s| s.top_p = 0.9)),
        ("top-p 0.1", sampling(|s| s.top_p = 0.1)),
        ("top-p 1 filters nothing", sampling(|s| s.top_p = 1.0)),
        ("min-p 0.1", sampling(|s| s.min_p = 0.1)),
        ("min-p 0.8, at least 5", {
            sampling(|s| {
                s.min_p = 0.8;
                s.min_tokens_to_keep = 5;
            })
        }),
        ("min-p 1", sampling(|s| s.min_p = 1.0)),
        ("top-k 1", sampling(|s| s.top_k = 1)),
        ("top-k 7", sampling(|s| s.top_k = 7)),
        ("top-k all but one", sampling(|s| s.top_k = 319)),
        ("xtc always", {
            sampling(|s| {
                s.xtc_probability = 1.0;
                s.xtc_threshold = 0.01;
            })
        }),
        ("xtc at times", {
            sampling(|s| {
                s.xtc_probability = 0.5;
                s.xtc_threshold = 0.02;
            })
        }),
        ("xtc sparing special tokens", {
            sampling(|s| {
                s.xtc_probability = 1.0;
                s.xtc_threshold = 0.0;
                s.xtc_special_tokens = (0..160).collect();
            })
        }),
        ("top-p and top-k", {
            sampling(|s| {
                s.temp = 0.6;
                s.top_p = 0.95;
                s.top_k = 20;
            })
        }),
        ("all filters", {
            sampling(|s| {
                s.temp = 0.9;
                s.top_p = 0.97;
                s.min_p = 0.02;
                s.xtc_probability = 0.7;
                s.xtc_threshold = 0.015;
                s.top_k = 40;
            })
        }),
        ("greedy", processors(0.0, |_| {})),
        (
            "logit bias",
            processors(0.0, |p| p.logit_bias = BTreeMap::from([(7, 2.5), (100, -3.0), (319, 1.0)])),
        ),
        ("logit bias that decides", processors(1.0, |p| p.logit_bias = BTreeMap::from([(7, 5.0), (8, 4.5)]))),
        ("repetition penalty 1.3, greedy", processors(0.0, |p| p.repetition_penalty = Some(1.3))),
        ("repetition penalty 1.1", processors(1.0, |p| p.repetition_penalty = Some(1.1))),
        ("repetition penalty 1 is applied", processors(1.0, |p| p.repetition_penalty = Some(1.0))),
        ("repetition penalty 0 is none", processors(1.0, |p| p.repetition_penalty = Some(0.0))),
        ("repetition penalty over 64 tokens", {
            processors(0.0, |p| {
                p.repetition_penalty = Some(1.5);
                p.repetition_context_size = 64;
            })
        }),
        ("repetition penalty over a context of 0, which is all", {
            processors(0.0, |p| {
                p.repetition_penalty = Some(1.2);
                p.repetition_context_size = 0;
            })
        }),
        ("presence penalty, greedy", processors(0.0, |p| p.presence_penalty = Some(0.7))),
        ("presence penalty over 1 token", {
            processors(1.0, |p| {
                p.presence_penalty = Some(1.5);
                p.presence_context_size = 1;
            })
        }),
        ("presence bonus", processors(1.0, |p| p.presence_penalty = Some(-0.5))),
        ("frequency penalty, greedy", processors(0.0, |p| p.frequency_penalty = Some(0.4))),
        ("frequency penalty over 1000 tokens", {
            processors(1.0, |p| {
                p.frequency_penalty = Some(0.3);
                p.frequency_context_size = 1000;
            })
        }),
        ("all processors", {
            processors(1.0, |p| {
                p.logit_bias = BTreeMap::from([(3, 1.5), (4, -1.5)]);
                p.repetition_penalty = Some(1.2);
                p.presence_penalty = Some(0.3);
                p.presence_context_size = 50;
                p.frequency_penalty = Some(0.2);
                p.frequency_context_size = 10;
            })
        }),
        ("penalties, top-p and top-k", {
            all(|s, p| {
                s.top_p = 0.9;
                s.top_k = 30;
                p.repetition_penalty = Some(1.1);
                p.presence_penalty = Some(0.5);
            })
        }),
        ("everything", {
            all(|s, p| {
                s.top_p = 0.95;
                s.min_p = 0.03;
                s.xtc_probability = 0.5;
                s.xtc_threshold = 0.02;
                s.top_k = 50;
                p.logit_bias = BTreeMap::from([(3, 1.5), (4, -1.5)]);
                p.repetition_penalty = Some(1.05);
                p.presence_penalty = Some(0.1);
                p.frequency_penalty = Some(0.1);
            })
        }),
    ]
    .map(|(name, (sampling, processors))| (name, sampling, processors))
    .into()
}

/// 200 tokens under every sampling option and logits processor, with every dtype and several seeds.
pub fn sampling_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, (name, sampling, processors)) in generations().into_iter().enumerate() {
        for (dtype, seed) in FLOATS.into_iter().zip([0, 3, (1 << 32) + 5]) {
            let fixture =
                FixtureSpec { dtype, seed: 400, ..llama("llama") }.with("tie_word_embeddings", json!(false));
            let tokens = Tokens::Random { count: 12, seed: i as u32 };
            let reference = ReferenceSpec {
                seed: Some(seed),
                sampling: sampling.clone(),
                processors: processors.clone(),
                ..ReferenceSpec::new(tokens, 200)
            };
            cases.push(Case { name: format!("{dtype:?}, {name}, seed {seed}"), fixture, reference });
        }
    }
    cases
}

/// Every rotary embedding on its own, under a name.
pub fn rope_specs() -> Vec<(String, RopeSpec)> {
    let mut kinds = rope_scalings();
    kinds.push(("no scaling", Value::Null));
    kinds.push(("yarn rope with equal bounds", {
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6})
    }));
    kinds.push(("yarn rope that does not extend", {
        json!({"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 256})
    }));
    let mut specs = Vec::new();
    for (name, scaling) in kinds {
        for dtype in FLOATS {
            for traditional in [false, true] {
                // A single row, as in decoding, takes another path in MLX; rotated features may be a part of the head.
                for shape in [[1, 2, 1, 16], [2, 3, 7, 24]] {
                    let spec = RopeSpec {
                        dims: 16,
                        base: 10_000.0,
                        traditional,
                        scaling: scaling.clone(),
                        max_position_embeddings: Some(1024),
                        shape,
                        dtype,
                        seed: specs.len() as u64,
                        offsets: vec![0, 1, 255, 1020, 100_000],
                    };
                    let pairs = if traditional { "traditional " } else { "" };
                    specs.push((format!("{dtype:?} {pairs}{name} of {shape:?}"), spec));
                }
            }
        }
    }
    specs
}

/// Every sampler, stage by stage, on flat and on peaked distributions, under a name.
pub fn sampler_specs() -> Vec<(String, SamplerSpec)> {
    let mut specs = Vec::new();
    for (name, sampling, _) in generations() {
        // The rest differ in their processors.
        if sampling == Sampling::default()
            || specs.iter().any(|(_, s): &(_, SamplerSpec)| s.sampling == sampling)
        {
            continue;
        }
        for dtype in FLOATS {
            for scale in [0.5, 4.0] {
                let seed = specs.len() as u64;
                let spec = SamplerSpec {
                    vocabulary: 400,
                    dtype,
                    scale,
                    seed,
                    draws: 20,
                    sampling: sampling.clone(),
                };
                specs.push((format!("{dtype:?}, {name}, spread {scale}"), spec));
            }
        }
    }
    specs
}

/// Plain and rotating caches through updates around their boundaries, under a name.
pub fn cache_specs() -> Vec<(String, CacheSpec)> {
    let ones = |n: usize| vec![1; n];
    let plain = [
        vec![1, 1, 1],
        vec![255, 1, 1, 1],
        vec![256, 1, 255, 1],
        vec![257, 1, 300, 1, 1],
        vec![300, -50, 1, 6, -400, 2, 1],
        vec![512, -256, 256, 1],
    ];
    let rotating = [
        ones(30),
        [vec![3], ones(20)].concat(),
        [vec![8], ones(10), vec![5], ones(3)].concat(),
        [vec![20], ones(12), vec![20, 2], ones(9)].concat(),
        [vec![4, -2], ones(3), vec![-1], ones(12)].concat(),
        vec![2, 2, 2, 2, 2, 2, 7, 9, 1],
    ];
    let mut specs = Vec::new();
    let mut push = |max_size: Option<u32>, keep, window, steps: &[i32]| {
        let seed = specs.len() as u64;
        let dtype = FLOATS[specs.len() % FLOATS.len()];
        let name = format!("{dtype:?}, size {max_size:?}, keep {keep}, window {window:?}, steps {steps:?}");
        let spec =
            CacheSpec { max_size, keep, window, heads: 2, head_dim: 8, dtype, seed, steps: steps.to_vec() };
        specs.push((name, spec));
    };
    for steps in &plain {
        push(None, 0, None, steps);
        push(None, 0, Some(100), steps);
    }
    for steps in &rotating {
        push(Some(8), 0, None, steps);
        push(Some(8), 4, None, steps);
        push(Some(8), 0, Some(8), steps);
        push(Some(8), 0, Some(5), steps);
    }
    // Past the growth by 256 rows.
    push(Some(300), 0, Some(300), &[vec![250], ones(60)].concat());
    push(Some(300), 4, None, &ones(310));
    specs
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique() {
        for cases in [greedy_cases(), sampling_cases()] {
            let names: HashSet<_> = cases.iter().map(|case| &case.name).collect();
            assert_eq!(names.len(), cases.len());
        }
    }

    #[test]
    fn every_format_and_feature_is_tried_with_every_dtype() {
        let cases = llama_cases();
        for dtype in FLOATS {
            for (_, format) in formats() {
                for count in SHORT {
                    assert!(cases.iter().any(|case| case.fixture.dtype == dtype
                        && case.fixture.format == format
                        && case.reference.tokens.ids().len() == count));
                }
            }
            for (name, feature) in llama_features() {
                assert!(
                    cases.iter().any(|case| case.fixture.dtype == dtype
                        && case.fixture.arch == feature.arch
                        && case.fixture.shards == feature.shards
                        && case.fixture.layers == feature.layers
                        && case.fixture.set == feature.set),
                    "{name} with {dtype:?}"
                );
            }
        }
    }
}
