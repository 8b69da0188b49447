//! The engine: a model on a thread of its own, to which any number of others send requests.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use russet_mlx::memory;
use russet_model::graphs::Shape;
use russet_model::{Model, Tier};
use russet_text::{EosTokenIds, Grammar, Tokenizer};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use crate::embed::Embedding;
use crate::generate::room_in_context;
use crate::histogram::Histogram;
use crate::memory_plan::MemoryPlan;
use crate::prompt_cache::PromptCacheStatistics;
use crate::scheduler::{Command, Scheduler};
use crate::{Error, FinishReason, LanguageModel, Request, Result, Sampling, Statistics};

/// How requests share the model.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Most requests that run at once.
    pub width: usize,
    /// Most requests that wait; more are refused.
    pub queue: usize,
    /// Most prompt tokens that are read between two steps of the requests that generate, and tokens of a block of the
    /// prompt cache; where absent, 512 with MLX and the kernels' default with them.
    pub prefill_chunk: Option<usize>,
    /// Bytes of states that are kept for prompts that begin alike; 0 keeps none.
    pub prompt_cache: usize,
    /// Keep the states of answers too, for prompts that go on after them. A generated token's state has other last bits
    /// than the same token's in a prompt, so answers then depend on what was asked before.
    pub cache_answers: bool,
    /// Bytes that weights and states may take in all; what the machine has, where absent.
    pub memory_budget: Option<usize>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            width: 32,
            queue: 256,
            prefill_chunk: None,
            prompt_cache: 1 << 30,
            cache_answers: false,
            memory_budget: None,
        }
    }
}

impl EngineOptions {
    /// Tokens of a chunk.
    pub fn chunk(&self, model: &Model) -> usize {
        self.prefill_chunk.unwrap_or_else(|| model.numerics().default_prefill_chunk().min(512))
    }

    /// What sequences need with these options, and what there is.
    pub fn memory_plan(&self, model: &Model) -> MemoryPlan {
        MemoryPlan::new(model, self.chunk(model), self.memory_budget)
    }
}

/// What a request says beside what is generated.
#[derive(Clone, Debug, Default)]
pub struct SubmitOptions {
    /// Send the log-probability of each token, and this many of the most likely ones.
    pub top_logprobs: Option<usize>,
    /// When the request ends with [`Error::Deadline`], whatever it has.
    pub deadline: Option<Instant>,
    /// What the answer has to be, and it is once it ends with [`FinishReason::Stop`] but for stop strings. Made for the
    /// tokenizer of this model.
    pub grammar: Option<Grammar>,
}

/// What the answer to a request is made of.
#[derive(Debug)]
pub enum Output {
    /// A token was generated, and this text, possibly empty, is final.
    Token {
        /// The token.
        token: u32,
        /// Text that became final.
        text: String,
        /// Its log-probability, if that was asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// The answer is complete.
    End {
        /// Text that had been held back.
        text: String,
        /// Why it ended.
        finish_reason: FinishReason,
        /// Times and counts.
        statistics: Statistics,
    },
    /// The request failed; nothing follows.
    Failed(Error),
}

/// Log-probabilities in nats, after the processors, at the position of a token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// That of the token.
    pub logprob: f32,
    /// The most likely tokens, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// Why a request was not taken.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The request can't be run by this model.
    #[error(transparent)]
    Invalid(Error),
    /// As many requests wait as may.
    #[error("{0} requests are waiting, which is the limit: try again later")]
    Busy(usize),
    /// It would take more memory than there is.
    #[error("{0}")]
    Memory(String),
    /// The engine does not run any more.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

/// An answer that is being generated. Dropping it ends the request at the next step or chunk.
#[derive(Debug)]
pub struct Answer {
    output: UnboundedReceiver<Output>,
    shared: Arc<Shared>,
    ended: bool,
}

impl Answer {
    /// The next part, for asynchronous callers; none after [`Output::End`] and [`Output::Failed`].
    pub async fn next(&mut self) -> Option<Output> {
        let output = self.output.recv().await;
        self.seen(output)
    }

    /// [`Answer::next`], blocking the thread.
    pub fn blocking_next(&mut self) -> Option<Output> {
        let output = self.output.blocking_recv();
        self.seen(output)
    }

    /// A request that a stopped engine left behind has failed.
    fn seen(&mut self, output: Option<Output>) -> Option<Output> {
        if self.ended {
            return None;
        }
        let output = output.unwrap_or_else(|| Output::Failed(Error::Engine(self.shared.failure())));
        self.ended = matches!(output, Output::End { .. } | Output::Failed(_));
        Some(output)
    }
}

/// A request on its way to the engine's thread.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) request: Request,
    pub(crate) top_logprobs: Option<usize>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) grammar: Option<Grammar>,
    pub(crate) arrived: Instant,
    pub(crate) output: UnboundedSender<Output>,
}

