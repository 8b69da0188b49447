//! Structured output: the fields that say what an answer has to be.

use russet_text::{Grammar, GrammarSource};
use serde_json::Value;

use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, wrong_type};

/// What answers have to be.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    /// The field that says it.
    pub(crate) field: String,
    pub(crate) source: GrammarSource,
}

impl Wanted {
    /// # Errors
    /// When it can't be enforced; the message names the field and the reason.
    pub(crate) fn compile(&self, app: &App) -> Result<Grammar, ApiError> {
        let compiled = app.grammars().and_then(|compiler| compiler.compile(&self.source));
        compiled.map_err(|error| ApiError::field(&self.field, error))
    }
}

/// What answers to a request have to be, if it says so.
///
/// # Errors
/// When it says so twice, or a field has another form; the message names it.
pub(crate) fn read(fields: &Fields<'_>) -> Result<Option<Wanted>, ApiError> {
    let mut sources = sources(fields)?.into_iter();
    let Some((field, source)) = sources.next() else { return Ok(None) };
    if let Some((other, _)) = sources.next() {
        return Err(ApiError::field(other, format!("can't be used together with {field}")));
    }
    Ok(Some(Wanted { field, source }))
}

/// All that is said, with the fields that say it.
fn sources(fields: &Fields<'_>) -> Result<Vec<(String, GrammarSource)>, ApiError> {
    let mut sources = Vec::new();
    sources.extend(response_format(fields)?);
    if let Some(outputs) = fields.get("structured_outputs") {
        let outputs = Fields::at(outputs, "structured_outputs")?;
        if outputs.get("structural_tag").is_some() {
            return Err(ApiError::field(outputs.path("structural_tag"), "is not supported"));
        }
        let before = sources.len();
        sources.extend(each(&outputs, "")?);
        if outputs.boolean("json_object")? == Some(true) {
            sources.push((outputs.path("json_object"), GrammarSource::JsonObject));
        }
        if sources.len() == before {
            let problem = "must have one of json, json_object, regex, choice and grammar";
            return Err(ApiError::field("structured_outputs", problem));
        }
    }
    // What vLLM called them before.
    sources.extend(each(fields, "guided_")?);
    Ok(sources)
}

/// OpenAI's field. `{"type": "json_object", "schema": …}` is what some other servers take.
fn response_format(fields: &Fields<'_>) -> Result<Option<(String, GrammarSource)>, ApiError> {
    let Some(format) = fields.get("response_format") else { return Ok(None) };
    let format = Fields::at(format, "response_format")?;
    match format.string("type")? {
        Some("text") => Ok(None),
        Some("json_object") => {
            let source = match format.get("schema") {
                Some(schema) => (format.path("schema"), GrammarSource::JsonSchema(schema.clone())),
                None => ("response_format".to_owned(), GrammarSource::JsonObject),
            };
            Ok(Some(source))
        }
        Some("json_schema") => {
            let path = format.path("json_schema");
            let schema = format.get("json_schema").ok_or_else(|| ApiError::field(&path, "is missing"))?;
            let schema = Fields::at(schema, &path)?;
            schema.string("name")?;
            // A schema is enforced in full, whether or not it is said to be strict.
            schema.boolean("strict")?;
            let path = schema.path("schema");
            let schema = schema.get("schema").ok_or_else(|| ApiError::field(&path, "is missing"))?;
            Ok(Some((path, GrammarSource::JsonSchema(schema.clone()))))
        }
        kind => {
            let kind = kind.unwrap_or("null");
            let problem = format!("must be \"text\", \"json_object\" or \"json_schema\", but it is {kind:?}");
            Err(ApiError::field(format.path("type"), problem))
        }
    }
}

