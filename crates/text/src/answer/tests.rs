use proptest::prelude::*;
use serde_json::json;

use super::*;

/// The events of a text read in pieces, neighbours joined.
pub(crate) fn read(mut parser: AnswerParser, pieces: &[&str]) -> Vec<AnswerEvent> {
    let mut all: Vec<AnswerEvent> = Vec::new();
    for piece in pieces {
        all.extend(parser.push(piece));
    }
    all.extend(parser.finish());
    assert!(parser.finish().is_empty());
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

/// The events of a text, the same however it is split in two, and character by character.
pub(crate) fn split(parser: &AnswerParser, text: &str) -> Vec<AnswerEvent> {
    let whole = read(parser.clone(), &[text]);
    for (at, _) in text.char_indices() {
        assert_eq!(read(parser.clone(), &[&text[..at], &text[at..]]), whole, "{text:?} split at {at}");
    }
    let characters: Vec<String> = text.chars().map(String::from).collect();
    let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
    assert_eq!(read(parser.clone(), &characters), whole, "{text:?} character by character");
    whole
}

fn text(text: &str) -> AnswerEvent {
    AnswerEvent::Text(text.into())
}

fn reasoning(text: &str) -> AnswerEvent {
    AnswerEvent::Reasoning(text.into())
}

fn markers(start: &str, end: &str) -> ThinkingMarkers {
    ThinkingMarkers { start: start.into(), end: end.into(), start_tokens: vec![], end_tokens: vec![] }
}

fn thinking(prompt: &str) -> AnswerParser {
    AnswerParser::plain().with_thinking(&markers("<think>", "</think>"), prompt)
}

fn both(prompt: &str) -> AnswerParser {
    thinking(prompt).with_tools(ToolParser::JsonTools, &[], || "id".into())
}

fn call(index: usize, name: &str, arguments: &str) -> [AnswerEvent; 3] {
    [
        AnswerEvent::ToolCallBegin { index, id: "id".into(), name: name.into() },
        AnswerEvent::ToolCallArguments { index, fragment: arguments.into() },
        AnswerEvent::ToolCallEnd { index },
    ]
}

#[test]
fn reasoning_is_split_off_whoever_opens_it() {
    let closed = "<|im_start|>assistant\n";
    let open = "<|im_start|>assistant\n<think>\n";
    for (prompt, answer, expected) in [
        (closed, "<think>\nWhy?\n</think>\n\nSo.\n", vec![reasoning("Why?"), text("So.")]),
        (closed, "\n<think>a\n b</think>", vec![reasoning("a\n b")]),
        (closed, "<think>\n\n</think>\n\nSo.", vec![text("So.")]),
        (closed, " So.\n", vec![text(" So.\n")]),
        (open, "Why?\n</think>\n\nSo.", vec![reasoning("Why?"), text("So.")]),
        (open, "<think>\nWhy?</think>So.", vec![reasoning("Why?"), text("So.")]),
        (open, "Why? \n", vec![reasoning("Why?")]),
        (open, "Why?</thin", vec![reasoning("Why?</thin")]),
        (open, "", vec![]),
        // Once there is text, the marker is something to write about.
        (closed, "Use <think> first.", vec![text("Use <think> first.")]),
        (open, "a</think>b <think> </think>", vec![reasoning("a"), text("b <think> </think>")]),
        (open, "a</think> <think>b</think> c", vec![reasoning("ab"), text("c")]),
        (closed, "<thin", vec![text("<thin")]),
    ] {
        let events = split(&thinking(prompt), answer);
        // White space at the end is kept where no marker follows.
        let trimmed: Vec<AnswerEvent> = events
            .into_iter()
            .map(|event| match event {
                AnswerEvent::Text(text) if answer.contains("</think>") => {
                    AnswerEvent::Text(text.trim_end().into())
                }
                event => event,
            })
            .collect();
        assert_eq!(trimmed, expected, "{answer:?} after {prompt:?}");
    }
    assert_eq!(split(&thinking(""), "<think>a</think> b \n"), [reasoning("a"), text("b \n")]);
}

#[test]
fn markup_of_tools_in_reasoning_is_reasoning() {
    let markup = r#"<tool_call>{"name": "f"}</tool_call>"#;
    let answer = format!("<think>I could {markup}\n</think>\n\n{markup}\n");
    let mut expected = vec![reasoning(&format!("I could {markup}"))];
    expected.extend(call(0, "f", "{}"));
    assert_eq!(split(&both(""), &answer), expected);
}

#[test]
fn white_space_around_calls_is_kept_between_texts_alone() {
    let one = r#"<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>"#;
    let calls = |index| call(index, "f", r#"{"a": 1}"#).to_vec();
    for (answer, expected) in [
        (format!("\n{one}\n"), calls(0)),
        (format!("Now. \n{one}\n"), [vec![text("Now.")], calls(0)].concat()),
        (format!("{one}\n{one} "), [calls(0), calls(1)].concat()),
        (format!("A\n\n{one}\nB\n"), [vec![text("A")], calls(0), vec![text("\n\n\nB\n")]].concat()),
        (format!("{one}\n B"), [calls(0), vec![text("B")]].concat()),
        (" \n".into(), vec![text(" \n")]),
    ] {
        assert_eq!(split(&both(""), &answer), expected, "{answer:?}");
    }
}

#[test]
fn only_what_may_be_a_marker_is_held_back() {
    let mut parser = both("");
    assert_eq!(parser.push("a < b"), [text("a < b")]);
    assert_eq!(parser.push(" <tool"), []);
    assert_eq!(parser.push("s> <tool_call"), [text(" <tools>")]);
    assert_eq!(parser.push(">{\"name\": \"f\"}"), []);
    assert_eq!(parser.push("</tool_call>").len(), 3);
    assert_eq!(parser.finish(), []);
    let mut plain = AnswerParser::plain();
    assert_eq!(plain.push(" <think>\n"), [text(" <think>\n")]);
    assert_eq!(plain.finish(), []);
}

#[test]
fn markers_of_other_models() {
    let gemma =
        AnswerParser::plain().with_thinking(&markers("<|channel>thought", "<channel|>"), "<|turn>model\n");
    let answer = "<|channel>thought\nWhy?\n<channel|>So.";
    assert_eq!(split(&gemma, answer), [reasoning("Why?"), text("So.")]);
    let xtml = AnswerParser::plain()
        .with_thinking(&markers("<|open|>think<|sep|>", "<|close|>think<|sep|>"), "<|open|>think<|sep|>")
        .with_tools(ToolParser::KimiK3, &[], || "id".into());
    let answer = "Why?<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|><|open|>tools<|sep|>\
                  <|open|>call tool=\"f\" index=\"1\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>\
                  <|close|>message<|sep|>";
    let expected = [vec![reasoning("Why?"), text("So.")], call(0, "f", "{}").to_vec()].concat();
    assert_eq!(split(&xtml, answer), expected);
}

#[test]
fn time_is_linear() {
    // Each of these would take minutes if a marker, a quote or a call made the text be read again from there.
    let begin = std::time::Instant::now();
    for piece in
        ["<tool_call>", "<tool_call>\\\"</tool_call>", "<tool_call>{\"", "</tool_call>\"", " \n", "<"]
    {
        let answer = piece.repeat(200_000);
        read(both(""), &[&answer, "\"</tool_call>"]);
        let pieces: Vec<&str> = (0..200_000).map(|_| piece).collect();
        read(both("<think>"), &pieces);
        read(both(""), &pieces);
    }
    let nested = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {}", "{\"a\":[".repeat(300_000));
    assert!(read(both(""), &[&nested]).contains(&AnswerEvent::Malformed));
    assert!(begin.elapsed() < std::time::Duration::from_secs(20), "{:?}", begin.elapsed());
}

/// Pieces of every markup, and what breaks them.
const FRAGMENTS: [&str; 40] = [
    "<tool_call>",
    "</tool_call>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<escape>",
    "call:f",
    "{",
    "}",
    "\"",
    "\\",
    "[",
    "]",
    "(",
    ")",
    ",",
    ":",
    "=",
    "1",
    "a",
    "é",
    " ",
    "\n",
    "<think>",
    "</think>",
    "<function=f>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "<function name=\"f\">",
    "<param name=\"a\">",
    "</param>",
    "<![CDATA[",
    "]]>",
    "[TOOL_CALLS]",
    "f[ARGS]{}",
    "{\"name\": \"f\", \"arguments\": {}}",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
];

proptest! {
    #[test]
    fn any_text_gives_the_same_however_it_is_split(
        pieces in prop::collection::vec((prop::sample::select(&FRAGMENTS[..]), 0..4_usize), 0..16),
        parser in prop::sample::select(&ToolParser::ALL[..]),
        opened in prop::bool::ANY,
    ) {
        let tools = [json!({"type": "function", "function": {"name": "f", "parameters": {
            "properties": {"a": {"type": "integer"}}}}})];
        let prompt = if opened { "<think>" } else { "" };
        let both = thinking(prompt).with_tools(parser, &tools, || "id".into());
        let mut answer = parser.start().to_owned();
        for (piece, cut) in &pieces {
            let end = piece.char_indices().map(|(at, _)| at).nth(piece.chars().count().saturating_sub(*cut));
            answer += &piece[..end.unwrap_or(piece.len())];
        }
        let events = split(&both, &answer);
        for event in &events {
            if let AnswerEvent::ToolCallArguments { fragment, .. } = event {
                prop_assert!(serde_json::from_str::<serde_json::Map<String, Value>>(fragment).is_ok(), "{fragment}");
            }
        }
    }
}
