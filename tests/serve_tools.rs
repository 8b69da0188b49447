//! Calls of tools and reasoning, with a model that says what the test tells it.

mod common;

use common::http::{Reply, Server, ask};
use common::in_process::InProcess;
use common::{Copy, llama, parrot, russet};
use russet_server::ServerOptions;
use russet_testing::client_script;
use serde_json::{Value, json};

/// Two calls, as the checkpoint's template has them.
const TWO_CALLS: &str = "Let me look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich 🏔\n</parameter>\n\
                         <parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n\
                         <function=get_time>\n</function>\n</tool_call>";

fn tools() -> Value {
    let weather =
        json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": weather}},
        {"type": "function", "function": {"name": "get_time"}},
    ])
}

/// A message that makes the model answer so.
fn say(answer: &str) -> Value {
    json!({"role": "user", "content": format!("\u{1}{answer}\u{2}")})
}

fn chat(server: &InProcess, body: &Value) -> Reply {
    let headers = [("Content-Type", "application/json")];
    ask(server.address, "POST", "/v1/chat/completions", &headers, &body.to_string())
}

/// The only choice of an answer, with what may be added to the body.
fn answer(server: &InProcess, message: Value, more: Value) -> Value {
    let mut body = json!({"messages": [message]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let reply = chat(server, &body);
    assert_eq!(reply.status, 200, "{reply:?}");
    let whole = reply.json();
    let choice = &whole["choices"][0];
    // A stream says the same.
    body["stream"] = json!(true);
    let streamed = accumulate(&chat(server, &body).body);
    for name in ["content", "reasoning_content", "tool_calls"] {
        let mut expected = choice["message"][name].clone();
        let mut found = streamed["message"][name].clone();
        if name == "content" && expected.is_null() {
            expected = json!("");
        }
        for calls in [&mut expected, &mut found] {
            for call in calls.as_array_mut().into_iter().flatten() {
                let id = call["id"].take();
                assert!(id.as_str().unwrap().starts_with("call_"), "{id}");
            }
        }
        assert_eq!(found, expected, "{name} of {streamed} and {choice}");
    }
    assert_eq!(streamed["finish_reason"], choice["finish_reason"]);
    json!({"choice": choice, "usage": whole["usage"]})
}

/// Joins the chunks of a stream as clients do, and checks their grammar.
fn accumulate(stream: &str) -> Value {
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::<Value>::new());
    let mut reason = Value::Null;
    let events: Vec<&str> = stream.split_terminator("\n\n").collect();
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(*done, "data: [DONE]", "{stream}");
    for (index, chunk) in chunks.iter().enumerate() {
        let chunk: Value = serde_json::from_str(chunk.strip_prefix("data: ").unwrap()).unwrap();
        let choice = &chunk["choices"][0];
        assert!(reason.is_null(), "nothing follows the end: {stream}");
        reason = choice["finish_reason"].clone();
        let delta = choice["delta"].as_object().unwrap();
        assert_eq!(delta.contains_key("role"), index == 0, "{stream}");
        content += delta.get("content").map_or("", |text| text.as_str().unwrap());
        reasoning += delta.get("reasoning_content").map_or("", |text| text.as_str().unwrap());
        for call in delta.get("tool_calls").into_iter().flat_map(|calls| calls.as_array().unwrap()) {
            let mut call = call.clone();
            let index = call.as_object_mut().unwrap().remove("index").unwrap().as_u64().unwrap() as usize;
            if index == calls.len() {
                assert_eq!((&call["type"], &call["function"]["arguments"]), (&json!("function"), &json!("")));
                assert!(call["id"].is_string() && call["function"]["name"].is_string(), "{call}");
                calls.push(call);
            } else {
                assert_eq!(index, calls.len() - 1, "calls come one after the other");
                assert!(call.get("id").is_none() && call["function"].get("name").is_none(), "{call}");
                let arguments = &mut calls[index]["function"]["arguments"];
                let more = call["function"]["arguments"].as_str().unwrap();
                *arguments = format!("{}{more}", arguments.as_str().unwrap()).into();
            }
        }
    }
    let mut message = json!({"content": content});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    json!({"message": message, "finish_reason": reason})
}

#[test]
fn calls_are_no_text() {
    let Some(model) = llama() else { return };
    let server = parrot::serve(model, ServerOptions::new("parrot"));
    let found = answer(&server, say(TWO_CALLS), json!({"tools": tools()}));
    let choice = &found["choice"];
    let message = &choice["message"];
    assert_eq!(
        (&choice["finish_reason"], &message["content"]),
        (&json!("tool_calls"), &json!("Let me look."))
    );
    let calls = message["tool_calls"].as_array().unwrap();
    let call = |index: usize| {
        let function = &calls[index]["function"];
        let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        (function["name"].as_str().unwrap(), arguments)
    };
    assert_eq!(call(0), ("get_weather", json!({"city": "Zürich 🏔", "days": 3})));
    assert_eq!((call(1), calls.len()), (("get_time", json!({})), 2));
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    // One is enough for who says so.
    let one = answer(&server, say(TWO_CALLS), json!({"tools": tools(), "parallel_tool_calls": false}));
    assert_eq!(one["choice"]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    // Without text there is no content.
    let (_, only_calls) = TWO_CALLS.split_once('\n').unwrap();
    let silent = answer(&server, say(only_calls), json!({"tools": tools()}));
    assert_eq!(silent["choice"]["message"]["content"], Value::Null);
    // Who offers no tools gets the text, and who forbids calls does too.
    for more in [json!({}), json!({"tools": tools(), "tool_choice": "none"})] {
        let text = answer(&server, say(TWO_CALLS), more);
        let choice = &text["choice"];
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!(TWO_CALLS), &json!("stop"))
        );
    }
    // Broken calls are text, and so are those that the limit of tokens cuts.
    let broken = TWO_CALLS.replace("</parameter>", "");
    let text = answer(&server, say(&broken), json!({"tools": tools()}));
    let (first, _) = broken.split_once("\n<tool_call>\n<function=get_time>").unwrap();
    assert_eq!(text["choice"]["message"]["content"], first);
    assert_eq!(text["choice"]["message"]["tool_calls"][0]["function"]["name"], "get_time");
    let cut = answer(&server, say(only_calls), json!({"tools": tools(), "max_tokens": 20}));
    assert_eq!(
        (&cut["choice"]["finish_reason"], &cut["usage"]["completion_tokens"]),
        (&json!("length"), &json!(20))
    );
    let content = cut["choice"]["message"]["content"].as_str().unwrap();
    assert!(only_calls.starts_with(content) && content.starts_with("<tool_call>"), "{content}");
    assert!(server.finish().is_ok());
}

