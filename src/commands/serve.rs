use std::io::ErrorKind;
use std::net::{TcpListener, ToSocketAddrs};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use russet_engine::{Engine, EngineOptions, ModelFacts, Sampling};
use russet_server::ServerOptions;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::LevelFilter;

use super::{Located, note, override_sampling};
use crate::cli::{LogFormat, LogLevel, ServeArgs};

/// Threads that read and write connections; they wait most of the time.
const WORKERS: usize = 2;
/// Threads that render templates and tokenize.
const PREPARERS: usize = 8;

pub(crate) fn serve(args: ServeArgs) -> Result<ExitCode> {
    start_log(args.log_level, args.log_format);
    let reference = args.model_option.as_deref().or(args.model.as_deref());
    let api_key = api_key(&args)?;
    // A port that is taken is told before a model is loaded.
    let listener = bind(&args.host, args.port)?;
    let address = listener.local_addr().context("cannot read the server's address")?;
    if !address.ip().is_loopback() && api_key.is_none() && !args.insecure {
        bail!(
            "--host {}: other machines could use this server. Give it a key with --api-key-file or \
             RUSSET_API_KEY, or say --insecure if nobody else can reach it",
            args.host
        );
    }
    let located = Located::find(reference, &args.loading.store)?;
    let engine = Arc::new(start_engine(&located, &args)?);
    let facts = engine.facts();
    let options = ServerOptions {
        model_aliases: reference.map(str::to_owned).into_iter().collect(),
        api_key,
        allowed_hosts: args.allowed_host.iter().cloned().chain([args.host.clone()]).collect(),
        allowed_origins: args.allowed_origin.clone(),
        max_tokens: args.max_tokens,
        sampling: sampling(&args, facts)?,
        seed: args.sampling.seed,
        template_variables: args.chat_template_args.clone().unwrap_or_default(),
        tool_parser: args.tool_parser,
        max_body: args.max_body_bytes,
        max_connections: args.max_connections,
        request_timeout: args.request_timeout.map(Duration::from_secs),
        shutdown_timeout: Duration::from_secs(args.shutdown_timeout),
        log_prompts: args.log_prompts,
        ..ServerOptions::new(located.name.clone())
    };
    let runtime = Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(PREPARERS)
        .enable_all()
        .build()
        .context("cannot start the server's threads")?;
    let served = runtime.block_on(async {
        let shutdown = shutdown_signal()?;
        note(&format!("{} at fidelity {}: listening on http://{address}", located.name, facts.tier));
        russet_server::serve(listener, engine.clone(), options, shutdown).await?;
        anyhow::Ok(())
    });
    // What still runs there is of no use to anybody.
    runtime.shutdown_background();
    served.map(|()| ExitCode::SUCCESS)
}

fn start_log(level: LogLevel, format: LogFormat) {
    let level = match level {
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warning => LevelFilter::WARN,
        LogLevel::Error | LogLevel::Critical => LevelFilter::ERROR,
    };
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_target(false);
    match format {
        LogFormat::Text => log.with_ansi(false).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}

fn api_key(args: &ServeArgs) -> Result<Option<String>> {
    let key = match &args.api_key_file {
        Some(path) => Some(read_key(path)?),
        None => args.api_key.clone(),
    };
    if key.as_ref().is_some_and(|key| key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic())) {
        bail!("the API key must be visible ASCII characters without spaces, at least one");
    }
    Ok(key)
}

fn read_key(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

fn bind(host: &str, port: u16) -> Result<TcpListener> {
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let mut addresses = (host, port).to_socket_addrs().with_context(|| format!("--host {host}"))?;
    let address = addresses.next().ok_or_else(|| anyhow!("--host {host}: the name has no address"))?;
    TcpListener::bind(address).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => anyhow!("port {port} is in use: choose another one with --port"),
        _ => anyhow!("cannot listen on {address}: {error}"),
    })
}

fn start_engine(located: &Located, args: &ServeArgs) -> Result<Engine> {
    let options = EngineOptions {
        width: args.decode_concurrency,
        queue: args.queue,
        prefill_chunk: args.loading.prefill_chunk,
        prompt_cache: args.prompt_cache_bytes,
        cache_answers: args.prompt_cache_answers,
        memory_budget: args.memory_budget,
    };
    let (dir, loading) = (located.dir.clone(), args.loading.load_options()?);
    Engine::start(move || russet_engine::LanguageModel::load(&dir, &loading), options)
        .with_context(|| format!("cannot load {}", located.name))
}

/// How tokens are picked where a request does not say.
fn sampling(args: &ServeArgs, facts: &ModelFacts) -> Result<Sampling> {
    let line_break = facts.tokenizer.encode("\n", true)?;
    let xtc_special_tokens = line_break.into_iter().chain(facts.eos.all.iter().copied()).collect();
    let sampling =
        Sampling { xtc_special_tokens, ..override_sampling(&args.sampling, facts.recommended.clone()) };
    sampling.check(facts.shape.vocabulary)?;
    Ok(sampling)
}

/// Ready at the first ctrl-C or SIGTERM; a second one ends the program at once.
fn shutdown_signal() -> Result<impl Future<Output = ()>> {
    let told = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_shutdown(signal, 128 + signal, told.clone())?;
        flag::register(signal, told.clone())?;
    }
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        note("Shutting down. Once more ends at once.");
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_and_addresses() {
        for host in ["127.0.0.1", "localhost", "[::1]", "::1"] {
            // Machines without IPv6 have no ::1.
            if let Ok(listener) = bind(host, 0) {
                assert!(listener.local_addr().unwrap().ip().is_loopback(), "{host}");
            } else {
                assert!(host.contains("::1"), "{host}");
            }
        }
        assert!(bind("no such host", 0).unwrap_err().to_string().contains("no such host"));
        let taken = bind("127.0.0.1", 0).unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = bind("127.0.0.1", port).unwrap_err().to_string();
        assert!(error.contains(&format!("port {port} is in use")), "{error}");
    }
}
