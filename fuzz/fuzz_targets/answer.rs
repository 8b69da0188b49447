//! Answers: the first byte chooses the tool parser, the second whether the prompt opened reasoning and how long the
//! pieces are that the text arrives in. The rest is the text, in which `~` also ends a piece.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use russet_text::{AnswerEvent, AnswerParser, ThinkingMarkers, ToolParser};
use serde_json::{Map, Value, json};

static TOOLS: LazyLock<[Value; 1]> = LazyLock::new(|| {
    let types = ["string", "integer", "number", "boolean", "object", "array"];
    let properties: Map<String, Value> =
        types.iter().map(|kind| (kind[..1].to_owned(), json!({"type": kind}))).collect();
    [json!({"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}})]
});

static MARKERS: LazyLock<ThinkingMarkers> = LazyLock::new(|| ThinkingMarkers {
    start: "<think>".into(),
    end: "</think>".into(),
    start_tokens: vec![1],
    end_tokens: vec![2],
});

/// The events of an answer, neighbours joined.
fn read<'a>(mut parser: AnswerParser, pieces: impl Iterator<Item = &'a str>) -> Vec<AnswerEvent> {
    let mut all: Vec<AnswerEvent> = pieces.flat_map(|piece| parser.push(piece)).collect();
    all.extend(parser.finish());
    let mut joined: Vec<AnswerEvent> = Vec::new();
    for event in all {
        match (joined.last_mut(), &event) {
            (Some(AnswerEvent::Text(before)), AnswerEvent::Text(more))
            | (Some(AnswerEvent::Reasoning(before)), AnswerEvent::Reasoning(more)) => before.push_str(more),
            _ => joined.push(event),
        }
    }
    joined
}

fuzz_target!(|input: &[u8]| {
    let [choice, how, text @ ..] = input else { return };
    let text = String::from_utf8_lossy(text);
    let kind = ToolParser::ALL[usize::from(*choice) % ToolParser::ALL.len()];
    let prompt = if how % 2 == 0 { "" } else { "<think>\n" };
    let parser =
        AnswerParser::plain().with_thinking(&MARKERS, prompt).with_tools(kind, &*TOOLS, || "id".into());
    let whole = read(parser.clone(), std::iter::once(&*text));
    let length = usize::from(how / 2) % 8 + 1;
    let mut ends: Vec<usize> = text.char_indices().map(|(at, _)| at).step_by(length).collect();
    ends.extend(text.match_indices('~').map(|(at, _)| at));
    ends.push(text.len());
    ends.sort_unstable();
    let begins = std::iter::once(0).chain(ends.iter().copied());
    let pieces = begins.zip(&ends).map(|(begin, end)| &text[begin..*end]);
    assert_eq!(read(parser, pieces), whole);
    for event in &whole {
        if let AnswerEvent::ToolCallArguments { fragment, .. } = event {
            serde_json::from_str::<Map<String, Value>>(fragment).expect("arguments are an object");
        }
    }
});
