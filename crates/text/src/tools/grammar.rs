//! Grammars of answers that are calls of tools, for requests that demand calls.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::values::allows_string;
use super::{ToolParser, gemma};
use crate::grammar::{GrammarSource, json_options};
use crate::{Error, Tokenizer};

/// Most calls in an answer that may have several. A model that is not sure what to say would call for ever.
const MOST_CALLS: usize = 16;

/// How deeply the parameters of a tool may be nested where the markup is not JSON.
const MAX_DEPTH: usize = 16;

impl ToolParser {
    /// A grammar of answers that are one call of one of these tools, or with `several` up to sixteen. `tools` are in
    /// OpenAI's shape. Arguments follow the schemas; where the markup has strings without quotes, of these only `enum`
    /// and `const`. Or they are what `otherwise` says.
    ///
    /// # Errors
    /// When there is no tool, one has a name that the markup has no room for, or `otherwise` is a grammar of rules.
    pub fn grammar(
        self,
        tokenizer: &Tokenizer,
        tools: &[Value],
        several: bool,
        otherwise: Option<&GrammarSource>,
    ) -> Result<GrammarSource, Error> {
        let special = tokenizer.special_tokens();
        let special = special.into_iter().filter(|(_, text)| !text.is_empty()).collect();
        let mut lark = Lark { special, rules: String::new(), count: 0 };
        let layout = Layout::of(self, tokenizer.token_to_id("[ARGS]").is_some());
        let mut calls = Vec::new();
        for tool in tools {
            calls.push(lark.call(self, layout.is_list, &Tool::read(tool)?)?);
        }
        if calls.is_empty() {
            return Err(Error::Grammar("there is no tool to call".into()));
        }
        let [before, open, close, after] =
            [layout.before, layout.open, layout.close, layout.after].map(|text| lark.literal(text));
        let call = lark.rule(&format!("{open} ({}) {close}", calls.join(" | ")));
        let more = match several {
            true => format!("({} {call}){{0,{}}}", lark.literal(layout.separator), MOST_CALLS - 1),
            false => String::new(),
        };
        let otherwise = match otherwise {
            Some(source) => format!(" | {}", lark.source(source)?),
            None => String::new(),
        };
        Ok(GrammarSource::Lark(format!("start: {before} {call} {more} {after}{otherwise}\n{}", lark.rules)))
    }
}

/// What stands around calls.
struct Layout {
    before: &'static str,
    open: &'static str,
    close: &'static str,
    separator: &'static str,
    after: &'static str,
    /// Mistral's older markup.
    is_list: bool,
}

impl Layout {
    fn of(parser: ToolParser, has_args_token: bool) -> Self {
        let of = |before, open, close, separator, after| Self {
            before,
            open,
            close,
            separator,
            after,
            is_list: false,
        };
        match parser {
            ToolParser::JsonTools | ToolParser::Qwen3Coder => {
                of("", "<tool_call>\n", "\n</tool_call>", "\n", "")
            }
            ToolParser::Glm47 => of("", "<tool_call>", "</tool_call>", "", ""),
            ToolParser::Longcat => of("", "<longcat_tool_call>", "</longcat_tool_call>", "", ""),
            ToolParser::Minicpm5 => of("", "", "", "\n", ""),
            ToolParser::Gemma4 => of("", "<|tool_call>", "<tool_call|>", "", ""),
            ToolParser::FunctionGemma => of("", "<start_function_call>", "<end_function_call>", "", ""),
            ToolParser::Pythonic => of("<|tool_call_start|>[", "", "", ", ", "]<|tool_call_end|>"),
            ToolParser::KimiK2 => of(
                "<|tool_calls_section_begin|>",
                "<|tool_call_begin|>",
                "<|tool_call_end|>",
                "",
                "<|tool_calls_section_end|>",
            ),
            ToolParser::KimiK3 => of("<|open|>tools<|sep|>", "", "", "", "<|close|>tools<|sep|>"),
            ToolParser::MinimaxM2 => of("<minimax:tool_call>\n", "", "", "\n", "\n</minimax:tool_call>"),
            ToolParser::MuseSpark => of("<atem:function_calls>\n", "", "", "\n", "\n</atem:function_calls>"),
            ToolParser::Mistral if has_args_token => of("", "[TOOL_CALLS]", "", "", ""),
            ToolParser::Mistral => Self { is_list: true, ..of("[TOOL_CALLS][", "", "", ", ", "]") },
        }
    }
}

/// A tool that may be called.
struct Tool {
    name: String,
    /// The schema of an object.
    parameters: Map<String, Value>,
}

