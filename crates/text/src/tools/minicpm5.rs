use serde_json::Map;

use super::values::typed;
use super::{ToolCall, ToolSchemas, element, unquoted};

pub(super) const CDATA: &str = "<![CDATA[";
pub(super) const CDATA_END: &str = "]]>";

/// The name, which the start marker comes before, and parameters `<param name="…">`, whose values may be CDATA.
pub(super) fn parse(payload: &str, schemas: &ToolSchemas) -> Option<Vec<ToolCall>> {
    let (name, mut rest) = payload.split_once('>')?;
    let name = unquoted(name);
    let mut arguments = Map::new();
    while !rest.trim().is_empty() {
        let (parameter, after) = element(rest, "<param name=", ">")?;
        let (value, after) = match element(after, CDATA, CDATA_END) {
            Some((value, after)) => (value, after.trim_start().strip_prefix("</param>")?),
            None => {
                let (value, after) = after.split_once("</param>")?;
                (value.trim(), after)
            }
        };
        let parameter = unquoted(parameter);
        arguments.insert(parameter.to_owned(), typed(value, schemas.parameter(name, parameter)));
        rest = after;
    }
    Some(vec![ToolCall::new(name, arguments)])
}
