//! Grammars of tool calls: whatever they allow, the family's parser reads as calls that the tools' schemas allow.
#![allow(missing_docs, reason = "tests")]

mod common;

use std::sync::LazyLock;

use common::{Checkpoint, byte_level_bpe, byte_level_config, byte_level_decoder};
use proptest::prelude::*;
use russet_text::{AnswerEvent, AnswerParser, EosTokenIds, GrammarCompiler, ToolParser};
use serde_json::{Value, json};

/// All markers of the families that are special tokens in their vocabularies.
const SPECIAL: [&str; 22] = [
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<tool_call>",
    "</tool_call>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
];

/// What ends text that is written without quotes.
const ENDS: [&str; 10] = [
    "\n</parameter>",
    "</parameter>",
    "</param>",
    "</arg_value>",
    "</longcat_arg_value>",
    "<|\"|>",
    "<escape>",
    "\"",
    "9",
    "]",
];

fn tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {"name": "get_weather", "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 5},
                "unit": {"type": "string", "enum": ["celsius", "kelvin", "é"]},
                "exact": {"type": "boolean"},
            },
            "required": ["city", "unit"],
            "additionalProperties": false,
        }}}),
        json!({"type": "function", "function": {"name": "find-it", "parameters": {
            "type": "object",
            "properties": {
                "where": {"type": "object", "properties": {"x": {"type": "number", "minimum": 0, "maximum": 9},
                          "kind": {"$ref": "#/$defs/kind"}}, "required": ["x"], "additionalProperties": false},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
            },
            "required": ["tags"],
            "additionalProperties": false,
            "$defs": {"kind": {"enum": ["a", "b"]}},
        }}}),
        json!({"type": "function", "function": {"name": "ping"}}),
    ]
}

/// Vocabularies without and with the markers as tokens.
static CHECKPOINTS: LazyLock<[(Checkpoint, GrammarCompiler); 2]> = LazyLock::new(|| {
    [&[][..], &SPECIAL].map(|special| {
        let mut tokenizer = byte_level_bpe(&byte_level_decoder());
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        let first = added.iter().map(|token| token["id"].as_u64().unwrap()).max().unwrap() + 1;
        added.extend(special.iter().zip(first..).map(|(token, id)| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        }));
        let checkpoint = Checkpoint::new(&tokenizer, &byte_level_config());
        let eos = EosTokenIds::new(None, None, &checkpoint.tokenizer).unwrap();
        let compiler = GrammarCompiler::new(&checkpoint.tokenizer, &eos).unwrap();
        (checkpoint, compiler)
    })
});

/// An answer that the grammar allows, as `choices` choose; none if it did not come to an end.
fn walk(parser: ToolParser, which: usize, several: bool, choices: &[u16]) -> Option<String> {
    let (checkpoint, compiler) = &CHECKPOINTS[which];
    let tokenizer = &checkpoint.tokenizer;
    let source = parser.grammar(tokenizer, &tools(), several, None).unwrap();
    let grammar = compiler.compile(&source).unwrap_or_else(|error| panic!("{parser}: {error}: {source:?}"));
    let mut constraint = grammar.start();
    let mut detokenizer = tokenizer.detokenizer().continuing();
    let (mut text, mut free, mut planned) = (String::new(), 0, Vec::<u32>::new());
    let eos = tokenizer.eos_token_id().unwrap();
    for choice in choices {
        let choice = usize::from(*choice);
        let mask = constraint.mask().unwrap_or_else(|error| panic!("{parser}: {error} after {text:?}"));
        let allowed: Vec<u32> = (0..tokenizer.vocab_size() as u32).filter(|id| mask.allows(*id)).collect();
        // Text that may be anything comes to its end after a while.
        free = if allowed.len() > 60 { free + 1 } else { 0 };
        if planned.is_empty() && free > 4 {
            let end = ENDS[choice % ENDS.len()];
            let of = |byte: u8| (0..256).find(|id| tokenizer.token_bytes(*id).unwrap() == [byte]).unwrap();
            planned = match tokenizer.token_to_id(end) {
                Some(id) => vec![id],
                None => end.bytes().rev().map(of).collect(),
            };
        }
        let token = planned.pop().filter(|token| allowed.contains(token));
        if token.is_none() {
            planned.clear();
        }
        let token = token.unwrap_or_else(|| allowed[choice % allowed.len()]);
        constraint.commit(token).unwrap_or_else(|error| panic!("{parser}: {error} after {text:?}"));
        if token == eos {
            return Some(text + &detokenizer.finish());
        }
        text += &detokenizer.push(token);
        if constraint.is_complete() {
            return Some(text + &detokenizer.finish());
        }
    }
    None
}