/// A parameter of a tool.
struct Parameter {
    name: String,
    schema: Value,
    is_required: bool,
}

impl Tool {
    fn read(tool: &Value) -> Result<Self, Error> {
        let function = tool.get("function").unwrap_or(tool);
        let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
        if name.is_empty() || !name.chars().all(is_plain) {
            let message =
                format!("the tool's name {name:?} is not made of letters, digits, \"_\", \"-\" and \".\"");
            return Err(Error::Grammar(message));
        }
        let parameters = match function.get("parameters") {
            Some(Value::Object(parameters)) => parameters.clone(),
            // OpenAI's: a tool without them takes nothing.
            None | Some(Value::Null) => Map::new(),
            Some(_) => return Err(Error::Grammar(format!("the parameters of {name} are no object"))),
        };
        Ok(Self { name: name.to_owned(), parameters })
    }

    /// The parameters as a schema of their own.
    fn schema(&self) -> Value {
        let mut schema = self.parameters.clone();
        if schema.is_empty() {
            schema.insert("additionalProperties".into(), json!(false));
        }
        schema.entry("type").or_insert(json!("object"));
        Value::Object(schema)
    }

    /// The parameters one by one, in the schema's order.
    fn parameters(&self) -> Result<Vec<Parameter>, Error> {
        let parameters = fields(&self.parameters, &self.parameters);
        match parameters.iter().find(|parameter| !parameter.name.chars().all(is_plain)) {
            Some(Parameter { name, .. }) => Err(Error::Grammar(format!(
                "the parameter {name:?} of {} can't be written in the markup of this model's calls",
                self.name
            ))),
            None => Ok(parameters),
        }
    }
}

fn is_plain(character: char) -> bool {
    character.is_alphanumeric() || matches!(character, '_' | '-' | '.')
}

