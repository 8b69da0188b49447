//! OpenAI's protocol: chat completions, completions, embeddings, models.

mod chat;
mod completions;
mod embeddings;
mod logprobs;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use russet_engine::{Answer, SubmitOptions, TokenLogprobs};
use russet_text::{AnswerEvent, AnswerParser, Grammar};
use serde_json::{Map, Value, json};

pub(crate) use self::embeddings::embeddings;

use crate::answers::{Answers, End, Part};
use crate::app::{App, blocking, check_model, json_response, no_model, now, object, read};
use crate::choices::{Choices, Usage};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::options::Options;
use crate::random;

/// An endpoint that generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    Chat,
    Completions,
}

impl Endpoint {
    /// The field that the prompt comes from.
    fn prompt_field(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Completions => "prompt",
        }
    }
}

/// A request that was understood.
#[derive(Debug)]
struct Prepared {
    prompts: Vec<Prompt>,
    options: Options,
    /// How many of the most likely tokens to name, where log-probabilities are asked for.
    logprobs: Option<usize>,
    /// What answers have to be.
    grammar: Option<Grammar>,
    /// How to read the answers.
    parser: AnswerParser,
    /// An answer may have one call of a tool, not several.
    one_call: bool,
}

#[derive(Debug)]
struct Prompt {
    tokens: Vec<u32>,
    /// Text that answers begin with.
    echo: String,
}

/// `POST /v1/chat/completions`.
pub(crate) async fn chat_completions(State(app): State<Arc<App>>, request: Request) -> Response {
    generate(app, Endpoint::Chat, request).await.unwrap_or_else(IntoResponse::into_response)
}

/// `POST /v1/completions`.
pub(crate) async fn completions(State(app): State<Arc<App>>, request: Request) -> Response {
    generate(app, Endpoint::Completions, request).await.unwrap_or_else(IntoResponse::into_response)
}

async fn generate(app: Arc<App>, endpoint: Endpoint, request: Request) -> Result<Response, ApiError> {
    let (body, request_id) = read(&app, request).await?;
    if app.is_stopping() {
        return Err(ApiError::unavailable("the server is shutting down"));
    }
    let deadline = app.options.request_timeout.map(|timeout| Instant::now() + timeout);
    let preparing = app.clone();
    let prepared = blocking(move || prepare(&preparing, endpoint, &body)).await?;
    let Prepared { prompts, options, logprobs, grammar, parser, one_call } = prepared;
    if app.options.log_prompts {
        for prompt in &prompts {
            let text = app.engine.facts().tokenizer.decode(&prompt.tokens, false);
            tracing::info!(request_id, text = text.unwrap_or_default(), "prompt");
        }
    }
    let (stream, include_usage, n) = (options.stream, options.include_usage, options.n);
    let submit_options = SubmitOptions { top_logprobs: logprobs, deadline, grammar };
    let (echoes, answers) = submit(&app, endpoint, prompts, &options, &submit_options)?;
    let choices = Choices::new(&app, request_id, endpoint.prompt_field(), answers, n);
    let answers = Answers::new(choices, &parser, one_call);
    let format = Format::new(app.clone(), endpoint, logprobs.is_some(), echoes);
    if stream {
        return Ok(stream_response(format, answers, include_usage));
    }
    format.whole(answers).await.map(|body| json_response(StatusCode::OK, &body))
}

