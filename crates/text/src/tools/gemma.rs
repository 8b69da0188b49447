use serde_json::{Map, Value};

use super::ToolCall;
use super::values::{Literal, MAX_DEPTH, scalar};

pub(super) const GEMMA4_STRING: &str = "<|\"|>";
pub(super) const FUNCTION_GEMMA_STRING: &str = "<escape>";

/// Any number of `call:NAME{key:value,…}`. Keys are bare and strings stand between `mark`s, as they are; with
/// `bare_strings` also without.
pub(super) fn parse(payload: &str, mark: &str, bare_strings: bool) -> Option<Vec<ToolCall>> {
    let mut reader = Reader { literal: Literal::new(payload), mark, bare_strings };
    let mut calls = Vec::new();
    while !reader.literal.rest().trim().is_empty() {
        if !reader.literal.skip("call:") {
            return None;
        }
        let name = reader.literal.take_while(is_name);
        calls.push(ToolCall::new(name, reader.object(MAX_DEPTH)?));
    }
    Some(calls)
}

fn is_name(character: char) -> bool {
    character.is_alphanumeric() || matches!(character, '_' | '-' | '.')
}

struct Reader<'a> {
    literal: Literal<'a>,
    mark: &'a str,
    bare_strings: bool,
}

impl Reader<'_> {
    fn object(&mut self, depth: usize) -> Option<Map<String, Value>> {
        let depth = depth.checked_sub(1)?;
        let mut fields = Map::new();
        if !self.literal.skip("{") {
            return None;
        }
        while !self.literal.skip("}") {
            let key = match self.string() {
                Some(key) => key?,
                None => self.literal.take_while(is_name).to_owned(),
            };
            if key.is_empty() || !self.literal.skip(":") {
                return None;
            }
            fields.insert(key, self.value(depth)?);
            if !self.literal.skip(",") {
                return self.literal.skip("}").then_some(fields);
            }
        }
        Some(fields)
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if let Some(string) = self.string() {
            return string.map(Value::String);
        }
        match self.literal.rest().trim_start().chars().next()? {
            '{' => self.object(depth).map(Value::Object),
            '[' => {
                let depth = depth.checked_sub(1)?;
                let mut items = Vec::new();
                self.literal.skip("[");
                while !self.literal.skip("]") {
                    items.push(self.value(depth)?);
                    if !self.literal.skip(",") {
                        return self.literal.skip("]").then_some(Value::Array(items));
                    }
                }
                Some(Value::Array(items))
            }
            _ => {
                let text = self.literal.take_while(|c| !matches!(c, ',' | '}' | ']' | '{' | '[')).trim_end();
                scalar(text).or_else(|| self.bare_strings.then(|| Value::String(text.to_owned())))
            }
        }
    }

    /// A string, if one begins here; none within if it does not end.
    fn string(&mut self) -> Option<Option<String>> {
        if self.literal.skip(self.mark) {
            let whole = self.literal.rest().split_once(self.mark);
            return Some(whole.map(|(string, rest)| {
                self.literal = Literal::new(rest);
                string.to_owned()
            }));
        }
        self.literal.rest().starts_with('"').then(|| self.literal.string())
    }
}
