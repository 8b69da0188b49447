//! Damaged and hostile checkpoints: each is refused with an error that names the file and the field or
//! tensor, and nothing panics.

mod common;

use std::fs;
use std::path::Path;

use common::*;
use proptest::prelude::*;
use russet_mlx::Array;
use russet_model::{Error, WeightFiles};
use russet_testing::{Dtype, Format, Tensor, TinyCheckpoint};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

const AFFINE: Format = Format::Affine { bits: 4, group: 32 };
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
const UP_PROJ: &str = "model.layers.0.mlp.up_proj";

fn dense() -> TinyCheckpoint {
    TinyCheckpoint::llama(Format::Dense)
}

#[test]
fn the_undamaged_checkpoints_run() {
    for format in [Format::Dense, AFFINE, Format::Mxfp4, Format::Mxfp8, Format::Nvfp4] {
        let checkpoint = TinyCheckpoint::llama(format);
        let whole = assert_runs(&checkpoint);
        let dir = directory();
        checkpoint.write_sharded(dir.path());
        assert_eq!(logits(&load(dir.path()).unwrap()).unwrap(), whole, "{format:?}");
    }
}

mod directories {
    use super::*;

    #[test]
    fn a_missing_directory_is_named() {
        let dir = directory();
        assert_refused(&dir.path().join("none"), &["none", "No such file"]);
    }

    #[test]
    fn a_file_is_no_checkpoint_directory() {
        let dir = directory();
        let file = dir.path().join("model.gguf");
        fs::write(&file, "GGUF").unwrap();
        assert_refused(&file, &["model.gguf", "is not a directory"]);
        assert_refused(&file.join("sub"), &["model.gguf/sub"]);
    }

    #[test]
    fn an_empty_directory_lacks_a_config() {
        let dir = directory();
        assert_refused(dir.path(), &[dir.path().to_str().unwrap(), "has no config.json"]);
    }

    #[test]
    fn a_directory_without_weights_is_named() {
        let dir = directory();
        dense().write(dir.path());
        fs::remove_file(dir.path().join(WEIGHTS)).unwrap();
        assert_refused(dir.path(), &[dir.path().to_str().unwrap(), "has no model*.safetensors"]);
    }

