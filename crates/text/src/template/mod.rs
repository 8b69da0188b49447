//! Chat templates: Jinja as Hugging Face's Transformers sets it up (`utils/chat_template_utils.py`), in MiniJinja.
//!
//! A template comes with a checkpoint and is untrusted. What it may use is limited:
//!
//! - MiniJinja's fuel pays for every instruction and for the data that a template makes.
//! - A template runs on a thread of its own, with a stack for the deepest nesting that the other limits allow; the
//!   caller's stack does not matter.
//! - Fuel does not pay for comparing or concatenating a value that contains the same part many times over, and a value
//!   that contains itself would exhaust any stack. So what a template assigns and prints is walked, within the fuel.
//! - For what remains there is a time limit. Code that runs cannot be stopped from outside, so a template that exceeds
//!   it is left behind with its thread, once: afterwards it is refused.

mod methods;
mod python;
mod source;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs, from_args};
use minijinja::{AutoEscape, Environment, ErrorKind, Output, State, UndefinedBehavior};
use serde_json::Map;

use crate::Error;

/// Templates in use have some 10 to 50 kB.
const MAX_SOURCE_BYTES: usize = 128 << 10;

/// One expression or statement, with its strings. MiniJinja folds constants in quadratic time.
const MAX_TAG_BYTES: usize = 16 << 10;

/// Instructions that a template may run; one also pays for 64 bytes of data. The templates in use need some 150 per
/// message, and handle its text some eight times.
const FUEL: u64 = 2_000_000;

/// The longest prompt that is taken for one, in bytes.
const MAX_OUTPUT_BYTES: usize = 64 << 20;

/// How deeply the variables of a template may be nested: a level for the list of messages, and serde_json reads no
/// deeper than 127 levels.
pub(crate) const MAX_DEPTH: usize = 129;

/// Several times what was measured for the deepest nesting in `MAX_SOURCE_BYTES`, and for the deepest value that
/// recursive macros can build, printed. Only what is used of a stack takes memory.
const STACK_BYTES: usize = 128 << 20;

/// A template that has used up its fuel has run for less than a second.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// What a chat template may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// The size of the template itself.
    Source,
    /// The size of one expression or statement in it.
    Tag,
    /// Instructions and data.
    Work,
    /// Time. The thread that did not end goes on, and may use more and more memory: a program that must stay healthy
    /// should report this and exit.
    Time,
    /// The size of the rendered prompt.
    Output,
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Source => write!(f, "{MAX_SOURCE_BYTES} bytes of source"),
            Self::Tag => write!(f, "{MAX_TAG_BYTES} bytes in one expression"),
            Self::Work => write!(f, "{FUEL} instructions"),
            Self::Time => write!(f, "{} seconds", TIME_LIMIT.as_secs()),
            Self::Output => write!(f, "{MAX_OUTPUT_BYTES} bytes of output"),
        }
    }
}

/// A compiled chat template.
///
/// Cloning is cheap.
#[derive(Debug, Clone)]
pub struct ChatTemplate(Arc<Compiled>);

#[derive(Debug)]
struct Compiled {
    name: String,
    source: String,
    environment: Environment<'static>,
    /// A run of this template had to be left behind.
    abandoned: AtomicBool,
}

/// The name of the only template of an environment.
const TEMPLATE: &str = "chat_template";

