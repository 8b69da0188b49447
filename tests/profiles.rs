//! `--artifact`, `--profiles`, and what `inspect` says about checkpoints that can't be run.

mod common;

use std::fs;
use std::path::PathBuf;

use common::{Copy, llama, russet, text};
use serde_json::{Value, json};
use tempfile::TempDir;

const REVISION: &str = "0123456789abcdef0123456789abcdef01234567";

fn temporary() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A snapshot in a Hugging Face cache with nothing but a config.json.
fn snapshot(cache: &TempDir, folder: &str, revision: &str, config: &Value) -> PathBuf {
    let dir = cache.path().join(folder).join("snapshots").join(revision);
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    dir
}

/// A config of the shape of the artifact that a built-in profile is for.
fn qwen38() -> Value {
    let layers: Vec<&str> =
        (1..=64).map(|i| if i % 4 == 0 { "full_attention" } else { "linear_attention" }).collect();
    json!({"model_type": "qwen3_5", "text_config": {
        "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "layer_types": layers,
    }})
}

fn qwen38_snapshot(cache: &TempDir) -> String {
    let folder = "models--mlx-community--Qwen3.8-27B-OptiQ-4bit";
    text(&snapshot(cache, folder, "b04599de95d7a9bfbd7f208d347c0f10d9432a42", &qwen38()))
}

/// The profile that `inspect` prints for a model, made one for the artifact `me`.
fn own_profile(model: &str) -> Value {
    let report = russet(&["inspect", "--json", model]).json();
    let mut profile = report["profile"].clone();
    profile["id"] = json!("mine");
    profile["artifact_fingerprint"] = json!("me");
    profile["config_fingerprint"] = report["resolution"]["config_fingerprint"].clone();
    profile
}

/// A file with these profiles.
fn file(dir: &TempDir, profiles: &[Value]) -> String {
    let path = dir.path().join("profiles.json");
    fs::write(&path, json!({ "profiles": profiles }).to_string()).unwrap();
    text(&path)
}

#[test]
fn a_profile_of_one_s_own_is_used_for_its_artifact() {
    let Some(model) = llama() else { return };
    let dir = temporary();
    let profile = own_profile(&model);
    let profiles = file(&dir, std::slice::from_ref(&profile));
    let report = |artifact| {
        russet(&["inspect", "--json", &model, "--profiles", &profiles, "--artifact", artifact]).json()
    };
    let mine = report("me");
    assert_eq!(mine["profile"], profile);
    let resolution = &mine["resolution"];
    assert_eq!((&resolution["exact"], &resolution["artifact_fingerprint"]), (&json!(true), &json!("me")));
    assert_eq!((&mine["runs"], &mine["why_not"]), (&json!(true), &Value::Null));
    for (artifact, fingerprint) in [("other", json!("other")), ("none", Value::Null)] {
        let other = report(artifact);
        assert_eq!(other["profile"]["id"], "universal-dense");
        let resolution = &other["resolution"];
        assert_eq!(
            (&resolution["exact"], &resolution["artifact_fingerprint"]),
            (&json!(false), &fingerprint)
        );
    }
    let options = ["--artifact", "me", "--profiles", &profiles, "-n", "1"];
    russet(&[&["run", &model, "hello"], options.as_slice()].concat()).text();
}

#[test]
fn a_profile_of_another_config_is_refused() {
    let Some(model) = llama() else { return };
    let dir = temporary();
    let mut profile = own_profile(&model);
    profile["config_fingerprint"] = json!("0000000000000000");
    let profiles = file(&dir, &[profile]);
    let options = ["--artifact", "me", "--profiles", &profiles];
    let out = format!("{}/profile.safetensors", env!("CARGO_TARGET_TMPDIR"));
    for command in [
        vec!["run", &model, "hello"],
        vec!["inspect", &model],
        vec!["bench", &model],
        vec!["eval", "logits", "--model", &model, "--tokens", "1", "--out", &out],
    ] {
        russet(&[command.as_slice(), &options].concat()).fails(
            1,
            &[
                "cannot load",
                "profile 'mine'",
                "config fingerprint 0000000000000000",
                "refusing to fall back",
            ],
        );
    }
    // Without the artifact the profile is not asked for.
    russet(&["inspect", &model, "--profiles", &profiles]).text();
}

