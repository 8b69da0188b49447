//! Qwen3.5 checkpoints with experts: every spelling of the same tensors loads to the same model, and faulty ones are
//! refused with an error that names the field or the tensor.

mod common;

use common::*;
use russet_testing::{Format, Tensor, TinyCheckpoint};
use serde_json::{Value, json};

const AFFINE: Format = Format::Affine { bits: 4, group: 32 };
const MLP: &str = "language_model.model.layers.0.mlp";

fn dense() -> TinyCheckpoint {
    TinyCheckpoint::qwen3_5_moe(Format::Dense)
}

/// `checkpoint` with every tensor under another name.
fn renamed(mut checkpoint: TinyCheckpoint, rename: impl Fn(&str) -> String) -> TinyCheckpoint {
    checkpoint.tensors = checkpoint.tensors.into_iter().map(|(name, t)| (rename(&name), t)).collect();
    checkpoint
}

/// The tensors without the prefix `language_model.`.
fn text(checkpoint: TinyCheckpoint) -> TinyCheckpoint {
    renamed(checkpoint, |name| name.replacen("language_model.", "", 1))
}

/// The experts of a float32 checkpoint, layer by layer: the path of the MLP, and `[gate, up, down]`.
fn take_experts(checkpoint: &mut TinyCheckpoint) -> Vec<(String, [Tensor; 3])> {
    let paths = ["0", "1"].map(|layer| format!("language_model.model.layers.{layer}.mlp"));
    let mut take = |path: &str, name| {
        checkpoint.tensors.remove(&format!("{path}.switch_mlp.{name}_proj.weight")).unwrap()
    };
    paths.map(|path| (path.clone(), ["gate", "up", "down"].map(|name| take(&path, name)))).into()
}

/// Each expert's part of a stack.
fn parts(stack: &Tensor) -> impl Iterator<Item = &[u8]> {
    stack.data.chunks(stack.data.len() / stack.shape[0])
}

/// The experts as the hub's checkpoints have them: gates and up projections in one tensor.
fn with_fused_experts() -> TinyCheckpoint {
    let mut checkpoint = dense();
    for (path, [gate, up, down]) in take_experts(&mut checkpoint) {
        let data = parts(&gate).zip(parts(&up)).flat_map(|(gate, up)| [gate, up].concat()).collect();
        let shape = vec![gate.shape[0], 2 * gate.shape[1], gate.shape[2]];
        checkpoint.tensors.insert(format!("{path}.experts.gate_up_proj"), Tensor { shape, data, ..gate });
        checkpoint.tensors.insert(format!("{path}.experts.down_proj"), down);
    }
    checkpoint
}

/// The experts one by one.
fn with_separate_experts() -> TinyCheckpoint {
    let mut checkpoint = dense();
    for (path, stacks) in take_experts(&mut checkpoint) {
        for (name, stack) in ["gate", "up", "down"].into_iter().zip(&stacks) {
            for (e, data) in parts(stack).enumerate() {
                let expert = Tensor { shape: stack.shape[1..].to_vec(), data: data.to_vec(), ..*stack };
                checkpoint.tensors.insert(format!("{path}.experts.{e}.{name}_proj.weight"), expert);
            }
        }
    }
    checkpoint
}

#[test]
fn the_undamaged_checkpoints_run() {
    for format in [Format::Dense, AFFINE, Format::Mxfp4, Format::Mxfp8, Format::Nvfp4] {
        assert_runs(&TinyCheckpoint::qwen3_5_moe(format));
    }
}

#[test]
fn every_spelling_is_the_same_model() {
    let expected = assert_runs(&dense());
    for checkpoint in [with_fused_experts(), with_separate_experts()] {
        assert_eq!(assert_runs(&checkpoint), expected);
        assert_eq!(assert_runs(&text(checkpoint.clone())), expected);
        assert_eq!(assert_runs(&text(checkpoint).with("model_type", json!("qwen3_5_moe_text"))), expected);
    }
    // Their number makes a model of the other types sparse too.
    assert_eq!(assert_runs(&dense().with("model_type", json!("qwen3_5"))), expected);
    assert_eq!(assert_runs(&text(dense()).with("model_type", json!("qwen3_5_text"))), expected);
    let mut nested = dense();
    let config = std::mem::take(&mut nested.config);
    let nested = nested.with("model_type", json!("qwen3_5_moe")).with("text_config", Value::Object(config));
    assert_eq!(assert_runs(&nested), expected);
}

#[test]
fn none_of_the_experts_are_a_dense_model() {
    let plain = TinyCheckpoint::qwen3_5(Format::Dense);
    let expected = assert_runs(&plain);
    let named = plain.with("model_type", json!("qwen3_5_moe")).with("num_experts", json!(0));
    assert_eq!(assert_runs(&named), expected);
}

