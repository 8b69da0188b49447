use std::collections::BTreeMap;
use std::path::Path;

use crate::array::{raw, wrap_all};
use crate::bridge::ffi;
use crate::{Array, Error, Result};

/// The arrays and the metadata of a safetensors file.
pub type SafetensorsFile = (BTreeMap<String, Array>, BTreeMap<String, String>);

/// Reads a safetensors file with MLX's reader, lazily. For model weights see `MappedFile`, which
/// checks the file and copies nothing.
pub fn load_safetensors(path: &Path) -> Result<SafetensorsFile> {
    let (mut names, mut metadata) = (Vec::new(), Vec::new());
    let arrays = wrap_all(ffi::load_safetensors(utf8(path)?, &mut names, &mut metadata))?;
    Ok((names.into_iter().zip(arrays).collect(), metadata.into_iter().map(|m| (m.name, m.value)).collect()))
}

/// Evaluates the arrays and writes a safetensors file.
pub fn save_safetensors(
    path: &Path,
    arrays: &BTreeMap<String, Array>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let names: Vec<String> = arrays.keys().cloned().collect();
    let arrays: Vec<Array> = arrays.values().cloned().collect();
    let metadata: Vec<_> = metadata
        .iter()
        .map(|(name, value)| ffi::NamedString { name: name.clone(), value: value.clone() })
        .collect();
    Ok(ffi::save_safetensors(utf8(path)?, &names, raw(&arrays), &metadata)?)
}

/// MLX takes paths as strings, and appends `.safetensors` to one that lacks it when saving.
fn utf8(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::new(format!("{}: path is not UTF-8", path.display())))
}
