//! `russet serve`: the real binary on the starter model.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use common::http::{Reply, Server, ask};
use common::{Copy, llama, russet, shared_home, starter, text};
use russet_testing::client_script;
use serde_json::{Value, json};

/// An answer that would take minutes.
const LONG: &str = r#"{"prompt": "Once upon a time", "max_tokens": 8000, "stream": true, "logit_bias": {"0": -99, "2": -99}}"#;

const KEY: &str = "a-key-of-its-own";

#[test]
fn the_official_openai_client_is_at_home() {
    let Some(mut script) = client_script("openai_client.py") else { return };
    let Some(model) = common::embedding_model() else { return };
    let (open, keyed) = (Server::start(&[]), Server::start(&["--api-key", KEY]));
    let embedding = Server::of(&model.arg(), &[]);
    let output = script.args([&open.url(), &keyed.url(), KEY, &embedding.url()]).output().unwrap();
    let print = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (print(&output.stdout), print(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stdout.lines().count() >= 12, "{stdout}");
}

#[test]
fn errors_are_objects_with_a_status() {
    let server = Server::start(&["--max-body-bytes", "1KB"]);
    let chat = |body: &str| server.post("/v1/chat/completions", body);
    assert_eq!(server.get("/nothing").fails(404), "there is nothing at /nothing");
    let wrong_method = server.get("/v1/completions");
    assert_eq!(wrong_method.fails(405), "/v1/completions does not take GET");
    assert_eq!(wrong_method.headers["allow"], "POST");
    assert!(chat(&"x".repeat(1001)).fails(413).contains("larger than 1000 bytes"));
    assert!(chat("{").fails(400).starts_with("the body is not valid JSON: "));
    assert_eq!(chat("[]").fails(400), "the body must be a JSON object");
    assert_eq!(chat("{}").fails(400), "messages: is missing: give a list of messages");
    assert!(chat(&"[".repeat(900)).fails(400).contains("not valid JSON"));
    let broken = chat(r#"{"messages": [{"role": "user", "content": "a"}], "stream": "yes"}"#);
    assert_eq!(broken.fails(400), "stream: must be true or false, but it is a string");
    assert_eq!(broken.json()["error"]["param"], "stream");
    let post = |content_type: &str| {
        let headers = [("Content-Type", content_type)];
        ask(server.address, "POST", "/v1/completions", &headers, r#"{"prompt": "a", "max_tokens": 1}"#)
    };
    for content_type in ["text/plain", "application/x-www-form-urlencoded", "application/jsonp"] {
        assert!(post(content_type).fails(415).contains(content_type));
    }
    for content_type in ["application/json; charset=utf-8", "Application/JSON", "application/x+json"] {
        assert_eq!(post(content_type).status, 200, "{content_type}");
    }
    // Larger than any head that is taken.
    let long = "x".repeat(200_000);
    assert_eq!(ask(server.address, "GET", "/health", &[("X-Long", &long)], "").status, 431);
    // A body of unknown length is limited too.
    let mut stream = TcpStream::connect(server.address).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\
                Content-Type: application/json\r\nConnection: close\r\n\r\n";
    let _ = stream.write_all(format!("{head}600\r\n{}\r\n0\r\n\r\n", "x".repeat(0x600)).as_bytes());
    let mut reply = String::new();
    let _ = stream.read_to_string(&mut reply);
    assert!(reply.starts_with("HTTP/1.1 413 "), "{reply}");
}

#[test]
fn a_full_queue_asks_to_come_again() {
    let server = Server::start(&["--decode-concurrency", "1", "--queue", "1"]);
    let end = Instant::now() + Duration::from_secs(20);
    let until = |running: u64, waiting: u64| {
        loop {
            let stats = server.get("/stats").json();
            let now = (&stats["requests"]["running"], &stats["requests"]["waiting"]);
            if now == (&json!(running), &json!(waiting)) {
                return stats;
            }
            assert!(Instant::now() < end, "{stats}");
        }
    };
    let running = server.stream(LONG);
    until(1, 0);
    let waiting = server.stream(LONG);
    until(1, 1);
    let refused = server.post("/v1/completions", r#"{"prompt": "a"}"#);
    assert_eq!(refused.fails(429), "1 requests are waiting, which is the limit: try again later");
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(refused.json()["error"]["code"], "rate_limit_exceeded");
    // Who leaves makes room, wherever they are.
    drop((waiting, running));
    assert_eq!(until(0, 0)["requests"]["cancelled"], 2);
    assert_eq!(server.post("/v1/completions", r#"{"prompt": "a", "max_tokens": 1}"#).status, 200);
}

#[test]
fn what_memory_has_no_room_for_is_refused_with_numbers() {
    let fixed = Server::start(&[]).get("/stats").json()["memory"]["fixed_bytes"].as_u64().unwrap();
    let server = Server::start(&["--memory-budget", &(fixed + (4 << 20)).to_string()]);
    let body = json!({"prompt": "word ".repeat(1000)}).to_string();
    let refused = server.post("/v1/completions", &body);
    let message = refused.fails(400);
    assert!(
        message.contains("the prompt of 1001 tokens needs ") && message.contains(" of 4 MiB"),
        "{message}"
    );
    assert_eq!(refused.json()["error"]["code"], "insufficient_memory");
    // Answers are cut to what there is room for.
    let answer =
        server.post("/v1/completions", r#"{"prompt": "a", "max_tokens": 3, "logit_bias": {"2": -99}}"#);
    assert_eq!(answer.json()["usage"]["completion_tokens"], 3);
}

#[test]
fn only_pages_that_may_use_the_server_do() {
    let server = Server::start(&["--allowed-origin", "https://app.example", "--api-key", KEY]);
    let port = server.address.port();
    let key = format!("Bearer {KEY}");
    let get = |headers: &[(&str, &str)]| {
        ask(server.address, "GET", "/v1/models", &[headers, &[("Authorization", key.as_str())]].concat(), "")
    };
    // A page whose name now leads here sends that name.
    for host in ["evil.example", &format!("evil.example:{port}"), ""] {
        assert!(get(&[("Host", host)]).fails(403).contains("--allowed-host"), "{host}");
    }
    for host in [&format!("localhost:{port}"), "127.0.0.1", "[::1]:80"] {
        assert_eq!(get(&[("Host", host)]).status, 200, "{host}");
    }
    for origin in ["https://evil.example", "null", "https://app.example.evil", "http://app.example"] {
        let refused = get(&[("Origin", origin)]);
        assert!(refused.fails(403).contains("--allowed-origin"), "{origin}");
        assert!(!refused.headers.contains_key("access-control-allow-origin"), "{refused:?}");
    }
    let own = format!("http://{}", server.address);
    for origin in ["https://app.example", &own] {
        let allowed = get(&[("Origin", origin)]);
        assert_eq!((allowed.status, allowed.headers["access-control-allow-origin"].as_str()), (200, origin));
        assert_eq!(allowed.headers["vary"], "origin");
    }
    // Browsers ask first, without the key.
    let ask_first = |origin: &str| -> Reply {
        let headers = [
            ("Origin", origin),
            ("Access-Control-Request-Method", "POST"),
            ("Access-Control-Request-Headers", "authorization, content-type"),
        ];
        ask(server.address, "OPTIONS", "/v1/chat/completions", &headers, "")
    };
    let allowed = ask_first("https://app.example");
    assert_eq!(allowed.status, 204);
    assert!(allowed.headers["access-control-allow-methods"].contains("POST"));
    assert_eq!(allowed.headers["access-control-allow-headers"], "authorization, content-type");
    assert_eq!(ask_first("https://evil.example").status, 403);
}

#[test]
fn a_key_guards_everything_but_health() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, format!("{KEY}\n")).unwrap();
    let server = Server::start(&["--api-key-file", &text(&file)]);
    let get = |path: &str, headers: &[(&str, &str)]| ask(server.address, "GET", path, headers, "");
    for path in ["/v1/models", "/stats", "/metrics", "/version", "/nothing"] {
        let refused = get(path, &[]);
        assert!(refused.fails(401).contains("needs an API key"), "{path}");
        assert_eq!(refused.headers["www-authenticate"], "Bearer");
        assert_eq!(get(path, &[("Authorization", "Bearer wrong")]).fails(401), "the API key is wrong");
        for header in [("Authorization", format!("bearer {KEY}")), ("X-API-Key", KEY.to_owned())] {
            assert_ne!(get(path, &[(header.0, &header.1)]).status, 401, "{path} {header:?}");
        }
    }
    assert_eq!(server.post("/v1/completions", r#"{"prompt": "a"}"#).status, 401);
    assert_eq!(get("/health", &[]).json(), json!({"status": "ok", "reason": null, "last_error": null}));

    let home = text(&shared_home());
    let serve = |args: &[&str]| russet(&[&["serve", "--offline", "--home", &home], args].concat());
    serve(&["--host", "0.0.0.0", "--port", "0"])
        .fails(1, &["--host 0.0.0.0", "--api-key-file", "--insecure"]);
    serve(&["--api-key", ""]).fails(1, &["API key"]);
    serve(&["--api-key-file", "/no/such/file"]).fails(1, &["/no/such/file"]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    serve(&["--port", &port]).fails(1, &[&format!("port {port} is in use")]);
    serve(&["--temp", "-1", "--port", "0"]).fails(1, &["temp"]);
}

#[test]
fn status_tells_what_happened() {
    let server = Server::start(&["--log-format", "json", "--seed", "5", "--temp", "1", "-n", "6"]);
    let secret = "Platypus";
    let body =
        json!({"prompt": format!("{secret} and friends"), "logit_bias": {"2": -99, "0": -99}}).to_string();
    let headers = [("Content-Type", "application/json"), ("X-Request-Id", "mine-1")];
    let reply = ask(server.address, "POST", "/v1/completions", &headers, &body);
    assert_eq!((reply.status, reply.headers["x-request-id"].as_str()), (200, "mine-1"));
    let answer = reply.json();
    assert_eq!(answer["usage"]["completion_tokens"], 6);
    let again = server.post("/v1/completions", &body);
    assert_eq!(again.json()["choices"], answer["choices"], "--seed is the seed of requests that have none");
    assert!(again.headers["x-request-id"].starts_with("req-"), "{again:?}");
    server.get("/nothing");

    let stats = server.get("/stats").json();
    assert_eq!((&stats["requests"]["finished"], &stats["generated_tokens"]), (&json!(2), &json!(12)));
    let memory = |name: &str| stats["memory"][name].as_u64().unwrap();
    assert!(
        memory("mlx_peak_bytes") >= memory("mlx_active_bytes") && memory("mlx_active_bytes") > 0,
        "{stats}"
    );
    assert!(memory("resident_bytes") > memory("mlx_active_bytes"), "{stats}");
    assert_eq!(server.get("/version").json()["version"], env!("CARGO_PKG_VERSION"));
    let metrics = server.get("/metrics");
    assert_eq!(metrics.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let mut family = "";
    for line in metrics.body.lines() {
        if let Some(declared) = line.strip_prefix("# TYPE ") {
            family = declared.split(' ').next().unwrap();
        } else if !line.starts_with("# HELP ") {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.starts_with(family) && value.parse::<f64>().is_ok(), "{line} in {family}");
        }
    }
    for line in [
        "russet_engine_up 1",
        "russet_requests_running 0",
        "russet_requests_total{outcome=\"finished\"} 2",
        "russet_http_responses_total{route=\"/v1/completions\",status=\"200\"} 2",
        "russet_http_responses_total{route=\"other\",status=\"404\"} 1",
        "russet_generated_tokens_total 12",
        "russet_inter_token_seconds_count 10",
        "russet_time_to_first_token_seconds_bucket{le=\"+Inf\"} 2",
        "russet_decode_tokens_per_second_count 2",
    ] {
        assert!(metrics.body.lines().any(|other| other == line), "{line} is not in {}", metrics.body);
    }
    let value = |name: &str| -> f64 {
        let line = metrics.body.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().trim().parse().unwrap()
    };
    // One request at a time, with a step for each of its tokens.
    let steps = value("russet_batch_size_count ");
    assert!(steps >= 12.0 && value("russet_batch_size_bucket{le=\"1\"} ") == steps, "{}", metrics.body);
    assert!(value("process_resident_memory_bytes ") > value("russet_mlx_active_memory_bytes "));

    server.signal("TERM");
    let (code, log) = server.finish();
    assert_eq!(code, Some(0), "{log}");
    let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let of = |id: &str| lines.iter().filter(|line| line["request_id"] == id).count();
    assert_eq!(of("mine-1"), 2, "the request and its answer: {log}");
    assert!(lines.iter().any(|line| line["path"] == "/nothing" && line["status"] == 404), "{log}");
    let said = answer["choices"][0]["text"].as_str().unwrap().trim();
    assert!(!log.contains(secret) && !log.contains(said), "{log}");
}

#[test]
fn an_embedding_model_embeds() {
    let Some(model) = common::embedding_model() else { return };
    let server = Server::of(&model.arg(), &[]);
    let embed = |body: Value| server.post("/v1/embeddings", &body.to_string());
    let reply = embed(json!({"input": ["first", "second"], "model": "default_model"})).json();
    assert_eq!((&reply["object"], reply["data"].as_array().unwrap().len()), (&json!("list"), 2));
    let command = russet(&["embed", &model.arg(), "first", "--json"]).json();
    assert_eq!(reply["data"][0]["embedding"], command["embeddings"][0]["embedding"]);
    assert_eq!(reply["data"][1]["index"], 1);
    assert_eq!(reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]);
    let query = embed(json!({"input": "first", "instruction": "Find", "dimensions": 8})).json();
    assert_eq!(query["data"][0]["embedding"].as_array().unwrap().len(), 8);
    let ids = embed(json!({"input": [[5, 6], [7]]})).json();
    assert_eq!(ids["usage"]["total_tokens"], 3);
    for (body, problem) in [
        (json!({}), "input: is missing"),
        (json!({"input": []}), "input: must have 1 to 2048 texts, but it has 0"),
        (json!({"input": ["a", 5]}), "input[1]: must be a text or a list of token ids"),
        (json!({"input": [1, "a"]}), "input[1]: must be a token id"),
        (json!({"input": {}}), "input: must be a text, a list of texts or of token ids"),
        (json!({"input": "a", "encoding_format": "hex"}), "encoding_format: must be \"float\" or \"base64\""),
        (json!({"input": "a", "input_type": "song"}), "input_type: must be \"document\""),
        (
            json!({"input": "a", "input_type": "song", "instruction": "Find"}),
            "input_type: must be \"document\"",
        ),
        (json!({"input": "a", "dimensions": 65}), "dimensions: must be from 1 to 64, but it is 65"),
        (json!({"input": [999_999_999]}), "token id 999999999 is outside"),
    ] {
        let message = embed(body).fails(400);
        assert!(message.starts_with(problem), "{message}");
    }
    let other = Server::start(&[]).post("/v1/embeddings", r#"{"input": "a"}"#);
    assert_eq!(other.fails(400), "the model \"SmolLM2-135M-Instruct\" is no embedding model");
}

#[test]
fn prompts_are_logged_on_request() {
    let server = Server::start(&["--log-format", "json", "--log-prompts", "--temp", "0"]);
    let body = r#"{"prompt": "The capital of France is", "max_tokens": 5}"#;
    let said = server.post("/v1/completions", body).json()["choices"][0]["text"].clone();
    server.signal("TERM");
    let (_, log) = server.finish();
    let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let text = |message: &str| lines.iter().find(|line| line["message"] == message).map(|line| &line["text"]);
    assert_eq!(
        (text("prompt"), text("answer")),
        (Some(&json!("The capital of France is")), Some(&said)),
        "{log}"
    );
}

#[test]
fn a_client_that_leaves_ends_its_answer_within_a_step() {
    let server = Server::start(&[]);
    for round in 0..5 {
        let before = server.get("/stats").json();
        let (generated, cancelled) = (&before["generated_tokens"], &before["requests"]["cancelled"]);
        let mut stream = server.stream(LONG);
        // What the client was sent by the time it leaves.
        let mut received = Vec::new();
        while received.windows(7).filter(|window| window == b"\ndata: ").count() < 20 {
            let mut buffer = [0; 4096];
            let read = stream.read(&mut buffer).unwrap();
            received.extend_from_slice(&buffer[..read]);
        }
        drop(stream);
        let end = Instant::now() + Duration::from_secs(20);
        let after = loop {
            let stats = server.get("/stats").json();
            if stats["requests"]["cancelled"] != *cancelled {
                break stats;
            }
            assert!(Instant::now() < end, "{stats}");
        };
        let events = received.windows(7).filter(|window| window == b"\ndata: ").count() as u64;
        let generated = after["generated_tokens"].as_u64().unwrap() - generated.as_u64().unwrap();
        // One step notices, and one may have been on its way; threads wait for a core now and then.
        assert!(generated <= events + 8, "round {round}: {generated} tokens, {events} of them received");
    }
}

#[test]
fn events_are_framed() {
    let server = Server::start(&[]);
    let body = r#"{"prompt": "The capital of France is", "max_tokens": 3, "stream": true}"#;
    let reply = server.post("/v1/completions", body);
    assert_eq!((reply.status, reply.headers["content-type"].as_str()), (200, "text/event-stream"));
    let events: Vec<&str> = reply.body.split_terminator("\n\n").collect();
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(*done, "data: [DONE]");
    assert!(reply.body.ends_with("\n\n") && chunks.len() >= 3, "{reply:?}");
    for chunk in chunks {
        let data = chunk.strip_prefix("data: ").unwrap();
        assert!(!data.contains('\n'));
        assert_eq!(serde_json::from_str::<Value>(data).unwrap()["object"], "text_completion");
    }
}

#[test]
fn connections_are_limited() {
    let server = Server::start(&["--max-connections", "2"]);
    let idle = [(); 2].map(|()| TcpStream::connect(server.address).unwrap());
    let mut third = TcpStream::connect(server.address).unwrap();
    third.write_all(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
    third.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut byte = [0];
    assert!(third.read(&mut byte).is_err(), "it waits until there is a place");
    drop(idle);
    third.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert_eq!(third.read(&mut byte).unwrap(), 1);
}

#[test]
fn signals_end_the_server_in_order() {
    // What can be finished is.
    let server = Server::start(&[]);
    let short = LONG.replace("8000", "60");
    let mut stream = server.stream(&short);
    server.signal("TERM");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("data: [DONE]\n\n") && rest.contains("\"finish_reason\":\"length\""), "{rest}");
    assert_eq!(server.finish().0, Some(0));

    // What can't be is cut, and told so.
    let server = Server::start(&["--shutdown-timeout", "0"]);
    let mut stream = server.stream(LONG);
    server.signal("INT");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    let last = rest.trim_end().rsplit("data: ").next().unwrap();
    let error: Value = serde_json::from_str(last).unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("shutting down"), "{error}");
    assert!(TcpStream::connect(server.address).is_err(), "no more connections are taken");
    assert_eq!(server.finish().0, Some(0));

    // A second signal does not wait.
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let server = Server::start(&["--shutdown-timeout", "600"]);
        let _stream = server.stream(LONG);
        server.signal(signal);
        std::thread::sleep(Duration::from_millis(200));
        let begin = Instant::now();
        server.signal(signal);
        assert_eq!(server.finish().0, Some(code));
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    }
}

#[test]
fn a_template_says_why_it_refuses() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    copy.set_template("{{ raise_exception('roles must alternate') }}");
    let server = Server::of(&copy.arg(), &[]);
    let body = r#"{"messages": [{"role": "user", "content": "a"}]}"#;
    let refused = server.post("/v1/chat/completions", body);
    assert!(refused.fails(400).contains("refused the messages: roles must alternate"), "{refused:?}");
    assert_eq!(refused.json()["error"]["param"], "messages");

    // Variables of the command line and of the request reach it.
    copy.set_template("{{ 'a' * (count + more) }}");
    let server = Server::of(&copy.arg(), &["--chat-template-args", r#"{"count": 3, "more": 1}"#]);
    let tokens = |kwargs: Value| {
        let body = json!({
            "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template_kwargs": kwargs,
        });
        server.post("/v1/chat/completions", &body.to_string()).json()["usage"]["prompt_tokens"].clone()
    };
    assert_eq!((tokens(Value::Null), tokens(json!({"more": 4}))), (json!(4), json!(7)));
}

#[test]
fn the_model_has_its_names() {
    let path = text(&starter());
    let server = Server::start(&[]);
    for model in ["SmolLM2-135M-Instruct", "default_model", &path] {
        let body = json!({"model": model, "prompt": "a", "max_tokens": 1}).to_string();
        let answer = server.post("/chat/completions", &body);
        assert!(answer.fails(400).starts_with("messages: "), "mlx_lm.server's path");
        assert_eq!(server.post("/v1/completions", &body).json()["model"], "SmolLM2-135M-Instruct");
    }
}
