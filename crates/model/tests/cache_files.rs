//! States of sequences in files: what comes back computes on with the same bits, and what does not fit is
//! refused with its reason.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use russet_mlx::{Array, Device, Dtype, load_safetensors, save_safetensors};
use russet_model::{Cache, CpuOptions, Fidelity, KvType, LoadOptions, Model, Tier};
use russet_testing::{Format, TinyCheckpoint};
use serde_json::json;
use tempfile::TempDir;

/// A window over the first of two layers.
fn checkpoint() -> TinyCheckpoint {
    TinyCheckpoint::llama(Format::Dense)
        .with("layer_types", json!(["sliding_attention", "full_attention"]))
        .with("sliding_window", json!(8))
}

fn load(checkpoint: &TinyCheckpoint, tier: Tier, kv: KvType) -> Model {
    let dir = tempfile::tempdir().unwrap();
    checkpoint.write(dir.path());
    let options = LoadOptions {
        cpu: CpuOptions { kv, ..CpuOptions::default() },
        ..LoadOptions::new(Fidelity::Tier(tier))
    };
    Model::load(dir.path(), &options).unwrap()
}

/// One that computes with MLX, and those of the CPU kernels.
fn models() -> Vec<Model> {
    let mut models = vec![load(&checkpoint(), Tier::L1, KvType::F16)];
    if Device::default_device() == Device::Cpu {
        models.extend([KvType::F16, KvType::F32].map(|kv| load(&checkpoint(), Tier::L3, kv)));
    }
    models
}

/// The logits after reading `tokens`, as bytes.
fn read(model: &Model, cache: &mut Cache, tokens: &[u32]) -> Vec<u8> {
    let tokens = Array::from_slice(tokens, [1, tokens.len() as i32]).unwrap();
    let hidden = model.forward(&tokens, cache).unwrap();
    model.logits(&hidden).unwrap().to_bytes().unwrap()
}

/// A cache that has read `tokens`, the last few one by one.
fn state(model: &Model, tokens: &[u32]) -> Cache {
    let mut cache = model.new_cache();
    let (first, last) = tokens.split_at(tokens.len() / 2);
    if !first.is_empty() {
        read(model, &mut cache, first);
    }
    for token in last {
        read(model, &mut cache, &[*token]);
    }
    cache
}

