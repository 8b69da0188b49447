//! Structured output: which tokens may come next so that a whole answer follows a grammar (llguidance).

use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::template::check_depth;
use crate::tokenizer::guarded;
use crate::{EosTokenIds, Error, Tokenizer};

/// The longest grammar that is compiled, in bytes.
const MAX_SOURCE_BYTES: usize = 1 << 20;

/// How deeply a schema may be nested; serde_json reads no deeper than 127 levels.
const MAX_SCHEMA_DEPTH: usize = 128;

/// Compiling goes as deep as a schema does, and takes some kilobytes a level. Only what is used of a stack takes memory.
const STACK_BYTES: usize = 64 << 20;

/// The tries of llguidance take no longer tokens.
const MAX_TOKEN_BYTES: usize = 1000;

/// What may stand between two parts of JSON text: nothing, a space, or a line break with an indentation. A model that
/// is not sure what to say could go on with spaces for ever.
const JSON_WHITESPACE: &str = r"\x20|\r?\n[\x20\t]{0,32}";

/// How a date begins: in a year from 1 on, and on 29 February only in a leap year.
const CALENDAR_DATE: &str = concat!(
    r"^(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-(?:(?:0[13-9]|1[0-2])-|02-(?:[01]|2[0-8]))",
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)",
);

/// What an answer has to be.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarSource {
    /// A JSON object.
    JsonObject,
    /// JSON text that is valid under this schema (draft 2020-12). Properties come in the order of the schema.
    JsonSchema(Value),
    /// A text that this regular expression matches from its beginning to its end (the syntax of Rust's regex crate).
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of this grammar, in llguidance's variant of Lark's syntax.
    Lark(String),
}

/// Compiles grammars for a tokenizer. It holds some tens of bytes for each token of the vocabulary several times.
///
/// Cloning is cheap.
#[derive(Clone)]
pub struct GrammarCompiler {
    factory: Arc<ParserFactory>,
    eos: Arc<[u32]>,
}

/// A compiled grammar for the answers of one tokenizer.
///
/// Cloning is cheap.
#[derive(Clone)]
pub struct Grammar {
    matcher: Arc<Matcher>,
    eos: Arc<[u32]>,
    /// The tokens behind which it begins.
    after: Option<Arc<[u32]>>,
}

/// Where an answer is in its grammar.
pub struct Constraint {
    matcher: Matcher,
    eos: Arc<[u32]>,
    prelude: Option<Prelude>,
}

/// The free text before the grammar.
struct Prelude {
    /// What ends it.
    end: Arc<[u32]>,
    /// As many tokens at most, the last ones.
    recent: Vec<u32>,
}

/// The tokens that may come next.
#[derive(Debug, Clone)]
pub struct TokenMask(SimpleVob);

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").field("after", &self.after).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constraint").field("complete", &self.is_complete()).finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// Prepares the vocabulary. That takes a while, for large ones about a second.
    ///
    /// # Errors
    /// When the bytes of a token depend on its neighbours, as with some rare decoders.
    pub fn new(tokenizer: &Tokenizer, eos: &EosTokenIds) -> Result<Self, Error> {
        if !tokenizer.has_fixed_token_bytes() {
            let message = "the model's tokenizer has a decoder that joins tokens in a way of its own";
            return Err(Error::Grammar(message.into()));
        }
        let special = tokenizer.special_tokens();
        let count = tokenizer.vocab_size() as u32;
        let eos: Arc<[u32]> = eos.all.iter().copied().filter(|&id| id < count).collect();
        let words: Vec<Vec<u8>> = (0..count)
            .map(|id| {
                let mut bytes = tokenizer.token_bytes(id).unwrap_or_default();
                if special.contains_key(&id) || eos.contains(&id) {
                    // Not for what it prints: only a grammar that names the token allows it.
                    bytes.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
                } else if bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) {
                    // No text has this byte.
                    bytes.clear();
                }
                if bytes.len() > MAX_TOKEN_BYTES { Vec::new() } else { bytes }
            })
            .collect();
        let factory = guarded(|| {
            let first = eos.first().copied().unwrap_or(INVALID_TOKEN);
            let mut trie = TokTrie::from(&TokRxInfo::new(count, first), &words);
            if !eos.is_empty() {
                trie = trie.with_eos_tokens(&eos);
            }
            let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = SlicedBiasComputer::json_slices();
            let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
                .map_err(|error| error.to_string())?;
            factory.set_stderr_log_level(0);
            factory.set_buffer_log_level(0);
            factory.limits_mut().verbose_errors = false;
            Ok(factory)
        });
        Ok(Self { factory: Arc::new(factory.map_err(Error::Grammar)?), eos })
    }

    /// Compiles a grammar. It may take some hundred milliseconds and is for a thread that may be busy for so long.
    ///
    /// # Errors
    /// Why it can't be used: its syntax, something in it that can't be enforced, no text that could satisfy it, its size.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, Error> {
        let grammar = top_level(source)?;
        let compile = || self.factory.create_parser(grammar).map_err(|error| reason(&format!("{error:#}")));
        let parser = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("russet-grammar".into()).stack_size(STACK_BYTES);
            let thread = thread.spawn_scoped(scope, compile);
            let thread = thread.map_err(|error| format!("no thread can be started: {error}"))?;
            thread.join().unwrap_or_else(|_| Err("compiling it panicked".into()))
        });
        let parser = parser.map_err(Error::Grammar)?;
        Ok(Grammar { matcher: Arc::new(Matcher::new(Ok(parser))), eos: self.eos.clone(), after: None })
    }
}

