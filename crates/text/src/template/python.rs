//! Python's conversions: JSON to values, `str`, `repr`, and `json.dumps`.
//!
//! Everything that walks a value pays fuel for each element, so that a value that is small in memory but contains the
//! same part many times over ends with the fuel and not with the memory.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// How deeply a value may be nested to be printed. Messages come less deep; Python gives up at about 1000.
const MAX_DEPTH: usize = 1000;

/// The template value of a JSON value, which must not be too deep.
pub(super) fn from_json(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Value::from(integer),
            (None, Some(integer)) => Value::from(integer),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => Value::from(items.iter().map(from_json).collect::<Vec<_>>()),
        Json::Object(fields) => {
            Value::from_pairs(fields.iter().map(|(key, value)| (key.as_str(), from_json(value))))
        }
    }
}

/// The value, if it is one that can be assigned: not nested too deep, and small enough to be walked within the fuel.
/// A namespace may not be put into another, because it could then contain itself.
pub(super) fn bounded(state: &State, value: Value, with_namespaces: bool) -> Result<Value, Error> {
    let mut count = 0;
    walk(state, &value, with_namespaces, MAX_DEPTH, &mut count)?;
    Ok(value)
}

fn walk(
    state: &State,
    value: &Value,
    with_namespaces: bool,
    depth: usize,
    count: &mut u64,
) -> Result<(), Error> {
    // Looking at an element takes a fraction of an instruction.
    *count += 1;
    if count.is_multiple_of(4) {
        state.consume_fuel(1)?;
    }
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        return Ok(());
    }
    let depth = depth.checked_sub(1).ok_or_else(too_deep)?;
    let is_namespace = value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"));
    if is_namespace && !with_namespaces {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "a namespace cannot be assigned to an attribute",
        ));
    }
    for item in value.try_iter()?.checked() {
        let item = item?;
        walk(state, &item, with_namespaces, depth, count)?;
        if value.kind() == ValueKind::Map {
            walk(state, &value.get_item(&item)?, with_namespaces, depth, count)?;
        }
    }
    Ok(())
}

/// `str(value)`.
pub(super) fn to_text(state: &State, value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    if value.is_undefined() {
        return Ok(String::new());
    }
    let mut output = String::new();
    write_repr(state, value, MAX_DEPTH, &mut output)?;
    Ok(output)
}

fn write_repr(state: &State, value: &Value, depth: usize, output: &mut String) -> Result<(), Error> {
    state.consume_fuel(1)?;
    let depth = depth.checked_sub(1).ok_or_else(too_deep)?;
    match value.kind() {
        ValueKind::Undefined => output.push_str("Undefined"),
        ValueKind::None => output.push_str("None"),
        ValueKind::Bool => output.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => output.push_str(&number(value)),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            pay_for_bytes(state, text.len())?;
            write_string_repr(text, output);
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let tuple = value.is_tuple();
            output.push(if tuple { '(' } else { '[' });
            let mut count = 0usize;
            for item in value.try_iter()?.checked() {
                if count > 0 {
                    output.push_str(", ");
                }
                write_repr(state, &item?, depth, output)?;
                count += 1;
            }
            if tuple && count == 1 {
                output.push(',');
            }
            output.push(if tuple { ')' } else { ']' });
        }
        ValueKind::Map => {
            output.push('{');
            let mut first = true;
            for key in value.try_iter()?.checked() {
                let key = key?;
                if !std::mem::take(&mut first) {
                    output.push_str(", ");
                }
                write_repr(state, &key, depth, output)?;
                output.push_str(": ");
                write_repr(state, &value.get_item(&key)?, depth, output)?;
            }
            output.push('}');
        }
        _ => output.push_str(&value.to_string()),
    }
    Ok(())
}

fn write_string_repr(text: &str, output: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    output.push(quote);
    for character in text.chars() {
        match character {
            '\\' => output.push_str("\\\\"),
            '\n' => output.push_str("\\n"),
            '\r' => output.push_str("\\r"),
            '\t' => output.push_str("\\t"),
            _ if character == quote => output.extend(['\\', quote]),
            '\0'..='\x1f' | '\x7f'..='\u{a0}' | '\u{ad}' => {
                output.push_str(&format!("\\x{:02x}", u32::from(character)));
            }
            '\u{2028}' | '\u{2029}' | '\u{200b}'..='\u{200f}' | '\u{feff}' => {
                output.push_str(&format!("\\u{:04x}", u32::from(character)));
            }
            _ => output.push(character),
        }
    }
    output.push(quote);
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
}

/// `repr` of a float: the shortest digits that read back, in scientific notation below 1e-4 and from 1e16 on.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    if value != 0.0 && !(1e-4..1e16).contains(&value.abs()) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    // Rust's `Debug` writes at least one digit after the point, and no exponent in this range.
    format!("{value:?}")
}

