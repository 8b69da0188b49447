//! Many requests, one model: who runs when, and who hears what.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use russet_mlx::{Array, memory};

use crate::answer::AnswerText;
use crate::embed::Embedding;
use crate::engine::{EmbeddingSubmission, Output, Shared, Submission, TokenLogprobs};
use crate::memory_plan::MemoryPlan;
use crate::{
    Batch, BatchOptions, BatchStep, EngineOptions, Error, FinishReason, LanguageModel, Paused, PromptCache,
    Result, SequenceId, Statistics, Step,
};

/// How often memory that was freed goes back to the system while there is work. The C allocator would keep it, in pieces
/// that later states do not fit.
const TRIM_INTERVAL: Duration = Duration::from_secs(5);

/// What reaches the engine's thread.
pub(crate) enum Command {
    /// A request.
    Submit(Box<Submission>),
    /// Texts to embed.
    Embed(Box<EmbeddingSubmission>),
    /// No more requests come; those that are there may go on until then.
    Stop {
        /// When the rest is cut.
        deadline: Instant,
    },
}

/// A request that runs.
struct Row {
    submission: Box<Submission>,
    text: AnswerText,
    /// Tokens of the prompt whose state was known.
    cached: usize,
    /// Memory that was set aside for it, in bytes.
    reserved: usize,
    generated: usize,
    /// Prompt and answer so far, if they are to be kept.
    tokens: Option<Vec<u32>>,
    begun: Instant,
    first_token: Option<Instant>,
}

/// Runs on the engine's thread.
pub(crate) struct Scheduler<'m> {
    language_model: &'m LanguageModel,
    /// If it is an embedding model.
    embedding: Option<Embedding>,
    shared: &'m Shared,
    commands: Receiver<Command>,
    batch: Batch<'m>,
    rows: HashMap<SequenceId, Row>,
    waiting: VecDeque<Box<Submission>>,
    embeddings: VecDeque<Box<EmbeddingSubmission>>,
    prompt_cache: PromptCache,
    cache_answers: bool,
    plan: MemoryPlan,
    width: usize,
    /// Sequences that went on alone after a call for all had failed.
    survivors: Vec<Paused>,
    trimmed: Instant,
    stop: Option<Instant>,
}

impl<'m> Scheduler<'m> {
    pub(crate) fn new(
        language_model: &'m LanguageModel,
        embedding: Option<Embedding>,
        options: &EngineOptions,
        shared: &'m Shared,
        commands: Receiver<Command>,
    ) -> Result<Self> {
        let chunk = options.chunk(&language_model.model);
        let batch = BatchOptions {
            width: options.width,
            // Prompts that are read together have other bits than alone.
            prefill_width: Some(1),
            prefill_chunk: Some(chunk),
            keep_prompts: options.prompt_cache > 0,
        };
        Ok(Self {
            language_model,
            embedding,
            shared,
            commands,
            batch: Batch::new(&language_model.model, batch)?,
            rows: HashMap::new(),
            waiting: VecDeque::new(),
            embeddings: VecDeque::new(),
            prompt_cache: match options.cache_answers {
                true => PromptCache::new(options.prompt_cache, chunk).continuing_anywhere(),
                false => PromptCache::new(options.prompt_cache, chunk),
            },
            cache_answers: options.cache_answers && options.prompt_cache > 0,
            plan: options.memory_plan(&language_model.model),
            width: options.width,
            survivors: Vec::new(),
            trimmed: Instant::now(),
            stop: None,
        })
    }

    /// Serves until it is told to stop, or nobody is left who could ask.
    ///
    /// # Errors
    /// When the model can't go on. A failure that is one request's own ends that request only.
    pub(crate) fn run(&mut self) -> Result<()> {
        loop {
            let open = self.receive();
            self.cancel()?;
            self.admit();
            if self.is_idle() {
                if !open || self.stop.is_some() {
                    return Ok(());
                }
                continue;
            }
            if self.trimmed.elapsed() >= TRIM_INTERVAL {
                self.trim();
            }
            self.embed();
            if self.rows.is_empty() {
                continue;
            }
            self.publish();
            self.shared.observe_batch(self.rows.len());
            let steps = self.batch.step();
            // Before those end that have only one token to get.
            self.keep_prompts();
            match steps {
                Ok(steps) => self.deliver(steps)?,
                Err(e) => self.isolate(e)?,
            }
        }
    }

