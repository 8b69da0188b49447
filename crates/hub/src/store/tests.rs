use std::{fs::FileTimes, os::unix::fs::symlink, time::Duration};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const OTHER: &str = "fedcba9876543210fedcba9876543210fedcba98";

/// A store in a temporary directory.
struct Fixture {
    root: TempDir,
    store: Store,
}

impl Fixture {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let store = Store::new(root.path().join("hub"), root.path().join("russet"));
        Self { root, store }
    }

    /// Adds a snapshot to the cache as Hugging Face lays it out: links into the blobs.
    fn cache(&self, folder: &str, commit: &str) -> PathBuf {
        let model = self.store.hf_cache().join(folder);
        let snapshot = model.join("snapshots").join(commit);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(model.join("blobs")).unwrap();
        for (name, bytes) in [("config.json", 2), ("model.safetensors", 100)] {
            let blob = format!("{commit}-{name}");
            fs::write(model.join("blobs").join(&blob), vec![b' '; bytes]).unwrap();
            symlink(Path::new("../../blobs").join(&blob), snapshot.join(name)).unwrap();
        }
        snapshot
    }

    fn set_ref(&self, folder: &str, name: &str, commit: &str) {
        let path = self.store.hf_cache().join(folder).join("refs").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, commit).unwrap();
    }

    /// Adds a model to Russet's own store.
    fn own(&self, name: &str) -> PathBuf {
        self.directory(&format!("russet/models/{name}"))
    }

    fn directory(&self, path: &str) -> PathBuf {
        let path = self.root.path().join(path);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("config.json"), "{}").unwrap();
        path
    }

    fn name_of(&self, reference: &str) -> String {
        self.store.resolve(reference).unwrap().name
    }
}

#[test]
fn a_directory_is_a_model() {
    let fixture = Fixture::new();
    let path = fixture.directory("some/model");
    let model = fixture.store.resolve(path.to_str().unwrap()).unwrap();
    let expected = ModelDir { path, name: "model".to_owned(), source: Source::Directory, revision: None };
    assert_eq!(model, expected);
}

#[test]
fn a_path_that_is_no_checkpoint_says_why() {
    let fixture = Fixture::new();
    fixture.cache("models--owner--tiny.model", COMMIT);
    let root = fixture.root.path();
    fs::create_dir(root.join("empty")).unwrap();
    fs::write(root.join("model.gguf"), "GGUF").unwrap();
    let resolve = |path: &Path| fixture.store.resolve(path.to_str().unwrap()).unwrap_err();
    assert!(matches!(resolve(&root.join("empty")), Error::NotACheckpoint { .. }));
    assert!(matches!(resolve(&root.join("model.gguf")), Error::NotADirectory { .. }));
    assert!(matches!(resolve(&root.join("missing")), Error::Io { .. }));
    // Paths are never taken for parts of names.
    assert!(matches!(resolve(Path::new(".")), Error::NotACheckpoint { .. }));
    assert!(matches!(resolve(Path::new("/tiny")), Error::Io { .. }));
}

#[test]
fn a_name_resolves_to_the_snapshot_of_main() {
    let fixture = Fixture::new();
    let snapshot = fixture.cache("models--owner--tiny", COMMIT);
    let newer = fixture.cache("models--owner--tiny", OTHER);
    touch(&newer, 100);
    fixture.set_ref("models--owner--tiny", "main", &format!("{COMMIT}\n"));
    let model = fixture.store.resolve("owner/tiny").unwrap();
    let revision = Some(COMMIT.to_owned());
    let expected =
        ModelDir { path: snapshot, name: "owner/tiny".to_owned(), source: Source::HuggingFace, revision };
    assert_eq!(model, expected);
}

#[test]
fn without_main_the_newest_snapshot_is_taken() {
    let fixture = Fixture::new();
    let [older, newer] = [COMMIT, OTHER].map(|commit| fixture.cache("models--owner--tiny", commit));
    touch(&older, 100);
    touch(&newer, 200);
    assert_eq!(fixture.store.resolve("owner/tiny").unwrap().path, newer);
    touch(&older, 300);
    assert_eq!(fixture.store.resolve("owner/tiny").unwrap().path, older);
    // A main that was never fetched counts as none.
    fixture.set_ref("models--owner--tiny", "main", "0000");
    assert_eq!(fixture.store.resolve("owner/tiny").unwrap().path, older);
}