    #[test]
    fn directories_are_not_files() {
        for name in ["config.json", WEIGHTS, INDEX] {
            let dir = directory();
            dense().write(dir.path());
            let _ = fs::remove_file(dir.path().join(name));
            fs::create_dir(dir.path().join(name)).unwrap();
            assert_refused(dir.path(), &[name, "is not a regular file"]);
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_does_not_block_loading() {
        for name in ["config.json", WEIGHTS, INDEX] {
            let dir = directory();
            dense().write(dir.path());
            let path = dir.path().join(name);
            let _ = fs::remove_file(&path);
            assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
            assert_refused(dir.path(), &[name, "is not a regular file"]);
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_dangling_link_is_named() {
        let dir = directory();
        dense().write(dir.path());
        let path = dir.path().join(WEIGHTS);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("gone", &path).unwrap();
        assert_refused(dir.path(), &[WEIGHTS, "No such file"]);
    }

    #[test]
    fn a_generation_config_that_does_not_parse_is_ignored() {
        for text in ["{", "[]", ""] {
            let dir = directory();
            dense().write(dir.path());
            fs::write(dir.path().join("generation_config.json"), text).unwrap();
            assert!(load(dir.path()).unwrap().checkpoint().generation_config().is_empty());
        }
    }
}

mod config {
    use super::*;

    #[track_caller]
    fn assert_text_refused(text: impl AsRef<[u8]>, part: &str) {
        let dir = directory();
        dense().write(dir.path());
        fs::write(dir.path().join("config.json"), text).unwrap();
        assert_refused(dir.path(), &["config.json", part]);
    }

    #[test]
    fn only_a_json_object_is_a_config() {
        for text in ["", "{", "{\"a\" 1}", "{} {}", "{\"rope_theta\": NaN}", "{\"rope_theta\": 1e999}", "\0"]
        {
            assert_text_refused(text, "is not valid JSON");
        }
        assert_text_refused(b"{\"model_type\": \"\xff\"}", "is not valid JSON");
        for text in ["[]", "null", "1", "\"llama\""] {
            assert_text_refused(text, "is not a JSON object");
        }
    }

    #[test]
    fn deep_nesting_is_refused_without_recursing_into_it() {
        assert_text_refused("[".repeat(1 << 20), "recursion limit");
        assert_text_refused("{\"a\":".repeat(1 << 20), "recursion limit");
    }

    #[test]
    fn a_config_of_absurd_length_is_not_read() {
        let dir = directory();
        fs::File::create(dir.path().join("config.json")).unwrap().set_len(1 << 40).unwrap();
        assert_refused(dir.path(), &["config.json", "is larger than 64 MiB"]);
    }

    #[test]
    fn required_fields_are_named_when_missing_or_null() {
        for field in [
            "model_type",
            "hidden_size",
            "num_hidden_layers",
            "intermediate_size",
            "num_attention_heads",
            "rms_norm_eps",
            "vocab_size",
        ] {
            assert_field_refused(&dense().without(field), field, "is missing");
            assert_field_refused(&dense().with(field, Value::Null), field, "is missing");
        }
    }

    #[test]
    fn sizes_are_positive_integers_of_a_sane_range() {
        let absurd = [
            json!(0),
            json!(-1),
            json!((1 << 24) + 1),
            json!(1_u64 << 40),
            json!(u64::MAX),
            json!(i64::MIN),
            json!(1e300),
            json!(32.0),
            json!(1.5),
            json!("32"),
            json!(true),
            json!([32]),
            json!({ "size": 32 }),
        ];
        for field in [
            "hidden_size",
            "num_hidden_layers",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        ] {
            for value in &absurd {
                assert_field_refused(
                    &dense().with(field, value.clone()),
                    field,
                    "expected an integer from 1 to",
                );
            }
        }
    }

    #[test]
    fn sizes_whose_product_overflows_are_refused() {
        let huge = json!(1 << 24);
        let checkpoint = dense().with("head_dim", huge.clone());
        for (heads, kv_heads, field) in
            [(1 << 24, 1, "num_attention_heads"), (256, 256, "num_attention_heads")]
        {
            let checkpoint = checkpoint
                .clone()
                .with("num_attention_heads", json!(heads))
                .with("num_key_value_heads", json!(kv_heads));
            assert_field_refused(&checkpoint, field, "is too large");
        }
        // Whatever is not too large to describe must still fit the tensors.
        for field in ["hidden_size", "intermediate_size", "vocab_size"] {
            assert_checkpoint_refused(&dense().with(field, huge.clone()), &["tensor", "the config asks for"]);
        }
    }

    #[test]
    fn more_layers_than_any_model_has_are_refused() {
        for count in [4097, 1 << 24] {
            assert_field_refused(
                &dense().with("num_hidden_layers", json!(count)),
                "num_hidden_layers",
                "4096",
            );
        }
    }

    #[test]
    fn heads_must_fit_each_other() {
        let field = "num_key_value_heads";
        for kv_heads in [3, 5, 8] {
            assert_field_refused(&dense().with(field, json!(kv_heads)), field, "does not divide");
        }
        for head_dim in [1, 7] {
            assert_field_refused(
                &dense().with("head_dim", json!(head_dim)),
                "head_dim",
                "positive even number",
            );
        }
        // More heads than channels, so that the default would be 0.
        let checkpoint = dense().with("num_attention_heads", json!(64));
        assert_field_refused(&checkpoint, "head_dim", "positive even number");
    }

    #[test]
    fn positive_numbers_are_checked() {
        for field in ["rms_norm_eps", "rope_theta"] {
            for value in [json!(0), json!(-1e-5), json!("1e-5"), json!([]), json!(false)] {
                assert_field_refused(&dense().with(field, value), field, "expected a number greater than 0");
            }
        }
    }

    #[test]
    fn flags_are_checked() {
        for field in
            ["attention_bias", "mlp_bias", "tie_word_embeddings", "rope_traditional", "quantize_activations"]
        {
            for value in [json!(0), json!("true"), json!([true]), json!({})] {
                assert_field_refused(&dense().with(field, value), field, "expected true or false");
            }
        }
    }

    #[test]
    fn an_unsupported_model_type_is_refused_with_those_supported() {
        let field = "model_type";
        for name in ["gpt2", "LLAMA", "", "../llama"] {
            assert_field_refused(&dense().with(field, json!(name)), field, "is not supported; dedicated: ");
        }
        assert_field_refused(&dense().with(field, json!(["llama"])), field, "expected a string");
        assert_field_refused(&dense().with(field, json!("\u{1b}[2J")), field, "'\\u{1b}[2J'");
    }

    #[test]
    fn an_unsupported_activation_is_refused() {
        let field = "hidden_act";
        for name in ["gelu", "relu", "silu\n", ""] {
            assert_field_refused(&dense().with(field, json!(name)), field, "is not supported");
        }
        assert_field_refused(&dense().with(field, json!(1)), field, "expected a string");
        assert_runs(&dense().with(field, json!("silu")));
    }

    #[test]
    fn layer_types_must_fit_the_layers() {
        let field = "layer_types";
        let (full, sliding) = ("full_attention", "sliding_attention");
        for (value, part) in [
            (json!([full]), "has 1 entries for 2 layers"),
            (json!([full, full, full]), "has 3 entries for 2 layers"),
            (json!([]), "has 0 entries for 2 layers"),
            (json!([full, "linear_attention"]), "unknown layer type 'linear_attention'"),
            (json!([full, "\u{7}"]), "unknown layer type '\\u{7}'"),
            (json!([full, 1]), "expected a list of strings"),
            (json!(full), "expected a list of strings"),
            (json!([sliding, sliding]), "at least one full_attention"),
        ] {
            let checkpoint = dense().with(field, value).with("sliding_window", json!(8));
            assert_field_refused(&checkpoint, field, part);
        }
        let mixed = dense().with(field, json!([sliding, full]));
        assert_field_refused(&mixed, "sliding_window", "is missing");
        for value in [json!(0), json!(-8), json!(1e300), json!(1_u64 << 40), json!("8")] {
            assert_field_refused(
                &mixed.clone().with("sliding_window", value),
                "sliding_window",
                "expected an integer",
            );
        }
        for window in [1, 2, 1 << 24] {
            assert_runs(&mixed.clone().with("sliding_window", json!(window)));
        }
    }

    #[test]
    fn unknown_rope_types_are_refused_with_those_known() {
        for name in ["su", "ntk", "YARN", "llama4", "axial", "none", "\u{1b}c"] {
            for key in ["type", "rope_type"] {
                let checkpoint = dense().with("rope_scaling", json!({ key: name, "factor": 2.0 }));
                assert_field_refused(
                    &checkpoint,
                    "rope_scaling.rope_type",
                    "is not supported (known: default",
                );
            }
        }
        let checkpoint = dense().with("rope_scaling", json!({ "rope_type": 1 }));
        assert_field_refused(&checkpoint, "rope_scaling.rope_type", "expected a string");
        for value in [json!("linear"), json!([]), json!(1)] {
            assert_field_refused(&dense().with("rope_scaling", value), "rope_scaling", "expected an object");
        }
    }

    #[test]
    fn parameters_of_ropes_are_checked() {
        let numbers = |count: usize| Value::from(vec![1.0; count]);
        for (scaling, field, part) in [
            (json!({ "type": "linear" }), "factor", "is missing"),
            (json!({ "type": "linear", "factor": 0 }), "factor", "greater than 0"),
            (json!({ "type": "linear", "factor": "2" }), "factor", "greater than 0"),
            (json!({ "type": "dynamic" }), "factor", "is missing"),
            (json!({ "type": "llama3" }), "factor", "is missing"),
            (
                json!({ "type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4 }),
                "high_freq_factor",
                "must differ",
            ),
            (
                json!({ "type": "llama3", "factor": 2, "low_freq_factor": -1 }),
                "low_freq_factor",
                "greater than 0",
            ),
            (json!({ "type": "yarn" }), "factor", "is missing"),
            (json!({ "type": "yarn", "factor": 2, "beta_fast": 0 }), "beta_fast", "greater than 0"),
            (json!({ "type": "deepseek_yarn", "factor": 2, "mscale": "1" }), "mscale", "finite number"),
            (json!({ "type": "longrope" }), "original_max_position_embeddings", "is missing"),
            (
                json!({ "type": "longrope", "original_max_position_embeddings": 32 }),
                "short_factor",
                "is missing",
            ),
            (
                json!({ "type": "longrope", "original_max_position_embeddings": 32, "short_factor": numbers(4) }),
                "long_factor",
                "is missing",
            ),
            (
                json!({ "type": "longrope", "original_max_position_embeddings": 32, "short_factor": numbers(4),
                        "long_factor": numbers(5) }),
                "long_factor",
                "has 5 values, expected 4",
            ),
            (
                json!({ "type": "longrope", "original_max_position_embeddings": 32, "short_factor": numbers(4),
                        "long_factor": [1, 1, 1, "1"] }),
                "long_factor",
                "list of finite numbers",
            ),
            (
                json!({ "type": "longrope", "original_max_position_embeddings": 1, "short_factor": numbers(4),
                        "long_factor": numbers(4) }),
                "original_max_position_embeddings",
                "greater than 1",
            ),
            (
                json!({ "type": "proportional", "partial_rotary_factor": 1.5 }),
                "partial_rotary_factor",
                "must not be greater than 1",
            ),
            (json!({ "type": "mrope" }), "mrope_section", "list of 3 numbers"),
            (json!({ "type": "mrope", "mrope_section": [1, 1] }), "mrope_section", "list of 3 numbers"),
        ] {
            let checkpoint = dense().with("rope_scaling", scaling);
            assert_field_refused(&checkpoint, &format!("rope_scaling.{field}"), part);
        }
        for name in ["dynamic", "longrope"] {
            let scaling = json!({ "type": name, "factor": 2, "original_max_position_embeddings": 32 });
            let checkpoint = dense().without("max_position_embeddings").with("rope_scaling", scaling);
            assert_field_refused(&checkpoint, "rope_scaling.rope_type", "max_position_embeddings");
        }
        let narrow = dense()
            .with("head_dim", json!(2))
            .with("rope_scaling", json!({ "type": "dynamic", "factor": 2 }));
        assert_field_refused(&narrow, "rope_scaling.rope_type", "more than 2 rotary dimensions");
    }

    #[test]
    fn extreme_but_legal_numbers_run() {
        for theta in [1e-300, 1.0, 1e300] {
            for scaling in [
                json!(null),
                json!({ "type": "linear", "factor": 1e-300 }),
                json!({ "type": "dynamic", "factor": 1e300 }),
                json!({ "type": "llama3", "factor": 1e300, "low_freq_factor": 1e-300 }),
                json!({ "type": "yarn", "factor": 1e300, "beta_fast": 1e-300, "mscale": -1e300 }),
                json!({ "type": "proportional", "partial_rotary_factor": 1e-300, "factor": 1e300 }),
            ] {
                assert_runs(&dense().with("rope_theta", json!(theta)).with("rope_scaling", scaling));
            }
        }
        assert_runs(&dense().with("rms_norm_eps", json!(1e-300)));
        assert_runs(&dense().with("rms_norm_eps", json!(1e300)));
    }
}

mod quantization {
    use super::*;

    fn affine() -> TinyCheckpoint {
        TinyCheckpoint::llama(AFFINE)
    }

    fn quantization(value: &Value) -> Map<String, Value> {
        let mut map = affine().config["quantization"].as_object().unwrap().clone();
        map.extend(value.as_object().unwrap().clone());
        map
    }

    /// The checkpoint with `value`'s fields merged into the quantization of the config.
    fn with(value: Value) -> TinyCheckpoint {
        affine().with("quantization", quantization(&value).into())
    }

    #[test]
    fn unknown_modes_bits_and_group_sizes_are_refused() {
        for (value, field, part) in [
            (json!({ "mode": "int4" }), "mode", "unknown quantization mode 'int4'"),
            (json!({ "mode": "" }), "mode", "unknown quantization mode"),
            (json!({ "mode": 4 }), "mode", "expected a string"),
            (json!({ "bits": 1 }), "bits", "1 is not one of"),
            (json!({ "bits": 7 }), "bits", "7 is not one of"),
            (json!({ "bits": 16 }), "bits", "16 is not one of"),
            (json!({ "bits": 0 }), "bits", "expected an integer from 1"),
            (json!({ "bits": -4 }), "bits", "expected an integer from 1"),
            (json!({ "bits": 1e300 }), "bits", "expected an integer from 1"),
            (json!({ "bits": "4" }), "bits", "expected an integer from 1"),
            (json!({ "group_size": 16 }), "group_size", "16 is not one of"),
            (json!({ "group_size": 256 }), "group_size", "256 is not one of"),
            (json!({ "group_size": 0 }), "group_size", "expected an integer from 1"),
            (json!({ "group_size": 1_u64 << 40 }), "group_size", "expected an integer from 1"),
            (json!({ "mode": "mxfp4", "group_size": 64 }), "group_size", "of mode mxfp4"),
            (json!({ "mode": "mxfp4", "bits": 8 }), "bits", "of mode mxfp4"),
            (json!({ "mode": "mxfp8" }), "bits", "of mode mxfp8"),
            (json!({ "mode": "nvfp4" }), "group_size", "of mode nvfp4"),
        ] {
            assert_field_refused(&with(value.clone()), &format!("quantization.{field}"), part);
            // The same in the choice for one module.
            let module = with(json!({ UP_PROJ: quantization(&value) }));
            assert_field_refused(&module, &format!("quantization.{UP_PROJ}.{field}"), part);
        }
        for value in [json!(true), json!([4]), json!("affine")] {
            assert_field_refused(&affine().with("quantization", value), "quantization", "expected an object");
        }
    }

    #[test]
    fn methods_of_other_tools_are_refused() {
        let dense = |value| affine().without("quantization").with("quantization_config", value);
        for method in ["awq", "gptq", "bitnet", "fp8", "\u{1b}["] {
            let checkpoint = dense(json!({ "quant_method": method }));
            assert_field_refused(&checkpoint, "quantization_config.quant_method", "is not supported");
        }
        assert_field_refused(&dense(json!({})), "quantization_config.quant_method", "is missing");
    }

    #[test]
    fn a_packed_module_that_the_config_leaves_dense_is_refused() {
        let name = format!("{UP_PROJ}.weight");
        assert_tensor_refused(&with(json!({ UP_PROJ: false })), &name, "the config asks for [64, 32]");
        let everything = affine().without("quantization");
        assert_tensor_refused(&everything, "model.embed_tokens.weight", "the config asks for [48, 32]");
    }

    #[test]
    fn a_dense_module_that_the_config_has_packed_is_refused() {
        let dense_module = |choice: Value| {
            let mut checkpoint = with(json!({ UP_PROJ: choice }));
            for part in ["scales", "biases"] {
                checkpoint.tensors.remove(&format!("{UP_PROJ}.{part}"));
            }
            let weight = dense().tensors[&format!("{UP_PROJ}.weight")].clone();
            checkpoint.tensors.insert(format!("{UP_PROJ}.weight"), weight);
            checkpoint
        };
        for choice in [json!(true), json!({ "group_size": 32 })] {
            assert_tensor_refused(&dense_module(choice), &format!("{UP_PROJ}.weight"), "the config asks for");
        }
        assert_runs(&dense_module(json!(false)));
        // Nothing said: no scales, so it is dense.
        assert_runs(&dense_module(json!(null)));
    }

    #[test]
    fn choices_for_modules_that_agree_with_the_tensors_change_nothing() {
        let plain = assert_runs(&affine());
        let explicit = json!({ "group_size": 32, "bits": 4, "mode": "affine" });
        // A missing mode is affine.
        for choice in
            [json!(true), explicit, json!({ "group_size": 32, "bits": 4 }), json!("a note"), json!(null)]
        {
            assert_eq!(assert_runs(&with(json!({ UP_PROJ: choice }))), plain, "{choice}");
        }
        // A module that the config does not name is what its tensors say, whatever the default is.
        assert_eq!(assert_runs(&with(json!({ "group_size": 64, "bits": 8 }))), plain);
    }

    #[test]
    fn a_missing_mode_is_affine_whatever_the_default_is() {
        let mut checkpoint = TinyCheckpoint::llama(Format::Mxfp4);
        let choice = json!({ "group_size": 32, "bits": 4 });
        checkpoint.config["quantization"][UP_PROJ] = choice;
        assert_tensor_refused(&checkpoint, &format!("{UP_PROJ}.scales"), "is uint8, expected float32 or");
    }

    #[test]
    fn packing_that_cannot_be_inferred_is_refused() {
        let scales = |dtype, shape: &[usize]| {
            let mut checkpoint = affine();
            let size = if dtype == Dtype::U8 { 1 } else { 4 };
            let tensor = Tensor::filled(dtype, shape, &vec![0; size]);
            checkpoint.tensors.insert(format!("{UP_PROJ}.scales"), tensor);
            checkpoint
        };
        assert_tensor_refused(&scales(Dtype::F32, &[64, 0]), UP_PROJ, "empty scales");
        assert_tensor_refused(&scales(Dtype::F32, &[]), UP_PROJ, "empty scales");
        assert_tensor_refused(&scales(Dtype::F32, &[64, 32]), UP_PROJ, "group_size 1 is not one of");
        assert_tensor_refused(&scales(Dtype::F32, &[64, 33]), UP_PROJ, "group_size 0 is not one of");
        assert_tensor_refused(&scales(Dtype::U8, &[64, 4]), UP_PROJ, "no known mode: 4 bits, group size 8");
        for (columns, bits) in [(0, 0), (1, 1), (1 << 20, 1 << 20)] {
            let mut checkpoint = affine();
            let weight = Tensor::filled(Dtype::U32, &[1, columns], &[0; 4]);
            checkpoint.tensors.insert(format!("{UP_PROJ}.weight"), weight);
            assert_tensor_refused(&checkpoint, UP_PROJ, &format!("bits {bits} is not one of"));
        }
    }

    #[test]
    fn columns_that_no_group_divides_are_refused() {
        let group = |group| with(json!({ UP_PROJ: { "group_size": group, "bits": 4 } }));
        for size in [64, 128] {
            let part = format!("32 columns are no multiple of group size {size}");
            assert_tensor_refused(&group(size), UP_PROJ, &part);
        }
    }

    #[test]
    fn nvfp4_rows_may_end_in_half_a_block_of_32() {
        let mut checkpoint = TinyCheckpoint::llama(Format::Nvfp4).with("intermediate_size", json!(48));
        for layer in 0..2 {
            for (name, rows, columns) in [("gate_proj", 48, 32), ("up_proj", 48, 32), ("down_proj", 32, 48)] {
                let name = format!("model.layers.{layer}.mlp.{name}");
                let weight = Tensor::filled(Dtype::U32, &[rows, columns / 8], &[0x35; 4]);
                checkpoint.tensors.insert(format!("{name}.weight"), weight);
                let scales = Tensor::filled(Dtype::U8, &[rows, columns / 16], &[0x20]);
                checkpoint.tensors.insert(format!("{name}.scales"), scales);
            }
        }
        assert_runs(&checkpoint);
    }

    #[test]
    fn quantized_activations_need_a_mode_that_has_them() {
        for format in [AFFINE, Format::Mxfp4] {
            let checkpoint = TinyCheckpoint::llama(format).with("quantize_activations", json!(true));
            assert_checkpoint_refused(
                &checkpoint,
                &["tensor \"model.layers.0.self_attn.q_proj\"", "quantize_activations"],
            );
        }
        for format in [Format::Nvfp4, Format::Mxfp8] {
            let dir = directory();
            TinyCheckpoint::llama(format).with("quantize_activations", json!(true)).write(dir.path());
            let model = load(dir.path()).unwrap();
            let token = Array::from_slice(&[1_u32], [1, 1]).unwrap();
            model.forward(&token, &mut model.new_cache()).unwrap().eval().unwrap();
        }
    }
}

mod tensors {
    use super::*;

    /// Checks the error after `change` to the tensor `name`.
    #[track_caller]
    fn assert_change_refused(format: Format, name: &str, part: &str, change: impl FnOnce(&mut Tensor)) {
        let mut checkpoint = TinyCheckpoint::llama(format);
        change(checkpoint.tensors.get_mut(name).unwrap());
        assert_tensor_refused(&checkpoint, name, part);
    }

    #[test]
    fn dense_tensors_must_be_floats() {
        for name in [
            "model.embed_tokens.weight",
            "lm_head.weight",
            "model.norm.weight",
            "model.layers.1.mlp.up_proj.weight",
        ] {
            for (dtype, size, shown) in [
                (Dtype::I32, 4, "is int32"),
                (Dtype::U32, 4, "is uint32"),
                (Dtype::F64, 8, "is float64"),
                (Dtype::BOOL, 1, "is bool"),
                (Dtype::I64, 8, "is int64"),
            ] {
                assert_change_refused(Format::Dense, name, shown, |tensor| {
                    *tensor = Tensor::filled(dtype, &tensor.shape, &vec![0; size]);
                });
            }
        }
    }

    #[test]
    fn shapes_must_be_those_of_the_config() {
        let names = [
            ("model.embed_tokens.weight", "[48, 32]"),
            ("lm_head.weight", "[48, 32]"),
            ("model.norm.weight", "[32]"),
            ("model.layers.0.input_layernorm.weight", "[32]"),
            ("model.layers.1.self_attn.k_proj.weight", "[16, 32]"),
            ("model.layers.1.mlp.down_proj.weight", "[32, 64]"),
        ];
        for (name, expected) in names {
            for shape in [&[][..], &[0], &[31], &[32, 1], &[32, 48], &[48, 32, 1], &[49, 32], &[0, 0]] {
                let part = format!("has shape {shape:?}, the config asks for {expected}");
                assert_change_refused(Format::Dense, name, &part, |tensor| {
                    *tensor = Tensor::filled(Dtype::F32, shape, &[0; 4]);
                });
            }
        }
    }

    #[test]
    fn parts_of_packed_matrices_have_their_dtypes_and_shapes() {
        for module in ["model.embed_tokens", UP_PROJ, "lm_head"] {
            let part = |part: &str| format!("{module}.{part}");
            let of = |dtype, size| {
                move |tensor: &mut Tensor| *tensor = Tensor::filled(dtype, &tensor.shape, &vec![0; size])
            };
            let rows = |dtype, size| {
                move |tensor: &mut Tensor| {
                    let shape = [tensor.shape[0] + 1, tensor.shape[1]];
                    *tensor = Tensor::filled(dtype, &shape, &vec![0; size]);
                }
            };
            for (dtype, size, shown) in [(Dtype::I32, 4, "is int32"), (Dtype::F32, 4, "is float32")] {
                let shown = format!("{shown}, expected uint32");
                assert_change_refused(AFFINE, &part("weight"), &shown, of(dtype, size));
                assert_change_refused(Format::Mxfp8, &part("weight"), &shown, of(dtype, size));
            }
            assert_change_refused(AFFINE, &part("weight"), "the config asks for", rows(Dtype::U32, 4));
            assert_change_refused(AFFINE, &part("scales"), "is int32, expected float32", of(Dtype::I32, 4));
            assert_change_refused(AFFINE, &part("scales"), "the config asks for", rows(Dtype::F32, 4));
            assert_change_refused(AFFINE, &part("biases"), "is uint8, expected float32", of(Dtype::U8, 1));
            assert_change_refused(
                AFFINE,
                &part("biases"),
                "is bfloat16, expected float32",
                of(Dtype::BF16, 2),
            );
            assert_change_refused(AFFINE, &part("biases"), "the config asks for", rows(Dtype::F32, 4));
            assert_change_refused(Format::Nvfp4, &part("scales"), "the config asks for", rows(Dtype::U8, 1));
        }
    }

    #[test]
    fn every_tensor_is_needed() {
        for format in [Format::Dense, AFFINE, Format::Nvfp4] {
            let whole = TinyCheckpoint::llama(format);
            for name in whole.tensors.keys() {
                let mut checkpoint = whole.clone();
                checkpoint.tensors.remove(name);
                // Without its scales a matrix counts as dense, and without its words as no packing.
                let module = name.rsplit_once('.').unwrap().0;
                assert_checkpoint_refused(&checkpoint, &[&format!("tensor \"{module}")]);
            }
        }
        let mut checkpoint = dense();
        checkpoint.tensors.remove("model.norm.weight");
        assert_tensor_refused(&checkpoint, "model.norm.weight", "is missing from the weight files");
    }

    #[test]
    fn no_other_tensor_is_accepted() {
        for name in [
            "model.layers.2.input_layernorm.weight",
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.0.mlp.up_proj.bias",
            "model.layers.0.mlp.up_proj.scales",
            "model.norm.bias",
            "vision.weight",
            "",
        ] {
            let mut checkpoint = dense();
            checkpoint.tensors.insert(name.into(), Tensor::filled(Dtype::F32, &[32], &[0; 4]));
            assert_tensor_refused(&checkpoint, name, "is not part of this model (1 such tensors)");
        }
        let mut checkpoint = TinyCheckpoint::llama(Format::Mxfp4);
        let biases = checkpoint.tensors[&format!("{UP_PROJ}.scales")].clone();
        checkpoint.tensors.insert(format!("{UP_PROJ}.biases"), biases);
        assert_tensor_refused(&checkpoint, &format!("{UP_PROJ}.biases"), "is not part of this model");
    }

    #[test]
    fn names_in_errors_cannot_command_a_terminal() {
        let mut checkpoint = dense();
        checkpoint.tensors.insert("\u{1b}[2J".into(), Tensor::filled(Dtype::F32, &[1], &[0; 4]));
        assert_tensor_refused(&checkpoint, "\\u{1b}[2J", "is not part of this model");
    }

    #[test]
    fn biases_that_the_config_promises_are_needed() {
        for (flag, name) in [
            ("attention_bias", "model.layers.0.self_attn.q_proj.bias"),
            ("mlp_bias", "model.layers.0.mlp.gate_proj.bias"),
        ] {
            let checkpoint = dense().with(flag, json!(true));
            assert_tensor_refused(&checkpoint, name, "is missing");
        }
    }

    #[test]
    fn fewer_or_more_layers_than_the_config_has_are_refused() {
        let layers = |count| dense().with("num_hidden_layers", json!(count));
        assert_checkpoint_refused(&layers(1), &["tensor \"model.layers.1.", "is not part of this model"]);
        assert_tensor_refused(&layers(3), "model.layers.2.input_layernorm.weight", "is missing");
        assert_tensor_refused(&layers(4096), "model.layers.2.input_layernorm.weight", "is missing");
    }

    #[test]
    fn leftovers_that_the_reference_drops_are_dropped() {
        let mut tied = dense().with("tie_word_embeddings", json!(true));
        let with_head = assert_runs(&tied);
        tied.tensors.remove("lm_head.weight");
        assert_eq!(assert_runs(&tied), with_head);

        let mut leftover = dense();
        let frequencies = Tensor::filled(Dtype::F32, &[4], &1_f32.to_le_bytes());
        leftover.tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), frequencies);
        assert_eq!(assert_runs(&leftover), assert_runs(&dense()));
    }

    #[test]
    fn an_untied_head_is_needed() {
        let mut checkpoint = dense();
        checkpoint.tensors.remove("lm_head.weight");
        assert_tensor_refused(&checkpoint, "lm_head.weight", "is missing");
    }

    #[test]
    fn token_ids_outside_the_vocabulary_are_named() {
        let dir = directory();
        dense().write(dir.path());
        let model = load(dir.path()).unwrap();
        model.check_tokens(&[]).unwrap();
        model.check_tokens(&[0, 47]).unwrap();
        for id in [48, 1 << 24, i32::MAX as u32, i32::MAX as u32 + 1, u32::MAX] {
            let error = model.check_tokens(&[0, id]).unwrap_err();
            assert_message(&error, &[&format!("token id {id}"), "vocabulary of 48"]);
        }
    }
}

#[test]
fn the_memory_for_an_absurd_context_does_not_wrap_around() {
    let dir = directory();
    dense().write(dir.path());
    let model = load(dir.path()).unwrap();
    // Two layers of keys and values, two heads of eight channels, in float32.
    assert_eq!(model.footprint(1).kv_cache, 2 * 2 * 2 * 8 * 4);
    for context in [usize::MAX, usize::MAX / 2 + 1, 1 << 62] {
        assert_eq!(model.footprint(context).kv_cache, usize::MAX);
    }
}

mod safetensors {
    use super::*;

    /// A file with this header before `data`.
    fn file(header: impl AsRef<[u8]>, data: &[u8]) -> Vec<u8> {
        let header = header.as_ref();
        [&(header.len() as u64).to_le_bytes(), header, data].concat()
    }

    fn parse(file: &[u8]) -> Result<usize, Error> {
        WeightFiles::parse_header(Path::new("model-x.safetensors"), file).map(|tensors| tensors.len())
    }

    #[track_caller]
    fn assert_file_refused(file: &[u8], parts: &[&str]) {
        let error = parse(file).unwrap_err();
        assert_message(&error, &["model-x.safetensors"]);
        assert_message(&error, parts);
        // The same by way of a checkpoint.
        let dir = directory();
        dense().write(dir.path());
        fs::write(dir.path().join(WEIGHTS), file).unwrap();
        assert_refused(dir.path(), &[WEIGHTS]);
        assert_refused(dir.path(), parts);
    }

    /// Header, data and both together of the dense checkpoint.
    fn valid() -> (Value, Vec<u8>, Vec<u8>) {
        let checkpoint = dense();
        let file = checkpoint.safetensors(checkpoint.tensors.keys().map(String::as_str));
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        (serde_json::from_slice(&file[8..8 + length]).unwrap(), file[8 + length..].to_vec(), file)
    }

    #[test]
    fn a_file_cut_short_anywhere_is_refused() {
        let (header, data, file) = valid();
        let start = file.len() - data.len();
        let ends = header
            .as_object()
            .unwrap()
            .values()
            .map(|entry| start + entry["data_offsets"][1].as_u64().unwrap() as usize);
        let near = ends.flat_map(|end| [end - 1, end, end + 1]).chain(0..=start);
        for length in near.filter(|&length| length < file.len()) {
            let error = parse(&file[..length]).unwrap_err();
            let part = match length {
                0..8 => "bytes; download it again",
                _ if length < start => "ends inside its header",
                _ => "the file has",
            };
            assert_message(&error, &["model-x.safetensors", part]);
        }
        for length in [0, 1, 7, 8, 9, start - 1, start, start + 1, file.len() - 1] {
            assert_file_refused(&file[..length], &[]);
        }
        assert!(parse(&file).is_ok());
    }

    #[test]
    fn a_file_longer_than_its_header_says_is_refused() {
        let (_, _, valid) = valid();
        for extra in [1, 8, 4096] {
            let longer = [&valid[..], &vec![0; extra]].concat();
            assert_file_refused(&longer, &["its tensors take", "bytes of data, it has"]);
        }
        assert_file_refused(&file("{}", &[0]), &["its tensors take 0 bytes of data, it has 1"]);
    }

    #[test]
    fn a_header_longer_than_the_file_is_refused() {
        let (_, _, valid) = valid();
        let rest = (valid.len() - 8) as u64;
        for (length, part) in [
            (rest + 1, "ends inside its header"),
            (100_000_000, "ends inside its header"),
            (100_000_001, "header would have 100000001 bytes"),
            (u64::from(u32::MAX), "header would have"),
            (1 << 63, "header would have"),
            (u64::MAX - 8, "header would have"),
            (u64::MAX, "header would have 18446744073709551615 bytes"),
        ] {
            let mut longer = valid.clone();
            longer[..8].copy_from_slice(&length.to_le_bytes());
            assert_file_refused(&longer, &["is not a valid safetensors file", part]);
        }
    }

    #[test]
    fn a_header_that_is_no_object_of_tensors_is_refused() {
        for header in [
            "",
            " ",
            "{",
            "[]",
            "null",
            "1",
            "\"a\"",
            "{} {}",
            "{\"a\":}",
            "{a: 1}",
            "{\"a\": NaN}",
            "{\"__metadata__\": 1}",
            "{\"__metadata__\": {\"a\": 1}}",
        ] {
            assert_file_refused(&file(header, &[]), &["its header is wrong"]);
        }
        assert_file_refused(&file(b"{\"\xff\": 1}", &[]), &["its header is wrong"]);
        assert_file_refused(&file(b"\0\0\0\0", &[]), &["its header is wrong"]);
    }

    #[test]
    fn an_entry_that_is_no_tensor_is_named() {
        for entry in [
            "1",
            "null",
            "{}",
            "[]",
            "{\"dtype\": 1, \"shape\": [], \"data_offsets\": [0, 4]}",
            "{\"dtype\": \"F32\", \"shape\": [], \"data_offsets\": [0]}",
            "{\"dtype\": \"F32\", \"shape\": [], \"data_offsets\": [0, 4, 4]}",
            "{\"dtype\": \"F32\", \"shape\": [], \"data_offsets\": [-4, 0]}",
            "{\"dtype\": \"F32\", \"shape\": [], \"data_offsets\": [0, 4e0]}",
            "{\"dtype\": \"F32\", \"shape\": [], \"data_offsets\": [0, 18446744073709551616]}",
            "{\"dtype\": \"F32\", \"shape\": [-1], \"data_offsets\": [0, 4]}",
            "{\"dtype\": \"F32\", \"shape\": [1.0], \"data_offsets\": [0, 4]}",
            "{\"dtype\": \"F32\", \"shape\": 1, \"data_offsets\": [0, 4]}",
            "{\"dtype\": \"F32\", \"shape\": [1e300], \"data_offsets\": [0, 4]}",
            "{\"dtype\": \"F32\", \"data_offsets\": [0, 4]}",
            "{\"dtype\": \"F32\", \"shape\": [], \"shape\": [], \"data_offsets\": [0, 4]}",
        ] {
            let header = format!("{{\"some.weight\": {entry}}}");
            assert_file_refused(&file(header, &[0; 4]), &["its header is wrong", "tensor \"some.weight\""]);
        }
    }

    #[test]
    fn deep_nesting_in_a_header_is_refused_without_recursing_into_it() {
        let open = "[".repeat(1 << 20);
        for header in [
            open.clone(),
            format!("{{\"a\": {open}"),
            format!("{{\"__metadata__\": {open}"),
            format!("{{\"a\": {{\"x\": {open}"),
            format!("{{\"a\": {{\"shape\": {open}"),
            "{\"a\":".repeat(1 << 20),
        ] {
            assert_file_refused(&file(header, &[]), &["its header is wrong"]);
        }
    }

    #[test]
    fn a_name_may_occur_only_once() {
        let entry = "{\"dtype\": \"F32\", \"shape\": [1], \"data_offsets\": [0, 4]}";
        let header = format!("{{\"a\": {entry}, \"b\\u0062\": {entry}, \"bb\": {entry}}}");
        assert_file_refused(&file(header, &[0; 4]), &["tensor \"bb\" occurs twice"]);
    }

    #[test]
    fn dtypes_that_mlx_lacks_are_refused_with_the_tensor() {
        for dtype in ["F4", "F8_E4M3", "F8_E8M0", "C64", "f32", "", "\u{1b}"] {
            let header = json!({ "a": { "dtype": dtype, "shape": [1], "data_offsets": [0, 4] } });
            let part = format!("unsupported dtype '{}'", dtype.escape_debug());
            assert_file_refused(&file(header.to_string(), &[0; 4]), &["tensor \"a\"", &part]);
        }
    }

    #[test]
    fn data_must_fit_shape_and_dtype() {
        for (shape, dtype) in [
            (json!([1]), "F16"),
            (json!([1]), "F64"),
            (json!([0]), "F32"),
            (json!([2]), "F32"),
            (json!([2, 0]), "F32"),
            (json!([0x4000_0000, 4]), "F32"),
            (json!([0x7fff_ffff, 0x7fff_ffff, 0x7fff_ffff]), "F32"),
            // 2⁶⁰ + 1 elements of 4 bytes would wrap around to 4.
            (json!([0x1000_0001, 0x7fff_ffff, 0x7fff_ffff, 0x7fff_ffff]), "U8"),
        ] {
            let header = json!({ "a": { "dtype": dtype, "shape": shape, "data_offsets": [0, 4] } });
            assert_file_refused(&file(header.to_string(), &[0; 4]), &["tensor \"a\"", "has 4 bytes of data"]);
        }
        for dimension in [1_u64 << 31, 1 << 32, 1 << 62, u64::MAX] {
            let shape = [dimension, 0];
            let header = json!({ "a": { "dtype": "F32", "shape": shape, "data_offsets": [0, 0] } });
            assert_file_refused(
                &file(header.to_string(), &[]),
                &["tensor \"a\"", "a dimension that is too large"],
            );
        }
    }

    #[test]
    fn ranges_must_follow_one_another_inside_the_file() {
        let header = |a: [u64; 2], b: [u64; 2]| {
            let entry = |range: [u64; 2]| json!({ "dtype": "U8", "shape": [range[1].wrapping_sub(range[0])], "data_offsets": range });
            json!({ "a": entry(a), "b": entry(b) }).to_string()
        };
        assert_eq!(parse(&file(header([4, 8], [0, 4]), &[0; 8])).unwrap(), 2);
        for (a, b, tensor, part) in [
            ([0, 5], [4, 8], "b", "starts at 5"),
            ([0, 8], [0, 8], "b", "starts at 8"),
            ([0, 8], [2, 4], "b", "starts at 8"),
            ([0, 4], [5, 8], "b", "starts at 4"),
            ([1, 4], [4, 8], "a", "starts at 0"),
            ([0, 4], [8, 4], "b", "starts at 4"),
            ([0, 4], [4, 3], "b", "starts at 4"),
            ([0, 4], [4, 9], "b", "the file has 8 bytes of data"),
            ([0, 4], [4, 1 << 62], "b", "the file has 8 bytes of data"),
            ([0, 4], [4, u64::MAX], "b", "the file has 8 bytes of data"),
            ([0, 4], [u64::MAX, u64::MAX], "b", "starts at 4"),
        ] {
            assert_file_refused(&file(header(a, b), &[0; 8]), &[&format!("tensor \"{tensor}\""), part]);
        }
    }

    #[test]
    fn tensors_without_elements_are_legal() {
        let header = json!({
            "a": { "dtype": "F32", "shape": [0, 5], "data_offsets": [0, 0] },
            "b": { "dtype": "F32", "shape": [], "data_offsets": [0, 4] },
            "c": { "dtype": "F32", "shape": [7, 0], "data_offsets": [4, 4] },
            "__metadata__": { "format": "mlx" },
        });
        assert_eq!(parse(&file(header.to_string(), &[0; 4])).unwrap(), 3);
    }
}

mod shards {
    use super::*;

    fn sharded() -> TempDir {
        let dir = directory();
        dense().write_sharded(dir.path());
        dir
    }

    /// The directory with its index changed.
    fn with_index(change: impl FnOnce(&mut Value)) -> TempDir {
        let dir = sharded();
        let path = dir.path().join(INDEX);
        let mut index = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut index);
        fs::write(&path, index.to_string()).unwrap();
        dir
    }

    #[test]
    fn a_shard_of_the_index_that_is_absent_is_named() {
        for shard in SHARDS {
            let dir = sharded();
            fs::remove_file(dir.path().join(shard)).unwrap();
            assert_refused(dir.path(), &[shard, INDEX, "does not exist"]);
        }
    }

    #[test]
    fn a_stray_shard_is_named() {
        for name in ["model.safetensors", "model-00003-of-00003.safetensors", "model-old.safetensors"] {
            let dir = sharded();
            fs::copy(dir.path().join(SHARDS[0]), dir.path().join(name)).unwrap();
            assert_refused(dir.path(), &[name, "is not named in", INDEX]);
        }
        // Names that the reference does not load either do not matter.
        let dir = sharded();
        fs::write(dir.path().join("mtp.safetensors"), "").unwrap();
        load(dir.path()).unwrap();
    }

    #[test]
    fn a_damaged_shard_is_named() {
        for shard in SHARDS {
            let dir = sharded();
            let path = dir.path().join(shard);
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
            assert_refused(dir.path(), &[shard, "the file has"]);
        }
    }

    #[test]
    fn an_index_cannot_name_other_places() {
        let outside = directory();
        let target = outside.path().join("model.safetensors");
        fs::write(&target, "").unwrap();
        for file in [
            target.to_str().unwrap(),
            "../model.safetensors",
            "model/../../model.safetensors",
            "sub/model.safetensors",
            "./model.safetensors",
            "model\\..\\model.safetensors",
            "/etc/passwd",
            "weights.safetensors",
            "model.bin",
            "model.safetensors.bak",
            "model\0.safetensors",
            "model\u{1b}[2J.safetensors",
            "",
            ".",
        ] {
            let dir = with_index(|index| index["weight_map"]["lm_head.weight"] = json!(file));
            let shown = file.escape_debug().to_string();
            assert_refused(
                dir.path(),
                &[
                    INDEX,
                    "tensor \"lm_head.weight\"",
                    &shown,
                    "expected the name of a model*.safetensors file",
                ],
            );
        }
    }

    #[test]
    fn an_index_maps_names_to_names() {
        for value in [json!(1), json!(null), json!([SHARDS[0]]), json!({})] {
            let dir = with_index(|index| index["weight_map"]["lm_head.weight"] = value);
            assert_refused(dir.path(), &[INDEX, "tensor \"lm_head.weight\"", "expected the name"]);
        }
        for change in [
            json!({}),
            json!({ "weight_map": null }),
            json!({ "weight_map": [] }),
            json!({ "weight_map": "" }),
        ] {
            let dir = with_index(|index| *index = change);
            assert_refused(dir.path(), &[INDEX, "has no object \"weight_map\""]);
        }
        for text in ["", "{", "[]", "\u{0}"] {
            let dir = sharded();
            fs::write(dir.path().join(INDEX), text).unwrap();
            assert_refused(dir.path(), &[INDEX, "JSON"]);
        }
        let dir = with_index(|index| index["weight_map"] = json!({}));
        assert_refused(dir.path(), &[SHARDS[0], "is not named in"]);
    }

    #[test]
    fn index_and_shards_must_agree_on_every_tensor() {
        let index_of = |name: &str| format!("tensor \"{name}\"");
        let dir = with_index(|index| index["weight_map"]["lm_head.weight"] = json!(SHARDS[1]));
        assert_refused(dir.path(), &[INDEX, &index_of("lm_head.weight"), "is not in", SHARDS[1]]);

        let dir = with_index(|index| index["weight_map"]["ghost.weight"] = json!(SHARDS[0]));
        assert_refused(dir.path(), &[INDEX, &index_of("ghost.weight"), "is not in", SHARDS[0]]);

        let dir = with_index(|index| {
            index["weight_map"].as_object_mut().unwrap().remove("model.norm.weight");
        });
        assert_refused(dir.path(), &[INDEX, &index_of("model.norm.weight"), "but not in the index"]);
    }

    #[test]
    fn a_tensor_in_two_shards_is_refused() {
        let dir = sharded();
        let checkpoint = dense();
        let second = checkpoint.tensors.keys().map(String::as_str).skip(checkpoint.tensors.len().div_ceil(2));
        let file = checkpoint.safetensors(second.chain(["lm_head.weight"]));
        fs::write(dir.path().join(SHARDS[1]), file).unwrap();
        let parts = [SHARDS[0], SHARDS[1], "tensor \"lm_head.weight\"", "is also in"];
        assert_refused(dir.path(), &parts);
        fs::remove_file(dir.path().join(INDEX)).unwrap();
        assert_refused(dir.path(), &parts);
    }

    #[test]
    fn shards_without_an_index_are_merged() {
        let dir = sharded();
        fs::remove_file(dir.path().join(INDEX)).unwrap();
        load(dir.path()).unwrap();
    }
}

mod properties {
    use super::*;

    /// Loading must not panic, must say which file is wrong, and what loads must run.
    fn load_and_run(dir: &Path) {
        for fidelity in FIDELITIES {
            match load_with(dir, fidelity) {
                // MLX quantizes activations of several tokens on a GPU only.
                Ok(model) => drop(logits(&model).inspect_err(|e| assert_message(e, &["QQMatmul"]))),
                Err(e) => assert_message(&e, &[dir.to_str().unwrap()]),
            }
        }
    }

    /// A change of some bytes: replace, insert or delete.
    fn mutate(bytes: &mut Vec<u8>, changes: &[(prop::sample::Index, u8, u8)]) {
        for (index, byte, kind) in changes {
            let at = index.index(bytes.len().max(1));
            match kind {
                0 if at < bytes.len() => bytes[at] = *byte,
                1 => bytes.insert(at, *byte),
                2 if at < bytes.len() => drop(bytes.remove(at)),
                _ => {}
            }
        }
    }

    fn changes() -> impl Strategy<Value = Vec<(prop::sample::Index, u8, u8)>> {
        // Digits and punctuation keep more of JSON valid than any byte does.
        let byte = prop_oneof![any::<u8>(), prop::sample::select(b"0123456789-.e,:\"{}[]tfn".to_vec())];
        prop::collection::vec((any::<prop::sample::Index>(), byte, 0..3_u8), 1..6)
    }

    /// Any JSON value, sizes that matter more often.
    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            prop::sample::select(vec![
                0_i64,
                1,
                2,
                3,
                4,
                8,
                16,
                31,
                32,
                33,
                48,
                64,
                65,
                1 << 24,
                1 << 31,
                1 << 40
            ])
            .prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            prop::sample::select(vec![
                "affine",
                "mxfp4",
                "nvfp4",
                "mxfp8",
                "llama",
                "mistral",
                "linear",
                "dynamic",
                "llama3",
                "yarn",
                "longrope",
                "proportional",
                "full_attention",
                "sliding_attention",
                "silu",
            ])
            .prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 6, |inner| {
            let key = prop::sample::select(vec![
                "type",
                "rope_type",
                "factor",
                "bits",
                "group_size",
                "mode",
                "low_freq_factor",
                "long_factor",
                "short_factor",
                "original_max_position_embeddings",
                "partial_rotary_factor",
                UP_PROJ,
            ]);
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((key, inner), 0..6).prop_map(|entries| {
                    entries.into_iter().map(|(k, v)| (k.to_owned(), v)).collect::<Map<_, _>>().into()
                }),
            ]
        })
    }