/// From bytes to tokens.
fn prepare(app: &App, endpoint: Endpoint, body: &[u8]) -> Result<Prepared, ApiError> {
    let body = object(body)?;
    let fields = Fields::new(&body);
    check_model(app, &fields)?;
    let options = Options::read(&fields, &app.options)?;
    let (mut parser, mut one_call, mut grammar) = (AnswerParser::plain(), false, None);
    let (prompts, logprobs) = match endpoint {
        Endpoint::Chat => {
            let logprobs = chat::logprobs(&fields)?;
            let conversation = chat::conversation(&fields)?;
            one_call = conversation.one_call;
            let rendered = conversation.prompt(app, endpoint.prompt_field())?;
            (parser, grammar) = (rendered.parser, rendered.grammar);
            (vec![Prompt { tokens: rendered.tokens, echo: String::new() }], logprobs)
        }
        Endpoint::Completions => {
            let logprobs = completions::logprobs(&fields)?;
            if let Some(wanted) = crate::grammar::read(&fields)? {
                grammar = Some(wanted.compile(app)?);
            }
            (completions::prompts(app, &fields, options.n)?, logprobs)
        }
    };
    let context = app.engine.facts().shape.max_positions.map(|positions| positions.max(0) as usize);
    if let Some(context) = context
        && let Some(prompt) = prompts.iter().find(|prompt| prompt.tokens.len() >= context)
    {
        let length = prompt.tokens.len();
        let message = format!(
            "the prompt has {length} tokens, which fills the model's context of {context}: shorten it"
        );
        return Err(ApiError::invalid(message)
            .param(endpoint.prompt_field())
            .code("context_length_exceeded"));
    }
    Ok(Prepared { prompts, options, logprobs, grammar, parser, one_call })
}

/// Hands all answers of a request to the engine, or none; with the text that each begins with.
fn submit(
    app: &App,
    endpoint: Endpoint,
    prompts: Vec<Prompt>,
    options: &Options,
    submit_options: &SubmitOptions,
) -> Result<(Vec<String>, Vec<Answer>), ApiError> {
    let (mut echoes, mut answers) = (Vec::new(), Vec::new());
    for Prompt { tokens, echo } in prompts {
        for _ in 0..options.n {
            let request = russet_engine::Request {
                prompt: tokens.clone(),
                sampling: options.sampling.clone(),
                seed: options.seed(answers.len()),
                max_tokens: options.max_tokens,
                stop: options.stop.clone(),
                continues_prompt: endpoint == Endpoint::Completions,
                prefill_chunk: None,
            };
            let submitted = app.engine.submit(request, submit_options.clone());
            answers.push(submitted.map_err(|e| ApiError::refused(e, endpoint.prompt_field()))?);
            echoes.push(echo.clone());
        }
    }
    Ok((echoes, answers))
}

/// How the answers of one request are written.
struct Format {
    app: Arc<App>,
    endpoint: Endpoint,
    id: String,
    created: u64,
    has_logprobs: bool,
    /// What each answer begins with.
    echoes: Vec<String>,
    /// The length of the text of each answer so far, in characters.
    lengths: Vec<usize>,
}

impl Format {
    fn new(app: Arc<App>, endpoint: Endpoint, has_logprobs: bool, echoes: Vec<String>) -> Self {
        let prefix = match endpoint {
            Endpoint::Chat => "chatcmpl-",
            Endpoint::Completions => "cmpl-",
        };
        let lengths = echoes.iter().map(|echo| echo.chars().count()).collect();
        Self { app, endpoint, id: random::id(prefix), created: now(), has_logprobs, echoes, lengths }
    }

    /// What every object begins with.
    fn envelope(&self, object: &str, choices: Vec<Value>) -> Map<String, Value> {
        let facts = self.app.engine.facts();
        let fingerprint = format!("russet-{}-{}", env!("CARGO_PKG_VERSION"), facts.tier);
        let mut envelope = Map::new();
        envelope.insert("id".into(), json!(self.id));
        envelope.insert("object".into(), json!(object));
        envelope.insert("created".into(), json!(self.created));
        envelope.insert("model".into(), json!(self.app.options.model));
        envelope.insert("system_fingerprint".into(), json!(fingerprint));
        envelope.insert("choices".into(), Value::Array(choices));
        envelope
    }

    /// The log-probabilities of a part of an answer, null if none were asked for. `offset` is where the part begins.
    fn logprobs(&self, entries: &[(u32, TokenLogprobs)], offset: usize) -> Value {
        let tokenizer = &self.app.engine.facts().tokenizer;
        match self.endpoint {
            _ if !self.has_logprobs => Value::Null,
            Endpoint::Chat => logprobs::chat(tokenizer, entries),
            Endpoint::Completions => logprobs::completions(tokenizer, entries, offset),
        }
    }

