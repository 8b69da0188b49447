//! Several sequences at once: continuous batching as `mlx_lm.generate.BatchGenerator` does it.
//!
//! A [`Batch`] is the plain loop: sequences join and leave between calls, prompts are read in chunks between
//! steps. Who may join and when is the caller's to decide.

use std::collections::VecDeque;
use std::mem;

use russet_mlx::random::KeySequence;
use russet_mlx::{Array, Dtype, Stream, async_eval, concatenate, eval, memory, select};
use russet_model::{Cache, Model, Tier};
use russet_text::{Constraint, Grammar};

use crate::sampling::Sampling;
use crate::steps::{CLEAR_CACHE_INTERVAL, MAX_RESERVE, Step, check_prefill_chunk, check_prompt};
use crate::{Error, Result};

/// How many sequences are worked on at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchOptions {
    /// Most sequences that generate at once.
    pub width: usize,
    /// Most sequences whose prompts are read at once, the shorter ones padded; the numerics' default where
    /// absent. The CPU kernels take one.
    pub prefill_width: Option<usize>,
    /// Most prompt tokens of a sequence that are read in one call; the numerics' default where absent.
    pub prefill_chunk: Option<usize>,
    /// Whether [`Batch::take_read`] has the state of each prompt.
    pub keep_prompts: bool,
}

impl Default for BatchOptions {
    /// mlx-lm's.
    fn default() -> Self {
        Self { width: 32, prefill_width: None, prefill_chunk: None, keep_prompts: false }
    }
}

/// Names a sequence of a [`Batch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

/// What a call of [`Batch::step`] made of one sequence.
#[derive(Debug)]
pub struct BatchStep {
    /// The sequence.
    pub id: SequenceId,
    /// Its next token; an error ends the sequence, and no other.
    pub step: Result<Step>,
    /// Its grammar lets nothing follow this token. The sequence is the caller's to remove.
    pub complete: bool,
    /// Its state, if it ended with this token. With MLX it has consumed the token, with the CPU kernels all
    /// before it.
    pub ended: Option<Cache>,
}

/// A sequence.
struct Sequence {
    id: SequenceId,
    /// The prompt, and what was generated and handed out.
    tokens: Vec<u32>,
    /// Tokens of the prompt.
    prompt_length: usize,
    sampling: Sampling,
    keys: KeySequence,
    /// The keys before the last step was launched.
    launch_keys: KeySequence,
    /// The keys that pick the token after the last one that was handed out.
    settled_keys: KeySequence,
    /// All tokens so far, kept only when processors ask for them.
    history: Option<Array>,
    /// How many tokens it may still get.
    limit: Option<usize>,
    /// What may be generated.
    constraint: Option<Constrained>,
}

impl Sequence {
    /// Tells its grammar which token was picked.
    fn commit(&mut self, token: u32) {
        if let Some(constrained) = &mut self.constraint {
            constrained.attempt(|constraint| constraint.commit(token));
        }
    }
}

/// The grammar of a sequence.
struct Constrained {
    grammar: Grammar,
    state: Constraint,
    /// Why it can't go on.
    failed: Option<russet_text::Error>,
}

impl Constrained {
    fn new(grammar: Grammar) -> Self {
        Self { state: grammar.start(), grammar, failed: None }
    }

    fn attempt<T>(
        &mut self,
        run: impl FnOnce(&mut Constraint) -> std::result::Result<T, russet_text::Error>,
    ) -> Option<T> {
        if self.failed.is_some() {
            return None;
        }
        run(&mut self.state).map_err(|e| self.failed = Some(e)).ok()
    }

    /// The tokens that may be picked next, `[1, vocabulary]`; none where no token is needed any more.
    fn mask(&mut self, vocabulary: i32) -> Result<Option<Array>> {
        if self.state.is_complete() {
            return Ok(None);
        }
        let Some(mask) = self.attempt(Constraint::mask) else { return Ok(None) };
        let mask = Array::from_slice(&mask.to_bytes(vocabulary.max(0) as usize), [1, vocabulary])?;
        Ok(Some(mask.astype(Dtype::Bool)?))
    }
}

