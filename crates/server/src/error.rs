//! Errors as OpenAI's clients expect them.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use russet_engine::{Error, Refusal};
use serde_json::{Value, json};

/// An error of a request: `{"error": {"message", "type", "param", "code"}}` with a status.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    retry_after: Option<u32>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// The request can't be taken as it is.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A field has a value that can't be used; the message names the field.
    pub(crate) fn field(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let param = param.into();
        Self { message: format!("{param}: {problem}"), param: Some(param), ..Self::invalid("") }
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self { retry_after: Some(5), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    pub(crate) fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    pub(crate) fn param(self, param: &str) -> Self {
        Self { param: Some(param.to_owned()), ..self }
    }

    /// A request that the engine did not take. `prompt` is the field that the prompt came from.
    pub(crate) fn refused(refusal: Refusal, prompt: &str) -> Self {
        let message = refusal.to_string();
        match refusal {
            Refusal::Invalid(error) => Self::failed(&error, prompt),
            Refusal::Busy(_) => {
                let error = Self::new(StatusCode::TOO_MANY_REQUESTS, message);
                Self { retry_after: Some(1), ..error }.code("rate_limit_exceeded")
            }
            // Waiting does not help: the request is too large even when it is alone.
            Refusal::Memory(_) => Self::invalid(message).param(prompt).code("insufficient_memory"),
            Refusal::Stopped(_) => Self::unavailable(message),
        }
    }

    /// A request that the engine ended.
    pub(crate) fn failed(error: &Error, prompt: &str) -> Self {
        let message = error.to_string();
        match error {
            Error::Option { option: "temp", message } => Self::field("temperature", message),
            Error::Option { option, message } => Self::field(option.replace('-', "_"), message),
            // The client's grammar, at a point that only the answer led to.
            Error::Text(russet_text::Error::Constraint(_)) => Self::invalid(message).code("grammar_failed"),
            Error::Prompt(_) | Error::Text(_) => Self::invalid(message).param(prompt),
            Error::Deadline => Self::new(StatusCode::GATEWAY_TIMEOUT, message).code("timeout"),
            Error::Stopping | Error::Engine(_) => Self::unavailable(message),
            Error::Model(_) | Error::Mlx(_) | Error::NotFinite { .. } => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
            }
        }
    }

    /// The body of the response, and the event that ends a stream.
    pub(crate) fn body(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            500..=599 => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = self.body().to_string();
        let mut response = (self.status, [(header::CONTENT_TYPE, "application/json")], body).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
