//! Calls of tools, in the markup of each family of models.
//!
//! A family writes calls between a start and an end marker. What stands between them is its payload: [`ToolParser`]
//! says where it is, and turns a whole payload into calls or refuses it. Finding markers in text that arrives in
//! pieces is [`AnswerParser`](crate::AnswerParser)'s part. What each family writes follows mlx-lm's `tool_parsers`.

mod gemma;
mod glm47;
mod grammar;
mod json_tools;
mod kimi_k2;
mod kimi_k3;
mod minicpm5;
mod minimax_m2;
mod mistral;
mod muse_spark;
mod pythonic;
mod qwen3_coder;
#[cfg(test)]
mod tests;
mod values;

use std::collections::HashMap;
use std::str::FromStr;

use serde_json::{Map, Value};

use crate::Error;

/// A call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ToolCall {
    /// The id that the model gave it; most families have none.
    pub(crate) id: Option<String>,
    pub(crate) name: String,
    /// The text of a JSON object; of families that write JSON, as the model wrote it.
    pub(crate) arguments: String,
}

impl ToolCall {
    fn new(name: &str, arguments: Map<String, Value>) -> Self {
        Self { id: None, name: name.to_owned(), arguments: Value::Object(arguments).to_string() }
    }
}

/// The types of the parameters of tools, for markup that does not tell a number from a string.
#[derive(Clone, Debug, Default)]
pub(crate) struct ToolSchemas(HashMap<String, Map<String, Value>>);

impl ToolSchemas {
    /// Of tools in OpenAI's shape: `{"type": "function", "function": {"name", "parameters"}}`.
    pub(crate) fn new(tools: &[Value]) -> Self {
        let schema = |tool: &Value| {
            let function = tool.get("function")?;
            let properties = function.get("parameters")?.get("properties")?.as_object()?;
            Some((function.get("name")?.as_str()?.to_owned(), properties.clone()))
        };
        Self(tools.iter().filter_map(schema).collect())
    }

    fn parameter(&self, tool: &str, name: &str) -> Option<&Value> {
        self.0.get(tool)?.get(name)
    }
}

/// What surrounds values in which an end marker is text like any other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quote {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
    /// A backslash takes the meaning from the character after it.
    pub(crate) escapes: bool,
}

const JSON_STRING: Quote = Quote { open: "\"", close: "\"", escapes: true };

/// The markup in which a family of models calls tools. Names are those of mlx-lm's `tool_parsers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ToolParser {
    /// `<minimax:tool_call>`, `<invoke name="f"><parameter name="p">v</parameter></invoke>`.
    MinimaxM2,
    /// `<|tool_call>call:f{p:<|"|>v<|"|>}<tool_call|>`.
    Gemma4,
    /// `<start_function_call>call:f{p:<escape>v<escape>}<end_function_call>`.
    FunctionGemma,
    /// As [`Glm47`](Self::Glm47), with tags that begin with `longcat_`.
    Longcat,
    /// `<tool_call>f<arg_key>p</arg_key><arg_value>v</arg_value></tool_call>`; also Laguna's.
    Glm47,
    /// `<|tool_call_start|>[f(p="v")]<|tool_call_end|>` of LFM2.
    Pythonic,
    /// `<tool_call><function=f><parameter=p>v</parameter></function></tool_call>` of Qwen3-Coder and Qwen3.5.
    Qwen3Coder,
    /// A section of `functions.f:0<|tool_call_argument_begin|>{"p": "v"}`.
    KimiK2,
    /// `<function name="f"><param name="p">v</param></function>`.
    Minicpm5,
    /// `[TOOL_CALLS]` with a JSON list, or with `f[ARGS]{"p": "v"}`.
    Mistral,
    /// `<atem:function_calls>`, `<atem:invoke name="f"><atem:parameter name="p">v</atem:parameter></atem:invoke>`.
    MuseSpark,
    /// `<tool_call>{"name": "f", "arguments": {"p": "v"}}</tool_call>` of Qwen3 and Hermes.
    JsonTools,
    /// `<|open|>tools<|sep|>` with a `call` element for each call.
    KimiK3,
}