impl ChatTemplate {
    /// Compiles a template. The name is for messages.
    pub fn new(name: &str, source: &str) -> Result<Self, Error> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(Error::TemplateLimit { template: name.to_owned(), limit: Limit::Source });
        }
        let rewritten = source::rewrite(source, MAX_TAG_BYTES)
            .ok_or_else(|| Error::TemplateLimit { template: name.to_owned(), limit: Limit::Tag })?;
        let environment = on_own_thread(name, TIME_LIMIT, move || compile(rewritten))?.map_err(|error| {
            Error::TemplateSyntax { template: name.to_owned(), message: describe(&error) }
        })?;
        let (name, source) = (name.to_owned(), source.to_owned());
        Ok(Self(Arc::new(Compiled { name, source, environment, abandoned: AtomicBool::new(false) })))
    }

    /// The template as it was given.
    pub fn source(&self) -> &str {
        &self.0.source
    }

    /// Renders the template with these variables.
    pub fn render(&self, variables: &Map<String, serde_json::Value>) -> Result<String, Error> {
        self.render_within(TIME_LIMIT, variables)
    }

    fn render_within(
        &self,
        time: Duration,
        variables: &Map<String, serde_json::Value>,
    ) -> Result<String, Error> {
        let compiled = &self.0;
        let limit = |limit| Error::TemplateLimit { template: compiled.name.clone(), limit };
        if compiled.abandoned.load(Ordering::Relaxed) {
            return Err(limit(Limit::Time));
        }
        let mut context = Vec::with_capacity(variables.len());
        for (name, value) in variables {
            check_depth(value, MAX_DEPTH, || format!("`{name}`"))?;
            context.push((name.clone(), python::from_json(value)));
        }
        let shared = Arc::clone(compiled);
        let run = move || shared.environment.get_template(TEMPLATE)?.render(Value::from_pairs(context));
        let result = on_own_thread(&compiled.name, time, run).inspect_err(|error| {
            if matches!(error, Error::TemplateLimit { limit: Limit::Time, .. }) {
                compiled.abandoned.store(true, Ordering::Relaxed);
            }
        })?;
        match result {
            Ok(text) if text.len() > MAX_OUTPUT_BYTES => Err(limit(Limit::Output)),
            Ok(text) => Ok(text),
            Err(error) => Err(self.error(&error)),
        }
    }

    fn error(&self, error: &minijinja::Error) -> Error {
        let template = self.0.name.clone();
        let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(current) = source {
            if let Some(Raised(message)) = current.downcast_ref() {
                return Error::TemplateRaised { template, message: message.clone() };
            }
            if current
                .downcast_ref()
                .is_some_and(|error: &minijinja::Error| error.kind() == ErrorKind::OutOfFuel)
            {
                return Error::TemplateLimit { template, limit: Limit::Work };
            }
            source = current.source();
        }
        Error::TemplateRender { template, message: describe(error) }
    }
}

/// Refuses values that could exhaust a stack. It can be used on any value; what is nested deeper cannot even be cloned.
pub(crate) fn check_depth(
    value: &serde_json::Value,
    limit: usize,
    what: impl Fn() -> String,
) -> Result<(), Error> {
    fn fits(value: &serde_json::Value, depth: usize) -> bool {
        match value {
            serde_json::Value::Array(items) => depth > 0 && items.iter().all(|item| fits(item, depth - 1)),
            serde_json::Value::Object(fields) => {
                depth > 0 && fields.values().all(|field| fits(field, depth - 1))
            }
            _ => true,
        }
    }
    if fits(value, limit) {
        return Ok(());
    }
    Err(Error::Input { what: what(), problem: format!("is nested more than {limit} levels deep") })
}

/// What a template passed to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn compile(source: String) -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(print);
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |state: &State, value: Value| python::to_text(state, &value));
    environment
        .add_filter(source::BOUNDED, |state: &State, value: Value| python::bounded(state, value, true));
    environment.add_filter(source::BOUNDED_ATTRIBUTE, |state: &State, value: Value| {
        python::bounded(state, value, false)
    });
    // Jinja's conversions have a default where MiniJinja's fail.
    environment.add_filter(
        "int",
        |state: &State, value: &Value, default: Option<Value>, base: Option<u32>, named: Kwargs| {
            or_default(minijinja::filters::int(state, value, default, base, named), Value::from(0))
        },
    );
    environment.add_filter("float", |state: &State, value: &Value, default: Option<Value>, named: Kwargs| {
        or_default(minijinja::filters::float(state, value, default, named), Value::from(0.0))
    });
    // Python iterates over a string but not over None, and takes anything with a length and an index for a sequence.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| value.is_undefined() || value.len().is_some());
    // Not in Transformers' environment; `pprint` takes time in the square of a value's depth.
    for filter in ["pprint", "zip", "chain"] {
        environment.remove_filter(filter);
    }
    environment.remove_global("debug");
    environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
    });
    environment.add_function("strftime_now", strftime_now);
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.0));
    environment.add_template_owned(TEMPLATE, source)?;
    Ok(environment)
}

