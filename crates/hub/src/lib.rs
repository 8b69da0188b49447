//! The model store: finding checkpoints, installing the starter model, and converting other formats into MLX
//! checkpoints.
//!
//! - [`Store`] turns what a user calls a model (a directory, a Hugging Face name, a part of one) into a
//!   directory, and lists the models there are.
//! - [`install_starter`] makes sure that the model which runs when none is named is installed.
//! - [`gguf`] reads GGUF files; [`convert`] turns one into an MLX checkpoint without losing a bit.
//!
//! The crate prints nothing. Long work reports [`Progress`] to its caller. Of the environment it reads only
//! variables of others: `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`, `XDG_DATA_HOME` and `HOME`.

pub mod convert;
mod error;
pub mod gguf;
mod install;
mod progress;
mod starter;
mod store;

pub use error::Error;
pub use progress::{Phase, Progress};
pub use starter::{InstallOptions, STARTER_NAME, install_starter};
pub use store::{Entry, ModelDir, Source, Store};
