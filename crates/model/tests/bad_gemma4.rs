//! Faulty gemma4 checkpoints: the error names the field or the tensor.

mod common;

use common::*;
use russet_testing::{Dtype, Format, Tensor, TinyCheckpoint};
use serde_json::{Value, json};

const AFFINE: Format = Format::Affine { bits: 4, group: 32 };
const LAYERS: &str = "language_model.model.layers";
const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

fn dense() -> TinyCheckpoint {
    TinyCheckpoint::gemma4(Format::Dense)
}

/// The undamaged checkpoint with a field of the text config set.
fn with(field: &str, value: Value) -> TinyCheckpoint {
    let mut checkpoint = dense();
    text_config(&mut checkpoint).insert(field.to_owned(), value);
    checkpoint
}

fn text_config(checkpoint: &mut TinyCheckpoint) -> &mut serde_json::Map<String, Value> {
    checkpoint.config["text_config"].as_object_mut().unwrap()
}

fn without_tensor(name: &str) -> TinyCheckpoint {
    let mut checkpoint = dense();
    assert!(checkpoint.tensors.remove(name).is_some());
    checkpoint
}

fn with_tensor(mut checkpoint: TinyCheckpoint, name: &str, shape: &[usize]) -> TinyCheckpoint {
    checkpoint.tensors.insert(name.to_owned(), Tensor::filled(Dtype::F32, shape, &[0; 4]));
    checkpoint
}

/// As [`dense`], in the hub's layout.
fn of_the_hub() -> TinyCheckpoint {
    let mut checkpoint = dense();
    let tensors = std::mem::take(&mut checkpoint.tensors);
    for (name, tensor) in tensors {
        let name = name.replacen("language_model.model.", "model.language_model.", 1);
        checkpoint.tensors.insert(name, tensor);
    }
    for layer in 0..4 {
        let experts = format!("model.language_model.layers.{layer}.experts");
        let mut take =
            |name: &str| checkpoint.tensors.remove(&format!("{experts}.switch_glu.{name}.weight")).unwrap();
        let (gate, up, down) = (take("gate_proj"), take("up_proj"), take("down_proj"));
        let expert = gate.data.len() / gate.shape[0];
        let data = gate.data.chunks(expert).zip(up.data.chunks(expert)).flat_map(|(g, u)| [g, u].concat());
        let fused = Tensor {
            dtype: gate.dtype,
            shape: vec![gate.shape[0], 2 * gate.shape[1], gate.shape[2]],
            data: data.collect(),
        };
        checkpoint.tensors.insert(format!("{experts}.gate_up_proj"), fused);
        checkpoint.tensors.insert(format!("{experts}.down_proj"), down);
    }
    checkpoint
}

#[track_caller]
fn assert_text_field_refused(field: &str, value: Value, part: &str) {
    assert_field_refused(&with(field, value), &format!("text_config.{field}"), part);
}

#[test]
fn the_undamaged_checkpoints_run() {
    for format in [Format::Dense, AFFINE, Format::Mxfp4, Format::Mxfp8, Format::Nvfp4] {
        assert_runs(&TinyCheckpoint::gemma4(format));
    }
    assert_eq!(assert_runs(&of_the_hub()), assert_runs(&dense()));
}

#[test]
fn a_text_config_is_needed() {
    assert_field_refused(&dense().without("text_config"), "text_config", "is missing");
    assert_field_refused(&dense().with("text_config", json!([])), "text_config", "an object");
}

#[test]
fn values_are_checked() {
    for (field, value, part) in [
        ("num_hidden_layers", json!(5000), "more than"),
        ("num_attention_heads", json!(0), "from 1"),
        ("num_attention_heads", json!(3), "does not divide"),
        ("head_dim", json!(7), "not an even number"),
        ("global_head_dim", json!(15), "not an even number"),
        ("num_key_value_heads", json!(3), "does not divide"),
        ("num_global_key_value_heads", json!(3), "does not divide"),
        ("sliding_window", json!(0), "from 1"),
        ("sliding_window", json!(-4), "expected an integer"),
        ("final_logit_softcapping", json!(0), "greater than 0"),
        ("final_logit_softcapping", json!("30"), "a finite number"),
        ("rms_norm_eps", json!(-1e-6), "greater than 0"),
        ("attention_k_eq_v", json!(1), "true or false"),
        ("use_double_wide_mlp", json!("yes"), "true or false"),
        ("hidden_activation", json!("silu"), "not supported"),
        ("rope_traditional", json!(0), "true or false"),
        ("hidden_size_per_layer_input", json!(-1), "from 0"),
        ("vocab_size_per_layer_input", json!(47), "47 is less than vocab_size 48"),
    ] {
        // A field whose fault shows in another one.
        let named = match (field, part) {
            ("num_attention_heads", "does not divide") => "num_key_value_heads",
            _ => field,
        };
        assert_field_refused(&with(field, value), &format!("text_config.{named}"), part);
    }
    let mut large = with("num_attention_heads", json!(1 << 24));
    text_config(&mut large).insert("head_dim".into(), json!(1 << 24));
    assert_field_refused(&large, "text_config.head_dim", "too large");
    let mut large = with("hidden_size_per_layer_input", json!(1 << 24));
    for (field, value) in [("num_hidden_layers", json!(200)), ("layer_types", Value::Null)] {
        text_config(&mut large).insert(field.to_owned(), value);
    }
    assert_field_refused(&large, "text_config.hidden_size_per_layer_input", "too large");
}