#[test]
fn the_sizes_of_experts_are_required() {
    let fields =
        ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"];
    for field in fields {
        assert_field_refused(&dense().without(field), field, "is missing");
        assert_field_refused(&dense().with(field, Value::Null), field, "is missing");
        let mut nested = dense().without(field);
        let config = std::mem::take(&mut nested.config);
        let nested = nested.with("model_type", json!("qwen3_5_moe")).with("text_config", config.into());
        assert_field_refused(&nested, &format!("text_config.{field}"), "is missing");
    }
}

#[test]
fn values_are_checked() {
    for (field, value, part) in [
        ("num_experts", json!(-1), "from 0"),
        ("num_experts", json!(1.5), "from 0"),
        ("num_experts", json!(1_u64 << 40), "from 0"),
        ("num_experts_per_tok", json!(0), "from 1"),
        ("num_experts_per_tok", json!(5), "5 is more than num_experts 4"),
        ("moe_intermediate_size", json!(0), "from 1"),
        ("shared_expert_intermediate_size", json!(0), "from 1"),
        ("norm_topk_prob", json!(1), "true or false"),
        // The reference ignores both.
        ("decoder_sparse_step", json!(2), "2 is not supported"),
        ("mlp_only_layers", json!([1]), "all layers have experts"),
    ] {
        assert_field_refused(&dense().with(field, value), field, part);
    }
    let harmless = dense().with("decoder_sparse_step", json!(1)).with("mlp_only_layers", json!([]));
    assert_eq!(assert_runs(&harmless), assert_runs(&dense()));
}

#[test]
fn tensors_that_are_missing_or_do_not_fit_are_named() {
    for checkpoint in [dense(), TinyCheckpoint::qwen3_5_moe(AFFINE)] {
        let names: Vec<String> =
            checkpoint.tensors.keys().filter(|n| n.contains(".0.mlp.")).cloned().collect();
        for name in names {
            let mut missing = checkpoint.clone();
            missing.tensors.remove(&name);
            // Of a packed module the other parts may be what does not fit then.
            let (module, _) = name.rsplit_once('.').unwrap();
            assert_checkpoint_refused(&missing, &[&format!("tensor \"{module}")]);
            let mut other = checkpoint.clone();
            // One more in the first dimension, that of experts or rows.
            let tensor = other.tensors.get_mut(&name).unwrap();
            tensor.data.extend_from_within(..tensor.data.len() / tensor.shape[0]);
            tensor.shape[0] += 1;
            assert_tensor_refused(&other, &name, "has shape");
        }
    }
    let gate = &format!("{MLP}.gate.weight");
    assert_tensor_refused(&dense().with("num_experts", json!(3)), gate, "has shape");
    // More than there can be.
    assert_tensor_refused(&dense().with("num_experts", json!(1 << 24)), gate, "has shape");
    let none = dense().with("num_experts", json!(0));
    assert_tensor_refused(&none, &format!("{MLP}.gate_proj.weight"), "is missing");
}

#[test]
fn fused_experts_must_be_whole_and_stored_once() {
    let fused = &format!("{MLP}.experts.gate_up_proj");
    let mut odd = with_fused_experts();
    let tensor = odd.tensors.get_mut(fused).unwrap();
    tensor.shape = vec![4 * 64, 32, 1];
    assert_tensor_refused(&odd, &format!("{MLP}.switch_mlp.gate_proj.weight"), "has shape");
    let mut flat = with_fused_experts();
    flat.tensors.get_mut(fused).unwrap().shape = vec![4 * 64 * 32];
    assert_tensor_refused(&flat, fused, "has shape");
    let down = &format!("{MLP}.experts.down_proj");
    let mut missing = with_fused_experts();
    missing.tensors.remove(down);
    assert_tensor_refused(&missing, &format!("{MLP}.switch_mlp.down_proj.weight"), "is missing");
    for name in ["gate_proj", "down_proj"] {
        let name = format!("{MLP}.switch_mlp.{name}.weight");
        let mut both = with_fused_experts();
        both.tensors.insert(name.clone(), dense().tensors[&name].clone());
        assert_checkpoint_refused(&both, &[&name]);
    }
}

#[test]
fn separate_experts_must_be_all_there_and_alike() {
    let last = &format!("{MLP}.experts.3.up_proj.weight");
    let mut missing = with_separate_experts();
    missing.tensors.remove(last);
    assert_tensor_refused(&missing, last, "is missing");
    let mut unlike = with_separate_experts();
    unlike.tensors.get_mut(last).unwrap().shape = vec![32 * 32];
    assert_tensor_refused(&unlike, last, "the first part");
    // One more than the config has.
    let mut more = with_separate_experts();
    let expert = more.tensors[last].clone();
    more.tensors.insert(format!("{MLP}.experts.4.up_proj.weight"), expert);
    assert_tensor_refused(&more, &format!("{MLP}.experts.4.up_proj.weight"), "is not part of this model");
}
