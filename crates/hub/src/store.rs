//! Where models are, and what they are called.

use std::{
    env,
    ffi::OsString,
    fs::{self, File},
    io::{self, Read},
    path::{Component, Path, PathBuf},
    time::SystemTime,
};

use crate::Error;

/// Directories nested deeper than this in a model are not measured.
const MAX_DEPTH: u32 = 8;

/// The places where models are kept: the Hugging Face cache, and Russet's own store.
#[derive(Debug, Clone)]
pub struct Store {
    hf_cache: PathBuf,
    home: PathBuf,
}

/// A model that a reference resolved to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelDir {
    /// The directory with its config.json.
    pub path: PathBuf,
    /// Its name: `owner/name`, or a directory's.
    pub name: String,
    /// Where it was found.
    pub source: Source,
    /// The commit of the snapshot, in the Hugging Face cache.
    pub revision: Option<String>,
}

/// Where a model was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A directory that the user named.
    Directory,
    /// The Hugging Face cache.
    HuggingFace,
    /// Russet's own store.
    Russet,
}

/// A model in the list of those on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// `owner/name`, or the directory's name in Russet's own store.
    pub name: String,
    /// The directory that the name resolves to.
    pub path: PathBuf,
    /// Bytes of its files, links followed.
    pub bytes: u64,
    /// Where it is.
    pub source: Source,
    /// The commit of the snapshot, in the Hugging Face cache.
    pub revision: Option<String>,
    /// When the newest of its files was last modified.
    pub modified: Option<SystemTime>,
    /// What keeps it from being used: broken links, a missing config.json.
    pub problems: Vec<String>,
}

impl Store {
    /// A store of given places: the Hugging Face cache (the directory with `models--owner--name` folders) and the
    /// directory of Russet's own data. Neither needs to exist.
    pub fn new(hf_cache: PathBuf, home: PathBuf) -> Self {
        Self { hf_cache, home }
    }

    /// The user's store. The Hugging Face cache is where `HF_HUB_CACHE`, `HF_HOME` or `XDG_CACHE_HOME` put it, else
    /// `~/.cache/huggingface/hub`. Russet's own data are in `home`, or where it is absent in `russet` in the user's
    /// data directory (`XDG_DATA_HOME`, else `~/.local/share`; `~/Library/Application Support` on macOS).
    ///
    /// # Errors
    /// [`Error::NoHome`] where neither these variables nor the home directory are known.
    pub fn from_env(home: Option<PathBuf>) -> Result<Self, Error> {
        let variable = |name: &str| env::var_os(name);
        let user = env::home_dir();
        let hf_cache = hf_cache_dir(variable, user.as_deref()).ok_or(Error::NoHome)?;
        let home = home.or_else(|| data_dir(variable, user.as_deref())).ok_or(Error::NoHome)?;
        Ok(Self::new(hf_cache, home))
    }

    /// The directory of Russet's own data.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// The directory with one folder for each model of Russet's own store.
    pub fn models_dir(&self) -> PathBuf {
        self.home.join("models")
    }

    /// The Hugging Face cache.
    pub fn hf_cache(&self) -> &Path {
        &self.hf_cache
    }

    /// Finds the model that a reference names: the path of a directory, a name (`owner/name`, in Russet's own
    /// store `name`), its last part, or any part of it that fits one model only; in names, case does not matter.
    /// After a name, `@revision` picks a branch, tag or commit of the Hugging Face cache; otherwise `main` is used
    /// or, where the cache has none, the newest snapshot.
    ///
    /// # Errors
    /// [`Error::ModelNotFound`], [`Error::Ambiguous`], [`Error::RevisionNotFound`]; [`Error::NotADirectory`] and
    /// [`Error::NotACheckpoint`] where the reference leads to something else; [`Error::Io`] where a path leads
    /// nowhere or a place cannot be read.
    pub fn resolve(&self, reference: &str) -> Result<ModelDir, Error> {
        let path = Path::new(reference);
        if has_config(path)? {
            return Ok(ModelDir {
                path: path.to_owned(),
                name: directory_name(path),
                source: Source::Directory,
                revision: None,
            });
        }
        // Anything that begins like a path (/, ., ..) is nothing else.
        if !matches!(path.components().next(), Some(Component::Normal(_)) | None) {
            return Err(not_a_model(path).unwrap_or_else(|error| Error::io("open", path)(error)));
        }
        let (name, revision) = match reference.rsplit_once('@') {
            Some((name, revision)) => (name, Some(revision)),
            None => (reference, None),
        };
        match pick(&self.models()?, name) {
            Ok(model) => model.resolve(revision),
            Err(candidates) if candidates.is_empty() => {
                Err(not_a_model(path).unwrap_or_else(|_| Error::ModelNotFound {
                    reference: reference.to_owned(),
                    hf_cache: self.hf_cache.clone(),
                    russet_store: self.models_dir(),
                }))
            }
            Err(candidates) => Err(Error::Ambiguous { reference: reference.to_owned(), candidates }),
        }
    }