#[test]
fn layer_types_must_fit_the_layers() {
    for (types, part) in [
        (json!([SLIDING, FULL]), "2 entries for 4 layers"),
        (json!([SLIDING, FULL, SLIDING, FULL, FULL]), "5 entries for 4 layers"),
        (json!([SLIDING, FULL, SLIDING, "linear_attention"]), "unknown layer type 'linear_attention'"),
        (json!([1, 2, 3, 4]), "a list of strings"),
        (json!("full_attention"), "a list of strings"),
    ] {
        assert_text_field_refused("layer_types", types, part);
    }
    let mut checkpoint = with("layer_types", Value::Null);
    text_config(&mut checkpoint).insert("sliding_window_pattern".into(), json!(0));
    assert_field_refused(&checkpoint, "text_config.sliding_window_pattern", "from 1");
}

#[test]
fn shared_layers_need_a_donor_of_their_type() {
    assert_text_field_refused("num_kv_shared_layers", json!(4), "leave none");
    assert_text_field_refused("num_kv_shared_layers", json!(5), "leave none");
    assert_text_field_refused("num_kv_shared_layers", json!(-1), "from 0");
    // Layer 1 is full, and layer 0 is not.
    assert_text_field_refused("num_kv_shared_layers", json!(3), "layer 1 shares keys and values");
    assert_text_field_refused("num_kv_shared_layers", Value::Null, "20 of 4 layers");
    // Fewer shared layers need more keys than there are, more leave some over.
    assert_tensor_refused(
        &with("num_kv_shared_layers", json!(1)),
        &format!("{LAYERS}.2.mlp.gate_proj.weight"),
        "has shape",
    );
}

#[test]
fn keys_and_values_must_be_those_of_the_config() {
    let v_proj = format!("{LAYERS}.1.self_attn.v_proj.weight");
    assert_tensor_refused(&with_tensor(dense(), &v_proj, &[32, 32]), &v_proj, "is not part of this model");
    assert_tensor_refused(&with("attention_k_eq_v", json!(false)), &v_proj, "is missing");
    let v_proj = format!("{LAYERS}.0.self_attn.v_proj.weight");
    assert_tensor_refused(&without_tensor(&v_proj), &v_proj, "is missing");
    let k_norm = format!("{LAYERS}.0.self_attn.k_norm.weight");
    assert_tensor_refused(&without_tensor(&k_norm), &k_norm, "is missing");
    assert_tensor_refused(
        &with("num_global_key_value_heads", json!(1)),
        &format!("{LAYERS}.1.self_attn.k_proj.weight"),
        "has shape",
    );
    assert_tensor_refused(
        &with("global_head_dim", json!(8)),
        &format!("{LAYERS}.1.self_attn.q_proj.weight"),
        "has shape",
    );
}

#[test]
fn experts_must_be_those_of_the_config() {
    for field in ["num_experts", "top_k_experts", "moe_intermediate_size"] {
        assert_text_field_refused(field, Value::Null, "is missing");
        assert_text_field_refused(field, json!(0), "from 1");
    }
    assert_text_field_refused("top_k_experts", json!(5), "5 is more than num_experts 4");
    assert_text_field_refused("enable_moe_block", json!("true"), "true or false");
    assert_tensor_refused(
        &with("enable_moe_block", json!(false)),
        &format!("{LAYERS}.0.experts.switch_glu.down_proj.weight"),
        "is not part of this model",
    );
    for name in [
        "router.proj.weight",
        "router.scale",
        "router.per_expert_scale",
        "experts.switch_glu.up_proj.weight",
        "pre_feedforward_layernorm_2.weight",
        "post_feedforward_layernorm_1.weight",
        "post_feedforward_layernorm_2.weight",
    ] {
        let name = format!("{LAYERS}.3.{name}");
        assert_tensor_refused(&without_tensor(&name), &name, "is missing");
    }
    assert_tensor_refused(
        &with("moe_intermediate_size", json!(64)),
        &format!("{LAYERS}.0.experts.switch_glu.gate_proj.weight"),
        "has shape",
    );
}

