use std::path::PathBuf;

use crate::ToolParser;
use crate::template::Limit;

/// What can go wrong between text and tokens.
///
/// Errors can be cloned: a broken chat template is found when the tokenizer is loaded, and reported each time the
/// template is asked for.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of the tokenizer is missing or unreadable.
    #[error("cannot read {}: {message}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        message: String,
    },

    /// A file of the tokenizer was read but does not hold what it should.
    #[error("{} is not usable: {message}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        message: String,
    },

    /// A field of a configuration that names tokens has the wrong type.
    #[error("{field} must be {expected}, but it is {found}")]
    Field {
        /// The field, with the file it stands in.
        field: String,
        /// The types it may have.
        expected: &'static str,
        /// The value found, shortened.
        found: String,
    },

    /// A schema, regular expression or grammar can't be used.
    #[error("{0}")]
    Grammar(String),

    /// An answer can't go on as its grammar demands.
    #[error("the answer cannot go on as its grammar demands: {0}")]
    Constraint(String),

    /// The tokenizer refused a text.
    #[error("the tokenizer cannot encode this text: {0}")]
    Encode(String),

    /// The tokenizer refused a sequence of tokens.
    #[error("the tokenizer cannot decode these tokens: {0}")]
    Decode(String),

    /// The checkpoint has no chat template to render messages with.
    #[error(
        "the checkpoint has no chat template (no chat_template.jinja and no `chat_template` in \
         tokenizer_config.json); give it a plain prompt instead"
    )]
    NoChatTemplate,

    /// The checkpoint has several chat templates and none of them is called `default`.
    #[error("the checkpoint has several chat templates but no default one; it has {}", names.join(", "))]
    NoDefaultChatTemplate {
        /// The names of the templates that exist.
        names: Vec<String>,
    },

    /// A chat cannot be rendered from no messages.
    #[error("a chat needs at least one message")]
    NoMessages,

    /// A message, tool or template variable cannot be given to a chat template.
    #[error("{what} {problem}")]
    Input {
        /// Which value, for example `messages[2]`.
        what: String,
        /// What is wrong with it.
        problem: String,
    },

    /// No parser of tool calls has this name.
    #[error("there is no tool parser {name:?}; there are {}", ToolParser::ALL.map(ToolParser::name).join(", "))]
    UnknownToolParser {
        /// The name.
        name: String,
    },

    /// A chat template is not valid Jinja.
    #[error("chat template `{template}` is not valid: {message}")]
    TemplateSyntax {
        /// The name of the template.
        template: String,
        /// What is wrong, with its line.
        message: String,
    },

    /// A chat template refused the messages by calling `raise_exception`.
    #[error("chat template `{template}` refused the messages: {message}")]
    TemplateRaised {
        /// The name of the template.
        template: String,
        /// What the template said.
        message: String,
    },

    /// A chat template failed while it ran.
    #[error("chat template `{template}` failed: {message}")]
    TemplateRender {
        /// The name of the template.
        template: String,
        /// What is wrong, with its line.
        message: String,
    },

    /// A chat template exceeded what a template may use.
    #[error("chat template `{template}` was stopped: it exceeded the limit of {limit}")]
    TemplateLimit {
        /// The name of the template.
        template: String,
        /// The limit.
        limit: Limit,
    },
}
