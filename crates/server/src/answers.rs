//! From a conversation to a prompt, and from the engine's answers to text, reasoning and calls of tools, whichever
//! protocol they are written in.

use russet_engine::{FinishReason, TokenLogprobs};
use russet_text::{AnswerEvent, AnswerParser, Grammar, ToolParser};
use serde_json::{Map, Value};

use crate::app::App;
use crate::choices::{Choices, Piece, Usage};
use crate::error::ApiError;
use crate::grammar::Wanted;
use crate::tools::ToolChoice;
use crate::{random, tools};

/// What a chat template makes a prompt of.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    /// Messages as templates know them: contents are texts, arguments of calls are objects.
    pub(crate) messages: Vec<Value>,
    /// Tools that may be called, in OpenAI's shape.
    pub(crate) tools: Vec<Value>,
    /// Which of them answers call.
    pub(crate) choice: ToolChoice,
    /// Whether an answer that must call tools calls one alone.
    pub(crate) one_call: bool,
    /// What answers have to be, if they are no calls.
    pub(crate) wanted: Option<Wanted>,
    /// Values for the template, over the server's.
    pub(crate) variables: Map<String, Value>,
}

/// A conversation for the engine.
#[derive(Debug)]
pub(crate) struct Rendered {
    /// The prompt.
    pub(crate) tokens: Vec<u32>,
    /// How to read the answers to it.
    pub(crate) parser: AnswerParser,
    /// What they have to be.
    pub(crate) grammar: Option<Grammar>,
}

impl Conversation {
    /// Renders the prompt. `field` is where the messages are in the body.
    ///
    /// Where a grammar says what the answer is, the template is told that the model does not reason, unless the request
    /// says something about reasoning. If the prompt opens reasoning nevertheless, it is free, and the grammar begins
    /// behind it.
    ///
    /// # Errors
    /// When the template refuses the messages, the model can't be offered tools, or a grammar can't be enforced.
    pub(crate) fn prompt(&self, app: &App, field: &str) -> Result<Rendered, ApiError> {
        let tokenizer = &app.engine.facts().tokenizer;
        let invalid = |error: russet_text::Error| ApiError::invalid(error.to_string()).param(field);
        let mut variables = app.options.template_variables.clone();
        variables.extend(self.variables.clone());
        let mut parser = AnswerParser::plain();
        let (mut offered, mut caller) = (None, None);
        if !self.tools.is_empty() && self.choice != ToolChoice::None {
            let refuse = |problem: &str| ApiError::field("tools", problem);
            if !tokenizer.takes_tools() {
                return Err(refuse("the chat template of this model has no place for tools"));
            }
            let format = match app.options.tool_parser {
                Some(format) => Some(format),
                None => tokenizer.tool_parser().map_err(|error| refuse(&error.to_string()))?,
            };
            let format = format.ok_or_else(|| {
                refuse("how this model calls tools is not known: tell the server with --tool-parser")
            })?;
            caller = Some(format);
            parser = parser.with_tools(format, &self.tools, || random::id("call_"));
            offered = Some(tools::with_types(&self.tools));
        }
        let mut grammar = self.grammar(app, caller)?;
        let says = |name| variables.get(name).is_some();
        if grammar.is_some() && !says("enable_thinking") && !says("reasoning_effort") {
            variables.insert("enable_thinking".into(), false.into());
        }
        let text = tokenizer
            .apply_chat_template(&self.messages, offered.as_deref(), true, &variables)
            .map_err(invalid)?;
        if let Some(markers) = tokenizer.thinking_markers() {
            parser = parser.with_thinking(markers, &text);
            if markers.opened_by(&text) {
                grammar = grammar.map(|grammar| grammar.after(&markers.end_tokens));
            }
        }
        Ok(Rendered { tokens: tokenizer.encode(&text, false).map_err(invalid)?, parser, grammar })
    }

