//! The server when its engine is slow, fails or stops, on a tiny checkpoint.

mod common;

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::http::ask;
use common::in_process::InProcess;
use common::llama;
use russet_engine::EngineOptions;
use russet_mlx::Array;
use russet_model::Cache;
use russet_model::graphs::{Graph, Shape};
use russet_server::ServerOptions;
use serde_json::json;

/// What a graph does when it meets the token of a letter.
struct Faulty(Box<dyn Graph>);

impl Graph for Faulty {
    fn forward(
        &self,
        tokens: &Array,
        cache: &mut Cache,
        each_layer: &mut dyn FnMut(&Array),
    ) -> russet_model::Result<Array> {
        let tokens_read = tokens.reshape([-1])?.to_vec::<u32>()?;
        let has = |letter: char| tokens_read.contains(&u32::from(letter));
        assert!(!has('P'), "a panic on purpose");
        if has('F') {
            return Err(russet_model::Error::Input("a fault on purpose".into()));
        }
        if has('S') {
            std::thread::sleep(Duration::from_millis(300));
        }
        self.0.forward(tokens, cache, each_layer)
    }

    fn logits(&self, hidden: &Array) -> russet_model::Result<Array> {
        self.0.logits(hidden)
    }

    fn new_cache(&self) -> Cache {
        self.0.new_cache()
    }

    fn shape(&self) -> Shape {
        self.0.shape()
    }
}

struct Server(InProcess);

impl Server {
    fn start(dir: String) -> Self {
        Self::start_with(dir, ServerOptions::new("faulty"))
    }

    fn start_with(dir: String, options: ServerOptions) -> Self {
        let options = ServerOptions { keep_alive: Duration::from_millis(50), ..options };
        Self(InProcess::start(dir, |graph, _| Box::new(Faulty(graph)), EngineOptions::default(), options))
    }

    fn complete(&self, prompt: &str, stream: bool) -> common::http::Reply {
        let body = json!({"prompt": prompt, "max_tokens": 2, "stream": stream}).to_string();
        let headers = [("Content-Type", "application/json")];
        ask(self.0.address, "POST", "/v1/completions", &headers, &body)
    }
}

#[test]
fn a_fault_is_the_request_s_own() {
    let Some(model) = llama() else { return };
    let server = Server::start(model);
    assert!(server.complete("F", false).fails(500).contains("a fault on purpose"));
    let stream = server.complete("F", true);
    assert_eq!(stream.status, 200);
    let event = stream.body.trim_end().rsplit("data: ").next().unwrap();
    let error: serde_json::Value = serde_json::from_str(event).unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("a fault on purpose"), "{stream:?}");
    assert!(!stream.body.contains("[DONE]"));
    assert_eq!(server.complete("a", false).status, 200);
    let health = ask(server.0.address, "GET", "/health", &[], "");
    assert_eq!(health.status, 200);
    assert!(health.json()["last_error"].as_str().unwrap().contains("a fault on purpose"), "{health:?}");
    assert!(server.0.finish().is_ok());
}

#[test]
fn a_server_without_engine_ends_with_the_reason() {
    let Some(model) = llama() else { return };
    let server = Server::start(model);
    let reply = server.complete("P", false);
    assert!(reply.fails(503).contains("a panic on purpose"), "{reply:?}");
    let begin = Instant::now();
    let error = server.0.thread.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("the engine has stopped") && error.contains("a panic on purpose"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_client_that_reads_nothing_loses_its_connection() {
    let Some(model) = llama() else { return };
    let write_timeout = Duration::from_millis(300);
    let options = ServerOptions { write_timeout, max_connections: 1, ..ServerOptions::new("slow") };
    let server = Server::start_with(model, options);
    let mut stream = TcpStream::connect(server.0.address).unwrap();
    // Answers of many times what the system buffers.
    let requests = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(5000);
    stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    // It may be cut before all is sent.
    let _ = stream.write_all(requests.as_bytes());
    // The only place there is is free again.
    let begin = Instant::now();
    assert_eq!(ask(server.0.address, "GET", "/health", &[], "").status, 200);
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    drop(stream);
    assert!(server.0.finish().is_ok());
}

#[test]
fn a_stream_that_waits_shows_that_it_lives() {
    let Some(model) = llama() else { return };
    let server = Server::start(model);
    let stream = server.complete("S", true);
    let comments = stream.body.split("\n\n").filter(|event| *event == ": keep-alive").count();
    assert!(comments >= 2, "{stream:?}");
    assert!(stream.body.ends_with("data: [DONE]\n\n"));
    assert!(server.0.finish().is_ok());
}