/// A sequence whose prompt is read.
struct Prompt {
    sequence: Sequence,
    /// Tokens that were read before it came.
    known: usize,
    /// Tokens that are read; the last one is the first step's.
    read: usize,
    /// The state after these, until the prompt has a row.
    cache: Option<Cache>,
}

/// A sequence that was taken out of a batch, to go on in it or in another of the same model.
pub struct Paused(Sequence);

impl Paused {
    /// Its name in the batch that it left.
    pub fn id(&self) -> SequenceId {
        self.0.id
    }
}

impl Prompt {
    /// What is left to read before the first step.
    fn rest(&self) -> &[u32] {
        let tokens = &self.sequence.tokens;
        tokens.get(self.read..tokens.len().saturating_sub(1)).unwrap_or_default()
    }
}

/// Sequences that generate.
#[derive(Default)]
struct Running {
    sequences: Vec<Sequence>,
    /// One row per sequence, as in all that follows. `None` while there are no sequences.
    rows: Option<Rows>,
}

struct Rows {
    cache: Cache,
    /// What the next step consumes, `[rows]`.
    tokens: Array,
    /// What these tokens were picked from, until they are read.
    unread: Option<Picked>,
}

struct Picked {
    /// `[rows, vocabulary]`
    logits: Array,
    /// `[rows, vocabulary]`
    logprobs: Array,
    /// As in `steps::Pending`, `[rows]`.
    check: Array,
}

/// Sequences that are generated together. With MLX each call and its rows are those of mlx-lm's batch
/// generator, and so are the bits at the same widths; a single sequence has those of [`Steps`](crate::Steps).
/// With the CPU kernels no row depends on the others.
pub struct Batch<'m> {
    model: &'m Model,
    width: usize,
    prefill_width: usize,
    prefill_chunk: usize,
    waiting: VecDeque<Prompt>,
    prompts: Vec<Prompt>,
    /// One row per prompt; `None` while there are none.
    prompt_cache: Option<Cache>,
    running: Running,
    keep_prompts: bool,
    /// Prompts that were read since they were last asked for.
    read: Vec<(SequenceId, Cache)>,
    /// Why the last call failed, if it had tokens to hand out nevertheless.
    failed: Option<Error>,
    next_id: u64,
    calls: usize,
}

impl<'m> Batch<'m> {
    /// An empty batch.
    ///
    /// # Errors
    /// When an option is 0.
    pub fn new(model: &'m Model, options: BatchOptions) -> Result<Self> {
        let positive = |option, value: usize| match value {
            0 => Err(Error::Option { option, message: "0 is not a number of at least 1".into() }),
            value => Ok(value),
        };
        check_prefill_chunk(options.prefill_chunk)?;
        Ok(Self {
            model,
            width: positive("width", options.width)?,
            prefill_width: match (options.prefill_width, model.tier()) {
                (None | Some(1), Tier::L3) => 1,
                (Some(_), Tier::L3) => {
                    let message = "the CPU kernels read one prompt at a time".into();
                    return Err(Error::Option { option: "prefill-width", message });
                }
                (width, Tier::L1 | Tier::L2) => positive("prefill-width", width.unwrap_or(8))?,
            },
            prefill_chunk: options.prefill_chunk.unwrap_or_else(|| model.numerics().default_prefill_chunk()),
            waiting: VecDeque::new(),
            prompts: Vec::new(),
            prompt_cache: None,
            running: Running::default(),
            keep_prompts: options.keep_prompts,
            read: Vec::new(),
            failed: None,
            next_id: 0,
            calls: 0,
        })
    }

