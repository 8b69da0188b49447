//! Configs of checkpoints: the first byte chooses how the weights are stored, the rest is config.json, whose model type
//! chooses the tensors. What loads must run.

#![no_main]

use std::collections::BTreeMap;
use std::fs;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use russet_mlx::Array;
use russet_model::{CpuOptions, Error, Fidelity, LoadOptions, Model, Tier};
use russet_testing::{Format, TinyCheckpoint};
use serde_json::Value;
use tempfile::TempDir;

const FORMATS: [Format; 5] =
    [Format::Dense, Format::Affine { bits: 4, group: 32 }, Format::Mxfp4, Format::Mxfp8, Format::Nvfp4];

/// Checkpoints by model type and format.
static DIRECTORIES: LazyLock<BTreeMap<&str, [TempDir; 5]>> = LazyLock::new(|| {
    let write = |checkpoint: TinyCheckpoint| {
        let directory = tempfile::tempdir().expect("a temporary directory");
        checkpoint.write(directory.path());
        directory
    };
    let dense = |model_type| FORMATS.map(|format| write(TinyCheckpoint::dense(model_type, format)));
    let mut directories: BTreeMap<_, _> = TinyCheckpoint::DENSE_TYPES.map(|name| (name, dense(name))).into();
    let others: [(_, fn(Format) -> TinyCheckpoint); 4] = [
        ("gemma4", TinyCheckpoint::gemma4),
        ("qwen3_5", TinyCheckpoint::qwen3_5),
        ("qwen3_5_moe", TinyCheckpoint::qwen3_5_moe),
        ("qwen3_moe", TinyCheckpoint::qwen3_moe),
    ];
    directories.extend(others.map(|(name, make)| (name, FORMATS.map(|format| write(make(format))))));
    directories
});

fuzz_target!(|input: &[u8]| {
    let Some((choice, config)) = input.split_first() else { return };
    let parsed: Value = serde_json::from_slice(config).unwrap_or_default();
    let model_type = parsed["model_type"].as_str().filter(|name| DIRECTORIES.contains_key(name));
    let directory = DIRECTORIES[model_type.unwrap_or("llama")][usize::from(*choice) % FORMATS.len()].path();
    fs::write(directory.join("config.json"), config).expect("a config");
    // MLX, and Russet's kernels.
    for fidelity in [Fidelity::Tier(Tier::L1), Fidelity::Auto] {
        let cpu = CpuOptions { threads: Some(1), ..CpuOptions::default() };
        let model = match Model::load(directory, &LoadOptions { cpu, ..LoadOptions::new(fidelity) }) {
            Ok(model) => model,
            Err(e) => {
                let file = directory.to_str().expect("a path in UTF-8");
                assert!(e.to_string().starts_with(file), "names no file: {e}");
                continue;
            }
        };
        if let Err(e) = run(&model) {
            // MLX quantizes activations of several tokens on a GPU only.
            assert!(e.to_string().contains("QQMatmul"), "{e}");
        }
    }
});

fn run(model: &Model) -> Result<Vec<u8>, Error> {
    let tokens = Array::from_slice(&[0_u32, 1], [1, 2])?;
    Ok(model.logits(&model.forward(&tokens, &mut model.new_cache())?)?.to_bytes()?)
}
