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
    /// Reads a safetensors file: one of the oracle's, or one of the engine's to compare with it.
    ///
    /// # Panics
    /// If it cannot be read.
    pub fn open(path: PathBuf) -> Self {
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

    /// What differs in `actual`: a missing or additional array, a type, a shape, or how many bytes and the first of
    /// them. `None` if all arrays have the same bits; metadata is not compared.
    pub fn difference(&self, actual: &Self) -> Option<String> {
        let (names, other) = (self.names(), actual.names());
        if names != other {
            return Some(format!("the arrays are {other:?} instead of {names:?}"));
        }
        names.iter().find_map(|name| {
            let (a, b) = (self.array(name), actual.array(name));
            if (a.dtype(), a.shape()) != (b.dtype(), b.shape()) {
                let of = |view: &TensorView<'_>| format!("{:?} {:?}", view.dtype(), view.shape());
                return Some(format!("{name} is {} instead of {}", of(&b), of(&a)));
            }
            let mut unequal =
                a.data().iter().zip(b.data()).enumerate().filter(|(_, (a, b))| a != b).map(|(i, _)| i);
            let first = unequal.next()?;
            let count = unequal.count() + 1;
            Some(format!("{name} differs in {count} of {} bytes, first at byte {first}", a.data().len()))
        })
    }

    /// The metadata: `mlx`, `mlx_lm`, `device`, and `settings` (the specification as JSON).
    pub fn metadata(&self) -> HashMap<String, String> {
        let (_, metadata) = SafeTensors::read_metadata(&self.bytes)
            .unwrap_or_else(|e| panic!("{} is not a safetensors file: {e}", self.path.display()));
        metadata.metadata().clone().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(shape: &[usize], values: [u8; 4], name: &str) -> Reference {
        let view = TensorView::new(safetensors::Dtype::U8, shape.to_vec(), &values).unwrap();
        let bytes = safetensors::serialize([(name, view)], None).unwrap();
        Reference { path: PathBuf::new(), bytes }
    }

    #[test]
    fn a_difference_is_named() {
        let expected = file(&[4], [1, 2, 3, 4], "a");
        assert_eq!(expected.difference(&file(&[4], [1, 2, 3, 4], "a")), None);
        let found = |actual| expected.difference(&actual).unwrap();
        assert_eq!(found(file(&[4], [1, 0, 0, 4], "a")), "a differs in 2 of 4 bytes, first at byte 1");
        assert_eq!(found(file(&[2, 2], [1, 2, 3, 4], "a")), "a is U8 [2, 2] instead of U8 [4]");
        assert_eq!(found(file(&[4], [1, 2, 3, 4], "b")), r#"the arrays are ["b"] instead of ["a"]"#);
    }
}
