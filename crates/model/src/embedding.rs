use std::path::{Component, Path};

use serde_json::{Map, Value};

use crate::checkpoint::{read_json, read_json_object};
use crate::{Error, Fields, Result};

/// How hidden states become an embedding, as sentence-transformers' files beside a checkpoint say.
///
/// Only last-token pooling is known: it is what decoders such as Qwen3-Embedding are trained for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingRecipe {
    /// Whether embeddings have length one.
    pub normalize: bool,
    /// What is put before a text that is searched with.
    pub query_prompt: String,
    /// What is put before a text that is searched for.
    pub document_prompt: String,
}

impl EmbeddingRecipe {
    /// The recipe of the checkpoint in `dir`; `None` where it has no `modules.json`.
    ///
    /// # Errors
    /// When the files are malformed, or pool in another way.
    pub fn open(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("modules.json");
        let modules = match read_json(&path)? {
            None => return Ok(None),
            Some(Value::Array(modules)) => modules,
            Some(_) => return Err(Error::file(&path, "is not a list of modules")),
        };
        let module = |kind: &str| {
            modules.iter().find(|module| {
                module.get("type").and_then(Value::as_str).is_some_and(|t| t.rsplit('.').next() == Some(kind))
            })
        };
        let Some(pooling) = module("Pooling") else {
            return Err(Error::file(&path, "has no Pooling module, so hidden states have no embedding"));
        };
        let folder = Path::new(pooling.get("path").and_then(Value::as_str).unwrap_or(""));
        if folder.components().any(|part| !matches!(part, Component::Normal(_))) {
            return Err(Error::file(
                &path,
                format!("names the folder {}, outside of the checkpoint", folder.display()),
            ));
        }
        let pooling_path = dir.join(folder).join("config.json");
        let pooling = read_json_object(&pooling_path)?
            .ok_or_else(|| Error::file(&pooling_path, "is missing, though modules.json names it"))?;
        if Fields::new(&pooling_path, &pooling).flag("pooling_mode_lasttoken")? != Some(true) {
            let message = "does not set pooling_mode_lasttoken: no other pooling is supported";
            return Err(Error::file(&pooling_path, message));
        }
        let prompts_path = dir.join("config_sentence_transformers.json");
        let prompts = read_json_object(&prompts_path)?.unwrap_or_default();
        let prompts = match prompts.get("prompts") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(prompts)) => prompts.clone(),
            Some(_) => return Err(Error::file(&prompts_path, "prompts is not an object")),
        };
        let prompt = |name: &str| match prompts.get(name) {
            None | Some(Value::Null) => Ok(String::new()),
            Some(Value::String(prompt)) => Ok(prompt.clone()),
            Some(_) => Err(Error::file(&prompts_path, format!("prompts.{name} is not a string"))),
        };
        Ok(Some(Self {
            normalize: module("Normalize").is_some(),
            query_prompt: prompt("query")?,
            document_prompt: prompt("document")?,
        }))
    }
}
