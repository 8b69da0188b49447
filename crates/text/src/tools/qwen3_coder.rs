use serde_json::Map;

use super::values::typed;
use super::{ToolCall, ToolSchemas, element};

/// Any number of `<function=NAME>` with parameters `<parameter=NAME>`, whose values have a line break before and after.
pub(super) fn parse(payload: &str, schemas: &ToolSchemas) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = payload;
    while !rest.trim().is_empty() {
        let (name, after) = element(rest, "<function=", ">")?;
        let name = name.trim();
        let mut arguments = Map::new();
        rest = after;
        while let Some((parameter, after)) = element(rest, "<parameter=", ">") {
            let (value, after) = after.split_once("</parameter>")?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let parameter = parameter.trim();
            arguments.insert(parameter.to_owned(), typed(value, schemas.parameter(name, parameter)));
            rest = after;
        }
        rest = rest.trim_start().strip_prefix("</function>")?;
        calls.push(ToolCall::new(name, arguments));
    }
    Some(calls)
}
