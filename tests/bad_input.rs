//! Damaged and hostile checkpoints through the real binary: a clear error, exit code 1, no panic.

mod common;

use std::fs::{self, File};
use std::io::Write;
use std::process::Command;

use common::{Copy, llama, russet, russet_reading, text};
use russet_testing::{FixtureSpec, Oracle};
use serde_json::json;

/// Checks that all commands that load the model refuse it with an error that names each of `parts`.
#[track_caller]
fn refused_everywhere(model: &str, parts: &[&str]) {
    refused_with_tokenizer(model, parts);
    russet(&["inspect", model]).fails(1, parts);
    russet(&["bench", model, "--prompt-tokens", "1", "--gen-tokens", "1", "--runs", "1"]).fails(1, parts);
    let out = format!("{}/refused.safetensors", env!("CARGO_TARGET_TMPDIR"));
    russet(&["eval", "logits", "--model", model, "--tokens", "1", "--out", &out]).fails(1, parts);
    assert!(fs::metadata(out).is_err());
}

/// [`refused_everywhere`] for the commands that need the tokenizer.
#[track_caller]
fn refused_with_tokenizer(model: &str, parts: &[&str]) {
    russet(&["run", model, "hello"]).fails(1, parts);
    russet(&["run", model, "hello", "--raw", "--json"]).fails(1, parts);
    russet_reading("hello", &["chat", model]).fails(1, parts);
}

#[test]
fn a_folder_that_is_missing_empty_or_a_file() {
    let empty = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = text(empty.path());
    refused_everywhere(&path, &[&path, "no config.json"]);
    let missing = format!("{path}/missing");
    refused_everywhere(&missing, &[&missing, "No such file"]);
    let file = format!("{path}/file");
    File::create(&file).unwrap();
    refused_everywhere(&file, &[&file, "is not a directory"]);
    refused_everywhere(&format!("{file}/config.json"), &["file/config.json"]);
}

#[test]
fn a_config_that_is_damaged() {
    let Some(model) = llama() else { return };
    for (contents, part) in [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("\u{0}\u{1}", "not valid JSON"),
        (&"[".repeat(100_000), "not valid JSON"),
        ("{}", "model_type"),
        (r#"{"model_type": "nonsense"}"#, "nonsense"),
        (r#"{"model_type": 3}"#, "model_type"),
    ] {
        let copy = Copy::of(&model);
        copy.write("config.json", contents);
        refused_everywhere(&copy.arg(), &["config.json", part]);
    }
}

#[test]
fn a_config_with_impossible_values() {
    let Some(model) = llama() else { return };
    for (field, value) in [
        ("hidden_size", json!(null)),
        ("hidden_size", json!(u64::MAX)),
        ("hidden_size", json!("64")),
        ("num_hidden_layers", json!(-1)),
        ("num_hidden_layers", json!(1e9)),
        ("num_attention_heads", json!(0)),
        ("vocab_size", json!(1u64 << 40)),
        ("rms_norm_eps", json!("small")),
        ("rope_scaling", json!({"rope_type": "nonsense"})),
        ("hidden_act", json!("nonsense")),
        ("quantization", json!({"group_size": 64, "bits": 4, "mode": "nonsense"})),
        ("quantization", json!({"group_size": 7, "bits": 4})),
    ] {
        let copy = Copy::of(&model);
        copy.edit("config.json", |config| config[field] = value);
        russet(&["run", &copy.arg(), "hello"]).fails(1, &["config.json", field]);
    }
}

#[test]
fn weights_that_are_damaged() {
    let Some(model) = llama() else { return };
    let whole = fs::read(format!("{model}/model.safetensors")).unwrap();
    let header = |length: u64, text: &str| [&length.to_le_bytes(), text.as_bytes()].concat();
    let huge = r#"{"a":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,8]}}"#;
    let outside = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]}}"#;
    for contents in [
        Vec::new(),
        b"short".to_vec(),
        whole[..whole.len() - 1].to_vec(),
        whole[..1000].to_vec(),
        [whole.as_slice(), b"x"].concat(),
        header(u64::MAX, "{}"),
        header(1 << 40, "{}"),
        header(2, "{}"),
        header(huge.len() as u64, huge),
        header(outside.len() as u64, outside),
    ] {
        let copy = Copy::of(&model);
        copy.write("model.safetensors", contents);
        refused_everywhere(&copy.arg(), &[&copy.arg()]);
    }
    let copy = Copy::of(&model);
    copy.remove("model.safetensors");
    refused_everywhere(&copy.arg(), &[&copy.arg(), "model*.safetensors"]);
}

#[test]
fn shards_that_do_not_fit_their_index() {
    let Some(oracle) = Oracle::get() else { return };
    let sharded = oracle.fixture(&FixtureSpec { shards: 3, ..FixtureSpec::new("llama") });
    let (first, index) = ("model-00001-of-00003.safetensors", "model.safetensors.index.json");

    let copy = Copy::of(&sharded);
    copy.remove(first);
    refused_everywhere(&copy.arg(), &[first, "does not exist"]);

    let copy = Copy::of(&sharded);
    fs::copy(copy.path().join(first), copy.path().join("model-stray.safetensors")).unwrap();
    refused_everywhere(&copy.arg(), &["model-stray.safetensors"]);

    let copy = Copy::of(&sharded);
    copy.edit(index, |index| {
        index["weight_map"]["model.norm.weight"] = json!("../model-secret.safetensors");
    });
    refused_everywhere(&copy.arg(), &[index, "model.norm.weight", "../model-secret.safetensors"]);

    for contents in ["{", "[]", "{}", r#"{"weight_map": 3}"#, r#"{"weight_map": {"a": 3}}"#] {
        let copy = Copy::of(&sharded);
        copy.write(index, contents);
        refused_everywhere(&copy.arg(), &[index]);
    }
}

