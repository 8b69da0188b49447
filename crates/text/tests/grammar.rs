//! Grammars: what the masks allow is what the grammar says, over tokens that begin and end within characters.
#![allow(missing_docs, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::sync::LazyLock;

use common::{Checkpoint, all};
use proptest::prelude::*;
use russet_text::{Constraint, EosTokenIds, Error, Grammar, GrammarCompiler, GrammarSource, Tokenizer};
use serde_json::{Value, json};

struct Case {
    name: &'static str,
    checkpoint: Checkpoint,
    eos: EosTokenIds,
    compiler: GrammarCompiler,
}

/// Tokenizers with fixed bytes. The first has two tokens that end an answer, and one beyond its vocabulary.
static CASES: LazyLock<Vec<Case>> = LazyLock::new(|| {
    let fixed = all().into_iter().filter(|(name, _)| ["bpe", "spm", "spm_no_strip"].contains(name));
    let case = |(name, checkpoint): (&'static str, Checkpoint)| {
        let more = (name == "bpe").then(|| {
            let start = checkpoint.tokenizer.token_to_id("<|start|>").unwrap();
            json!([start, 1_000_000])
        });
        let eos = EosTokenIds::new(more.as_ref(), None, &checkpoint.tokenizer).unwrap();
        let compiler = GrammarCompiler::new(&checkpoint.tokenizer, &eos).unwrap();
        Case { name, checkpoint, eos, compiler }
    };
    fixed.map(case).collect()
});

impl Case {
    fn tokenizer(&self) -> &Tokenizer {
        &self.checkpoint.tokenizer
    }

    fn compile(&self, source: GrammarSource) -> Grammar {
        self.compiler.compile(&source).unwrap_or_else(|error| panic!("{}: {error}: {source:?}", self.name))
    }

    fn error(&self, source: GrammarSource) -> String {
        match self.compiler.compile(&source) {
            Ok(_) => panic!("taken: {source:?}"),
            Err(error) => error.to_string(),
        }
    }

    fn ids(&self) -> std::ops::Range<u32> {
        0..self.tokenizer().vocab_size() as u32
    }

    /// The tokens that end an answer and exist.
    fn ends(&self) -> BTreeSet<u32> {
        self.eos.all.iter().copied().filter(|id| self.ids().contains(id)).collect()
    }

    /// Whether the mask allows all tokens of a text that is split there, one after the other.
    fn takes(&self, grammar: &Grammar, pieces: &[&[u8]]) -> bool {
        let mut constraint = grammar.start();
        for piece in pieces {
            let plain = |id: &u32| !self.eos.all.contains(id) && self.tokenizer().id_to_token(*id).is_some();
            let mut tokens = self.ids().filter(plain);
            let token = tokens.find(|id| self.tokenizer().token_bytes(*id).unwrap() == *piece).unwrap();
            if !constraint.mask().is_ok_and(|mask| mask.allows(token)) {
                return false;
            }
            constraint.commit(token).unwrap();
        }
        constraint.may_end()
    }

    /// Whether a text may be an answer, byte by byte.
    fn matches(&self, grammar: &Grammar, text: &str) -> bool {
        self.takes(grammar, &text.as_bytes().chunks(1).collect::<Vec<_>>())
    }

    /// Follows masks, as `choices` choose among the tokens of each, until the answer ends or they do; whether it ended.
    fn walk(&self, grammar: &Grammar, choices: &[u16]) -> (String, bool) {
        let mut constraint = grammar.start();
        let mut detokenizer = self.tokenizer().detokenizer().continuing();
        let mut text = String::new();
        for choice in choices {
            let mask = constraint.mask().unwrap();
            let allowed: Vec<u32> = self.ids().filter(|id| mask.allows(*id)).collect();
            assert_eq!(allowed.len(), mask.count());
            let ends = self.ends();
            assert!(allowed.iter().all(|id| !ends.contains(id)) || constraint.may_end());
            let token = allowed[usize::from(*choice) % allowed.len()];
            constraint.commit(token).unwrap();
            if ends.contains(&token) {
                assert!(constraint.is_complete());
                return (text + &detokenizer.finish(), true);
            }
            text += &detokenizer.push(token);
            if constraint.is_complete() {
                assert_only_ends(&mut constraint, self);
                return (text + &detokenizer.finish(), true);
            }
        }
        (text, false)
    }
}