fn or_default(result: Result<Value, minijinja::Error>, default: Value) -> Result<Value, minijinja::Error> {
    match result {
        Err(error) if error.kind() == ErrorKind::InvalidOperation => Ok(default),
        result => result,
    }
}

/// Prints the value of a `{{ … }}` as Python's `str` does.
fn print(output: &mut Output, state: &mut State, value: &Value) -> Result<(), minijinja::Error> {
    match value.kind() {
        ValueKind::String | ValueKind::Undefined => minijinja::escape_formatter(output, state, value),
        _ => output.write_str(&python::to_text(state, value)?).map_err(minijinja::Error::from),
    }
}

/// Transformers' `tojson`: Python's `json.dumps` with `ensure_ascii=False`, and nothing escaped for HTML.
fn to_json(state: &State, value: Value, args: Rest<ValueOrKwargs>) -> Result<String, minijinja::Error> {
    let args: Vec<Value> = args.0.into_iter().map(ValueOrKwargs::into_value).collect();
    type Arguments = (Option<bool>, Option<Value>, Option<Value>, Option<bool>, Kwargs);
    let (ensure_ascii, indent, separators, sort_keys, named): Arguments = from_args(&args)?;
    let ensure_ascii = ensure_ascii.map_or_else(|| named.get("ensure_ascii"), |given| Ok(Some(given)))?;
    let indent = indent.map_or_else(|| named.get("indent"), |given| Ok(Some(given)))?;
    let separators = separators.map_or_else(|| named.get("separators"), |given| Ok(Some(given)))?;
    let sort_keys = sort_keys.map_or_else(|| named.get("sort_keys"), |given| Ok(Some(given)))?;
    named.assert_all_used()?;
    let style = python::JsonStyle::new(
        ensure_ascii.unwrap_or(false),
        indent.as_ref(),
        separators.as_ref(),
        sort_keys.unwrap_or(false),
    )?;
    python::to_json(state, &value, &style)
}

/// The current local time in a `strftime` format.
fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now())
        .map_err(|error| minijinja::Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// The message of an error with its causes, without MiniJinja's name for our template.
fn describe(error: &minijinja::Error) -> String {
    let mut text = match (error.detail(), error.line()) {
        (Some(detail), Some(line)) => format!("{}: {detail} (line {line})", error.kind()),
        (Some(detail), None) => format!("{}: {detail}", error.kind()),
        (None, Some(line)) => format!("{} (line {line})", error.kind()),
        (None, None) => error.kind().to_string(),
    };
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}; {cause}");
        source = cause.source();
    }
    text
}

/// Runs template code where it can neither exhaust the caller's stack nor keep the caller for ever.
fn on_own_thread<T: Send + 'static>(
    template: &str,
    time: Duration,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let failed = |message: String| Error::TemplateRender { template: template.to_owned(), message };
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("chat template".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            // The receiver is gone only if the time limit has passed.
            let _ = sender.send(run());
        })
        .map_err(|error| failed(format!("no thread could be started for it: {error}")))?;
    receiver.recv_timeout(time).map_err(|error| match error {
        mpsc::RecvTimeoutError::Timeout => {
            Error::TemplateLimit { template: template.to_owned(), limit: Limit::Time }
        }
        mpsc::RecvTimeoutError::Disconnected => failed("the template engine panicked".to_owned()),
    })
}

#[cfg(test)]
mod tests;
