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

    /// The end-of-sequence ids that the config files name: those of the generation config replace
    /// those of the config, as in the reference's `load_config`.
    pub fn eos_token_ids(&self) -> Vec<u32> {
        let own = token_ids(self.generation_config.get("eos_token_id"));
        if own.is_empty() { token_ids(self.config.get("eos_token_id")) } else { own }
    }

    /// End-of-sequence ids of `config.json` alone.
    pub fn config_eos_token_ids(&self) -> Vec<u32> {
        token_ids(self.config.get("eos_token_id"))
    }
}

/// One id or a list of them.
fn token_ids(value: Option<&Value>) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(ids)) => ids.iter().filter_map(one).collect(),
        Some(id) => one(id).into_iter().collect(),
        None => Vec::new(),
    }
}

/// Reads a JSON object; `None` when the file does not exist.
pub(crate) fn read_json_object(path: &Path) -> Result<Option<Map<String, Value>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(path)(e)),
    };
    let mut text = Vec::new();
    file.take(MAX_JSON_BYTES + 1).read_to_end(&mut text).map_err(Error::io(path))?;
    if text.len() as u64 > MAX_JSON_BYTES {
        return Err(Error::file(path, format!("is larger than {} MiB", MAX_JSON_BYTES >> 20)));
    }
    match serde_json::from_slice(&text) {
        Ok(Value::Object(map)) => Ok(Some(map)),
        Ok(_) => Err(Error::file(path, "is not a JSON object")),
        Err(e) => Err(Error::file(path, format!("is not valid JSON: {e}"))),
    }
}
