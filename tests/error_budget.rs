//! The error of fidelity L3, against the f32 computation of the same stored weights.
#![allow(clippy::print_stdout, reason = "cargo test -- --nocapture shows what was measured")]

use std::path::{Path, PathBuf};

use russet_engine::evaluate::{Divergence, Recording};
use russet_engine::{LanguageModel, Sampling};
use russet_hub::{InstallOptions, Store, install_starter};
use russet_mlx::Dtype;
use russet_model::{CpuOptions, Fidelity, KvType, LoadOptions, Model, Precision, Tier};
use russet_testing::{FixtureSpec, Float, Format, Oracle, dense_fixtures, qwen3_5_fixture};

/// The f32 computation: nothing rounded but f32 arithmetic itself.
const EXACT: CpuOptions =
    CpuOptions { threads: None, precision: Precision::F32, interleave: false, kv: KvType::F32 };

fn starter() -> PathBuf {
    let home = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/russet-home");
    let store = Store::new(home.join("none"), home);
    install_starter(&store, &InstallOptions::default(), &mut |_| {}).expect("the starter model installs")
}

fn load(dir: &Path, cpu: CpuOptions) -> Model {
    let options = LoadOptions { cpu, ..LoadOptions::new(Fidelity::Tier(Tier::L3)) };
    Model::load(dir, &options).unwrap()
}

/// English, code, and seven other scripts.
fn corpus(dir: &Path) -> Vec<u32> {
    let tokenizer =
        LanguageModel::load(dir, &LoadOptions { cpu: EXACT, ..LoadOptions::default() }).unwrap().tokenizer;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let text: String = ["english.txt", "code.txt", "world.txt"]
        .iter()
        .map(|name| std::fs::read_to_string(folder.join(name)).unwrap())
        .collect();
    tokenizer.encode(&text, true).unwrap()
}

#[test]
fn the_starter_model_keeps_the_error_budget_on_real_text() {
    let dir = starter();
    let tokens = corpus(&dir);
    assert!(tokens.len() >= 2000, "{} tokens", tokens.len());
    let reference = load(&dir, CpuOptions { interleave: true, ..EXACT });
    // Prefill and decode take different kernels, interleaved and stored weights too.
    for (interleave, chunk) in [(true, 64), (true, 1), (false, 64)] {
        let model = load(&dir, CpuOptions { interleave, ..CpuOptions::default() });
        let d = Divergence::measure(&reference, &model, &tokens, chunk).unwrap();
        println!("interleave {interleave}, {chunk} tokens a call: {d:?}");
        assert!(d.mean_kl <= 1e-4, "{d:?}");
        assert!(d.top1_agreement >= 0.995, "{d:?}");
        assert!(d.max_difference.is_finite(), "{d:?}");
    }
}

/// Logits of a prompt and of eight steps, in f32.
fn logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let recording = Recording {
        tokens: tokens.to_vec(),
        steps: 8,
        prefill_chunk: None,
        sampling: Sampling::default(),
        seed: 0,
    };
    let arrays = recording.run(model).unwrap();
    ["prompt_logits", "step_logits"]
        .iter()
        .flat_map(|name| arrays[*name].astype(Dtype::F32).unwrap().to_vec::<f32>().unwrap())
        .collect()
}

#[test]
fn the_f32_computation_agrees_with_that_of_mlx() {
    let Some(oracle) = Oracle::get() else { return };
    let formats = [
        Format::Dense,
        Format::Affine { bits: 2, group: 32 },
        Format::Affine { bits: 3, group: 64 },
        Format::Affine { bits: 4, group: 64 },
        Format::Affine { bits: 5, group: 32 },
        Format::Affine { bits: 6, group: 64 },
        Format::Affine { bits: 8, group: 32 },
        Format::Mxfp4,
        Format::Nvfp4,
        Format::Mxfp8,
    ];
    for (fixture, tolerance) in [
        (FixtureSpec::new("llama"), 1e-5),
        (FixtureSpec::new("llama-sliding"), 1e-5),
        // Twice the layers, and states that sum over all tokens.
        (qwen3_5_fixture(), 4e-5),
    ] {
        for format in formats {
            let spec = FixtureSpec { dtype: Float::Float32, format, ..fixture.clone() };
            let (dir, arch) = (oracle.fixture(&spec), spec.arch);
            let tokens: Vec<u32> = (0..40).map(|i| i * 37 % 256).collect();
            let mlx =
                logits(&Model::load(&dir, &LoadOptions::new(Fidelity::Tier(Tier::L1))).unwrap(), &tokens);
            for interleave in [false, true] {
                let ours = logits(&load(&dir, CpuOptions { interleave, ..EXACT }), &tokens);
                let scale = mlx.iter().fold(0f32, |m, x| m.max(x.abs()));
                let worst = mlx.iter().zip(&ours).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(worst <= tolerance * scale, "{arch} {format:?}: {worst} of {scale}");
            }
        }
    }
}