/// vLLM's fields of these names, behind a prefix.
fn each(fields: &Fields<'_>, prefix: &str) -> Result<Vec<(String, GrammarSource)>, ApiError> {
    let mut sources = Vec::new();
    let mut add = |name: &str, source| sources.push((fields.path(name), source));
    let name = |name| format!("{prefix}{name}");
    let json = name("json");
    if let Some(schema) = fields.get(&json) {
        let schema = match schema {
            Value::String(text) => serde_json::from_str(text).map_err(|error| {
                ApiError::field(fields.path(&json), format!("is not valid JSON: {error}"))
            })?,
            schema => schema.clone(),
        };
        add(&json, GrammarSource::JsonSchema(schema));
    }
    let regex = name("regex");
    if let Some(text) = fields.string(&regex)? {
        add(&regex, GrammarSource::Regex(text.to_owned()));
    }
    let choice = name("choice");
    if let Some(texts) = fields.array(&choice)? {
        let text = |(index, value): (usize, &Value)| match value {
            Value::String(text) => Ok(text.clone()),
            _ => Err(wrong_type(&format!("{}[{index}]", fields.path(&choice)), "a string", value)),
        };
        let texts = texts.iter().enumerate().map(text).collect::<Result<_, _>>()?;
        add(&choice, GrammarSource::Choice(texts));
    }
    let grammar = name("grammar");
    if let Some(text) = fields.string(&grammar)? {
        add(&grammar, GrammarSource::Lark(text.to_owned()));
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: &Value) -> Result<Vec<(String, GrammarSource)>, String> {
        sources(&Fields::new(body.as_object().unwrap()))
            .map_err(|error| error.body()["error"]["message"].as_str().unwrap().to_owned())
    }

    #[test]
    fn each_field_is_read_under_its_name() {
        let schema = json!({"type": "integer"});
        let format = |format: Value| json!({"response_format": format});
        for (body, expected) in [
            (json!({}), None),
            (json!({"response_format": null, "structured_outputs": null, "guided_json": null}), None),
            (format(json!({"type": "text"})), None),
            (format(json!({"type": "json_object"})), Some(("response_format", GrammarSource::JsonObject))),
            (
                format(json!({"type": "json_object", "schema": schema})),
                Some(("response_format.schema", GrammarSource::JsonSchema(schema.clone()))),
            ),
            (
                format(json!({"type": "json_schema", "json_schema": {
                    "name": "n", "description": "d", "strict": true, "schema": schema,
                }})),
                Some(("response_format.json_schema.schema", GrammarSource::JsonSchema(schema.clone()))),
            ),
            (
                json!({"structured_outputs": {"json": schema}}),
                Some(("structured_outputs.json", GrammarSource::JsonSchema(schema.clone()))),
            ),
            (
                json!({"structured_outputs": {"json_object": true}}),
                Some(("structured_outputs.json_object", GrammarSource::JsonObject)),
            ),
            (
                json!({"structured_outputs": {"choice": ["a", "b"]}}),
                Some(("structured_outputs.choice", GrammarSource::Choice(vec!["a".into(), "b".into()]))),
            ),
            (
                json!({"guided_json": schema.to_string()}),
                Some(("guided_json", GrammarSource::JsonSchema(schema.clone()))),
            ),
            (json!({"guided_regex": "a+"}), Some(("guided_regex", GrammarSource::Regex("a+".into())))),
            (
                json!({"guided_grammar": "start: \"a\""}),
                Some(("guided_grammar", GrammarSource::Lark("start: \"a\"".into()))),
            ),
        ] {
            let expected: Vec<_> =
                expected.into_iter().map(|(field, source)| (field.to_owned(), source)).collect();
            assert_eq!(read(&body).unwrap(), expected, "{body}");
        }
    }

    #[test]
    fn faults_name_their_field() {
        for (body, expected) in [
            (json!({"response_format": "json"}), "response_format: must be an object, but it is a string"),
            (json!({"response_format": {}}), "response_format.type: must be \"text\", "),
            (json!({"response_format": {"type": "xml"}}), "response_format.type: must be \"text\", "),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema: is missing"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}),
                "response_format.json_schema.schema: is missing",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}}),
                "response_format.json_schema.strict: must be true or false, but it is a number",
            ),
            (json!({"structured_outputs": {}}), "structured_outputs: must have one of json, "),
            (json!({"structured_outputs": {"json_object": false}}), "structured_outputs: must have one of"),
            (json!({"structured_outputs": {"structural_tag": "x"}}), "structured_outputs.structural_tag: "),
            (
                json!({"structured_outputs": {"choice": ["a", 1]}}),
                "structured_outputs.choice[1]: must be a string, but it is a number",
            ),
            (json!({"guided_json": "{"}), "guided_json: is not valid JSON: "),
            (json!({"guided_regex": 1}), "guided_regex: must be a string, but it is a number"),
        ] {
            let error = read(&body).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        assert_eq!(read(&json!({"guided_regex": "a", "structured_outputs": {"json": {}}})).unwrap().len(), 2);
    }
}