impl Submission {
    pub(crate) fn send(&self, output: Output) {
        // Who does not listen any more is found by `Scheduler::cancel`.
        let _ = self.output.send(output);
    }

    pub(crate) fn fail(&self, error: Error) {
        self.send(Output::Failed(error));
    }
}

/// Texts on their way to the engine's thread.
#[derive(Debug)]
pub(crate) struct EmbeddingSubmission {
    /// The tokens of those that are left.
    pub(crate) texts: VecDeque<Vec<u32>>,
    pub(crate) dimensions: Option<usize>,
    pub(crate) deadline: Option<Instant>,
    /// The embeddings of the others.
    pub(crate) done: Vec<Vec<f32>>,
    pub(crate) output: oneshot::Sender<Result<Vec<Vec<f32>>>>,
}

impl EmbeddingSubmission {
    pub(crate) fn end(self, result: Result<()>) {
        // Who does not listen any more is found by `Scheduler::cancel`.
        let _ = self.output.send(result.map(|()| self.done));
    }
}

/// Embeddings that are being computed. Dropping it ends the request after the text it is at.
#[derive(Debug)]
pub struct Embeddings {
    output: oneshot::Receiver<Result<Vec<Vec<f32>>>>,
    shared: Arc<Shared>,
}

impl Embeddings {
    /// One for each text, in order.
    ///
    /// # Errors
    /// When the model or the engine fails, and when the deadline is over.
    pub async fn get(self) -> Result<Vec<Vec<f32>>> {
        self.output.await.unwrap_or_else(|_| Err(Error::Engine(self.shared.failure())))
    }

    /// [`Embeddings::get`], blocking the thread.
    ///
    /// # Errors
    /// The same.
    pub fn blocking_get(self) -> Result<Vec<Vec<f32>>> {
        self.output.blocking_recv().unwrap_or_else(|_| Err(Error::Engine(self.shared.failure())))
    }
}

/// What a loaded model is, for threads that may not touch it.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    /// The fidelity that runs.
    pub tier: Tier,
    /// Sizes.
    pub shape: Shape,
    /// The profile's id.
    pub profile: String,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Tokens that end an answer.
    pub eos: EosTokenIds,
    /// What `generation_config.json` recommends.
    pub recommended: Sampling,
    /// How texts become embeddings, if it is an embedding model.
    pub embedding: Option<Embedding>,
    /// What sequences need.
    pub memory: MemoryPlan,
}

/// How the engine is doing.
#[derive(Clone, Debug)]
pub struct EngineStatus {
    /// Why it does not run any more.
    pub stopped: Option<String>,
    /// The last error of a request that was the engine's or the model's, not the client's.
    pub last_error: Option<String>,
    /// Requests that run.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Requests answered in full.
    pub finished: u64,
    /// Requests whose client left, and that were over time.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Bytes of the prompt cache.
    pub prompt_cache_bytes: usize,
    /// What became of the prompts that were looked up there.
    pub prompt_cache: PromptCacheStatistics,
    /// From arrival to the first token, in seconds.
    pub time_to_first_token: Histogram,
    /// Requests that ran at each step.
    pub batch_size: Histogram,
    /// What MLX has in memory.
    pub memory: MemoryUse,
}

/// What MLX has in memory, in bytes. Mapped weights are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// In use.
    pub active: usize,
    /// The most that has been in use.
    pub peak: usize,
    /// Kept for reuse.
    pub cached: usize,
}

/// What both sides of the channel know.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) counters: Counters,
    queued: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) finished: AtomicU64,
    pub(crate) cancelled: AtomicU64,
    failed: AtomicU64,
    generated: AtomicU64,
}

#[derive(Debug)]
struct State {
    stopped: Option<String>,
    last_error: Option<String>,
    running: usize,
    prompt_cache_bytes: usize,
    prompt_cache: PromptCacheStatistics,
    time_to_first_token: Histogram,
    batch_size: Histogram,
    memory: MemoryUse,
}

