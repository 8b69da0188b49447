//! Qwen3.5 checkpoints: every spelling of the same tensors loads to the same model, and damaged or hostile ones are
//! refused with an error that names the field or tensor.

use std::path::Path;

use russet_mlx::Array;
use russet_model::{CpuOptions, Error, Fidelity, LoadOptions, Model, Tier};
use russet_testing::{Format, Tensor, TinyCheckpoint};
use serde_json::{Value, json};

const AFFINE: Format = Format::Affine { bits: 4, group: 32 };
const LINEAR: &str = "language_model.model.layers.0.linear_attn";

/// What computes: MLX, and where the device has them Russet's kernels.
const FIDELITIES: [Fidelity; 2] = [Fidelity::Tier(Tier::L1), Fidelity::Auto];

fn dense() -> TinyCheckpoint {
    TinyCheckpoint::qwen3_5(Format::Dense)
}

fn load(dir: &Path, fidelity: Fidelity) -> Result<Model, Error> {
    let cpu = CpuOptions { threads: Some(2), ..CpuOptions::default() };
    Model::load(dir, &LoadOptions { cpu, ..LoadOptions::new(fidelity) })
}

/// The logits of the first five tokens, as bytes, with each numerics.
fn logits(checkpoint: &TinyCheckpoint) -> [Vec<u8>; 2] {
    let dir = tempfile::tempdir().unwrap();
    checkpoint.write(dir.path());
    FIDELITIES.map(|fidelity| {
        let model = load(dir.path(), fidelity).unwrap();
        let tokens = Array::from_slice(&[0_u32, 1, 2, 3, 4], [1, 5]).unwrap();
        let hidden = model.forward(&tokens, &mut model.new_cache()).unwrap();
        model.logits(&hidden).unwrap().to_bytes().unwrap()
    })
}

#[track_caller]
fn assert_refused(checkpoint: &TinyCheckpoint, parts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    checkpoint.write(dir.path());
    for fidelity in FIDELITIES {
        let message = match load(dir.path(), fidelity) {
            Ok(_) => panic!("loaded with {fidelity:?}, expected an error with {parts:?}"),
            Err(e) => e.to_string(),
        };
        for part in parts {
            assert!(message.contains(part), "{message:?} does not contain {part:?}");
        }
    }
}

#[track_caller]
fn assert_field_refused(field: &str, value: Value, part: &str) {
    assert_refused(&dense().with(field, value), &["config.json", &format!("field \"{field}\""), part]);
}

/// `checkpoint` with every tensor under another name, or dropped.
fn renamed(mut checkpoint: TinyCheckpoint, rename: impl Fn(&str) -> String) -> TinyCheckpoint {
    checkpoint.tensors = checkpoint.tensors.into_iter().map(|(name, t)| (rename(&name), t)).collect();
    checkpoint
}

/// The tensors as unconverted checkpoints have them.
fn hub(checkpoint: TinyCheckpoint) -> TinyCheckpoint {
    let mut checkpoint = renamed(checkpoint, |name| {
        name.replacen("language_model.model.", "model.language_model.", 1).replacen(
            "language_model.lm_head",
            "lm_head",
            1,
        )
    });
    for (name, tensor) in &mut checkpoint.tensors {
        if name.ends_with("conv1d.weight") {
            tensor.shape.swap(1, 2);
        } else if name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight") {
            // One less than a gain of 1.
            *tensor = Tensor::filled(tensor.dtype, &tensor.shape.clone(), &0_f32.to_le_bytes());
        }
    }
    checkpoint
}

#[test]
fn every_spelling_is_the_same_model() {
    for format in [Format::Dense, AFFINE, Format::Mxfp4, Format::Mxfp8, Format::Nvfp4] {
        let expected = logits(&TinyCheckpoint::qwen3_5(format));
        assert_eq!(logits(&hub(TinyCheckpoint::qwen3_5(format))), expected, "{format:?}");
        let text = renamed(TinyCheckpoint::qwen3_5(format), |name| name.replacen("language_model.", "", 1));
        assert_eq!(logits(&text), expected, "{format:?}");
        assert_eq!(logits(&text.with("model_type", json!("qwen3_5_text"))), expected, "{format:?}");
    }
}

