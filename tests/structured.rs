//! Structured output of the real server on the starter model.

mod common;

use common::http::Server;
use common::{Copy, starter};
use russet_testing::client_script;
use serde_json::{Value, json};

#[test]
fn every_complete_answer_of_a_random_schema_is_valid() {
    let Some(mut script) = client_script("structured_outputs.py") else { return };
    let server = Server::start(&["--decode-concurrency", "8"]);
    let output = script.args([&server.url(), "500"]).output().unwrap();
    let print = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", print(&output.stdout), print(&output.stderr));
    let health = server.get("/health").json();
    assert_eq!((&health["status"], &health["last_error"]), (&json!("ok"), &Value::Null));
}

#[test]
fn each_field_constrains_the_answer() {
    let server = Server::start(&[]);
    let text = |extra: Value| {
        let mut body = json!({"prompt": "The answer is", "max_tokens": 60, "temperature": 1, "seed": 3});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let answer = server.post("/v1/completions", &body.to_string()).json();
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let schema = json!({
        "type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"],
        "additionalProperties": false,
    });
    let one_digit = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
        assert!(value.as_object().unwrap().len() == 1 && value["a"].as_u64().unwrap() < 10, "{text}");
    };
    let json_schema =
        json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": true}});
    one_digit(&text(json!({"response_format": json_schema})));
    one_digit(&text(json!({"structured_outputs": {"json": schema}})));
    one_digit(&text(json!({"guided_json": schema.to_string()})));
    let regex = text(json!({"structured_outputs": {"regex": "[0-9]{4}"}}));
    assert!(regex.len() == 4 && regex.bytes().all(|byte| byte.is_ascii_digit()), "{regex}");
    let chosen = text(json!({"guided_choice": [" yes", " no"]}));
    assert!([" yes", " no"].contains(&chosen.as_str()), "{chosen:?}");
    let grammar = text(json!({"guided_grammar": "start: \"(\" (start | /[a-z]/) \")\""}));
    assert!(grammar.starts_with('(') && grammar.ends_with(')'), "{grammar}");
}

#[test]
fn answers_with_a_grammar_are_like_others() {
    let server = Server::start(&[]);
    let body = |extra: Value| {
        let mut body = json!({
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
                "type": "object", "properties": {"capital": {"enum": ["Paris", "London", "Café 😀"]}},
                "required": ["capital"], "additionalProperties": false,
            }}},
            "max_tokens": 40, "temperature": 1, "seed": 1,
        });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body.to_string()
    };
    let valid = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
        ["Paris", "London", "Café 😀"].contains(&value["capital"].as_str().unwrap())
    };
    let answer = server
        .post("/v1/chat/completions", &body(json!({"n": 5, "logprobs": true, "top_logprobs": 5})))
        .json();
    for choice in answer["choices"].as_array().unwrap() {
        let text = choice["message"]["content"].as_str().unwrap();
        assert!(valid(text) && choice["finish_reason"] == "stop", "{choice}");
        let entries = choice["logprobs"]["content"].as_array().unwrap();
        let bytes = |entry: &Value| {
            entry["bytes"].as_array().unwrap().iter().map(|b| b.as_u64().unwrap() as u8).collect()
        };
        let all: Vec<u8> = entries.iter().flat_map(|entry| -> Vec<u8> { bytes(entry) }).collect();
        assert_eq!(all, text.as_bytes(), "the tokens are the text");
        let possible = |entry: &Value| entry["logprob"].as_f64().is_some_and(f64::is_finite);
        assert!(
            entries.iter().all(|e| e["top_logprobs"].as_array().unwrap().iter().all(possible)),
            "{choice}"
        );
    }
    let whole = server.post("/v1/chat/completions", &body(json!({}))).json();
    let streamed = server.post("/v1/chat/completions", &body(json!({"stream": true}))).body;
    let events =
        streamed.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    let text: String = events
        .filter_map(|event| Some(event["choices"][0]["delta"]["content"].as_str()?.to_owned()))
        .collect();
    assert_eq!(whole["choices"][0]["message"]["content"], text.as_str());
    let cut = server.post("/v1/chat/completions", &body(json!({"max_tokens": 2}))).json();
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    let stopped = server.post("/v1/chat/completions", &body(json!({"stop": "capital"}))).json();
    let text = stopped["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text.starts_with('{') && text.ends_with('"') && text.len() < 40, "{text:?}");
}

