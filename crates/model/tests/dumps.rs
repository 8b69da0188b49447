//! What a model does inside, bit for bit against mlx-lm: the output of every layer in every call, and the caches.
//! One case for each graph, and for each kind of its layers.

use std::collections::BTreeMap;

use russet_mlx::{Array, Dtype};
use russet_model::cache::LayerCache;
use russet_model::{Fidelity, LoadOptions, Model, Tier};
use russet_testing::{
    FixtureSpec, Float, Format, Oracle, Reference, ReferenceSpec, Tokens, gemma4_forms, qwen3_5_fixture,
    qwen3_5_moe_fixture, qwen3_moe,
};
use serde_json::json;

/// Tokens of a prompt and of its chunks: the windows of 16 tokens are passed at once, two experts for each token are
/// sorted in some chunks and not in others, and the last chunk is not full.
const PROMPT: Tokens = Tokens::Random { count: 75, seed: 9 };
const CHUNK: usize = 33;
/// None, and more than a window.
const STEPS: [u32; 2] = [0, 20];

fn cases() -> Vec<FixtureSpec> {
    let dense = |arch| FixtureSpec::new(arch).with("vocab_size", json!(320));
    let form = |name| gemma4_forms().into_iter().find(|(form, _)| *form == name).unwrap().1;
    vec![
        dense("llama"),
        dense("llama-sliding"),
        dense("qwen3"),
        dense("gemma2"),
        qwen3_moe(),
        form("e4b"),
        form("26b-a4b"),
        qwen3_5_fixture(),
        qwen3_5_moe_fixture(),
    ]
}

/// A dtype as the oracle's files name it, a shape, and the bytes.
type Dump = (String, Vec<usize>, Vec<u8>);

fn dump(array: &Array) -> Dump {
    let dtype = match array.dtype() {
        Dtype::Bf16 => "BF16",
        Dtype::F32 => "F32",
        Dtype::I32 => "I32",
        other => panic!("a dump of {other}"),
    };
    let shape = array.shape().iter().map(|&n| n as usize).collect();
    (dtype.to_owned(), shape, array.to_bytes().unwrap())
}

/// The outputs `layer.CALL.LAYER` and the caches `cache.LAYER.PART` after a prompt and the tokens picked after it.
fn run(model: &Model, picked: &[u32]) -> BTreeMap<String, Dump> {
    let prompt = PROMPT.ids();
    let (last, chunks) = prompt.split_last().unwrap();
    let steps = std::iter::once(last).chain(picked).map(std::slice::from_ref);
    let mut dumps = BTreeMap::new();
    let mut cache = model.new_cache();
    for (call, tokens) in chunks.chunks(CHUNK).chain(steps).enumerate() {
        let tokens = Array::from_slice(tokens, [1, tokens.len() as i32]).unwrap();
        let mut outputs = Vec::new();
        model.forward_layers(&tokens, &mut cache, &mut |output| outputs.push(output.clone())).unwrap();
        for (i, output) in outputs.iter().enumerate() {
            dumps.insert(format!("layer.{call:03}.{i:03}"), dump(output));
        }
    }
    for (i, layer) in cache.layers.iter().enumerate() {
        let recurrent = matches!(layer, LayerCache::Recurrent(_));
        for (part, array) in layer.arrays().iter().enumerate() {
            let part = if recurrent { format!("0.{part}") } else { part.to_string() };
            dumps.insert(format!("cache.{i:03}.{part}"), dump(array));
        }
        if !recurrent {
            let offset = Array::from_slice(&[layer.offset()], [0_i32; 0]).unwrap();
            dumps.insert(format!("cache.{i:03}.2"), dump(&offset));
        }
    }
    dumps
}

/// The names of the reference's dumps. A ring's size and index (parts 3 to 5) show in its buffers.
fn names(reference: &Reference) -> Vec<String> {
    let is_dump = |name: &str| match name.split('.').collect::<Vec<_>>()[..] {
        ["layer", ..] => true,
        ["cache", _, part] => part.parse::<u32>().unwrap() < 3,
        ["cache", ..] => true,
        _ => false,
    };
    reference.names().into_iter().filter(|name| is_dump(name)).collect()
}

#[test]
fn every_layer_and_every_cache_equal_the_reference_bit_for_bit() {
    let Some(oracle) = Oracle::get() else { return };
    for case in cases() {
        for (dtype, format) in
            [(Float::Float32, Format::Dense), (Float::Bfloat16, Format::Affine { bits: 4, group: 64 })]
        {
            let dir = oracle.fixture(&FixtureSpec { dtype, format, ..case.clone() });
            let model = Model::load(&dir, &LoadOptions::new(Fidelity::Tier(Tier::L1))).unwrap();
            for steps in STEPS {
                let what = format!("{} {dtype:?} {format:?}, {steps} steps", case.arch);
                let spec = ReferenceSpec {
                    prefill_chunk: CHUNK as u32,
                    dump_layers: true,
                    dump_cache: true,
                    ..ReferenceSpec::new(PROMPT, steps)
                };
                let reference = oracle.reference(&dir, &spec);
                let picked: Vec<u32> = reference.integers("tokens").iter().map(|&t| t as u32).collect();
                let dumps = run(&model, &picked[..steps as usize]);
                let calls = (PROMPT.ids().len() - 1).div_ceil(CHUNK) + 1 + steps as usize;
                let outputs = dumps.keys().filter(|name| name.starts_with("layer.")).count();
                assert_eq!(outputs, calls * case.layers as usize, "{what}");
                assert_eq!(dumps.keys().cloned().collect::<Vec<_>>(), names(&reference), "{what}");
                for (name, (dtype, shape, bytes)) in &dumps {
                    let expected = reference.array(name);
                    let described = (format!("{:?}", expected.dtype()), expected.shape().to_vec());
                    assert_eq!((dtype.clone(), shape.clone()), described, "{what}: {name}");
                    assert!(bytes == expected.data(), "{what}: {name} has other bits");
                }
            }
        }
    }
}