    /// What answers have to be. `caller` is how the model calls the tools, if there are some.
    fn grammar(&self, app: &App, caller: Option<ToolParser>) -> Result<Option<Grammar>, ApiError> {
        let calls = |caller: ToolParser, tools: &[Value], several, otherwise| {
            let source = caller.grammar(&app.engine.facts().tokenizer, tools, several, otherwise);
            let compiled = app.grammars().and_then(|compiler| compiler.compile(&source?));
            compiled.map(Some).map_err(|error| ApiError::field("tools", error))
        };
        match (caller, &self.choice, &self.wanted) {
            (Some(caller), ToolChoice::Required, _) => calls(caller, &self.tools, !self.one_call, None),
            (Some(caller), ToolChoice::Named(name), _) => {
                let tools = self.tools.iter().filter(|tool| tool["function"]["name"] == name.as_str());
                calls(caller, &tools.cloned().collect::<Vec<_>>(), false, None)
            }
            (Some(caller), ToolChoice::Auto, Some(wanted)) => {
                calls(caller, &self.tools, !self.one_call, Some(&wanted.source))
            }
            (_, _, Some(wanted)) => wanted.compile(app).map(Some),
            (_, _, None) => Ok(None),
        }
    }
}

/// What became final of an answer.
#[derive(Debug)]
pub(crate) struct Part {
    /// The index of the choice.
    pub(crate) choice: usize,
    pub(crate) events: Vec<AnswerEvent>,
    /// Log-probabilities of tokens that became final, if they were asked for.
    pub(crate) logprobs: Vec<(u32, TokenLogprobs)>,
    /// How the choice ended, if it did.
    pub(crate) end: Option<End>,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) reason: FinishReason,
    /// Whether it calls tools.
    pub(crate) has_calls: bool,
}

impl End {
    /// OpenAI's name.
    pub(crate) fn name(self) -> &'static str {
        if self.has_calls && self.reason == FinishReason::Stop { "tool_calls" } else { self.reason.name() }
    }
}

/// The answers that are being generated, in parts. Dropping them ends the request.
pub(crate) struct Answers {
    choices: Choices,
    /// Of each choice, and whether it has called tools.
    parsers: Vec<(AnswerParser, bool)>,
    /// Of several calls in an answer, keep the first alone.
    one_call: bool,
}

impl Answers {
    /// `parser` is for each of them.
    pub(crate) fn new(choices: Choices, parser: &AnswerParser, one_call: bool) -> Self {
        let parsers = vec![(parser.clone(), false); choices.count()];
        Self { choices, parsers, one_call }
    }

    /// Tokens of the choices that ended.
    pub(crate) fn usage(&self) -> Usage {
        self.choices.usage()
    }

    /// What comes next, of whichever choice; none once all have ended.
    ///
    /// # Errors
    /// When a choice failed: the request is over then.
    pub(crate) async fn next(&mut self) -> Option<Result<Part, ApiError>> {
        let piece = self.choices.next().await?;
        Some(piece.map(|piece| self.part(piece)))
    }

    fn part(&mut self, piece: Piece) -> Part {
        let Piece { choice, text, logprobs, end } = piece;
        let Some((parser, has_calls)) = self.parsers.get_mut(choice) else {
            return Part { choice, events: Vec::new(), logprobs, end: None };
        };
        let mut events = parser.push(&text);
        if end.is_some() {
            events.extend(parser.finish());
        }
        if self.one_call {
            events.retain(|event| match event {
                AnswerEvent::ToolCallBegin { index, .. }
                | AnswerEvent::ToolCallArguments { index, .. }
                | AnswerEvent::ToolCallEnd { index } => *index == 0,
                _ => true,
            });
        }
        *has_calls |= events.iter().any(|event| matches!(event, AnswerEvent::ToolCallBegin { .. }));
        if events.contains(&AnswerEvent::Malformed) {
            let request_id = self.choices.request_id();
            tracing::warn!(request_id, choice, "a call of a tool is malformed, and given as text");
        }
        let end = end.map(|reason| End { reason, has_calls: *has_calls });
        Part { choice, events, logprobs, end }
    }
}
