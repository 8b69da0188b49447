//! Faulty configs and tensors of the dense families besides llama: the error names the field or the tensor.

mod common;

use common::*;
use russet_testing::{Dtype, Format, Tensor, TinyCheckpoint};
use serde_json::{Value, json};

const FORMATS: [Format; 5] =
    [Format::Dense, Format::Affine { bits: 4, group: 32 }, Format::Mxfp4, Format::Mxfp8, Format::Nvfp4];

fn dense(model_type: &str) -> TinyCheckpoint {
    TinyCheckpoint::dense(model_type, Format::Dense)
}

/// A tensor that nobody asked for.
fn spare() -> Tensor {
    Tensor::filled(Dtype::F32, &[4], &1_f32.to_le_bytes())
}

#[test]
fn the_undamaged_checkpoints_run() {
    for model_type in TinyCheckpoint::DENSE_TYPES {
        for format in FORMATS {
            let checkpoint = TinyCheckpoint::dense(model_type, format);
            let whole = assert_runs(&checkpoint);
            let dir = directory();
            checkpoint.write_sharded(dir.path());
            assert_eq!(logits(&load(dir.path()).unwrap()).unwrap(), whole, "{model_type} {format:?}");
        }
    }
}

#[test]
fn required_fields_are_named_when_missing_or_null() {
    let all = ["hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"];
    for (model_type, own) in [
        ("smollm3", &["rms_norm_eps", "vocab_size"][..]),
        ("qwen2", &["rms_norm_eps", "vocab_size", "num_key_value_heads"]),
        (
            "qwen3",
            &[
                "rms_norm_eps",
                "vocab_size",
                "num_key_value_heads",
                "head_dim",
                "max_position_embeddings",
                "tie_word_embeddings",
                "rope_theta",
            ],
        ),
        ("gemma", &["rms_norm_eps", "vocab_size", "num_key_value_heads", "head_dim"]),
        ("gemma2", &["rms_norm_eps", "vocab_size", "num_key_value_heads", "head_dim"]),
        ("phi3", &["rms_norm_eps", "vocab_size"]),
        ("olmo2", &["rms_norm_eps", "vocab_size"]),
        (
            "glm4",
            &[
                "rms_norm_eps",
                "vocab_size",
                "num_key_value_heads",
                "head_dim",
                "attention_bias",
                "partial_rotary_factor",
                "rope_theta",
            ],
        ),
        (
            "granite",
            &[
                "rms_norm_eps",
                "vocab_size",
                "num_key_value_heads",
                "max_position_embeddings",
                "attention_bias",
                "mlp_bias",
                "rope_theta",
                "logits_scaling",
                "attention_multiplier",
                "embedding_multiplier",
                "residual_multiplier",
            ],
        ),
        ("starcoder2", &["num_key_value_heads"]),
    ] {
        for field in all.iter().chain(own) {
            assert_field_refused(&dense(model_type).without(field), field, "is missing");
            assert_field_refused(&dense(model_type).with(field, Value::Null), field, "is missing");
        }
    }
}

#[test]
fn factors_and_caps_are_greater_than_0() {
    for (model_type, fields) in [
        ("gemma2", &["query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"][..]),
        ("glm4", &["partial_rotary_factor", "rope_theta"]),
        (
            "granite",
            &["logits_scaling", "attention_multiplier", "embedding_multiplier", "residual_multiplier"],
        ),
        ("phi3", &["partial_rotary_factor"]),
        ("qwen3", &["rope_theta"]),
        ("starcoder2", &["norm_epsilon"]),
    ] {
        for field in fields {
            for value in [json!(0), json!(-1.5), json!("1"), json!([]), json!(false)] {
                // The fingerprint of a config reads the cap before the graph does.
                let expected = match (*field, value.is_number()) {
                    ("final_logit_softcapping", false) => "expected a finite number",
                    _ => "expected a number greater than 0",
                };
                assert_field_refused(&dense(model_type).with(field, value), field, expected);
            }
        }
    }
}

