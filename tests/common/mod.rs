//! What the tests of the binary share.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod http;
pub(crate) mod in_process;
pub(crate) mod parrot;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use assert_cmd::Command;
use russet_testing::{FixtureSpec, Oracle};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The binary.
pub(crate) const RUSSET: &str = env!("CARGO_BIN_EXE_russet");

/// A place where nothing is: no model store, no Hugging Face cache.
const NOWHERE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/nowhere");

/// The environment of a machine without models, whatever the user has.
pub(crate) const ENVIRONMENT: [(&str, &str); 2] = [("RUSSET_HOME", NOWHERE), ("HF_HUB_CACHE", NOWHERE)];

/// Makes every generation a row of lower-case letters: one token each, and never an end-of-sequence token.
pub(crate) const LETTERS: [&str; 52] = {
    let mut arguments = ["--logit-bias"; 52];
    let biases = [
        "97:99", "98:99", "99:99", "100:99", "101:99", "102:99", "103:99", "104:99", "105:99", "106:99",
        "107:99", "108:99", "109:99", "110:99", "111:99", "112:99", "113:99", "114:99", "115:99", "116:99",
        "117:99", "118:99", "119:99", "120:99", "121:99", "122:99",
    ];
    let mut i = 0;
    while i < biases.len() {
        arguments[2 * i + 1] = biases[i];
        i += 1;
    }
    arguments
};

/// How a command ended and what it printed.
#[derive(Debug, PartialEq)]
pub(crate) struct Finished {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Finished {
    pub(crate) fn of(output: std::process::Output) -> Self {
        let finished = Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("standard output is UTF-8"),
            stderr: String::from_utf8(output.stderr).expect("standard error is UTF-8"),
        };
        assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
        finished
    }

    /// Standard output of a command that succeeded.
    #[track_caller]
    pub(crate) fn text(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.stdout
    }

    /// [`Finished::text`] as one line of JSON.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        let text = self.text();
        assert_eq!(text.lines().count(), 1, "{text}");
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    }

    /// Checks that a command failed, printing nothing but an error that names each of `parts`.
    #[track_caller]
    pub(crate) fn fails(self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        assert!(self.stderr.starts_with("error: "), "{self:?}");
        for part in parts {
            assert!(self.stderr.contains(part), "no {part:?} in {self:?}");
        }
    }
}

/// A run of the binary on a machine without models, with nothing on standard input.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(RUSSET);
    command.args(args).envs(ENVIRONMENT).env_remove("RUST_BACKTRACE");
    command.timeout(Duration::from_secs(600));
    command
}

/// Runs [`command`] to its end.
pub(crate) fn russet(args: &[&str]) -> Finished {
    Finished::of(command(args).output().unwrap())
}

/// [`russet`] with `stdin` on standard input.
pub(crate) fn russet_reading(stdin: impl Into<Vec<u8>>, args: &[&str]) -> Finished {
    Finished::of(command(args).write_stdin(stdin).output().unwrap())
}

/// Starts a run that writes to pipes.
pub(crate) fn start(args: &[&str]) -> Child {
    let mut command = std::process::Command::new(RUSSET);
    command.args(args).envs(ENVIRONMENT).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Presses ctrl-C.
pub(crate) fn interrupt(child: &Child) {
    let command = format!("kill -s INT {}", child.id());
    assert!(std::process::Command::new("sh").args(["-c", &command]).status().unwrap().success());
}

/// The smallest llama checkpoint, for reading only; `None` where tests that need the oracle are skipped.
pub(crate) fn llama() -> Option<String> {
    Some(text(&Oracle::get()?.fixture(&FixtureSpec::new("llama"))))
}

/// A path as an argument.
pub(crate) fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// A checkpoint that a test may damage.
pub(crate) struct Copy(TempDir);

impl Copy {
    pub(crate) fn of(dir: impl AsRef<Path>) -> Self {
        let copy = Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
        }
        copy
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// The folder, as an argument.
    pub(crate) fn arg(&self) -> String {
        text(self.path())
    }

    pub(crate) fn write(&self, file: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.path().join(file), contents).unwrap();
    }

    pub(crate) fn remove(&self, file: &str) {
        fs::remove_file(self.path().join(file)).unwrap();
    }

    /// Changes a JSON file.
    pub(crate) fn edit(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let path = self.path().join(file);
        let mut value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(&mut value);
        fs::write(path, value.to_string()).unwrap();
    }

    /// Replaces the chat template.
    pub(crate) fn set_template(&self, template: &str) {
        self.write("chat_template.jinja", template);
    }

    /// Takes the chat template away.
    pub(crate) fn remove_template(&self) {
        self.remove("chat_template.jinja");
        self.edit("tokenizer_config.json", |config| {
            config.as_object_mut().unwrap().remove("chat_template");
        });
    }
}

/// The folder of Russet's own store that all tests share: the starter model is fetched once.
pub(crate) fn shared_home() -> PathBuf {
    // Cargo's folder for tests lies in the target folder.
    Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("russet-home")
}

/// Installs the starter model if it is not there yet, and returns its folder.
pub(crate) fn starter() -> PathBuf {
    let home = text(&shared_home());
    let report = russet(&["inspect", "--json", "--home", &home]).json();
    PathBuf::from(report["path"].as_str().unwrap())
}

/// A tiny embedding model; `None` without the oracle.
pub(crate) fn embedding_model() -> Option<Copy> {
    let model = Copy::of(Oracle::get()?.fixture(&FixtureSpec::new("qwen3-embedding")));
    let modules = json!([{"type": "x.Pooling", "path": "pooling"}, {"type": "x.Normalize", "path": ""}]);
    model.write("modules.json", modules.to_string());
    fs::create_dir(model.path().join("pooling")).unwrap();
    model.write("pooling/config.json", r#"{"pooling_mode_lasttoken": true}"#);
    Some(model)
}

/// The most memory that a process has had in RAM, in bytes; known on Linux only, and while it runs.
pub(crate) fn peak_rss(process: &str) -> Option<usize> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix("kB"));
    Some(peak?.trim().parse::<usize>().unwrap() * 1024)
}

/// Waits for a process to end; returns the most memory that it had.
pub(crate) fn watch_memory(child: &mut Child) -> usize {
    let (process, mut peak) = (child.id().to_string(), 0);
    while child.try_wait().unwrap().is_none() {
        peak = peak.max(peak_rss(&process).unwrap_or(0));
        std::thread::sleep(Duration::from_millis(2));
    }
    peak
}
