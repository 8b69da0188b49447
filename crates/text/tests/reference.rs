//! Comparison with Transformers and mlx-lm on the same files.
#![allow(missing_docs, reason = "tests")]

mod common;

use common::{Checkpoint, all, byte_level_bpe, byte_level_decoder};
use russet_testing::Oracle;
use russet_text::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};

/// Runs jobs on tokenizers; a result for each job.
fn ask(oracle: &Oracle, tokenizers: &[(&str, &Checkpoint)], jobs: &[Value]) -> Vec<Value> {
    let folders: Map<String, Value> = tokenizers
        .iter()
        .map(|(name, checkpoint)| ((*name).to_owned(), checkpoint.folder.path().to_str().unwrap().into()))
        .collect();
    let request = json!({"tokenizers": folders, "jobs": jobs});
    let script = include_str!("../../../oracle/text.py");
    serde_json::from_str(&oracle.run_script(script, &[], &request.to_string())).unwrap()
}

#[test]
fn tokenizers_agree_on_special_tokens_and_vocabulary() {
    let Some(oracle) = Oracle::get() else { return };
    let checkpoints = all();
    let named: Vec<_> = checkpoints.iter().map(|(name, checkpoint)| (*name, checkpoint)).collect();
    let jobs: Vec<_> = named.iter().map(|(name, _)| json!({"job": "describe", "tokenizer": name})).collect();
    for ((name, checkpoint), expected) in named.iter().zip(ask(oracle, &named, &jobs)) {
        let tokenizer = &checkpoint.tokenizer;
        let special: Map<String, Value> = expected["special_tokens"]
            .as_object()
            .unwrap()
            .keys()
            .map(|key| (key.clone(), tokenizer.special_token(key).into()))
            .collect();
        let markers = tokenizer.thinking_markers();
        let found = json!({
            "vocab_size": tokenizer.vocab_size(),
            "bos_token": tokenizer.bos_token(),
            "bos_token_id": tokenizer.bos_token_id(),
            "eos_token": tokenizer.eos_token(),
            "eos_token_id": tokenizer.eos_token_id(),
            "special_tokens": special,
            "has_thinking": tokenizer.has_thinking(),
            "think_start_tokens": markers.map(|markers| &markers.start_tokens),
            "think_end_tokens": markers.map(|markers| &markers.end_tokens),
            "detokenizer": expected["detokenizer"],
        });
        assert_eq!(found, expected, "{name}");
        let kind = match *name {
            "bpe" => "BPEStreamingDetokenizer",
            "spm" | "spm_no_strip" => "SPMStreamingDetokenizer",
            _ => "NaiveStreamingDetokenizer",
        };
        assert_eq!(expected["detokenizer"], kind, "{name}: the test no longer covers what it says");
    }
}

#[test]
fn encoding_and_decoding_agree() {
    let Some(oracle) = Oracle::get() else { return };
    let checkpoints = all();
    let named: Vec<_> = checkpoints.iter().map(|(name, checkpoint)| (*name, checkpoint)).collect();
    let texts = [
        "",
        "the cat",
        " the  the",
        "<s>already begun",
        "café € 日本\n\n😀",
        "a ,b .",
        "<|end|>x<think>y</think>",
        "</s>",
        "do n't the cat 's !",
        "<extra><image>z",
        "the\u{fffd}",
    ];
    let mut jobs = Vec::new();
    let mut found = Vec::new();
    for (name, checkpoint) in &named {
        let tokenizer = &checkpoint.tokenizer;
        for text in texts {
            for special in [true, false] {
                jobs.push(json!({"job": "encode", "tokenizer": name, "text": text, "special": special}));
                let tokens = tokenizer.encode(text, special).unwrap();
                found.push(json!(tokens));
                for skip in [true, false] {
                    jobs.push(json!({"job": "decode", "tokenizer": name, "tokens": tokens, "skip": skip}));
                    found.push(json!(tokenizer.decode(&tokens, skip).unwrap()));
                }
            }
            jobs.push(json!({"job": "encode_prompt", "tokenizer": name, "text": text}));
            found.push(json!(tokenizer.encode_prompt(text).unwrap()));
        }
    }
    for ((job, found), expected) in jobs.iter().zip(found).zip(ask(oracle, &named, &jobs)) {
        assert_eq!(found, expected, "{job}");
    }
}