fn check(parser: ToolParser, text: &str, several: bool) {
    let events = {
        let mut answer = AnswerParser::plain().with_tools(parser, &tools(), || "new".into());
        let mut events = answer.push(text);
        events.extend(answer.finish());
        events
    };
    let (mut names, mut arguments) = (Vec::new(), Vec::new());
    for event in &events {
        match event {
            AnswerEvent::ToolCallBegin { name, .. } => {
                names.push(name.as_str());
                arguments.push(String::new());
            }
            AnswerEvent::ToolCallArguments { fragment, .. } => {
                arguments.last_mut().unwrap().push_str(fragment)
            }
            AnswerEvent::ToolCallEnd { .. } => {}
            other => panic!("{parser}: {other:?} in {text:?}"),
        }
    }
    assert!(!names.is_empty() && (several || names.len() == 1), "{parser}: {text:?}");
    for (name, arguments) in names.iter().zip(&arguments) {
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        let fields = arguments.as_object().unwrap();
        let is_fine = match *name {
            "ping" => fields.is_empty(),
            "get_weather" => {
                fields.iter().all(|(name, value)| match name.as_str() {
                    "city" => value.is_string(),
                    "days" => value.as_u64().is_some_and(|days| (1..=5).contains(&days)),
                    "unit" => ["celsius", "kelvin", "é"].contains(&value.as_str().unwrap_or("")),
                    "exact" => value.is_boolean(),
                    _ => false,
                }) && fields.contains_key("city")
                    && fields.contains_key("unit")
            }
            "find-it" => {
                fields.iter().all(|(name, value)| match name.as_str() {
                    "where" => value.as_object().is_some_and(|fields| {
                        fields.get("x").and_then(Value::as_f64).is_some_and(|x| (0.0..=9.0).contains(&x))
                            && fields.get("kind").is_none_or(|kind| kind == "a" || kind == "b")
                    }),
                    "tags" => value.as_array().is_some_and(|tags| {
                        (1..=2).contains(&tags.len()) && tags.iter().all(Value::is_string)
                    }),
                    _ => false,
                }) && fields.contains_key("tags")
            }
            _ => false,
        };
        assert!(is_fine, "{parser}: {name} {arguments} in {text:?}");
    }
}

#[test]
fn what_is_allowed_are_calls() {
    let mut numbers = 1u32;
    for parser in ToolParser::ALL {
        for which in 0..2 {
            let mut ended = 0;
            for round in 0..24 {
                let choices: Vec<u16> = (0..900)
                    .map(|_| {
                        numbers = numbers.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        (numbers >> 16) as u16
                    })
                    .collect();
                let several = round % 2 == 0;
                if let Some(text) = walk(parser, which, several, &choices) {
                    ended += 1;
                    check(parser, &text, several);
                }
            }
            assert!(ended > 8, "{parser}, vocabulary {which}: {ended} of 24 answers ended");
        }
    }
}

#[test]
fn what_can_t_be_written_is_refused() {
    let tokenizer = &CHECKPOINTS[0].0.tokenizer;
    let tool = |name: &str, properties: Value| {
        vec![
            json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}),
        ]
    };
    for parser in ToolParser::ALL {
        let refused = |tools: &[Value], part: &str| {
            let error = parser.grammar(tokenizer, tools, true, None).unwrap_err().to_string();
            assert!(error.contains(part), "{parser}: {error}");
        };
        refused(&[], "no tool");
        refused(&tool("a b", json!({})), "a b");
        refused(&tool("", json!({})), "name");
        refused(&[json!({"function": {"name": "f", "parameters": 3}})], "parameters of f");
        // Where names are JSON strings, any will do.
        let odd = tool("f", json!({"a>b\"": {"type": "string"}}));
        let is_json = [ToolParser::JsonTools, ToolParser::Mistral, ToolParser::KimiK2, ToolParser::KimiK3]
            .contains(&parser);
        assert_eq!(parser.grammar(tokenizer, &odd, true, None).is_ok(), is_json, "{parser}");
    }
    let deep = (0..40).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}));
    let error =
        ToolParser::Gemma4.grammar(tokenizer, &tool("f", json!({"a": deep})), false, None).unwrap_err();
    assert!(error.to_string().contains("16 levels"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn any_walk_that_ends_is_calls(
        parser in 0..ToolParser::ALL.len(),
        which in 0..2usize,
        several: bool,
        choices in prop::collection::vec(any::<u16>(), 600),
    ) {
        let parser = ToolParser::ALL[parser];
        if let Some(text) = walk(parser, which, several, &choices) {
            check(parser, &text, several);
        }
    }
}