    /// Adds a sequence, which is worked on from the next call on if there is room. It ends after `limit`
    /// tokens, or when it is removed.
    ///
    /// # Errors
    /// When the prompt is empty or has ids outside the vocabulary, the limit is 0 or `sampling` is out of range.
    pub fn insert(
        &mut self,
        prompt: &[u32],
        sampling: Sampling,
        seed: u64,
        limit: Option<usize>,
    ) -> Result<SequenceId> {
        self.insert_after(None, prompt, sampling, seed, limit, None)
    }

    /// [`Batch::insert`] for a prompt whose first tokens are read: `prefix` is the state after them. It lacks at
    /// least the last token. What is generated follows `grammar`, if there is one.
    ///
    /// # Errors
    /// As [`Batch::insert`], and when the state is that of a batch or of too many tokens.
    pub fn insert_after(
        &mut self,
        prefix: Option<Cache>,
        prompt: &[u32],
        sampling: Sampling,
        seed: u64,
        limit: Option<usize>,
        grammar: Option<Grammar>,
    ) -> Result<SequenceId> {
        check_prompt(self.model, prompt, &sampling)?;
        if limit == Some(0) {
            return Err(Error::Option { option: "limit", message: "0 is not a number of at least 1".into() });
        }
        let read = prefix.as_ref().map_or(0, |cache| cache.offset().max(0) as usize);
        if read >= prompt.len() || prefix.as_ref().is_some_and(|cache| cache.rows() != 1) {
            let message = format!("a state of {read} tokens is no beginning of a prompt of {}", prompt.len());
            return Err(Error::Prompt(message));
        }
        let keys = KeySequence::new(seed)?;
        let sequence = Sequence {
            id: SequenceId(self.next_id),
            tokens: prompt.to_vec(),
            prompt_length: prompt.len(),
            sampling,
            launch_keys: keys.clone(),
            settled_keys: keys.clone(),
            keys,
            history: None,
            limit,
            constraint: grammar.map(Constrained::new),
        };
        self.next_id += 1;
        let id = sequence.id;
        self.waiting.push_back(Prompt { sequence, known: read, read, cache: prefix });
        Ok(id)
    }

    /// Takes all sequences out, also when [`Batch::step`] failed. Each can go on behind the last token that was handed
    /// out; its state is lost.
    pub fn pause_all(&mut self) -> Vec<Paused> {
        let running = mem::take(&mut self.running).sequences.into_iter();
        let reading = mem::take(&mut self.prompts).into_iter().chain(mem::take(&mut self.waiting));
        self.prompt_cache = None;
        self.failed = None;
        self.read.clear();
        running.chain(reading.map(|prompt| prompt.sequence)).map(Paused).collect()
    }

    /// Goes on with a sequence, under its former name: its tokens are read again.
    pub fn resume(&mut self, Paused(mut sequence): Paused) {
        sequence.keys = sequence.settled_keys.clone();
        sequence.history = None;
        if let Some(constrained) = sequence.constraint.take() {
            // It may have heard of a token that was not handed out.
            sequence.constraint = Some(Constrained::new(constrained.grammar));
            for token in sequence.tokens.split_off(sequence.prompt_length) {
                sequence.commit(token);
                sequence.tokens.push(token);
            }
        }
        self.next_id = self.next_id.max(sequence.id.0 + 1);
        self.waiting.push_back(Prompt { sequence, known: 0, read: 0, cache: None });
    }

    /// The states of the prompts that were read since the last call: of all tokens but the last. Of prompts that came
    /// with this state there is none.
    pub fn take_read(&mut self) -> Vec<(SequenceId, Cache)> {
        mem::take(&mut self.read)
    }

    /// Sequences that have not ended.
    pub fn len(&self) -> usize {
        self.waiting.len() + self.prompts.len() + self.running.sequences.len()
    }

