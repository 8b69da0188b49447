use serde_json::json;

use super::*;
use crate::answer::tests::split;
use crate::{AnswerEvent, AnswerParser};

/// Answers, and what mlx-lm 0.32.2's parsers make of them.
const CORPUS: &str = include_str!("corpus.json");

fn tools() -> Vec<Value> {
    let corpus: Value = serde_json::from_str(CORPUS).unwrap();
    corpus["tools"].as_array().unwrap().clone()
}

fn parser(parser: ToolParser) -> AnswerParser {
    AnswerParser::plain().with_tools(parser, &tools(), || "new".into())
}

/// Text, calls, and whether something was malformed.
fn summary(events: &[AnswerEvent]) -> (String, Vec<Value>, bool) {
    let (mut text, mut calls, mut malformed) = (String::new(), Vec::new(), false);
    for event in events {
        match event {
            AnswerEvent::Text(more) => text += more,
            AnswerEvent::ToolCallBegin { index, id, name } => {
                assert_eq!(*index, calls.len());
                calls.push(json!({"id": id, "name": name, "arguments": ""}));
            }
            AnswerEvent::ToolCallArguments { index, fragment } => {
                calls[*index]["arguments"] = serde_json::from_str(fragment).unwrap();
            }
            AnswerEvent::ToolCallEnd { index } => assert_eq!(*index, calls.len() - 1),
            AnswerEvent::Malformed => malformed = true,
            AnswerEvent::Reasoning(_) => panic!("{events:?}"),
        }
    }
    (text, calls, malformed)
}

#[test]
fn calls_are_those_of_mlx_lm() {
    let corpus: Value = serde_json::from_str(CORPUS).unwrap();
    let cases = corpus["cases"].as_array().unwrap();
    for parser in ToolParser::ALL {
        assert!(cases.iter().any(|case| case["parser"] == parser.name()), "{parser}");
    }
    for case in cases {
        let answer = case["answer"].as_str().unwrap();
        let parser = parser(case["parser"].as_str().unwrap().parse().unwrap());
        let (text, calls, malformed) = summary(&split(&parser, answer));
        let expected = case["calls"].as_array().unwrap().iter().map(|call| {
            let id = call.get("id").cloned().unwrap_or("new".into());
            json!({"id": id, "name": call["name"], "arguments": call["arguments"]})
        });
        assert_eq!(calls, expected.collect::<Vec<_>>(), "{answer}");
        assert_eq!((text.as_str(), malformed), (case["text"].as_str().unwrap(), false), "{answer}");
    }
}

#[test]
fn broken_calls_are_text() {
    use ToolParser::*;
    for (kind, answers) in [
        (
            JsonTools,
            &[
                "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": }}\n</tool_call>",
                "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
                "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>",
                "<tool_call>{\"arguments\": {}}</tool_call>",
                "<tool_call>{\"name\": \"f\", \"arguments\": {}} and more</tool_call>",
                "<tool_call>words</tool_call>",
                "<tool_call></tool_call>",
                "a\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b",
                "<tool_call>",
            ][..],
        ),
        (
            Qwen3Coder,
            &[
                "<tool_call>\n<function=f>\n<parameter=a>\nb\n</function>\n</tool_call>",
                "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</tool_call>",
                "<tool_call>\n<function=f>\n<parameter=a>\nb",
                "<tool_call><function=>\n</function></tool_call>",
            ],
        ),
        (
            MinimaxM2,
            &["<minimax:tool_call><invoke name=\"f\"><parameter name=\"a\">b</invoke></minimax:tool_call>"],
        ),
        (
            Gemma4,
            &[
                "<|tool_call>call:f{a:<|\"|>b}<tool_call|>",
                "<|tool_call>call:f{a:bare}<tool_call|>",
                "<|tool_call>call:f{a:1<tool_call|>",
                "<|tool_call>f{}<tool_call|>",
                "<|tool_call>call:f{a:<|\"|>b",
            ],
        ),
        (FunctionGemma, &["<start_function_call>call:f{a:<escape>b}<end_function_call>"]),
        (Longcat, &["<longcat_tool_call>f<longcat_arg_key>a</longcat_arg_key></longcat_tool_call>"]),
        (
            Glm47,
            &[
                "<tool_call>f<arg_key>a</arg_key><arg_value>b</tool_call>",
                "<tool_call>do something, please</tool_call>",
                // It may have been going to have another argument.
                "<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value>",
            ],
        ),
        (
            Pythonic,
            &[
                "<|tool_call_start|>[f(1)]<|tool_call_end|>",
                "<|tool_call_start|>[f(a=\"b)]<|tool_call_end|>",
                "<|tool_call_start|>f(a=1)<|tool_call_end|>",
                "<|tool_call_start|>[f(a=1), ",
            ],
        ),
        (
            KimiK2,
            &[
                "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>\
                 <|tool_calls_section_end|>",
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\"\
                 <|tool_call_end|><|tool_calls_section_end|>",
            ],
        ),
        (
            Minicpm5,
            &[
                "<function name=\"f\"><param name=\"a\">b</function>",
                "<function name=\"f\"><param name=\"a\">b</param>",
            ],
        ),
        (
            Mistral,
            &[
                "[TOOL_CALLS] [{\"name\": \"f\"",
                "[TOOL_CALLS]f[ARGS]{\"a\": 1} and more",
                "[TOOL_CALLS]",
                "[TOOL_CALLS][]",
            ],
        ),
        (MuseSpark, &["<atem:function_calls><atem:invoke name=\"f\"></atem:function_calls>"]),
        (
            KimiK3,
            &["<|open|>tools<|sep|><|open|>call index=\"1\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"],
        ),
    ] {
        for answer in answers {
            let (text, calls, malformed) = summary(&split(&parser(kind), answer));
            assert_eq!((text.as_str(), calls.len(), malformed), (*answer, 0, true), "{kind}: {answer}");
        }
    }
}

