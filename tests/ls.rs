//! `russet ls`, and how references find models in the Hugging Face cache and in Russet's own store.
#![cfg(unix)]

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use common::{Finished, command, llama, russet, text};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A Hugging Face cache and a store of Russet's own.
struct Machine(TempDir);

impl Machine {
    fn new() -> Self {
        Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    fn hub(&self) -> PathBuf {
        self.0.path().join("hub")
    }

    fn home(&self) -> PathBuf {
        self.0.path().join("home")
    }

    /// Adds a revision of a model to the cache as huggingface_hub lays it out: files in `blobs`, links to them in
    /// `snapshots/COMMIT`.
    fn download(&self, model: &str, commit: &str, from: &str) -> PathBuf {
        let folder = self.hub().join(format!("models--{}", model.replace('/', "--")));
        let [blobs, snapshot] = ["blobs", &format!("snapshots/{commit}")].map(|name| folder.join(name));
        fs::create_dir_all(&blobs).unwrap();
        fs::create_dir_all(&snapshot).unwrap();
        for file in fs::read_dir(from).unwrap() {
            let file = file.unwrap().path();
            let name = file.file_name().unwrap().to_str().unwrap();
            let blob = format!("{commit}-{name}");
            fs::copy(&file, blobs.join(&blob)).unwrap();
            symlink(Path::new("../../blobs").join(&blob), snapshot.join(name)).unwrap();
        }
        snapshot
    }

    fn set_main(&self, model: &str, commit: &str) {
        let refs = self.hub().join(format!("models--{}", model.replace('/', "--"))).join("refs");
        fs::create_dir_all(&refs).unwrap();
        fs::write(refs.join("main"), commit).unwrap();
    }

    fn install(&self, name: &str, from: &str) {
        let folder = self.home().join("models").join(name);
        fs::create_dir_all(&folder).unwrap();
        for file in fs::read_dir(from).unwrap() {
            let file = file.unwrap().path();
            fs::copy(&file, folder.join(file.file_name().unwrap())).unwrap();
        }
    }

    fn russet(&self, args: &[&str]) -> Finished {
        let mut command = command(args);
        command.env("HF_HUB_CACHE", self.hub()).env("RUSSET_HOME", self.home());
        Finished::of(command.output().unwrap())
    }

    /// The path of the model that a reference finds.
    #[track_caller]
    fn path(&self, reference: &str) -> Value {
        self.russet(&["inspect", "--json", reference]).json()["path"].clone()
    }
}

/// A machine with three models.
fn machine() -> Option<(Machine, [PathBuf; 3])> {
    let model = llama()?;
    let machine = Machine::new();
    let old = machine.download("acme/Tiny-Llama-4bit", "1111aaaa", &model);
    machine.set_main("acme/Tiny-Llama-4bit", "1111aaaa");
    let new = machine.download("acme/Tiny-Llama-4bit", "2222bbbb", &model);
    let other = machine.download("umbrella/tiny-llama-8bit", "3333cccc", &model);
    machine.install("Pocket", &model);
    Some((machine, [old, new, other]))
}

#[test]
fn without_models_it_says_how_to_get_one() {
    assert_eq!(russet(&["ls"]).text(), "No models yet. `russet run` installs the starter model.\n");
    assert_eq!(russet(&["ls", "--json"]).json(), json!([]));
}

#[test]
fn models_of_cache_and_store_are_listed() {
    let Some((machine, [old, _, other])) = machine() else { return };
    let models = machine.russet(&["ls", "--json"]).json();
    let bytes: u64 =
        fs::read_dir(&old).unwrap().map(|f| fs::metadata(f.unwrap().path()).unwrap().len()).sum();
    let expected = |i: usize, name: &str, path: &Path, source: &str, revision: Value| {
        json!({
            "name": name,
            "path": path,
            "bytes": bytes,
            "source": source,
            "revision": revision,
            "modified": models[i]["modified"],
            "problems": [],
        })
    };
    assert_eq!(
        models,
        json!([
            expected(0, "Pocket", &machine.home().join("models/Pocket"), "russet", Value::Null),
            expected(1, "acme/Tiny-Llama-4bit", &old, "huggingface", json!("1111aaaa")),
            expected(2, "umbrella/tiny-llama-8bit", &other, "huggingface", json!("3333cccc")),
        ])
    );
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    for model in models.as_array().unwrap() {
        assert!(now.abs_diff(model["modified"].as_u64().unwrap()) < 3600, "{model}");
    }

    let text = machine.russet(&["ls"]).text();
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        rows,
        [
            ["Pocket", "0.2", "MB", "russet"],
            ["acme/Tiny-Llama-4bit", "0.2", "MB", "huggingface"],
            ["umbrella/tiny-llama-8bit", "0.2", "MB", "huggingface"],
        ]
    );
}