#[test]
fn a_tokenizer_that_is_missing_or_damaged() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    copy.remove("tokenizer.json");
    refused_with_tokenizer(&copy.arg(), &["tokenizer.json", "does not exist"]);
    // What needs no text works without it.
    assert_eq!(russet(&["inspect", &copy.arg()]).code, Some(0));

    for contents in ["", "{", "[]", "{}", r#"{"model": {"type": "Nonsense"}}"#, &"[".repeat(100_000)] {
        copy.write("tokenizer.json", contents);
        refused_with_tokenizer(&copy.arg(), &["tokenizer.json"]);
    }
    let copy = Copy::of(&model);
    for contents in ["{", "[]", r#"{"eos_token": 3}"#] {
        copy.write("tokenizer_config.json", contents);
        refused_with_tokenizer(&copy.arg(), &["tokenizer_config.json"]);
    }
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_embedding() {
    let Some(model) = llama() else { return };
    let added = |id: u64| {
        let copy = Copy::of(&model);
        copy.edit("tokenizer.json", |tokenizer| {
            tokenizer["added_tokens"].as_array_mut().unwrap().push(json!({
                "id": id, "content": "<more>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true
            }));
            tokenizer["model"]["vocab"]["<more>"] = json!(id);
        });
        copy
    };
    refused_with_tokenizer(&added(512).arg(), &["513 tokens", "512 rows"]);
    refused_with_tokenizer(&added(4_000_000_000).arg(), &["tokenizer.json", "4000000000"]);
    assert_eq!(russet(&["run", &added(511).arg(), "hello", "-n", "1"]).code, Some(0));
}

#[test]
fn a_template_that_does_not_end_or_is_too_large() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    let loops = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}";
    let doubles =
        "{% set ns = namespace(t='x') %}{% for i in range(99) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}";
    for (template, part) in [
        (loops, "instructions"),
        (doubles, "instructions"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'chat_template' %}", "chat template"),
        (&format!("{}x{}", "{% if true %}".repeat(9000), "{% endif %}".repeat(9000)), "chat template"),
        (&format!("{{{{ {}1{} }}}}", "(".repeat(90_000), ")".repeat(90_000)), "chat template"),
        (&"x".repeat(300_000), "bytes of source"),
    ] {
        copy.set_template(template);
        russet(&["run", &copy.arg(), "hello"]).fails(1, &["chat template", part]);
        // A chat says so for each message, and goes on.
        let finished = russet_reading("a\nb", &["chat", &copy.arg()]);
        assert_eq!((finished.code, finished.stderr.matches("error: chat template").count()), (Some(0), 2));
    }
}

#[test]
fn variables_for_the_template_that_are_nested_too_deeply() {
    let Some(model) = llama() else { return };
    let nested = |depth: usize| format!("{{\"a\": {}{}}}", "[".repeat(depth), "]".repeat(depth));
    russet(&["run", &model, "hello", "-n", "1", "--chat-template-config", &nested(100)]).text();
    let args = ["run", &model, "hello", "--chat-template-config"];
    russet(&[&args, [nested(5000).as_str()].as_slice()].concat()).fails(2, &["--chat-template-config"]);
}

#[test]
fn weights_that_give_nan() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    let mut weights = fs::read(copy.path().join("model.safetensors")).unwrap();
    let data = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    weights[data..].fill(0xff);
    copy.write("model.safetensors", weights);
    russet(&["run", &copy.arg(), "hello"]).fails(1, &["not finite"]);
    let finished = russet_reading("hello", &["chat", &copy.arg()]);
    assert!(finished.stderr.contains("not finite"), "{finished:?}");
    let out = text(&copy.path().join("x.safetensors"));
    russet(&["eval", "logits", "--model", &copy.arg(), "--tokens", "1", "--out", &out])
        .fails(1, &["not finite"]);
    russet(&["bench", &copy.arg(), "--prompt-tokens", "1", "--runs", "1"]).fails(1, &["not finite"]);
}

/// A small file system, taken away when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(size: &str) -> Option<Self> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).ok()?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(folder.path());
        mount.output().ok()?.status.success().then_some(Self(folder))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_disk_without_space_for_the_starter() {
    let Some(disk) = SmallDisk::new("4m") else {
        // Not `eprintln!`: the test harness would swallow it.
        let _ = writeln!(std::io::stderr(), "skipped: a small disk can be mounted by root only");
        return;
    };
    let home = text(disk.0.path());
    let finished = russet(&["inspect", "--home", &home]);
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stderr.contains("error: not enough disk space"), "{finished:?}");
    assert!(finished.stderr.contains("MB more are needed"), "{finished:?}");
    // Nothing is left behind that would take the space that remains.
    let used = walk(disk.0.path());
    assert_eq!(used, 0, "{used} bytes are left behind");
}

/// The bytes of all files below a folder.
fn walk(folder: &std::path::Path) -> u64 {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| match entry.metadata().unwrap() {
            metadata if metadata.is_dir() => walk(&entry.path()),
            metadata => metadata.len(),
        })
        .sum()
}
