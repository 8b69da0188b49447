//! What HTTP adds to the time to the first token: the same engine is asked directly and through its server, in turns.
//!
//! `cargo bench --bench http_overhead -- MODEL [REPEATS]` prints medians in milliseconds as one line of JSON. The prompt
//! differs each time, and the prompt cache is off.

#![allow(clippy::print_stdout, reason = "a benchmark prints")]

use std::future::pending;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use russet_engine::{Engine, EngineOptions, LanguageModel, Output, Request, SubmitOptions};
use russet_model::LoadOptions;
use russet_server::{ServerOptions, serve};
use serde_json::json;

const WORDS: usize = 32;
const WARM_UP: usize = 5;

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1).filter(|a| !a.starts_with('-'));
    let dir: PathBuf = words.next().context("give the folder of a model")?.into();
    let repeats: usize = words.next().map_or(Ok(50), |n| n.parse()).context("REPEATS is no number")?;
    let options = EngineOptions { prompt_cache: 0, ..EngineOptions::default() };
    let load = move || LanguageModel::load(&dir, &LoadOptions::default());
    let engine = Arc::new(Engine::start(load, options)?);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let served = engine.clone();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(serve(listener, served, ServerOptions::new("model"), pending()))?;
        anyhow::Ok(())
    });

    let (mut library, mut http) = (Vec::new(), Vec::new());
    for repeat in 0..WARM_UP + repeats {
        let text = |way: &str| format!("{way} {repeat}{}", " word".repeat(WORDS));
        let direct = ask_library(&engine, &text("direct"))?;
        let through = ask_server(address, &text("served"))?;
        if repeat >= WARM_UP {
            library.push(direct);
            http.push(through);
        }
    }
    let differences = http.iter().zip(&library).map(|(http, library)| http - library).collect();
    let report = json!({"library": median(library), "http": median(http), "difference": median(differences)});
    println!("{report}");
    Ok(())
}

/// Milliseconds until the first token.
fn ask_library(engine: &Engine, prompt: &str) -> Result<f64> {
    let start = Instant::now();
    let tokens = engine.facts().tokenizer.encode_prompt(prompt)?;
    let request = Request { continues_prompt: true, ..Request::new(tokens, 2) };
    let mut answer = engine.submit(request, SubmitOptions::default())?;
    let first = answer.blocking_next();
    let time = start.elapsed();
    let Some(Output::Token { .. }) = first else { bail!("no token came first, but {first:?}") };
    while answer.blocking_next().is_some() {}
    Ok(time.as_secs_f64() * 1e3)
}

/// The same by a request of its own connection, as a stream.
fn ask_server(address: SocketAddr, prompt: &str) -> Result<f64> {
    let start = Instant::now();
    let mut stream = TcpStream::connect(address)?;
    let body = json!({"prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": true}).to_string();
    write!(
        stream,
        "POST /v1/completions HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut time = None;
    let mut lines = Vec::new();
    for line in BufReader::new(stream).lines() {
        let line = line?;
        if line.starts_with("data: ") {
            time.get_or_insert_with(|| start.elapsed());
        }
        lines.push(line);
    }
    match time {
        Some(time) if lines.iter().any(|line| line == "data: [DONE]") => Ok(time.as_secs_f64() * 1e3),
        _ => bail!("the server answered {lines:?}"),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
