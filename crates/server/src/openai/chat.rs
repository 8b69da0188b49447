//! The fields of a chat completion.

use serde_json::{Map, Value, json};

use crate::answers::Conversation;
use crate::error::ApiError;
use crate::fields::{Fields, wrong_type};
use crate::options::MOST_LOGPROBS;
use crate::{grammar, tools};

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// OpenAI's, of which a template knows some.
const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];

/// How many of the most likely tokens to name, where log-probabilities are asked for.
pub(super) fn logprobs(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=MOST_LOGPROBS)?;
    if top.is_some_and(|count| count > 0) && !wanted {
        return Err(ApiError::field("top_logprobs", "is allowed only when logprobs is true"));
    }
    Ok(wanted.then_some(top.unwrap_or(0) as usize))
}

/// The conversation, with the tools that may be called.
pub(super) fn conversation(fields: &Fields<'_>) -> Result<Conversation, ApiError> {
    refuse_unsupported(fields)?;
    let messages = fields
        .array("messages")?
        .ok_or_else(|| ApiError::field("messages", "is missing: give a list of messages"))?;
    let messages: Vec<Value> = messages
        .iter()
        .enumerate()
        .map(|(index, value)| message(value, &format!("messages[{index}]")))
        .collect::<Result<_, _>>()?;
    let tools = tools::read(fields, "tools")?;
    Ok(Conversation {
        messages,
        choice: tools::choice(fields, &tools)?,
        tools,
        one_call: !parallel_tool_calls(fields)?,
        wanted: grammar::read(fields)?,
        variables: variables(fields)?,
    })
}

/// Values for the chat template.
fn variables(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut variables = Map::new();
    if let Some(effort) = fields.string("reasoning_effort")? {
        if !EFFORTS.contains(&effort) {
            let problem = format!("must be one of {}, but it is {effort:?}", EFFORTS.join(", "));
            return Err(ApiError::field("reasoning_effort", problem));
        }
        variables.insert("reasoning_effort".into(), effort.into());
        if effort == "none" {
            variables.insert("enable_thinking".into(), false.into());
        }
    }
    if let Some(switch) = fields.boolean("enable_thinking")? {
        variables.insert("enable_thinking".into(), switch.into());
    }
    if let Some(own) = fields.object("chat_template_kwargs")? {
        variables.extend(own.clone());
    }
    Ok(variables)
}

/// Whether an answer may have several calls.
fn parallel_tool_calls(fields: &Fields<'_>) -> Result<bool, ApiError> {
    Ok(fields.boolean("parallel_tool_calls")?.unwrap_or(true))
}

/// What would change the answer and can't be done is an error: text that only looks right is worse than none.
fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    if fields.array("functions")?.is_some_and(|functions| !functions.is_empty()) {
        return Err(ApiError::field("functions", "is not supported: give tools"));
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
    let calls = fields.array("tool_calls")?.into_iter().flatten().enumerate();
    let calls =
        calls.map(|(index, call)| tool_call(call, &format!("{}[{index}]", fields.path("tool_calls"))));
    let calls = calls.collect::<Result<Vec<_>, _>>()?;
    if !calls.is_empty() {
        message.insert("tool_calls".into(), Value::Array(calls));
    }
    Ok(Value::Object(message))
}

/// A call in a message. Templates go through the arguments, which are the text of a JSON object here.
fn tool_call(value: &Value, path: &str) -> Result<Value, ApiError> {
    let call = Fields::at(value, path)?;
    let path = call.path("function");
    let function = call.get("function").ok_or_else(|| ApiError::field(&path, "is missing"))?;
    let function = Fields::at(function, &path)?;
    let missing = |name| ApiError::field(function.path(name), "is missing");
    function.string("name")?.ok_or_else(|| missing("name"))?;
    let arguments = match function.get("arguments") {
        None => json!({}),
        Some(object @ Value::Object(_)) => object.clone(),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        Some(Value::String(text)) => {
            let problem = |problem: &str| {
                let problem = format!("must be the text of a JSON object, but {problem}");
                ApiError::field(function.path("arguments"), problem)
            };
            match serde_json::from_str(text) {
                Ok(object @ Value::Object(_)) => object,
                Ok(_) => return Err(problem("it is that of another value")),
                Err(error) => return Err(problem(&error.to_string())),
            }
        }
        Some(value) => {
            return Err(wrong_type(&function.path("arguments"), "the text of a JSON object", value));
        }
    };
    let mut call = value.clone();
    call["function"]["arguments"] = arguments;
    Ok(call)
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
        for body in [json!({}), json!({"functions": []})] {
            assert!(check(body).is_ok());
        }
        assert!(problem(check(json!({"functions": [{"name": "f"}]}))).starts_with("functions: "));
    }

    #[test]
    fn arguments_of_calls_are_objects_for_templates() {
        let call = |arguments: Value| {
            let call =
                json!({"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}});
            message(&json!({"role": "assistant", "content": null, "tool_calls": [call]}), "messages[1]")
        };
        for (arguments, expected) in [
            (json!("{\"a\": [1]}"), json!({"a": [1]})),
            (json!({"a": 1}), json!({"a": 1})),
            (json!(""), json!({})),
            (Value::Null, json!({})),
        ] {
            let message = call(arguments).unwrap();
            let expected =
                json!({"id": "x", "type": "function", "function": {"name": "f", "arguments": expected}});
            assert_eq!(message["tool_calls"], json!([expected]));
        }
        let place = "messages[1].tool_calls[0].function.arguments: must be the text of a JSON object, but ";
        for (arguments, expected) in
            [(json!("{"), "EOF"), (json!("[1]"), "it is that of another value"), (json!(5), "it is a number")]
        {
            let problem = problem(call(arguments));
            assert!(problem.starts_with(&format!("{place}{expected}")), "{problem}");
        }
        let nameless = json!({"role": "assistant", "tool_calls": [{"function": {}}]});
        assert_eq!(problem(message(&nameless, "m")), "m.tool_calls[0].function.name: is missing");
    }

    #[test]
    fn switches_of_reasoning_reach_the_template() {
        let read = |body: Value| variables(&Fields::new(body.as_object().unwrap())).map(Value::Object);
        for (body, expected) in [
            (json!({}), json!({})),
            (json!({"reasoning_effort": "low"}), json!({"reasoning_effort": "low"})),
            (
                json!({"reasoning_effort": "none"}),
                json!({"reasoning_effort": "none", "enable_thinking": false}),
            ),
            (json!({"enable_thinking": true}), json!({"enable_thinking": true})),
            (
                json!({"enable_thinking": true, "chat_template_kwargs": {"enable_thinking": false, "a": 1}}),
                json!({"enable_thinking": false, "a": 1}),
            ),
        ] {
            assert_eq!(read(body).unwrap(), expected);
        }
        let wrong = problem(read(json!({"reasoning_effort": "huge"})));
        assert!(wrong.starts_with("reasoning_effort: must be one of none, minimal"), "{wrong}");
        assert!(problem(read(json!({"enable_thinking": "no"}))).starts_with("enable_thinking: must be"));
    }
}