#[test]
fn reasoning_is_apart() {
    let Some(model) = llama() else { return };
    let server = parrot::serve(model, ServerOptions::new("parrot"));
    let thoughts = "<think>\nHmm, <tool_call> would do.\n</think>\n\n";
    let found = answer(&server, say(&format!("{thoughts}{TWO_CALLS}")), json!({"tools": tools()}));
    let message = &found["choice"]["message"];
    assert_eq!(message["reasoning_content"], "Hmm, <tool_call> would do.");
    assert_eq!(
        (&message["content"], &found["choice"]["finish_reason"]),
        (&json!("Let me look."), &json!("tool_calls"))
    );

    let found = answer(&server, say(&format!("{thoughts}Paris.")), json!({}));
    assert_eq!(found["choice"]["message"]["content"], "Paris.");
    // A budget that thinking uses up.
    let found = answer(&server, say(thoughts), json!({"max_tokens": 9}));
    let choice = &found["choice"];
    assert_eq!(
        (&choice["finish_reason"], &found["usage"]["completion_tokens"]),
        (&json!("length"), &json!(9))
    );
    assert_eq!((&choice["message"]["content"], choice["message"].get("tool_calls")), (&json!(""), None));
    let reasoning = choice["message"]["reasoning_content"].as_str().unwrap();
    assert!(
        reasoning.starts_with("Hmm") && "Hmm, <tool_call> would do.".starts_with(reasoning),
        "{reasoning}"
    );

    // Log-probabilities are those of all tokens.
    let body = json!({"messages": [say(&format!("{thoughts}Paris."))], "logprobs": true});
    let choice = chat(&server, &body).json()["choices"][0].clone();
    let tokens = choice["logprobs"]["content"].as_array().unwrap();
    let text: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(text, format!("{thoughts}Paris."));
    assert!(server.finish().is_ok());
}

