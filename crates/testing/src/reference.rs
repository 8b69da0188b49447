//! What the oracle recorded: a safetensors file.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{SafeTensors, tensor::TensorView};

/// Arrays recorded by the oracle, with the settings that gave them.
pub struct Reference {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Reference {
    /// Reads a file the oracle wrote.
    ///
    /// # Panics
    /// If it cannot be read.
    pub(crate) fn open(path: PathBuf) -> Self {
        let bytes = fs::read(&path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()));
        Self { path, bytes }
    }

    /// The safetensors file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes)
            .unwrap_or_else(|e| panic!("{} is not a safetensors file: {e}", self.path.display()))
    }

    /// The names of the arrays, sorted.
    pub fn names(&self) -> Vec<String> {
        let tensors = self.tensors();
        let mut names: Vec<_> = tensors.names().into_iter().map(str::to_owned).collect();
        names.sort();
        names
    }

    /// An array: its type, shape and raw bytes.
    ///
    /// # Panics
    /// If there is none of this name.
    pub fn array(&self, name: &str) -> TensorView<'_> {
        self.tensors()
            .tensor(name)
            .unwrap_or_else(|e| panic!("{}: {e}; it holds {:?}", self.path.display(), self.names()))
    }

    /// The values of an array of 32-bit integers, such as `tokens`.
    ///
    /// # Panics
    /// If there is none of this name and type.
    pub fn integers(&self, name: &str) -> Vec<i32> {
        let array = self.array(name);
        assert_eq!(array.dtype(), safetensors::Dtype::I32, "{name} is not an array of 32-bit integers");
        array.data().chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    /// The metadata: `mlx`, `mlx_lm`, `device`, and `settings` (the specification as JSON).
    pub fn metadata(&self) -> HashMap<String, String> {
        let (_, metadata) = SafeTensors::read_metadata(&self.bytes)
            .unwrap_or_else(|e| panic!("{} is not a safetensors file: {e}", self.path.display()));
        metadata.metadata().clone().unwrap_or_default()
    }
}
