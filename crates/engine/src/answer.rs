use russet_text::{EosTokenIds, StopMatcher, StreamingDetokenizer};

use crate::FinishReason;

/// The text of an answer as its tokens come in: end tokens and stop strings end it, and nothing is given out that they
/// could still take back.
pub(crate) struct AnswerText {
    detokenizer: StreamingDetokenizer,
    stop: StopMatcher,
}

impl AnswerText {
    /// `continues_prompt` as in [`Request`](crate::Request).
    pub(crate) fn new(detokenizer: StreamingDetokenizer, stop: &[String], continues_prompt: bool) -> Self {
        Self {
            detokenizer: if continues_prompt { detokenizer.continuing() } else { detokenizer },
            stop: StopMatcher::new(stop.iter().cloned()),
        }
    }

    /// The text that became final with `token`, and whether it ended the answer.
    pub(crate) fn push(&mut self, token: u32, eos: &EosTokenIds) -> (String, Option<FinishReason>) {
        if eos.all.contains(&token) {
            return (String::new(), Some(FinishReason::Stop));
        }
        let found = self.stop.push(&self.detokenizer.push(token));
        (found.text, found.stop.map(|_| FinishReason::Stop))
    }

    /// What was held back, nothing after a stop string, and whether a stop string was in it.
    pub(crate) fn finish(&mut self) -> (String, Option<FinishReason>) {
        let found = self.stop.push(&self.detokenizer.finish());
        (found.text + &self.stop.finish(), found.stop.map(|_| FinishReason::Stop))
    }
}
