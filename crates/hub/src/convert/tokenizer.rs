//! The tokenizer: GGUF's tokens, merges and token types as tokenizer.json and tokenizer_config.json.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use super::{Error, llama::supported, optional, required};
use crate::gguf::{Gguf, Value};

/// Token types of ggml that matter here.
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// The converted tokenizer.
pub(crate) struct Tokenizer {
    /// Contents of tokenizer.json.
    pub(crate) tokenizer: Json,
    /// Contents of tokenizer_config.json.
    pub(crate) tokenizer_config: Json,
    /// `bos_token_id`, `eos_token_id`, `pad_token_id`, as far as the model names them.
    pub(crate) special_ids: Vec<(&'static str, u64)>,
}

/// Converts a byte-level BPE tokenizer that splits digits one by one (`smollm`).
pub(crate) fn convert(gguf: &Gguf<'_>, vocab_size: usize) -> Result<Tokenizer, Error> {
    supported(gguf, "tokenizer.ggml.model", "gpt2", Some("absent"))?;
    supported(gguf, "tokenizer.ggml.pre", "smollm", Some("absent"))?;
    if optional(gguf, "tokenizer.ggml.add_bos_token", "a boolean", Value::as_bool)? == Some(true) {
        let (key, value) = ("tokenizer.ggml.add_bos_token", "true".to_owned());
        return Err(Error::Unsupported { key, value, supported: "false" });
    }
    let add_prefix_space =
        optional(gguf, "tokenizer.ggml.add_space_prefix", "a boolean", Value::as_bool)?.unwrap_or(false);

    let tokens = required(gguf, "tokenizer.ggml.tokens", "an array of strings", strings)?;
    if tokens.len() > vocab_size {
        let reason = format!("{} tokens, but the embedding has {vocab_size} rows", tokens.len());
        return Err(Error::Tokenizer { reason });
    }
    let mut ids = HashMap::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        if ids.insert(*token, id).is_some() {
            return Err(Error::Tokenizer { reason: format!("token {token:?} occurs twice") });
        }
    }
    let merges = required(gguf, "tokenizer.ggml.merges", "an array of strings", strings)?;
    let pairs = merges.iter().map(|merge| {
        merge
            .split_once(' ')
            .filter(|(left, right)| {
                [*left, *right, &format!("{left}{right}")].iter().all(|t| ids.contains_key(t))
            })
            .map(|(left, right)| json!([left, right]))
            .ok_or_else(|| Error::Tokenizer {
                reason: format!("merge {merge:?} does not join two tokens into one"),
            })
    });
    let merges = pairs.collect::<Result<Vec<_>, _>>()?;

    let byte_level = |add_prefix_space: bool| {
        json!({
            "type": "ByteLevel",
            "add_prefix_space": add_prefix_space,
            "trim_offsets": true,
            "use_regex": true,
        })
    };
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens(gguf, &tokens)?,
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{ "type": "Digits", "individual_digits": true }, byte_level(add_prefix_space)],
        },
        "post_processor": null,
        "decoder": byte_level(true),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": Map::from_iter(tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id.into()))),
            "merges": merges,
        },
    });

    let mut config = Map::new();
    let mut special_ids = Vec::new();
    for (key, name, config_key) in [
        ("tokenizer.ggml.bos_token_id", "bos_token", Some("bos_token_id")),
        ("tokenizer.ggml.eos_token_id", "eos_token", Some("eos_token_id")),
        ("tokenizer.ggml.padding_token_id", "pad_token", Some("pad_token_id")),
        ("tokenizer.ggml.unknown_token_id", "unk_token", None),
    ] {
        let token = |value: &Value<'_>| {
            let id = value.as_u64()?;
            Some((id, *tokens.get(usize::try_from(id).ok()?)?))
        };
        if let Some((id, token)) = optional(gguf, key, "the id of a token", token)? {
            config.insert(name.to_owned(), token.into());
            special_ids.extend(config_key.map(|config_key| (config_key, id)));
        }
    }
    config.insert("add_prefix_space".to_owned(), add_prefix_space.into());
    config.insert("clean_up_tokenization_spaces".to_owned(), false.into());
    config.insert("model_max_length".to_owned(), context_length(gguf)?.into());
    // The generic class: it uses tokenizer.json as it is, where a named one may rebuild parts of it.
    config.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
    if let Some(template) = optional(gguf, "tokenizer.chat_template", "a string", Value::as_str)? {
        config.insert("chat_template".to_owned(), template.into());
    }
    Ok(Tokenizer { tokenizer, tokenizer_config: config.into(), special_ids })
}

fn context_length(gguf: &Gguf<'_>) -> Result<u64, Error> {
    required(gguf, "llama.context_length", "a positive integer", Value::as_u64)
}

/// The tokens that are matched in the text before it is split: control tokens and user-defined ones.
fn added_tokens(gguf: &Gguf<'_>, tokens: &[&str]) -> Result<Vec<Json>, Error> {
    let expected = "an array of integers, one a token";
    let types = optional(gguf, "tokenizer.ggml.token_type", expected, |value| {
        let types: Vec<u64> = value.as_array()?.iter().map(|value| value.as_u64()).collect::<Option<_>>()?;
        (types.len() == tokens.len()).then_some(types)
    })?;
    let types = types.unwrap_or_default().into_iter().zip(tokens).enumerate();
    let added = types.filter(|(_, (kind, _))| matches!(*kind, CONTROL | USER_DEFINED));
    Ok(added
        .map(|(id, (kind, token))| {
            json!({
                "id": id,
                "content": token,
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": kind == CONTROL,
            })
        })
        .collect())
}

fn strings<'a>(value: &Value<'a>) -> Option<Vec<&'a str>> {
    value.as_array()?.iter().map(|value| value.as_str()).collect()
}
