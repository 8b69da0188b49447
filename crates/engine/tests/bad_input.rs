//! Damaged weights, tokenizers and prompts: an error, never a panic or made-up tokens.

use std::fs;
use std::ops::ControlFlow;

use russet_engine::evaluate::Recording;
use russet_engine::{
    Error, Event, Generation, LanguageModel, Request, Sampling, StepOptions, Steps, generate,
};
use russet_model::{Fidelity, LoadOptions, Model, Tier};
use russet_testing::{Format, TinyCheckpoint};
use serde_json::json;
use tempfile::TempDir;

const VOCABULARY: u32 = 48;
const CONTEXT: usize = 64;

fn checkpoint() -> TinyCheckpoint {
    TinyCheckpoint::llama(Format::Dense)
}

/// A tokenizer of `count` words, `0` to `count - 1`.
fn tokenizer(count: u32) -> String {
    let vocabulary: serde_json::Map<_, _> = (0..count).map(|id| (id.to_string(), id.into())).collect();
    json!({
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": { "type": "Whitespace" },
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "0" },
    })
    .to_string()
}

fn written(checkpoint: &TinyCheckpoint) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    checkpoint.write(dir.path());
    fs::write(dir.path().join("tokenizer.json"), tokenizer(VOCABULARY)).unwrap();
    dir
}

fn language_model(checkpoint: &TinyCheckpoint) -> LanguageModel {
    LanguageModel::load(written(checkpoint).path(), &LoadOptions::default()).unwrap()
}

fn generated(model: &LanguageModel, prompt: Vec<u32>, max_tokens: usize) -> Result<Generation, Error> {
    generate(model, &Request::new(prompt, max_tokens), &mut |_| ControlFlow::Continue(()))
}

fn start<'m>(model: &'m Model, prompt: &[u32], sampling: Sampling) -> Result<Steps<'m>, Error> {
    let options = StepOptions { sampling, prefill_chunk: Some(2), ..StepOptions::default() };
    let steps = Steps::start(model, prompt, options, &mut |_| ControlFlow::Continue(()))?;
    Ok(steps.unwrap())
}

/// Writes `value` over the first element of a float32 tensor, and its negative over the 33rd, which in the
/// head belongs to another token: of two infinite logits one is positive.
fn damage(format: Format, name: &str, value: f32) -> TinyCheckpoint {
    let mut checkpoint = TinyCheckpoint::llama(format);
    let data = &mut checkpoint.tensors.get_mut(name).unwrap().data;
    data[..4].copy_from_slice(&value.to_le_bytes());
    if let Some(element) = data.get_mut(128..132) {
        element.copy_from_slice(&(-value).to_le_bytes());
    }
    checkpoint
}

#[track_caller]
fn assert_message<T>(result: Result<T, Error>, parts: &[&str]) {
    match result {
        Ok(_) => panic!("succeeded, expected an error with {parts:?}"),
        Err(e) => {
            let message = e.to_string();
            for part in parts {
                assert!(message.contains(part), "{message:?} does not contain {part:?}");
            }
        }
    }
}

#[test]
fn the_undamaged_model_generates() {
    let generation = generated(&language_model(&checkpoint()), vec![1, 2, 3], 4).unwrap();
    assert_eq!(generation.tokens.len(), 4);
}

#[test]
fn weights_that_are_not_finite_are_an_error_under_every_sampler() {
    let greedy = Sampling::default();
    let warm = Sampling { temperature: 1.0, ..greedy.clone() };
    let samplers = [
        greedy.clone(),
        warm.clone(),
        Sampling { top_p: 0.5, ..warm.clone() },
        Sampling { min_p: 0.1, ..warm.clone() },
        Sampling { top_k: 3, ..warm.clone() },
        Sampling { xtc_probability: 1.0, ..warm.clone() },
        Sampling { repetition_penalty: Some(1.5), ..greedy },
    ];
    let affine = Format::Affine { bits: 4, group: 32 };
    let damaged = [
        (Format::Dense, "lm_head.weight"),
        (Format::Dense, "model.norm.weight"),
        (Format::Dense, "model.layers.0.self_attn.k_proj.weight"),
        (Format::Dense, "model.layers.1.mlp.down_proj.weight"),
        (Format::Dense, "model.layers.1.input_layernorm.weight"),
        (affine, "lm_head.scales"),
        (affine, "model.norm.weight"),
        (affine, "model.layers.0.self_attn.v_proj.biases"),
        (affine, "model.layers.1.input_layernorm.weight"),
        (Format::Mxfp4, "model.norm.weight"),
        (Format::Mxfp8, "model.norm.weight"),
        (Format::Nvfp4, "model.layers.1.input_layernorm.weight"),
    ];
    let cases = damaged.iter().flat_map(|damage| [f32::NAN, f32::INFINITY].map(|value| (damage, value)));
    for ((format, name), value) in cases {
        let dir = written(&damage(*format, name, value));
        for fidelity in [Fidelity::Tier(Tier::L1), Fidelity::Auto] {
            let model = Model::load(dir.path(), &LoadOptions::new(fidelity)).unwrap();
            for sampling in &samplers {
                let what = format!("{format:?} {name} {value} {fidelity:?} {sampling:?}");
                let mut steps = start(&model, &[1, 2, 3], sampling.clone()).unwrap();
                match steps.next() {
                    Some(Err(Error::NotFinite { tokens, .. })) => assert_eq!(tokens, 3, "{what}"),
                    other => panic!("{what}: {other:?}"),
                }
                assert!(steps.next().is_none(), "{what}");
            }
        }
    }
}

