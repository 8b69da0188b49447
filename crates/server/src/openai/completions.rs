//! The fields of a completion.

use serde_json::Value;

use super::Prompt;
use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, wrong_type};
use crate::options::MOST_LOGPROBS;

/// Most prompts of a request.
const MOST_PROMPTS: usize = 128;

/// How many of the most likely tokens to name, where log-probabilities are asked for: a number, as in OpenAI's API, or
/// `logprobs: true` with `top_logprobs`, as for chats.
pub(super) fn logprobs(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let top = fields.integer("top_logprobs", 0..=MOST_LOGPROBS)?;
    match fields.get("logprobs") {
        Some(Value::Bool(false)) => Ok(None),
        Some(Value::Bool(true)) => Ok(Some(top.unwrap_or(0) as usize)),
        _ => Ok(fields.integer("logprobs", 0..=MOST_LOGPROBS)?.map(|count| count as usize)),
    }
}

/// The prompts: a text, a list of texts, a list of tokens, or a list of lists of tokens.
pub(super) fn prompts(app: &App, fields: &Fields<'_>, n: usize) -> Result<Vec<Prompt>, ApiError> {
    if fields.string("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::field("suffix", "is not supported: answers continue the prompt"));
    }
    if fields.integer("best_of", 1..=i64::MAX)?.is_some_and(|best_of| best_of != n as i64) {
        return Err(ApiError::field("best_of", "is not supported: it may only be the same as n"));
    }
    let echo = fields.boolean("echo")?.unwrap_or(false);
    if echo && logprobs(fields)?.is_some() {
        return Err(ApiError::field("echo", "is not supported together with logprobs"));
    }
    let prompt = fields.get("prompt").ok_or_else(|| ApiError::field("prompt", "is missing: give a text"))?;
    let tokenizer = &app.engine.facts().tokenizer;
    let invalid = |error: russet_text::Error| ApiError::invalid(error.to_string()).param("prompt");
    let of_text = |text: &str| {
        let tokens = tokenizer.encode_prompt(text).map_err(invalid)?;
        Ok(Prompt { tokens, echo: if echo { text.to_owned() } else { String::new() } })
    };
    let of_tokens = |tokens: Vec<u32>| {
        let echo = if echo { tokenizer.decode(&tokens, false).map_err(invalid)? } else { String::new() };
        Ok(Prompt { tokens, echo })
    };
    let list = match prompt {
        Value::String(text) => return Ok(vec![of_text(text)?]),
        Value::Array(list) => list,
        _ => return Err(wrong_type("prompt", "a text, texts, tokens or lists of tokens", prompt)),
    };
    if list.first().is_none_or(Value::is_number) {
        return Ok(vec![of_tokens(token_ids(list, "prompt")?)?]);
    }
    if list.len() > MOST_PROMPTS {
        return Err(ApiError::field("prompt", format!("at most {MOST_PROMPTS} prompts are taken at once")));
    }
    let each = list.iter().enumerate().map(|(index, prompt)| match prompt {
        Value::String(text) => of_text(text),
        Value::Array(tokens) => of_tokens(token_ids(tokens, &format!("prompt[{index}]"))?),
        _ => Err(wrong_type(&format!("prompt[{index}]"), "a text or a list of tokens", prompt)),
    });
    each.collect()
}

fn token_ids(tokens: &[Value], path: &str) -> Result<Vec<u32>, ApiError> {
    let id = |(index, value): (usize, &Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| ApiError::field(format!("{path}[{index}]"), format!("{value} is not a token id")))
    };
    tokens.iter().enumerate().map(id).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn logprobs_are_a_number_or_a_switch() {
        let read = |body: Value| logprobs(&Fields::new(body.as_object().unwrap()));
        for (body, expected) in [
            (json!({}), None),
            (json!({"logprobs": false, "top_logprobs": 3}), None),
            (json!({"logprobs": 0}), Some(0)),
            (json!({"logprobs": 5}), Some(5)),
            (json!({"logprobs": true}), Some(0)),
            (json!({"logprobs": true, "top_logprobs": 3}), Some(3)),
        ] {
            assert_eq!(read(body.clone()).unwrap(), expected, "{body}");
        }
        for body in [
            json!({"logprobs": 21}),
            json!({"logprobs": "1"}),
            json!({"top_logprobs": 21}),
            json!({"logprobs": false, "top_logprobs": "1"}),
        ] {
            assert!(read(body.clone()).is_err(), "{body}");
        }
    }

    #[test]
    fn token_ids_are_whole_and_not_negative() {
        assert_eq!(token_ids(&[json!(1), json!(2)], "prompt").unwrap(), [1, 2]);
        for (value, expected) in [(json!(-1), "-1"), (json!(1.5), "1.5"), (json!("x"), "\"x\"")] {
            let error = token_ids(&[json!(1), value], "prompt").unwrap_err().body();
            assert_eq!(error["error"]["message"], format!("prompt[1]: {expected} is not a token id"));
        }
    }
}
