use super::values::{json_object, json_or_python};
use super::{ToolCall, element};

const BEGIN: &str = "<|tool_call_begin|>";
const ARGUMENTS: &str = "<|tool_call_argument_begin|>";
const END: &str = "<|tool_call_end|>";

/// `functions.NAME:NUMBER`, which is the call's id, and a JSON object; each in its own markers, of which a single call
/// may have none.
pub(super) fn parse(payload: &str) -> Option<Vec<ToolCall>> {
    if !payload.trim_start().starts_with(BEGIN) {
        return Some(vec![call(payload)?]);
    }
    let mut calls = Vec::new();
    let mut rest = payload;
    while !rest.trim().is_empty() {
        let (id, after) = element(rest, BEGIN, ARGUMENTS)?;
        let end = match json_object(after) {
            Some((_, rest)) => after.len() - rest.len(),
            None => after.find(END)?,
        };
        let (arguments, after) = after.split_at_checked(end)?;
        calls.push(with_id(id, arguments)?);
        rest = after.trim_start().strip_prefix(END)?;
    }
    Some(calls)
}

fn call(text: &str) -> Option<ToolCall> {
    let (id, arguments) = text.split_once(ARGUMENTS)?;
    with_id(id, arguments)
}

fn with_id(id: &str, arguments: &str) -> Option<ToolCall> {
    let id = id.trim();
    let (name, number) = id.rsplit_once(':')?;
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let name = name.strip_prefix("functions.").unwrap_or(name).to_owned();
    let arguments = match json_object(arguments) {
        Some((object, rest)) if rest.trim().is_empty() => object.to_owned(),
        _ => json_or_python(arguments.trim()).filter(|value| value.is_object())?.to_string(),
    };
    Some(ToolCall { id: Some(id.to_owned()), name, arguments })
}