#[test]
fn home_may_be_given_as_a_flag() {
    let Some((machine, _)) = machine() else { return };
    let models = russet(&["ls", "--json", "--home", &text(&machine.home())]).json();
    assert_eq!((models.as_array().unwrap().len(), &models[0]["name"]), (1, &json!("Pocket")));
}

#[test]
fn what_is_broken_is_said() {
    let Some((machine, [old, _, other])) = machine() else { return };
    fs::remove_file(old.join("model.safetensors").canonicalize().unwrap()).unwrap();
    fs::remove_file(other.join("config.json")).unwrap();
    let models = machine.russet(&["ls", "--json"]).json();
    let problems = |i: usize| models[i]["problems"].to_string();
    assert!(problems(1).contains("model.safetensors") && problems(1).contains("missing"), "{models}");
    assert!(problems(2).contains("config.json"), "{models}");
    let text = machine.russet(&["ls"]).text();
    assert!(text.contains("model.safetensors"), "{text}");
}

#[test]
fn names_and_unique_parts_of_names_find_models() {
    let Some((machine, [old, new, other])) = machine() else { return };
    for reference in ["acme/Tiny-Llama-4bit", "ACME/tiny-llama-4BIT", "Tiny-Llama-4bit", "4bit", "acme"] {
        assert_eq!(machine.path(reference), json!(old), "{reference}");
    }
    for reference in ["umbrella/tiny-llama-8bit", "8BIT", "umbrella/tiny-llama-8bit@3333cccc"] {
        assert_eq!(machine.path(reference), json!(other), "{reference}");
    }
    // main wins over what is newer, unless another revision is asked for.
    assert_eq!(machine.path("4bit@2222bbbb"), json!(new));
    assert_eq!(machine.path("4bit@main"), json!(old));
    assert_eq!(machine.path("pocket"), json!(machine.home().join("models/Pocket")));
}

#[test]
fn a_model_found_by_name_runs_under_its_name() {
    let Some((machine, _)) = machine() else { return };
    let result = machine.russet(&["run", "4bit", "hello", "-n", "1", "--json"]).json();
    assert_eq!(result["model"], "acme/Tiny-Llama-4bit");
    // As the single positional it is no prompt; the prompt is missing.
    machine.russet(&["run", "4bit"]).fails(1, &["the prompt is empty"]);
}

#[test]
fn references_that_fit_several_models_or_none_are_refused() {
    let Some((machine, _)) = machine() else { return };
    let several = ["\"tiny-llama\"", "acme/Tiny-Llama-4bit", "umbrella/tiny-llama-8bit"];
    machine.russet(&["inspect", "tiny-llama"]).fails(1, &several);
    // Nor is it a prompt.
    machine.russet(&["run", "tiny-llama"]).fails(1, &several);
    machine.russet(&["inspect", "no-such-model"]).fails(1, &["\"no-such-model\"", &text(&machine.hub())]);
    machine.russet(&["inspect", "4bit@9999"]).fails(1, &["\"9999\"", "1111aaaa", "2222bbbb"]);
    machine.russet(&["inspect", "4bit@../../x"]).fails(1, &["no revision"]);
}
