//! The named special tokens of a checkpoint, as Transformers' fast tokenizers read them.

use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use crate::Error;

/// The special tokens that every tokenizer may have.
const STANDARD: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The special tokens, and the other tokens that the configuration adds to the vocabulary.
#[derive(Debug, Default)]
pub(crate) struct SpecialTokens {
    /// Name and token, for example `bos_token` and `<s>`; chat templates see them as variables.
    pub(crate) named: Vec<(String, AddedToken)>,
    /// Special tokens without a name.
    pub(crate) extra: Vec<AddedToken>,
    /// `added_tokens_decoder`: tokens by id.
    pub(crate) added: Vec<(u32, AddedToken)>,
}

impl SpecialTokens {
    /// Reads them from tokenizer_config.json and, only if that has no `added_tokens_decoder`, from the older
    /// special_tokens_map.json, whose entries win (`PreTrainedTokenizerBase._from_pretrained`).
    pub(crate) fn new(
        config: (&Path, &Map<String, Value>),
        map: Option<(&Path, &Map<String, Value>)>,
    ) -> Result<Self, Error> {
        let mut tokens = Self::default();
        let older = config.1.get("added_tokens_decoder").is_none_or(Value::is_null);
        tokens.read(config.0, config.1)?;
        if let Some((path, map)) = map
            && older
        {
            tokens.read(path, map)?;
        }
        Ok(tokens)
    }

    /// The text of a named token.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.named.iter().find(|(other, _)| other == name).map(|(_, token)| token.content.as_str())
    }

    fn read(&mut self, path: &Path, fields: &Map<String, Value>) -> Result<(), Error> {
        for (name, value) in fields {
            let standard = STANDARD.contains(&name.as_str());
            match (name.as_str(), value) {
                (_, Value::Null) => {}
                ("added_tokens_decoder", Value::Object(entries)) => {
                    for (id, value) in entries {
                        let field = format!("added_tokens_decoder.{id}");
                        let id = id.parse().map_err(|_| wrong(path, &field, "under a token id", value))?;
                        self.added.push((id, added_token(path, &field, value, false)?));
                    }
                    self.added.sort_by_key(|(id, _)| *id);
                }
                ("additional_special_tokens" | "extra_special_tokens", Value::Array(values)) => {
                    for value in values {
                        let token = added_token(path, name, value, true)?;
                        if self.extra.iter().all(|other| other.content != token.content) {
                            self.extra.push(token);
                        }
                    }
                }
                ("extra_special_tokens", Value::Object(entries)) => {
                    for (name, value) in entries {
                        self.set(name, added_token(path, name, value, true)?);
                    }
                }
                (_, Value::String(_) | Value::Object(_)) if standard => {
                    self.set(name, added_token(path, name, value, true)?);
                }
                (_, value) if standard => return Err(wrong(path, name, "a token", value)),
                // Models with images or sounds name further tokens, such as `image_token`.
                (_, Value::String(content)) if name.ends_with("_token") => {
                    self.set(name, AddedToken::from(content.as_str(), true));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn set(&mut self, name: &str, token: AddedToken) {
        match self.named.iter_mut().find(|(other, _)| other == name) {
            Some((_, old)) => *old = token,
            None => self.named.push((name.to_owned(), token)),
        }
    }
}

/// A token given as its text or as an object with its properties.
fn added_token(path: &Path, field: &str, value: &Value, special: bool) -> Result<AddedToken, Error> {
    match value {
        Value::String(content) => Ok(AddedToken::from(content.as_str(), special)),
        Value::Object(fields) => {
            let content = fields
                .get("content")
                .and_then(Value::as_str)
                .ok_or_else(|| wrong(path, field, "an object with a string `content`", value))?;
            let flag = |name| fields.get(name).and_then(Value::as_bool);
            let special = special || flag("special").unwrap_or(false);
            let mut token = AddedToken::from(content, special)
                .single_word(flag("single_word").unwrap_or(false))
                .lstrip(flag("lstrip").unwrap_or(false))
                .rstrip(flag("rstrip").unwrap_or(false));
            if let Some(normalized) = flag("normalized") {
                token = token.normalized(normalized);
            }
            Ok(token)
        }
        _ => Err(wrong(path, field, "a string or an object", value)),
    }
}

fn wrong(path: &Path, field: &str, expected: &'static str, value: &Value) -> Error {
    Error::Field {
        field: format!("`{field}` of {}", path.display()),
        expected,
        found: value.to_string().chars().take(80).collect(),
    }
}