impl Default for State {
    fn default() -> Self {
        const SECONDS: &[f64] =
            &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];
        const REQUESTS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
        Self {
            stopped: None,
            last_error: None,
            running: 0,
            prompt_cache_bytes: 0,
            prompt_cache: PromptCacheStatistics::default(),
            time_to_first_token: Histogram::new(SECONDS),
            batch_size: Histogram::new(REQUESTS),
            memory: MemoryUse::default(),
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Plain numbers and texts: there is no half-made change to protect from.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self, counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn leave_queue(&self) {
        self.queued.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn fail(&self, error: &Error) {
        self.count(&self.counters.failed);
        self.state().last_error = Some(error.to_string());
    }

    pub(crate) fn observe_first_token(&self, after: Duration) {
        self.observe_token();
        self.state().time_to_first_token.observe(after.as_secs_f64());
    }

    pub(crate) fn observe_token(&self) {
        self.count(&self.counters.generated);
    }

    pub(crate) fn publish(&self, running: usize, bytes: usize, statistics: PromptCacheStatistics) {
        let mut state = self.state();
        state.running = running;
        state.prompt_cache_bytes = bytes;
        state.prompt_cache = statistics;
        state.memory = MemoryUse { active: memory::active(), peak: memory::peak(), cached: memory::cache() };
    }

    pub(crate) fn observe_batch(&self, size: usize) {
        self.state().batch_size.observe(size as f64);
    }

    fn failure(&self) -> String {
        self.state().stopped.clone().unwrap_or_else(|| "it was dropped".into())
    }
}

/// A model on a thread of its own. Requests run together; each is answered as if it were alone, by the CPU kernels in
/// every bit.
#[derive(Debug)]
pub struct Engine {
    commands: Sender<Command>,
    shared: Arc<Shared>,
    facts: ModelFacts,
    queue: usize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts the thread, and loads the model on it with `load`: arrays belong to the thread that made them.
    ///
    /// # Errors
    /// Those of `load`, and when the weights alone are more than the memory budget.
    pub fn start(
        load: impl FnOnce() -> Result<LanguageModel> + Send + 'static,
        options: EngineOptions,
    ) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let (commands, received) = mpsc::channel();
        let (loaded, facts) = mpsc::sync_channel(1);
        let (queue, on_thread) = (options.queue, shared.clone());
        let thread = std::thread::Builder::new().name("russet-engine".into()).spawn(move || {
            let (language_model, embedding) =
                match load().and_then(|model| Ok((facts_of(&model, &options)?, model))) {
                    Ok((facts, language_model)) => {
                        let embedding = facts.embedding.clone();
                        let _ = loaded.send(Ok(facts));
                        (language_model, embedding)
                    }
                    Err(e) => {
                        let _ = loaded.send(Err(e));
                        return;
                    }
                };
            let mut scheduler =
                match Scheduler::new(&language_model, embedding, &options, &on_thread, received) {
                    Ok(scheduler) => scheduler,
                    Err(e) => {
                        on_thread.state().stopped = Some(e.to_string());
                        return;
                    }
                };
            let stopped = match catch_unwind(AssertUnwindSafe(|| scheduler.run())) {
                Ok(Ok(())) => "it was told to".to_owned(),
                Ok(Err(e)) => e.to_string(),
                Err(panic) => format!("its thread panicked: {}", panic_message(panic.as_ref())),
            };
            // Before those who wait are let go, which is when they ask.
            on_thread.state().stopped = Some(stopped);
            drop(scheduler);
        });
        let thread = thread.map_err(|e| Error::Engine(format!("its thread can't be started: {e}")))?;
        let facts = facts.recv().unwrap_or_else(|_| Err(Error::Engine(shared.failure())))?;
        Ok(Self { commands, shared, facts, queue, thread: Mutex::new(Some(thread)) })
    }

    /// What the model is.
    pub fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    /// Asks for an answer. `request.max_tokens` is a ceiling: context and memory may end the answer earlier. Its
    /// `prefill_chunk` is not used, the engine has its own.
    ///
    /// # Errors
    /// When the request is not taken; nothing is generated then.
    pub fn submit(
        &self,
        mut request: Request,
        options: SubmitOptions,
    ) -> std::result::Result<Answer, Refusal> {
        self.check(&mut request)?;
        self.enter_queue()?;
        let (output, answer) = unbounded_channel();
        let submission = Submission {
            request,
            top_logprobs: options.top_logprobs,
            deadline: options.deadline,
            grammar: options.grammar,
            arrived: Instant::now(),
            output,
        };
        self.send(Command::Submit(Box::new(submission)))?;
        Ok(Answer { output: answer, shared: self.shared.clone(), ended: false })
    }

    /// Asks for the embeddings of tokenized texts; of their first `dimensions` numbers, scaled to length one, where that is
    /// given.
    ///
    /// # Errors
    /// When the request is not taken; nothing is computed then.
    pub fn embed(
        &self,
        texts: Vec<Vec<u32>>,
        dimensions: Option<usize>,
        deadline: Option<Instant>,
    ) -> std::result::Result<Embeddings, Refusal> {
        let Some(embedding) = &self.facts.embedding else {
            return Err(Refusal::Invalid(Error::Prompt("the model is no embedding model".into())));
        };
        for tokens in &texts {
            embedding.check(tokens, dimensions).map_err(Refusal::Invalid)?;
            self.check_tokens(tokens)?;
            if self.facts.memory.longest(tokens.len()) < tokens.len() {
                return Err(self.too_long(tokens.len()));
            }
        }
        self.enter_queue()?;
        let (output, embeddings) = oneshot::channel();
        let done = Vec::with_capacity(texts.len());
        let submission = EmbeddingSubmission { texts: texts.into(), dimensions, deadline, done, output };
        self.send(Command::Embed(Box::new(submission)))?;
        Ok(Embeddings { output: embeddings, shared: self.shared.clone() })
    }

    fn enter_queue(&self) -> std::result::Result<(), Refusal> {
        let queued = self.shared.queued.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |queued| {
            (queued < self.queue).then_some(queued + 1)
        });
        queued.map(|_| ()).map_err(|_| Refusal::Busy(self.queue))
    }

