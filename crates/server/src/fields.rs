//! Reading the fields of a JSON object: null is absent, a wrong type is an error that names the field.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ApiError;

/// An object of a request.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Where it is in the body, ending in a dot; empty for the body itself.
    path: String,
}

type Result<T> = std::result::Result<T, ApiError>;

impl<'a> Fields<'a> {
    /// The body itself.
    pub(crate) fn new(object: &'a Map<String, Value>) -> Self {
        Self { object, path: String::new() }
    }

    /// An object at `path`.
    pub(crate) fn at(value: &'a Value, path: &str) -> Result<Self> {
        let object = value.as_object().ok_or_else(|| wrong_type(path, "an object", value))?;
        Ok(Self { object, path: format!("{path}.") })
    }

    /// The full name of a field.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// A field that is there and not null.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong_type(&self.path(name), expected, value))
    }

    pub(crate) fn boolean(&self, name: &str) -> Result<Option<bool>> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(crate) fn string(&self, name: &str) -> Result<Option<&'a str>> {
        self.typed(name, "a string", Value::as_str)
    }

    pub(crate) fn number(&self, name: &str) -> Result<Option<f64>> {
        self.typed(name, "a number", Value::as_f64)
    }

    pub(crate) fn array(&self, name: &str) -> Result<Option<&'a Vec<Value>>> {
        self.typed(name, "a list", Value::as_array)
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>> {
        self.typed(name, "an object", Value::as_object)
    }

    /// A whole number of a range.
    pub(crate) fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>> {
        // Numbers beyond i64 are beyond any range.
        let saturated = |value: &Value| value.as_i64().or_else(|| value.as_u64().map(|_| i64::MAX));
        let Some(number) = self.typed(name, "an integer", saturated)? else { return Ok(None) };
        if range.contains(&number) {
            return Ok(Some(number));
        }
        let (low, high) = range.into_inner();
        let expected = match high {
            i64::MAX => format!("at least {low}"),
            _ => format!("from {low} to {high}"),
        };
        Err(ApiError::field(self.path(name), format!("must be {expected}, but it is {number}")))
    }
}

pub(crate) fn wrong_type(path: &str, expected: &str, value: &Value) -> ApiError {
    let found = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    ApiError::field(path, format!("must be {expected}, but it is {found}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn null_is_absent_and_a_wrong_type_names_the_field() {
        let body = json!({"a": null, "b": "x", "n": 7, "f": 1.5, "big": u64::MAX});
        let fields = Fields::new(body.as_object().unwrap());
        assert!(fields.boolean("a").unwrap().is_none() && fields.string("missing").unwrap().is_none());
        assert_eq!(fields.string("b").unwrap(), Some("x"));
        assert_eq!(fields.integer("n", 0..=7).unwrap(), Some(7));
        assert_eq!(fields.number("n").unwrap(), Some(7.0));
        let message = |error: ApiError| error.body()["error"]["message"].as_str().unwrap().to_owned();
        let wrong = message(fields.boolean("b").unwrap_err());
        assert_eq!(wrong, "b: must be true or false, but it is a string");
        for (name, range, expected) in [
            ("n", 0..=6, "n: must be from 0 to 6, but it is 7"),
            ("n", 8..=i64::MAX, "n: must be at least 8, but it is 7"),
            ("f", 0..=6, "f: must be an integer, but it is a number"),
            ("big", 0..=9, "big: must be from 0 to 9, but it is 9223372036854775807"),
        ] {
            assert_eq!(message(fields.integer(name, range).unwrap_err()), expected);
        }
    }
}
