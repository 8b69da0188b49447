//! `POST /v1/embeddings`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use russet_engine::{Embedding, Purpose};
use serde_json::{Value, json};

use crate::app::{App, blocking, check_model, json_response, object, read};
use crate::error::ApiError;
use crate::fields::{Fields, wrong_type};

/// Texts of a request, as in OpenAI's API.
const MOST_TEXTS: usize = 2048;

/// A request that was understood.
struct Asked {
    texts: Vec<Vec<u32>>,
    dimensions: Option<usize>,
    base64: bool,
}

/// `POST /v1/embeddings`.
pub(crate) async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Response {
    answer(app, request).await.unwrap_or_else(IntoResponse::into_response)
}

async fn answer(app: Arc<App>, request: Request) -> Result<Response, ApiError> {
    let (body, _) = read(&app, request).await?;
    let deadline = app.options.request_timeout.map(|timeout| Instant::now() + timeout);
    let preparing = app.clone();
    let Asked { texts, dimensions, base64 } = blocking(move || {
        let body = object(&body)?;
        let fields = Fields::new(&body);
        check_model(&preparing, &fields)?;
        let Some(embedding) = &preparing.engine.facts().embedding else {
            let message = format!("the model {:?} is no embedding model", preparing.options.model);
            return Err(ApiError::invalid(message).param("model"));
        };
        Asked::read(embedding, &fields)
    })
    .await?;
    let tokens: usize = texts.iter().map(Vec::len).sum();
    let pending = app.engine.embed(texts, dimensions, deadline);
    let pending = pending.map_err(|refusal| ApiError::refused(refusal, "input"))?;
    let embeddings = pending.get().await.map_err(|error| ApiError::failed(&error, "input"))?;
    let write = |embedding: Vec<f32>| match base64 {
        true => {
            let bytes: Vec<u8> = embedding.iter().flat_map(|number| number.to_le_bytes()).collect();
            json!(BASE64_STANDARD.encode(bytes))
        }
        false => json!(embedding),
    };
    let data = embeddings.into_iter().enumerate().map(
        |(index, embedding)| json!({"object": "embedding", "index": index, "embedding": write(embedding)}),
    );
    let body = json!({
        "object": "list",
        "data": data.collect::<Vec<_>>(),
        "model": app.options.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    });
    Ok(json_response(StatusCode::OK, &body))
}

impl Asked {
    fn read(embedding: &Embedding, fields: &Fields<'_>) -> Result<Self, ApiError> {
        let purpose = match fields.string("input_type")? {
            None | Some("document" | "passage") => Purpose::Document,
            Some("query") => Purpose::Query,
            Some(kind) => {
                let problem = format!("must be \"document\", \"passage\" or \"query\", but it is {kind:?}");
                return Err(ApiError::field("input_type", problem));
            }
        };
        let purpose = fields.string("instruction")?.map_or(purpose, Purpose::Instruction);
        let base64 = match fields.string("encoding_format")? {
            None | Some("float") => false,
            Some("base64") => true,
            Some(format) => {
                let problem = format!("must be \"float\" or \"base64\", but it is {format:?}");
                return Err(ApiError::field("encoding_format", problem));
            }
        };
        let most = i64::try_from(embedding.dimensions()).unwrap_or(i64::MAX);
        let dimensions = fields.integer("dimensions", 1..=most)?.map(|count| count as usize);
        Ok(Self { texts: texts(embedding, fields, purpose)?, dimensions, base64 })
    }
}

/// The tokens of each text: texts with what their purpose puts before them, lists of tokens as they are.
fn texts(
    embedding: &Embedding,
    fields: &Fields<'_>,
    purpose: Purpose<'_>,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let encode = |text: &str, path: &str| {
        let tokens = embedding.tokens(text, purpose);
        tokens.map_err(|error| ApiError::field(path, error))
    };
    let input = fields.get("input");
    let input =
        input.ok_or_else(|| ApiError::field("input", "is missing: give a text or a list of texts"))?;
    let items = match input {
        Value::String(text) => return Ok(vec![encode(text, "input")?]),
        Value::Array(items) if items.first().is_some_and(Value::is_number) => {
            return Ok(vec![token_ids(items, "input")?]);
        }
        Value::Array(items) => items,
        value => return Err(wrong_type("input", "a text, a list of texts or of token ids", value)),
    };
    if items.is_empty() || items.len() > MOST_TEXTS {
        let problem = format!("must have 1 to {MOST_TEXTS} texts, but it has {}", items.len());
        return Err(ApiError::field("input", problem));
    }
    let item = |(index, item): (usize, &Value)| {
        let path = format!("input[{index}]");
        match item {
            Value::String(text) => encode(text, &path),
            Value::Array(ids) => token_ids(ids, &path),
            value => Err(wrong_type(&path, "a text or a list of token ids", value)),
        }
    };
    items.iter().enumerate().map(item).collect()
}

fn token_ids(ids: &[Value], path: &str) -> Result<Vec<u32>, ApiError> {
    let id = |(index, value): (usize, &Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| wrong_type(&format!("{path}[{index}]"), "a token id", value))
    };
    if ids.is_empty() {
        return Err(ApiError::field(path, "has no tokens"));
    }
    ids.iter().enumerate().map(id).collect()
}
