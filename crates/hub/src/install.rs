//! Atomic installation of a model directory into Russet's own store.
//!
//! A model is built in a staging directory on the same file system, sealed with a manifest of its files, and
//! renamed into place, so a directory in the store is complete or absent whatever interrupts the installation.
//! The manifest is also how later starts notice damage without reading the weights: sizes are compared always,
//! contents only where a modification time has changed.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Component, Path, PathBuf},
    time::UNIX_EPOCH,
};

use fs4::{FileExt, TryLockError};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{Error, Phase, Progress, Store};

const MANIFEST: &str = "russet-manifest.json";
/// Larger than any manifest; keeps a file that is none out of memory.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

/// What was installed: the last file written into a model's directory.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Manifest {
    /// What the model was made from and how; a model of another origin is installed anew.
    origin: String,
    files: Vec<ManifestFile>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct ManifestFile {
    name: String,
    size: u64,
    sha256: String,
    /// Modification time, nanoseconds since the Unix epoch.
    modified: u64,
}

/// State of an installed model.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// All files are as they were installed.
    Intact,
    /// There is nothing.
    Missing,
    /// Something is there that is not what was installed. Says what.
    Damaged(String),
}

/// Compares an installed model with its manifest.
pub(crate) fn state(
    directory: &Path,
    origin: &str,
    progress: &mut dyn FnMut(Progress),
) -> Result<State, Error> {
    let damaged = |what: String| Ok(State::Damaged(what));
    let mut json = Vec::new();
    match File::open(directory.join(MANIFEST)) {
        Ok(file) => {
            file.take(MAX_MANIFEST_BYTES).read_to_end(&mut json).map_err(Error::io("read", directory))?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return if directory.exists() { damaged("incomplete".to_owned()) } else { Ok(State::Missing) };
        }
        Err(error) => return Err(Error::io("open", &directory.join(MANIFEST))(error)),
    }
    let Ok(mut manifest) = serde_json::from_slice::<Manifest>(&json) else {
        return damaged(format!("damaged ({MANIFEST} cannot be read)"));
    };
    if manifest.origin != origin {
        return damaged("of another version".to_owned());
    }
    let mut touched = false;
    for file in &mut manifest.files {
        let path = directory.join(&file.name);
        let metadata = path.metadata().ok().filter(|metadata| metadata.is_file());
        let (Some(metadata), true) = (metadata, is_file_name(&file.name)) else {
            return damaged(format!("damaged ({:?} is missing)", file.name));
        };
        if metadata.len() != file.size {
            return damaged(format!(
                "damaged ({:?} has {} bytes, not {})",
                file.name,
                metadata.len(),
                file.size
            ));
        }
        let modified = modified(&metadata);
        if modified != file.modified {
            if sha256(&path, progress)? != file.sha256 {
                return damaged(format!("damaged (the contents of {:?} have changed)", file.name));
            }
            file.modified = modified;
            touched = true;
        }
    }
    if touched {
        // Only spares later starts the hashing, so a store that cannot be written is no failure.
        let _ = write_manifest(directory, &manifest);
    }
    Ok(State::Intact)
}

/// Replaces the model `name` of Russet's own store by what `build` makes, unless another process has just installed
/// it. `build` is given a scratch directory and the directory to fill.
///
/// # Errors
/// Those of `build` and of file operations. Nothing of the installation is left behind then, and a model that
/// was there before stays.
pub(crate) fn install(
    store: &Store,
    name: &str,
    origin: &str,
    progress: &mut dyn FnMut(Progress),
    build: impl FnOnce(&Path, &Path, &mut dyn FnMut(Progress)) -> Result<(), Error>,
) -> Result<PathBuf, Error> {
    let models = store.models_dir();
    let target = models.join(name);
    fs::create_dir_all(&models).map_err(Error::io("create", &models))?;
    let _lock = lock(&store.home().join("install.lock"), progress)?;
    if state(&target, origin, progress)? == State::Intact {
        return Ok(target);
    }

    let staging = Staging::create(store.home().join("staging"))?;
    let scratch = staging.directory("scratch")?;
    let model = staging.directory("model")?;
    build(&scratch, &model, progress)?;
    seal(&model, origin, progress)?;

    if target.symlink_metadata().is_ok() {
        let old = staging.path.join("old");
        fs::rename(&target, &old).map_err(Error::io("replace", &target))?;
    }
    fs::rename(&model, &target).map_err(Error::io("create", &target))?;
    sync_directory(&models)?;
    Ok(target)
}

