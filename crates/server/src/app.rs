//! What all requests share, and the routes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use russet_engine::Engine;
use russet_text::GrammarCompiler;
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::guard::{RequestId, guard};
use crate::metrics::Metrics;
use crate::{ServerOptions, openai, status, web};

/// How long a client may take to send a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// What all requests share.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) engine: Arc<Engine>,
    pub(crate) options: ServerOptions,
    pub(crate) metrics: Metrics,
    pub(crate) started: Instant,
    /// When the server started, in seconds of Unix time.
    pub(crate) created: u64,
    stopping: AtomicBool,
    /// Made for the first request that has a grammar.
    grammars: OnceLock<Result<GrammarCompiler, russet_text::Error>>,
}

impl App {
    pub(crate) fn new(engine: Arc<Engine>, options: ServerOptions) -> Self {
        Self {
            engine,
            options,
            metrics: Metrics::default(),
            started: Instant::now(),
            created: now(),
            stopping: AtomicBool::new(false),
            grammars: OnceLock::new(),
        }
    }

    /// Compiles grammars for the model. The first call takes a while.
    pub(crate) fn grammars(&self) -> Result<&GrammarCompiler, russet_text::Error> {
        let facts = self.engine.facts();
        let made = self.grammars.get_or_init(|| GrammarCompiler::new(&facts.tokenizer, &facts.eos));
        made.as_ref().map_err(Clone::clone)
    }

    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}

/// Seconds of Unix time.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

pub(crate) fn router(app: Arc<App>) -> Router {
    web::routes(Router::new())
        .route("/v1/chat/completions", post(openai::chat_completions))
        // mlx_lm.server has this path too.
        .route("/chat/completions", post(openai::chat_completions))
        .route("/v1/completions", post(openai::completions))
        .route("/v1/embeddings", post(openai::embeddings))
        .route("/v1/models", get(openai::models))
        .route("/v1/models/{*id}", get(openai::model))
        .route("/health", get(status::health))
        .route("/stats", get(status::stats))
        .route("/version", get(status::version))
        .route("/metrics", get(status::metrics))
        .fallback(async |request: Request| {
            let path = request.uri().path();
            ApiError::new(StatusCode::NOT_FOUND, format!("there is nothing at {path}")).code("unknown_url")
        })
        .method_not_allowed_fallback(async |request: Request| {
            let (method, path) = (request.method(), request.uri().path());
            let message = format!("{path} does not take {method}");
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).code("method_not_allowed")
        })
        .layer(from_fn_with_state(app.clone(), guard))
        .with_state(app)
}

/// The body of a request that has JSON in it, and the request's id.
pub(crate) async fn read(app: &App, request: Request) -> Result<(Bytes, String), ApiError> {
    let RequestId(id) = request.extensions().get().cloned().unwrap_or_default();
    let content_type = request.headers().get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap_or(""));
    let essence = content_type.map(|value| value.split(';').next().unwrap_or("").trim().to_ascii_lowercase());
    if let Some(essence) = essence
        && essence != "application/json"
        && !(essence.starts_with("application/") && essence.ends_with("+json"))
    {
        let message = format!("the body must be application/json, but its Content-Type is {essence:?}");
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let limit = app.options.max_body;
    let too_large = || {
        let message = format!("the body is larger than {limit} bytes, which is the limit of this server");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    if length.and_then(|value| value.parse().ok()).is_some_and(|length: u64| length > limit as u64) {
        return Err(too_large());
    }
    match tokio::time::timeout(BODY_TIMEOUT, to_bytes(request.into_body(), limit)).await {
        Ok(Ok(bytes)) => Ok((bytes, id)),
        // A client that leaves hears nothing, so it is the limit.
        Ok(Err(_)) => Err(too_large()),
        Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
    }
}

/// The fields of a body.
pub(crate) fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(body)) => Ok(body),
        Ok(_) => Err(ApiError::invalid("the body must be a JSON object")),
        Err(error) => Err(ApiError::invalid(format!("the body is not valid JSON: {error}"))),
    }
}

/// Refuses models that are not this server's.
pub(crate) fn check_model(app: &App, fields: &Fields<'_>) -> Result<(), ApiError> {
    let Some(model) = fields.string("model")? else { return Ok(()) };
    if app.options.is_model(model) { Ok(()) } else { Err(no_model(app, model).param("model")) }
}

pub(crate) fn no_model(app: &App, model: &str) -> ApiError {
    let message = format!("the model {model:?} is not here; this server has {:?}", app.options.model);
    ApiError::new(StatusCode::NOT_FOUND, message).code("model_not_found")
}

/// Runs what takes a while off the threads that serve.
pub(crate) async fn blocking<T: Send + 'static>(
    run: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(run).await.unwrap_or_else(|error| {
        tracing::error!(%error, "a request was not prepared");
        Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the request could not be prepared"))
    })
}

/// A JSON body.
pub(crate) fn json_response(status: StatusCode, value: &Value) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], Body::from(value.to_string())).into_response()
}