/// The arguments of `json.dumps`.
#[derive(Debug)]
pub(super) struct JsonStyle {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

impl JsonStyle {
    pub(super) fn new(
        ensure_ascii: bool,
        indent: Option<&Value>,
        separators: Option<&Value>,
        sort_keys: bool,
    ) -> Result<Self, Error> {
        let wrong = |message| Error::new(ErrorKind::InvalidOperation, message);
        let indent = match indent {
            None => None,
            Some(value) if value.is_none() || value.is_undefined() => None,
            Some(value) => match (value.as_str(), i64::try_from(value.clone())) {
                (Some(text), _) => Some(text.to_owned()),
                // Python takes a negative indentation for none at all.
                (None, Ok(width)) => Some(" ".repeat(usize::try_from(width).unwrap_or(0).min(64))),
                (None, Err(_)) => return Err(wrong("the indent of tojson must be a number or a string")),
            },
        };
        let separators = separators.filter(|value| !value.is_none() && !value.is_undefined());
        let (item_separator, key_separator) = match separators {
            None => ((if indent.is_some() { "," } else { ", " }).to_owned(), ": ".to_owned()),
            Some(value) => {
                let parts: Vec<Value> = value.try_iter()?.collect();
                match parts.iter().map(Value::as_str).collect::<Vec<_>>().as_slice() {
                    [Some(item), Some(key)] => ((*item).to_owned(), (*key).to_owned()),
                    _ => return Err(wrong("the separators of tojson must be two strings")),
                }
            }
        };
        Ok(Self { ensure_ascii, indent, item_separator, key_separator, sort_keys })
    }
}

/// `json.dumps(value)`.
pub(super) fn to_json(state: &State, value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let mut output = String::new();
    write_json(state, value, style, 0, &mut output)?;
    Ok(output)
}

fn write_json(
    state: &State,
    value: &Value,
    style: &JsonStyle,
    depth: usize,
    output: &mut String,
) -> Result<(), Error> {
    state.consume_fuel(1)?;
    if depth >= MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::None => output.push_str("null"),
        ValueKind::Bool => output.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => output.push_str(match number(value).as_str() {
            "nan" => "NaN",
            "inf" => "Infinity",
            "-inf" => "-Infinity",
            text => text,
        }),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            pay_for_bytes(state, text.len())?;
            write_json_string(text, style.ensure_ascii, output);
        }
        ValueKind::Seq | ValueKind::Iterable => {
            output.push('[');
            let mut empty = true;
            for item in value.try_iter()?.checked() {
                let item = item?;
                start_item(state, style, depth, std::mem::replace(&mut empty, false), output)?;
                write_json(state, &item, style, depth + 1, output)?;
            }
            end_items(state, style, depth, empty, output)?;
            output.push(']');
        }
        ValueKind::Map => {
            let mut fields = Vec::new();
            for key in value.try_iter()?.checked() {
                let key = key?;
                state.consume_fuel(1)?;
                let field = value.get_item(&key)?;
                let name = match key.kind() {
                    ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                    ValueKind::Number | ValueKind::Bool | ValueKind::None => to_json(state, &key, style)?,
                    kind => return Err(not_json(&format!("a {kind} as a key"))),
                };
                fields.push((name, field));
            }
            if style.sort_keys {
                fields.sort_by(|(a, _), (b, _)| a.cmp(b));
            }
            output.push('{');
            let empty = fields.is_empty();
            for (index, (name, field)) in fields.iter().enumerate() {
                start_item(state, style, depth, index == 0, output)?;
                pay_for_bytes(state, name.len())?;
                write_json_string(name, style.ensure_ascii, output);
                output.push_str(&style.key_separator);
                write_json(state, field, style, depth + 1, output)?;
            }
            end_items(state, style, depth, empty, output)?;
            output.push('}');
        }
        ValueKind::Undefined => return Err(not_json("an undefined value")),
        kind => return Err(not_json(&format!("a value of type {kind}"))),
    }
    Ok(())
}

fn start_item(
    state: &State,
    style: &JsonStyle,
    depth: usize,
    first: bool,
    output: &mut String,
) -> Result<(), Error> {
    if !first {
        pay_for_bytes(state, style.item_separator.len())?;
        output.push_str(&style.item_separator);
    }
    new_line(state, style, depth + 1, output)
}

fn end_items(
    state: &State,
    style: &JsonStyle,
    depth: usize,
    empty: bool,
    output: &mut String,
) -> Result<(), Error> {
    if empty { Ok(()) } else { new_line(state, style, depth, output) }
}

fn new_line(state: &State, style: &JsonStyle, depth: usize, output: &mut String) -> Result<(), Error> {
    if let Some(indent) = &style.indent {
        pay_for_bytes(state, indent.len().saturating_mul(depth))?;
        output.push('\n');
        for _ in 0..depth {
            output.push_str(indent);
        }
    }
    Ok(())
}

fn write_json_string(text: &str, ensure_ascii: bool, output: &mut String) {
    output.push('"');
    for character in text.chars() {
        match character {
            '"' => output.push_str("\\\""),
            '\\' => output.push_str("\\\\"),
            '\n' => output.push_str("\\n"),
            '\r' => output.push_str("\\r"),
            '\t' => output.push_str("\\t"),
            '\x08' => output.push_str("\\b"),
            '\x0c' => output.push_str("\\f"),
            '\0'..='\x1f' => output.push_str(&format!("\\u{:04x}", u32::from(character))),
            _ if ensure_ascii && !(' '..='~').contains(&character) => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    output.push_str(&format!("\\u{unit:04x}"));
                }
            }
            _ => output.push(character),
        }
    }
    output.push('"');
}

/// One instruction pays for 64 bytes, as in MiniJinja.
pub(super) fn pay_for_bytes(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(bytes as u64 / 64)
}

fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value is nested more than {MAX_DEPTH} levels deep"))
}

fn not_json(what: &str) -> Error {
    Error::new(ErrorKind::BadSerialization, format!("{what} cannot be written as JSON"))
}

#[cfg(test)]
mod tests {
    use super::float;

    #[test]
    fn floats_print_as_in_python() {
        for (value, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
            (123456.789, "123456.789"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float(value), text);
        }
    }
}
