//! Faulty qwen3_moe checkpoints: the error names the field or the tensor.

mod common;

use common::*;
use russet_testing::{Dtype, Format, Tensor, TinyCheckpoint};
use serde_json::{Value, json};

const AFFINE: Format = Format::Affine { bits: 4, group: 32 };
const SPARSE: &str = "model.layers.0.mlp";

fn dense() -> TinyCheckpoint {
    TinyCheckpoint::qwen3_moe(Format::Dense)
}

/// The experts of the sparse layer one by one, as unconverted checkpoints have them.
fn with_separate_experts() -> TinyCheckpoint {
    let mut checkpoint = dense();
    for name in ["gate_proj", "up_proj", "down_proj"] {
        let stack = checkpoint.tensors.remove(&format!("{SPARSE}.switch_mlp.{name}.weight")).unwrap();
        for (e, data) in stack.data.chunks(stack.data.len() / stack.shape[0]).enumerate() {
            let expert = Tensor { shape: stack.shape[1..].to_vec(), data: data.to_vec(), ..stack };
            checkpoint.tensors.insert(format!("{SPARSE}.experts.{e}.{name}.weight"), expert);
        }
    }
    checkpoint
}

#[test]
fn the_undamaged_checkpoints_run() {
    for format in [Format::Dense, AFFINE, Format::Mxfp4, Format::Mxfp8, Format::Nvfp4] {
        assert_runs(&TinyCheckpoint::qwen3_moe(format));
    }
    assert_eq!(assert_runs(&with_separate_experts()), assert_runs(&dense()));
}

#[test]
fn every_field_is_required() {
    for field in [
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts",
        "num_experts_per_tok",
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "rope_theta",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
    ] {
        assert_field_refused(&dense().without(field), field, "is missing");
        assert_field_refused(&dense().with(field, Value::Null), field, "is missing");
    }
}

#[test]
fn values_are_checked() {
    for (field, value, part) in [
        ("num_experts", json!(-1), "from 0"),
        ("num_experts", json!(1.5), "from 0"),
        ("num_experts_per_tok", json!(0), "from 1"),
        ("num_experts_per_tok", json!(5), "5 is more than num_experts 4"),
        ("decoder_sparse_step", json!(0), "from 1"),
        ("mlp_only_layers", json!("1"), "a list"),
        ("mlp_only_layers", json!([true]), "a list"),
        ("moe_intermediate_size", json!(0), "from 1"),
        ("norm_topk_prob", json!(1), "true or false"),
        ("num_key_value_heads", json!(3), "does not divide"),
        ("head_dim", json!(7), "not an even number"),
        ("num_hidden_layers", json!(5000), "more than"),
        ("hidden_act", json!("gelu"), "not supported"),
        ("rope_theta", json!(0), "greater than 0"),
    ] {
        assert_field_refused(&dense().with(field, value), field, part);
    }
    // 2²⁴ heads of 2²⁴ channels.
    let large = dense().with("num_attention_heads", json!(1 << 24)).with("head_dim", json!(1 << 24));
    assert_field_refused(&large.with("num_key_value_heads", json!(1 << 24)), "head_dim", "too large");
}

#[test]
fn experts_that_do_not_fit_the_config_are_refused() {
    let up = &format!("{SPARSE}.switch_mlp.up_proj.weight");
    assert_tensor_refused(
        &dense().with("num_experts", json!(3)),
        &format!("{SPARSE}.gate.weight"),
        "has shape",
    );
    let wider = dense().with("moe_intermediate_size", json!(64));
    assert_tensor_refused(&wider, &format!("{SPARSE}.switch_mlp.gate_proj.weight"), "has shape");
    // More than there can be.
    assert_tensor_refused(
        &dense().with("num_experts", json!(1 << 24)),
        &format!("{SPARSE}.gate.weight"),
        "has shape",
    );
    let mut checkpoint = dense();
    checkpoint.tensors.remove(up);
    assert_tensor_refused(&checkpoint, up, "is missing");
    // A dense layer where the config has a sparse one, and the other way round.
    assert_tensor_refused(
        &dense().with("mlp_only_layers", json!([])),
        "model.layers.1.mlp.gate.weight",
        "is missing",
    );
    assert_tensor_refused(
        &dense().with("num_experts", json!(0)),
        "model.layers.0.mlp.gate_proj.weight",
        "is missing",
    );
    assert_tensor_refused(
        &dense().with("decoder_sparse_step", json!(3)),
        "model.layers.0.mlp.gate_proj.weight",
        "is missing",
    );
}

#[test]
fn separate_experts_must_be_all_there_and_alike() {
    let last = &format!("{SPARSE}.experts.3.up_proj.weight");
    let mut checkpoint = with_separate_experts();
    checkpoint.tensors.remove(last);
    assert_tensor_refused(&checkpoint, last, "is missing");
    let mut checkpoint = with_separate_experts();
    checkpoint.tensors.get_mut(last).unwrap().shape = vec![32 * 32];
    assert_tensor_refused(&checkpoint, last, "the first part");
    // More experts than the config has are left over.
    let fewer = with_separate_experts().with("num_experts", json!(3));
    assert_tensor_refused(&fewer, &format!("{SPARSE}.gate.weight"), "has shape");
    let mut both = with_separate_experts();
    let whole = dense().tensors.remove(&format!("{SPARSE}.switch_mlp.up_proj.weight")).unwrap();
    both.tensors.insert(format!("{SPARSE}.switch_mlp.up_proj.weight"), whole);
    assert_tensor_refused(&both, &format!("{SPARSE}.switch_mlp.up_proj.weight"), "is stored twice");
}

#[test]
fn packed_experts_have_their_parts_and_shapes() {
    let quantized = || TinyCheckpoint::qwen3_moe(AFFINE);
    for part in ["weight", "scales", "biases"] {
        let name = &format!("{SPARSE}.switch_mlp.down_proj.{part}");
        let mut checkpoint = quantized();
        checkpoint.tensors.get_mut(name).unwrap().shape[0] = 2;
        checkpoint.tensors.get_mut(name).unwrap().shape[1] *= 2;
        assert_tensor_refused(&checkpoint, name, "has shape");
    }
    let biases = &format!("{SPARSE}.switch_mlp.down_proj.biases");
    let mut checkpoint = quantized();
    let shape = checkpoint.tensors[biases].shape.clone();
    checkpoint.tensors.insert(biases.clone(), Tensor::filled(Dtype::F16, &shape, &[0, 0]));
    assert_tensor_refused(&checkpoint, biases, "is float16");
}

#[test]
fn the_head_of_a_tied_model_is_dropped() {
    let tied = dense().with("tie_word_embeddings", json!(true));
    let mut without_head = tied.clone();
    without_head.tensors.remove("lm_head.weight");
    assert_eq!(assert_runs(&tied), assert_runs(&without_head));
}
