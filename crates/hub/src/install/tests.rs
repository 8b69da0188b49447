use std::{
    fs::FileTimes,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, SystemTime},
};

use tempfile::TempDir;

use super::*;

const ORIGIN: &str = "test 1";

fn store() -> (TempDir, Store) {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path().join("hub"), root.path().join("russet"));
    (root, store)
}

fn install_files(store: &Store, files: &[(&str, &str)]) -> Result<PathBuf, Error> {
    install(store, "model", ORIGIN, &mut |_| {}, |_, model, _| {
        for (name, contents) in files {
            fs::write(model.join(name), contents).unwrap();
        }
        Ok(())
    })
}

fn state_of(path: &Path) -> State {
    state(path, ORIGIN, &mut |_| {}).unwrap()
}

#[track_caller]
fn assert_damaged(path: &Path, what: &str) {
    match state_of(path) {
        State::Damaged(found) => assert!(found.contains(what), "{found}"),
        other => panic!("{other:?}"),
    }
}

fn set_modified(path: &Path, seconds: u64) {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    File::options().write(true).open(path).unwrap().set_times(FileTimes::new().set_modified(time)).unwrap();
}

#[test]
fn an_installed_model_is_intact_and_not_built_again() {
    let (_root, store) = store();
    let path = install_files(&store, &[("config.json", "{}"), ("weights", "w")]).unwrap();
    assert_eq!(path, store.models_dir().join("model"));
    assert_eq!(state_of(&path), State::Intact);
    let again = install(&store, "model", ORIGIN, &mut |_| {}, |_, _, _| panic!("built again"));
    assert_eq!(again.unwrap(), path);
    assert!(!store.home().join("staging").exists());
}

#[test]
fn an_intact_model_is_recognised_without_reading_its_files() {
    let (_root, store) = store();
    let path = install_files(&store, &[("weights", "w")]).unwrap();
    let found = state(&path, ORIGIN, &mut |progress| panic!("{progress:?}")).unwrap();
    assert_eq!(found, State::Intact);
}

#[test]
fn damage_is_noticed_and_repaired() {
    let (_root, store) = store();
    let files = [("config.json", "{}"), ("weights", "wwww")];
    let path = install_files(&store, &files).unwrap();
    let weights = path.join("weights");
    let repaired = |what: &str| {
        assert_damaged(&path, what);
        install_files(&store, &files).unwrap();
        assert_eq!(state_of(&path), State::Intact);
        assert_eq!(fs::read_to_string(&weights).unwrap(), "wwww");
    };

    fs::remove_file(&weights).unwrap();
    repaired("\"weights\" is missing");
    fs::write(&weights, "ww").unwrap();
    repaired("has 2 bytes, not 4");
    fs::write(&weights, "xxxx").unwrap();
    set_modified(&weights, 1);
    repaired("contents of \"weights\" have changed");
    fs::remove_file(path.join(MANIFEST)).unwrap();
    repaired("incomplete");
    fs::write(path.join(MANIFEST), "{").unwrap();
    repaired("cannot be read");
    fs::remove_file(&weights).unwrap();
    fs::create_dir(&weights).unwrap();
    repaired("\"weights\" is missing");
    fs::remove_dir_all(&path).unwrap();
    assert_eq!(state_of(&path), State::Missing);
}

#[test]
fn a_model_of_another_origin_is_replaced() {
    let (_root, store) = store();
    let path = install_files(&store, &[("weights", "old")]).unwrap();
    assert!(matches!(state(&path, "test 2", &mut |_| {}).unwrap(), State::Damaged(_)));
    install(&store, "model", "test 2", &mut |_| {}, |_, model, _| {
        fs::write(model.join("weights"), "new").unwrap();
        Ok(())
    })
    .unwrap();
    assert_eq!(fs::read_to_string(path.join("weights")).unwrap(), "new");
}

