//! Text in and out of a language model: tokenization, chat templates, streaming detokenization, stop strings and grammars.
//!
//! - [`Tokenizer`] loads a checkpoint's `tokenizer.json` and its configuration, encodes prompts and renders chats.
//! - [`ChatTemplate`] runs an untrusted Jinja template in Hugging Face's environment, under limits.
//! - [`StreamingDetokenizer`] turns tokens into text while they arrive; what it returned is never taken back.
//! - [`StopMatcher`] finds stop strings in streamed text, wherever the text was split.
//! - [`Grammar`] says which tokens may come next in an answer that must follow a JSON schema, a regular expression or a
//!   grammar.
//! - [`EosTokenIds`] is the set of tokens that end a generation.
//!
//! The crate knows nothing of models or arrays. Files, templates, messages and token ids are untrusted input:
//! what is wrong with them comes back as an [`Error`].

mod detokenizer;
mod eos;
mod error;
mod grammar;
mod special_tokens;
mod stop;
mod template;
mod tokenizer;

pub use detokenizer::StreamingDetokenizer;
pub use eos::EosTokenIds;
pub use error::Error;
pub use grammar::{Constraint, Grammar, GrammarCompiler, GrammarSource, TokenMask};
pub use stop::{StopMatch, StopMatcher};
pub use template::{ChatTemplate, Limit};
pub use tokenizer::{ThinkingMarkers, Tokenizer};
