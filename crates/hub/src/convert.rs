//! Conversion of other formats into MLX checkpoints.
//!
//! [`Checkpoint::from_gguf`] converts llama models with byte-level BPE tokenizers of the SmolLM kind. The
//! conversion is lossless: block-quantized tensors keep their codes, scales and biases (as MLX's affine mode with
//! groups of 32), f16 tensors stay as they are, and f32 tensors become f16 where every element is exact in f16,
//! because f32 norms would promote every activation; where one element is not, the tensor stays f32.

mod llama;
mod tokenizer;
mod weights;

use std::{
    cell::RefCell,
    collections::HashMap,
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

use safetensors::{SafeTensorError, View, serialize_to_file};
use serde_json::{Map, Value as Json};

use self::weights::Weight;
use crate::{
    Error as HubError, Phase, Progress,
    gguf::{Gguf, Value},
};

/// Why a GGUF model cannot be converted.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A metadata key is absent.
    #[error("metadata key {key} is missing")]
    MissingKey {
        /// The key.
        key: &'static str,
    },
    /// A metadata value has the wrong type or is out of range.
    #[error("metadata key {key}: {expected} is expected")]
    InvalidKey {
        /// The key.
        key: &'static str,
        /// What the value should be.
        expected: &'static str,
    },
    /// The model uses something that the conversion does not know.
    #[error("{key} = {value:?} is not supported ({supported} is)")]
    Unsupported {
        /// The metadata key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What is supported.
        supported: &'static str,
    },
    /// A tensor of the architecture is absent.
    #[error("tensor {tensor} is missing")]
    MissingTensor {
        /// GGUF's name of the tensor.
        tensor: String,
    },
    /// A tensor that the architecture has no place for.
    #[error("tensor {tensor:?} is not part of a llama model")]
    UnexpectedTensor {
        /// GGUF's name of the tensor.
        tensor: String,
    },
    /// A tensor's shape disagrees with the metadata.
    #[error("tensor {tensor} has shape {actual:?}, but the metadata says {expected:?}")]
    Shape {
        /// GGUF's name of the tensor.
        tensor: String,
        /// The shape that follows from the metadata, outermost dimension first.
        expected: Vec<usize>,
        /// The shape as stored, outermost dimension first.
        actual: Vec<usize>,
    },
    /// A norm's weight is quantized.
    #[error("tensor {tensor} is quantized; a norm's weight must be F16 or F32")]
    QuantizedNorm {
        /// GGUF's name of the tensor.
        tensor: String,
    },
    /// A group's scale or bias is not finite, or the bias that the scale implies is too large for f16.
    #[error("tensor {tensor}, row {row}: scale {scale} has no exact affine form in f16")]
    Inexact {
        /// GGUF's name of the tensor.
        tensor: String,
        /// The row of the tensor as stored.
        row: usize,
        /// The block's scale.
        scale: f32,
    },
    /// The tokenizer is inconsistent.
    #[error("tokenizer: {reason}")]
    Tokenizer {
        /// What is wrong.
        reason: String,
    },
}

/// An MLX checkpoint, ready to be written.
#[derive(Debug, Clone)]
pub struct Checkpoint<'a> {
    config: Json,
    generation_config: Json,
    tokenizer: Json,
    tokenizer_config: Json,
    weights: Vec<(String, Weight<'a>)>,
}

impl<'a> Checkpoint<'a> {
    /// Plans the conversion of a GGUF llama model and checks that it is possible and exact. The weights
    /// themselves are converted when they are written.
    ///
    /// # Errors
    /// [`Error`] says what is missing, inconsistent, unsupported or not exact.
    pub fn from_gguf(gguf: &'a Gguf<'a>) -> Result<Self, Error> {
        let (config, weights) = llama::convert(gguf)?;
        let tokenizer = tokenizer::convert(gguf, config.vocab_size)?;
        let mut config_json = config.to_json();
        let mut generation_config = Map::new();
        for (key, id) in tokenizer.special_ids {
            config_json.insert(key.to_owned(), id.into());
            generation_config.insert(key.to_owned(), id.into());
        }
        Ok(Self {
            config: config_json.into(),
            generation_config: generation_config.into(),
            tokenizer: tokenizer.tokenizer,
            tokenizer_config: tokenizer.tokenizer_config,
            weights,
        })
    }

