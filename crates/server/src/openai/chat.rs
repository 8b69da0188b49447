//! The fields of a chat completion.

use serde_json::{Map, Value, json};

use super::Prompt;
use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, wrong_type};
use crate::options::MOST_LOGPROBS;

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// How many of the most likely tokens to name, where log-probabilities are asked for.
pub(super) fn logprobs(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=MOST_LOGPROBS)?;
    if top.is_some_and(|count| count > 0) && !wanted {
        return Err(ApiError::field("top_logprobs", "is allowed only when logprobs is true"));
    }
    Ok(wanted.then_some(top.unwrap_or(0) as usize))
}

/// The prompt that the template makes of the conversation.
pub(super) fn prompt(app: &App, fields: &Fields<'_>) -> Result<Prompt, ApiError> {
    refuse_unsupported(fields)?;
    let messages = fields
        .array("messages")?
        .ok_or_else(|| ApiError::field("messages", "is missing: give a list of messages"))?;
    let messages: Vec<Value> = messages
        .iter()
        .enumerate()
        .map(|(index, value)| message(value, &format!("messages[{index}]")))
        .collect::<Result<_, _>>()?;
    let mut variables = app.options.template_variables.clone();
    if let Some(own) = fields.object("chat_template_kwargs")? {
        variables.extend(own.clone());
    }
    let tokenizer = &app.engine.facts().tokenizer;
    let text = tokenizer.apply_chat_template(&messages, None, true, &variables);
    let tokens = text.and_then(|text| tokenizer.encode(&text, false));
    let tokens = tokens.map_err(|error| ApiError::invalid(error.to_string()).param("messages"))?;
    Ok(Prompt { tokens, echo: String::new() })
}

/// What would change the answer and can't be done is an error: text that only looks right is worse than none.
fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    let choice = fields.get("tool_choice");
    for name in ["tools", "functions"] {
        let tools = fields.array(name)?.is_some_and(|tools| !tools.is_empty());
        if tools && choice != Some(&json!("none")) {
            return Err(ApiError::field(name, "calls of tools are not supported"));
        }
    }
    Ok(())
}

/// A message as templates take it: text parts are joined, as mlx-lm does.
fn message(value: &Value, path: &str) -> Result<Value, ApiError> {
    let fields = Fields::at(value, path)?;
    let role = fields
        .string("role")?
        .ok_or_else(|| ApiError::field(fields.path("role"), "is missing: give the role of the message"))?;
    if !ROLES.contains(&role) {
        let problem = format!("must be one of {}, but it is {role:?}", ROLES.join(", "));
        return Err(ApiError::field(fields.path("role"), problem));
    }
    let content = match fields.get("content") {
        None => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let text_of = |(index, part)| -> Result<&str, ApiError> {
                let path = format!("{}[{index}]", fields.path("content"));
                let part = Fields::at(part, &path)?;
                match part.string("type")? {
                    Some("text") => {}
                    kind => {
                        let kind = kind.unwrap_or("null");
                        let problem = format!(
                            "must be \"text\", the only kind of part that is taken, but it is {kind:?}"
                        );
                        return Err(ApiError::field(part.path("type"), problem));
                    }
                }
                part.string("text")?.ok_or_else(|| ApiError::field(part.path("text"), "is missing"))
            };
            parts.iter().enumerate().map(text_of).collect::<Result<String, _>>()?
        }
        Some(value) => return Err(wrong_type(&fields.path("content"), "a string or a list of parts", value)),
    };
    let mut message: Map<String, Value> = value.as_object().cloned().unwrap_or_default();
    // Templates know the older name.
    let role = if role == "developer" { "system" } else { role };
    message.insert("role".into(), json!(role));
    message.insert("content".into(), json!(content));
    Ok(Value::Object(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem<T: std::fmt::Debug>(result: Result<T, ApiError>) -> String {
        result.unwrap_err().body()["error"]["message"].as_str().unwrap().to_owned()
    }

    #[test]
    fn parts_of_text_are_joined() {
        let value = json!({
            "role": "developer", "name": "x",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        });
        let expected = json!({"role": "system", "name": "x", "content": "ab"});
        assert_eq!(message(&value, "messages[0]").unwrap(), expected);
        let value = json!({"role": "assistant", "content": null, "tool_calls": []});
        assert_eq!(message(&value, "messages[0]").unwrap()["content"], "");
    }

    #[test]
    fn faults_name_their_place() {
        for (value, expected) in [
            (json!("hi"), "messages[3]: must be an object, but it is a string"),
            (json!({}), "messages[3].role: is missing"),
            (json!({"role": "god"}), "messages[3].role: must be one of system, developer, user"),
            (json!({"role": 1}), "messages[3].role: must be a string, but it is a number"),
            (
                json!({"role": "user", "content": 5}),
                "messages[3].content: must be a string or a list of parts",
            ),
            (json!({"role": "user", "content": ["x"]}), "messages[3].content[0]: must be an object"),
            (
                json!({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}),
                "messages[3].content[1].type: must be \"text\"",
            ),
            (
                json!({"role": "user", "content": [{"type": "text"}]}),
                "messages[3].content[0].text: is missing",
            ),
        ] {
            let problem = problem(message(&value, "messages[3]"));
            assert!(problem.starts_with(expected), "{problem}");
        }
    }

    #[test]
    fn what_cannot_be_done_is_refused() {
        let check = |body: Value| refuse_unsupported(&Fields::new(body.as_object().unwrap()));
        let tools = json!([{"type": "function"}]);
        for body in [json!({}), json!({"tools": []}), json!({"tools": tools, "tool_choice": "none"})] {
            assert!(check(body).is_ok());
        }
        assert!(problem(check(json!({"tools": tools}))).starts_with("tools: "));
    }
}