    /// Whether all sequences have ended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes a sequence away; returns its state. `None` when there is no such sequence or it had not begun.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn remove(&mut self, id: SequenceId) -> Result<Option<Cache>> {
        self.waiting.retain(|prompt| prompt.sequence.id != id);
        if let Some(row) = self.prompts.iter().position(|prompt| prompt.sequence.id == id) {
            let cache = self.prompt_cache.as_ref().map(|cache| cache.extract(row)).transpose()?;
            self.prompts.remove(row);
            let kept: Vec<usize> = (0..=self.prompts.len()).filter(|&other| other != row).collect();
            filter(&mut self.prompt_cache, &kept)?;
            return Ok(cache);
        }
        if let Some(row) = self.running.sequences.iter().position(|sequence| sequence.id == id) {
            let cache = self.running.rows.as_ref().map(|rows| rows.cache.extract(row)).transpose()?;
            let kept: Vec<usize> = (0..self.running.sequences.len()).filter(|&other| other != row).collect();
            self.running.keep(&kept)?;
            return Ok(cache);
        }
        Ok(None)
    }

    /// One step of all sequences that generate, then a chunk of the prompts that wait. Returns what was
    /// generated, which is nothing while prompts are read alone.
    ///
    /// # Errors
    /// When a call of the model fails, for all sequences: [`Batch::pause_all`] is what can be called then.
    pub fn step(&mut self) -> Result<Vec<BatchStep>> {
        if let Some(e) = self.failed.take() {
            return Err(e);
        }
        let mut steps = self.running.step(self.model)?;
        self.calls += 1;
        if self.calls.is_multiple_of(CLEAR_CACHE_INTERVAL) {
            memory::clear_cache()?;
        }
        let room = self.width.saturating_sub(self.running.sequences.len());
        if room > 0
            && let Err(e) = self.read(room, &mut steps)
        {
            if steps.is_empty() {
                return Err(e);
            }
            // What was generated is handed out first.
            self.failed = Some(e);
        }
        Ok(steps)
    }

    /// Reads a chunk of the prompts, after starting those that are read.
    fn read(&mut self, room: usize, steps: &mut Vec<BatchStep>) -> Result<()> {
        self.admit(room.min(self.prefill_width.saturating_sub(self.prompts.len())))?;
        steps.extend(self.start_read()?);
        self.read_chunk()
    }

    /// Begins with up to `count` of the sequences that wait.
    fn admit(&mut self, count: usize) -> Result<()> {
        let count = count.min(self.waiting.len());
        if count == 0 {
            return Ok(());
        }
        let mut new: Vec<Prompt> = self.waiting.drain(..count).collect();
        let caches = new.iter_mut().map(|prompt| {
            let mut cache = prompt.cache.take().unwrap_or_else(|| self.model.new_cache());
            let limit = prompt.sequence.limit.unwrap_or(0).min(MAX_RESERVE);
            cache.reserve(prompt.sequence.tokens.len().saturating_add(limit));
            cache
        });
        let caches = caches.collect();
        // Before anything can fail, so that no sequence is lost.
        self.prompts.extend(new);
        join(&mut self.prompt_cache, Cache::merge(caches)?)?;
        Ok(())
    }

    /// Starts the sequences of whose prompts all but the last token is read.
    fn start_read(&mut self) -> Result<Vec<BatchStep>> {
        let (ready, kept): (Vec<usize>, Vec<usize>) = (0..self.prompts.len())
            .partition(|&row| self.prompts.get(row).is_some_and(|p| p.rest().is_empty()));
        let Some(mut cache) = self.prompt_cache.clone().filter(|_| !ready.is_empty()) else {
            return Ok(Vec::new());
        };
        if self.keep_prompts {
            // Of which nothing was read, the state is known.
            let new = |prompt: &&Prompt| prompt.read > prompt.known;
            for &row in &ready {
                if let Some(prompt) = self.prompts.get(row).filter(new) {
                    self.read.push((prompt.sequence.id, cache.extract(row)?));
                }
            }
        }
        filter(&mut self.prompt_cache, &kept)?;
        cache.filter(&ready)?;
        let (ready, kept): (Vec<Prompt>, Vec<Prompt>) =
            mem::take(&mut self.prompts).into_iter().partition(|prompt| prompt.rest().is_empty());
        self.prompts = kept;

        let sequences = ready.into_iter().map(|prompt| prompt.sequence).collect();
        let mut started = Running { sequences, rows: None };
        let steps = started.start(self.model, cache);
        match steps {
            Ok(_) => self.running.extend(started)?,
            // They wait there for `Batch::pause_all`.
            Err(_) => self.running.sequences.extend(started.sequences),
        }
        steps
    }

    /// Reads the next tokens of all prompts.
    fn read_chunk(&mut self) -> Result<()> {
        let Some(cache) = &mut self.prompt_cache else { return Ok(()) };
        let chunks = self.prompts.iter().map(|prompt| {
            let rest = prompt.rest();
            rest.get(..self.prefill_chunk).unwrap_or(rest)
        });
        let chunks: Vec<&[u32]> = chunks.collect();
        let longest = chunks.iter().map(|chunk| chunk.len()).max().unwrap_or(0);
        let mut tokens = Vec::with_capacity(chunks.len() * longest);
        for chunk in &chunks {
            tokens.extend_from_slice(chunk);
            tokens.resize(tokens.len() + longest - chunk.len(), 0);
        }
        let lengths: Vec<i32> = chunks.iter().map(|chunk| chunk.len() as i32).collect();
        let tokens = Array::from_slice(&tokens, [chunks.len() as i32, longest as i32])?;

        cache.begin_padded(&lengths)?;
        // Logits of prompt tokens are not wanted; the hidden states are, only for the cache.
        self.model.forward(&tokens, cache)?;
        cache.end_padded()?;
        eval(&cache.arrays())?;
        memory::clear_cache()?;
        for (prompt, length) in self.prompts.iter_mut().zip(lengths) {
            prompt.read += length as usize;
        }
        Ok(())
    }
}

