use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::{Error, Result};

/// The fields of a config object, read with checks that name the file and the field.
///
/// `null` means absent, as it does for optional fields in the reference.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    path: &'a Path,
    prefix: String,
    map: &'a Map<String, Value>,
}

/// No dimension of a model is larger; anything above is a corrupt or hostile file.
const MAX_DIMENSION: u64 = 1 << 24;

/// More layers than any model has.
const MAX_LAYERS: i32 = 4096;

impl<'a> Fields<'a> {
    /// The fields of `map`, which came from the file `path`.
    pub fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { path, prefix: String::new(), map }
    }

    /// The fields of `map`, an object inside the file `path`, whose place `prefix` tells.
    pub(crate) fn within(path: &'a Path, prefix: String, map: &'a Map<String, Value>) -> Self {
        Self { path, prefix, map }
    }

    /// Refuses fields whose names are not `known`.
    pub(crate) fn only(&self, known: &[&str]) -> Result<()> {
        match self.map.keys().find(|name| !known.contains(&name.as_str())) {
            None => Ok(()),
            Some(name) => Err(self.error(name, unknown(name, known))),
        }
    }

    /// An error about a field of this object.
    pub fn error(&self, field: &str, message: impl Into<String>) -> Error {
        Error::Field {
            path: PathBuf::from(self.path),
            field: format!("{}{field}", self.prefix),
            message: message.into(),
        }
    }

    /// Whether the field is there and null, where that is not the same as absent.
    pub fn is_null(&self, field: &str) -> bool {
        self.map.get(field).is_some_and(Value::is_null)
    }

    /// The raw value, unless absent or null.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    fn required<T>(&self, field: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.error(field, "is missing"))
    }

    fn convert<T>(
        &self,
        field: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        self.get(field)
            .map(|v| {
                convert(v).ok_or_else(|| self.error(field, format!("expected {expected}, got {}", show(v))))
            })
            .transpose()
    }

    /// A positive size that fits in an array dimension.
    pub fn size(&self, field: &str) -> Result<Option<i32>> {
        self.convert(field, &format!("an integer from 1 to {MAX_DIMENSION}"), |v| {
            v.as_u64().filter(|n| (1..=MAX_DIMENSION).contains(n)).map(|n| n as i32)
        })
    }

    /// [`Fields::size`] that must be present.
    pub fn required_size(&self, field: &str) -> Result<i32> {
        let value = self.size(field)?;
        self.required(field, value)
    }

    /// A number of things that may be none.
    pub fn count(&self, field: &str) -> Result<Option<i32>> {
        self.convert(field, &format!("an integer from 0 to {MAX_DIMENSION}"), |v| {
            v.as_u64().filter(|n| *n <= MAX_DIMENSION).map(|n| n as i32)
        })
    }

    /// [`Fields::count`] that must be present.
    pub fn required_count(&self, field: &str) -> Result<i32> {
        let value = self.count(field)?;
        self.required(field, value)
    }

    /// `num_hidden_layers`, which must be present.
    pub(crate) fn required_layers(&self) -> Result<i32> {
        let value = self.layers()?;
        self.required("num_hidden_layers", value)
    }

    /// `num_hidden_layers`.
    pub(crate) fn layers(&self) -> Result<Option<i32>> {
        let field = "num_hidden_layers";
        match self.size(field)? {
            Some(count) if count > MAX_LAYERS => {
                Err(self.error(field, format!("{count} is more than {MAX_LAYERS}")))
            }
            count => Ok(count),
        }
    }

    /// A finite number.
    pub fn number(&self, field: &str) -> Result<Option<f64>> {
        self.convert(field, "a finite number", |v| v.as_f64().filter(|n| n.is_finite()))
    }

    /// [`Fields::number`] that must be present.
    pub fn required_number(&self, field: &str) -> Result<f64> {
        let value = self.number(field)?;
        self.required(field, value)
    }

    /// A number greater than zero.
    pub fn positive(&self, field: &str) -> Result<Option<f64>> {
        self.convert(field, "a number greater than 0", |v| v.as_f64().filter(|n| n.is_finite() && *n > 0.0))
    }

    /// [`Fields::positive`] that must be present.
    pub fn required_positive(&self, field: &str) -> Result<f64> {
        let value = self.positive(field)?;
        self.required(field, value)
    }

    /// A boolean.
    pub fn flag(&self, field: &str) -> Result<Option<bool>> {
        self.convert(field, "true or false", Value::as_bool)
    }

    /// [`Fields::flag`] that must be present.
    pub fn required_flag(&self, field: &str) -> Result<bool> {
        let value = self.flag(field)?;
        self.required(field, value)
    }

    /// A string.
    pub fn text(&self, field: &str) -> Result<Option<&'a str>> {
        self.convert(field, "a string", Value::as_str)
    }

    /// [`Fields::text`] that must be present.
    pub fn required_text(&self, field: &str) -> Result<&'a str> {
        let value = self.text(field)?;
        self.required(field, value)
    }

    /// A list of strings.
    pub fn texts(&self, field: &str) -> Result<Option<Vec<&'a str>>> {
        self.convert(field, "a list of strings", |v| v.as_array()?.iter().map(Value::as_str).collect())
    }

    /// A list of finite numbers.
    pub fn numbers(&self, field: &str) -> Result<Option<Vec<f64>>> {
        self.convert(field, "a list of finite numbers", |v| {
            v.as_array()?.iter().map(|n| n.as_f64().filter(|n| n.is_finite())).collect()
        })
    }

    /// An object.
    pub fn object(&self, field: &str) -> Result<Option<Fields<'a>>> {
        let map = self.convert(field, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields { path: self.path, prefix: format!("{}{field}.", self.prefix), map }))
    }

    /// A list of objects.
    pub(crate) fn objects(&self, field: &str) -> Result<Option<Vec<Fields<'a>>>> {
        let maps = self.convert(field, "a list of objects", |v| {
            v.as_array()?.iter().map(Value::as_object).collect::<Option<Vec<_>>>()
        })?;
        let within = |(i, map)| Self::within(self.path, format!("{}{field}[{i}].", self.prefix), map);
        Ok(maps.map(|maps| maps.into_iter().enumerate().map(within).collect()))
    }

    /// All names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, &'a Value)> + use<'a> {
        self.map.iter().map(|(name, value)| (name.as_str(), value))
    }
}

/// Says that a name is not one of `known`, and which of them it may stand for.
pub(crate) fn unknown(name: &str, known: &[&str]) -> String {
    let shown = name.escape_debug();
    let similar = |candidate: &&&str| strsim::jaro_winkler(name, candidate) > 0.8;
    let nearest =
        |a: &&&str, b: &&&str| strsim::jaro_winkler(name, a).total_cmp(&strsim::jaro_winkler(name, b));
    match known.iter().filter(similar).max_by(nearest) {
        Some(candidate) => format!("'{shown}' is unknown; did you mean '{candidate}'?"),
        None => format!("'{shown}' is unknown (known: {})", known.join(", ")),
    }
}

/// A value for an error message, cut short.
pub(crate) fn show(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
