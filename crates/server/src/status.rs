//! How the server is doing.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::app::{App, json_response};
use crate::metrics::resident_memory;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// `GET /health`: 200 while requests can be answered, else 503.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
    let engine = app.engine.status();
    let (code, status) = match (&engine.stopped, app.is_stopping()) {
        (_, true) => (StatusCode::SERVICE_UNAVAILABLE, "stopping"),
        (Some(_), false) => (StatusCode::SERVICE_UNAVAILABLE, "stopped"),
        (None, false) => (StatusCode::OK, "ok"),
    };
    let body = json!({"status": status, "reason": engine.stopped, "last_error": engine.last_error});
    json_response(code, &body)
}

/// `GET /version`.
pub(crate) async fn version(State(app): State<Arc<App>>) -> Response {
    let facts = app.engine.facts();
    let body = json!({"version": VERSION, "fidelity": facts.tier.to_string(), "profile": facts.profile});
    json_response(StatusCode::OK, &body)
}

/// `GET /stats`.
pub(crate) async fn stats(State(app): State<Arc<App>>) -> Response {
    let engine = app.engine.status();
    let memory = &app.engine.facts().memory;
    let (first, cache) = (&engine.time_to_first_token, &engine.prompt_cache);
    let body = json!({
        "model": app.options.model,
        "uptime_seconds": app.started.elapsed().as_secs_f64(),
        "stopped": engine.stopped,
        "last_error": engine.last_error,
        "requests": {
            "running": engine.running,
            "waiting": engine.waiting,
            "finished": engine.finished,
            "cancelled": engine.cancelled,
            "failed": engine.failed,
        },
        "generated_tokens": engine.generated_tokens,
        "time_to_first_token": {"count": first.count(), "sum_seconds": first.sum()},
        "prompt_cache": {
            "bytes": engine.prompt_cache_bytes,
            "hits": cache.hits,
            "misses": cache.misses,
            "tokens": cache.tokens,
            "evictions": cache.evictions,
        },
        "memory": {
            "budget_bytes": memory.budget(),
            "fixed_bytes": memory.fixed(),
            "resident_bytes": resident_memory(),
            "mlx_active_bytes": engine.memory.active,
            "mlx_peak_bytes": engine.memory.peak,
            "mlx_cached_bytes": engine.memory.cached,
        },
    });
    json_response(StatusCode::OK, &body)
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let page = app.metrics.page(&app.engine.status(), &app.engine.facts().memory, VERSION);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}
