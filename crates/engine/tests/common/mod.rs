//! What the tests of the engine share.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use russet_engine::{
    Answer, Engine, EngineOptions, Error, FinishReason, LanguageModel, Output, Request, SubmitOptions,
    generate,
};
use russet_mlx::Array;
use russet_model::graphs::{Graph, Shape};
use russet_model::{Cache, Fidelity, LoadOptions, Model, Tier};
use russet_testing::{FixtureSpec, Format, Oracle, qwen3_5_fixture};
use serde_json::json;

/// Caches of all tokens, rings, and recurrent states; `None` without the oracle.
pub(crate) fn fixtures() -> Option<Vec<(&'static str, PathBuf)>> {
    let oracle = Oracle::get()?;
    let llama = |arch| FixtureSpec { seed: 11, ..FixtureSpec::new(arch) }.with("vocab_size", json!(320));
    let all =
        [("full", llama("llama")), ("sliding", llama("llama-sliding")), ("recurrent", qwen3_5_fixture())];
    let packed = |spec| FixtureSpec { format: Format::Affine { bits: 4, group: 32 }, ..spec };
    Some(all.into_iter().map(|(name, spec)| (name, oracle.fixture(&packed(spec)))).collect())
}

pub(crate) fn load(dir: &Path, tier: Tier) -> LanguageModel {
    LanguageModel::load(dir, &LoadOptions::new(Fidelity::Tier(tier))).unwrap()
}

pub(crate) fn start(dir: &Path, tier: Tier, options: EngineOptions) -> Engine {
    let dir = dir.to_owned();
    Engine::start(move || Ok(load(&dir, tier)), options).unwrap()
}

/// A fixed sequence of numbers below `bound`.
pub(crate) struct Numbers(pub(crate) u32);

impl Numbers {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) as usize % bound
    }

    pub(crate) fn prompt(&mut self, length: usize) -> Vec<u32> {
        (0..length).map(|_| self.below(256) as u32).collect()
    }
}

/// All tokens and the text of an answer, and how it ended.
pub(crate) fn collect(mut answer: Answer) -> (Vec<u32>, String, Result<FinishReason, Error>, usize) {
    let (mut tokens, mut all) = (Vec::new(), String::new());
    loop {
        match answer.blocking_next() {
            Some(Output::Token { token, text, .. }) => {
                tokens.push(token);
                all.push_str(&text);
            }
            Some(Output::End { text, finish_reason, statistics }) => {
                all.push_str(&text);
                assert!(answer.blocking_next().is_none());
                return (tokens, all, Ok(finish_reason), statistics.cached_tokens);
            }
            Some(Output::Failed(e)) => return (tokens, all, Err(e), 0),
            None => panic!("an answer without an end"),
        }
    }
}

pub(crate) fn submit(engine: &Engine, request: &Request) -> Answer {
    engine.submit(request.clone(), SubmitOptions::default()).unwrap()
}

/// What `generate` makes of a request alone.
pub(crate) fn alone(model: &LanguageModel, request: &Request) -> (Vec<u32>, String, FinishReason) {
    let made = generate(model, request, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    (made.tokens, made.text, made.finish_reason)
}

/// A graph that fails, or panics, when it meets a token.
struct Faulty {
    graph: Box<dyn Graph>,
    token: u32,
    panics: bool,
    failures: Arc<AtomicUsize>,
}

impl Graph for Faulty {
    fn forward(
        &self,
        tokens: &Array,
        cache: &mut Cache,
        each_layer: &mut dyn FnMut(&Array),
    ) -> russet_model::Result<Array> {
        if tokens.reshape([-1])?.to_vec::<u32>()?.contains(&self.token) {
            self.failures.fetch_add(1, Ordering::Relaxed);
            assert!(!self.panics, "a panic on purpose");
            return Err(russet_model::Error::Input("a fault on purpose".into()));
        }
        self.graph.forward(tokens, cache, each_layer)
    }

    fn logits(&self, hidden: &Array) -> russet_model::Result<Array> {
        self.graph.logits(hidden)
    }

    fn new_cache(&self) -> Cache {
        self.graph.new_cache()
    }

    fn shape(&self) -> Shape {
        self.graph.shape()
    }
}

/// An engine on such a graph, and how often it met the token.
pub(crate) fn start_faulty(dir: &Path, tier: Tier, token: u32, panics: bool) -> (Engine, Arc<AtomicUsize>) {
    let failures = Arc::new(AtomicUsize::new(0));
    let (dir, counted) = (dir.to_owned(), failures.clone());
    let around = move |model: Model| {
        model.with_graph(|graph| Box::new(Faulty { graph, token, panics, failures: counted }))
    };
    let load = move || {
        let LanguageModel { model, tokenizer, eos } = load(&dir, tier);
        Ok(LanguageModel { model: around(model), tokenizer, eos })
    };
    (Engine::start(load, EngineOptions::default()).unwrap(), failures)
}