    /// All answers in one object.
    async fn whole(self, mut answers: Answers) -> Result<Value, ApiError> {
        let choice = |echo: &String| Choice { text: echo.clone(), ..Choice::default() };
        let mut choices: Vec<Choice> = self.echoes.iter().map(choice).collect();
        while let Some(part) = answers.next().await {
            let part = part?;
            if let Some(choice) = choices.get_mut(part.choice) {
                choice.extend(part);
            }
        }
        let objects = choices.into_iter().zip(&self.lengths).enumerate().map(|(index, (choice, offset))| {
            let logprobs = self.logprobs(&choice.logprobs, *offset);
            let reason = choice.end.map(End::name);
            match self.endpoint {
                Endpoint::Chat => json!({
                    "index": index,
                    "message": choice.message(),
                    "logprobs": logprobs,
                    "finish_reason": reason,
                }),
                Endpoint::Completions => {
                    json!({"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": reason})
                }
            }
        });
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion",
            Endpoint::Completions => "text_completion",
        };
        let mut body = self.envelope(object, objects.collect());
        body.insert("usage".into(), usage(answers.usage()));
        Ok(Value::Object(body))
    }

    /// A chunk of a stream, with one choice or none.
    fn chunk(&self, choice: Option<Value>) -> Map<String, Value> {
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completions => "text_completion",
        };
        self.envelope(object, choice.into_iter().collect())
    }

    /// The chunks that begin a stream.
    fn beginning(&self) -> Vec<Map<String, Value>> {
        let first = |(index, echo): (usize, &String)| match self.endpoint {
            Endpoint::Chat => Some(json!({
                "index": index,
                "delta": {"role": "assistant", "content": "", "refusal": null},
                "logprobs": null,
                "finish_reason": null,
            })),
            Endpoint::Completions if echo.is_empty() => None,
            Endpoint::Completions => {
                Some(json!({"index": index, "text": echo, "logprobs": null, "finish_reason": null}))
            }
        };
        let first = self.echoes.iter().enumerate().filter_map(first);
        first.map(|choice| self.chunk(Some(choice))).collect()
    }

    /// The chunks of what became final.
    fn chunks(&mut self, part: Part) -> Vec<Map<String, Value>> {
        let Part { choice: index, events, logprobs: entries, end } = part;
        let offset = self.lengths.get(index).copied().unwrap_or(0);
        let mut logprobs = if entries.is_empty() { Value::Null } else { self.logprobs(&entries, offset) };
        let mut choices = Vec::new();
        match self.endpoint {
            Endpoint::Chat => {
                let mut push = |delta: Value, reason: Option<&str>| {
                    // They belong to all chunks of the part, and are told once.
                    let logprobs = logprobs.take();
                    choices.push(json!({
                        "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason,
                    }));
                };
                events.into_iter().filter_map(delta).for_each(|delta| push(delta, None));
                if let Some(end) = end {
                    push(json!({}), Some(end.name()));
                } else if !entries.is_empty() && choices.is_empty() {
                    choices.push(json!({
                        "index": index, "delta": {}, "logprobs": logprobs, "finish_reason": null,
                    }));
                }
            }
            Endpoint::Completions => {
                let text: String = events.into_iter().filter_map(text_of).collect();
                if let Some(length) = self.lengths.get_mut(index) {
                    *length += text.chars().count();
                }
                if !text.is_empty() || !entries.is_empty() || end.is_some() {
                    let reason = end.map(End::name);
                    choices.push(json!({
                        "index": index, "text": text, "logprobs": logprobs, "finish_reason": reason,
                    }));
                }
            }
        }
        choices.into_iter().map(|choice| self.chunk(Some(choice))).collect()
    }
}

fn text_of(event: AnswerEvent) -> Option<String> {
    match event {
        AnswerEvent::Text(text) => Some(text),
        _ => None,
    }
}

/// What an event adds to a message, if it does.
fn delta(event: AnswerEvent) -> Option<Value> {
    Some(match event {
        AnswerEvent::Text(text) => json!({"content": text}),
        AnswerEvent::Reasoning(text) => json!({"reasoning_content": text}),
        AnswerEvent::ToolCallBegin { index, id, name } => {
            let function = json!({"name": name, "arguments": ""});
            json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]})
        }
        AnswerEvent::ToolCallArguments { index, fragment } => {
            json!({"tool_calls": [{"index": index, "function": {"arguments": fragment}}]})
        }
        AnswerEvent::ToolCallEnd { .. } | AnswerEvent::Malformed => return None,
    })
}

