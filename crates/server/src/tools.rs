//! Tools that a request offers, in the shape that chat templates know:
//! `{"type": "function", "function": {"name", "description", "parameters"}}`.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::{Fields, wrong_type};

/// OpenAI takes 64 characters, Anthropic 128.
const LONGEST_NAME: usize = 128;

/// The tools of a list in OpenAI's shape.
pub(crate) fn read(fields: &Fields<'_>, name: &str) -> Result<Vec<Value>, ApiError> {
    let Some(tools) = fields.array(name)? else { return Ok(Vec::new()) };
    for (index, tool) in tools.iter().enumerate() {
        let tool = Fields::at(tool, &format!("{}[{index}]", fields.path(name)))?;
        match tool.string("type")? {
            Some("function") | None => {}
            Some(kind) => {
                let problem =
                    format!("must be \"function\", the only kind that is taken, but it is {kind:?}");
                return Err(ApiError::field(tool.path("type"), problem));
            }
        }
        let path = tool.path("function");
        let function = tool.get("function").ok_or_else(|| ApiError::field(&path, "is missing"))?;
        let function = Fields::at(function, &path)?;
        check_name(&function, "name")?;
        function.string("description")?;
        function.object("parameters")?;
        function.boolean("strict")?;
    }
    Ok(tools.clone())
}

/// Checks the name of a tool.
pub(crate) fn check_name(fields: &Fields<'_>, name: &str) -> Result<(), ApiError> {
    let path = fields.path(name);
    let value = fields.string(name)?.ok_or_else(|| ApiError::field(&path, "is missing"))?;
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if value.is_empty() || value.len() > LONGEST_NAME || !value.chars().all(fits) {
        let problem = format!(
            "must be 1 to {LONGEST_NAME} letters, digits, underscores, hyphens and dots, but it is {value:?}"
        );
        return Err(ApiError::field(path, problem));
    }
    Ok(())
}

/// Which tools an answer calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// None: as if none were offered.
    None,
    /// As the model likes.
    #[default]
    Auto,
    /// Some, and there is nothing else in it.
    Required,
    /// This one, once.
    Named(String),
}

impl ToolChoice {
    /// A call that is demanded must be of a tool that is offered. `field` is where the demand is in the body.
    pub(crate) fn check(self, tools: &[Value], field: &str) -> Result<Self, ApiError> {
        let has = |name: &str| tools.iter().any(|tool| tool["function"]["name"] == name);
        match &self {
            Self::Required if tools.is_empty() => Err(ApiError::field(field, "there are no tools to call")),
            Self::Named(name) if !has(name) => {
                Err(ApiError::field(field, format!("there is no tool {name:?}")))
            }
            _ => Ok(self),
        }
    }
}

/// The choice of a request, in OpenAI's shape.
pub(crate) fn choice(fields: &Fields<'_>, tools: &[Value]) -> Result<ToolChoice, ApiError> {
    let choice = match fields.get("tool_choice") {
        None => ToolChoice::Auto,
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" => ToolChoice::Required,
            _ => {
                let problem = format!("must be \"none\", \"auto\" or \"required\", but it is {choice:?}");
                return Err(ApiError::field("tool_choice", problem));
            }
        },
        Some(value @ Value::Object(_)) => {
            let choice = Fields::at(value, "tool_choice")?;
            if choice.string("type")? != Some("function") {
                return Err(ApiError::field("tool_choice.type", "must be \"function\""));
            }
            let function = choice.get("function").unwrap_or(&Value::Null);
            let function = Fields::at(function, "tool_choice.function")?;
            check_name(&function, "name")?;
            ToolChoice::Named(function.string("name")?.unwrap_or_default().to_owned())
        }
        Some(value) => return Err(wrong_type("tool_choice", "a string or an object", value)),
    };
    choice.check(tools, "tool_choice")
}

/// Tools for a template: each schema has a type, which some templates need.
pub(crate) fn with_types(tools: &[Value]) -> Vec<Value> {
    let mut tools = tools.to_vec();
    for tool in &mut tools {
        if let Some(parameters) = tool.pointer_mut("/function/parameters") {
            fill_type(parameters, "object");
        }
    }
    tools
}

/// Gives a schema without a type the one that it implies, else `default`.
fn fill_type(schema: &mut Value, default: &str) {
    let Value::Object(schema) = schema else { return };
    for name in ["properties", "$defs", "definitions"] {
        let schemas = schema.get_mut(name).and_then(Value::as_object_mut);
        schemas.into_iter().flat_map(Map::values_mut).for_each(|schema| fill_type(schema, "string"));
    }
    for name in ["anyOf", "oneOf", "allOf", "prefixItems"] {
        let schemas = schema.get_mut(name).and_then(Value::as_array_mut);
        schemas.into_iter().flatten().for_each(|schema| fill_type(schema, "string"));
    }
    if let Some(items) = schema.get_mut("items") {
        fill_type(items, "string");
    }
    if schema.get("type").is_none_or(Value::is_null) {
        let implied = implied_type(schema).unwrap_or_else(|| default.into());
        schema.insert("type".into(), implied);
    }
}