/// `checkpoint` with its config inside of `text_config`, and `field` set there.
fn nested(mut checkpoint: TinyCheckpoint, field: &str, value: Value) -> TinyCheckpoint {
    let mut text = std::mem::take(&mut checkpoint.config);
    text.insert(field.to_owned(), value);
    checkpoint.with("model_type", json!("qwen3_5")).with("text_config", Value::Object(text))
}

#[test]
fn a_nested_config_is_read_and_its_faults_are_named() {
    let nested = |field: &str, value: Value| nested(dense(), field, value);
    assert_eq!(logits(&nested("use_cache", json!(true))), logits(&dense()));
    assert_refused(
        &nested("head_dim", json!("8")),
        &["field \"text_config.head_dim\"", "expected an integer"],
    );
    let parameters = json!({"rope_type": "default", "rope_theta": 0});
    assert_refused(
        &nested("rope_parameters", parameters),
        &["field \"text_config.rope_parameters.rope_theta\""],
    );
    assert_refused(&dense().with("text_config", json!([])), &["field \"text_config\"", "expected an object"]);
}

#[test]
fn the_quantization_of_the_text_model_is_read() {
    let plain = TinyCheckpoint::qwen3_5(Format::Mxfp4);
    let expected = logits(&plain);
    let method = |name: &str| {
        nested(plain.clone().without("quantization"), "quantization_config", json!({"quant_method": name}))
    };
    assert_eq!(logits(&method("mxfp4")), expected);
    let field = "field \"text_config.quantization_config.quant_method\"";
    assert_refused(&method("gptq"), &[field, "'gptq' is not supported"]);
}

#[test]
fn what_is_not_text_is_left_out() {
    let mut checkpoint = dense();
    let extra = Tensor::filled(russet_testing::Dtype::F32, &[3, 5], &1_f32.to_le_bytes());
    for name in ["vision_tower.blocks.0.weight", "model.visual.merger.weight", "mtp.layers.0.norm.weight"] {
        checkpoint.tensors.insert(name.into(), extra.clone());
    }
    assert_eq!(logits(&checkpoint), logits(&dense()));
    checkpoint.tensors.insert("other.weight".into(), extra);
    assert_refused(&checkpoint, &["tensor \"language_model.other.weight\"", "is not part of this model"]);
}

#[test]
fn one_tensor_under_two_names_is_refused() {
    let mut checkpoint = dense();
    let head = checkpoint.tensors["language_model.lm_head.weight"].clone();
    checkpoint.tensors.insert("lm_head.weight".into(), head);
    assert_refused(&checkpoint, &["lm_head.weight", "and another tensor are both"]);
}

#[test]
fn a_tied_head_needs_no_tensor_and_drops_one() {
    let tied = dense().with("tie_word_embeddings", json!(true));
    let mut without = tied.clone();
    without.tensors.remove("language_model.lm_head.weight");
    assert_eq!(logits(&tied), logits(&without));
    assert_refused(
        &without.with("tie_word_embeddings", json!(false)),
        &["language_model.lm_head.weight", "is missing"],
    );
}

#[test]
fn tensors_that_are_missing_or_do_not_fit_are_named() {
    let names: Vec<String> = dense().tensors.keys().cloned().collect();
    for name in names {
        let mut checkpoint = dense();
        checkpoint.tensors.remove(&name);
        assert_refused(&checkpoint, &[&format!("tensor \"{name}\""), "is missing"]);
        let mut checkpoint = dense();
        let tensor = Tensor::filled(russet_testing::Dtype::F32, &[3, 5, 7], &1_f32.to_le_bytes());
        checkpoint.tensors.insert(name.clone(), tensor);
        assert_refused(&checkpoint, &[&format!("tensor \"{name}\""), "has shape"]);
    }
    let mut checkpoint = dense();
    let ints = Tensor::filled(russet_testing::Dtype::I32, &[4], &1_i32.to_le_bytes());
    checkpoint.tensors.insert(format!("{LINEAR}.A_log"), ints);
    assert_refused(&checkpoint, &["A_log", "is int32"]);
}