    /// The models on this machine, by name. For each model of the Hugging Face cache, the snapshot that its name
    /// resolves to.
    ///
    /// # Errors
    /// [`Error::Io`] where a place cannot be read.
    pub fn list(&self) -> Result<Vec<Entry>, Error> {
        let mut entries: Vec<Entry> = self.models()?.iter().map(Model::entry).collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Every model in both places.
    fn models(&self) -> Result<Vec<Model>, Error> {
        let cached = subdirectories(&self.hf_cache)?.into_iter().filter_map(|(folder, path)| {
            let name = folder.strip_prefix("models--")?.replacen("--", "/", 1);
            Some(Model { name, path, source: Source::HuggingFace })
        });
        let own = subdirectories(&self.models_dir())?.into_iter().map(|(name, path)| Model {
            name,
            path,
            source: Source::Russet,
        });
        Ok(cached.chain(own).filter(|model| is_model_name(&model.name)).collect())
    }
}

/// A model by its name, before one of its snapshots is picked.
#[derive(Debug)]
struct Model {
    name: String,
    /// In the Hugging Face cache the folder of all its snapshots, else the model's directory.
    path: PathBuf,
    source: Source,
}

impl Model {
    fn resolve(&self, revision: Option<&str>) -> Result<ModelDir, Error> {
        let snapshot = match self.source {
            Source::HuggingFace => match revision {
                Some(revision) => self.snapshot(revision),
                None => self.snapshot("main").or_else(|| self.newest_snapshot()),
            },
            _ if revision.is_none() => Some((None, self.path.clone())),
            _ => None,
        };
        let (commit, path) = match (snapshot, revision) {
            (Some(snapshot), _) => snapshot,
            (None, None) => return Err(Error::NotACheckpoint { path: self.path.clone() }),
            (None, Some(revision)) => {
                return Err(Error::RevisionNotFound {
                    model: self.name.clone(),
                    revision: revision.to_owned(),
                    available: self.revisions(),
                });
            }
        };
        if !has_config(&path)? {
            return Err(Error::NotACheckpoint { path });
        }
        Ok(ModelDir { path, name: self.name.clone(), source: self.source, revision: commit })
    }

    /// The snapshot that a branch, a tag or a commit names.
    fn snapshot(&self, revision: &str) -> Option<(Option<String>, PathBuf)> {
        // A revision may hold slashes (refs/pr/1), but each part must be a plain name.
        if !revision.split('/').all(is_plain_name) {
            return None;
        }
        let commit =
            read_short(&self.path.join("refs").join(revision)).unwrap_or_else(|| revision.to_owned());
        let path = self.path.join("snapshots").join(&commit);
        (is_plain_name(&commit) && path.is_dir()).then_some((Some(commit), path))
    }

    fn newest_snapshot(&self) -> Option<(Option<String>, PathBuf)> {
        let snapshots = subdirectories(&self.path.join("snapshots")).ok()?;
        let modified = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).ok();
        let newest = snapshots.into_iter().max_by_key(|(_, path)| modified(path))?;
        Some((Some(newest.0), newest.1))
    }

    /// The commits of all snapshots, and `main` where it is known.
    fn revisions(&self) -> Vec<String> {
        let snapshots = subdirectories(&self.path.join("snapshots")).unwrap_or_default();
        let main = self.snapshot("main").map(|_| "main".to_owned());
        main.into_iter().chain(snapshots.into_iter().map(|(commit, _)| commit)).collect()
    }

    fn entry(&self) -> Entry {
        let resolved = self.resolve(None);
        let (path, revision) = match &resolved {
            Ok(model) => (model.path.clone(), model.revision.clone()),
            Err(_) => (self.path.clone(), None),
        };
        let mut entry = Entry {
            name: self.name.clone(),
            bytes: 0,
            source: self.source,
            revision,
            modified: None,
            problems: Vec::from_iter(resolved.err().map(|error| error.to_string())),
            path: path.clone(),
        };
        measure(&path, &path, MAX_DEPTH, &mut entry);
        entry
    }
}