    fn send(&self, command: Command) -> std::result::Result<(), Refusal> {
        self.commands.send(command).map_err(|_| {
            self.shared.leave_queue();
            Refusal::Stopped(self.shared.failure())
        })
    }

    fn check_tokens(&self, tokens: &[u32]) -> std::result::Result<(), Refusal> {
        let vocabulary = self.facts.shape.vocabulary;
        match tokens.iter().find(|&&token| token >= vocabulary.max(0) as u32) {
            None => Ok(()),
            Some(token) => Err(Refusal::Invalid(Error::Prompt(format!(
                "token id {token} is outside the model's vocabulary of {vocabulary}"
            )))),
        }
    }

    fn too_long(&self, length: usize) -> Refusal {
        let (plan, mib) = (&self.facts.memory, |bytes: usize| bytes.div_ceil(1 << 20));
        Refusal::Memory(format!(
            "the prompt of {length} tokens needs {} MiB of {} MiB that {} MiB of memory leave beside the model's {} \
             MiB: shorten it, or raise --memory-budget",
            mib(plan.sequence(length + 1)),
            mib(plan.budget().saturating_sub(plan.fixed())),
            mib(plan.budget()),
            mib(plan.fixed()),
        ))
    }

    /// Cuts the answer to what context and memory have room for.
    fn check(&self, request: &mut Request) -> std::result::Result<(), Refusal> {
        let invalid = |message: String| Refusal::Invalid(Error::Prompt(message));
        let length = request.prompt.len();
        if length == 0 {
            return Err(invalid("the prompt is empty: give at least one token".into()));
        }
        if request.max_tokens == 0 {
            return Err(invalid("max_tokens is 0: ask for at least one token".into()));
        }
        let shape = &self.facts.shape;
        self.check_tokens(&request.prompt)?;
        request.sampling.check(shape.vocabulary).map_err(Refusal::Invalid)?;
        let room = room_in_context(shape, length).map_err(Refusal::Invalid)?;
        let wanted = length.saturating_add(request.max_tokens.min(room));
        let plan = &self.facts.memory;
        let longest = plan.longest(wanted);
        if longest <= length {
            return Err(self.too_long(length));
        }
        request.max_tokens = longest - length;
        Ok(())
    }

    /// How it is doing.
    pub fn status(&self) -> EngineStatus {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        let state = self.shared.state();
        EngineStatus {
            stopped: state.stopped.clone(),
            last_error: state.last_error.clone(),
            running: state.running,
            waiting: self.shared.queued.load(Ordering::Relaxed),
            finished: read(&counters.finished),
            cancelled: read(&counters.cancelled),
            failed: read(&counters.failed),
            generated_tokens: read(&counters.generated),
            prompt_cache_bytes: state.prompt_cache_bytes,
            prompt_cache: state.prompt_cache,
            time_to_first_token: state.time_to_first_token.clone(),
            batch_size: state.batch_size.clone(),
            memory: state.memory,
        }
    }

    /// Lets the requests that are there finish until `deadline`, cuts the rest, and waits for the thread to end.
    pub fn stop(&self, deadline: Instant) {
        let _ = self.commands.send(Command::Stop { deadline });
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // Its panics are caught, and told by `status`.
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop(Instant::now());
    }
}

fn facts_of(language_model: &LanguageModel, options: &EngineOptions) -> Result<ModelFacts> {
    let LanguageModel { model, tokenizer, eos } = language_model;
    let memory = options.memory_plan(model);
    if memory.longest(1) == 0 {
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        return Err(Error::Engine(format!(
            "the model needs {} MiB, but {} MiB of memory may be used: free some, or raise --memory-budget",
            mib(memory.fixed() + memory.sequence(1)),
            mib(memory.budget()),
        )));
    }
    Ok(ModelFacts {
        tier: model.tier(),
        shape: model.shape(),
        profile: model.resolution().profile().id().to_string(),
        tokenizer: tokenizer.clone(),
        eos: eos.clone(),
        embedding: Embedding::of(model, tokenizer)?,
        recommended: Sampling::recommended(model.checkpoint().generation_config(), model.shape().vocabulary),
        memory,
    })
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
