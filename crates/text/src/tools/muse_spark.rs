use serde_json::{Map, Value};

use super::{ToolCall, element};

/// Any number of `<atem:invoke name="…">` with parameters `<atem:parameter name="…">`: JSON, or text that is none.
pub(super) fn parse(payload: &str) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = payload;
    while !rest.trim().is_empty() {
        let (attributes, after) = element(rest, "<atem:invoke ", ">")?;
        let name = name(attributes)?;
        let mut arguments = Map::new();
        rest = after;
        while let Some((attributes, after)) = element(rest, "<atem:parameter ", ">") {
            let (text, after) = after.split_once("</atem:parameter>")?;
            let value = serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.trim().to_owned()));
            arguments.insert(self::name(attributes)?.to_owned(), value);
            rest = after;
        }
        rest = rest.trim_start().strip_prefix("</atem:invoke>")?;
        calls.push(ToolCall::new(name, arguments));
    }
    Some(calls)
}

/// The value of the attribute `name`.
fn name(attributes: &str) -> Option<&str> {
    let (before, after) = attributes.split_once("name=\"")?;
    if before.ends_with(|c: char| !c.is_whitespace()) {
        return None;
    }
    after.split_once('"').map(|(name, _)| name)
}