#[test]
fn flags_are_checked() {
    for (model_type, fields) in [
        ("smollm3", &["attention_bias", "mlp_bias", "tie_word_embeddings", "rope_traditional"][..]),
        ("qwen2", &["tie_word_embeddings", "rope_traditional"]),
        ("qwen3", &["tie_word_embeddings"]),
        ("gemma", &["rope_traditional"]),
        ("gemma2", &["rope_traditional"]),
        ("phi3", &["tie_word_embeddings", "rope_traditional"]),
        ("olmo2", &["attention_bias", "mlp_bias", "tie_word_embeddings", "rope_traditional"]),
        ("glm4", &["attention_bias", "rope_traditional"]),
        ("granite", &["attention_bias", "mlp_bias", "tie_word_embeddings"]),
        ("starcoder2", &["tie_word_embeddings"]),
    ] {
        for field in fields {
            for value in [json!(1), json!("true"), json!([])] {
                assert_field_refused(&dense(model_type).with(field, value), field, "expected true or false");
            }
        }
    }
}

#[test]
fn sizes_are_checked_in_every_family() {
    for model_type in TinyCheckpoint::DENSE_TYPES {
        let field = "num_key_value_heads";
        assert_field_refused(&dense(model_type).with(field, json!(3)), field, "does not divide");
        let field = "num_hidden_layers";
        assert_field_refused(&dense(model_type).with(field, json!(4097)), field, "4096");
        for field in ["hidden_size", "intermediate_size", "vocab_size"] {
            let checkpoint = dense(model_type).with(field, json!(1 << 24)).without("rope_scaling");
            assert_checkpoint_refused(&checkpoint, &["tensor", "the config asks for"]);
        }
        // Heads that are a part of the hidden states ignore the field, but it is still a size.
        if !["granite", "phi3", "qwen2", "starcoder2"].contains(&model_type) {
            assert_field_refused(&dense(model_type).with("head_dim", json!(7)), "head_dim", "even number");
        }
    }
    assert_field_refused(
        &dense("qwen2").with("num_attention_heads", json!(32)),
        "head_dim",
        "positive even number",
    );
}

#[test]
fn a_family_has_its_activation() {
    for (model_type, accepted, refused) in [
        ("qwen3", &["silu", "swish"][..], "gelu"),
        ("phi3", &["silu"], "relu"),
        ("gemma", &["gelu", "gelu_pytorch_tanh"], "silu"),
        ("gemma2", &["gelu", "gelu_pytorch_tanh"], "silu"),
        ("starcoder2", &["gelu", "gelu_pytorch_tanh"], "silu"),
    ] {
        for field in ["hidden_act", "hidden_activation"] {
            for name in accepted {
                assert_runs(&dense(model_type).with(field, json!(name)));
            }
            let checkpoint = dense(model_type).with(field, json!(refused));
            assert_field_refused(&checkpoint, field, &format!("'{refused}' is not supported"));
        }
    }
}

#[test]
fn layers_without_rope_are_listed_for_each_layer() {
    let field = "no_rope_layers";
    for list in [json!([]), json!([1]), json!([1, 0, 1])] {
        assert_field_refused(&dense("smollm3").with(field, list), field, "entries for 2 layers");
    }
    for list in [json!("1, 0"), json!([1, "0"]), json!({ "0": 1 })] {
        assert_field_refused(&dense("smollm3").with(field, list), field, "list of finite numbers");
    }
    let field = "no_rope_layer_interval";
    for interval in [json!(0), json!(-1), json!(1.5), json!("4")] {
        assert_field_refused(&dense("smollm3").with(field, interval), field, "expected an integer from 1");
    }
    assert_runs(&dense("smollm3").without("no_rope_layers").with(field, json!(1)));
}

#[test]
fn layer_types_of_smollm3_fit_its_layers() {
    let field = "layer_types";
    let with = |types: Value| dense("smollm3").with(field, types);
    assert_field_refused(&with(json!(["full_attention"])), field, "has 1 entries for 2 layers");
    assert_field_refused(&with(json!(["full_attention", "linear_attention"])), field, "unknown layer type");
    assert_field_refused(
        &with(json!(["sliding_attention", "sliding_attention"])),
        field,
        "at least one full_attention",
    );
    let sliding = with(json!(["sliding_attention", "full_attention"]));
    assert_field_refused(&sliding, "sliding_window", "is missing");
    assert_runs(&sliding.with("sliding_window", json!(1)));
}