#[test]
fn a_revision_is_a_branch_a_tag_or_a_commit() {
    let fixture = Fixture::new();
    for commit in [COMMIT, OTHER] {
        fixture.cache("models--owner--tiny", commit);
    }
    fixture.set_ref("models--owner--tiny", "main", COMMIT);
    fixture.set_ref("models--owner--tiny", "refs/pr/1", OTHER);
    let revision = |reference: &str| fixture.store.resolve(reference).unwrap().revision.unwrap();
    assert_eq!(revision("owner/tiny@main"), COMMIT);
    assert_eq!(revision("owner/tiny@refs/pr/1"), OTHER);
    assert_eq!(revision(&format!("tiny@{OTHER}")), OTHER);
    for missing in ["v2", "", "..", "../../x", "refs/../main", "/etc/passwd"] {
        let error = fixture.store.resolve(&format!("owner/tiny@{missing}")).unwrap_err();
        assert!(matches!(error, Error::RevisionNotFound { .. }), "{missing:?}: {error}");
        assert!(error.to_string().contains(COMMIT));
    }
    fixture.own("mine");
    assert!(matches!(fixture.store.resolve("mine@main"), Err(Error::RevisionNotFound { .. })));
}

#[test]
fn part_of_a_name_is_enough_where_it_fits_one_model() {
    let fixture = Fixture::new();
    for folder in
        ["models--Owner--Tiny-4bit", "models--Owner--Tiny-8bit", "models--other--large", "models--gpt2"]
    {
        fixture.cache(folder, COMMIT);
    }
    fixture.own("SmolLM2-135M-Instruct");
    assert_eq!(fixture.name_of("tiny-4"), "Owner/Tiny-4bit");
    assert_eq!(fixture.name_of("OTHER/L"), "other/large");
    assert_eq!(fixture.name_of("gpt2"), "gpt2");
    assert_eq!(fixture.name_of("smollm2"), "SmolLM2-135M-Instruct");
    match fixture.store.resolve("tiny") {
        Err(Error::Ambiguous { candidates, .. }) => {
            assert_eq!(candidates, ["Owner/Tiny-4bit", "Owner/Tiny-8bit"])
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_whole_name_comes_before_parts_of_others() {
    let fixture = Fixture::new();
    for folder in ["models--a--tiny", "models--a--tiny-chat", "models--A--tiny"] {
        fixture.cache(folder, COMMIT);
    }
    assert_eq!(fixture.name_of("a/tiny"), "a/tiny");
    assert_eq!(fixture.name_of("A/tiny"), "A/tiny");
    assert_eq!(fixture.name_of("TINY-chat"), "a/tiny-chat");
    assert!(matches!(fixture.store.resolve("tiny"), Err(Error::Ambiguous { .. })));
}

#[test]
fn what_names_no_model_is_not_found() {
    let fixture = Fixture::new();
    fixture.cache("models--owner--tiny", COMMIT);
    let long = "x".repeat(100_000);
    for reference in ["", "@", "@main", "nothing", "The capital of France is", "a\0b", "ü\n", long.as_str()]
    {
        let error = fixture.store.resolve(reference).unwrap_err();
        assert!(matches!(error, Error::ModelNotFound { .. }), "{reference:?}: {error}");
    }
    // Places that do not exist hold no models.
    let nowhere = Store::new("/nonexistent/hub".into(), "/nonexistent/russet".into());
    assert!(matches!(nowhere.resolve("tiny"), Err(Error::ModelNotFound { .. })));
    assert_eq!(nowhere.list().unwrap(), []);
}

#[test]
fn a_snapshot_without_config_is_no_checkpoint() {
    let fixture = Fixture::new();
    fs::create_dir_all(fixture.store.hf_cache().join("models--owner--empty")).unwrap();
    let snapshot = fixture.cache("models--owner--partial", COMMIT);
    fs::remove_file(snapshot.join("config.json")).unwrap();
    for name in ["empty", "partial"] {
        assert!(matches!(fixture.store.resolve(name), Err(Error::NotACheckpoint { .. })), "{name}");
    }
    let problems: Vec<_> =
        fixture.store.list().unwrap().into_iter().map(|entry| entry.problems.len()).collect();
    assert_eq!(problems, [1, 1]);
}

#[test]
fn the_list_counts_the_files_behind_links() {
    let fixture = Fixture::new();
    let snapshot = fixture.cache("models--owner--tiny", COMMIT);
    let own = fixture.own("mine");
    let entries = fixture.store.list().unwrap();
    let summary: Vec<_> = entries
        .iter()
        .map(|e| (e.name.as_str(), e.path.as_path(), e.bytes, e.source, e.revision.as_deref()))
        .collect();
    assert_eq!(
        summary,
        [
            ("mine", own.as_path(), 2, Source::Russet, None),
            ("owner/tiny", snapshot.as_path(), 102, Source::HuggingFace, Some(COMMIT)),
        ]
    );
    assert!(entries.iter().all(|entry| entry.modified.is_some() && entry.problems.is_empty()));
}

#[test]
fn broken_links_and_loops_are_reported_or_passed_over() {
    let fixture = Fixture::new();
    let snapshot = fixture.cache("models--owner--tiny", COMMIT);
    symlink("../../blobs/missing", snapshot.join("model-2.safetensors")).unwrap();
    symlink("loop", snapshot.join("loop")).unwrap();
    symlink(".", snapshot.join("here")).unwrap();
    let [entry] = fixture.store.list().unwrap().try_into().unwrap();
    assert_eq!(entry.bytes, 102);
    assert_eq!(entry.problems.len(), 2);
    assert!(entry.problems.iter().any(|problem| problem.contains("model-2.safetensors")));
}

#[test]
fn hostile_caches_cannot_lead_elsewhere() {
    let fixture = Fixture::new();
    fixture.directory("secret");
    for folder in
        ["models--..--..", "models--a--..", "models--a--b\u{1b}[31m", "models--", "models--a--b--c d"]
    {
        fixture.cache(folder, COMMIT);
    }
    fixture.cache("models--owner--tiny", COMMIT);
    let root = fixture.root.path().join("secret");
    for target in ["../../../secret", root.to_str().unwrap(), "..", ".", "", "a\0b"] {
        fixture.set_ref("models--owner--tiny", "main", target);
        let model = fixture.store.resolve("owner/tiny").unwrap();
        assert_eq!(model.revision.as_deref(), Some(COMMIT), "{target:?}");
    }
    // A reference in the form of a directory or a pipe is none.
    let refs = fixture.store.hf_cache().join("models--owner--tiny/refs");
    fs::remove_file(refs.join("main")).unwrap();
    fs::create_dir(refs.join("main")).unwrap();
    assert_eq!(fixture.name_of("owner/tiny"), "owner/tiny");
    let names: Vec<_> = fixture.store.list().unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["owner/tiny"]);
}

#[test]
fn variables_of_hugging_face_and_xdg_place_the_stores() {
    let home = Path::new("/home/user");
    let cache = |set: &[(&str, &str)]| {
        let find =
            |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
        (hf_cache_dir(find, Some(home)).unwrap(), data_dir(find, Some(home)).unwrap())
    };
    assert_eq!(cache(&[]).0, Path::new("/home/user/.cache/huggingface/hub"));
    assert_eq!(cache(&[("XDG_CACHE_HOME", "/c")]).0, Path::new("/c/huggingface/hub"));
    assert_eq!(cache(&[("XDG_CACHE_HOME", "/c"), ("HF_HOME", "/hf")]).0, Path::new("/hf/hub"));
    assert_eq!(cache(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/hub")]).0, Path::new("/hub"));
    assert_eq!(cache(&[("HF_HOME", ""), ("HF_HUB_CACHE", "")]).0, cache(&[]).0);
    assert_eq!(cache(&[("XDG_DATA_HOME", "/d")]).1, Path::new("/d/russet"));
    assert!(cache(&[]).1.starts_with(home));
    assert_eq!(hf_cache_dir(|_| None, None), None);
    assert_eq!(data_dir(|_| None, None), None);
}

proptest! {
    /// Whatever is asked for, the answer lies in the store (the test runs where no directory has a config.json).
    #[test]
    fn references_never_escape(reference in "(\\.\\./|[a-z@./~-]){0,12}|\\PC{0,20}") {
        let fixture = Fixture::new();
        fixture.directory("secret");
        fixture.cache("models--owner--tiny", COMMIT);
        if let Ok(model) = fixture.store.resolve(&reference) {
            prop_assert!(model.path.starts_with(fixture.store.hf_cache()), "{}", model.path.display());
        }
    }
}

/// Sets a directory's modification time.
fn touch(path: &Path, seconds: u64) {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(2_000_000_000 + seconds);
    File::open(path).unwrap().set_times(FileTimes::new().set_modified(time)).unwrap();
}