    /// The contents of config.json.
    pub fn config(&self) -> &Json {
        &self.config
    }

    /// Size of the weights in bytes.
    pub fn weights_bytes(&self) -> u64 {
        self.weights.iter().map(|(_, weight)| weight.data_len() as u64).sum()
    }

    /// Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors
    /// into an existing directory, and waits until they are on the disk. One tensor is held in memory at a time.
    ///
    /// # Errors
    /// [`HubError::Io`] or [`HubError::DiskFull`]. What was written until then stays.
    pub fn write(&self, directory: &Path, progress: &mut dyn FnMut(Progress)) -> Result<(), HubError> {
        let config = directory.join("config.json");
        for (path, contents) in [
            (&config, format!("{:#}", self.config)),
            (&directory.join("generation_config.json"), format!("{:#}", self.generation_config)),
            (&directory.join("tokenizer.json"), self.tokenizer.to_string()),
            (&directory.join("tokenizer_config.json"), format!("{:#}", self.tokenizer_config)),
        ] {
            write_file(path, &contents).map_err(HubError::io("write", path))?;
        }
        let path = directory.join("model.safetensors");
        self.write_weights(&path, progress).map_err(HubError::io("write", &path))?;
        // The writer goes through a temporary file that only the user can read; the model is for whom the rest is.
        let permissions = config.metadata().map_err(HubError::io("read", &config))?.permissions();
        fs::set_permissions(&path, permissions).map_err(HubError::io("write", &path))
    }

    fn write_weights(&self, path: &Path, progress: &mut dyn FnMut(Progress)) -> io::Result<()> {
        let reporter = RefCell::new(Reporter { done: 0, total: self.weights_bytes(), progress });
        let tensors = self.weights.iter().map(|(name, weight)| (name, Reported { weight, to: &reporter }));
        let header = HashMap::from([("format".to_owned(), "mlx".to_owned())]);
        serialize_to_file(tensors, Some(header), path).map_err(|error| match error {
            SafeTensorError::IoError(error) => error,
            other => io::Error::other(other),
        })?;
        File::open(path)?.sync_all()
    }
}

/// Counts the bytes of weights that were converted.
struct Reporter<'p> {
    done: u64,
    total: u64,
    progress: &'p mut dyn FnMut(Progress),
}

/// A weight that reports when it is converted.
struct Reported<'w, 'a, 'p> {
    weight: &'w Weight<'a>,
    to: &'w RefCell<Reporter<'p>>,
}

impl View for Reported<'_, '_, '_> {
    fn dtype(&self) -> safetensors::Dtype {
        self.weight.dtype()
    }

    fn shape(&self) -> &[usize] {
        self.weight.shape()
    }

    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        let data = self.weight.data();
        let Reporter { done, total, progress } = &mut *self.to.borrow_mut();
        *done += data.len() as u64;
        progress(Progress { phase: Phase::Converting, done: *done, total: Some(*total) });
        data
    }

    fn data_len(&self) -> usize {
        self.weight.data_len()
    }
}

fn write_file(path: &Path, contents: &str) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(contents.as_bytes())?;
    file.sync_all()
}

/// The metadata value under `key`, read by `read`; none where the key is absent.
fn optional<'a, T>(
    gguf: &Gguf<'a>,
    key: &'static str,
    expected: &'static str,
    read: impl FnOnce(&Value<'a>) -> Option<T>,
) -> Result<Option<T>, Error> {
    gguf.value(key).map(|value| read(value).ok_or(Error::InvalidKey { key, expected })).transpose()
}

/// The metadata value under `key`, read by `read`.
fn required<'a, T>(
    gguf: &Gguf<'a>,
    key: &'static str,
    expected: &'static str,
    read: impl FnOnce(&Value<'a>) -> Option<T>,
) -> Result<T, Error> {
    optional(gguf, key, expected, read)?.ok_or(Error::MissingKey { key })
}

#[cfg(test)]
pub(crate) mod tests;