#[test]
fn inputs_of_layers_must_be_those_of_the_config() {
    for name in [
        "language_model.model.embed_tokens_per_layer.weight".to_owned(),
        "language_model.model.per_layer_model_projection.weight".to_owned(),
        "language_model.model.per_layer_projection_norm.weight".to_owned(),
        format!("{LAYERS}.2.per_layer_input_gate.weight"),
        format!("{LAYERS}.2.per_layer_projection.weight"),
        format!("{LAYERS}.2.post_per_layer_input_norm.weight"),
    ] {
        assert_tensor_refused(&without_tensor(&name), &name, "is missing");
    }
    assert_tensor_refused(
        &with("hidden_size_per_layer_input", json!(0)),
        "language_model.model.embed_tokens_per_layer.weight",
        "is not part of this model",
    );
    let layer_scalar = format!("{LAYERS}.1.layer_scalar");
    assert_tensor_refused(&without_tensor(&layer_scalar), &layer_scalar, "is missing");
}

#[test]
fn ropes_are_checked_where_they_stand() {
    for (kind, rope, field, part) in [
        (FULL, json!({"rope_type": "spiral"}), "rope_type", "'spiral' is not supported"),
        (SLIDING, json!({"type": "linear"}), "factor", "is missing"),
        (FULL, json!({"rope_theta": 0}), "rope_theta", "greater than 0"),
        (
            FULL,
            json!({"rope_type": "proportional", "partial_rotary_factor": 1.5}),
            "partial_rotary_factor",
            "must not be greater than 1",
        ),
    ] {
        let checkpoint = with("rope_parameters", json!({ kind: rope }));
        assert_field_refused(&checkpoint, &format!("text_config.rope_parameters.{kind}.{field}"), part);
    }
    assert_text_field_refused("rope_parameters", json!([]), "an object");
    let checkpoint = with("rope_parameters", json!({ FULL: "proportional" }));
    assert_field_refused(&checkpoint, "text_config.rope_parameters.full_attention", "an object");
}

#[test]
fn the_layout_of_the_hub_is_checked_too() {
    let fused = "model.language_model.layers.1.experts.gate_up_proj";
    let mut checkpoint = of_the_hub();
    checkpoint.tensors.get_mut(fused).unwrap().shape = vec![4, 1, 64, 32];
    let gate = format!("{LAYERS}.1.experts.switch_glu.gate_proj.weight");
    assert_tensor_refused(&checkpoint, &gate, "has shape");
    checkpoint.tensors.get_mut(fused).unwrap().shape = vec![4 * 64 * 32];
    assert_tensor_refused(
        &checkpoint,
        &fused.replacen("model.", "", 1).replacen("_model", "_model.model", 1),
        "has shape",
    );
    // Two names of one tensor.
    let name = format!("{LAYERS}.0.layer_scalar");
    let both = with_tensor(of_the_hub(), &name, &[1]);
    assert_checkpoint_refused(&both, &["layer_scalar", "and another tensor are both"]);
}

#[test]
fn what_the_reference_drops_is_dropped() {
    let expected = assert_runs(&dense());
    for name in [
        "model.vision_tower.encoder.weight",
        "vision_tower.encoder.weight",
        "model.audio_tower.weight",
        "model.embed_vision.weight",
        "model.embed_audio.weight",
        "model.vision_embedder.weight",
        "model.multi_modal_projector.weight",
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq",
        "language_model.model.layers.0.mlp.up_proj.input_max",
        "language_model.model.layers.0.mlp.up_proj.output_min",
        "language_model.model.layers.2.self_attn.k_proj.weight",
        "language_model.model.layers.3.self_attn.v_proj.weight",
        "language_model.model.layers.3.self_attn.k_norm.weight",
    ] {
        assert_eq!(assert_runs(&with_tensor(dense(), name, &[1])), expected, "{name}");
    }
    for name in ["vision.weight", "model.layers.0.layer_scalar", "lm_head.weight"] {
        assert_checkpoint_refused(&with_tensor(dense(), name, &[1]), &["is not part of this model"]);
    }
}

#[test]
fn a_text_model_of_its_own_has_its_fields_at_the_top() {
    let mut checkpoint = dense();
    let mut config = checkpoint.config.remove("text_config").unwrap();
    config["model_type"] = json!("gemma4_text");
    config["vocab_size"] = json!(48);
    checkpoint.config = config.as_object().unwrap().clone();
    let tensors = std::mem::take(&mut checkpoint.tensors);
    let rename = |name: String| name.replacen("language_model.", "", 1);
    checkpoint.tensors = tensors.into_iter().map(|(name, t)| (rename(name), t)).collect();
    assert_eq!(assert_runs(&checkpoint), assert_runs(&dense()));
    assert_field_refused(
        &checkpoint.clone().with("num_kv_shared_layers", json!(4)),
        "num_kv_shared_layers",
        "leave none",
    );
    let tower = with_tensor(checkpoint, "vision_tower.weight", &[1]);
    assert_tensor_refused(&tower, "vision_tower.weight", "is not part of this model");
}