impl Drop for Batch<'_> {
    /// Waits for a step that was launched ahead; see [`Steps`](crate::Steps).
    fn drop(&mut self) {
        // An error of that step concerns nobody any more.
        let _ = Stream::synchronize();
    }
}

/// Keeps rows of a cache, which goes with the last of them.
fn filter(cache: &mut Option<Cache>, rows: &[usize]) -> Result<()> {
    match cache {
        Some(cache) if !rows.is_empty() => Ok(cache.filter(rows)?),
        _ => {
            *cache = None;
            Ok(())
        }
    }
}

/// Adds rows to a cache.
fn join(cache: &mut Option<Cache>, new: Cache) -> Result<()> {
    match cache {
        Some(cache) => Ok(cache.extend(new)?),
        None => {
            *cache = Some(new);
            Ok(())
        }
    }
}

impl Running {
    /// The first step, on the state after all tokens but the last. With the CPU kernels its tokens are there at once.
    fn start(&mut self, model: &Model, cache: Cache) -> Result<Vec<BatchStep>> {
        for sequence in &mut self.sequences {
            if let Some((_, history)) = sequence.tokens.split_last()
                && sequence.sampling.has_processors()
            {
                sequence.history = Some(Array::from_slice(history, [history.len() as i32])?);
            }
        }
        let last: Vec<u32> = self.sequences.iter().filter_map(|of| of.tokens.last().copied()).collect();
        let tokens = Array::from_slice(&last, [last.len() as i32])?;
        self.rows = Some(Rows { cache, tokens, unread: None });
        self.launch(model, false)?;
        if looks_ahead(model) { Ok(Vec::new()) } else { self.read() }
    }

    /// Returns the next tokens, and with MLX launches the step after them first.
    fn step(&mut self, model: &Model) -> Result<Vec<BatchStep>> {
        let Some(rows) = &mut self.rows else { return Ok(Vec::new()) };
        let (tokens, unread) = (rows.tokens.clone(), rows.unread.take());
        self.launch(model, unread.is_some())?;
        match unread {
            // The step that was launched ahead consumes the tokens that are read now.
            Some(unread) => self.report(&tokens, &unread, true),
            None => self.read(),
        }
    }

