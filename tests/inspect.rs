//! `russet inspect`.

mod common;

use std::fs;

use common::{llama, russet, text};
use russet_testing::{FixtureSpec, Float, Format, Oracle};
use serde_json::{Value, json};

/// Parameters of the fixtures: embedding (also the head), per layer attention, MLP and two norms, a last norm.
const PARAMETERS: u64 = 512 * 64 + 2 * ((64 + 32 + 32 + 64) * 64 + 3 * 64 * 128 + 2 * 64) + 64;

/// Values kept per token: keys and values of two heads of 16 in two layers.
const CACHED: u64 = 2 * 2 * 2 * 16;

/// The report at fidelity L1.
fn report(spec: &FixtureSpec, args: &[&str]) -> Option<Value> {
    report_at("l1", spec, args)
}

fn report_at(fidelity: &str, spec: &FixtureSpec, args: &[&str]) -> Option<Value> {
    let model = text(&Oracle::get()?.fixture(spec));
    Some(russet(&[&["inspect", "--json", "--fidelity", fidelity, &model], args].concat()).json())
}

#[test]
fn json_describes_model_files_and_memory() {
    let Some(model) = llama() else { return };
    let report = russet(&["inspect", "--json", "--fidelity", "l1", &model]).json();
    let file = fs::metadata(format!("{model}/model.safetensors")).unwrap().len();
    assert_eq!(
        report,
        json!({
            "model": model.rsplit('/').next().unwrap(),
            "path": model,
            "architecture": "llama",
            "profile": {
                "id": "universal-dense",
                "artifact_fingerprint": null,
                "config_fingerprint": null,
                "fidelity": {"tier": "l1", "oracle": "mlx-lm", "claim": "bit-exact"},
                "required_capabilities": ["autoregressive", "safetensors", "universal-dense-graph"],
                "execution": {
                    "loader": "safetensors",
                    "graph": "universal-dense",
                    "loop": "autoregressive",
                    "specialization": "generic",
                    "implementation": null,
                },
            },
            "resolution": {
                "reason": "model_type 'llama'; not known to be a published artifact",
                "exact": false,
                "artifact_fingerprint": null,
                "config_fingerprint": "ca4867a9d99b12fa",
                "present_capabilities": ["autoregressive", "safetensors", "universal-dense-graph"],
                "missing_capabilities": [],
            },
            "runs": true,
            "why_not": null,
            "fidelity": "L1",
            "device": report["device"],
            "mlx": "0.32.4",
            "parameters": PARAMETERS,
            "layers": 2,
            "hidden_size": 64,
            "vocabulary": 512,
            "max_positions": 4096,
            "quantization": null,
            "quantization_overrides": {},
            "bytes_by_dtype": {"bfloat16": 2 * PARAMETERS},
            "files": [{"name": "model.safetensors", "bytes": file}],
            "memory": {
                "context": 4096,
                "weights_bytes": 2 * PARAMETERS,
                "weights_mapped": report["memory"]["weights_mapped"],
                "weights_interleaved_bytes": 0,
                "kv_cache_bytes": 2 * CACHED * 4096,
            },
        })
    );
    assert!(report["device"].as_str().unwrap().contains("pu"), "{report}");
    assert!(report["memory"]["weights_mapped"].is_boolean(), "{report}");
}

#[test]
fn memory_of_the_cache_follows_context_and_dtype() {
    for (dtype, size) in [(Float::Bfloat16, 2), (Float::Float16, 2), (Float::Float32, 4)] {
        for context in [0, 1, 1000] {
            let spec = FixtureSpec { dtype, ..FixtureSpec::new("llama") };
            let Some(report) = report(&spec, &["--context", &context.to_string()]) else { return };
            let memory = &report["memory"];
            assert_eq!(
                (&memory["context"], &memory["weights_bytes"]),
                (&json!(context), &json!(size * PARAMETERS))
            );
            assert_eq!(memory["kv_cache_bytes"], size * CACHED * context);
        }
    }
}

#[test]
fn the_cpu_kernels_say_what_memory_they_take_besides() {
    let spec = FixtureSpec { format: Format::Affine { bits: 4, group: 32 }, ..FixtureSpec::new("llama") };
    let Some(default) = report_at("auto", &spec, &["--context", "1000"]) else { return };
    if default["device"] != "cpu" {
        return;
    }
    assert_eq!(default["fidelity"], "L3");
    let bytes = |report: &Value, name: &str| report["memory"][name].as_u64().unwrap();
    assert_eq!(bytes(&default, "kv_cache_bytes"), 2 * CACHED * 1000);
    assert!(bytes(&default, "weights_interleaved_bytes") > 0, "{default}");
    let options = ["--context", "1000", "--no-repack", "--kv-cache", "f32"];
    let Some(plain) = report_at("auto", &spec, &options) else { return };
    assert_eq!(bytes(&plain, "weights_interleaved_bytes"), 0);
    assert_eq!(bytes(&plain, "kv_cache_bytes"), 4 * CACHED * 1000);
}

