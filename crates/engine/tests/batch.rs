//! Batches: with MLX bit for bit as mlx-lm's batch generator at the same widths, and as alone where there is one
//! sequence; with the CPU kernels each row by itself.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};

use russet_engine::{Batch, BatchOptions, Sampling, SequenceId, StepOptions, Steps};
use russet_mlx::{Device, Dtype};
use russet_model::cache::LayerCache;
use russet_model::{Cache, CpuOptions, Fidelity, KvType, LoadOptions, Model, Tier};
use russet_testing::{
    BatchCase, BatchRow, BatchSpec, FixtureSpec, Format, Oracle, Reference, Tokens, batch_cases,
    gemma4_forms, qwen3_5_fixture, qwen3_5_moe_fixture, qwen3_moe,
};

fn load(oracle: &Oracle, fixture: &FixtureSpec, tier: Tier) -> Model {
    Model::load(&oracle.fixture(fixture), &LoadOptions::new(Fidelity::Tier(tier))).unwrap()
}

/// What a row generated, and its state in the end.
#[derive(Default)]
struct Row {
    tokens: Vec<u32>,
    logprobs: Vec<Vec<u8>>,
    dtype: Option<Dtype>,
    cache: Option<Cache>,
}

/// Runs a batch as `oracle/batch.py` does.
fn run(model: &Model, spec: &BatchSpec, samplings: &[Sampling]) -> Vec<Row> {
    let options = BatchOptions {
        width: spec.width as usize,
        prefill_width: (model.tier() != Tier::L3).then_some(spec.prefill_width as usize),
        prefill_chunk: Some(spec.prefill_chunk as usize),
        keep_prompts: false,
    };
    let mut batch = Batch::new(model, options).unwrap();
    let mut rows: Vec<Row> = spec.rows.iter().map(|_| Row::default()).collect();
    let mut ids: BTreeMap<SequenceId, usize> = BTreeMap::new();
    let last_join = spec.rows.iter().map(|row| row.join).max().unwrap();
    for call in 0.. {
        let leaving: Vec<_> =
            ids.iter().filter(|&(_, &i)| spec.rows[i].leave == Some(call)).map(|(&id, &i)| (id, i)).collect();
        for (id, i) in leaving {
            rows[i].cache = batch.remove(id).unwrap();
            ids.remove(&id);
        }
        for (i, row) in spec.rows.iter().enumerate().filter(|(_, row)| row.join == call) {
            let sampling = samplings[i % samplings.len()].clone();
            let limit = Some(row.steps as usize);
            ids.insert(batch.insert(&row.tokens.ids(), sampling, i as u64, limit).unwrap(), i);
        }
        if ids.is_empty() && call >= last_join {
            assert!(batch.is_empty());
            break;
        }
        for step in batch.step().unwrap() {
            let row = &mut rows[ids[&step.id]];
            let result = step.step.unwrap();
            row.tokens.push(result.token);
            row.dtype = Some(result.logprobs.dtype());
            row.logprobs.push(result.logprobs.to_bytes().unwrap());
            if step.ended.is_some() {
                row.cache = step.ended;
                ids.remove(&step.id);
            }
        }
    }
    rows
}

/// The columns of `[1, heads, columns, head_dim]`, each head's in any but the same order.
fn columns(bytes: &[u8], shape: &[usize]) -> Vec<Vec<u8>> {
    let width = bytes.len() / (shape[1] * shape[2]).max(1);
    let mut columns: Vec<Vec<u8>> = bytes.chunks(width.max(1)).map(<[u8]>::to_vec).collect();
    columns.chunks_mut(shape[2].max(1)).for_each(<[Vec<u8>]>::sort);
    columns
}

