//! Log-probabilities in the shapes of both endpoints.

use russet_engine::TokenLogprobs;
use russet_text::Tokenizer;
use serde_json::{Map, Value, json};

/// JSON has no infinity. It is what OpenAI's API gives for tokens that can't be.
const IMPOSSIBLE: f64 = -9999.0;

fn number(logprob: f32) -> f64 {
    if logprob.is_finite() { f64::from(logprob) } else { IMPOSSIBLE }
}

fn bytes(tokenizer: &Tokenizer, token: u32) -> Vec<u8> {
    tokenizer.token_bytes(token).unwrap_or_default()
}

/// `{"content": [{"token", "logprob", "bytes", "top_logprobs"}], "refusal": null}`.
pub(super) fn chat(tokenizer: &Tokenizer, entries: &[(u32, TokenLogprobs)]) -> Value {
    let entry = |token: u32, logprob: f32| {
        let bytes = bytes(tokenizer, token);
        json!({"token": String::from_utf8_lossy(&bytes), "logprob": number(logprob), "bytes": bytes})
    };
    let content = entries.iter().map(|(token, logprobs)| {
        let mut object = entry(*token, logprobs.logprob);
        let top: Vec<Value> = logprobs.top.iter().map(|(token, logprob)| entry(*token, *logprob)).collect();
        if let Some(object) = object.as_object_mut() {
            object.insert("top_logprobs".into(), Value::Array(top));
        }
        object
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

/// `{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`. A token that is not whole characters is
/// written as `bytes:\xe2\x9c`, as OpenAI's API does. Offsets count characters, and the first is `offset`.
pub(super) fn completions(tokenizer: &Tokenizer, entries: &[(u32, TokenLogprobs)], offset: usize) -> Value {
    let text = |token: u32| match String::from_utf8(bytes(tokenizer, token)) {
        Ok(text) => text,
        Err(error) => {
            let escaped = error.as_bytes().iter().map(|byte| format!("\\x{byte:02x}"));
            format!("bytes:{}", escaped.collect::<String>())
        }
    };
    let (mut tokens, mut values, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    let (mut before, mut characters) = (Vec::new(), offset);
    for (token, logprobs) in entries {
        tokens.push(text(*token));
        values.push(number(logprobs.logprob));
        let top = logprobs.top.iter().map(|(token, logprob)| (text(*token), json!(number(*logprob))));
        tops.push(Value::Object(top.collect::<Map<String, Value>>()));
        offsets.push(characters);
        before.extend(bytes(tokenizer, *token));
        // A character counts once its last byte is there.
        let whole = match std::str::from_utf8(&before) {
            Ok(text) => text.len(),
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(_) => before.len(),
        };
        let done: Vec<u8> = before.drain(..whole).collect();
        characters += String::from_utf8_lossy(&done).chars().count();
    }
    json!({"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets})
}
