//! Embeddings, bit for bit against the reference's recipe on mlx-lm's backbone.

use std::fs;
use std::path::Path;

use russet_engine::{
    Embedder, Engine, EngineOptions, Error, LanguageModel, Purpose, Refusal, Request, SubmitOptions,
};
use russet_model::{Fidelity, LoadOptions, Tier};
use russet_testing::{EmbeddingSpec, FixtureSpec, Float, Format, Oracle, Tokens};
use serde_json::{Value, json};

const L1: Fidelity = Fidelity::Tier(Tier::L1);
const L3: Fidelity = Fidelity::Tier(Tier::L3);

fn fixtures() -> Vec<FixtureSpec> {
    let model = |dtype, format| FixtureSpec { dtype, format, ..FixtureSpec::new("qwen3-embedding") };
    vec![
        model(Float::Float32, Format::Dense),
        model(Float::Bfloat16, Format::Dense),
        model(Float::Bfloat16, Format::Affine { bits: 4, group: 64 }),
        model(Float::Float16, Format::Affine { bits: 8, group: 32 }),
    ]
}

/// A copy of `fixture` with sentence-transformers' files beside it.
fn embedding_model(fixture: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let module = |name: &str, path: &str| json!({"idx": 0, "name": name, "path": path, "type": format!("sentence_transformers.models.{name}")});
    let modules = json!([
        module("Transformer", ""),
        module("Pooling", "1_Pooling"),
        module("Normalize", "2_Normalize")
    ]);
    write(dir.path(), "modules.json", &modules);
    fs::create_dir(dir.path().join("1_Pooling")).unwrap();
    write(dir.path(), "1_Pooling/config.json", &json!({"pooling_mode_lasttoken": true}));
    let prompts = json!({"prompts": {"query": "Find: ", "document": ""}});
    write(dir.path(), "config_sentence_transformers.json", &prompts);
    dir
}

fn write(dir: &Path, name: &str, value: &Value) {
    fs::write(dir.join(name), value.to_string()).unwrap();
}

/// Drops the prefix `model.` of all tensors, as in published backbones.
fn strip_prefix(dir: &Path) {
    let path = dir.join("model.safetensors");
    let file = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let strip = |name: String| name.strip_prefix("model.").map(str::to_owned).unwrap_or(name);
    let header: serde_json::Map<_, _> =
        header.into_iter().map(|(name, entry)| (strip(name), entry)).collect();
    let header = serde_json::to_vec(&header).unwrap();
    let written = [&(header.len() as u64).to_le_bytes()[..], &header, &file[8 + length..]].concat();
    fs::write(path, written).unwrap();
}

#[test]
fn embeddings_equal_the_reference_bit_for_bit() {
    let Some(oracle) = Oracle::get() else { return };
    for fixture in fixtures() {
        let original = oracle.fixture(&fixture);
        let dir = embedding_model(&original);
        let embedder = Embedder::load(dir.path(), &LoadOptions::new(L1)).unwrap();
        let bare = embedding_model(&original);
        strip_prefix(bare.path());
        let bare = Embedder::load(bare.path(), &LoadOptions::new(L1)).unwrap();
        for count in [1, 2, 7, 255, 256, 257, 300] {
            for dimensions in [None, Some(32)] {
                let tokens = Tokens::Random { count, seed: count as u32 };
                let expected =
                    oracle.embedding(&original, &EmbeddingSpec { tokens: tokens.clone(), dimensions });
                for embedder in [&embedder, &bare] {
                    let actual = embedder.embed(&tokens.ids(), dimensions.map(|n| n as usize)).unwrap();
                    let bytes: Vec<u8> = actual.iter().flat_map(|x| x.to_ne_bytes()).collect();
                    assert!(
                        bytes == expected.array("embedding").data(),
                        "{fixture:?}: {count} tokens, {dimensions:?} dimensions"
                    );
                }
            }
        }
    }
}

#[test]
fn the_cpu_kernels_give_nearly_the_same() {
    let Some(oracle) = Oracle::get() else { return };
    for fixture in fixtures() {
        // The reference rounds to its activations' type; only float32 shows the kernels' own error.
        let fixture = FixtureSpec { dtype: Float::Float32, ..fixture };
        let dir = embedding_model(&oracle.fixture(&fixture));
        let load = |fidelity| Embedder::load(dir.path(), &LoadOptions::new(fidelity)).unwrap();
        let (exact, fast) = (load(L1), load(L3));
        for count in [1, 7, 300] {
            let tokens = Tokens::Random { count, seed: count as u32 }.ids();
            let (a, b) = (exact.embed(&tokens, None).unwrap(), fast.embed(&tokens, None).unwrap());
            let cosine: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!(cosine > 1.0 - 1e-5, "{fixture:?}: {count} tokens: cosine {cosine}");
        }
    }
}

