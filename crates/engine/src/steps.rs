//! The token loop: chunked prefill, then one token per step with one step of look-ahead
//! (`mlx_lm.generate.generate_step`).

use std::ops::ControlFlow;

use russet_mlx::random::KeySequence;
use russet_mlx::{Array, Dtype, Stream, async_eval, concatenate, eval, memory};
use russet_model::{Cache, Model, Tier};

use crate::sampling::Sampling;
use crate::{Error, Result};

/// Steps between two releases of cached memory.
pub(crate) const CLEAR_CACHE_INTERVAL: usize = 256;

/// A picked token with what it was picked from.
#[derive(Clone, Debug)]
pub struct Step {
    /// The token.
    pub token: u32,
    /// Raw logits of the position, `[vocabulary]`, before any processor.
    pub logits: Array,
    /// What the sampler saw, `[vocabulary]`: log-probabilities after the processors.
    pub logprobs: Array,
}

/// A step whose token has not been read yet.
struct Pending {
    /// `[1]`
    token: Array,
    logits: Array,
    logprobs: Array,
    /// The token's log-probability, or its logit where nothing else needs log-probabilities; not finite when
    /// any logit was NaN or positive infinity.
    check: Array,
}

impl Pending {
    fn launch(&self) -> Result<()> {
        Ok(async_eval(&[self.token.clone(), self.check.clone()])?)
    }
}

/// Generated tokens for which room is made in advance; a limit is often higher than what is generated.
pub(crate) const MAX_RESERVE: usize = 4096;

/// How a sequence is generated.
#[derive(Clone, Debug, Default)]
pub struct StepOptions {
    /// How tokens are picked.
    pub sampling: Sampling,
    /// Seed of the sampler.
    pub seed: u64,
    /// Prompt tokens per prefill call; the numerics' default where absent.
    pub prefill_chunk: Option<usize>,
    /// Tokens wanted; the iterator ends after them, and no step runs in vain.
    pub limit: Option<usize>,
}

/// One sequence being generated: an iterator over [`Step`]s.
///
/// With MLX, the step after a token already runs while the token is read.
pub struct Steps<'m> {
    model: &'m Model,
    options: StepOptions,
    keys: KeySequence,
    cache: Cache,
    /// All tokens so far, kept only when processors ask for them.
    history: Option<Array>,
    next: Option<Pending>,
    /// The token that the next step consumes, where no step is launched ahead.
    last: Option<Array>,
    produced: usize,
    prompt_length: usize,
}

/// Checks a prompt and how its continuation is picked; returns its last token and those before it.
pub(crate) fn check_prompt<'a>(
    model: &Model,
    prompt: &'a [u32],
    sampling: &Sampling,
) -> Result<(&'a u32, &'a [u32])> {
    let parts = prompt.split_last();
    let parts = parts.ok_or_else(|| Error::Prompt("the prompt is empty: give at least one token".into()))?;
    model.check_tokens(prompt)?;
    sampling.check(model.shape().vocabulary)?;
    Ok(parts)
}

pub(crate) fn check_prefill_chunk(chunk: Option<usize>) -> Result<()> {
    match chunk {
        Some(0) => {
            let message = "0 is not a number of at least 1".into();
            Err(Error::Option { option: "prefill-chunk", message })
        }
        _ => Ok(()),
    }
}