fn difference(rows: &[Row], expected: &Reference) -> Option<String> {
    for (i, row) in rows.iter().enumerate() {
        let tokens: Vec<i32> = row.tokens.iter().map(|&token| token as i32).collect();
        let reference = expected.integers(&format!("tokens.{i:02}"));
        if tokens != reference {
            return Some(format!("row {i}: tokens {tokens:?} instead of {reference:?}"));
        }
        if !tokens.is_empty() {
            let logprobs = row.logprobs.concat();
            let view = expected.array(&format!("logprobs.{i:02}"));
            let unequal = logprobs.iter().zip(view.data()).filter(|(a, b)| a != b).count();
            if unequal > 0 || logprobs.len() != view.data().len() {
                return Some(format!("row {i}: {unequal} of {} bytes of logprobs differ", logprobs.len()));
            }
        }
        let layers = row.cache.iter().flat_map(|cache| &cache.layers).enumerate();
        for (l, layer) in layers {
            if let LayerCache::Recurrent(layer) = layer {
                for (part, array) in layer.arrays().iter().enumerate() {
                    let view = expected.array(&format!("cache.{i:02}.{l:03}.0.{part}"));
                    if array.to_bytes().unwrap() != view.data() {
                        return Some(format!("row {i}, layer {l}: recurrent state differs"));
                    }
                }
                continue;
            }
            let offset = expected.integers(&format!("cache.{i:02}.{l:03}.2"));
            if layer.lengths() != offset {
                return Some(format!(
                    "row {i}, layer {l}: {:?} tokens instead of {offset:?}",
                    layer.lengths()
                ));
            }
            for (part, array) in layer.arrays().iter().enumerate() {
                let view = expected.array(&format!("cache.{i:02}.{l:03}.{part}"));
                let shape: Vec<usize> = array.shape().iter().map(|&n| n as usize).collect();
                let mut expected = view.shape().to_vec();
                // The reference's rings also hold tokens that nothing sees any more, which are the first.
                let unseen = match layer {
                    LayerCache::Rotating(_) if (shape[2] as i32) < offset[0] => {
                        expected[2].saturating_sub(shape[2])
                    }
                    _ => 0,
                };
                expected[2] -= unseen;
                if shape != expected {
                    return Some(format!("row {i}, layer {l}: {shape:?} instead of {:?}", view.shape()));
                }
                // A sequence that was never in a batch keeps the order of its ring.
                let rows = view.data().chunks(view.data().len() / shape[1].max(1));
                let width = view.data().len() / (shape[1] * view.shape()[2]).max(1);
                let seen: Vec<u8> = rows.flat_map(|head| &head[unseen * width..]).copied().collect();
                if columns(&array.to_bytes().unwrap(), &shape) != columns(&seen, &shape) {
                    return Some(format!("row {i}, layer {l}: keys or values differ"));
                }
            }
        }
    }
    None
}

#[test]
fn batches_equal_the_reference_bit_for_bit() {
    let Some(oracle) = Oracle::get() else { return };
    let cases = batch_cases();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut failures = Vec::new();
        while let Some(BatchCase { name, fixture, batch }) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let reference = oracle.batch(&oracle.fixture(fixture), batch);
            let model = load(oracle, fixture, Tier::L1);
            let rows = run(&model, batch, &[Sampling::default()]);
            failures.extend(difference(&rows, &reference).map(|what| format!("{name}: {what}")));
        }
        failures
    };
    let failures: Vec<String> = std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect()
    });
    let count = cases.len();
    assert!(failures.is_empty(), "{} of {count} cases differ:\n{}", failures.len(), failures.join("\n"));
}

/// Ways to pick tokens, from the simplest to one that draws and looks back.
fn samplings() -> Vec<Sampling> {
    vec![
        Sampling::default(),
        Sampling { temperature: 0.8, top_p: 0.9, ..Sampling::default() },
        Sampling { repetition_penalty: Some(1.3), ..Sampling::default() },
        Sampling {
            temperature: 1.2,
            top_k: 20,
            presence_penalty: Some(0.5),
            logit_bias: vec![(7, -3.0), (9, 2.0)],
            ..Sampling::default()
        },
    ]
}

fn one_row(count: usize, steps: u32, chunk: u32) -> BatchSpec {
    let tokens = Tokens::Random { count, seed: count as u32 };
    let row = BatchRow { tokens, steps, join: 0, leave: None };
    BatchSpec { rows: vec![row], width: 4, prefill_width: 4, prefill_chunk: chunk }
}