#[test]
fn a_sliding_layer_keeps_its_window_only() {
    let Some(report) = report(&FixtureSpec::new("llama-sliding"), &["--context", "1000"]) else { return };
    // One layer of each kind; the window is 16.
    assert_eq!(report["memory"]["kv_cache_bytes"], CACHED / 2 * 2 * (1000 + 16));
}

#[test]
fn parameters_are_counted_unpacked_whatever_the_quantization() {
    let formats = [
        (Format::Affine { bits: 4, group: 32 }, "4-bit affine, group 32"),
        (Format::Affine { bits: 3, group: 64 }, "3-bit affine, group 64"),
        (Format::Affine { bits: 8, group: 32 }, "8-bit affine, group 32"),
        (Format::Mxfp4, "mxfp4"),
        (Format::Nvfp4, "nvfp4"),
        (Format::Mxfp8, "mxfp8"),
    ];
    for (format, name) in formats {
        let Some(report) = report(&FixtureSpec { format, ..FixtureSpec::new("llama") }, &[]) else { return };
        assert_eq!((&report["quantization"], &report["parameters"]), (&json!(name), &json!(PARAMETERS)));
        let bytes: u64 =
            report["bytes_by_dtype"].as_object().unwrap().values().filter_map(Value::as_u64).sum();
        assert_eq!(report["memory"]["weights_bytes"], bytes);
        assert!(bytes < 2 * PARAMETERS, "{report}");
    }
}

#[test]
fn modules_quantized_unlike_the_rest_are_listed() {
    let format = Format::Affine { bits: 4, group: 32 };
    let spec = FixtureSpec { format, mixed: true, ..FixtureSpec::new("llama") };
    let Some(report) = report(&spec, &[]) else { return };
    assert_eq!(report["parameters"], PARAMETERS);
    assert_eq!(report["quantization"], "4-bit affine, group 32");
    assert_eq!(
        report["quantization_overrides"],
        json!({
            "model.embed_tokens": "8-bit affine, group 64",
            "model.layers.0.mlp.down_proj": "8-bit affine, group 64",
            "model.layers.1.mlp.gate_proj": "4-bit affine, group 32",
            "model.layers.1.self_attn.v_proj": "dense",
        })
    );
    let text = russet(&["inspect", report["path"].as_str().unwrap()]).text();
    for part in ["model.embed_tokens: 8-bit affine, group 64", "model.layers.1.self_attn.v_proj: dense"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn all_shards_are_listed() {
    let spec = FixtureSpec { shards: 3, ..FixtureSpec::new("llama") };
    let Some(report) = report(&spec, &[]) else { return };
    let files = report["files"].as_array().unwrap();
    let names: Vec<&str> = files.iter().filter_map(|file| file["name"].as_str()).collect();
    assert_eq!(names, [1, 2, 3].map(|i| format!("model-{i:05}-of-00003.safetensors")));
    for (name, file) in names.iter().zip(files) {
        let path = format!("{}/{name}", report["path"].as_str().unwrap());
        assert_eq!(file["bytes"], fs::metadata(path).unwrap().len());
    }
}

#[test]
fn text_says_the_same() {
    let Some(model) = llama() else { return };
    let text = russet(&["inspect", &model, "--context", "1000", "--fidelity", "l1"]).text();
    let value = |label: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(label)).unwrap_or_else(|| panic!("{text}"));
        line.trim().to_owned()
    };
    assert_eq!(value("path"), model);
    assert_eq!((value("architecture"), value("parameters")), ("llama".to_owned(), PARAMETERS.to_string()));
    assert_eq!((value("quantization"), value("bfloat16")), ("none".to_owned(), "0.2 MB".to_owned()));
    assert_eq!(value("profile"), "universal-dense");
    assert_eq!(value("chosen for"), "model_type 'llama'; not known to be a published artifact");
    assert_eq!((value("promise"), value("fidelity")), ("L1 (bit-exact with mlx-lm)".into(), "L1".into()));
    assert_eq!(value("composition"), "safetensors · universal-dense · autoregressive · generic");
    assert_eq!(value("requires"), "autoregressive, safetensors, universal-dense-graph");
    assert_eq!(value("engine has"), value("requires"));
    assert_eq!((value("engine lacks"), value("implementation")), ("none".into(), "none".into()));
    assert_eq!((value("artifact"), value("config")), ("none".into(), "ca4867a9d99b12fa".into()));
    assert_eq!(value("file"), "model.safetensors (0.2 MB)");
    assert_eq!(value("kv_cache"), "0.3 MB for 1000 tokens");
}