#[test]
fn sizes_are_checked_before_they_are_used() {
    for field in [
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "full_attention_interval",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ] {
        for value in [json!(0), json!(-4), json!(1.5), json!("4"), json!([]), json!(1_u64 << 40)] {
            assert_field_refused(field, value, "expected an integer");
        }
    }
    for (field, value, part) in [
        ("num_hidden_layers", json!(1 << 20), "is more than 4096"),
        ("num_key_value_heads", json!(3), "does not divide num_attention_heads 4"),
        ("full_attention_interval", json!(3), "leaves none of 2 layers with full attention"),
        ("full_attention_interval", json!(1), "leaves none of 2 layers with linear attention"),
        ("linear_num_key_heads", json!(3), "does not divide linear_num_value_heads 4"),
        ("linear_conv_kernel_dim", json!(1), "is less than 2"),
        ("linear_num_value_heads", json!(1 << 24), "too large a state"),
        ("rms_norm_eps", json!(0), "greater than 0"),
        ("hidden_act", json!("gelu"), "'gelu' is not supported"),
        ("attention_bias", json!(1), "true or false"),
        ("tie_word_embeddings", json!("no"), "true or false"),
        ("layer_types", json!("full_attention"), "a list of strings"),
        ("layer_types", json!(["linear_attention"]), "has 1 entries for 2 layers"),
        ("layer_types", json!(["full_attention", "full_attention"]), "layer 0 is 'full_attention'"),
        ("layer_types", json!(["linear_attention", "sliding\u{1b}[31m"]), "layer 1 is 'sliding\\u{1b}[31m'"),
        ("rope_parameters", json!(4), "expected an object"),
    ] {
        assert_field_refused(field, value, part);
    }
    let huge =
        dense().with("linear_key_head_dim", json!(1 << 24)).with("linear_value_head_dim", json!(1 << 24));
    assert_refused(&huge, &["field \"linear_num_value_heads\"", "too large a state"]);
    let huge = dense().with("num_attention_heads", json!(1 << 24)).with("head_dim", json!(1 << 24));
    assert_refused(&huge, &["field \"num_attention_heads\"", "is too large"]);
    assert_eq!(
        logits(&dense().with("layer_types", json!(["linear_attention", "full_attention"]))),
        logits(&dense())
    );
}

#[test]
fn the_rotary_embedding_is_checked() {
    let parameters = |extra: Value| {
        let mut object = json!({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5});
        object.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        dense().with("rope_parameters", object)
    };
    for (extra, field, part) in [
        (json!({"rope_theta": -1}), "rope_theta", "greater than 0"),
        (json!({"partial_rotary_factor": 0}), "partial_rotary_factor", "greater than 0"),
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor", "1.5 of head_dim 8"),
        (json!({"partial_rotary_factor": 0.1}), "partial_rotary_factor", "not a positive even number"),
        (json!({"partial_rotary_factor": 0.4}), "partial_rotary_factor", "not a positive even number"),
        (json!({"rope_type": "spiral"}), "rope_type", "'spiral' is not supported"),
        (json!({"type": "mrope"}), "mrope_section", "3 numbers"),
        (json!({"type": "linear"}), "factor", "is missing"),
    ] {
        assert_refused(&parameters(extra), &[&format!("field \"rope_parameters.{field}\""), part]);
    }
    // The reference would take its default in silence.
    for field in ["rope_theta", "rope_scaling", "partial_rotary_factor"] {
        let checkpoint = dense().without("rope_parameters").with(field, json!(1e6));
        assert_refused(&checkpoint, &[&format!("field \"{field}\""), "belongs into rope_parameters"]);
    }
}

#[test]
fn the_footprint_counts_the_state_of_recurrent_layers_once() {
    let dir = tempfile::tempdir().unwrap();
    dense().write(dir.path());
    // Tail and memory of the linear layer, in float32.
    let state = 4 * (3 * 64 + 4 * 8 * 8);
    for (fidelity, value_size) in FIDELITIES.into_iter().zip([4, 2]) {
        let model = load(dir.path(), fidelity).unwrap();
        for tokens in [0, 1, 1000] {
            assert_eq!(model.footprint(tokens).kv_cache, tokens * 2 * 2 * 8 * value_size + state);
        }
    }
}