/// The lower-case hexadecimal SHA-256 of a file.
pub(crate) fn sha256(path: &Path, progress: &mut dyn FnMut(Progress)) -> Result<String, Error> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let total = file.metadata().ok().map(|metadata| metadata.len());
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0;
    loop {
        let len = file.read(&mut buffer).map_err(Error::io("read", path))?;
        if len == 0 {
            break;
        }
        hasher.update(buffer.get(..len).unwrap_or_default());
        done += len as u64;
        progress(Progress { phase: Phase::Verifying, done, total });
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Waits for the right to change the store. The lock ends with the process that holds it, however it ends.
fn lock(path: &Path, progress: &mut dyn FnMut(Progress)) -> Result<File, Error> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(Error::io("create", path))?;
    match FileExt::try_lock(&file) {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            progress(Progress { phase: Phase::Waiting, done: 0, total: None });
            FileExt::lock(&file).map_err(Error::io("lock", path))?;
        }
        Err(TryLockError::Error(error)) => return Err(Error::io("lock", path)(error)),
    }
    Ok(file)
}

/// The directory in which a model is built; removed in the end, with whatever is still in it.
struct Staging {
    path: PathBuf,
}

impl Staging {
    /// Creates it, empty: what an interrupted installation left there goes. The caller holds the lock.
    fn create(path: PathBuf) -> Result<Self, Error> {
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::io("remove", &path)(error));
            }
            _ => {}
        }
        fs::create_dir(&path).map_err(Error::io("create", &path))?;
        Ok(Self { path })
    }

    fn directory(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.path.join(name);
        fs::create_dir(&path).map_err(Error::io("create", &path))?;
        Ok(path)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // What cannot be removed now is removed by the next installation.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Writes the manifest of a finished directory.
fn seal(directory: &Path, origin: &str, progress: &mut dyn FnMut(Progress)) -> Result<(), Error> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(Error::io("list", directory))? {
        let entry = entry.map_err(Error::io("list", directory))?;
        let path = entry.path();
        let metadata = path.metadata().map_err(Error::io("read", &path))?;
        files.push(ManifestFile {
            name: entry.file_name().to_string_lossy().into_owned(),
            size: metadata.len(),
            sha256: sha256(&path, progress)?,
            modified: modified(&metadata),
        });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let manifest = Manifest { origin: origin.to_owned(), files };
    write_manifest(directory, &manifest).map_err(Error::io("write", &directory.join(MANIFEST)))?;
    sync_directory(directory)
}

/// Writes a manifest beside its final name and renames it, so that no reader sees half of one.
fn write_manifest(directory: &Path, manifest: &Manifest) -> io::Result<()> {
    let temporary = directory.join(format!("{MANIFEST}.{}", std::process::id()));
    let written = File::create(&temporary).and_then(|mut file| {
        file.write_all(serde_json::to_string_pretty(manifest)?.as_bytes())?;
        file.sync_all()
    });
    let renamed = written.and_then(|()| fs::rename(&temporary, directory.join(MANIFEST)));
    if renamed.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    renamed
}

fn sync_directory(path: &Path) -> Result<(), Error> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(Error::io("write", path))
}

fn is_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
}

fn modified(metadata: &fs::Metadata) -> u64 {
    let since_epoch = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since_epoch.and_then(|duration| u64::try_from(duration.as_nanos()).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests;