mod ropes {
    use super::*;

    #[test]
    fn unknown_types_are_refused_with_those_known() {
        for model_type in ["smollm3", "qwen2", "qwen3", "olmo2", "granite"] {
            let checkpoint = dense(model_type).with("rope_scaling", json!({ "type": "ntk" }));
            assert_field_refused(
                &checkpoint,
                "rope_scaling.rope_type",
                "'ntk' is not supported (known: default",
            );
        }
        let scaling = json!({ "type": "yarn", "long_factor": [1.0, 2.0] });
        let checkpoint = dense("phi3").with("rope_scaling", scaling);
        assert_field_refused(
            &checkpoint,
            "rope_scaling.type",
            "'yarn' is not supported (known: longrope, su",
        );
    }

    #[test]
    fn scaling_that_a_family_lacks_is_refused() {
        for model_type in ["gemma", "gemma2", "glm4", "starcoder2"] {
            let checkpoint =
                dense(model_type).with("rope_scaling", json!({ "type": "linear", "factor": 2.0 }));
            assert_field_refused(&checkpoint, "rope_scaling", "is not supported for this model type");
        }
        for model_type in TinyCheckpoint::DENSE_TYPES {
            let field = "partial_rotary_factor";
            if !["glm4", "phi3"].contains(&model_type) {
                let checkpoint = dense(model_type).with(field, json!(0.5));
                assert_field_refused(&checkpoint, field, "is not supported for this model type");
                assert_runs(&dense(model_type).with(field, json!(1.0)));
            }
        }
    }

    #[test]
    fn the_rotated_part_of_a_head_is_even_and_inside_of_it() {
        for model_type in ["glm4", "phi3"] {
            // Of 8 channels.
            for part in [0.1, 0.2, 0.4, 0.9, 1.2, 1e300] {
                let checkpoint = dense(model_type).with("partial_rotary_factor", json!(part));
                assert_field_refused(&checkpoint, "partial_rotary_factor", "rotated channels");
            }
        }
    }

    #[test]
    fn the_longrope_of_phi3_is_checked() {
        let scaling = |value: Value| dense("phi3").with("rope_scaling", value);
        let two = json!([1.0, 2.0]);
        for (checkpoint, field, part) in [
            (scaling(json!({ "type": "longrope", "short_factor": two })), "long_factor", "is missing"),
            (scaling(json!({ "long_factor": two, "short_factor": two })), "type", "is missing"),
            (scaling(json!({ "type": "su", "long_factor": two })), "short_factor", "is missing"),
            (
                scaling(json!({ "type": "su", "long_factor": [1, 2, 3], "short_factor": two })),
                "long_factor",
                "has 3 values, expected 2",
            ),
            (
                scaling(json!({ "type": "su", "long_factor": "2", "short_factor": two })),
                "long_factor",
                "list of finite numbers",
            ),
            (scaling(json!({ "type": "linear", "long_factor": [] })), "factor", "is missing"),
        ] {
            assert_field_refused(&checkpoint, &format!("rope_scaling.{field}"), part);
        }
        assert_field_refused(&scaling(json!([1.0])), "rope_scaling", "expected an object");
        let field = "original_max_position_embeddings";
        assert_field_refused(&dense("phi3").with(field, json!(1)), field, "greater than 1");
        assert_field_refused(&dense("phi3").with(field, json!(0)), field, "expected an integer from 1");
    }