impl ToolParser {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::MinimaxM2,
        Self::Gemma4,
        Self::FunctionGemma,
        Self::Longcat,
        Self::Glm47,
        Self::Pythonic,
        Self::Qwen3Coder,
        Self::KimiK2,
        Self::Minicpm5,
        Self::Mistral,
        Self::MuseSpark,
        Self::JsonTools,
        Self::KimiK3,
    ];

    /// mlx-lm's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::MinimaxM2 => "minimax_m2",
            Self::Gemma4 => "gemma4",
            Self::FunctionGemma => "function_gemma",
            Self::Longcat => "longcat",
            Self::Glm47 => "glm47",
            Self::Pythonic => "pythonic",
            Self::Qwen3Coder => "qwen3_coder",
            Self::KimiK2 => "kimi_k2",
            Self::Minicpm5 => "minicpm5",
            Self::Mistral => "mistral",
            Self::MuseSpark => "muse_spark",
            Self::JsonTools => "json_tools",
            Self::KimiK3 => "kimi_k3",
        }
    }

    /// The parser for a chat template, else for a vocabulary (`mlx_lm.tokenizer_utils._infer_tool_parser`).
    pub(crate) fn infer(template: Option<&str>, has_token: impl Fn(&str) -> bool) -> Option<Self> {
        let template = template.unwrap_or_default();
        let has = |text: &str| template.contains(text);
        let by_template = [
            (has("<minimax:tool_call>"), Self::MinimaxM2),
            (has("<|tool_call>") && has("<tool_call|>"), Self::Gemma4),
            (has("<start_function_call>"), Self::FunctionGemma),
            (has("<longcat_tool_call>"), Self::Longcat),
            (has("<arg_key>"), Self::Glm47),
            (has("<|tool_list_start|>") || has("<|tool_call_start|>"), Self::Pythonic),
            (has("<tool_call>\\n<function=") || has("<tool_call>\n<function="), Self::Qwen3Coder),
            (has("<|tool_calls_section_begin|>"), Self::KimiK2),
            (has("<function name=\"") && has("<param name=\""), Self::Minicpm5),
            (has("[TOOL_CALLS]"), Self::Mistral),
            (has("<atem:function_calls>"), Self::MuseSpark),
            (has("<tool_call>") && has("tool_call.name"), Self::JsonTools),
        ];
        let by_vocabulary = [
            (XTML_TOKENS.into_iter().all(&has_token), Self::KimiK3),
            (has_token("<|tool_call_start|>") && has_token("<|tool_call_end|>"), Self::Pythonic),
        ];
        by_template.into_iter().chain(by_vocabulary).find(|(found, _)| *found).map(|(_, parser)| parser)
    }

    /// What begins calls.
    pub(crate) fn start(self) -> &'static str {
        match self {
            Self::MinimaxM2 => "<minimax:tool_call>",
            Self::Gemma4 => "<|tool_call>",
            Self::FunctionGemma => "<start_function_call>",
            Self::Longcat => "<longcat_tool_call>",
            Self::Glm47 | Self::Qwen3Coder | Self::JsonTools => "<tool_call>",
            Self::Pythonic => "<|tool_call_start|>",
            Self::KimiK2 => "<|tool_calls_section_begin|>",
            Self::Minicpm5 => "<function name=",
            Self::Mistral => "[TOOL_CALLS]",
            Self::MuseSpark => "<atem:function_calls>",
            Self::KimiK3 => "<|open|>tools<|sep|>",
        }
    }

    /// What ends calls; empty where the end of the answer does.
    pub(crate) fn end(self) -> &'static str {
        match self {
            Self::MinimaxM2 => "</minimax:tool_call>",
            Self::Gemma4 => "<tool_call|>",
            Self::FunctionGemma => "<end_function_call>",
            Self::Longcat => "</longcat_tool_call>",
            Self::Glm47 | Self::Qwen3Coder | Self::JsonTools => "</tool_call>",
            Self::Pythonic => "<|tool_call_end|>",
            Self::KimiK2 => "<|tool_calls_section_end|>",
            Self::Minicpm5 => "</function>",
            Self::Mistral => "",
            Self::MuseSpark => "</atem:function_calls>",
            Self::KimiK3 => "<|close|>tools<|sep|>",
        }
    }

    pub(crate) fn quote(self) -> Option<Quote> {
        let quote = |open, close| Some(Quote { open, close, escapes: false });
        match self {
            Self::Gemma4 => quote(gemma::GEMMA4_STRING, gemma::GEMMA4_STRING),
            Self::FunctionGemma => quote(gemma::FUNCTION_GEMMA_STRING, gemma::FUNCTION_GEMMA_STRING),
            Self::KimiK2 | Self::JsonTools => Some(JSON_STRING),
            Self::Minicpm5 => quote(minicpm5::CDATA, minicpm5::CDATA_END),
            _ => None,
        }
    }

    /// Whether a payload shows that it is complete. At the end of an answer it is then one even without the end
    /// marker, which may be a token that ends answers.
    pub(crate) fn payload_has_end(self) -> bool {
        !matches!(self, Self::Glm47 | Self::Longcat | Self::Minicpm5)
    }

    /// The calls of a payload; none if it is malformed.
    pub(crate) fn parse(self, payload: &str, schemas: &ToolSchemas) -> Option<Vec<ToolCall>> {
        let calls = match self {
            Self::MinimaxM2 => minimax_m2::parse(payload, schemas)?,
            Self::Gemma4 => gemma::parse(payload, gemma::GEMMA4_STRING, false)?,
            Self::FunctionGemma => gemma::parse(payload, gemma::FUNCTION_GEMMA_STRING, true)?,
            Self::Longcat => glm47::parse(payload, &glm47::LONGCAT, schemas)?,
            Self::Glm47 => glm47::parse(payload, &glm47::GLM47, schemas)?,
            Self::Pythonic => pythonic::parse(payload)?,
            Self::Qwen3Coder => qwen3_coder::parse(payload, schemas)?,
            Self::KimiK2 => kimi_k2::parse(payload)?,
            Self::Minicpm5 => minicpm5::parse(payload, schemas)?,
            Self::Mistral => mistral::parse(payload)?,
            Self::MuseSpark => muse_spark::parse(payload)?,
            Self::JsonTools => json_tools::parse(payload)?,
            Self::KimiK3 => kimi_k3::parse(payload)?,
        };
        let named = calls.iter().all(|call| !call.name.is_empty());
        (named && !calls.is_empty()).then_some(calls)
    }
}

/// The special tokens of Kimi K3's markup.
pub(crate) const XTML_TOKENS: [&str; 4] = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"];

impl std::fmt::Display for ToolParser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ToolParser {
    type Err = Error;

    /// A parser by mlx-lm's name.
    fn from_str(name: &str) -> Result<Self, Error> {
        // mlx-lm's other name for the same markup.
        let canonical = if name == "laguna" { "glm47" } else { name };
        let known = Self::ALL.into_iter().find(|parser| parser.name() == canonical);
        known.ok_or_else(|| Error::UnknownToolParser { name: name.to_owned() })
    }
}

/// What stands between `open` and `close` at the beginning of `text`, after white space, and what follows.
fn element<'a>(text: &'a str, open: &str, close: &str) -> Option<(&'a str, &'a str)> {
    text.trim_start().strip_prefix(open)?.split_once(close)
}

/// A name with or without quotes around it.
fn unquoted(name: &str) -> &str {
    let name = name.trim();
    let within = |quote| name.strip_prefix(quote)?.strip_suffix(quote);
    within('"').or_else(|| within('\'')).unwrap_or(name)
}