    fn format() -> impl Strategy<Value = Format> {
        prop::sample::select(vec![Format::Dense, AFFINE, Format::Mxfp4, Format::Mxfp8, Format::Nvfp4])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn changed_bytes_of_a_config_never_panic(format in format(), changes in changes()) {
            let dir = directory();
            TinyCheckpoint::llama(format).write(dir.path());
            let path = dir.path().join("config.json");
            let mut bytes = fs::read(&path).unwrap();
            mutate(&mut bytes, &changes);
            fs::write(path, bytes).unwrap();
            load_and_run(dir.path());
        }

        #[test]
        fn changed_fields_of_a_config_never_panic(
            format in format(),
            fields in prop::collection::vec((prop::sample::select(vec![
                "model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
                "num_key_value_heads", "rms_norm_eps", "vocab_size", "head_dim", "max_position_embeddings",
                "attention_bias", "mlp_bias", "rope_theta", "rope_traditional", "rope_scaling",
                "tie_word_embeddings", "layer_types", "sliding_window", "hidden_act", "quantization",
                "quantization_config", "quantize_activations",
            ]), value()), 1..4),
        ) {
            let mut checkpoint = TinyCheckpoint::llama(format);
            for (field, value) in fields {
                checkpoint = checkpoint.with(field, value);
            }
            let dir = directory();
            checkpoint.write(dir.path());
            load_and_run(dir.path());
        }

        #[test]
        fn changed_bytes_of_an_index_never_panic(changes in changes()) {
            let dir = directory();
            dense().write_sharded(dir.path());
            let path = dir.path().join(INDEX);
            let mut bytes = fs::read(&path).unwrap();
            mutate(&mut bytes, &changes);
            fs::write(path, bytes).unwrap();
            load_and_run(dir.path());
        }

        #[test]
        fn changed_bytes_of_a_safetensors_header_never_panic(
            format in format(),
            changes in changes(),
            length in prop_oneof![3 => Just(None), 1 => any::<u64>().prop_map(Some)],
        ) {
            let dir = directory();
            TinyCheckpoint::llama(format).write(dir.path());
            let path = dir.path().join(WEIGHTS);
            let file = fs::read(&path).unwrap();
            let end = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            let mut header = file[8..end].to_vec();
            mutate(&mut header, &changes);
            let length = length.unwrap_or(header.len() as u64).to_le_bytes();
            fs::write(path, [&length, &header[..], &file[end..]].concat()).unwrap();
            load_and_run(dir.path());
        }
    }
}
