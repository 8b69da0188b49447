//! Rotary embeddings and caches on their own, bit for bit against mlx-lm.

use std::path::Path;

use russet_mlx::fast::Mask;
use russet_mlx::{Array, Dtype};
use russet_model::Fields;
use russet_model::cache::{KvCache, LayerCache, RotatingKvCache};
use russet_model::layers::{Positions, Rope};
use russet_testing::{Oracle, Reference, TensorView, cache_specs, rope_specs};
use serde_json::Value;

fn dtype(dtype: russet_testing::Dtype) -> Dtype {
    match dtype {
        russet_testing::Dtype::BF16 => Dtype::Bf16,
        russet_testing::Dtype::F16 => Dtype::F16,
        russet_testing::Dtype::F32 => Dtype::F32,
        russet_testing::Dtype::BOOL => Dtype::Bool,
        russet_testing::Dtype::I32 => Dtype::I32,
        other => panic!("the oracle records no {other:?}"),
    }
}

fn array(view: &TensorView<'_>) -> Array {
    let shape: Vec<i32> = view.shape().iter().map(|&n| n as i32).collect();
    Array::from_bytes(view.data(), shape, dtype(view.dtype())).unwrap()
}

#[track_caller]
fn assert_equal(actual: &Array, expected: &TensorView<'_>, what: &str) {
    let shape: Vec<i32> = expected.shape().iter().map(|&n| n as i32).collect();
    assert_eq!(actual.shape(), shape, "{what}: shape");
    assert_eq!(actual.dtype(), dtype(expected.dtype()), "{what}: dtype");
    assert!(actual.to_bytes().unwrap() == expected.data(), "{what}: bits differ");
}

#[test]
fn ropes_equal_the_reference_bit_for_bit() {
    let Some(oracle) = Oracle::get() else { return };
    for (name, spec) in rope_specs() {
        let reference = oracle.rope(&spec);
        let scaling = match &spec.scaling {
            Value::Object(map) => Some(Fields::new(Path::new("config.json"), map)),
            _ => None,
        };
        let max_position = spec.max_position_embeddings.map(|n| n as i32);
        let rope = Rope::new(spec.dims as i32, spec.base, spec.traditional, scaling.as_ref(), max_position)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        let input = array(&reference.array("input"));
        for offset in &spec.offsets {
            let output = rope.forward(&input, &Positions::Single(*offset as i32)).unwrap();
            let expected = reference.array(&format!("output.{offset}"));
            assert_equal(&output, &expected, &format!("{name}, offset {offset}"));
        }
    }
}

#[test]
fn caches_equal_the_reference_bit_for_bit() {
    let Some(oracle) = Oracle::get() else { return };
    for (name, spec) in cache_specs() {
        let reference = oracle.cache(&spec);
        let settings: Value = serde_json::from_str(&reference.metadata()["settings"]).unwrap();
        let mut cache = match spec.max_size {
            None => LayerCache::Full(KvCache::new()),
            Some(size) => LayerCache::Rotating(RotatingKvCache::new(size as i32, spec.keep as i32)),
        };
        for (i, &rows) in spec.steps.iter().enumerate() {
            let what = format!("{name}, step {i}");
            let get = |part: &str| reference.array(&format!("{part}.{i:03}"));
            if rows < 0 {
                let trimmed = if cache.is_trimmable() { cache.trim(-rows) } else { 0 };
                assert_eq!(trimmed, reference.integers(&format!("trimmed.{i:03}"))[0], "{what}: trimmed");
            } else {
                let mask = cache.mask(rows, spec.window.map(|w| w as i32)).unwrap();
                match (mask, settings["masks"][i].as_str().unwrap()) {
                    (Mask::None, "none") | (Mask::Causal, "causal") => {}
                    (Mask::Array(mask), "array") => assert_equal(&mask, &get("mask"), &what),
                    (mask, expected) => panic!("{what}: mask {mask:?} instead of {expected}"),
                }
                let (keys, values) =
                    cache.update(&array(&get("keys_in")), &array(&get("values_in"))).unwrap();
                assert_equal(&keys, &get("keys_out"), &format!("{what}: keys"));
                assert_equal(&values, &get("values_out"), &format!("{what}: values"));
            }
            check_state(&cache, &reference, i, &what);
        }
    }
}

/// The buffers, unused rows included, and the position.
fn check_state(cache: &LayerCache, reference: &Reference, step: usize, what: &str) {
    let state = |part: usize| reference.array(&format!("state.{step:03}.{part}"));
    let arrays = cache.arrays();
    assert_equal(&arrays[0], &state(0), &format!("{what}: key buffer"));
    assert_equal(&arrays[1], &state(1), &format!("{what}: value buffer"));
    assert_eq!(cache.offset(), reference.integers(&format!("state.{step:03}.2"))[0], "{what}: offset");
}

#[test]
fn a_clone_of_a_cache_is_a_snapshot() {
    let rows = |value: f64, count| Array::full([1, 1, count, 4], value, Dtype::F32).unwrap();
    for mut cache in [
        LayerCache::Full(KvCache::new()),
        LayerCache::Rotating(RotatingKvCache::new(8, 0)),
        LayerCache::Rotating(RotatingKvCache::new(4, 0)),
    ] {
        cache.update(&rows(1.0, 3), &rows(1.0, 3)).unwrap();
        cache.update(&rows(2.0, 1), &rows(2.0, 1)).unwrap();
        let mut snapshot = cache.clone();
        let bits = |c: &LayerCache| c.arrays().iter().map(|a| a.to_bytes().unwrap()).collect::<Vec<_>>();
        let before = bits(&snapshot);
        for i in 0..9 {
            cache.update(&rows(f64::from(i), 1), &rows(f64::from(i), 1)).unwrap();
            bits(&cache);
        }
        assert_eq!(bits(&snapshot), before, "the snapshot changed with the cache");
        snapshot.update(&rows(9.0, 1), &rows(9.0, 1)).unwrap();
        assert_eq!(snapshot.offset(), 5);
    }
}