#[test]
fn a_token_whose_embedding_is_nan_ends_the_generation_that_reaches_it() {
    let model = language_model(&damage(Format::Dense, "model.embed_tokens.weight", f32::NAN));
    assert_message(generated(&model, vec![1, 0], 8), &["not finite after 2 tokens", "float32"]);
    let recording = Recording {
        tokens: vec![0],
        steps: 1,
        prefill_chunk: Some(1),
        sampling: Sampling::default(),
        seed: 0,
    };
    assert_message(recording.run(&model.model), &["not finite after 1 tokens"]);
}

#[test]
fn an_empty_prompt_is_refused() {
    let model = language_model(&checkpoint());
    assert_message(generated(&model, vec![], 4), &["the prompt is empty"]);
    assert_message(start(&model.model, &[], Sampling::default()), &["the prompt is empty"]);
}

#[test]
fn prompts_with_ids_outside_the_vocabulary_are_refused() {
    let model = language_model(&checkpoint());
    for id in [VOCABULARY, 1 << 24, u32::MAX] {
        let parts = [&*format!("token id {id}"), "vocabulary of 48"];
        for prompt in [vec![id], vec![1, id], vec![id, 1, 2, 3]] {
            assert_message(start(&model.model, &prompt, Sampling::default()), &parts);
            assert_message(generated(&model, prompt, 4), &parts);
        }
    }
}

#[test]
fn a_prompt_that_fills_the_context_is_refused_and_generation_ends_with_it() {
    let model = language_model(&checkpoint());
    for length in [CONTEXT, CONTEXT + 1, 10 * CONTEXT] {
        let parts = [&*format!("the prompt has {length} tokens"), "context of 64", "shorten it"];
        assert_message(generated(&model, vec![1; length], 1), &parts);
    }
    for length in [1, CONTEXT - 2, CONTEXT - 1] {
        let generation = generated(&model, vec![1; length], usize::MAX).unwrap();
        assert_eq!(generation.tokens.len(), CONTEXT - length);
        assert_eq!(generation.finish_reason.name(), "length");
    }
}

#[test]
fn a_limit_beyond_all_memory_takes_no_memory() {
    let unlimited = checkpoint().without("max_position_embeddings");
    for checkpoint in [unlimited.clone(), unlimited.with("max_position_embeddings", json!(1 << 24))] {
        let dir = written(&checkpoint);
        for fidelity in [Fidelity::Tier(Tier::L1), Fidelity::Auto] {
            let model = LanguageModel::load(dir.path(), &LoadOptions::new(fidelity)).unwrap();
            russet_mlx::memory::reset_peak();
            let mut texts = 0;
            let generation = generate(&model, &Request::new(vec![1, 2], usize::MAX), &mut |event| {
                texts += usize::from(matches!(event, Event::Text(_)));
                if texts == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            assert_eq!(generation.unwrap().tokens.len(), 3);
            let peak = russet_mlx::memory::peak();
            assert!(peak < 100 << 20, "{peak} bytes for three tokens");
        }
    }
}

#[test]
fn prefill_in_chunks_of_nothing_is_refused() {
    let model = language_model(&checkpoint());
    let request = Request { prefill_chunk: Some(0), ..Request::new(vec![1], 1) };
    let result = generate(&model, &request, &mut |_| ControlFlow::Continue(()));
    assert_message(result, &["prefill-chunk", "at least 1"]);
}

#[test]
fn a_missing_or_broken_tokenizer_is_named() {
    let dir = written(&checkpoint());
    let path = dir.path().join("tokenizer.json");
    for text in ["", "{", "[]", "{}", "{\"model\": {\"type\": \"WordLevel\"}}"] {
        fs::write(&path, text).unwrap();
        assert_message(LanguageModel::load(dir.path(), &LoadOptions::default()), &["tokenizer.json"]);
    }
    fs::remove_file(&path).unwrap();
    assert_message(
        LanguageModel::load(dir.path(), &LoadOptions::default()),
        &["tokenizer.json", "does not exist"],
    );
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused() {
    let dir = written(&checkpoint());
    for count in [VOCABULARY + 1, 1000] {
        fs::write(dir.path().join("tokenizer.json"), tokenizer(count)).unwrap();
        let parts = [dir.path().to_str().unwrap(), &*format!("{count} tokens"), "only 48 rows"];
        assert_message(LanguageModel::load(dir.path(), &LoadOptions::default()), &parts);
    }
}
