//! The cache of the CPU kernels: clones are snapshots, growing and trimming change no bit.

use russet_mlx::{Array, Device};
use russet_model::{Cache, CpuOptions, Fidelity, KvType, LoadOptions, Model, Tier};
use russet_testing::{FixtureSpec, Oracle, gemma4_forms};

/// A llama, and a gemma4 whose layers share keys and values.
fn models(kv: KvType) -> Vec<Model> {
    let Some(oracle) = Oracle::get() else { return Vec::new() };
    if Device::default_device() == Device::Gpu {
        return Vec::new();
    }
    let cpu = CpuOptions { kv, ..CpuOptions::default() };
    let options = LoadOptions { cpu, ..LoadOptions::new(Fidelity::Tier(Tier::L3)) };
    let sharing = gemma4_forms().into_iter().find(|(name, _)| *name == "e4b").map(|(_, spec)| spec);
    [FixtureSpec::new("llama"), sharing.unwrap()]
        .map(|spec| Model::load(&oracle.fixture(&spec), &options).unwrap())
        .into()
}

/// The logits after reading `tokens`, as bytes.
fn read(model: &Model, cache: &mut Cache, tokens: &[u32]) -> Vec<u8> {
    let tokens = Array::from_slice(tokens, [1, tokens.len() as i32]).unwrap();
    let hidden = model.forward(&tokens, cache).unwrap();
    model.logits(&hidden).unwrap().to_bytes().unwrap()
}

#[test]
fn a_clone_goes_on_as_a_fresh_cache_would() {
    for model in [KvType::F16, KvType::F32].into_iter().flat_map(models) {
        let start: Vec<u32> = (0..40).collect();
        let (one, two): (Vec<u32>, Vec<u32>) = ((50..60).collect(), (90..97).collect());
        let fresh = |rest: &[u32]| {
            let mut cache = model.new_cache();
            read(&model, &mut cache, &start);
            read(&model, &mut cache, rest)
        };
        let mut cache = model.new_cache();
        read(&model, &mut cache, &start);
        let mut snapshot = cache.clone();
        let mut second = cache.clone();
        assert_eq!(read(&model, &mut cache, &one), fresh(&one));
        assert_eq!(read(&model, &mut snapshot, &two), fresh(&two));
        assert_eq!(read(&model, &mut second, &one), fresh(&one));
        assert_eq!(snapshot.offset(), 47);
    }
}

#[test]
fn calls_that_were_not_evaluated_yet_run_in_order() {
    models(KvType::F16).iter().for_each(check_order);
}

fn check_order(model: &Model) {
    let tokens = |range: std::ops::Range<u32>| {
        let tokens: Vec<u32> = range.collect();
        Array::from_slice(&tokens, [1, tokens.len() as i32]).unwrap()
    };
    let mut lazy = model.new_cache();
    // Only the last call is evaluated, and a snapshot of the cache that a pending call fills is taken.
    model.forward(&tokens(0..30), &mut lazy).unwrap();
    let mut snapshot = lazy.clone();
    model.forward(&tokens(30..60), &mut lazy).unwrap();
    let last = |cache: &mut Cache, range| {
        let hidden = model.forward(&tokens(range), cache).unwrap();
        model.logits(&hidden).unwrap().to_bytes().unwrap()
    };
    let mut eager = model.new_cache();
    for range in [0..30, 30..60] {
        last(&mut eager, range);
    }
    assert_eq!(last(&mut lazy, 60..70), last(&mut eager, 60..70));
    let mut other = model.new_cache();
    last(&mut other, 0..30);
    assert_eq!(last(&mut snapshot, 80..85), last(&mut other, 80..85));
}

#[test]
fn growing_and_trimming_change_no_bit() {
    models(KvType::F16).iter().for_each(check_growth);
}

fn check_growth(model: &Model) {
    let token = |i: u32| [i * 7 % 256];
    let mut reserved = model.new_cache();
    reserved.reserve(2000);
    let mut growing = model.new_cache();
    for i in 0..600 {
        let (a, b) = (read(model, &mut reserved, &token(i)), read(model, &mut growing, &token(i)));
        assert_eq!(a, b, "token {i}");
    }
    assert!(growing.nbytes() < reserved.nbytes());
    for layer in &mut growing.layers {
        assert_eq!(layer.trim(300), 300);
    }
    let mut fresh = model.new_cache();
    for i in 0..300 {
        read(model, &mut fresh, &token(i));
    }
    assert_eq!(read(model, &mut growing, &[9]), read(model, &mut fresh, &[9]));
}
