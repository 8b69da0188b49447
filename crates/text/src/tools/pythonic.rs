use serde_json::{Map, Value};

use super::ToolCall;
use super::values::{Literal, MAX_DEPTH};

/// A list of calls in Python's syntax, with keyword arguments alone. What is no literal is a string.
pub(super) fn parse(payload: &str) -> Option<Vec<ToolCall>> {
    let mut literal = Literal::new(payload);
    let mut calls = Vec::new();
    if !literal.skip("[") {
        return None;
    }
    while !literal.skip("]") {
        calls.push(call(&mut literal)?);
        if !literal.skip(",") && !literal.rest().trim_start().starts_with(']') {
            return None;
        }
    }
    literal.rest().trim().is_empty().then_some(calls)
}

fn call(literal: &mut Literal<'_>) -> Option<ToolCall> {
    let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
    let name = literal.take_while(is_name);
    if !literal.skip("(") {
        return None;
    }
    let mut arguments = Map::new();
    while !literal.skip(")") {
        let key = literal.take_while(is_name);
        if key.is_empty() || !literal.skip("=") {
            return None;
        }
        arguments.insert(key.to_owned(), value(literal)?);
        if !literal.skip(",") && !literal.rest().trim_start().starts_with(')') {
            return None;
        }
    }
    Some(ToolCall::new(name, arguments))
}

fn value(literal: &mut Literal<'_>) -> Option<Value> {
    let mut attempt = Literal::new(literal.rest());
    if let Some(value) = attempt.value(MAX_DEPTH)
        && attempt.rest().trim_start().starts_with([',', ')'])
    {
        *literal = attempt;
        return Some(value);
    }
    let bare =
        literal.take_while(|c| !matches!(c, ',' | '(' | ')' | '[' | ']' | '{' | '}' | '"' | '\'')).trim_end();
    (!bare.is_empty()).then(|| Value::String(bare.to_owned()))
}