#[test]
fn every_format_and_dtype_keeps_the_error_budget() {
    let Some(oracle) = Oracle::get() else { return };
    let tokens: Vec<u32> = (0..300).map(|i| i * i * 31 % 256).collect();
    for dtype in [Float::Bfloat16, Float::Float16, Float::Float32] {
        for format in [
            Format::Dense,
            Format::Affine { bits: 3, group: 32 },
            Format::Affine { bits: 4, group: 64 },
            Format::Affine { bits: 8, group: 32 },
            Format::Mxfp4,
            Format::Nvfp4,
            Format::Mxfp8,
        ] {
            let dir = oracle.fixture(&FixtureSpec { dtype, format, ..FixtureSpec::new("llama") });
            for chunk in [1, 100] {
                let (reference, model) = (load(&dir, EXACT), load(&dir, CpuOptions::default()));
                let d = Divergence::measure(&reference, &model, &tokens, chunk).unwrap();
                assert!(d.mean_kl <= 1e-4, "{dtype:?} {format:?}: {d:?}");
            }
        }
    }
}

#[test]
fn qwen3_5_keeps_the_error_budget_over_eight_layers() {
    let Some(oracle) = Oracle::get() else { return };
    let tokens: Vec<u32> = (0..300).map(|i| i * i * 31 % 256).collect();
    for format in
        [Format::Dense, Format::Affine { bits: 4, group: 64 }, Format::Affine { bits: 8, group: 32 }]
    {
        let dir = oracle.fixture(&FixtureSpec { format, hidden: 512, layers: 8, ..qwen3_5_fixture() });
        let reference = load(&dir, EXACT);
        // Random weights let the rounding of prompts to 12 bits grow more than real ones do.
        for (precision, chunk, budget) in [
            (Precision::Int12, 1, 1e-4),
            (Precision::Int12, 100, 1e-3),
            (Precision::Int16, 1, 1e-4),
            (Precision::Int16, 100, 1e-4),
        ] {
            let model = load(&dir, CpuOptions { precision, ..CpuOptions::default() });
            let d = Divergence::measure(&reference, &model, &tokens, chunk).unwrap();
            println!("{format:?}, {precision:?}, {chunk} tokens a call: {d:?}");
            assert!(d.mean_kl <= budget, "{format:?} {precision:?}: {d:?}");
        }
    }
}

#[test]
fn every_dense_family_keeps_the_error_budget() {
    let Some(oracle) = Oracle::get() else { return };
    let tokens: Vec<u32> = (0..150).map(|i| i * i * 31 % 256).collect();
    for (name, fixture) in dense_fixtures() {
        for format in [Format::Dense, Format::Affine { bits: 4, group: 64 }] {
            let dir = oracle.fixture(&FixtureSpec { format, ..fixture.clone() });
            let mlx = Model::load(&dir, &LoadOptions::new(Fidelity::Tier(Tier::L1))).unwrap();
            let measure = |options, chunk| {
                let d = Divergence::measure(&mlx, &load(&dir, options), &tokens, chunk).unwrap();
                println!("{name} {format:?}, {chunk} tokens a call: {d:?}");
                d
            };
            let exact = measure(EXACT, 60);
            assert!(exact.mean_kl <= 1e-9 && exact.max_difference <= 1e-4, "{name} {format:?}: {exact:?}");
            for chunk in [1, 60] {
                let d = measure(CpuOptions::default(), chunk);
                assert!(d.mean_kl <= 1e-4, "{name} {format:?}: {d:?}");
            }
        }
    }
}