/// The properties of an object's schema. Definitions of the schema at the root are put into each.
fn fields(object: &Map<String, Value>, root: &Map<String, Value>) -> Vec<Parameter> {
    let required: Vec<&str> = match object.get("required") {
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let properties = object.get("properties").and_then(Value::as_object);
    let known = properties.into_iter().flatten().map(|(name, schema)| (name.clone(), schema.clone()));
    let is_known = |name: &str| properties.is_some_and(|properties| properties.contains_key(name));
    let unknown = required.iter().filter(|name| !is_known(name)).map(|name| ((*name).to_owned(), json!({})));
    let parameter = |(name, mut schema): (String, Value)| {
        if let Value::Object(schema) = &mut schema {
            for key in ["$defs", "definitions"] {
                if let Some(definitions) = root.get(key) {
                    schema.entry(key).or_insert_with(|| definitions.clone());
                }
            }
        }
        Parameter { is_required: required.contains(&name.as_str()), name, schema }
    };
    known.chain(unknown).map(parameter).collect()
}

/// A grammar that is written rule by rule.
struct Lark {
    /// Special tokens and their texts.
    special: Vec<(u32, String)>,
    rules: String,
    count: usize,
}

impl Lark {
    /// Adds a rule, unless it is as short as a name; returns its name.
    fn rule(&mut self, body: &str) -> String {
        self.named("r", "", body)
    }

    fn named(&mut self, prefix: &str, attributes: &str, body: &str) -> String {
        let name = format!("{prefix}{}", self.count);
        self.count += 1;
        // Writing to a string does not fail.
        let _ = writeln!(self.rules, "{name}{attributes}: {body}");
        name
    }

    /// Text as it is, special tokens in it as such.
    fn literal(&self, text: &str) -> String {
        let mut parts = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(character) = rest.chars().next() {
            let token = self.special.iter().filter(|(_, token)| rest.starts_with(token.as_str()));
            match token.max_by_key(|(_, token)| token.len()) {
                Some((id, token)) => {
                    parts.extend((!plain.is_empty()).then(|| json!(plain).to_string()));
                    plain.clear();
                    parts.push(format!("<[{id}]>"));
                    rest = &rest[token.len()..];
                }
                None => {
                    plain.push(character);
                    rest = &rest[character.len_utf8()..];
                }
            }
        }
        parts.extend((!plain.is_empty()).then(|| json!(plain).to_string()));
        if parts.is_empty() { "\"\"".into() } else { parts.join(" ") }
    }

    /// JSON of a schema.
    fn json(&mut self, schema: &Value) -> String {
        self.rule(&format!("%json {}", json_options(schema)))
    }

    /// Another answer than calls.
    fn source(&mut self, source: &GrammarSource) -> Result<String, Error> {
        Ok(match source {
            GrammarSource::JsonObject => self.json(&json!({"type": "object"})),
            GrammarSource::JsonSchema(schema) => self.json(schema),
            GrammarSource::Regex(regex) => self.rule(&format!("/{}/", llguidance::regex_to_lark(regex, ""))),
            GrammarSource::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
                self.rule(&texts.join(" | "))
            }
            GrammarSource::Lark(_) => {
                let message = "a grammar can't be used together with tools that may be called";
                return Err(Error::Grammar(message.into()));
            }
        })
    }

    /// A call of a tool, without what stands around all calls.
    fn call(&mut self, parser: ToolParser, is_list: bool, tool: &Tool) -> Result<String, Error> {
        let name = &tool.name;
        let body = match parser {
            ToolParser::JsonTools => self.json_call(tool),
            ToolParser::Mistral if is_list => self.json_call(tool),
            ToolParser::Mistral => {
                format!("{} {}", self.literal(&format!("{name}[ARGS]")), self.json(&tool.schema()))
            }
            ToolParser::KimiK2 => format!(
                "{} /[0-9]{{1,2}}/ {} {}",
                self.literal(&format!("functions.{name}:")),
                self.literal("<|tool_call_argument_begin|>"),
                self.json(&tool.schema())
            ),
            ToolParser::KimiK3 => format!(
                "{} {} {}",
                self.literal(&format!("<|open|>call tool=\"{name}\"<|sep|><|open|>json<|sep|>")),
                self.json(&tool.schema()),
                self.literal("<|close|>json<|sep|><|close|>call<|sep|>")
            ),
            ToolParser::Pythonic => {
                let mut items = Vec::new();
                for parameter in tool.parameters()? {
                    let value = self.json(&parameter.schema);
                    items.push((
                        format!("{} {value}", json!(format!("{}=", parameter.name))),
                        parameter.is_required,
                    ));
                }
                let items = self.separated(&items, ", ");
                format!("{} {items} \")\"", json!(format!("{name}(")))
            }
            ToolParser::Gemma4 => self.gemma_call(gemma::GEMMA4_STRING, tool)?,
            ToolParser::FunctionGemma => self.gemma_call(gemma::FUNCTION_GEMMA_STRING, tool)?,
            ToolParser::Qwen3Coder => {
                self.elements(tool, (format!("<function={name}>\n"), "</function>"), &QWEN3_CODER)?
            }
            ToolParser::Minicpm5 => {
                self.elements(tool, (format!("<function name=\"{name}\">"), "</function>"), &MINICPM5)?
            }
            ToolParser::MinimaxM2 => {
                self.elements(tool, (format!("<invoke name=\"{name}\">\n"), "</invoke>"), &MINIMAX_M2)?
            }
            ToolParser::MuseSpark => self.elements(
                tool,
                (format!("<atem:invoke name=\"{name}\">\n"), "</atem:invoke>"),
                &MUSE_SPARK,
            )?,
            ToolParser::Glm47 => self.elements(tool, (name.clone(), ""), &GLM47)?,
            ToolParser::Longcat => self.elements(tool, (name.clone(), ""), &LONGCAT)?,
        };
        Ok(self.rule(&body))
    }

    fn json_call(&mut self, tool: &Tool) -> String {
        let head = format!("{{\"name\": {}, \"arguments\": ", json!(tool.name));
        format!("{} {} \"}}\"", json!(head), self.json(&tool.schema()))
    }

    /// Items of which some may be left out, with a separator between them.
    fn separated(&mut self, items: &[(String, bool)], separator: &str) -> String {
        let separator = self.literal(separator);
        // What may follow if something came before, and if nothing did.
        let (mut further, mut first) = ("\"\"".to_owned(), "\"\"".to_owned());
        for (item, is_required) in items.iter().rev() {
            let [mut with_separator, mut alone] =
                [format!("{separator} {item} {further}"), format!("{item} {further}")];
            if !is_required {
                with_separator = format!("{with_separator} | {further}");
                alone = format!("{alone} | {first}");
            }
            first = self.rule(&alone);
            further = self.rule(&with_separator);
        }
        first
    }

    /// A call whose parameters are elements, each between tags.
    fn elements(
        &mut self,
        tool: &Tool,
        (open, close): (String, &str),
        tags: &Elements,
    ) -> Result<String, Error> {
        let mut body = self.literal(&open);
        for Parameter { name, schema, is_required } in tool.parameters()? {
            let head = self.literal(&format!("{}{name}{}", tags.open, tags.name_end));
            let is_text = match tags.values {
                Values::Json => false,
                Values::Typed => allows_string(&schema),
                Values::TextIfString => schema.get("type").is_some_and(|kind| kind == "string"),
            };
            let value = if is_text {
                self.text(&schema, tags.close)
            } else {
                format!("{} {}", self.json(&schema), self.literal(tags.close))
            };
            let element = self.rule(&format!("{head} {value} {}", self.literal(tags.after)));
            let _ = write!(body, " {element}{}", if is_required { "" } else { "?" });
        }
        Ok(format!("{body} {}", self.literal(close)))
    }

    /// A string as it is and the tag behind it.
    fn text(&mut self, schema: &Value, close: &str) -> String {
        if let Some(texts) = texts(schema) {
            let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
            return self.rule(&format!("({}) {}", texts.join(" | "), self.literal(close)));
        }
        // Parsers take the word for the value that is none.
        let excludes_null = !allows_null(schema);
        let (any, null) = ("(?s:.*)", "(?i:null)");
        let token = self.special.iter().find(|(_, token)| token == close).map(|(id, _)| *id);
        if let Some(id) = token {
            let mut terminal = format!("/{any}/ & ~/{any}{}{any}/", regex_literal(close));
            if excludes_null {
                let _ = write!(terminal, " & ~/{null}/");
            }
            return format!("{} <[{id}]>", self.named("T", "", &terminal));
        }
        // The text ends where the tag first does.
        let (tag, end) = (regex_literal(close.trim_start()), regex_literal(close));
        let mut terminal = format!("/{any}{end}/ & ~/{any}{tag}(?s:.+)/");
        if excludes_null {
            let _ = write!(terminal, " & ~/{null}{end}/");
        }
        let terminal = self.named("T", "", &terminal);
        self.named("r", "[lazy]", &terminal)
    }

    fn gemma_call(&mut self, mark: &str, tool: &Tool) -> Result<String, Error> {
        let object = self.gemma_object(mark, &tool.parameters, &tool.parameters, MAX_DEPTH)?;
        Ok(format!("{} {object}", json!(format!("call:{}", tool.name))))
    }

    fn gemma_object(
        &mut self,
        mark: &str,
        object: &Map<String, Value>,
        root: &Map<String, Value>,
        depth: usize,
    ) -> Result<String, Error> {
        let mut items = Vec::new();
        for Parameter { name, schema, is_required } in fields(object, root) {
            if name.is_empty() || !name.chars().all(is_plain) {
                let message =
                    format!("the parameter {name:?} can't be written in the markup of this model's calls");
                return Err(Error::Grammar(message));
            }
            let value = self.gemma_value(mark, &schema, root, depth)?;
            items.push((format!("{} {value}", json!(format!("{name}:"))), is_required));
        }
        let items = self.separated(&items, ",");
        Ok(self.rule(&format!("\"{{\" {items} \"}}\"")))
    }

    fn gemma_value(
        &mut self,
        mark: &str,
        schema: &Value,
        root: &Map<String, Value>,
        depth: usize,
    ) -> Result<String, Error> {
        let deep = || Error::Grammar(format!("parameters are nested more than {MAX_DEPTH} levels deep"));
        let depth = depth.checked_sub(1).ok_or_else(deep)?;
        if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            let missing = || Error::Grammar(format!("there is no {reference} in the parameters"));
            let path = reference.strip_prefix('#').ok_or_else(missing)?;
            let target = Value::Object(root.clone()).pointer(path).cloned().ok_or_else(missing)?;
            return self.gemma_value(mark, &target, root, depth);
        }
        let mut options = Vec::new();
        let values = schema.get("enum").and_then(Value::as_array).cloned();
        if let Some(values) = values.or_else(|| schema.get("const").map(|value| vec![value.clone()])) {
            options.extend(values.iter().map(|value| self.gemma_constant(mark, value)));
        } else if let Some(branches) = ["anyOf", "oneOf"].iter().find_map(|name| schema.get(name)?.as_array())
        {
            for branch in branches {
                options.push(self.gemma_value(mark, branch, root, depth)?);
            }
        } else {
            let every = ["string", "number", "boolean", "null"];
            let kinds: Vec<&str> = match schema.get("type") {
                Some(Value::String(kind)) => vec![kind],
                Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
                _ => every.to_vec(),
            };
            for kind in kinds {
                options.push(match kind {
                    "string" => self.gemma_string(mark),
                    "object" => {
                        let object = schema.as_object().cloned().unwrap_or_default();
                        self.gemma_object(mark, &object, root, depth)?
                    }
                    "array" => {
                        let any = json!({});
                        let items = schema.get("items").unwrap_or(&any);
                        let item = self.gemma_value(mark, items, root, depth)?;
                        let count = |name| schema.get(name).and_then(Value::as_u64);
                        let (least, most) = (count("minItems").unwrap_or(0), count("maxItems"));
                        let most =
                            most.map_or(String::new(), |most| most.saturating_sub(1).max(1).to_string());
                        let items = match (count("maxItems"), least) {
                            (Some(0), _) => "\"\"".to_owned(),
                            (Some(1), 0) => format!("{item}?"),
                            (Some(1), _) => item,
                            (_, 0) => format!("({item} (\",\" {item}){{0,{most}}})?"),
                            _ => format!("{item} (\",\" {item}){{{},{most}}}", least - 1),
                        };
                        self.rule(&format!("\"[\" {items} \"]\""))
                    }
                    kind => {
                        let mut only = schema.as_object().cloned().unwrap_or_default();
                        only.insert("type".into(), json!(kind));
                        self.json(&Value::Object(only))
                    }
                });
            }
        }
        if options.is_empty() {
            return Err(Error::Grammar(format!("no value is possible for {schema}")));
        }
        Ok(self.rule(&options.join(" | ")))
    }

    fn gemma_string(&mut self, mark: &str) -> String {
        let open = self.literal(mark);
        let end = self.text(&json!({"type": ["string", "null"]}), mark);
        self.rule(&format!("{open} {end}"))
    }

    fn gemma_constant(&self, mark: &str, value: &Value) -> String {
        self.literal(&gemma_text(mark, value))
    }
}