/// Checks sizes and writes a source down as llguidance takes it.
fn top_level(source: &GrammarSource) -> Result<TopLevelGrammar, Error> {
    let refused = |message: &str| Err(Error::Grammar(message.into()));
    let bytes = match source {
        GrammarSource::JsonObject => 0,
        GrammarSource::JsonSchema(schema) => {
            check_depth(schema, MAX_SCHEMA_DEPTH, || "the schema".into())?;
            schema.to_string().len()
        }
        GrammarSource::Regex(text) | GrammarSource::Lark(text) => text.len(),
        GrammarSource::Choice(texts) => texts.iter().map(String::len).sum(),
    };
    if bytes > MAX_SOURCE_BYTES {
        return Err(Error::Grammar(format!("its {bytes} bytes are more than {MAX_SOURCE_BYTES}")));
    }
    Ok(match source {
        GrammarSource::JsonObject => json_schema(&json!({"type": "object"})),
        GrammarSource::JsonSchema(schema @ (Value::Object(_) | Value::Bool(_))) => json_schema(schema),
        GrammarSource::JsonSchema(_) => return refused("a schema must be an object, true or false"),
        GrammarSource::Regex(regex) if regex.is_empty() => return refused("the regular expression is empty"),
        GrammarSource::Regex(regex) => TopLevelGrammar::from_regex(regex),
        GrammarSource::Choice(texts) if texts.is_empty() => {
            return refused("there is nothing to choose from");
        }
        GrammarSource::Choice(texts) => {
            // One terminal for all: looking up many costs much more.
            let some = texts.iter().filter(|text| !text.is_empty()).map(|text| json!(text).to_string());
            let some: Vec<String> = some.collect();
            TopLevelGrammar::from_lark(match (some.len(), texts.len()) {
                (0, _) => "start: \"\"".to_owned(),
                (n, all) if n < all => format!("start: TEXT?\nTEXT: {}", some.join(" | ")),
                _ => format!("start: TEXT\nTEXT: {}", some.join(" | ")),
            })
        }
        GrammarSource::Lark(text) if text.trim().is_empty() => return refused("the grammar is empty"),
        GrammarSource::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
    })
}

fn json_schema(schema: &Value) -> TopLevelGrammar {
    TopLevelGrammar::from_json_schema(json_options(schema))
}

/// A schema with options of ours, whatever it says itself: nothing of it is ignored.
pub(crate) fn json_options(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Object(schema) => schema.clone(),
        other => [("allOf".to_owned(), json!([other]))].into_iter().collect(),
    };
    schema.insert("x-guidance".to_owned(), json!({"whitespace_pattern": JSON_WHITESPACE}));
    let mut schema = Value::Object(schema);
    tighten(&mut schema);
    schema
}

