use super::ToolCall;
use super::values::{arguments, json_members};

/// A JSON object with a name and arguments, or a list of them.
pub(super) fn parse(payload: &str) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let rest = match payload.trim_start().strip_prefix('[') {
        Some(mut rest) => loop {
            let (call, after) = object(rest)?;
            calls.push(call);
            let after = after.trim_start();
            match after.strip_prefix(',') {
                Some(after) => rest = after,
                None => break after.strip_prefix(']')?,
            }
        },
        None => {
            let (call, rest) = object(payload)?;
            calls.push(call);
            rest
        }
    };
    rest.trim().is_empty().then_some(calls)
}

fn object(text: &str) -> Option<(ToolCall, &str)> {
    let (members, rest) = json_members(text)?;
    let mut call = ToolCall { id: None, name: String::new(), arguments: "{}".to_owned() };
    for (name, value) in members {
        match name.as_str() {
            "name" => call.name = serde_json::from_str(value).ok()?,
            "arguments" => call.arguments = arguments(value)?,
            "id" => call.id = serde_json::from_str(value).ok().filter(|id: &String| !id.is_empty()),
            _ => {}
        }
    }
    Some((call, rest))
}