    /// Takes what was sent; waits for it if there is nothing to do. False when nobody can send any more.
    fn receive(&mut self) -> bool {
        loop {
            let command = if self.is_idle() && self.stop.is_none() {
                self.trim();
                self.publish();
                self.commands.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                self.commands.try_recv()
            };
            match command {
                Ok(Command::Submit(submission)) => self.waiting.push_back(submission),
                Ok(Command::Embed(submission)) => self.embeddings.push_back(submission),
                Ok(Command::Stop { deadline }) => self.stop = Some(deadline),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.rows.is_empty() && self.waiting.is_empty() && self.embeddings.is_empty()
    }

    /// Embeds one of the texts that wait, if there is memory for it.
    fn embed(&mut self) {
        let length = self.embeddings.front().and_then(|first| first.texts.front()).map_or(0, Vec::len);
        let needed = self.plan.sequence(length);
        if self.embeddings.is_empty() || !self.make_room(needed) {
            return;
        }
        let Some(mut submission) = self.embeddings.pop_front() else { return };
        let result = match (submission.texts.pop_front(), &self.embedding) {
            (Some(tokens), Some(embedding)) => embedding
                .embed(&self.language_model.model, &tokens, submission.dimensions)
                .map(|embedding| submission.done.push(embedding)),
            _ => Ok(()),
        };
        self.plan.release(needed);
        if result.is_ok() && !submission.texts.is_empty() {
            self.embeddings.push_front(submission);
            return;
        }
        self.shared.leave_queue();
        match &result {
            Ok(()) => self.shared.count(&self.shared.counters.finished),
            Err(e) => self.shared.fail(e),
        }
        submission.end(result);
    }

    /// Sets memory aside; what is kept for later makes room for what is asked now.
    fn make_room(&mut self, needed: usize) -> bool {
        if self.plan.reserve(needed, self.prompt_cache.bytes()) {
            return true;
        }
        self.prompt_cache.shrink_to(self.plan.room_beside(needed));
        self.plan.reserve(needed, self.prompt_cache.bytes())
    }

    /// Gives memory that is not used back to the system.
    fn trim(&mut self) {
        memory::trim();
        self.trimmed = Instant::now();
    }

    /// Ends requests that nobody waits for any more, and those that are over time.
    fn cancel(&mut self) -> Result<()> {
        let now = Instant::now();
        let cut = self.stop.is_some_and(|deadline| now >= deadline);
        let overdue = |deadline: Option<Instant>| deadline.is_some_and(|deadline| now >= deadline);
        let late = |submission: &Submission| overdue(submission.deadline);
        let (gone, waiting): (VecDeque<_>, _) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|submission| cut || submission.output.is_closed() || late(submission));
        self.waiting = waiting;
        for submission in gone {
            self.shared.leave_queue();
            self.shared.count(&self.shared.counters.cancelled);
            submission.fail(if late(&submission) { Error::Deadline } else { Error::Stopping });
        }
        let over = |of: &EmbeddingSubmission| cut || of.output.is_closed() || overdue(of.deadline);
        let (gone, left): (VecDeque<_>, _) =
            std::mem::take(&mut self.embeddings).into_iter().partition(|submission| over(submission));
        self.embeddings = left;
        for submission in gone {
            self.shared.leave_queue();
            self.shared.count(&self.shared.counters.cancelled);
            let error = if overdue(submission.deadline) { Error::Deadline } else { Error::Stopping };
            submission.end(Err(error));
        }
        let over = |row: &Row| cut || row.submission.output.is_closed() || late(&row.submission);
        let gone: Vec<SequenceId> =
            self.rows.iter().filter(|(_, row)| over(row)).map(|(id, _)| *id).collect();
        for id in gone {
            let Some(mut row) = self.rows.remove(&id) else { continue };
            self.plan.release(row.reserved);
            self.batch.remove(id)?;
            self.shared.count(&self.shared.counters.cancelled);
            if late(&row.submission) {
                row.submission.fail(Error::Deadline);
            } else {
                row.end(FinishReason::Cancelled);
            }
        }
        Ok(())
    }

    /// Begins with requests that wait, in their order, while there is room for them.
    fn admit(&mut self) {
        while self.rows.len() < self.width
            && let Some(submission) = self.waiting.front()
        {
            let tokens = submission.request.prompt.len() + submission.request.max_tokens;
            let needed = self.plan.sequence(tokens);
            if !self.make_room(needed) {
                return;
            }
            let Some(submission) = self.waiting.pop_front() else { return };
            self.shared.leave_queue();
            if let Err((submission, e)) = self.begin(submission, needed) {
                self.plan.release(needed);
                self.shared.fail(&e);
                submission.fail(e);
            }
        }
    }

    fn begin(
        &mut self,
        submission: Box<Submission>,
        reserved: usize,
    ) -> std::result::Result<(), (Box<Submission>, Error)> {
        let LanguageModel { model, tokenizer, .. } = self.language_model;
        let request = &submission.request;
        let prefix = match self.prompt_cache.find(model, &request.prompt) {
            Ok(prefix) => prefix,
            Err(e) => return Err((submission, e)),
        };
        let cached = prefix.as_ref().map_or(0, |cache| cache.offset() as usize);
        let (sampling, limit) = (request.sampling.clone(), Some(request.max_tokens));
        let grammar = submission.grammar.clone();
        let inserted =
            self.batch.insert_after(prefix, &request.prompt, sampling, request.seed, limit, grammar);
        let id = match inserted {
            Ok(id) => id,
            Err(e) => return Err((submission, e)),
        };
        // A grammar speaks of every byte, also of a first space.
        let every_byte = request.continues_prompt || submission.grammar.is_some();
        let text = AnswerText::new(tokenizer.detokenizer(), &request.stop, every_byte);
        let row = Row {
            text,
            cached,
            reserved,
            generated: 0,
            tokens: self.cache_answers.then(|| submission.request.prompt.clone()),
            begun: Instant::now(),
            first_token: None,
            submission,
        };
        self.rows.insert(id, row);
        Ok(())
    }

    /// Hands out tokens.
    fn deliver(&mut self, steps: Vec<BatchStep>) -> Result<()> {
        for BatchStep { id, step, complete, ended } in steps {
            let Some(row) = self.rows.get_mut(&id) else { continue };
            let outcome = match step {
                Ok(step) => row.token(&step, self.language_model, self.shared).map(|finished| {
                    let complete = complete.then_some(FinishReason::Stop);
                    finished.or(complete).or(ended.as_ref().map(|_| FinishReason::Length))
                }),
                Err(e) => Err(e),
            };
            if let Ok(None) = outcome {
                continue;
            }
            let cache = match ended {
                Some(cache) => Some(cache),
                None => self.batch.remove(id)?,
            };
            let Some(mut row) = self.rows.remove(&id) else { continue };
            self.plan.release(row.reserved);
            match outcome {
                Ok(reason) => {
                    if let (Some(tokens), Some(cache)) = (&row.tokens, cache) {
                        self.prompt_cache.keep(tokens, &cache);
                    }
                    row.end(reason.unwrap_or(FinishReason::Length));
                    self.shared.count(&self.shared.counters.finished);
                }
                Err(e) => {
                    self.shared.fail(&e);
                    row.submission.fail(e);
                }
            }
        }
        Ok(())
    }

    /// A call for all sequences failed. Each is tried alone: the one that fails again ends with its error, the others
    /// go on. What they had is read anew.
    fn isolate(&mut self, error: Error) -> Result<()> {
        let mut paused = self.batch.pause_all();
        if paused.len() == 1
            && let Some(only) = paused.pop()
        {
            self.end_failed(only.id(), error);
            return Ok(());
        }
        for sequence in paused {
            let id = sequence.id();
            self.batch.resume(sequence);
            loop {
                match self.batch.step() {
                    Ok(steps) if steps.is_empty() => {}
                    Ok(steps) => {
                        self.deliver(steps)?;
                        break;
                    }
                    Err(e) => {
                        self.batch.pause_all();
                        self.end_failed(id, e);
                        break;
                    }
                }
            }
            self.survivors.extend(self.batch.pause_all());
        }
        for sequence in self.survivors.drain(..) {
            self.batch.resume(sequence);
        }
        Ok(())
    }

    fn end_failed(&mut self, id: SequenceId, error: Error) {
        self.shared.fail(&error);
        if let Some(row) = self.rows.remove(&id) {
            self.plan.release(row.reserved);
            row.submission.fail(error);
        }
    }

    /// Keeps the prompts that were read.
    fn keep_prompts(&mut self) {
        for (id, cache) in self.batch.take_read() {
            let prompt = self.rows.get(&id).map(|row| row.submission.request.prompt.as_slice());
            if let Some(prompt) = prompt {
                self.prompt_cache.keep(prompt, &cache);
            }
        }
    }

    /// Tells the other threads how things stand.
    fn publish(&self) {
        self.shared.publish(self.rows.len(), self.prompt_cache.bytes(), self.prompt_cache.statistics());
    }
}

impl Row {
    /// Hands out a token; returns why the answer is over, if it is.
    fn token(
        &mut self,
        step: &Step,
        language_model: &LanguageModel,
        shared: &Shared,
    ) -> Result<Option<FinishReason>> {
        let now = Instant::now();
        match self.first_token {
            None => shared.observe_first_token(now - self.submission.arrived),
            Some(_) => shared.observe_token(),
        }
        self.first_token.get_or_insert(now);
        self.generated += 1;
        if let Some(tokens) = &mut self.tokens {
            tokens.push(step.token);
        }
        let logprobs = match self.submission.top_logprobs {
            Some(count) => Some(top_logprobs(&step.logprobs, step.token, count)?),
            None => None,
        };
        let (text, ended) = self.text.push(step.token, &language_model.eos);
        self.submission.send(Output::Token { token: step.token, text, logprobs });
        Ok(ended)
    }