#[test]
fn templates_open_reasoning_and_know_the_switches() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    copy.set_template(
        "{{ messages[-1].content }}{% if messages|length > 1 %}\u{1}{{ reasoning_effort }},{{ enable_thinking }}\
         \u{2}{% endif %} <think>\n",
    );
    let server = parrot::serve(copy.arg(), ServerOptions::new("parrot"));
    let found = answer(&server, say("Why?\n</think>\n\nSo."), json!({}));
    let message = &found["choice"]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("Why?"), &json!("So.")));
    // What follows a grammar begins behind it.
    let json = json!({"response_format": {"type": "json_object"}});
    let found = answer(&server, say("Why?\n</think>{\"a\":1}"), json);
    let message = &found["choice"]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("Why?"), &json!("{\"a\":1}")));
    for (more, expected) in [
        (json!({}), ",True"),
        (json!({"response_format": {"type": "json_object"}, "max_tokens": 6}), ",False"),
        (json!({"reasoning_effort": "low"}), "low,True"),
        (json!({"reasoning_effort": "none"}), "none,False"),
        (json!({"enable_thinking": false}), ",False"),
        (json!({"chat_template_kwargs": {"enable_thinking": false}, "enable_thinking": true}), ",False"),
    ] {
        let mut body = json!({"messages": [say("a"), say("b")]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let reply = chat(&server, &body);
        assert_eq!(reply.json()["choices"][0]["message"]["reasoning_content"], expected, "{more}");
    }
    assert!(server.finish().is_ok());
}

#[test]
fn calls_that_are_demanded_come() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    // A model that says nothing of the kind: it would say "no" for ever.
    copy.set_template(
        "<tool_call> {{ tools }} {{ messages[0].content }}{% if enable_thinking %}!{% else %}?{% endif %}",
    );
    let named = json!({"type": "function", "function": {"name": "get_time"}});
    let json = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a", "b"]}}});
    let sampled = |more: Value| {
        let mut more = more;
        more.as_object_mut().unwrap().extend(
            json!({"tools": tools(), "max_tokens": 400, "temperature": 1, "seed": 4, "top_p": 0.99})
                .as_object()
                .unwrap()
                .clone(),
        );
        more
    };
    for parser in ["qwen3_coder", "json_tools", "gemma4", "pythonic", "glm47", "mistral", "minicpm5"] {
        let options =
            ServerOptions { tool_parser: Some(parser.parse().unwrap()), ..ServerOptions::new("parrot") };
        let server = parrot::serve(copy.arg(), options);
        let say_no = say(&"no".repeat(200));
        let found = answer(&server, say_no.clone(), sampled(json!({"tool_choice": named})));
        let choice = &found["choice"];
        assert_eq!(choice["finish_reason"], "tool_calls", "{parser}: {choice}");
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(
            (calls.len(), &calls[0]["function"]["name"]),
            (1, &json!("get_time")),
            "{parser}: {choice}"
        );
        let arguments = calls[0]["function"]["arguments"].as_str().unwrap();
        assert_eq!(serde_json::from_str::<Value>(arguments).unwrap(), json!({}), "{parser}");
        // The text of a string may be anything, and then it is cut: one of two tools has no string.
        let found = answer(
            &server,
            say_no,
            sampled(json!({"tool_choice": "required", "parallel_tool_calls": false})),
        );
        let choice = &found["choice"];
        assert!(
            ["tool_calls", "length"].contains(&choice["finish_reason"].as_str().unwrap()),
            "{parser}: {choice}"
        );
        // Either a call or what else is wanted.
        let found = answer(&server, say("\"b\""), json!({"tools": tools(), "response_format": json}));
        assert_eq!(found["choice"]["message"]["content"], "\"b\"", "{parser}");
        assert!(server.finish().is_ok());
    }
}

