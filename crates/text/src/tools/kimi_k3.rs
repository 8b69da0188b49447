use serde_json::{Map, Value};

use super::values::json_object;
use super::{ToolCall, element};

const SEPARATOR: &str = "<|sep|>";

/// Elements `call`, each with elements `argument`, or with one element `json`.
pub(super) fn parse(payload: &str) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = payload;
    while !rest.trim().is_empty() {
        let (attributes, after) = element(rest, "<|open|>call", SEPARATOR)?;
        let (body, after) = after.split_once("<|close|>call<|sep|>")?;
        calls.push(call(&attribute(attributes, "tool")?, body)?);
        rest = after;
    }
    Some(calls)
}

fn call(name: &str, body: &str) -> Option<ToolCall> {
    if let Some((_, after)) = element(body, "<|open|>json", SEPARATOR) {
        let (object, rest) = json_object(after)?;
        let rest = rest.trim_start().strip_prefix("<|close|>json<|sep|>")?;
        let call = ToolCall { id: None, name: name.to_owned(), arguments: object.to_owned() };
        return rest.trim().is_empty().then_some(call);
    }
    let mut arguments = Map::new();
    let mut rest = body;
    while !rest.trim().is_empty() {
        let (attributes, after) = element(rest, "<|open|>argument", SEPARATOR)?;
        let (text, after) = after.split_once("<|close|>argument<|sep|>")?;
        let string = || Value::String(text.to_owned());
        let value = match attribute(attributes, "type").as_deref() {
            None | Some("string") => string(),
            Some(_) => serde_json::from_str(text).unwrap_or_else(|_| string()),
        };
        arguments.insert(attribute(attributes, "key")?, value);
        rest = after;
    }
    Some(ToolCall::new(name, arguments))
}

/// The value of an attribute ` name="…"`.
fn attribute(attributes: &str, name: &str) -> Option<String> {
    let mut rest = attributes;
    loop {
        let (found, after) = rest.split_once("=\"")?;
        let (value, after) = after.split_once('"')?;
        if found.trim() == name {
            return Some(value.replace("&quot;", "\"").replace("&amp;", "&"));
        }
        rest = after;
    }
}
