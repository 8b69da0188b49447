//! Text in and out of a language model: tokenization, chat templates, streaming detokenization, stop strings and grammars.
//!
//! - [`Tokenizer`] loads a checkpoint's `tokenizer.json` and its configuration, encodes prompts and renders chats.
//! - [`ChatTemplate`] runs an untrusted Jinja template in Hugging Face's environment, under limits.
//! - [`StreamingDetokenizer`] turns tokens into text while they arrive; what it returned is never taken back.
//! - [`StopMatcher`] finds stop strings in streamed text, wherever the text was split.
//! - [`Grammar`] says which tokens may come next in an answer that must follow a JSON schema, a regular expression or a
//!   grammar.
//! - [`AnswerParser`] turns the text of an answer, while it arrives, into text, reasoning and calls of tools.
//! - [`EosTokenIds`] is the set of tokens that end a generation.
//!
//! The crate knows nothing of models or arrays. Files, templates, messages and token ids are untrusted input:
//! what is wrong with them comes back as an [`Error`].

mod answer;
mod detokenizer;
mod eos;
mod error;
mod grammar;
mod reasoning;
mod special_tokens;
mod stop;
mod template;
mod tokenizer;
mod tools;

pub use answer::{AnswerEvent, AnswerParser};
pub use detokenizer::StreamingDetokenizer;
pub use eos::EosTokenIds;
pub use error::Error;
pub use grammar::{Constraint, Grammar, GrammarCompiler, GrammarSource, TokenMask};
pub use reasoning::ThinkingMarkers;
pub use stop::{StopMatch, StopMatcher};
pub use template::{ChatTemplate, Limit};
pub use tokenizer::Tokenizer;
pub use tools::ToolParser;