fn implied_type(schema: &Map<String, Value>) -> Option<Value> {
    if schema.contains_key("properties") {
        return Some(json!("object"));
    }
    if schema.contains_key("items") || schema.contains_key("prefixItems") {
        return Some(json!("array"));
    }
    let branches = ["anyOf", "oneOf", "allOf"].into_iter().find_map(|name| schema.get(name)?.as_array());
    if let Some(branches) = branches {
        return branches.iter().filter_map(|branch| branch.get("type")).find(|kind| *kind != "null").cloned();
    }
    let value = schema.get("enum").and_then(|values| values.get(0)).or_else(|| schema.get("const"))?;
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    Some(kind.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem<T: std::fmt::Debug>(result: Result<T, ApiError>) -> String {
        result.unwrap_err().body()["error"]["message"].as_str().unwrap().to_owned()
    }

    #[test]
    fn faults_of_tools_name_their_place() {
        let read = |tools: Value| read(&Fields::new(json!({"tools": tools}).as_object().unwrap()), "tools");
        let function = |function: Value| json!([{"type": "function", "function": function}]);
        for (tools, expected) in [
            (json!({}), "tools: must be a list, but it is an object"),
            (json!(["f"]), "tools[0]: must be an object"),
            (json!([{"type": "web_search"}]), "tools[0].type: must be \"function\""),
            (json!([{"type": "function"}]), "tools[0].function: is missing"),
            (function(json!({})), "tools[0].function.name: is missing"),
            (function(json!({"name": "a b"})), "tools[0].function.name: must be 1 to 128 letters"),
            (function(json!({"name": ""})), "tools[0].function.name: must be 1 to 128 letters"),
            (
                function(json!({"name": "f", "description": 1})),
                "tools[0].function.description: must be a string",
            ),
            (
                function(json!({"name": "f", "parameters": []})),
                "tools[0].function.parameters: must be an object",
            ),
            (
                function(json!({"name": "f", "strict": "yes"})),
                "tools[0].function.strict: must be true or false",
            ),
        ] {
            let problem = problem(read(tools));
            assert!(problem.starts_with(expected), "{problem}");
        }
        let whole = function(json!({"name": "f", "description": null, "parameters": {"type": "object"}}));
        assert_eq!(&read(whole.clone()).unwrap(), whole.as_array().unwrap());
        assert_eq!(read(Value::Null).unwrap(), Vec::<Value>::new());
    }

    #[test]
    fn schemas_without_a_type_get_one() {
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {
            "properties": {
                "a": {"description": "A."}, "b": {"enum": [1]}, "c": {"items": {}}, "d": {"properties": {"e": {}}},
                "f": {"anyOf": [{"type": "null"}, {"type": "number"}]}, "g": {"type": "boolean"}, "h": true,
                "i": {"type": ["string", "null"]}, "j": {"const": "x"}, "k": {"anyOf": []},
            },
        }}}, {"type": "function", "function": {"name": "g"}}]);
        let typed = with_types(tools.as_array().unwrap());
        let parameters = &typed[0]["function"]["parameters"];
        assert_eq!(parameters["type"], "object");
        let types = |name: &str| parameters["properties"][name]["type"].clone();
        for (name, expected) in [
            ("a", json!("string")),
            ("b", json!("integer")),
            ("c", json!("array")),
            ("d", json!("object")),
            ("f", json!("number")),
            ("g", json!("boolean")),
            ("i", json!(["string", "null"])),
            ("j", json!("string")),
            ("k", json!("string")),
        ] {
            assert_eq!(types(name), expected, "{name}");
        }
        assert_eq!(parameters["properties"]["c"]["items"]["type"], "string");
        assert_eq!(parameters["properties"]["d"]["properties"]["e"]["type"], "string");
        assert_eq!((&parameters["properties"]["h"], &typed[1]), (&json!(true), &tools[1]));
    }

    #[test]
    fn a_choice_is_of_tools_that_are_there() {
        let tools = [json!({"type": "function", "function": {"name": "f"}})];
        let read = |value: Value, tools: &[Value]| {
            choice(&Fields::new(json!({"tool_choice": value}).as_object().unwrap()), tools)
        };
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        for (value, expected) in [
            (Value::Null, ToolChoice::Auto),
            (json!("auto"), ToolChoice::Auto),
            (json!("none"), ToolChoice::None),
            (json!("required"), ToolChoice::Required),
            (named("f"), ToolChoice::Named("f".into())),
        ] {
            assert_eq!(read(value, &tools).unwrap(), expected);
        }
        for (value, expected) in [
            (json!("maybe"), "tool_choice: must be \"none\", \"auto\" or \"required\", but it is \"maybe\""),
            (json!({"type": "custom"}), "tool_choice.type: must be \"function\""),
            (json!({"type": "function"}), "tool_choice.function: must be an object, but it is null"),
            (json!({"type": "function", "function": {}}), "tool_choice.function.name: is missing"),
            (named("g"), "tool_choice: there is no tool \"g\""),
            (json!(1), "tool_choice: must be a string or an object, but it is a number"),
        ] {
            assert_eq!(problem(read(value, &tools)), expected);
        }
        assert_eq!(problem(read(json!("required"), &[])), "tool_choice: there are no tools to call");
    }
}