/// The segments after each token, and the last one.
fn stream(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<String> {
    let mut detokenizer = tokenizer.detokenizer();
    let mut segments: Vec<_> = tokens.iter().map(|token| detokenizer.push(*token)).collect();
    segments.push(detokenizer.finish());
    segments
}

#[test]
fn streamed_segments_are_those_of_mlx_lm() {
    let Some(oracle) = Oracle::get() else { return };
    let checkpoints = all();
    let named: Vec<_> = checkpoints.iter().map(|(name, checkpoint)| (*name, checkpoint)).collect();
    let texts = [
        "the cat",
        "  the\n\n  the",
        "café € 日本 😀 a\n",
        "\u{1f600}\u{1f600}",
        "a ,b",
        "\u{fffd}x\u{fffd}",
        "\0a",
    ];
    let mut jobs = Vec::new();
    let mut state = 1u64;
    // Streams leave out Transformers' cleaning up, which takes spaces back: the documented difference.
    for (name, checkpoint) in named.iter().filter(|(name, _)| !name.starts_with("cleaned")) {
        let tokenizer = &checkpoint.tokenizer;
        let mut sequences: Vec<Vec<u32>> =
            texts.iter().map(|text| tokenizer.encode(text, true).unwrap()).collect();
        // Random tokens: mostly broken UTF-8.
        for length in (0..60).map(|round| round % 15) {
            let mut tokens = Vec::new();
            for _ in 0..length {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                tokens.push(u32::try_from((state >> 33) % tokenizer.vocab_size() as u64).unwrap());
            }
            sequences.push(tokens);
        }
        jobs.extend(
            sequences.iter().map(|tokens| json!({"job": "stream", "tokenizer": name, "tokens": tokens})),
        );
    }
    let mut raised = 0;
    let mut rewritten = 0;
    for (job, expected) in jobs.iter().zip(ask(oracle, &named, &jobs)) {
        let name = job["tokenizer"].as_str().unwrap();
        let tokens: Vec<u32> = serde_json::from_value(job["tokens"].clone()).unwrap();
        let tokenizer = &named.iter().find(|(other, _)| *other == name).unwrap().1.tokenizer;
        let found = stream(tokenizer, &tokens);
        if let Some(error) = expected.get("error") {
            // The documented failure: BPE's finalize() with characters outside its alphabet held back.
            assert!(name == "bpe" && error.as_str().unwrap().starts_with("KeyError"), "{job}: {error}");
            raised += 1;
        } else if name.starts_with("naive") && rewrites(tokenizer, &tokens) {
            rewritten += 1;
        } else {
            assert_eq!(json!(found), expected, "{job}");
        }
    }
    // The exceptions stay exceptions.
    assert!(raised < 10, "mlx-lm raised {raised} times");
    assert!(rewritten < jobs.len() / 8, "{rewritten} of {} sequences were not compared", jobs.len());
}

/// The decoder takes text back while the tokens of a line arrive, or mlx-lm closes a line after removing something
/// behind its newline: the documented differences.
fn rewrites(tokenizer: &Tokenizer, tokens: &[u32]) -> bool {
    let mut shown = String::new();
    let mut line = Vec::new();
    for token in tokens {
        line.push(*token);
        let decoded = tokenizer.decode(&line, false).unwrap();
        let stable = decoded.trim_end_matches('\u{fffd}');
        if !stable.starts_with(&shown) || (stable.ends_with('\n') && stable != decoded) {
            return true;
        }
        shown = stable.to_owned();
        if shown.ends_with('\n') {
            line.clear();
            shown.clear();
        }
    }
    false
}

/// The chats that every template is rendered with.
fn chats() -> Vec<Value> {
    let weather = json!({"type": "function", "function": {
        "name": "get_weather", "description": "The weather <now> & later, in °C",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "City's name"},
            "days": {"type": "integer", "default": 3, "minimum": 1.0},
            "units": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
            "any": {"type": ["string", "null"]},
        }, "required": ["city"]},
        "return": {"type": "object"},
    }});
    let time = json!({"type": "function", "function": {
        "name": "now", "description": "Time", "parameters": {"type": "object", "properties": {}},
    }});
    let call = |id: &str, arguments: Value| {
        json!({"role": "assistant", "content": null, "tool_calls": [
            {"type": "function", "id": id, "function": {"name": "get_weather", "arguments": arguments}},
        ]})
    };
    let user = |content: &str| json!({"role": "user", "content": content});
    let assistant = |content: &str| json!({"role": "assistant", "content": content});
    let system = json!({"role": "system", "content": "Be brief.\n"});
    let arguments =
        json!({"city": "Zürich", "days": 2, "frac": 1.0, "big": 1e20, "nested": {"a": [true, null]}});
    let tool =
        json!({"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "21 °C\n"});
    let thinking = json!({"role": "assistant", "content": "4", "reasoning_content": "\nTwo and two.\n"});
    let tools = json!([weather, time]);
    let chat = |messages: Value, tools: &Value, prompt: bool, variables: Value| json!({"messages": messages, "tools": tools, "add_generation_prompt": prompt, "variables": variables});
    let none = Value::Null;
    vec![
        chat(json!([user("Hi  there ")]), &none, true, json!({})),
        chat(
            json!([system, user("Hi"), assistant("\n\nHello.\n"), user("And now?\n\n")]),
            &none,
            true,
            json!({}),
        ),
        chat(json!([user("2+2?"), thinking, user("3+3?")]), &none, true, json!({"enable_thinking": false})),
        chat(json!([user("2+2?"), thinking]), &none, false, json!({"enable_thinking": true})),
        chat(json!([user("2+2?"), assistant("<think>\nhm\n</think>\n\n4")]), &none, false, json!({})),
        chat(
            json!([user("2+2?"), {"role": "assistant", "content": "4", "reasoning": "hm"}, user("x")]),
            &none,
            true,
            json!({}),
        ),
        chat(json!([system, user("Weather?")]), &tools, true, json!({})),
        chat(
            json!([user("Weather?"), call("abcdefghi", arguments.clone()), tool, assistant("21.")]),
            &tools,
            false,
            json!({}),
        ),
        chat(
            json!([system, user("W?"), call("abcdefghi", arguments), tool, tool, user("Thanks")]),
            &tools,
            true,
            json!({}),
        ),
        chat(json!([user("W?"), call("short", json!({}))]), &tools, true, json!({})),
        chat(
            json!([user("W?"), call("abcdefghi", json!("{\"city\": \"Bern\"}")), tool]),
            &tools,
            true,
            json!({}),
        ),
        chat(json!([user("a"), user("b")]), &none, true, json!({})),
        chat(
            json!([{"role": "user", "content": [{"type": "text", "text": " Look "}, {"type": "image"}]}]),
            &none,
            true,
            json!({}),
        ),
        chat(json!([{"role": "critic", "content": "!"}]), &none, true, json!({})),
        chat(
            json!([user("Unicode: 日本 😀 é \u{7f}\u{1} \"quoted\" 'q' <b>&amp;</b>")]),
            &json!([]),
            true,
            json!({}),
        ),
        chat(
            json!([user("x")]),
            &tools,
            true,
            json!({"assistant_name": "Ada", "tools_in_user_message": false, "date_string": "1 Jan", "reasoning_effort": "low"}),
        ),
        chat(json!([user("x")]), &none, true, json!({"bos_token": "<B>", "model_identity": null})),
        chat(json!([{"role": "user"}]), &none, true, json!({})),
    ]
}

/// The texts from their first difference on.
fn difference(found: &str, expected: &str) -> String {
    let same = found.chars().zip(expected.chars()).take_while(|(a, b)| a == b).count();
    let excerpt = |text: &str| text.chars().skip(same.saturating_sub(30)).take(100).collect::<String>();
    format!("{:?} instead of {:?}", excerpt(found), excerpt(expected))
}

/// Templates of our own, in the style of the families in use.
const TEMPLATES: [(&str, &str); 11] = [
    ("arguments", include_str!("templates/arguments.jinja")),
    ("brackets", include_str!("templates/brackets.jinja")),
    ("channels", include_str!("templates/channels.jinja")),
    ("chatml", include_str!("templates/chatml.jinja")),
    ("headers", include_str!("templates/headers.jinja")),
    ("python_semantics", include_str!("templates/python_semantics.jinja")),
    ("reasoning", include_str!("templates/reasoning.jinja")),
    ("signatures", include_str!("templates/signatures.jinja")),
    ("smollm", include_str!("templates/smollm.jinja")),
    ("turns", include_str!("templates/turns.jinja")),
    ("xml_tools", include_str!("templates/xml_tools.jinja")),
];

#[test]
fn chats_are_rendered_as_by_transformers() {
    let Some(oracle) = Oracle::get() else { return };
    let tokenizer = byte_level_bpe(&byte_level_decoder());
    let config = json!({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|start|>", "eos_token": "<|end|>"});
    let checkpoints: Vec<_> = TEMPLATES
        .iter()
        .map(|(name, source)| (*name, Checkpoint::with_template(&tokenizer, &config, Some(source))))
        .collect();
    let named: Vec<_> = checkpoints.iter().map(|(name, checkpoint)| (*name, checkpoint)).collect();
    let mut jobs = Vec::new();
    for (name, _) in &named {
        for mut chat in chats() {
            chat["job"] = "render".into();
            chat["tokenizer"] = (*name).into();
            jobs.push(chat);
        }
    }
    let mut failures = Vec::new();
    let mut refused = 0;
    for (job, expected) in jobs.iter().zip(ask(oracle, &named, &jobs)) {
        let name = job["tokenizer"].as_str().unwrap();
        let tokenizer = &named.iter().find(|(other, _)| *other == name).unwrap().1.tokenizer;
        let found = tokenizer.apply_chat_template(
            job["messages"].as_array().unwrap(),
            job["tools"].as_array().map(Vec::as_slice),
            job["add_generation_prompt"].as_bool().unwrap(),
            job["variables"].as_object().unwrap(),
        );
        match (&found, expected.as_str()) {
            (Ok(found), Some(expected)) if found == expected => {}
            // Both refuse; how Python words it is its own affair, but what the template says must come through.
            (Err(error), None) => {
                let why = expected["error"].as_str().unwrap();
                if let Some(message) = why.strip_prefix("TemplateError: ") {
                    assert!(error.to_string().ends_with(message), "{error} instead of {why}");
                }
                refused += 1;
            }
            (Ok(found), Some(expected)) => {
                failures.push(format!("{name}, {}: {}", job["messages"], difference(found, expected)))
            }
            _ => failures.push(format!("{name}, {}: {found:?} instead of {expected}", job["messages"])),
        }
    }
    assert!(failures.is_empty(), "{} of {} differ:\n{}", failures.len(), jobs.len(), failures.join("\n\n"));
    assert!(
        refused < jobs.len() / 3,
        "too few chats were rendered: {refused} of {} were refused",
        jobs.len()
    );
}

/// Expressions that only Python refuses.
const FORGIVEN: [&str; 5] = ["zz | int", "none | list", "1 in 'a'", "none < 1", "','.join([1])"];

#[test]
fn expressions_have_the_values_they_have_in_python() {
    let Some(oracle) = Oracle::get() else { return };
    let checkpoint = Checkpoint::new(
        &byte_level_bpe(&byte_level_decoder()),
        &json!({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|start|>"}),
    );
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [1]}]);
    let expressions: Vec<&str> = include_str!("expressions.txt").lines().collect();
    let jobs: Vec<_> = expressions
        .iter()
        .map(|expression| json!({"job": "evaluate", "tokenizer": "t", "expression": expression, "messages": messages}))
        .collect();
    let variables = json!({"messages": messages, "tools": null, "documents": null, "bos_token": "<|start|>"});
    let mut failures = Vec::new();
    for (expression, expected) in expressions.iter().zip(ask(oracle, &[("t", &checkpoint)], &jobs)) {
        let found = ChatTemplate::new("expression", &format!("{{{{ {expression} }}}}"))
            .and_then(|template| template.render(variables.as_object().unwrap()));
        match (&found, expected.as_str()) {
            (Ok(found), Some(expected)) if found == expected => {}
            (Err(_), None) => {}
            // MiniJinja forgives what Python does not.
            (Ok(_), None) if FORGIVEN.contains(expression) => {}
            _ => failures.push(format!("{expression}: {found:?} instead of {expected}")),
        }
    }
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), expressions.len(), failures.join("\n"));
}
