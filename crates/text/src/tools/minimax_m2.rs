use serde_json::Map;

use super::values::typed;
use super::{ToolCall, ToolSchemas, element, unquoted};

/// Any number of `<invoke name="…">` with parameters `<parameter name="…">`.
pub(super) fn parse(payload: &str, schemas: &ToolSchemas) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = payload;
    while !rest.trim().is_empty() {
        let (name, after) = element(rest, "<invoke name=", ">")?;
        let name = unquoted(name);
        let mut arguments = Map::new();
        rest = after;
        while let Some((parameter, after)) = element(rest, "<parameter name=", ">") {
            let (value, after) = after.split_once("</parameter>")?;
            let parameter = unquoted(parameter);
            arguments.insert(parameter.to_owned(), typed(value.trim(), schemas.parameter(name, parameter)));
            rest = after;
        }
        rest = rest.trim_start().strip_prefix("</invoke>")?;
        calls.push(ToolCall::new(name, arguments));
    }
    Some(calls)
}