    #[test]
    fn rope_parameters_of_qwen3_stand_in_for_both_fields() {
        let with =
            |parameters: Value| dense("qwen3").without("rope_theta").with("rope_parameters", parameters);
        assert_runs(&with(json!({ "rope_theta": 1e6, "rope_type": "default" })));
        for (parameters, field, part) in [
            (json!({ "rope_type": "default" }), "rope_theta", "is missing"),
            (json!({ "rope_theta": 0, "rope_type": "default" }), "rope_theta", "greater than 0"),
            (json!({ "rope_theta": 1e6, "rope_type": "ntk" }), "rope_type", "'ntk' is not supported"),
            (json!({ "rope_theta": 1e6, "rope_type": "linear" }), "factor", "is missing"),
            (
                json!({ "rope_theta": 1e6, "partial_rotary_factor": 0.5 }),
                "partial_rotary_factor",
                "is not supported for this model type",
            ),
        ] {
            assert_field_refused(&with(parameters), &format!("rope_parameters.{field}"), part);
        }
        assert_field_refused(&with(json!("default")), "rope_parameters", "expected an object");
    }
}

mod tensors {
    use super::*;

    #[test]
    fn every_tensor_is_needed() {
        for model_type in TinyCheckpoint::DENSE_TYPES {
            for name in dense(model_type).tensors.keys() {
                let mut checkpoint = dense(model_type);
                checkpoint.tensors.remove(name);
                assert_tensor_refused(&checkpoint, name, "is missing from the weight files");
            }
        }
    }

    #[test]
    fn every_tensor_has_the_shape_of_the_config() {
        for model_type in TinyCheckpoint::DENSE_TYPES {
            for name in dense(model_type).tensors.keys() {
                let mut checkpoint = dense(model_type);
                checkpoint.tensors.insert(name.clone(), spare());
                assert_tensor_refused(&checkpoint, name, "has shape [4], the config asks for");
            }
        }
    }

    #[test]
    fn parts_of_packed_fused_matrices_have_their_shapes() {
        for (model_type, name) in
            [("phi3", "model.layers.0.self_attn.qkv_proj"), ("glm4", "model.layers.1.mlp.gate_up_proj")]
        {
            for part in ["weight", "scales", "biases"] {
                let mut checkpoint = TinyCheckpoint::dense(model_type, FORMATS[1]);
                let name = format!("{name}.{part}");
                let tensor = checkpoint.tensors.get_mut(&name).unwrap();
                tensor.shape[0] -= 1;
                let row = tensor.data.len() / (tensor.shape[0] + 1);
                tensor.data.truncate(row * tensor.shape[0]);
                assert_tensor_refused(&checkpoint, &name, "the config asks for");
            }
        }
    }

    #[test]
    fn only_what_the_reference_drops_is_dropped() {
        const INV_FREQ: &str = "model.layers.0.self_attn.rotary_emb.inv_freq";
        const HEAD: &str = "lm_head.weight";
        for (model_type, dropped, refused) in [
            ("smollm3", &[INV_FREQ, HEAD][..], &[][..]),
            ("qwen2", &[INV_FREQ, HEAD], &[]),
            ("qwen3", &[HEAD], &[INV_FREQ]),
            ("granite", &[HEAD], &[INV_FREQ]),
            ("olmo2", &[INV_FREQ], &[HEAD]),
            ("gemma", &[], &[INV_FREQ, HEAD]),
            ("gemma2", &[], &[INV_FREQ, HEAD]),
            ("phi3", &[], &[INV_FREQ, HEAD]),
            ("starcoder2", &[], &[INV_FREQ, HEAD]),
            ("glm4", &[], &[INV_FREQ]),
        ] {
            let tied = || {
                let mut checkpoint = dense(model_type);
                if model_type != "glm4" {
                    checkpoint.tensors.remove(HEAD);
                }
                checkpoint.with("tie_word_embeddings", json!(true))
            };
            let plain = assert_runs(&tied());
            for name in dropped {
                let mut checkpoint = tied();
                checkpoint.tensors.insert((*name).to_owned(), spare());
                assert_eq!(assert_runs(&checkpoint), plain, "{model_type} with {name}");
            }
            for name in refused {
                let mut checkpoint = tied();
                checkpoint.tensors.insert((*name).to_owned(), spare());
                assert_tensor_refused(&checkpoint, name, "is not part of this model");
            }
        }
    }
}
