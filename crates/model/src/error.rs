use std::path::{Path, PathBuf};

use crate::profile::ProfileError;

/// Why a checkpoint can't be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory can't be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{}: {message}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        message: String,
    },
    /// A config field is missing or has a value that can't be used.
    #[error("{}: field {field:?}: {message}", path.display())]
    Field {
        /// The config file.
        path: PathBuf,
        /// The field, with its parents separated by dots.
        field: String,
        /// What is wrong.
        message: String,
    },
    /// A tensor is missing, unexpected, or of the wrong shape or dtype.
    #[error("{}: tensor {name:?}: {message}", path.display())]
    Tensor {
        /// The checkpoint directory or the weight file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is wrong.
        message: String,
    },
    /// The profile can't be used.
    #[error("{}: {source}", path.display())]
    Profile {
        /// The checkpoint directory.
        path: PathBuf,
        /// Why.
        source: ProfileError,
    },
    /// The fidelity asked for is not available for this model on this device.
    #[error("{0}")]
    Fidelity(String),
    /// The call does not fit the model: token ids, lengths.
    #[error("{0}")]
    Input(String),
    /// MLX refused or failed.
    #[error("MLX: {0}")]
    Mlx(#[from] russet_mlx::Error),
}

/// The result of loading or running a model.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn file(path: &Path, message: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), message: message.into() }
    }
}