#[test]
fn a_model_that_knows_no_tools_calls_them_where_that_is_demanded() {
    let copy = Copy::of(starter());
    copy.set_template(
        "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}. Call them with <tool_call> and tool_call.name.\
         <|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
         {% endfor %}<|im_start|>assistant\n",
    );
    let server = Server::of(&copy.arg(), &[]);
    let parameters = json!({
        "type": "object", "required": ["city", "days"], "additionalProperties": false,
        "properties": {"city": {"enum": ["Paris", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    });
    let tools = json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": parameters}},
        {"type": "function", "function": {"name": "get_time"}},
    ]);
    let ask = |choice: Value, seed: u64| {
        let body = json!({
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}], "tools": tools,
            "tool_choice": choice, "parallel_tool_calls": false, "temperature": 1, "seed": seed, "max_tokens": 100,
        });
        let answer = server.post("/v1/chat/completions", &body.to_string()).json();
        let choice = &answer["choices"][0];
        assert_eq!(
            (&choice["finish_reason"], &choice["message"]["content"]),
            (&json!("tool_calls"), &Value::Null)
        );
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1, "{choice}");
        let function = calls[0]["function"].clone();
        let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        (function["name"].as_str().unwrap().to_owned(), arguments)
    };
    for seed in 0..5 {
        let named = json!({"type": "function", "function": {"name": "get_weather"}});
        let (name, arguments) = ask(named, seed);
        assert_eq!((name.as_str(), arguments.as_object().unwrap().len()), ("get_weather", 2), "{arguments}");
        assert!(["Paris", "Zürich"].contains(&arguments["city"].as_str().unwrap()), "{arguments}");
        assert!((1..=7).contains(&arguments["days"].as_i64().unwrap()), "{arguments}");
        let (name, _) = ask(json!("required"), seed);
        assert!(["get_weather", "get_time"].contains(&name.as_str()), "{name}");
    }
}

#[test]
fn what_can_t_be_enforced_is_refused() {
    let server = Server::start(&[]);
    let refused = |extra: Value, param: &str, reason: &str| {
        let mut body = json!({"prompt": "a", "max_tokens": 1});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let reply = server.post("/v1/completions", &body.to_string());
        let message = reply.fails(400);
        assert!(message.starts_with(&format!("{param}: ")) && message.contains(reason), "{message}");
        assert_eq!(reply.json()["error"]["param"], param);
    };
    let format = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}});
    let path = "response_format.json_schema.schema";
    refused(format(json!({"type": "strin"})), path, "strin");
    refused(format(json!({"not": {"type": "string"}})), path, "not");
    refused(format(json!({"type": "integer", "minimum": 2, "maximum": 1})), path, "minimum");
    refused(format(json!("x")), path, "must be an object");
    refused(json!({"guided_regex": "(a"}), "guided_regex", "(a");
    refused(
        json!({"structured_outputs": {"grammar": "start: nothing"}}),
        "structured_outputs.grammar",
        "nothing",
    );
    refused(json!({"guided_choice": []}), "guided_choice", "nothing to choose from");
    refused(
        json!({"guided_regex": "a", "structured_outputs": {"regex": "b"}}),
        "guided_regex",
        "can't be used together with structured_outputs.regex",
    );
    assert_eq!(server.post("/v1/completions", r#"{"prompt": "a", "max_tokens": 1}"#).status, 200);
}
