use crate::Error;
use crate::tools::XTML_TOKENS;

/// Kimi K3's markup.
const XTML_THINK: &str = "<|open|>think<|sep|>";

/// The marks around a model's reasoning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThinkingMarkers {
    /// The text that opens it.
    pub start: String,
    /// The text that closes it.
    pub end: String,
    /// `start` as tokens; often only one.
    pub start_tokens: Vec<u32>,
    /// `end` as tokens.
    pub end_tokens: Vec<u32>,
}

impl ThinkingMarkers {
    /// Those whose tokens a vocabulary has (`mlx_lm.tokenizer_utils._infer_thinking`).
    pub(crate) fn find(
        id: impl Fn(&str) -> Option<u32>,
        encode: impl Fn(&str) -> Result<Vec<u32>, Error>,
    ) -> Result<Option<Self>, Error> {
        let single = [
            ("<think>", "</think>"),
            ("<longcat_think>", "</longcat_think>"),
            ("<|think:start|>", "<|think:end|>"),
        ];
        for (start, end) in single {
            if let (Some(start_token), Some(end_token)) = (id(start), id(end)) {
                let (start_tokens, end_tokens) = (vec![start_token], vec![end_token]);
                return Ok(Some(Self { start: start.into(), end: end.into(), start_tokens, end_tokens }));
            }
        }
        let has = |token: &str| id(token).is_some();
        let (start, end) = if has("<|channel>") && has("<channel|>") {
            ("<|channel>thought", "<channel|>")
        } else if XTML_TOKENS.into_iter().all(has) {
            (XTML_THINK, "<|close|>think<|sep|>")
        } else {
            return Ok(None);
        };
        let (start_tokens, end_tokens) = (encode(start)?, encode(end)?);
        Ok(Some(Self { start: start.into(), end: end.into(), start_tokens, end_tokens }))
    }

    /// Whether an answer to this prompt begins as reasoning, because the prompt has opened it.
    pub fn opened_by(&self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(&self.start)
    }

    /// Further markers of this markup, which are no part of the text.
    pub(crate) fn structure(&self) -> &'static [&'static str] {
        match self.start.as_str() {
            XTML_THINK => &["<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"],
            _ => &[],
        }
    }
}
