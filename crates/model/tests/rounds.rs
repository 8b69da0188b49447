//! Rounds of speculation on whole models: what stays has the bits of plain decoding, whatever was tried.

use russet_mlx::{Array, Dtype};
use russet_model::{Cache, Error, Fidelity, LoadOptions, Model, Tier};
use russet_testing::{FixtureSpec, Format, Oracle, qwen3_5_fixture};
use serde_json::json;

const AFFINE: Format = Format::Affine { bits: 4, group: 64 };

fn load(oracle: &Oracle, fixture: &FixtureSpec) -> Model {
    Model::load(&oracle.fixture(fixture), &LoadOptions::new(Fidelity::Tier(Tier::L1))).unwrap()
}

/// Logits of the last of `tokens`, as bytes.
fn step(model: &Model, tokens: &[u32], cache: &mut Cache) -> Result<Vec<u8>, Error> {
    let tokens = Array::from_slice(tokens, [1, tokens.len() as i32])?;
    let hidden = model.forward(&tokens, cache)?.slice_axis(1, -1, i32::MAX)?;
    Ok(model.logits(&hidden)?.to_bytes()?)
}

#[test]
fn rounds_leave_the_bits_of_plain_decoding() {
    let Some(oracle) = Oracle::get() else { return };
    let llama = FixtureSpec { format: AFFINE, ..FixtureSpec::new("llama") };
    for fixture in [FixtureSpec { format: AFFINE, ..qwen3_5_fixture() }, llama] {
        let model = load(oracle, &fixture.with("vocab_size", json!(320)));
        let text: Vec<u32> = (0..40).map(|i| i * i * 7 % 256).collect();
        let mut plain = model.new_cache();
        let expected: Vec<_> = text.iter().map(|&t| step(&model, &[t], &mut plain).unwrap()).collect();

        let mut cache = model.new_cache();
        let mut done = 0;
        // Drafts of `length` tokens of which `keep` are right.
        for (length, keep) in [(4, 0), (4, 4), (5, 2), (1, 1), (1, 0), (3, 1), (6, 5), (8, 8), (2, 1)] {
            let mut draft = text[done..done + keep].to_vec();
            draft.extend((keep..length).map(|i| 255 - i as u32));
            cache.begin_round();
            step(&model, &draft, &mut cache).unwrap();
            if keep == length {
                cache.commit().unwrap();
            } else {
                cache.rollback(keep as i32).unwrap();
            }
            done += keep;
            assert_eq!(cache.offset() as usize, done);
            // The next token shows the state, and a copy of it that goes on elsewhere does not change it.
            let mut copy = cache.clone();
            step(&model, &[9, 8, 7], &mut copy).unwrap();
            let logits = step(&model, &[text[done]], &mut cache).unwrap();
            assert_eq!(logits, expected[done], "{}: token {done}", fixture_name(&model));
            done += 1;
        }
    }
}

fn fixture_name(model: &Model) -> &str {
    model.checkpoint().model_type().unwrap()
}

#[test]
fn what_a_rotating_cache_has_overwritten_can_not_be_rolled_back() {
    let Some(oracle) = Oracle::get() else { return };
    let model = load(oracle, &FixtureSpec::new("llama-sliding"));
    let mut cache = model.new_cache();
    cache.begin_round();
    step(&model, &[1, 2, 3], &mut cache).unwrap();
    cache.rollback(1).unwrap();
    step(&model, &(0..20).collect::<Vec<_>>(), &mut cache).unwrap();
    cache.begin_round();
    step(&model, &[1, 2], &mut cache).unwrap();
    let message = cache.rollback(1).unwrap_err().to_string();
    assert!(message.contains("rotating cache"), "{message}");
    assert_eq!(cache.offset(), 23);
}

#[test]
fn a_cache_of_another_model_is_refused() {
    let Some(oracle) = Oracle::get() else { return };
    let (qwen, llama) = (load(oracle, &qwen3_5_fixture()), load(oracle, &FixtureSpec::new("llama")));
    for (model, other) in [(&qwen, &llama), (&llama, &qwen)] {
        let message = step(model, &[1], &mut other.new_cache()).unwrap_err().to_string();
        assert!(!message.is_empty());
    }
    let hidden = qwen.forward(&Array::zeros([1, 1], Dtype::U32).unwrap(), &mut qwen.new_cache()).unwrap();
    assert_eq!(hidden.dtype(), Dtype::Bf16);
}