#[test]
fn prompts_and_the_last_token_follow_the_recipe() {
    let Some(oracle) = Oracle::get() else { return };
    let dir = embedding_model(&oracle.fixture(&fixtures()[0]));
    let embedder = Embedder::load(dir.path(), &LoadOptions::new(L1)).unwrap();
    let tokens = |text: &str, purpose| embedder.embedding().tokens(text, purpose).unwrap();
    assert_eq!(tokens("a cat", Purpose::Query), tokens("Find: a cat", Purpose::Document));
    assert_eq!(
        tokens("a cat", Purpose::Instruction("Find animals")),
        tokens("Instruct: Find animals\nQuery:a cat", Purpose::Document)
    );
    let long = tokens(&"word ".repeat(20_000), Purpose::Document);
    assert_eq!(long.len(), 8192);
    assert_eq!(long.last(), tokens("x", Purpose::Document).last(), "the last token survives a cut");
    assert_eq!(embedder.embed(&[1, 2, 3], Some(5)).unwrap().len(), 5);
}

#[test]
fn an_engine_embeds_beside_what_it_generates() {
    let Some(oracle) = Oracle::get() else { return };
    let dir = embedding_model(&oracle.fixture(&fixtures()[0]));
    let embedder = Embedder::load(dir.path(), &LoadOptions::new(L3)).unwrap();
    let folder = dir.path().to_owned();
    let load = move || LanguageModel::load(&folder, &LoadOptions::new(L3));
    let engine = Engine::start(load, EngineOptions { queue: 2, ..EngineOptions::default() }).unwrap();
    let embedding = engine.facts().embedding.as_ref().unwrap();
    assert_eq!(embedding.dimensions(), embedder.embedding().dimensions());
    let texts: Vec<Vec<u32>> = ["a", "two words", "", &"long ".repeat(400)]
        .map(|text| embedding.tokens(text, Purpose::Document).unwrap())
        .into();
    let mut answer = engine.submit(Request::new(vec![5, 6, 7], 200), SubmitOptions::default()).unwrap();
    let pending = engine.embed(texts.clone(), Some(16), None).unwrap();
    let expected: Vec<_> = texts.iter().map(|text| embedder.embed(text, Some(16)).unwrap()).collect();
    assert_eq!(pending.blocking_get().unwrap(), expected);
    while answer.blocking_next().is_some() {}
    assert_eq!(engine.embed(Vec::new(), None, None).unwrap().blocking_get().unwrap(), Vec::<Vec<f32>>::new());
    let status = engine.status();
    assert_eq!((status.waiting, status.failed), (0, 0), "{status:?}");

    let refused = |texts: Vec<Vec<u32>>, dimensions| match engine.embed(texts, dimensions, None) {
        Err(Refusal::Invalid(e)) => e.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(refused(vec![vec![]], None).contains("no tokens"));
    assert!(refused(vec![vec![u32::MAX]], None).contains("vocabulary"));
    assert!(refused(texts.clone(), Some(100_000)).contains("100000"));
    let late = engine.embed(texts.clone(), None, Some(std::time::Instant::now())).unwrap();
    assert!(matches!(late.blocking_get(), Err(Error::Deadline)));
    // Who leaves makes room.
    for _ in 0..3 {
        drop(engine.embed(texts.clone(), None, None));
        while engine.status().waiting > 0 {}
    }
    let last = engine.embed(texts, None, None).unwrap();
    engine.stop(std::time::Instant::now());
    assert!(matches!(last.blocking_get(), Ok(_) | Err(Error::Stopping | Error::Engine(_))));
}

#[test]
fn what_is_no_embedding_model_is_refused() {
    let Some(oracle) = Oracle::get() else { return };
    let fixture = oracle.fixture(&fixtures()[0]);
    let error = |dir: &Path| Embedder::load(dir, &LoadOptions::new(L1)).err().unwrap().to_string();
    assert!(error(&fixture).contains("no modules.json"), "{}", error(&fixture));
    for (file, content, message) in [
        ("1_Pooling/config.json", json!({"pooling_mode_mean_tokens": true}), "pooling_mode_lasttoken"),
        ("1_Pooling/config.json", json!([]), "not a JSON object"),
        ("modules.json", json!({}), "not a list of modules"),
        ("modules.json", json!([]), "no Pooling module"),
        ("modules.json", json!([{"type": "x.Pooling", "path": "../elsewhere"}]), "outside of the checkpoint"),
        ("modules.json", json!([{"type": "x.Pooling", "path": "2_Pooling"}]), "is missing"),
        ("config_sentence_transformers.json", json!({"prompts": {"query": 3}}), "prompts.query"),
    ] {
        let dir = embedding_model(&fixture);
        write(dir.path(), file, &content);
        assert!(error(dir.path()).contains(message), "{file} {content}: {}", error(dir.path()));
    }

    let dir = embedding_model(&fixture);
    let embedder = Embedder::load(dir.path(), &LoadOptions::new(L1)).unwrap();
    let error = |tokens: &[u32], dimensions| embedder.embed(tokens, dimensions).err().unwrap().to_string();
    assert!(error(&[], None).contains("no tokens"));
    assert!(error(&[1 << 30], None).contains("outside the model's vocabulary"));
    assert!(error(&[1], Some(1 << 20)).contains("dimensions"));
}