#[test]
fn results_of_tools_go_back_to_the_template() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    copy.set_template(
        "\u{1}{{ tools[0].function.parameters.type }} {% for m in messages %}[{{ m.role }} {{ m.content }}{% for c in m.tool_calls or [] %} \
         {{ c.id }} {{ c.function.name }}{% for key, value in c.function.arguments | items %} {{ key }}={{ value }}\
         {% endfor %}{% endfor %}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}]{% endfor %}\u{2}!",
    );
    let options =
        ServerOptions { tool_parser: Some("json_tools".parse().unwrap()), ..ServerOptions::new("parrot") };
    let server = parrot::serve(copy.arg(), options);
    let call = json!({"id": "c1", "type": "function", "function": {
        "name": "get_weather", "arguments": "{\"city\": \"Bern\", \"days\": 2}"}});
    let messages = json!([
        {"role": "user", "content": "W?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "21 °C"}]},
    ]);
    let mut tools = tools();
    tools[0]["function"]["parameters"].as_object_mut().unwrap().remove("type");
    let reply = chat(&server, &json!({"messages": messages, "tools": tools}));
    assert_eq!(
        reply.json()["choices"][0]["message"]["content"],
        "object [user W?][assistant  c1 get_weather city=Bern days=2][tool 21 °C c1]"
    );
    let mut broken = messages.clone();
    broken[1]["tool_calls"][0]["function"]["arguments"] = json!("{");
    let refused = chat(&server, &json!({"messages": broken, "tools": tools}));
    assert!(refused.fails(400).starts_with("messages[1].tool_calls[0].function.arguments: must be the text"));
    assert!(server.finish().is_ok());
}

#[test]
fn tools_that_cannot_be_called_are_refused() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    copy.set_template("{{ messages[0].content }}");
    let plain = parrot::serve(copy.arg(), ServerOptions::new("parrot"));
    let body = json!({"messages": [say("a")], "tools": tools()});
    let refused = chat(&plain, &body);
    assert_eq!(refused.fails(400), "tools: the chat template of this model has no place for tools");
    assert_eq!(refused.json()["error"]["param"], "tools");
    copy.set_template("{{ tools }}{{ messages[0].content }}");
    let unknown = parrot::serve(copy.arg(), ServerOptions::new("parrot"));
    assert!(chat(&unknown, &body).fails(400).contains("--tool-parser"));
    copy.edit("tokenizer_config.json", |config| config["tool_parser_type"] = json!("klingon"));
    let wrong = parrot::serve(copy.arg(), ServerOptions::new("parrot"));
    assert!(
        chat(&wrong, &body).fails(400).contains("there is no tool parser \"klingon\"; there are minimax_m2,")
    );
    copy.edit("tokenizer_config.json", |config| config["tool_parser_type"] = json!("mistral"));
    let named = parrot::serve(copy.arg(), ServerOptions::new("parrot"));
    let found = answer(&named, say("[TOOL_CALLS]get_time[ARGS]{}"), json!({"tools": tools()}));
    assert_eq!(found["choice"]["message"]["tool_calls"][0]["function"]["name"], "get_time");
    copy.set_template("{% if tools %}{{ raise_exception('no tools, please') }}{% endif %}");
    let raising = parrot::serve(copy.arg(), ServerOptions::new("parrot"));
    assert!(chat(&raising, &body).fails(400).contains("no tools, please"));
}

#[test]
fn the_official_openai_client_runs_a_tool_loop() {
    let Some(mut script) = client_script("openai_tools.py") else { return };
    let Some(model) = llama() else { return };
    let server = parrot::serve(model, ServerOptions::new("parrot"));
    let output = script.arg(format!("http://{}", server.address)).output().unwrap();
    let print = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (print(&output.stdout), print(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    assert_eq!(stdout.lines().count(), 4, "{stdout}");
    assert!(server.finish().is_ok());
}

#[test]
fn the_binary_knows_its_parsers() {
    russet(&["serve", "--tool-parser", "klingon"]).fails(2, &["klingon", "qwen3_coder", "json_tools"]);
    let server = Server::start(&["--tool-parser", "json_tools"]);
    let body = json!({"messages": [{"role": "user", "content": "a"}], "tools": tools()});
    let refused = server.post("/v1/chat/completions", &body.to_string());
    assert!(refused.fails(400).contains("has no place for tools"), "{refused:?}");
}
