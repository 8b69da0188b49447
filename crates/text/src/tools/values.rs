//! Values of arguments: JSON as it is written, Python's literals, and text that a schema gives a type.

use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Map, Number, Value};

/// How deeply literals may be nested, which is as deep as serde_json reads.
pub(super) const MAX_DEPTH: usize = 127;

/// Reads one JSON value; returns it, its text and what follows.
pub(super) fn json_value<T: DeserializeOwned>(text: &str) -> Option<(T, &str, &str)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter();
    let value = values.next()?.ok()?;
    let (read, rest) = text.split_at_checked(values.byte_offset())?;
    Some((value, read.trim(), rest))
}

/// The text of the JSON object at the beginning of `text`, and what follows.
pub(super) fn json_object(text: &str) -> Option<(&str, &str)> {
    json_value::<Map<String, Value>>(text).map(|(_, object, rest)| (object, rest))
}

/// The members of a JSON object at the beginning of `text` with their values as they are written, and what follows.
pub(super) fn json_members(text: &str) -> Option<(Vec<(String, &str)>, &str)> {
    let mut members = Vec::new();
    let mut rest = text.trim_start().strip_prefix('{')?.trim_start();
    if let Some(rest) = rest.strip_prefix('}') {
        return Some((members, rest));
    }
    loop {
        let (name, _, after) = json_value::<String>(rest)?;
        let (_, value, after) = json_value::<IgnoredAny>(after.trim_start().strip_prefix(':')?)?;
        members.push((name, value));
        let after = after.trim_start();
        if let Some(after) = after.strip_prefix('}') {
            return Some((members, after));
        }
        rest = after.strip_prefix(',')?;
    }
}

/// Arguments that are a JSON object, or a string with one in it.
pub(super) fn arguments(text: &str) -> Option<String> {
    let object = match serde_json::from_str(text) {
        Ok(Value::Object(_)) => text.trim().to_owned(),
        Ok(Value::String(inner)) => inner,
        _ => return None,
    };
    let (object, rest) = json_object(&object)?;
    rest.trim().is_empty().then(|| object.to_owned())
}

/// The value of a parameter whose markup has no types. Without a schema it is a string, and so is what does not fit it.
pub(super) fn typed(text: &str, schema: Option<&Value>) -> Value {
    let string = || Value::String(text.to_owned());
    if text.eq_ignore_ascii_case("null") {
        return Value::Null;
    }
    let Some(schema) = schema else { return string() };
    let mut types = Types::default();
    types.collect(schema);
    let found = None
        .or_else(|| if types.integer { integer(text) } else { None })
        .or_else(|| if types.number { number(text) } else { None })
        .or_else(|| if types.boolean { boolean(text) } else { None })
        .or_else(|| if types.container { container(text) } else { None })
        // A schema that says nothing: only what is certainly no string.
        .or_else(|| if types == Types::default() { container(text) } else { None });
    found.unwrap_or_else(string)
}

/// The value of a parameter whose markup has no types where everything but a string is written as a literal.
pub(super) fn literal_unless_string(text: &str, schema: Option<&Value>) -> Value {
    let is_string = schema.and_then(|schema| schema.get("type")).is_some_and(|kind| kind == "string");
    let value = if is_string { None } else { json_or_python(text) };
    value.unwrap_or_else(|| Value::String(text.to_owned()))
}

/// JSON, else a Python literal.
pub(super) fn json_or_python(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok().or_else(|| {
        let mut literal = Literal::new(text);
        let value = literal.value(MAX_DEPTH)?;
        literal.rest().trim().is_empty().then_some(value)
    })
}

/// Whether a schema allows a string, so that a value may stand without quotes.
pub(super) fn allows_string(schema: &Value) -> bool {
    let mut types = Types::default();
    types.collect(schema);
    types.string || types == Types::default()
}

/// The types that a schema allows.
#[derive(Debug, Default, PartialEq, Eq)]
struct Types {
    integer: bool,
    number: bool,
    boolean: bool,
    container: bool,
    string: bool,
    null: bool,
}

impl Types {
    fn collect(&mut self, schema: &Value) {
        match schema.get("type") {
            Some(Value::String(name)) => self.name(name),
            Some(Value::Array(names)) => {
                names.iter().filter_map(Value::as_str).for_each(|name| self.name(name))
            }
            _ => {}
        }
        for value in schema.get("enum").and_then(Value::as_array).into_iter().flatten() {
            match value {
                Value::Null => self.null = true,
                Value::Bool(_) => self.boolean = true,
                Value::Number(number) if number.is_f64() => self.number = true,
                Value::Number(_) => self.integer = true,
                Value::String(_) => self.string = true,
                Value::Array(_) | Value::Object(_) => self.container = true,
            }
        }
        for name in ["anyOf", "oneOf", "allOf"] {
            let branches = schema.get(name).and_then(Value::as_array).into_iter().flatten();
            branches.for_each(|branch| self.collect(branch));
        }
    }

    /// JSON Schema's names, and those that people write instead.
    fn name(&mut self, name: &str) {
        let name = name.trim().to_ascii_lowercase();
        let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
        if begins(&["int", "uint", "long", "short", "unsigned"]) {
            self.integer = true;
        } else if begins(&["num", "float", "double"]) {
            self.number = true;
        } else if begins(&["bool", "binary"]) {
            self.boolean = true;
        } else if begins(&["object", "arr", "dict", "list"]) {
            self.container = true;
        } else if name == "null" {
            self.null = true;
        } else {
            self.string = true;
        }
    }
}