/// The one model that a name fits. Equal names come before equal last parts, and these before parts of names.
/// Where none or several fit, their names.
fn pick<'a>(models: &'a [Model], name: &str) -> Result<&'a Model, Vec<String>> {
    let wanted = name.to_lowercase();
    if wanted.is_empty() {
        return Err(Vec::new());
    }
    let rules: [&dyn Fn(&str) -> bool; 4] = [
        &|candidate| candidate == name,
        &|candidate| candidate.to_lowercase() == wanted,
        &|candidate| candidate.rsplit('/').next().is_some_and(|last| last.to_lowercase() == wanted),
        &|candidate| candidate.to_lowercase().contains(&wanted),
    ];
    for fits in rules {
        let fitting: Vec<&Model> = models.iter().filter(|model| fits(&model.name)).collect();
        match fitting.as_slice() {
            [] => {}
            [model] => return Ok(model),
            several => {
                let mut names: Vec<_> = several.iter().map(|model| model.name.clone()).collect();
                names.sort();
                return Err(names);
            }
        }
    }
    Err(Vec::new())
}

/// What is wrong with a path that leads to something, but to no checkpoint.
fn not_a_model(path: &Path) -> io::Result<Error> {
    let path = path.to_owned();
    let is_directory = path.metadata()?.is_dir();
    Ok(if is_directory { Error::NotACheckpoint { path } } else { Error::NotADirectory { path } })
}

/// Adds up the files below a directory, and notes links that lead nowhere.
fn measure(root: &Path, directory: &Path, depth: u32, entry: &mut Entry) {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) => {
            entry.problems.push(format!("{} cannot be read: {error}", directory.display()));
            return;
        }
    };
    for path in entries.flatten().map(|file| file.path()) {
        let shown = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        let is_link = path.is_symlink();
        match path.metadata() {
            Ok(metadata) if metadata.is_file() => {
                entry.bytes = entry.bytes.saturating_add(metadata.len());
                entry.modified = entry.modified.max(metadata.modified().ok());
            }
            // Links to directories are not followed: they can form loops.
            Ok(metadata) if metadata.is_dir() && !is_link && depth > 0 => {
                measure(root, &path, depth - 1, entry)
            }
            Ok(_) => {}
            Err(_) if is_link => {
                entry.problems.push(format!("{shown:?} is a link to a file that is missing"))
            }
            Err(error) => entry.problems.push(format!("{shown:?} cannot be read: {error}")),
        }
    }
}

/// Whether a directory has a config.json. A path that cannot exist has none; one that may not be read is an error.
fn has_config(directory: &Path) -> Result<bool, Error> {
    let config = directory.join("config.json");
    match config.metadata() {
        Ok(metadata) => Ok(metadata.is_file() && !directory.as_os_str().is_empty()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(Error::io("read", &config)(error))
        }
        Err(_) => Ok(false),
    }
}

/// The directories in a directory, with their names; none where it does not exist. Names that are not UTF-8 and
/// hidden ones are left out.
fn subdirectories(directory: &Path) -> Result<Vec<(String, PathBuf)>, Error> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("list", directory)(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(Error::io("list", directory))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        if let Some(name) = name.filter(|name| !name.starts_with('.') && path.is_dir()) {
            found.push((name, path));
        }
    }
    Ok(found)
}

/// What a model may be called: `name` or `owner/name`, of the characters that Hugging Face allows. Folders called
/// otherwise are not models; their names may hold anything, control characters too.
fn is_model_name(name: &str) -> bool {
    name.split('/').count() <= 2 && name.split('/').all(is_plain_name)
}

/// A name that is safe as one component of a path.
fn is_plain_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

/// The first 200 bytes of a file, trimmed.
fn read_short(path: &Path) -> Option<String> {
    // Opening anything else, a pipe for one, may block.
    if !path.is_file() {
        return None;
    }
    let mut contents = String::new();
    File::open(path).ok()?.take(200).read_to_string(&mut contents).ok()?;
    Some(contents.trim().to_owned())
}

/// The name of the directory that a path leads to, for paths such as `.` as well.
fn directory_name(path: &Path) -> String {
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    absolute.file_name().unwrap_or(absolute.as_os_str()).to_string_lossy().into_owned()
}

fn hf_cache_dir(variable: impl Fn(&str) -> Option<OsString>, home: Option<&Path>) -> Option<PathBuf> {
    let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path("HF_HUB_CACHE")
        .or_else(|| Some(path("HF_HOME")?.join("hub")))
        .or_else(|| Some(path("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(home?.join(".cache/huggingface/hub")))
}

fn data_dir(variable: impl Fn(&str) -> Option<OsString>, home: Option<&Path>) -> Option<PathBuf> {
    let data = match variable("XDG_DATA_HOME").filter(|value| !value.is_empty()) {
        Some(value) => PathBuf::from(value),
        None if cfg!(target_os = "macos") => home?.join("Library/Application Support"),
        None => home?.join(".local/share"),
    };
    Some(data.join("russet"))
}

#[cfg(test)]
mod tests;