fn gemma_text(mark: &str, value: &Value) -> String {
    match value {
        Value::String(text) => format!("{mark}{text}{mark}"),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(|item| gemma_text(mark, item)).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(fields) => {
            let fields: Vec<String> =
                fields.iter().map(|(name, value)| format!("{name}:{}", gemma_text(mark, value))).collect();
            format!("{{{}}}", fields.join(","))
        }
        value => value.to_string(),
    }
}

/// How the parameters of a call are written as elements.
struct Elements {
    open: &'static str,
    name_end: &'static str,
    close: &'static str,
    after: &'static str,
    values: Values,
}

/// How the value of an element is read.
enum Values {
    /// As JSON.
    Json,
    /// By the types in the schema; what is none of them is a string.
    Typed,
    /// As JSON, unless the schema's type is a string.
    TextIfString,
}

const QWEN3_CODER: Elements = Elements {
    open: "<parameter=",
    name_end: ">\n",
    close: "\n</parameter>",
    after: "\n",
    values: Values::Typed,
};
const MINICPM5: Elements =
    Elements { open: "<param name=\"", name_end: "\">", close: "</param>", after: "", values: Values::Typed };
const MINIMAX_M2: Elements = Elements {
    open: "<parameter name=\"",
    name_end: "\">",
    close: "</parameter>",
    after: "\n",
    values: Values::Typed,
};
const MUSE_SPARK: Elements = Elements {
    open: "<atem:parameter name=\"",
    name_end: "\">",
    close: "</atem:parameter>",
    after: "\n",
    values: Values::Json,
};
const GLM47: Elements = Elements {
    open: "<arg_key>",
    name_end: "</arg_key><arg_value>",
    close: "</arg_value>",
    after: "",
    values: Values::TextIfString,
};
const LONGCAT: Elements = Elements {
    open: "<longcat_arg_key>",
    name_end: "</longcat_arg_key><longcat_arg_value>",
    close: "</longcat_arg_value>",
    after: "",
    values: Values::TextIfString,
};

/// The texts that a schema lists, if these are all that it allows.
fn texts(schema: &Value) -> Option<Vec<String>> {
    let values = match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => vec![value.clone()],
        (None, Some(Value::Array(values))) => values.clone(),
        _ => return None,
    };
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    Some(values.iter().map(text).collect())
}

fn allows_null(schema: &Value) -> bool {
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "null",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "null"),
        _ => true,
    }
}

/// A text within a regular expression of Lark.
fn regex_literal(text: &str) -> String {
    let mut regex = String::new();
    for character in text.chars() {
        match character {
            '\n' => regex.push_str("\\n"),
            '/' | '\\' | '.' | '+' | '*' | '?' | '(' | ')' | '|' | '[' | ']' | '{' | '}' | '^' | '$' => {
                regex.extend(['\\', character]);
            }
            character => regex.push(character),
        }
    }
    regex
}