/// What a prompt gives alone.
fn alone(model: &Model, row: &BatchRow, chunk: u32, sampling: &Sampling) -> Row {
    let options = StepOptions {
        sampling: sampling.clone(),
        seed: 0,
        prefill_chunk: Some(chunk as usize),
        limit: Some(row.steps as usize),
    };
    let steps = Steps::start(model, &row.tokens.ids(), options, &mut |_| ControlFlow::Continue(()));
    let mut alone = Row::default();
    for step in steps.unwrap().unwrap() {
        let step = step.unwrap();
        alone.tokens.push(step.token);
        alone.logprobs.push(step.logprobs.to_bytes().unwrap());
    }
    alone
}

#[test]
fn a_single_sequence_has_the_bits_of_plain_generation() {
    let Some(oracle) = Oracle::get() else { return };
    let llama = |arch| FixtureSpec::new(arch).with("vocab_size", 320.into());
    // Every kind of cache, the first two with every way to pick tokens.
    let mut fixtures = vec![llama("llama"), llama("llama-sliding"), qwen3_5_fixture()];
    let stored = |fixture| FixtureSpec { format: Format::Affine { bits: 4, group: 64 }, ..fixture };
    // MLX's CPU backend has unquantized experts in float32 only.
    fixtures.extend([qwen3_moe(), qwen3_5_moe_fixture()].map(stored));
    fixtures.extend(gemma4_forms().into_iter().map(|(_, fixture)| stored(fixture)));
    for tier in [Tier::L1, Tier::L3] {
        if tier == Tier::L3 && Device::default_device() == Device::Gpu {
            continue;
        }
        for (f, fixture) in fixtures.iter().enumerate() {
            let model = load(oracle, fixture, tier);
            for (i, sampling) in samplings().into_iter().take(if f < 2 { 4 } else { 1 }).enumerate() {
                for (count, chunk) in [(1, 2048), (2, 2048), (40, 2048), (40, 7)] {
                    let spec = one_row(count, 20, chunk);
                    let row = run(&model, &spec, std::slice::from_ref(&sampling)).remove(0);
                    let alone = alone(&model, &spec.rows[0], chunk, &sampling);
                    let what = format!("{tier}, {}, sampling {i}, {count} tokens", fixture.arch);
                    assert_eq!(row.tokens, alone.tokens, "{what}");
                    assert!(row.logprobs == alone.logprobs, "{what}: logprobs differ");
                }
            }
        }
    }
}

#[test]
fn rows_of_the_cpu_kernels_do_not_depend_on_each_other() {
    let Some(oracle) = Oracle::get() else { return };
    if Device::default_device() == Device::Gpu {
        return;
    }
    for (i, BatchCase { name, fixture, batch }) in batch_cases().into_iter().enumerate() {
        // All cases with float16 keys and values; some with float32, or with weights as they are stored.
        for (kv, repack) in [(KvType::F16, true), (KvType::F32, true), (KvType::F16, false)] {
            if (kv, repack) != (KvType::F16, true) && i % 4 != 0 {
                continue;
            }
            let cpu = CpuOptions { kv, interleave: repack, ..CpuOptions::default() };
            let options = LoadOptions { cpu, ..LoadOptions::new(Fidelity::Tier(Tier::L3)) };
            let model = Model::load(&oracle.fixture(&fixture), &options).unwrap();
            let rows = run(&model, &batch, &[Sampling::default()]);
            for (i, (row, spec)) in rows.iter().zip(&batch.rows).enumerate() {
                let what = format!("{name}, {kv:?}, repacked {repack}, row {i}");
                let alone = alone(&model, spec, batch.prefill_chunk, &Sampling::default());
                // It may have been taken away early.
                let count = row.tokens.len();
                assert!(
                    count <= alone.tokens.len() && (spec.leave.is_some() || count == spec.steps as usize)
                );
                assert_eq!(row.tokens, alone.tokens[..count], "{what}");
                assert!(row.logprobs == alone.logprobs[..count], "{what}: log-probabilities differ");
            }
        }
    }
}
