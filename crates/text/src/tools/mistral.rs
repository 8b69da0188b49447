use super::values::json_object;
use super::{ToolCall, ToolParser, json_tools};

/// A JSON list of calls, or `name[ARGS]{…}` any number of times, which newer models begin with the marker each.
pub(super) fn parse(payload: &str) -> Option<Vec<ToolCall>> {
    if payload.trim_start().starts_with('[') {
        return json_tools::parse(payload);
    }
    let mut calls = Vec::new();
    let mut rest = payload.trim();
    while !rest.is_empty() {
        let (head, after) = rest.split_once("[ARGS]")?;
        let (name, id) = match head.split_once("[CALL_ID]") {
            Some((name, id)) => (name, Some(id.trim().to_owned())),
            None => (head, None),
        };
        let name = name.trim();
        if name.contains(|c: char| c.is_whitespace() || matches!(c, '[' | ']' | '{' | '}' | '"')) {
            return None;
        }
        let (arguments, after) = json_object(after)?;
        calls.push(ToolCall { id, name: name.to_owned(), arguments: arguments.to_owned() });
        rest = after.trim_start();
        rest = rest.strip_prefix(ToolParser::Mistral.start()).unwrap_or(rest).trim_start();
    }
    Some(calls)
}