    /// Reads the tokens of the last step.
    fn read(&mut self) -> Result<Vec<BatchStep>> {
        let Some(rows) = &mut self.rows else { return Ok(Vec::new()) };
        let Some(unread) = rows.unread.take() else { return Ok(Vec::new()) };
        let tokens = rows.tokens.clone();
        self.report(&tokens, &unread, false)
    }

    /// Adds the step that consumes the rows' tokens to the graph and starts it. `unread` says whether these have yet to
    /// be handed out.
    fn launch(&mut self, model: &Model, unread: bool) -> Result<()> {
        let Some(rows) = &mut self.rows else { return Ok(()) };
        let hidden = model.forward(&rows.tokens.expand_dims([1])?, &mut rows.cache)?;
        let logits = model.logits(&hidden)?.slice_axis(1, -1, i32::MAX)?.squeeze([1])?;
        let row = |of: &Array, row: usize| of.slice_axis(0, row as i32, row as i32 + 1);

        let mut masks = Vec::new();
        if self.sequences.iter().any(|sequence| sequence.constraint.is_some()) {
            // What a grammar allows depends on the token before: the model runs while that is looked up.
            async_eval(std::slice::from_ref(&logits))?;
            if unread {
                for (sequence, token) in self.sequences.iter_mut().zip(rows.tokens.to_vec::<u32>()?) {
                    sequence.commit(token);
                }
            }
            let vocabulary = logits.dim(1)?;
            let constrained = self.sequences.iter_mut().map(|sequence| sequence.constraint.as_mut());
            let mask = |of: Option<&mut Constrained>| of.map_or(Ok(None), |of| of.mask(vocabulary));
            masks = constrained.map(mask).collect::<Result<_>>()?;
        }
        let mask_of = |row: usize| masks.get(row).and_then(Option::as_ref);
        let mut processed = logits.clone();
        if self.sequences.iter().any(|sequence| sequence.sampling.has_processors())
            || masks.iter().any(Option::is_some)
        {
            let parts = self.sequences.iter_mut().enumerate().map(|(i, sequence)| {
                let mut logits = row(&logits, i)?;
                if sequence.sampling.has_processors() {
                    let token = row(&rows.tokens, i)?;
                    let history = match sequence.history.take() {
                        Some(history) => concatenate(&[history, token], 0)?,
                        None => token,
                    };
                    sequence.history = Some(history.clone());
                    logits = sequence.sampling.process(&logits, &history)?;
                }
                // After bias and penalties: none of them lets a token back in.
                match mask_of(i) {
                    Some(mask) => select(mask, &logits, f64::NEG_INFINITY),
                    None => Ok(logits),
                }
            });
            processed = concatenate(&parts.collect::<russet_mlx::Result<Vec<_>>>()?, 0)?;
        }
        let logprobs = processed.subtract(&processed.logsumexp([-1], true)?)?;
        let (mut tokens, mut checks) = (Vec::new(), Vec::new());
        for (i, sequence) in self.sequences.iter_mut().enumerate() {
            // As in `Steps`: log-probabilities only where they are needed.
            let scores = match model.tier() {
                Tier::L3 if sequence.sampling.temperature == 0.0 => &processed,
                _ => &logprobs,
            };
            let scores = row(scores, i)?;
            sequence.launch_keys = sequence.keys.clone();
            let token = sequence.sampling.sample(&scores, &mut sequence.keys)?.astype(Dtype::U32)?;
            checks.push(scores.take_along_axis(&token.expand_dims([0])?, -1)?.squeeze([1])?);
            tokens.push(token);
        }
        let (tokens, check) = (concatenate(&tokens, 0)?, concatenate(&checks, 0)?);
        async_eval(&[tokens.clone(), check.clone()])?;
        rows.tokens = tokens;
        rows.unread = Some(Picked { logits, logprobs, check });
        Ok(())
    }

