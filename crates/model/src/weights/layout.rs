//! What the reference does to tensors of other layouts before its strict load (`sanitize`).

use russet_mlx::{Array, Dtype, MappedFile};

use super::{Tensor, Weights};
use crate::{Error, Result};

impl Weights {
    /// Gives every tensor the name that `rename` makes of its own, and drops it where that is none.
    ///
    /// # Errors
    /// When two tensors get the same name.
    pub fn rename(&mut self, rename: impl Fn(&str) -> Option<String>) -> Result<()> {
        for (name, tensor) in std::mem::take(&mut self.tensors) {
            let Some(new) = rename(&name) else { continue };
            if self.tensors.contains_key(&new) {
                return Err(self.error(&name, format!("and another tensor are both \"{new}\" of the model")));
            }
            self.tensors.insert(new, tensor);
        }
        Ok(())
    }

    /// Replaces the arrays for which `change` gives another. The bytes of their tensors stay those of the file.
    pub fn replace(
        &mut self,
        change: impl Fn(&str, &Array) -> russet_mlx::Result<Option<Array>>,
    ) -> Result<()> {
        for (name, tensor) in &mut self.tensors {
            if let Some(array) = change(name, &tensor.array)? {
                tensor.array = array;
            }
        }
        Ok(())
    }

    /// Joins the tensors `parts` of one shape along a new first dimension, as tensor `name`.
    ///
    /// # Errors
    /// When a part is missing or unlike the first.
    pub fn stack(&mut self, parts: impl IntoIterator<Item = String>, name: &str) -> Result<()> {
        let mut tensors: Vec<Tensor> = Vec::new();
        for part in parts {
            let Some(tensor) = self.tensors.remove(&part) else {
                return Err(self.error(&part, "is missing from the weight files"));
            };
            let described = |t: &Tensor| (t.array.shape(), t.array.dtype());
            if let Some(first) = tensors.first().map(described)
                && described(&tensor) != first
            {
                let ((shape, dtype), (first_shape, first_dtype)) = (described(&tensor), first);
                let message = format!(
                    "is {dtype} {shape:?}, the first part of {name} is {first_dtype} {first_shape:?}"
                );
                return Err(self.error(&part, message));
            }
            tensors.push(tensor);
        }
        let Some(first) = tensors.first() else { return Ok(()) };
        let shape = [vec![tensors.len() as i32], first.array.shape()].concat();
        let bytes: Vec<&[u8]> = tensors.iter().map(|t| t.data.bytes()).collect();
        self.insert_parts(name, &shape, first.array.dtype(), &bytes)?;
        tensors.iter().for_each(|t| t.data.release());
        Ok(())
    }

    /// Cuts the tensor `name` `[.., 2 * rows, columns]` in two on its last but one dimension.
    ///
    /// # Errors
    /// When it has no such dimension or an odd number of rows.
    pub fn halve(&mut self, name: &str, halves: [&str; 2]) -> Result<()> {
        let Some(tensor) = self.tensors.remove(name) else {
            return Err(self.error(name, "is missing from the weight files"));
        };
        let (mut shape, dtype) = (tensor.array.shape(), tensor.array.dtype());
        let length = match &mut shape[..] {
            [.., rows, columns] if *rows % 2 == 0 => {
                *rows /= 2;
                *rows as usize * *columns as usize * dtype.size()
            }
            _ => 0,
        };
        if length == 0 {
            let message = format!("has shape {:?}, expected two halves of rows", tensor.array.shape());
            return Err(self.error(name, message));
        }
        for (i, half) in halves.into_iter().enumerate() {
            let bytes: Vec<&[u8]> = tensor.data.bytes().chunks_exact(length).skip(i).step_by(2).collect();
            self.insert_parts(half, &shape, dtype, &bytes)?;
        }
        tensor.data.release();
        Ok(())
    }

    /// Stacks experts that are stored one by one: `path.experts.0.up_proj.weight` and so on become
    /// `path.switch_mlp.up_proj.weight`. Without such a tensor nothing changes.
    ///
    /// # Errors
    /// When one of the `count` experts is missing or unlike the first, or they are stored as a stack too.
    pub fn stack_experts(&mut self, path: &str, count: i32) -> Result<()> {
        if self.get(&format!("{path}.experts.0.up_proj.weight")).is_none() {
            return Ok(());
        }
        for name in ["up_proj", "down_proj", "gate_proj"] {
            let parts = (0..count).map(|e| format!("{path}.experts.{e}.{name}.weight"));
            self.stack(parts, &format!("{path}.switch_mlp.{name}.weight"))?;
        }
        Ok(())
    }

    /// Cuts every `PATH.experts.gate_up_proj` into `PATH.module.gate_proj.weight` and
    /// `PATH.module.up_proj.weight`, and calls `PATH.experts.down_proj` `PATH.module.down_proj.weight`.
    ///
    /// # Errors
    /// When a stack can't be halved, or is stored under both names.
    pub fn split_experts(&mut self, module: &str) -> Result<()> {
        self.rename(|name| match name.strip_suffix(".experts.down_proj") {
            Some(path) => Some(format!("{path}.{module}.down_proj.weight")),
            None => Some(name.to_owned()),
        })?;
        let fused: Vec<String> = self
            .names()
            .filter_map(|name| Some(name.strip_suffix(".experts.gate_up_proj")?.to_owned()))
            .collect();
        for path in fused {
            let [gate, up] = ["gate", "up"].map(|name| format!("{path}.{module}.{name}_proj.weight"));
            self.halve(&format!("{path}.experts.gate_up_proj"), [&gate, &up])?;
        }
        Ok(())
    }

    /// Adds a tensor whose bytes are `parts`, one after the other.
    fn insert_parts(&mut self, name: &str, shape: &[i32], dtype: Dtype, parts: &[&[u8]]) -> Result<()> {
        let map = MappedFile::of_parts(parts).map_err(Error::io(&self.dir))?;
        let length = parts.iter().map(|part| part.len()).sum();
        let tensor = Tensor {
            array: map.array(MappedFile::PARTS, shape, dtype)?,
            data: map.slice(MappedFile::PARTS, length)?,
        };
        match self.tensors.insert(name.to_owned(), tensor) {
            None => Ok(()),
            Some(_) => Err(self.error(name, "is stored twice, as a whole and in parts")),
        }
    }
}
