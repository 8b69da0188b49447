//! HTTP on the engine: OpenAI's protocol, health, metrics and the web chat.
//!
//! [`serve()`] answers requests on a socket with an [`Engine`](russet_engine::Engine) until it is told to stop.
//! docs/http-api.md describes every endpoint. The crate reads no environment, installs no signal handler and prints
//! nothing; what happens is logged with tracing, without prompts and answers unless it is told to.

mod answers;
mod app;
mod choices;
mod error;
mod fields;
mod grammar;
mod guard;
mod metrics;
mod openai;
mod options;
mod random;
mod serve;
mod status;
mod tools;
mod web;

use std::time::Duration;

use russet_engine::Sampling;
use russet_text::ToolParser;
use serde_json::{Map, Value};

pub use serve::serve;

/// What a server is told.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The model's name.
    pub model: String,
    /// Other names that requests may use for it.
    pub model_aliases: Vec<String>,
    /// What clients must send; anybody may ask where absent.
    pub api_key: Option<String>,
    /// Names that a Host header may have, besides addresses and localhost.
    pub allowed_hosts: Vec<String>,
    /// Origins of web pages that may use the server, `*` for all; its own may always.
    pub allowed_origins: Vec<String>,
    /// Tokens of an answer where a request has no limit.
    pub max_tokens: usize,
    /// How tokens are picked where a request does not say.
    pub sampling: Sampling,
    /// The seed of requests that have none; random for each where absent.
    pub seed: Option<u64>,
    /// Values for the chat template, which requests may replace.
    pub template_variables: Map<String, Value>,
    /// How the model calls tools; what its chat template shows, where absent.
    pub tool_parser: Option<ToolParser>,
    /// Bytes of a request's body, at most.
    pub max_body: usize,
    /// Connections at once, at most; others wait to be accepted.
    pub max_connections: usize,
    /// When a request is ended whatever it has.
    pub request_timeout: Option<Duration>,
    /// How long requests may go on once the server is told to stop.
    pub shutdown_timeout: Duration,
    /// After how long without an event a stream gets a comment.
    pub keep_alive: Duration,
    /// How long a client may read nothing of what is sent to it.
    pub write_timeout: Duration,
    /// Log prompts and answers too.
    pub log_prompts: bool,
}

impl ServerOptions {
    /// Defaults for a model of this name.
    pub fn new(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            model_aliases: Vec::new(),
            api_key: None,
            allowed_hosts: Vec::new(),
            allowed_origins: Vec::new(),
            max_tokens: 512,
            sampling: Sampling::default(),
            seed: None,
            template_variables: Map::new(),
            tool_parser: None,
            max_body: 16 << 20,
            max_connections: 1024,
            request_timeout: None,
            shutdown_timeout: Duration::from_secs(10),
            keep_alive: Duration::from_secs(10),
            write_timeout: Duration::from_secs(60),
            log_prompts: false,
        }
    }

    fn is_model(&self, name: &str) -> bool {
        // What mlx_lm.server calls the model of its command line.
        name == self.model || name == "default_model" || self.model_aliases.iter().any(|alias| alias == name)
    }
}

/// Why a server ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket can't be used.
    #[error("cannot serve: {0}")]
    Socket(std::io::Error),
    /// The engine stopped by itself.
    #[error("the engine has stopped: {0}")]
    Engine(String),
}