#[test]
fn a_manifest_cannot_name_files_elsewhere() {
    let (root, store) = store();
    let path = install_files(&store, &[("weights", "w")]).unwrap();
    let outside = root.path().join("outside");
    fs::write(&outside, "w").unwrap();
    let manifest = fs::read_to_string(path.join(MANIFEST)).unwrap();
    for name in ["../../../outside", outside.to_str().unwrap(), "", "."] {
        let changed = manifest.replace("\"weights\"", &format!("{name:?}"));
        fs::write(path.join(MANIFEST), changed).unwrap();
        assert_damaged(&path, "is missing");
    }
}

#[test]
fn unchanged_contents_with_a_new_time_are_hashed_once() {
    let (_root, store) = store();
    let path = install_files(&store, &[("weights", "w")]).unwrap();
    set_modified(&path.join("weights"), 1);
    let mut hashed = 0;
    for _ in 0..2 {
        assert_eq!(state(&path, ORIGIN, &mut |_| hashed += 1).unwrap(), State::Intact);
    }
    assert_eq!(hashed, 1);
}

#[test]
fn a_failed_installation_leaves_nothing_and_keeps_what_was_there() {
    let (_root, store) = store();
    let fail = |model: &Path| {
        fs::write(model.join("weights"), "half").unwrap();
        Err(Error::Interrupted)
    };
    let failed = install(&store, "model", ORIGIN, &mut |_| {}, |_, model, _| fail(model));
    assert!(matches!(failed, Err(Error::Interrupted)));
    assert_eq!(fs::read_dir(store.models_dir()).unwrap().count(), 0);
    assert!(!store.home().join("staging").exists());

    let path = install_files(&store, &[("weights", "w")]).unwrap();
    install(&store, "model", "test 2", &mut |_| {}, |_, model, _| fail(model)).unwrap_err();
    assert_eq!(state_of(&path), State::Intact);
}

#[test]
fn what_an_interrupted_installation_left_is_removed() {
    let (_root, store) = store();
    let left = store.home().join("staging/model");
    fs::create_dir_all(&left).unwrap();
    fs::write(left.join("weights"), "half").unwrap();
    let path = install_files(&store, &[("config.json", "{}")]).unwrap();
    assert!(!path.join("weights").exists());
    assert!(!store.home().join("staging").exists());
}

#[test]
fn of_two_at_once_one_builds_and_the_other_waits() {
    let (_root, store) = store();
    let built = AtomicU32::new(0);
    let waited = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut progress = |progress: Progress| {
                    if progress.phase == Phase::Waiting {
                        waited.fetch_add(1, Ordering::Relaxed);
                    }
                };
                install(&store, "model", ORIGIN, &mut progress, |_, model, _| {
                    built.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(300));
                    fs::write(model.join("weights"), "w").unwrap();
                    Ok(())
                })
                .unwrap();
            });
        }
    });
    assert_eq!(built.into_inner(), 1);
    assert!(waited.into_inner() >= 1);
}

#[test]
fn a_home_that_cannot_be_created_is_named() {
    let (root, _) = store();
    let file = root.path().join("file");
    fs::write(&file, "").unwrap();
    let store = Store::new(root.path().join("hub"), file.join("russet"));
    let error = install_files(&store, &[]).unwrap_err();
    assert!(error.to_string().contains(&file.display().to_string()), "{error}");
}

#[test]
fn a_full_disk_is_told_apart() {
    let full = |code| Error::io("write", Path::new("/x"))(io::Error::from_raw_os_error(code));
    // ENOSPC and EACCES have these numbers on every system Russet runs on.
    assert!(matches!(full(28), Error::DiskFull { .. }));
    assert!(matches!(full(13), Error::Io { .. }));
    let message = Error::DiskFull { path: "/x".into(), missing: Some(1_500_000) }.to_string();
    assert!(message.contains("2 MB more"), "{message}");
}

#[test]
fn sha256_is_the_standard_one() {
    let (root, _) = store();
    let path = root.path().join("abc");
    fs::write(&path, "abc").unwrap();
    let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(sha256(&path, &mut |_| {}).unwrap(), expected);
}
