//! What every request passes before its endpoint: its id, checks of Host, Origin and key, and the log.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

use crate::ServerOptions;
use crate::app::App;
use crate::error::ApiError;
use crate::{random, web};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The id of a request: the client's own, or a new one.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestId(pub(crate) String);

impl RequestId {
    fn of(headers: &HeaderMap) -> Self {
        let sane =
            |id: &&str| (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
        let own = text(headers, REQUEST_ID).filter(sane).map(str::to_owned);
        Self(own.unwrap_or_else(|| random::id("req-")))
    }
}

pub(crate) async fn guard(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let begin = Instant::now();
    let id = RequestId::of(request.headers());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let origin = request.headers().get(header::ORIGIN).cloned();
    request.extensions_mut().insert(id.clone());
    let checked = check(&app.options, request.headers(), &method, &path);
    // Only origins that passed may read the answer.
    let allowed_origin = origin.filter(|_| checked.is_ok());
    let mut response = match checked {
        Err(error) => error.into_response(),
        Ok(()) if is_preflight(&method, request.headers()) => preflight(request.headers()),
        Ok(()) => match check_key(&app.options, request.headers(), &path) {
            Err(error) => error.into_response(),
            Ok(()) => next.run(request).await,
        },
    };
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id.0) {
        headers.insert(REQUEST_ID, value);
    }
    if let Some(origin) = allowed_origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id"));
    }
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    let status = response.status().as_u16();
    app.metrics.responded(&path, status);
    tracing::info!(
        request_id = id.0,
        %method,
        path,
        status,
        milliseconds = begin.elapsed().as_millis() as u64,
        "request"
    );
    response
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Checks where a request comes from.
fn check(options: &ServerOptions, headers: &HeaderMap, method: &Method, path: &str) -> Result<(), ApiError> {
    let forbidden = |message| ApiError::new(StatusCode::FORBIDDEN, message);
    let host = text(headers, header::HOST).unwrap_or("");
    if !allows_host(options, host) {
        return Err(forbidden(format!(
            "the Host {host:?} is not a name of this server: start it with --allowed-host if it should be"
        ))
        .code("host_not_allowed"));
    }
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or("");
    let own = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://")) == Some(host);
    if own || options.allowed_origins.iter().any(|allowed| allowed == "*" || allowed == origin) {
        return Ok(());
    }
    tracing::warn!(%method, path, origin, "a page of another origin was refused");
    Err(forbidden(format!(
        "pages of the origin {origin:?} may not use this server: start it with --allowed-origin if they should"
    ))
    .code("origin_not_allowed"))
}

/// Whether a Host header names this server. A page that had its own name's address changed to this server's (DNS
/// rebinding) sends that name, which is not one of the server's; addresses can't be rebound.
fn allows_host(options: &ServerOptions, host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    address.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || options.allowed_hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
}

fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::OPTIONS
        && headers.contains_key(header::ORIGIN)
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

fn preflight(headers: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let answer = response.headers_mut();
    answer.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE"));
    if let Some(asked) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    answer.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    response
}

/// Checks the key, of everything but /health and the server's own files.
fn check_key(options: &ServerOptions, headers: &HeaderMap, path: &str) -> Result<(), ApiError> {
    let Some(key) = &options.api_key else { return Ok(()) };
    if path == "/health" || web::file(path).is_some() {
        return Ok(());
    }
    let authorization = text(headers, header::AUTHORIZATION).and_then(|value| value.split_once(' '));
    let bearer = authorization.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    let given = bearer.map(|(_, key)| key.trim());
    match given.or_else(|| text(headers, HeaderName::from_static("x-api-key"))) {
        Some(given) if equal(given, key) => Ok(()),
        Some(_) => {
            Err(ApiError::new(StatusCode::UNAUTHORIZED, "the API key is wrong").code("invalid_api_key"))
        }
        None => Err(ApiError::new(
            StatusCode::UNAUTHORIZED,
            "this server needs an API key: send the header Authorization: Bearer KEY",
        )
        .code("invalid_api_key")),
    }
}

/// Compares in a time that tells nothing of the key: digests are compared, whole.
fn equal(given: &str, key: &str) -> bool {
    let (given, key) = (Sha256::digest(given), Sha256::digest(key));
    given.iter().zip(key.iter()).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_the_server_are_hosts() {
        let options = ServerOptions { allowed_hosts: vec!["box.lan".into()], ..ServerOptions::new("model") };
        for host in
            ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "10.0.0.7", "[::1]:80", "[::1]", "Box.lan:9"]
        {
            assert!(allows_host(&options, host), "{host}");
        }
        for host in
            ["", "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil", ":80"]
        {
            assert!(!allows_host(&options, host), "{host}");
        }
    }

    #[test]
    fn keys_are_equal_in_every_byte() {
        assert!(equal("key", "key"));
        for other in ["", "ke", "keys", "Key"] {
            assert!(!equal(other, "key"), "{other}");
        }
    }
}