fn assert_only_ends(constraint: &mut Constraint, case: &Case) {
    let mask = constraint.mask().unwrap();
    assert_eq!(case.ids().filter(|id| mask.allows(*id)).collect::<BTreeSet<_>>(), case.ends());
}

fn regex(text: &str) -> GrammarSource {
    GrammarSource::Regex(text.into())
}

fn choice(texts: &[&str]) -> GrammarSource {
    GrammarSource::Choice(texts.iter().map(|text| (*text).to_owned()).collect())
}

fn lark(text: &str) -> GrammarSource {
    GrammarSource::Lark(text.into())
}

#[test]
fn each_kind_of_source_means_what_it_says() {
    for case in CASES.iter() {
        for (source, good, bad) in [
            (GrammarSource::JsonObject, r#"{"a": [1, "b", {}]}"#, r#"["a"]"#),
            (GrammarSource::JsonSchema(json!({"type": "integer", "minimum": 3})), "17", "2"),
            (GrammarSource::JsonSchema(json!(true)), "null", "nul"),
            (GrammarSource::JsonSchema(json!({"const": "a\"b"})), r#""a\"b""#, "a\"b"),
            (regex("[ab]+c/\\d"), "abac/7", "abc"),
            (regex("a\nb"), "a\nb", "a b"),
            (choice(&["yes", "no", "\"no\"\\\n"]), "\"no\"\\\n", "nope"),
            (choice(&["", "a"]), "", "b"),
            (choice(&[""]), "", "a"),
            (lark("start: \"a\" b*\nb: /[0-9]/ | \"(\" b \")\""), "a1((2))", "a1((2)"),
        ] {
            let grammar = case.compile(source.clone());
            assert!(case.matches(&grammar, good), "{}: {source:?} {good}", case.name);
            assert!(!case.matches(&grammar, bad), "{}: {source:?} {bad}", case.name);
        }
    }
}

#[test]
fn dates_are_those_of_the_calendar() {
    let case = &CASES[0];
    let dates =
        case.compile(GrammarSource::JsonSchema(json!({"format": "date", "type": ["string", "null"]})));
    let nested = json!({"properties": {"a": {"items": {"$ref": "#/$defs/d"}}}, "$defs": {"d": {"format": "date-time"}}});
    let nested = case.compile(GrammarSource::JsonSchema(nested));
    for (date, valid) in [
        ("2024-02-29", true),
        ("2000-02-29", true),
        ("2023-02-28", true),
        ("0001-12-31", true),
        ("2023-02-29", false),
        ("1900-02-29", false),
        ("2024-02-30", false),
        ("0000-01-01", false),
        ("2024-04-31", false),
    ] {
        assert_eq!(case.matches(&dates, &format!("\"{date}\"")), valid, "{date}");
        assert_eq!(case.matches(&nested, &format!(r#"{{"a": ["{date}T10:00:00Z"]}}"#)), valid, "{date}");
    }
    assert!(case.matches(&dates, "null"));
}

#[test]
fn an_excluded_number_is_excluded() {
    let case = &CASES[0];
    for (schema, good, bad) in [
        (json!({"exclusiveMinimum": 0, "maximum": 0.25}), "0.1", &["0", "0.0", "0.3", "-0"][..]),
        (json!({"exclusiveMinimum": 1000.0, "maximum": 1000.25}), "1000.25", &["1000", "1000.0", "999"]),
        (json!({"minimum": -0.5, "exclusiveMaximum": 0}), "-0.5", &["0", "-0", "-0.0"]),
        (json!({"exclusiveMinimum": -7.5, "exclusiveMaximum": -7}), "-7.25", &["-7", "-7.0", "-7.5"]),
        (json!({"exclusiveMinimum": 0, "minimum": 0.1, "maximum": 0.5}), "0.1", &["0", "0.05"]),
        (json!({"exclusiveMinimum": 3, "maximum": 5}), "3.5", &["3", "3.0"]),
    ] {
        let mut schema = schema;
        schema["type"] = json!("number");
        let grammar = case.compile(GrammarSource::JsonSchema(schema.clone()));
        assert!(case.matches(&grammar, good), "{schema} {good}");
        bad.iter().for_each(|text| assert!(!case.matches(&grammar, text), "{schema} {text}"));
    }
}

#[test]
fn characters_are_allowed_in_every_split_that_the_vocabulary_has() {
    let case = &CASES[0];
    let grammar = case.compile(choice(&["aé\n€😀", "the"]));
    for pieces in [
        &[b"a".as_slice(), b"\xc3\xa9", b"\n", b"\xe2\x82\xac", b"\xf0\x9f\x98", b"\x80"][..],
        &[b"a\xc3", b"\xa9", b"\n\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x98", b"\x80"],
        &[b"a", b"\xc3", b"\xa9", b"\n", b"\xe2\x82", b"\xac", b"\xf0", b"\x9f", b"\x98", b"\x80"],
        &[b"t", b"he"],
    ] {
        assert!(case.takes(&grammar, pieces), "{pieces:?}");
    }
    assert!(
        !case.takes(&grammar, &[b"a", b"\xc3", b"\xa9", b"\n", b"\xe2\x82"]),
        "half a character is no end"
    );
    assert!(!case.takes(&grammar, &[b"a", b"\xc3", b"\xac"]));
}

#[test]
fn an_answer_ends_where_the_grammar_does_with_any_token_that_ends_one() {
    for case in CASES.iter() {
        let mut constraint = case.compile(regex("ab*")).start();
        let [a, b] = ["a", "b"].map(|letter| case.tokenizer().token_to_id(letter).unwrap());
        assert!(!constraint.may_end());
        constraint.commit(a).unwrap();
        let mask = constraint.mask().unwrap();
        assert!(constraint.may_end() && !constraint.is_complete() && mask.allows(b));
        assert!(case.ends().iter().all(|id| mask.allows(*id)), "{}", case.name);
        assert!(!mask.allows(u32::MAX) && !mask.allows(case.ids().end));
        let bytes = mask.to_bytes(case.tokenizer().vocab_size() + 7);
        let expected = (0..bytes.len() as u32).map(|id| u8::from(mask.allows(id)));
        assert_eq!(bytes, expected.collect::<Vec<_>>());
        for end in case.ends() {
            let mut ended = case.compile(regex("ab*")).start();
            ended.commit(a).unwrap();
            ended.commit(end).unwrap();
            assert!(ended.is_complete());
            assert_only_ends(&mut ended, case);
        }
        // What the grammar does not allow is refused, and nothing goes on from there.
        let wrong = case.tokenizer().token_to_id("z").unwrap();
        assert!(matches!(constraint.commit(wrong), Err(Error::Constraint(_))));
        assert!(constraint.mask().is_err() && !constraint.is_complete() && !constraint.may_end());
    }
}

#[test]
fn special_tokens_are_no_text() {
    let case = &CASES[1];
    let id = |token: &str| case.tokenizer().token_to_id(token).unwrap();
    let mut constraint = case.compile(regex("(?s:.*)")).start();
    let mask = constraint.mask().unwrap();
    assert!(!mask.allows(id("<|channel>")) && mask.allows(id("日")));
    // Unless the grammar names them.
    let mut constraint = case.compile(lark("start: <|channel> \"a\"")).start();
    assert_eq!(constraint.mask().unwrap().count(), 1);
    constraint.commit(id("<|channel>")).unwrap();
    constraint.commit(id("a")).unwrap();
    assert!(constraint.is_complete());
    // One that ends answers does not end this one before its time.
    let mut constraint = case.compile(lark("start: \"a\" </s> \"b\"")).start();
    constraint.commit(id("a")).unwrap();
    assert!(matches!(constraint.mask(), Err(Error::Constraint(_))));
}

#[test]
fn text_before_the_grammar_is_free_but_for_the_end() {
    let case = &CASES[0];
    let id = |token: &str| case.tokenizer().token_to_id(token).unwrap();
    let (marker, a) = ([id("</think>"), id("t"), id("t")], id("a"));
    let grammar = case.compile(choice(&["a"])).after(&marker);
    for before in [&[][..], &[a, a], &[id("</think>"), id("t")], &[id("</think>")]] {
        let mut constraint = grammar.start();
        for &token in before.iter().chain(&marker) {
            let mask = constraint.mask().unwrap();
            assert!(mask.allows(token) && case.ends().iter().all(|end| !mask.allows(*end)));
            assert!(!constraint.may_end());
            constraint.commit(token).unwrap();
        }
        assert_eq!(constraint.mask().unwrap().count(), 1);
        constraint.commit(a).unwrap();
        assert!(constraint.is_complete());
    }
}

#[test]
fn what_can_t_be_enforced_is_refused_with_a_reason() {
    let case = &CASES[0];
    let schema = GrammarSource::JsonSchema;
    for (source, expected) in [
        (schema(json!({"type": "strin"})), "strin"),
        (schema(json!({"type": "string", "not": {"const": "a"}})), "not"),
        (schema(json!({"type": "integer", "minimum": 4, "maximum": 3})), "minimum"),
        (schema(json!(false)), "false"),
        (schema(json!(3)), "a schema must be an object"),
        (schema(json!({"$ref": "#/$defs/none"})), "none"),
        (schema(json!({"$ref": "https://example.com/schema"})), "example.com"),
        (schema(json!({"type": "string", "pattern": "("})), "("),
        (schema(json!({"type": "string", "format": "unheard"})), "unheard"),
        // What would loosen it is not the schema's to say.
        (schema(json!({"type": "string", "format": "unheard", "x-guidance": {"lenient": true}})), "unheard"),
        (schema(json!({"title": "x".repeat(2 << 20)})), "bytes"),
        (regex("(a"), "(a"),
        (regex(""), "empty"),
        (choice(&[]), "nothing to choose from"),
        (lark("start: a"), "a"),
        (lark("begin: \"a\""), "start"),
        (lark("start: \"a"), "start"),
        (lark("  "), "empty"),
        (lark("start: <|unheard|>"), "unheard"),
    ] {
        let error = case.error(source.clone());
        assert!(error.contains(expected), "{source:?}: {error}");
        assert!(!error.contains("backtrace") && error.len() < 4000, "{error}");
    }
    // Tokens whose text depends on their neighbours.
    for (name, checkpoint) in all().into_iter().filter(|(name, _)| name.contains("piece")) {
        let compiler = GrammarCompiler::new(&checkpoint.tokenizer, &EosTokenIds::default());
        assert!(compiler.is_err_and(|error| error.to_string().contains("decoder")), "{name}");
    }
}

#[test]
fn hostile_grammars_are_refused_or_compiled_in_bounded_time() {
    let case = &CASES[0];
    let nested =
        |depth: usize, leaf: Value, wrap: &dyn Fn(Value) -> Value| (0..depth).fold(leaf, |v, _| wrap(v));
    let items = |value| json!({"type": "array", "items": value});
    let all_of = |value: Value| json!({"allOf": [value, {"type": "object"}]});
    let recursive = json!({
        "$ref": "#/$defs/a",
        "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}},
    });
    let wide: serde_json::Map<String, Value> = (0..3000)
        .map(|i| (format!("p{i}"), json!({"type": "string", "pattern": "^(a|b)*c{3,40}$"})))
        .collect();
    let sources = [
        GrammarSource::JsonSchema(nested(60, json!({"type": "null"}), &items)),
        GrammarSource::JsonSchema(nested(60, json!({"type": "null"}), &all_of)),
        GrammarSource::JsonSchema(recursive),
        GrammarSource::JsonSchema(json!({"type": "object", "properties": wide})),
        GrammarSource::JsonSchema(json!({"type": "array", "minItems": 1_000_000_000})),
        GrammarSource::JsonSchema(json!({"type": "string", "minLength": 100_000_000})),
        regex("(((a{1000}){1000}){1000}){1000}"),
        regex(&"(".repeat(100_000)),
        regex("(a|aa)*(b|[^c])*.{500}(x|y){900}z"),
        lark(&format!("start: {}\"a\"{}", "(".repeat(100_000), ")".repeat(100_000))),
        lark("start: start start | \"a\" |"),
        lark(&format!("start: {}", "\"a\"{0,1000} ".repeat(200))),
        lark("start: %json {\"type\": \"array\", \"items\": {\"$ref\": \"#\"}}"),
    ];
    for source in sources {
        let begun = std::time::Instant::now();
        let described: String = format!("{source:?}").chars().take(80).collect();
        if let Ok(grammar) = case.compiler.compile(&source) {
            let mut constraint = grammar.start();
            // Some answers of it, until it is too complex.
            for choice in 0..50 {
                let Ok(mask) = constraint.mask() else { break };
                let allowed: Vec<u32> = case.ids().filter(|id| mask.allows(*id)).collect();
                if constraint.commit(allowed[choice * 7 % allowed.len()]).is_err() || constraint.is_complete()
                {
                    break;
                }
            }
        }
        let took = begun.elapsed();
        assert!(took.as_secs() < 20, "{described}: {took:?}");
    }
}

#[test]
fn answers_share_nothing() {
    let case = &CASES[0];
    let grammar = case.compile(GrammarSource::JsonObject);
    let choices: Vec<u16> = (0..60).map(|i| i * 37).collect();
    let alone = case.walk(&grammar, &choices);
    let mut other = grammar.start();
    assert!(other.commit(case.tokenizer().token_to_id("z").unwrap()).is_err());
    assert_eq!(case.walk(&grammar, &choices), alone);
}

fn schema() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!({"type": "null"})),
        Just(json!({"type": "boolean"})),
        (-50..50i32, 0..40i32)
            .prop_map(|(low, more)| json!({"type": "integer", "minimum": low, "maximum": low + more})),
        (0..3usize, 0..4usize)
            .prop_map(|(low, more)| json!({"type": "string", "minLength": low, "maxLength": low + more})),
        prop::collection::vec("[a-c\"é€😀]{0,3}", 1..4).prop_map(|texts| json!({"enum": texts})),
        "[a-c\"é\\\\]{0,4}".prop_map(|text| json!({"const": text})),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        let object = prop::collection::btree_map("[a-cé]{1,2}", (inner.clone(), any::<bool>()), 0..4);
        prop_oneof![
            prop::collection::vec(inner.clone(), 1..3).prop_map(|options| json!({"anyOf": options})),
            (inner, 0..3usize, 0..2usize).prop_map(|(item, low, more)| {
                json!({"type": "array", "items": item, "minItems": low, "maxItems": low + more})
            }),
            object.prop_map(|fields| {
                let required: Vec<_> =
                    fields.iter().filter(|(_, (_, r))| *r).map(|(name, _)| name.clone()).collect();
                let properties: serde_json::Map<_, _> =
                    fields.into_iter().map(|(name, (schema, _))| (name, schema)).collect();
                json!({
                    "type": "object", "properties": properties, "required": required,
                    "additionalProperties": false,
                })
            }),
        ]
    })
}

/// Whether a value is what a schema of `schema` says.
fn valid(schema: &Value, value: &Value) -> bool {
    if let Some(options) = schema.get("anyOf").and_then(Value::as_array) {
        return options.iter().any(|option| valid(option, value));
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return values.contains(value);
    }
    if let Some(expected) = schema.get("const") {
        return value == expected;
    }
    let within = |number: i64, low: &str, high: &str| {
        number >= schema[low].as_i64().unwrap() && number <= schema[high].as_i64().unwrap()
    };
    match schema["type"].as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        // -0 is an integer too.
        "integer" => value
            .as_f64()
            .is_some_and(|number| number.fract() == 0.0 && within(number as i64, "minimum", "maximum")),
        "string" => {
            value.as_str().is_some_and(|text| within(text.chars().count() as i64, "minLength", "maxLength"))
        }
        "array" => value.as_array().is_some_and(|items| {
            within(items.len() as i64, "minItems", "maxItems")
                && items.iter().all(|item| valid(&schema["items"], item))
        }),
        _ => value.as_object().is_some_and(|fields| {
            let known = &schema["properties"];
            fields.iter().all(|(name, value)| known.get(name).is_some_and(|schema| valid(schema, value)))
                && schema["required"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .all(|name| fields.contains_key(name.as_str().unwrap()))
        }),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_walk_that_ends_is_valid(
        schema in schema(),
        which in 0..3usize,
        choices in prop::collection::vec(any::<u16>(), 300),
    ) {
        let case = &CASES[which];
        let grammar = case.compile(GrammarSource::JsonSchema(schema.clone()));
        let (text, ended) = case.walk(&grammar, &choices);
        if ended {
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
            prop_assert!(valid(&schema, &value), "{}: {} {}", case.name, schema, text);
        }
    }

    #[test]
    fn any_choice_can_be_made_and_nothing_else(
        texts in prop::collection::btree_set("[abté€😀 \n]{1,6}", 1..6),
        which in 0..3usize,
        choices in prop::collection::vec(any::<u16>(), 40),
    ) {
        let case = &CASES[which];
        let texts: Vec<String> = texts.into_iter().collect();
        let grammar = case.compile(GrammarSource::Choice(texts.clone()));
        let (text, ended) = case.walk(&grammar, &choices);
        prop_assert!(ended && texts.contains(&text), "{}: {text:?} of {texts:?}", case.name);
        for text in &texts {
            prop_assert!(case.matches(&grammar, text), "{}: {text:?}", case.name);
        }
    }
}
