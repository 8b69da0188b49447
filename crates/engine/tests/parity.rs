//! Generation, bit for bit against mlx-lm: every array of every recording, over checkpoint formats,
//! dtypes, config features, prompt lengths, samplers and processors.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use russet_engine::evaluate::Recording;
use russet_engine::{Sampling, StepOptions, Steps};
use russet_mlx::{Array, Dtype};
use russet_model::{Fidelity, LoadOptions, Model, Tier};
use russet_testing::{
    Case, Oracle, Reference, ReferenceSpec, dense_cases, gemma4_cases, llama_cases, matrix_table,
    qwen3_5_cases, qwen3_5_moe_cases, qwen3_moe_cases, sampling_cases,
};

fn sampling(spec: &ReferenceSpec) -> Sampling {
    let (s, p) = (&spec.sampling, &spec.processors);
    Sampling {
        temperature: s.temp,
        top_p: s.top_p,
        min_p: s.min_p,
        min_tokens_to_keep: s.min_tokens_to_keep as i32,
        xtc_probability: s.xtc_probability,
        xtc_threshold: s.xtc_threshold,
        xtc_special_tokens: s.xtc_special_tokens.clone(),
        top_k: s.top_k as i32,
        logit_bias: p.logit_bias.iter().map(|(&t, &b)| (t, b as f32)).collect(),
        repetition_penalty: p.repetition_penalty,
        presence_penalty: p.presence_penalty,
        frequency_penalty: p.frequency_penalty,
        repetition_context_size: p.repetition_context_size as i32,
        presence_context_size: p.presence_context_size as i32,
        frequency_context_size: p.frequency_context_size as i32,
    }
}

fn recording(spec: &ReferenceSpec) -> Recording {
    Recording {
        tokens: spec.tokens.ids(),
        steps: spec.steps as usize,
        prefill_chunk: Some(spec.prefill_chunk as usize),
        sampling: sampling(spec),
        seed: spec.seed.unwrap_or(0),
    }
}

fn dtype_name(dtype: Dtype) -> String {
    match dtype {
        Dtype::Bf16 => "BF16",
        Dtype::F16 => "F16",
        Dtype::F32 => "F32",
        Dtype::I32 => "I32",
        other => panic!("a recording holds {other}"),
    }
    .to_owned()
}

/// What differs between a recording and the reference.
fn difference(actual: &BTreeMap<String, Array>, expected: &Reference) -> Option<String> {
    let names: Vec<String> = actual.keys().cloned().collect();
    if names != expected.names() {
        return Some(format!("arrays {names:?} instead of {:?}", expected.names()));
    }
    actual.iter().find_map(|(name, array)| {
        let view = expected.array(name);
        let shape: Vec<usize> = array.shape().iter().map(|&n| n as usize).collect();
        let described = (dtype_name(array.dtype()), shape);
        if described != (format!("{:?}", view.dtype()), view.shape().to_vec()) {
            return Some(format!("{name} is {described:?} instead of {:?} {:?}", view.dtype(), view.shape()));
        }
        let bytes = array.to_bytes().unwrap();
        let unequal = bytes.iter().zip(view.data()).filter(|(a, b)| a != b).count();
        (unequal > 0).then(|| format!("{name}: {unequal} of {} bytes differ", bytes.len()))
    })
}

/// Runs the cases on all cores, each thread with its own models; returns what failed.
fn failures(oracle: &'static Oracle, cases: &[Case]) -> Vec<String> {
    // Neighbours that share a checkpoint stay together; threads take the next group when they are free.
    let groups: Vec<&[Case]> = cases.chunk_by(|a, b| a.fixture == b.fixture).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut failures = Vec::new();
        while let Some(group) = groups.get(next.fetch_add(1, Ordering::Relaxed)) {
            failures.extend(part_failures(oracle, group));
        }
        failures
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        handles.into_iter().flat_map(|h| h.join().unwrap()).collect()
    })
}

fn part_failures(oracle: &Oracle, cases: &[Case]) -> Vec<String> {
    let mut loaded: Option<(PathBuf, Model)> = None;
    let mut failures = Vec::new();
    for case in cases {
        let dir = oracle.fixture(&case.fixture);
        let reference = oracle.reference(&dir, &case.reference);
        if loaded.as_ref().is_none_or(|(path, _)| *path != dir) {
            match Model::load(&dir, &LoadOptions::new(Fidelity::Tier(Tier::L1))) {
                Ok(model) => loaded = Some((dir.clone(), model)),
                Err(e) => {
                    failures.push(format!("{}: {e}", case.name));
                    continue;
                }
            }
        }
        let Some((_, model)) = &loaded else { continue };
        match recording(&case.reference).run(model) {
            Ok(actual) => {
                failures.extend(difference(&actual, &reference).map(|d| format!("{}: {d}", case.name)));
            }
            Err(e) => failures.push(format!("{}: {e}", case.name)),
        }
    }
    failures
}

#[track_caller]
fn assert_parity(cases: Vec<Case>) {
    let Some(oracle) = Oracle::get() else { return };
    let count = cases.len();
    let failures = failures(oracle, &cases);
    assert!(failures.is_empty(), "{} of {count} cases differ:\n{}", failures.len(), failures.join("\n"));
    // Not `eprintln!`: the test harness would swallow it.
    let table = matrix_table(&cases);
    let _ = writeln!(std::io::stderr(), "recordings that are equal in every byte:\n{table}");
}

#[test]
fn llama_equals_the_reference_bit_for_bit() {
    assert_parity(llama_cases());
}

#[test]
fn other_dense_families_equal_the_reference_bit_for_bit() {
    assert_parity(dense_cases());
}

#[test]
fn qwen3_5_equals_the_reference_bit_for_bit() {
    assert_parity(qwen3_5_cases());
}

#[test]
fn qwen3_5_moe_equals_the_reference_bit_for_bit() {
    assert_parity(qwen3_5_moe_cases());
}

#[test]
fn qwen3_moe_equals_the_reference_bit_for_bit() {
    assert_parity(qwen3_moe_cases());
}

#[test]
fn gemma4_equals_the_reference_bit_for_bit() {
    assert_parity(gemma4_cases());
}

#[test]
fn sampling_equals_the_reference_bit_for_bit() {
    assert_parity(sampling_cases());
}

#[test]
fn yielding_fewer_tokens_changes_none_of_them() {
    let Some(oracle) = Oracle::get() else { return };
    let Some(case) = sampling_cases().into_iter().find(|c| c.reference.sampling.temp > 0.0) else {
        panic!("no case samples");
    };
    let model =
        Model::load(&oracle.fixture(&case.fixture), &LoadOptions::new(Fidelity::Tier(Tier::L1))).unwrap();
    let spec = recording(&case.reference);
    let tokens = |limit: usize| -> Vec<u32> {
        let options = StepOptions {
            sampling: spec.sampling.clone(),
            seed: spec.seed,
            prefill_chunk: Some(5),
            limit: Some(limit),
        };
        Steps::start(&model, &spec.tokens, options, &mut |_| std::ops::ControlFlow::Continue(()))
            .unwrap()
            .unwrap()
            .map(|step| step.unwrap().token)
            .collect()
    };
    let all = tokens(20);
    assert_eq!(all.len(), 20);
    for limit in [0, 1, 2, 7] {
        assert_eq!(tokens(limit), all[..limit]);
    }
}