/// Says what llguidance takes more loosely than a schema means it, so that it can't.
fn tighten(schema: &mut Value) {
    let Value::Object(keywords) = schema else { return };
    for (keyword, value) in keywords.iter_mut() {
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                schemas.values_mut().for_each(tighten);
            }
            ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(schemas)) => {
                schemas.iter_mut().for_each(tighten);
            }
            ("items" | "additionalItems" | "additionalProperties", schema) => tighten(schema),
            _ => {}
        }
    }
    // For it each year, and a year 0 too, has a 29th of February.
    if matches!(keywords.get("format").and_then(Value::as_str), Some("date" | "date-time"))
        && let Value::Array(all) = keywords.entry("allOf").or_insert(json!([]))
    {
        all.push(json!({"pattern": CALENDAR_DATE}));
    }
    // It allows a whole number that is excluded if the other bound is less than 1 away.
    for (excluded, inclusive, other) in
        [("exclusiveMinimum", "minimum", "aximum"), ("exclusiveMaximum", "maximum", "inimum")]
    {
        let bound = |name: &str| keywords.get(name).and_then(Value::as_f64);
        let others = [format!("m{other}"), format!("exclusiveM{other}")];
        if let Some(whole) = bound(excluded).filter(|bound| bound.fract() == 0.0)
            && let Some(near) = others.iter().filter_map(|name| bound(name)).find(|b| b.trunc() == whole)
        {
            // A millionth of the way to it.
            let inside = whole + (near - whole) * 1e-6;
            let inside = match bound(inclusive) {
                Some(own) if (own - whole) * (near - whole) > 0.0 => own,
                _ => inside,
            };
            keywords.insert(inclusive.into(), json!(inside));
        }
    }
}

/// What llguidance said, without what follows for its developers.
fn reason(message: &str) -> String {
    let message = message.split("\n<").next().unwrap_or(message).trim();
    match message.char_indices().nth(1000) {
        Some((end, _)) => format!("{}…", &message[..end]),
        None => message.to_owned(),
    }
}

impl Grammar {
    /// This grammar for an answer that begins with any other text, such as reasoning, up to the tokens `end`.
    pub fn after(self, end: &[u32]) -> Self {
        Self { after: (!end.is_empty()).then(|| end.into()), ..self }
    }

    /// The beginning of an answer.
    pub fn start(&self) -> Constraint {
        Constraint {
            // Nothing is shared: no answer depends on what others have made llguidance look up.
            matcher: self.matcher.deep_clone(),
            eos: self.eos.clone(),
            prelude: self.after.clone().map(|end| Prelude { end, recent: Vec::new() }),
        }
    }
}

impl Constraint {
    /// The tokens that may come next; at least one. Those that end an answer are among them only where it may end.
    ///
    /// # Errors
    /// When the grammar is too complex at this point, or no token goes on. The answer can't be finished then.
    pub fn mask(&mut self) -> Result<TokenMask, Error> {
        if self.prelude.is_some() {
            let mut mask = self.matcher.tok_env().map_err(failed)?.tok_trie().alloc_token_set();
            mask.set_all(true);
            self.eos.iter().for_each(|&token| mask.disallow_token(token));
            return Ok(TokenMask(mask));
        }
        let mut mask = self.matcher.compute_mask_or_eos().map_err(failed)?;
        if !self.matcher.is_accepting().map_err(failed)? {
            self.eos.iter().for_each(|&token| mask.disallow_token(token));
        }
        if mask.is_zero() {
            return Err(Error::Constraint("no token of the vocabulary goes on".into()));
        }
        Ok(TokenMask(mask))
    }

    /// Goes on with a token of the last mask.
    ///
    /// # Errors
    /// When the grammar does not allow it, or is too complex at this point.
    pub fn commit(&mut self, token: u32) -> Result<(), Error> {
        if let Some(prelude) = &mut self.prelude {
            if prelude.recent.len() == prelude.end.len() {
                prelude.recent.remove(0);
            }
            prelude.recent.push(token);
            if *prelude.recent == *prelude.end {
                self.prelude = None;
            }
            return Ok(());
        }
        if self.is_complete() && self.eos.contains(&token) {
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(failed)
    }

    /// Whether the answer may end here.
    pub fn may_end(&mut self) -> bool {
        self.prelude.is_none() && self.matcher.is_accepting().unwrap_or(false)
    }

    /// Whether the answer ends here: nothing may follow.
    pub fn is_complete(&self) -> bool {
        self.prelude.is_none() && self.matcher.is_stopped() && self.matcher.stop_reason().is_ok()
    }
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::Constraint(reason(&error.to_string()))
}

impl TokenMask {
    /// Whether a token may come next.
    pub fn allows(&self, token: u32) -> bool {
        (token as usize) < self.0.len() && self.0.is_allowed(token)
    }

    /// How many tokens may come next.
    pub fn count(&self) -> usize {
        self.0.num_set()
    }

    /// 1 for each of the first `count` tokens that may come next, 0 for the others.
    pub fn to_bytes(&self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let tokens = bytes.len().min(self.0.len());
        for (bytes, word) in bytes[..tokens].chunks_mut(32).zip(self.0.as_slice()) {
            for (bit, byte) in bytes.iter_mut().enumerate() {
                *byte = (word >> bit & 1) as u8;
            }
        }
        bytes
    }
}