#[test]
fn a_file_of_profiles_that_is_damaged_is_refused() {
    let Some(model) = llama() else { return };
    let dir = temporary();
    let profile = own_profile(&model);
    let refused = |profiles: &[Value], parts: &[&str]| {
        let profiles = file(&dir, profiles);
        for command in [["inspect", &model], ["run", &model], ["bench", &model]] {
            let mut args = command.to_vec();
            args.extend(["--profiles", &profiles]);
            if command[0] == "run" {
                args.push("hello");
            }
            russet(&args).fails(1, &[&["profiles.json"], parts].concat());
        }
    };
    let with = |field: &str, value: Value| {
        let mut profile = profile.clone();
        profile[field] = value;
        profile
    };
    refused(&[with("fidelty", json!(1))], &["profiles[0].fidelty", "did you mean 'fidelity'?"]);
    refused(&[profile.clone(), with("id", json!(""))], &["profiles[1].id", "not empty"]);
    refused(
        &[with("required_capabilities", json!(["safetensor"]))],
        &["profiles[0].required_capabilities[0]", "did you mean 'safetensors'?"],
    );
    let missing = text(&dir.path().join("missing.json"));
    russet(&["inspect", &model, "--profiles", &missing]).fails(1, &["missing.json", "does not exist"]);
}

#[test]
fn two_profiles_of_one_artifact_are_refused() {
    let Some(model) = llama() else { return };
    let dir = temporary();
    let profile = own_profile(&model);
    let profiles = file(&dir, &[profile.clone(), profile]);
    russet(&["inspect", &model, "--profiles", &profiles, "--artifact", "me"])
        .fails(1, &["several profiles are for artifact me: mine, mine"]);
}

#[test]
fn the_path_of_a_snapshot_tells_the_artifact() {
    let Some(model) = llama() else { return };
    let cache = temporary();
    let dir = snapshot(&cache, "models--owner--name", REVISION, &json!({}));
    let copy = Copy::of(&model);
    for entry in fs::read_dir(copy.path()).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.join(path.file_name().unwrap())).unwrap();
    }
    let artifact = |args: &[&str]| {
        let report = russet(&[&["inspect", "--json", &text(&dir)], args].concat()).json();
        report["resolution"]["artifact_fingerprint"].clone()
    };
    assert_eq!(artifact(&[]), json!(format!("hf:owner/name@{REVISION}")));
    assert_eq!(artifact(&["--artifact", "none"]), Value::Null);
    assert_eq!(artifact(&["--artifact", "hf:a/b@c"]), "hf:a/b@c");
}

#[test]
fn a_checkpoint_that_the_engine_can_t_run_is_shown_and_refused() {
    let cache = temporary();
    let model = qwen38_snapshot(&cache);
    let report = russet(&["inspect", "--json", &model]).json();
    assert_eq!(report["profile"]["id"], "qwen3.8-27b-optiq-4bit");
    assert_eq!(report["profile"]["execution"]["specialization"], "artifact");
    let resolution = &report["resolution"];
    assert_eq!(
        (&resolution["exact"], &resolution["config_fingerprint"]),
        (&json!(true), &json!("50117975cb405944"))
    );
    let ids = |field: &str| -> Vec<&str> {
        resolution[field].as_array().unwrap().iter().filter_map(Value::as_str).collect()
    };
    let (present, missing) = (ids("present_capabilities"), ids("missing_capabilities"));
    assert!(present.contains(&"safetensors") && missing.contains(&"vision-sidecar"), "{report}");
    assert_eq!(present.len() + missing.len(), 5);
    assert_eq!(report["runs"], false);
    assert!(report["why_not"].as_str().unwrap().contains("this engine lacks "), "{report}");
    assert_eq!(report["fidelity"], Value::Null);

    let shown = russet(&["inspect", &model]).text();
    let lacks = shown.lines().find(|line| line.starts_with("engine lacks ")).unwrap();
    assert!(lacks.contains("vision-sidecar"), "{shown}");
    assert!(shown.lines().last().unwrap().starts_with("runs             no: "), "{shown}");

    let parts = ["this engine lacks ", "vision-sidecar", "'qwen3.8-27b-optiq-4bit'", "refusing to fall back"];
    russet(&["run", &model, "hello"]).fails(1, &parts);
    russet(&["bench", &model]).fails(1, &parts);
}

#[test]
fn drafters_and_unknown_models_are_refused() {
    let cache = temporary();
    for (model_type, part) in [
        ("gemma4_assistant", "is a drafter"),
        ("gpt2", "'gpt2' is not supported; dedicated: gemma4*"),
        ("phi-msft", "mlx-lm runs it as 'phixtral'"),
    ] {
        let model = text(&snapshot(&cache, "models--a--b", REVISION, &json!({ "model_type": model_type })));
        russet(&["inspect", &model]).fails(1, &["config.json", "model_type", part]);
        russet(&["run", &model, "hello"]).fails(1, &["config.json", "model_type", part]);
    }
}
