use serde_json::Map;

use super::values::{json_object, literal_unless_string};
use super::{ToolCall, ToolSchemas, element, json_tools};

/// The tags of a family.
pub(super) struct Tags {
    key: (&'static str, &'static str),
    value: (&'static str, &'static str),
}

pub(super) const GLM47: Tags =
    Tags { key: ("<arg_key>", "</arg_key>"), value: ("<arg_value>", "</arg_value>") };
pub(super) const LONGCAT: Tags = Tags {
    key: ("<longcat_arg_key>", "</longcat_arg_key>"),
    value: ("<longcat_arg_value>", "</longcat_arg_value>"),
};

/// The name, and keys and values in turn. Models also write the name with a JSON object after it, or all as JSON.
pub(super) fn parse(payload: &str, tags: &Tags, schemas: &ToolSchemas) -> Option<Vec<ToolCall>> {
    if payload.trim_start().starts_with(['{', '[']) {
        return json_tools::parse(payload);
    }
    let name_end = payload.find(tags.key.0).or_else(|| payload.find('{')).unwrap_or(payload.len());
    let (name, mut rest) = payload.split_at_checked(name_end)?;
    let name = name.trim();
    if name.contains(|c: char| c.is_whitespace() || matches!(c, '<' | '>')) {
        return None;
    }
    if rest.starts_with('{') {
        let (object, after) = json_object(rest)?;
        let call = ToolCall { id: None, name: name.to_owned(), arguments: object.to_owned() };
        return after.trim().is_empty().then(|| vec![call]);
    }
    let mut arguments = Map::new();
    while !rest.trim().is_empty() {
        let (key, mut after) = element(rest, tags.key.0, tags.key.1)?;
        // Models write line breaks as escapes, too.
        while let Some(further) = after.trim_start().strip_prefix("\\n") {
            after = further;
        }
        let (value, after) = element(after, tags.value.0, tags.value.1)?;
        let key = key.trim();
        let value = literal_unless_string(value.trim(), schemas.parameter(name, key));
        arguments.insert(key.to_owned(), value);
        rest = after;
    }
    Some(vec![ToolCall::new(name, arguments)])
}
