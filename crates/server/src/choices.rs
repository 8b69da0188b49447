//! The answers to one request, as they are generated.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use russet_engine::{Answer, FinishReason, Output, Statistics, TokenLogprobs};

use crate::app::App;
use crate::error::ApiError;

/// What became final of a choice.
#[derive(Debug, Default)]
pub(crate) struct Piece {
    /// The index of the choice.
    pub(crate) choice: usize,
    pub(crate) text: String,
    /// Log-probabilities of the tokens of `text`, if they were asked for.
    pub(crate) logprobs: Vec<(u32, TokenLogprobs)>,
    /// Why the choice ended, if it did.
    pub(crate) end: Option<FinishReason>,
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) prompt: usize,
    pub(crate) cached: usize,
    pub(crate) generated: usize,
}

/// The answers that are being generated. Dropping them ends the request.
pub(crate) struct Choices {
    app: Arc<App>,
    request_id: String,
    /// The field that the prompt came from, for errors.
    prompt_field: &'static str,
    choices: Vec<Choice>,
    /// Choices of one prompt, whose tokens count once.
    per_prompt: usize,
    usage: Usage,
    began: Instant,
}

struct Choice {
    answer: Answer,
    logprobs: Logprobs,
    last_token: Option<u32>,
    last_token_at: Option<Instant>,
    /// The text so far, if it is to be logged.
    logged: Option<String>,
    ended: bool,
}

impl Choices {
    /// `per_prompt` answers to each prompt, those of a prompt beside each other.
    pub(crate) fn new(
        app: &Arc<App>,
        request_id: String,
        prompt_field: &'static str,
        answers: Vec<Answer>,
        per_prompt: usize,
    ) -> Self {
        let choice = |answer| Choice {
            answer,
            logprobs: Logprobs::default(),
            last_token: None,
            last_token_at: None,
            logged: app.options.log_prompts.then(String::new),
            ended: false,
        };
        Self {
            app: app.clone(),
            request_id,
            prompt_field,
            choices: answers.into_iter().map(choice).collect(),
            per_prompt: per_prompt.max(1),
            usage: Usage::default(),
            began: Instant::now(),
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.choices.len()
    }

    pub(crate) fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Tokens of the choices that ended.
    pub(crate) fn usage(&self) -> Usage {
        self.usage
    }

    /// What comes next, of whichever choice; none once all have ended.
    ///
    /// # Errors
    /// When a choice failed: the request is over then.
    pub(crate) async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        if self.choices.iter().all(|choice| choice.ended) {
            return None;
        }
        let (index, output) = poll_fn(|context| {
            for (index, choice) in self.choices.iter_mut().enumerate().filter(|(_, choice)| !choice.ended) {
                if let Poll::Ready(output) = pin!(choice.answer.next()).poll(context) {
                    return Poll::Ready((index, output));
                }
            }
            Poll::Pending
        })
        .await;
        Some(self.piece(index, output))
    }

    fn piece(&mut self, index: usize, output: Option<Output>) -> Result<Piece, ApiError> {
        let app = self.app.clone();
        let facts = app.engine.facts();
        let Some(choice) = self.choices.get_mut(index) else { return Ok(Piece::default()) };
        let (text, end) = match output {
            Some(Output::Token { token, text, logprobs }) => {
                let now = Instant::now();
                if let Some(last) = choice.last_token_at.replace(now) {
                    app.metrics.token_after((now - last).as_secs_f64());
                }
                choice.last_token = Some(token);
                if let (Some(logprobs), false) = (logprobs, facts.eos.all.contains(&token)) {
                    let bytes = facts.tokenizer.token_bytes(token).map_or(0, |bytes| bytes.len());
                    choice.logprobs.push(token, logprobs, bytes);
                }
                if let Some(logged) = &mut choice.logged {
                    logged.push_str(&text);
                }
                (text, None)
            }
            Some(Output::End { text, finish_reason, statistics }) => {
                choice.ended = true;
                if let Some(logged) = &mut choice.logged {
                    logged.push_str(&text);
                    tracing::info!(request_id = self.request_id, choice = index, text = logged, "answer");
                }
                self.finish(index, finish_reason, &statistics)?;
                (text, Some(finish_reason))
            }
            Some(Output::Failed(error)) => {
                tracing::error!(request_id = self.request_id, %error, "failed");
                return Err(ApiError::failed(&error, self.prompt_field));
            }
            None => return Err(ApiError::unavailable("the engine gave no answer")),
        };
        let Some(choice) = self.choices.get_mut(index) else { return Ok(Piece::default()) };
        // Tokens of a stop string are not part of the answer.
        let cut = end == Some(FinishReason::Stop)
            && choice.last_token.is_some_and(|token| !facts.eos.all.contains(&token));
        let logprobs = choice.logprobs.take(text.len(), end.is_some() && !cut);
        Ok(Piece { choice: index, text, logprobs, end })
    }