    /// Hands out tokens, and lets the sequences go that end with them. `ahead` says whether the step after them is
    /// launched.
    fn report(&mut self, tokens: &Array, picked: &Picked, ahead: bool) -> Result<Vec<BatchStep>> {
        let tokens = tokens.to_vec::<u32>()?;
        let checks = picked.check.astype(Dtype::F32)?.to_vec::<f32>()?;
        let row = |of: &Array, row: usize| of.slice_axis(0, row as i32, row as i32 + 1)?.squeeze([0]);
        let (mut steps, mut kept) = (Vec::new(), Vec::new());
        for (i, ((sequence, token), check)) in self.sequences.iter_mut().zip(tokens).zip(checks).enumerate() {
            if !ahead {
                sequence.commit(token);
            }
            let failed = sequence.constraint.as_mut().and_then(|constrained| constrained.failed.take());
            let step = if let Some(e) = failed {
                Err(e.into())
            } else if check.is_finite() {
                Ok(Step { token, logits: row(&picked.logits, i)?, logprobs: row(&picked.logprobs, i)? })
            } else {
                let tokens = sequence.tokens.len();
                Err(Error::NotFinite { tokens, dtype: picked.logits.dtype() })
            };
            sequence.tokens.push(token);
            sequence.settled_keys = if ahead { sequence.launch_keys.clone() } else { sequence.keys.clone() };
            sequence.limit = sequence.limit.map(|limit| limit.saturating_sub(1));
            let ends = sequence.limit == Some(0);
            let ended = match &self.rows {
                Some(rows) if ends && step.is_ok() => Some(rows.cache.extract(i)?),
                _ => None,
            };
            if !ends && step.is_ok() {
                kept.push(i);
            }
            let complete = sequence.constraint.as_ref().is_some_and(|of| of.state.is_complete());
            steps.push(BatchStep { id: sequence.id, step, complete, ended });
        }
        if kept.len() < self.sequences.len() {
            self.keep(&kept)?;
        }
        Ok(steps)
    }

    /// Keeps the sequences of the given rows.
    fn keep(&mut self, kept: &[usize]) -> Result<()> {
        let mut row = 0..;
        self.sequences.retain(|_| row.next().is_some_and(|row| kept.contains(&row)));
        if kept.is_empty() {
            self.rows = None;
            return Ok(());
        }
        let indices: Vec<u32> = kept.iter().map(|&row| row as u32).collect();
        let indices = Array::from_slice(&indices, [indices.len() as i32])?;
        let take = |of: &Array| of.take(&indices, 0);
        if let Some(rows) = &mut self.rows {
            rows.cache.filter(kept)?;
            rows.tokens = take(&rows.tokens)?;
            if let Some(Picked { logits, logprobs, check }) = &rows.unread {
                rows.unread =
                    Some(Picked { logits: take(logits)?, logprobs: take(logprobs)?, check: take(check)? });
            }
        }
        Ok(())
    }

    /// Adds sequences, all of which have made their first step.
    fn extend(&mut self, other: Self) -> Result<()> {
        self.sequences.extend(other.sequences);
        let Some(new) = other.rows else { return Ok(()) };
        let Some(rows) = &mut self.rows else {
            self.rows = Some(new);
            return Ok(());
        };
        let both = |a: &Array, b: Array| concatenate(&[a.clone(), b], 0);
        rows.cache.extend(new.cache)?;
        rows.tokens = both(&rows.tokens, new.tokens)?;
        rows.unread = match (&rows.unread, new.unread) {
            (Some(a), Some(b)) => Some(Picked {
                logits: both(&a.logits, b.logits)?,
                logprobs: both(&a.logprobs, b.logprobs)?,
                check: both(&a.check, b.check)?,
            }),
            _ => None,
        };
        Ok(())
    }
}

/// Whether a step is launched before the tokens are read that it consumes; see [`Steps`](crate::Steps).
fn looks_ahead(model: &Model) -> bool {
    model.tier() != Tier::L3
}
