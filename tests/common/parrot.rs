//! A model that says what it is told.

use std::cell::RefCell;

use russet_engine::EngineOptions;
use russet_mlx::Array;
use russet_model::Cache;
use russet_model::graphs::{Graph, Shape};
use russet_server::ServerOptions;

use super::in_process::InProcess;

/// Answers with the tokens that stand between the last control characters 1 and 2 of the prompt. It is for one request
/// at a time, whose prompt is one chunk.
pub(crate) struct Parrot {
    inner: Box<dyn Graph>,
    end_token: u32,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    answer: Vec<u32>,
    /// Which token of the answer comes after those that were read; none before the prompt's last token, which is read
    /// alone.
    next: Option<usize>,
}

impl Graph for Parrot {
    fn forward(
        &self,
        tokens: &Array,
        cache: &mut Cache,
        each_layer: &mut dyn FnMut(&Array),
    ) -> russet_model::Result<Array> {
        let read = tokens.reshape([-1])?.to_vec::<u32>()?;
        let mut state = self.state.borrow_mut();
        if read.len() > 1 {
            // The second mark may be the last token, which is not among these.
            let begin = read.iter().rposition(|token| *token == 1).map_or(read.len(), |at| at + 1);
            let answer = read[begin..].iter().copied().take_while(|token| *token != 2).collect();
            *state = State { answer, next: None };
        } else {
            state.next = Some(state.next.map_or(0, |next| next + 1));
        }
        drop(state);
        self.inner.forward(tokens, cache, each_layer)
    }

    fn logits(&self, hidden: &Array) -> russet_model::Result<Array> {
        let state = self.state.borrow();
        let token = state.next.and_then(|next| state.answer.get(next).copied()).unwrap_or(self.end_token);
        let (positions, vocabulary) = (hidden.shape()[1], self.shape().vocabulary);
        let mut logits = vec![0.0_f32; (positions * vocabulary) as usize];
        logits.iter_mut().skip(token as usize).step_by(vocabulary as usize).for_each(|logit| *logit = 50.0);
        Ok(Array::from_slice(&logits, [1, positions, vocabulary])?)
    }

    fn new_cache(&self) -> Cache {
        self.inner.new_cache()
    }

    fn shape(&self) -> Shape {
        self.inner.shape()
    }
}

/// A server on the checkpoint of `dir` with such a model.
pub(crate) fn serve(dir: String, options: ServerOptions) -> InProcess {
    let engine =
        EngineOptions { width: 1, prefill_chunk: Some(4096), prompt_cache: 0, ..EngineOptions::default() };
    let around = |inner, tokenizer: &russet_text::Tokenizer| -> Box<dyn Graph> {
        let end_token = tokenizer.eos_token_id().unwrap();
        Box::new(Parrot { inner, end_token, state: RefCell::default() })
    };
    InProcess::start(dir, around, engine, options)
}