impl<'m> Steps<'m> {
    /// Runs the prompt, all but its last token in chunks, and starts the first step.
    ///
    /// `progress` hears how many prompt tokens are done, before the first and after each chunk;
    /// breaking ends the prefill and gives `None`.
    ///
    /// # Errors
    /// When the prompt is empty, has ids outside the vocabulary or options are out of range.
    pub fn start(
        model: &'m Model,
        prompt: &[u32],
        options: StepOptions,
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Option<Self>> {
        let (&last, rest) = check_prompt(model, prompt, &options.sampling)?;
        check_prefill_chunk(options.prefill_chunk)?;

        let mut cache = model.new_cache();
        cache.reserve(prompt.len().saturating_add(options.limit.unwrap_or(0).min(MAX_RESERVE)));
        let prefill_chunk = options.prefill_chunk.unwrap_or_else(|| model.numerics().default_prefill_chunk());
        let mut steps = Self {
            model,
            keys: KeySequence::new(options.seed)?,
            cache,
            history: None,
            next: None,
            last: None,
            produced: 0,
            prompt_length: prompt.len(),
            options,
        };
        let mut done = 0;
        if progress(done).is_break() {
            return Ok(None);
        }
        for chunk in rest.chunks(prefill_chunk) {
            let tokens = Array::from_slice(chunk, [1, chunk.len() as i32])?;
            // Logits of prompt tokens are not wanted; the hidden states are, only for the cache.
            model.forward(&tokens, &mut steps.cache)?;
            eval(&steps.cache.arrays())?;
            steps.remember(&tokens.reshape([-1])?)?;
            memory::clear_cache()?;
            done += chunk.len();
            if progress(done).is_break() {
                return Ok(None);
            }
        }
        let first = steps.launch_step(&Array::from_slice(&[last], [1])?)?;
        steps.next = Some(first);
        Ok(Some(steps))
    }

    /// The state of the sequence. It has consumed one more token than were yielded while the next
    /// step runs.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    fn remember(&mut self, tokens: &Array) -> Result<()> {
        if self.options.sampling.has_processors() {
            self.history = Some(match self.history.take() {
                Some(history) => concatenate(&[history, tokens.clone()], 0)?,
                None => tokens.clone(),
            });
        }
        Ok(())
    }

    /// Adds the step that consumes `token` `[1]` to the graph.
    fn step(&mut self, token: &Array) -> Result<Pending> {
        let hidden = self.model.forward(&token.expand_dims([0])?, &mut self.cache)?;
        let logits = self.model.logits(&hidden)?.slice_axis(1, -1, i32::MAX)?.squeeze([1])?;
        self.remember(token)?;
        let processed = match &self.history {
            Some(history) => self.options.sampling.process(&logits, history)?,
            None => logits.clone(),
        };
        let normalizer = processed.logsumexp([0, 1], true)?;
        let logprobs = processed.subtract(&normalizer)?;
        // Log-probabilities are computed only if somebody reads them, unless equality with mlx-lm needs
        // them: rounded, they may have ties that logits do not have.
        let scores = match self.model.tier() {
            Tier::L3 if self.options.sampling.temperature == 0.0 => &processed,
            _ => &logprobs,
        };
        let token = self.options.sampling.sample(scores, &mut self.keys)?.astype(Dtype::U32)?;
        let check = scores.take_along_axis(&token.expand_dims([0])?, -1)?;
        Ok(Pending { token, logits: logits.squeeze([0])?, logprobs: logprobs.squeeze([0])?, check })
    }

    fn launch_step(&mut self, token: &Array) -> Result<Pending> {
        let step = self.step(token)?;
        step.launch()?;
        Ok(step)
    }

    fn advance(&mut self) -> Result<Option<Step>> {
        if self.options.limit.is_some_and(|limit| self.produced >= limit) {
            return Ok(None);
        }
        let current = match (self.next.take(), self.last.take()) {
            (Some(launched), _) => launched,
            (None, Some(token)) => self.launch_step(&token)?,
            (None, None) => return Ok(None),
        };
        // The CPU kernels run a step while it is launched: one ahead would hold back the token that is ready.
        let looks_ahead = self.model.tier() != Tier::L3;
        if looks_ahead && self.options.limit.is_none_or(|limit| self.produced + 1 < limit) {
            self.next = Some(self.launch_step(&current.token)?);
        }
        let token = current.token.item::<u32>()?;
        if !current.check.item::<f32>()?.is_finite() {
            self.next = None;
            let tokens = self.prompt_length + self.produced;
            return Err(Error::NotFinite { tokens, dtype: current.logits.dtype() });
        }
        if !looks_ahead {
            self.last = Some(current.token);
        }
        if self.produced.is_multiple_of(CLEAR_CACHE_INTERVAL) {
            memory::clear_cache()?;
        }
        self.produced += 1;
        Ok(Some(Step { token, logits: current.logits, logprobs: current.logprobs }))
    }
}

impl Drop for Steps<'_> {
    /// Waits for a step that was launched ahead: when a program ends, MLX destroys its allocator even if a
    /// thread of its own still frees memory into it.
    fn drop(&mut self) {
        // An error of that step concerns nobody any more.
        let _ = Stream::synchronize();
    }
}

impl Iterator for Steps<'_> {
    type Item = Result<Step>;

    fn next(&mut self) -> Option<Self::Item> {
        self.advance().transpose()
    }
}
