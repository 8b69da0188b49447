use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::{Error, Fields, Result};

/// JSON files of a checkpoint are kilobytes; a tokenizer is read elsewhere.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// A checkpoint directory with its config files read.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config_path: PathBuf,
    config: Map<String, Value>,
    generation_config: Map<String, Value>,
}

impl Checkpoint {
    /// Reads `config.json` and, if there is one that parses, `generation_config.json` of `dir`.
    ///
    /// # Errors
    /// When the directory or its `config.json` is missing, unreadable or not a JSON object.
    pub fn open(dir: &Path) -> Result<Self> {
        let metadata = fs::metadata(dir).map_err(Error::io(dir))?;
        if !metadata.is_dir() {
            return Err(Error::file(dir, "is not a directory; give the folder that holds config.json"));
        }
        let config_path = dir.join("config.json");
        let config = read_json_object(&config_path)?
            .ok_or_else(|| Error::file(dir, "has no config.json; give the folder of an MLX checkpoint"))?;
        // The reference ignores a generation config that does not parse.
        let generation_config = match read_json_object(&dir.join("generation_config.json")) {
            Ok(Some(config)) => config,
            Ok(None) | Err(Error::File { .. }) => Map::new(),
            Err(e) => return Err(e),
        };
        Ok(Self { dir: dir.to_owned(), config_path, config, generation_config })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The fields of `config.json`.
    pub fn config(&self) -> Fields<'_> {
        Fields::new(&self.config_path, &self.config)
    }

    /// The object of `generation_config.json`, empty if there is none.
    pub fn generation_config(&self) -> &Map<String, Value> {
        &self.generation_config
    }

    /// The `model_type` of the config.
    ///
    /// # Errors
    /// When it is missing or not a string.
    pub fn model_type(&self) -> Result<&str> {
        self.config().required_text("model_type")
    }
}

/// Reads a JSON object; `None` when the file does not exist.
pub(crate) fn read_json_object(path: &Path) -> Result<Option<Map<String, Value>>> {
    match read_json(path)? {
        None => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(_) => Err(Error::file(path, "is not a JSON object")),
    }
}

/// Reads a JSON file; `None` when it does not exist.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>> {
    match fs::metadata(path) {
        // Opening a pipe would wait for its writer.
        Ok(metadata) if !metadata.is_file() => return Err(Error::file(path, "is not a regular file")),
        Ok(_) => {}
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(path)(e)),
    }
    let file = File::open(path).map_err(Error::io(path))?;
    let mut text = Vec::new();
    file.take(MAX_JSON_BYTES + 1).read_to_end(&mut text).map_err(Error::io(path))?;
    if text.len() as u64 > MAX_JSON_BYTES {
        return Err(Error::file(path, format!("is larger than {} MiB", MAX_JSON_BYTES >> 20)));
    }
    serde_json::from_slice(&text).map(Some).map_err(|e| Error::file(path, format!("is not valid JSON: {e}")))
}