fn message<T>(result: russet_model::Result<T>) -> String {
    match result {
        Ok(_) => panic!("this was not refused"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn a_state_that_was_saved_goes_on_as_if_it_had_stayed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    for model in models() {
        // Fewer tokens than the window, as many, more, and more than a buffer's first size.
        for count in [1, 5, 8, 9, 21, 300] {
            let tokens: Vec<u32> = (0..count).map(|i| i * 7 % 48).collect();
            let mut cache = state(&model, &tokens);
            model.save_cache(&cache, &tokens, &path).unwrap();
            let mut loaded = model.load_cache(&tokens, &path).unwrap();
            assert_eq!(loaded.lengths(), [count as i32]);
            assert!(loaded.nbytes() <= cache.nbytes());
            for next in [&[3_u32][..], &[5, 6, 7], &[8]] {
                let (a, b) = (read(&model, &mut loaded, next), read(&model, &mut cache, next));
                assert!(a == b, "{}, {count} tokens", model.numerics());
            }
        }
    }
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["state"], "something was left beside the file");
}

#[test]
fn a_state_for_another_key_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    for model in models() {
        let tokens = [1, 2, 3, 4];
        let cache = state(&model, &tokens);
        let key = model.cache_key(&tokens).unwrap();
        cache.save(&path, &key).unwrap();
        Cache::load(&path, &key, &cache).unwrap();
        let other = || "other\u{1b}".to_owned();
        for (name, other) in [
            ("model", key.clone().tap(|key| key.model = other())),
            ("checkpoint", key.clone().tap(|key| key.checkpoint = other())),
            ("tier", key.clone().tap(|key| key.tier = Tier::L2)),
            ("numerics", key.clone().tap(|key| key.numerics = other())),
            ("mlx", key.clone().tap(|key| key.mlx = other())),
            ("device", key.clone().tap(|key| key.device = other())),
            ("tokens", key.clone().tap(|key| key.tokens = 3)),
            ("token_ids", key.clone().tap(|key| key.token_ids = other())),
        ] {
            let message = message(Cache::load(&path, &other, &cache));
            assert!(message.contains(&format!("for the {name} '")), "{message}");
        }
        for tokens in [&[1, 2, 3, 5][..], &[1, 2, 3], &[1, 2, 3, 4, 5], &[]] {
            assert!(message(model.load_cache(tokens, &path)).contains("was saved for the token"));
        }

        let fewer = message(model.save_cache(&cache, &tokens[..3], &path));
        assert!(fewer.contains("can't be saved as one of 3"), "{fewer}");
        let none = message(model.save_cache(&model.new_cache(), &[], &path));
        assert!(none.contains("can't be saved"), "{none}");
    }
    // Other weights, and another setting of the same weights.
    let mut other = checkpoint();
    other.tensors.get_mut("model.norm.weight").unwrap().data[0] ^= 1;
    let tokens = [1, 2, 3, 4];
    let [model, other, rope] = [checkpoint(), other, checkpoint().with("rope_theta", json!(5e5))]
        .map(|c| load(&c, Tier::L1, KvType::F16));
    model.save_cache(&state(&model, &tokens), &tokens, &path).unwrap();
    model.load_cache(&tokens, &path).unwrap();
    for other in [other, rope] {
        assert!(message(other.load_cache(&tokens, &path)).contains("for the checkpoint '"));
    }
}

trait Tap: Sized {
    fn tap(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}
impl<T> Tap for T {}

type Contents = (BTreeMap<String, Array>, BTreeMap<String, String>);

/// A saved state, the file it is in, and its tokens.
struct Saved {
    model: Model,
    tokens: Vec<u32>,
    dir: TempDir,
    contents: Contents,
}

impl Saved {
    fn new(model: Model) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tokens: Vec<u32> = (0..11).collect();
        let path = dir.path().join("state.safetensors");
        model.save_cache(&state(&model, &tokens), &tokens, &path).unwrap();
        let contents = load_safetensors(&path).unwrap();
        Self { model, tokens, dir, contents }
    }

    /// Why the file is refused once it is changed.
    fn refusal(&self, change: impl FnOnce(&mut Contents)) -> String {
        let mut contents = self.contents.clone();
        change(&mut contents);
        let path = self.dir.path().join("changed.safetensors");
        save_safetensors(&path, &contents.0, &contents.1).unwrap();
        let message = message(self.model.load_cache(&self.tokens, &path));
        assert!(message.contains("changed.safetensors"), "{message}");
        message
    }
}

