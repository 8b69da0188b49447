//! Servers and plain HTTP for tests.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;

use super::{shared_home, start, starter, text};

/// A server on the starter model, which ends with the test.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) address: SocketAddr,
    log: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start(args: &[&str]) -> Self {
        let model = text(&starter());
        Self::of(&model, args)
    }

    /// A server on another model.
    pub(crate) fn of(model: &str, args: &[&str]) -> Self {
        let home = text(&shared_home());
        let mut child =
            start(&[&["serve", model, "--port", "0", "--offline", "--home", &home], args].concat());
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut log = String::new();
        let address = loop {
            let before = log.len();
            assert_ne!(stderr.read_line(&mut log).unwrap(), 0, "no server: {log}");
            if let Some((_, url)) = log[before..].split_once("listening on http://") {
                break url.trim().parse().unwrap();
            }
        };
        let log = Arc::new(Mutex::new(log));
        let written = log.clone();
        let reader = std::thread::spawn(move || {
            let mut line = String::new();
            while stderr.read_line(&mut line).is_ok_and(|read| read > 0) {
                written.lock().unwrap().push_str(&line);
                line.clear();
            }
        });
        Self { child, address, log, reader: Some(reader) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn signal(&self, name: &str) {
        let command = format!("kill -s {name} {}", self.child.id());
        assert!(std::process::Command::new("sh").args(["-c", &command]).status().unwrap().success());
    }

    /// Waits for the end; returns the exit code and what was logged.
    pub(crate) fn finish(mut self) -> (Option<i32>, String) {
        let status = self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        let log = self.log.lock().unwrap().clone();
        assert!(!log.contains("panicked"), "{log}");
        (status.code(), log)
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        ask(self.address, "GET", path, &[], "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Reply {
        ask(self.address, "POST", path, &[("Content-Type", "application/json")], body)
    }

    /// A stream that a client is in the middle of.
    pub(crate) fn stream(&self, body: &str) -> TcpStream {
        let headers = [("Content-Type", "application/json")];
        let mut stream = send(self.address, "POST", "/v1/completions", &headers, body);
        let mut first = [0];
        stream.read_exact(&mut first).unwrap();
        stream
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A response.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    /// By name in lower case.
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.headers["content-type"], "application/json", "{self:?}");
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Checks that this is an error of OpenAI's shape; returns its message.
    #[track_caller]
    pub(crate) fn fails(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{self:?}");
        let body = self.json();
        let error = body["error"].as_object().unwrap();
        let names: Vec<&String> = error.keys().collect();
        assert_eq!(names, ["message", "type", "param", "code"], "{self:?}");
        assert!(error["type"].is_string() && !self.headers["x-request-id"].is_empty(), "{self:?}");
        error["message"].as_str().unwrap().to_owned()
    }
}

fn send(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    // Responses of HTTP/1.0 end with the connection.
    let mut request = format!("{method} {path} HTTP/1.0\r\n");
    if !headers.iter().any(|(name, _)| *name == "Host") {
        request += &format!("Host: {address}\r\n");
    }
    for (name, value) in headers {
        request += &format!("{name}: {value}\r\n");
    }
    if method == "POST" {
        request += &format!("Content-Length: {}\r\n", body.len());
    }
    request += "\r\n";
    // A server that refuses need not read all.
    let _ = stream.write_all(request.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
    stream
}

/// Asks for something.
pub(crate) fn ask(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Reply {
    let mut stream = send(address, method, path, headers, body);
    let mut text = String::new();
    if let Err(e) = stream.read_to_string(&mut text) {
        assert!(!text.is_empty(), "{e}");
    }
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response: {text:?}"));
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let header = |line: &str| {
        let (name, value) = line.split_once(": ").unwrap();
        (name.to_ascii_lowercase(), value.to_owned())
    };
    Reply { status, headers: lines.map(header).collect(), body: body.to_owned() }
}