    fn finish(
        &mut self,
        index: usize,
        reason: FinishReason,
        statistics: &Statistics,
    ) -> Result<(), ApiError> {
        if reason == FinishReason::Cancelled {
            return Err(ApiError::unavailable("the server is shutting down, and cut the answer"));
        }
        if index.is_multiple_of(self.per_prompt) {
            self.usage.prompt += statistics.prompt_tokens;
            self.usage.cached += statistics.cached_tokens;
        }
        self.usage.generated += statistics.generated_tokens;
        self.app.metrics.answered(statistics);
        tracing::info!(
            request_id = self.request_id,
            choice = index,
            prompt_tokens = statistics.prompt_tokens,
            cached_tokens = statistics.cached_tokens,
            completion_tokens = statistics.generated_tokens,
            finish_reason = reason.name(),
            milliseconds = self.began.elapsed().as_millis() as u64,
            "answered"
        );
        Ok(())
    }
}

/// Log-probabilities that wait for the text of their tokens.
#[derive(Debug, Default)]
struct Logprobs {
    /// Where a token begins in the text, in bytes.
    waiting: VecDeque<(usize, u32, TokenLogprobs)>,
    tokens_end: usize,
    text_end: usize,
}

impl Logprobs {
    fn push(&mut self, token: u32, logprobs: TokenLogprobs, bytes: usize) {
        self.waiting.push_back((self.tokens_end, token, logprobs));
        self.tokens_end += bytes;
    }

    /// Those of tokens that begin within the text so far, `text` bytes more than before; `all` at its end.
    fn take(&mut self, text: usize, all: bool) -> Vec<(u32, TokenLogprobs)> {
        self.text_end += text;
        let final_ones = self.waiting.iter().take_while(|(start, ..)| all || *start < self.text_end).count();
        self.waiting.drain(..final_ones).map(|(_, token, logprobs)| (token, logprobs)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_come_with_the_text_of_their_tokens() {
        let mut logprobs = Logprobs::default();
        let entry = TokenLogprobs { logprob: 0.0, top: Vec::new() };
        let tokens =
            |taken: Vec<(u32, TokenLogprobs)>| taken.iter().map(|(token, _)| *token).collect::<Vec<_>>();
        // Two halves of a character: its text comes with the second one.
        logprobs.push(1, entry.clone(), 2);
        assert!(logprobs.take(0, false).is_empty());
        logprobs.push(2, entry.clone(), 2);
        assert_eq!(tokens(logprobs.take(4, false)), [1, 2]);
        // "end." of which "d." is held back, and turns out to be a stop string.
        logprobs.push(3, entry.clone(), 3);
        assert_eq!(tokens(logprobs.take(2, false)), [3]);
        logprobs.push(4, entry.clone(), 1);
        assert!(logprobs.take(0, false).is_empty());
        // Without a stop string, what was held back comes too.
        assert_eq!(tokens(logprobs.take(2, true)), [4]);
    }
}