    /// Sends what was held back, and the end.
    fn end(&mut self, reason: FinishReason) {
        let (text, stopped) = self.text.finish();
        let now = Instant::now();
        let first_token = self.first_token.unwrap_or(now);
        let statistics = Statistics {
            prompt_tokens: self.submission.request.prompt.len(),
            cached_tokens: self.cached,
            generated_tokens: self.generated,
            time_to_first_token: first_token - self.begun,
            decode_time: now - first_token,
            peak_memory: self.reserved,
        };
        self.submission.send(Output::End { text, finish_reason: stopped.unwrap_or(reason), statistics });
    }
}

/// The log-probability of `token`, and of the `count` most likely tokens.
fn top_logprobs(logprobs: &Array, token: u32, count: usize) -> Result<TokenLogprobs> {
    let all: Vec<f32> = logprobs.astype(russet_mlx::Dtype::F32)?.to_vec()?;
    let mut order: Vec<u32> = (0..all.len() as u32).collect();
    let value = |token: u32| all.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    // Of equally likely tokens the one with the lower id comes first.
    let likelier = |a: &u32, b: &u32| value(*b).total_cmp(&value(*a)).then(a.cmp(b));
    let count = count.min(order.len());
    if count > 0 {
        order.select_nth_unstable_by(count - 1, likelier);
    }
    order.truncate(count);
    order.sort_unstable_by(likelier);
    Ok(TokenLogprobs {
        logprob: value(token),
        // What a grammar does not allow is no alternative.
        top: order
            .into_iter()
            .map(|token| (token, value(token)))
            .filter(|(_, logprob)| logprob.is_finite())
            .collect(),
    })
}
