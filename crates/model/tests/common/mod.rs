//! What tests of damaged checkpoints share.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::path::Path;

use russet_mlx::Array;
use russet_model::{CpuOptions, Error, Fidelity, LoadOptions, Model, Tier};
use russet_testing::TinyCheckpoint;
use tempfile::TempDir;

pub(crate) fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// What computes: MLX, and where the device has them Russet's kernels.
pub(crate) const FIDELITIES: [Fidelity; 2] = [Fidelity::Tier(Tier::L1), Fidelity::Auto];

pub(crate) fn load_with(dir: &Path, fidelity: Fidelity) -> Result<Model, Error> {
    let cpu = CpuOptions { threads: Some(2), ..CpuOptions::default() };
    Model::load(dir, &LoadOptions { cpu, ..LoadOptions::new(fidelity) })
}

pub(crate) fn load(dir: &Path) -> Result<Model, Error> {
    load_with(dir, Fidelity::Tier(Tier::L1))
}

/// Checks that loading fails with a message that has all of `parts`.
#[track_caller]
pub(crate) fn assert_refused(dir: &Path, parts: &[&str]) {
    for fidelity in FIDELITIES {
        match load_with(dir, fidelity) {
            Ok(_) => panic!("loaded with {fidelity:?}, expected an error with {parts:?}"),
            Err(e) => assert_message(&e, parts),
        }
    }
}

#[track_caller]
pub(crate) fn assert_message(error: &Error, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not contain {part:?}");
    }
}

#[track_caller]
pub(crate) fn assert_checkpoint_refused(checkpoint: &TinyCheckpoint, parts: &[&str]) {
    let dir = directory();
    checkpoint.write(dir.path());
    assert_refused(dir.path(), parts);
}

/// Checks that the error is about `field` of config.json.
#[track_caller]
pub(crate) fn assert_field_refused(checkpoint: &TinyCheckpoint, field: &str, part: &str) {
    assert_checkpoint_refused(checkpoint, &["config.json", &format!("field \"{field}\""), part]);
}

/// Checks that the error is about the tensor `name`.
#[track_caller]
pub(crate) fn assert_tensor_refused(checkpoint: &TinyCheckpoint, name: &str, part: &str) {
    assert_checkpoint_refused(checkpoint, &[&format!("tensor \"{name}\""), part]);
}

/// The logits of the first two tokens, as bytes.
pub(crate) fn logits(model: &Model) -> Result<Vec<u8>, Error> {
    let tokens = Array::from_slice(&[0_u32, 1], [1, 2])?;
    Ok(model.logits(&model.forward(&tokens, &mut model.new_cache())?)?.to_bytes()?)
}

/// The logits with MLX, of a checkpoint that must run with everything.
#[track_caller]
pub(crate) fn assert_runs(checkpoint: &TinyCheckpoint) -> Vec<u8> {
    let dir = directory();
    checkpoint.write(dir.path());
    let [reference, _] = FIDELITIES.map(|f| logits(&load_with(dir.path(), f).unwrap()).unwrap());
    reference
}