/// A whole answer.
#[derive(Debug, Default)]
struct Choice {
    text: String,
    reasoning: String,
    /// Id, name and arguments.
    calls: Vec<(String, String, String)>,
    logprobs: Vec<(u32, TokenLogprobs)>,
    end: Option<End>,
}

impl Choice {
    fn extend(&mut self, part: Part) {
        for event in part.events {
            match event {
                AnswerEvent::Text(more) => self.text += &more,
                AnswerEvent::Reasoning(more) => self.reasoning += &more,
                AnswerEvent::ToolCallBegin { id, name, .. } => self.calls.push((id, name, String::new())),
                AnswerEvent::ToolCallArguments { fragment, .. } => {
                    if let Some((.., arguments)) = self.calls.last_mut() {
                        *arguments += &fragment;
                    }
                }
                AnswerEvent::ToolCallEnd { .. } | AnswerEvent::Malformed => {}
            }
        }
        self.logprobs.extend(part.logprobs);
        self.end = part.end.or(self.end);
    }

    /// The message of a chat completion.
    fn message(&self) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), json!("assistant"));
        let nothing = self.text.is_empty() && !self.calls.is_empty();
        message.insert("content".into(), if nothing { Value::Null } else { json!(self.text) });
        if !self.reasoning.is_empty() {
            message.insert("reasoning_content".into(), json!(self.reasoning));
        }
        if !self.calls.is_empty() {
            let calls = self.calls.iter().map(|(id, name, arguments)| {
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            });
            message.insert("tool_calls".into(), calls.collect());
        }
        message.insert("refusal".into(), Value::Null);
        Value::Object(message)
    }
}

fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    })
}

/// A stream of server-sent events. Dropping it, as a client that leaves does, ends the request.
struct Stream {
    format: Format,
    answers: Answers,
    include_usage: bool,
    ready: VecDeque<Event>,
    ended: bool,
}

impl Stream {
    fn push(&mut self, mut chunk: Map<String, Value>) {
        if self.include_usage {
            chunk.entry("usage").or_insert(Value::Null);
        }
        self.ready.push_back(Event::default().data(Value::Object(chunk).to_string()));
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            match self.answers.next().await {
                Some(Ok(part)) => {
                    for chunk in self.format.chunks(part) {
                        self.push(chunk);
                    }
                }
                Some(Err(error)) => {
                    self.ready.push_back(Event::default().data(error.body().to_string()));
                    self.ended = true;
                }
                None => {
                    if self.include_usage {
                        let mut chunk = self.format.chunk(None);
                        chunk.insert("usage".into(), usage(self.answers.usage()));
                        self.push(chunk);
                    }
                    self.ready.push_back(Event::default().data("[DONE]"));
                    self.ended = true;
                }
            }
        }
    }
}

fn stream_response(format: Format, answers: Answers, include_usage: bool) -> Response {
    let keep_alive = KeepAlive::new().interval(format.app.options.keep_alive).text("keep-alive");
    let beginning = format.beginning();
    let mut stream = Stream { format, answers, include_usage, ready: VecDeque::new(), ended: false };
    for chunk in beginning {
        stream.push(chunk);
    }
    let events = stream::unfold(stream, async |mut stream| {
        let event = stream.next().await?;
        Some((Ok::<_, Infallible>(event), stream))
    });
    // Proxies must not hold events back.
    ([("x-accel-buffering", "no")], Sse::new(events).keep_alive(keep_alive)).into_response()
}

/// `GET /v1/models`.
pub(crate) async fn models(State(app): State<Arc<App>>) -> Response {
    json_response(StatusCode::OK, &json!({"object": "list", "data": [model_object(&app)]}))
}

/// `GET /v1/models/{id}`.
pub(crate) async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response {
    if app.options.is_model(&id) {
        return json_response(StatusCode::OK, &model_object(&app));
    }
    no_model(&app, &id).into_response()
}

fn model_object(app: &App) -> Value {
    let facts = app.engine.facts();
    json!({
        "id": app.options.model,
        "object": "model",
        "created": app.created,
        "owned_by": "russet",
        "context_length": facts.shape.max_positions,
        "fidelity": facts.tier.to_string(),
    })
}