#[test]
fn a_file_that_holds_another_state_is_refused() {
    let zeros = |shape: &[i32], dtype| Array::zeros(shape, dtype).unwrap();
    for (i, model) in models().into_iter().enumerate() {
        let saved = Saved::new(model);
        let dtype = saved.contents.0["layers.1.keys"].dtype();
        let other = if dtype == Dtype::F32 { Dtype::F16 } else { Dtype::F32 };
        let tensor =
            |name: &'static str, array: Array| move |c: &mut Contents| drop(c.0.insert(name.into(), array));
        let assert = |message: String, part: &str| assert!(message.contains(part), "{message}");

        // Two heads of eight features, eleven tokens.
        for (shape, dtype) in [
            (&[1, 2, 11, 8][..], other),
            (&[1, 2, 11, 8], Dtype::I32),
            (&[1, 2, 10, 8], dtype),
            (&[1, 2, 12, 8], dtype),
            (&[1, 2, 1, 8], dtype),
            (&[1, 1, 11, 8], dtype),
            (&[1, 2, 11, 4], dtype),
            (&[2, 2, 11, 8], dtype),
            (&[2, 11, 8], dtype),
            (&[1, 1, 2, 11, 8], dtype),
            (&[1], dtype),
        ] {
            let message = saved.refusal(tensor("layers.1.values", zeros(shape, dtype)));
            assert(message, "tensor \"layers.1.values\": is ");
        }
        assert(saved.refusal(tensor("layers.2.keys", zeros(&[1], dtype))), "not part of this model's state");
        assert(saved.refusal(|c| drop(c.0.remove("layers.0.keys"))), "tensor \"layers.0.keys\": is missing");

        let metadata =
            |name: &'static str, value: &str| saved.refusal(|c| drop(c.1.insert(name.into(), value.into())));
        assert(metadata("russet-cache", "2"), "no saved cache of this format");
        assert(saved.refusal(|c| c.1.clear()), "no saved cache of this format");
        for text in ["", "x", "{}", "[1, 2]", r#"[{"kind": "other"}, {"kind": "full"}]"#] {
            assert(metadata("layers", text), "does not describe its layers");
        }
        assert(saved.refusal(|c| drop(c.1.remove("layers"))), "does not describe its layers");
        let (first, second) = match i {
            0 => (r#"{"kind": "rotating", "max_size": 8, "keep": 0, "index": 3}"#, r#"{"kind": "full"}"#),
            _ => (r#"{"kind": "kernel"}"#, r#"{"kind": "kernel"}"#),
        };
        assert(metadata("layers", "[]"), "has 0 layers, the model 2");
        assert(metadata("layers", &format!("[{first}]")), "has 1 layers, the model 2");
        assert(metadata("layers", &format!("[{first}, {second}, {second}]")), "has 3 layers, the model 2");
        assert(metadata("layers", &format!("[{first}, {first}]").replace("kernel", "full")), "not the kind");
        if i == 0 {
            assert(metadata("layers", &format!("[{second}, {second}]")), "not the kind");
            for (change, part) in [
                (r#""max_size": 9"#, "not the kind"),
                (r#""max_size": -1"#, "not the kind"),
                (r#""keep": 1"#, "not the kind"),
                (r#""index": -1"#, "index -1"),
                (r#""index": 9"#, "index 9"),
                (r#""index": 2147483647"#, "index 2147483647"),
                (r#""index": 2147483648"#, "does not describe"),
            ] {
                let name = change.split(':').next().unwrap();
                let changed =
                    first.split(", ").map(|part| if part.starts_with(name) { change } else { part });
                let mut changed = changed.collect::<Vec<_>>().join(", ");
                if !changed.ends_with('}') {
                    changed.push('}');
                }
                assert(metadata("layers", &format!("[{changed}, {second}]")), part);
            }
        }
        // As it was, it is read.
        let path = saved.dir.path().join("state.safetensors");
        saved.model.load_cache(&saved.tokens, &path).unwrap();
    }
}

#[test]
fn broken_files_are_errors() {
    for model in models() {
        let saved = Saved::new(model);
        let bytes = fs::read(saved.dir.path().join("state.safetensors")).unwrap();
        let path = saved.dir.path().join("broken");
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let load = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            saved.model.load_cache(&saved.tokens, &path).map(drop)
        };
        load(&bytes).unwrap();
        for length in (0..header + 8).step_by(7).chain([bytes.len() - 1]) {
            message(load(&bytes[..length]));
        }
        message(load(&[&bytes[..], &[0]].concat()));
        proptest!(ProptestConfig::with_cases(200), |(at in 0..header, byte: u8)| {
            let mut changed = bytes.clone();
            changed[at] = byte;
            // Some changes do not matter, such as one of a blank; none is a panic.
            let _ = load(&changed);
        });
        message(saved.model.load_cache(&saved.tokens, Path::new("/no/such/file")));
        assert!(message(saved.model.load_cache(&saved.tokens, saved.dir.path())).contains("regular file"));
    }
}