fn integer(text: &str) -> Option<Value> {
    let text = text.trim();
    let whole = text.parse::<i64>().map(Value::from).or_else(|_| text.parse::<u64>().map(Value::from));
    whole.ok().or_else(|| number(text).filter(|value| value.is_i64() || value.is_u64()))
}

/// A number, without a fraction where it has none.
fn number(text: &str) -> Option<Value> {
    /// Whole numbers up to here are the same as floats.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let text = text.trim();
    if let Ok(whole) = text.parse::<i64>() {
        return Some(whole.into());
    }
    let number: f64 = text.parse().ok()?;
    if number.fract() == 0.0 && number.abs() <= EXACT {
        return Some((number as i64).into());
    }
    Number::from_f64(number).map(Value::Number)
}

fn boolean(text: &str) -> Option<Value> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Some(true.into()),
        "false" | "0" | "no" | "off" => Some(false.into()),
        _ => None,
    }
}

fn container(text: &str) -> Option<Value> {
    json_or_python(text).filter(|value| value.is_object() || value.is_array())
}

/// Reads values as Python writes them, and JSON's names for true, false and nothing.
pub(super) struct Literal<'a> {
    rest: &'a str,
}

impl<'a> Literal<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { rest: text }
    }

    pub(super) fn rest(&self) -> &'a str {
        self.rest
    }

    /// Skips white space, then `expected` if it is there.
    pub(super) fn skip(&mut self, expected: &str) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(expected) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// Skips white space and takes what belongs together.
    pub(super) fn take_while(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        self.rest = self.rest.trim_start();
        let end = self.rest.find(|c| !belongs(c)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }

    /// A value with at most `depth` levels of containers.
    pub(super) fn value(&mut self, depth: usize) -> Option<Value> {
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            '"' | '\'' => self.string().map(Value::String),
            '{' => self.dictionary(depth.checked_sub(1)?),
            '[' => self.items("[", "]", depth.checked_sub(1)?),
            '(' => self.items("(", ")", depth.checked_sub(1)?),
            _ => scalar(self.take_while(|c| c.is_alphanumeric() || matches!(c, '+' | '-' | '.' | '_'))),
        }
    }

    fn items(&mut self, open: &str, close: &str, depth: usize) -> Option<Value> {
        let mut items = Vec::new();
        self.skip(open);
        while !self.skip(close) {
            items.push(self.value(depth)?);
            if !self.skip(",") {
                let is_one = open == "(" && items.len() == 1;
                let value = if is_one { items.pop()? } else { Value::Array(items) };
                return self.skip(close).then_some(value);
            }
        }
        Some(Value::Array(items))
    }

    fn dictionary(&mut self, depth: usize) -> Option<Value> {
        let mut fields = Map::new();
        self.skip("{");
        while !self.skip("}") {
            let name = match self.value(0)? {
                Value::String(name) => name,
                other => other.to_string(),
            };
            if !self.skip(":") {
                return None;
            }
            fields.insert(name, self.value(depth)?);
            if !self.skip(",") {
                return self.skip("}").then_some(Value::Object(fields));
            }
        }
        Some(Value::Object(fields))
    }

    /// A string in single or double quotes, which may go over several lines.
    pub(super) fn string(&mut self) -> Option<String> {
        let mut characters = self.rest.char_indices();
        let (_, quote) = characters.next()?;
        let mut text = String::new();
        while let Some((at, character)) = characters.next() {
            if character == quote {
                self.rest = self.rest.get(at + 1..)?;
                return Some(text);
            }
            if character != '\\' {
                text.push(character);
                continue;
            }
            let mut code = |digits: usize| {
                let digits: String = characters.by_ref().take(digits).map(|(_, digit)| digit).collect();
                u32::from_str_radix(&digits, 16).ok()
            };
            match self.rest.get(at + 1..)?.chars().next()? {
                'u' => {
                    code(1);
                    let first = code(4)?;
                    let whole = match first {
                        // The first half of a pair, of which JSON makes characters beyond 16 bits.
                        0xd800..0xdc00 => {
                            let pair: String = characters.by_ref().take(6).map(|(_, c)| c).collect();
                            let second = u32::from_str_radix(pair.strip_prefix("\\u")?, 16).ok()?;
                            0x10000 + ((first - 0xd800) << 10) + second.checked_sub(0xdc00)?
                        }
                        _ => first,
                    };
                    text.push(char::from_u32(whole)?);
                }
                'U' => {
                    code(1);
                    text.push(char::from_u32(code(8)?)?);
                }
                'x' => {
                    code(1);
                    text.push(char::from_u32(code(2)?)?);
                }
                escaped => {
                    characters.next();
                    match escaped {
                        'n' => text.push('\n'),
                        't' => text.push('\t'),
                        'r' => text.push('\r'),
                        'b' => text.push('\u{8}'),
                        'f' => text.push('\u{c}'),
                        'a' => text.push('\u{7}'),
                        'v' => text.push('\u{b}'),
                        '0' => text.push('\0'),
                        '\\' | '\'' | '"' => text.push(escaped),
                        '\n' => {}
                        // Python keeps the backslash of what is no escape.
                        _ => text.extend(['\\', escaped]),
                    }
                }
            }
        }
        None
    }
}

/// A number, or a name for true, false or nothing.
pub(super) fn scalar(text: &str) -> Option<Value> {
    match text {
        "True" | "true" => Some(true.into()),
        "False" | "false" => Some(false.into()),
        "None" | "null" => Some(Value::Null),
        _ if !text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.')) => None,
        _ => {
            let whole =
                text.parse::<i64>().map(Value::from).or_else(|_| text.parse::<u64>().map(Value::from));
            let float = || text.parse().ok().and_then(Number::from_f64).map(Value::Number);
            whole.ok().or_else(float)
        }
    }
}