#[test]
fn a_broken_call_leaves_the_others_alone() {
    let broken = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b}}</tool_call>";
    let whole = "<tool_call>{\"name\": \"get_time\", \"arguments\": {}}</tool_call>";
    for answer in [format!("{broken}\n{whole}"), format!("{whole}\n{broken}")] {
        let (text, calls, malformed) = summary(&split(&parser(ToolParser::JsonTools), &answer));
        assert_eq!((text.as_str(), calls.len(), malformed), (broken, 1, true), "{answer}");
    }
}

#[test]
fn a_call_that_is_complete_needs_no_end_marker() {
    use ToolParser::*;
    for (kind, answer) in [
        (JsonTools, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n"),
        (Qwen3Coder, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"),
        (Gemma4, "<|tool_call>call:f{a:1}"),
        (Pythonic, "<|tool_call_start|>[f(a=1)]"),
    ] {
        let (text, calls, malformed) = summary(&split(&parser(kind), answer));
        assert_eq!((text.as_str(), calls.len(), malformed), ("", 1, false), "{answer}");
    }
}

#[test]
fn end_markers_within_values_are_text() {
    use ToolParser::*;
    for (kind, answer, value) in [
        (
            JsonTools,
            r#"<tool_call>{"name": "f", "arguments": {"a": "\"</tool_call>"}}</tool_call>"#,
            "\"</tool_call>",
        ),
        (
            Gemma4,
            "<|tool_call>call:f{a:<|\"|></tool_call|> }<tool_call|><|\"|>}<tool_call|>",
            "</tool_call|> }<tool_call|>",
        ),
        (
            Minicpm5,
            "<function name=\"f\"><param name=\"a\"><![CDATA[</function>]]></param></function>",
            "</function>",
        ),
    ] {
        let (text, calls, malformed) = summary(&split(&parser(kind), answer));
        assert_eq!((text.as_str(), malformed), ("", false), "{answer}");
        assert_eq!(calls[0]["arguments"], json!({"a": value}));
    }
}

#[test]
fn json_arguments_are_as_the_model_wrote_them() {
    let arguments = r#"{"b": 12345678901234567890123, "a": 1.0, "a": 2e0, "é": "\u00e9"}"#;
    let answer = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {arguments} }}</tool_call>");
    let events = split(&parser(ToolParser::JsonTools), &answer);
    assert_eq!(events[1], AnswerEvent::ToolCallArguments { index: 0, fragment: arguments.into() });
    // A string with JSON in it is what it holds.
    let answer = r#"[TOOL_CALLS][{"name": "f", "arguments": "{\"a\": 1}"}]"#;
    let events = split(&parser(ToolParser::Mistral), answer);
    assert_eq!(events[1], AnswerEvent::ToolCallArguments { index: 0, fragment: r#"{"a": 1}"#.into() });
}

#[test]
fn values_get_the_types_of_the_schema() {
    for (schema, text, expected) in [
        (json!({"type": "integer"}), "5", json!(5)),
        (json!({"type": "integer"}), "5.0", json!(5)),
        (json!({"type": "integer"}), "18446744073709551615", json!(u64::MAX)),
        (json!({"type": "integer"}), "5.5", json!("5.5")),
        (json!({"type": "integer"}), "five", json!("five")),
        (json!({"type": "number"}), "5", json!(5)),
        (json!({"type": "number"}), "-0.25", json!(-0.25)),
        (json!({"type": "number"}), "1e999", json!("1e999")),
        (json!({"type": "number"}), "nan", json!("nan")),
        (json!({"type": "boolean"}), "True", json!(true)),
        (json!({"type": "boolean"}), "maybe", json!("maybe")),
        (json!({"type": "object"}), "{\"a\": 1}", json!({"a": 1})),
        (json!({"type": "object"}), "{'a': (1, None)}", json!({"a": [1, null]})),
        (json!({"type": "object"}), "{\"a\": ", json!("{\"a\": ")),
        (json!({"type": "array"}), "[1]", json!([1])),
        (json!({"type": "string"}), "5", json!("5")),
        (json!({"type": "string"}), "null", json!(null)),
        (json!({"type": ["string", "null"]}), "{}", json!("{}")),
        (json!({"type": ["string", "integer"]}), "7", json!(7)),
        (json!({"anyOf": [{"type": "null"}, {"type": "array"}]}), "[true]", json!([true])),
        (json!({"enum": [1, 2]}), "2", json!(2)),
        (json!({"enum": ["1", "2"]}), "2", json!("2")),
        (json!({}), "5", json!("5")),
        (json!({}), "[5]", json!([5])),
    ] {
        assert_eq!(values::typed(text, Some(&schema)), expected, "{schema} {text}");
    }
    assert_eq!(values::typed("5", None), "5");
    let deep = format!("{}1{}", "[".repeat(200_000), "]".repeat(200_000));
    assert_eq!(values::typed(&deep, Some(&json!({"type": "array"}))), json!(deep));
}

#[test]
fn literals_are_python_s_and_json_s() {
    for (text, expected) in [
        (r"'a\'b\x41\u00e9\U0001f600\ud83d\ude00\q'", Some(json!("a'bAé😀😀\\q"))),
        ("[1, -2, 3.5, +4, 1e3,]", Some(json!([1, -2, 3.5, 4, 1000.0]))),
        ("{'a': true, \"b\": None, 3: ()}", Some(json!({"a": true, "b": null, "3": []}))),
        ("('a')", Some(json!("a"))),
        ("('a',)", Some(json!(["a"]))),
        (r"'\ud83d'", None),
        (r"'\u12'", None),
        ("'a", None),
        ("{1}", None),
        ("[1 2]", None),
        ("name", None),
        ("inf", None),
        ("", None),
    ] {
        assert_eq!(values::json_or_python(text), expected, "{text}");
    }
}

#[test]
fn the_parser_is_inferred_in_mlx_lm_s_order() {
    let infer = |template: &str, tokens: &[&str]| {
        ToolParser::infer(Some(template), |token| tokens.contains(&token)).map(ToolParser::name)
    };
    for (template, expected) in [
        ("<minimax:tool_call> <|tool_call><tool_call|>", Some("minimax_m2")),
        ("<|tool_call><tool_call|><start_function_call>", Some("gemma4")),
        ("<|tool_call>", None),
        ("<start_function_call><longcat_tool_call>", Some("function_gemma")),
        ("<longcat_tool_call><arg_key>", Some("longcat")),
        ("<tool_call>{name}<arg_key>", Some("glm47")),
        ("<|tool_list_start|>", Some("pythonic")),
        ("<|tool_call_start|><tool_call>\n<function=", Some("pythonic")),
        ("<tool_call>\\n<function=", Some("qwen3_coder")),
        ("<tool_call>\n<function=a> tool_call.name", Some("qwen3_coder")),
        ("<|tool_calls_section_begin|>[TOOL_CALLS]", Some("kimi_k2")),
        ("<function name=\"<param name=\"", Some("minicpm5")),
        ("[TOOL_CALLS]<atem:function_calls>", Some("mistral")),
        ("<atem:function_calls>", Some("muse_spark")),
        ("<tool_call>{{ tool_call.name }}", Some("json_tools")),
        ("<tool_call>", None),
    ] {
        assert_eq!(infer(template, &[]), expected, "{template}");
    }
    assert_eq!(infer("", &XTML_TOKENS), Some("kimi_k3"));
    assert_eq!(infer("", &["<|tool_call_start|>", "<|tool_call_end|>"]), Some("pythonic"));
    assert_eq!(infer("[TOOL_CALLS]", &XTML_TOKENS), Some("mistral"));
    assert_eq!(infer("", &["<|tool_call_start|>"]), None);
    for parser in ToolParser::ALL {
        assert_eq!(parser.name().parse::<ToolParser>().unwrap(), parser);
    }
    assert_eq!("laguna".parse::<ToolParser>().unwrap(), ToolParser::Glm47);
    let error = "hermes".parse::<ToolParser>().unwrap_err().to_string();
    assert!(error.contains("\"hermes\"") && error.contains("json_tools, kimi_k3"), "{error}");
}
