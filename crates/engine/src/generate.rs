use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use russet_mlx::memory;
use russet_model::graphs::Shape;
use russet_model::profile::Resolution;
use russet_model::{Checkpoint, LoadOptions, Model, Tier};
use russet_text::{EosTokenIds, StreamingDetokenizer, Tokenizer};

use crate::answer::AnswerText;
use crate::{Error, Result, Sampling, StepOptions, Steps};

/// A model with its tokenizer.
pub struct LanguageModel {
    /// The weights and their graph.
    pub model: Model,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Tokens that end an answer: those of config, generation config and tokenizer.
    pub eos: EosTokenIds,
}

impl LanguageModel {
    /// Loads the checkpoint in `dir`.
    ///
    /// # Errors
    /// As [`TextModel::open`] and [`TextModel::load`].
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self> {
        let text_model = TextModel::open(dir, options)?;
        let (tokenizer, eos) = (text_model.tokenizer.clone(), text_model.eos.clone());
        Ok(Self { model: text_model.load(options)?, tokenizer, eos })
    }
}

/// A checkpoint that is read but for its weights.
pub struct TextModel {
    /// Config and generation config.
    pub checkpoint: Checkpoint,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Tokens that end an answer.
    pub eos: EosTokenIds,
    resolution: Resolution,
}

impl TextModel {
    /// Reads the checkpoint in `dir`. Of `options` only the profile's matter here.
    ///
    /// # Errors
    /// As [`Resolution::resolve`] and [`Tokenizer::from_dir`].
    pub fn open(dir: &Path, options: &LoadOptions) -> Result<Self> {
        let checkpoint = Checkpoint::open(dir)?;
        let resolution = Resolution::resolve(&checkpoint, &options.profile)?;
        let tokenizer = Tokenizer::from_dir(dir)?;
        let eos = EosTokenIds::new(
            checkpoint.config().get("eos_token_id"),
            checkpoint.generation_config().get("eos_token_id"),
            &tokenizer,
        )?;
        Ok(Self { checkpoint, tokenizer, eos, resolution })
    }

    /// Loads the weights. Unless it was cloned, the tokenizer is gone then: it takes much memory, and a detokenizer is
    /// enough for an answer.
    ///
    /// # Errors
    /// As [`Model::load`], and when the tokenizer has ids that the embedding lacks.
    pub fn load(self, options: &LoadOptions) -> Result<Model> {
        let Self { checkpoint, tokenizer, resolution, .. } = self;
        let tokens = tokenizer.vocab_size();
        drop(tokenizer);
        // Parsing the tokenizer took more memory than it keeps: better before the weights than on top of them.
        memory::trim();
        memory::drop_code();
        let model = Model::from_profile(checkpoint, resolution, options.fidelity, options.cpu)?;
        let rows = model.shape().vocabulary as usize;
        if tokens > rows {
            return Err(Error::Prompt(format!(
                "{}: the tokenizer has {tokens} tokens but the model's embedding only {rows} rows; the files \
                 do not belong together",
                model.checkpoint().dir().display()
            )));
        }
        Ok(model)
    }
}

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// How tokens are picked.
    pub sampling: Sampling,
    /// Seed of the sampler.
    pub seed: u64,
    /// Tokens to generate, at most. The model's context may end it earlier.
    pub max_tokens: usize,
    /// Text that ends the answer; it is not part of it.
    pub stop: Vec<String>,
    /// The text continues the prompt as it stands: a first space is part of it. Otherwise it is an
    /// answer, and mlx-lm's rules decide.
    pub continues_prompt: bool,
    /// Prompt tokens per prefill call; the numerics' default where absent.
    pub prefill_chunk: Option<usize>,
}

impl Request {
    /// Greedy generation of at most `max_tokens` tokens.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            sampling: Sampling::default(),
            seed: 0,
            max_tokens,
            stop: Vec::new(),
            continues_prompt: false,
            prefill_chunk: None,
        }
    }
}

/// What happens during a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// This many tokens of the prompt are processed.
    Prompt(usize),
    /// A token was generated, and this text, possibly empty, is final.
    Text(&'a str),
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-sequence token or a stop string.
    Stop,
    /// The limit of tokens, or the end of the model's context.
    Length,
    /// The caller.
    Cancelled,
}

impl FinishReason {
    /// The name in JSON results, as OpenAI's API has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A finished generation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// All text, without stop string.
    pub text: String,
    /// All generated tokens, an end-of-sequence token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Times and memory.
    pub statistics: Statistics,
}

/// Times and memory of a generation.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, tokens that were known from an earlier request.
    pub cached_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// From the start to the first token.
    pub time_to_first_token: Duration,
    /// From the first token to the end.
    pub decode_time: Duration,
    /// The most memory that MLX held plus the sequence's cache, in bytes; weights are not counted.
    pub peak_memory: usize,
}

impl Statistics {
    /// Prompt tokens per second up to the first token.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prompt_tokens, self.time_to_first_token)
    }

    /// Tokens per second after the first token.
    pub fn decode_rate(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(1), self.decode_time)
    }
}

fn rate(count: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
}

/// Generates text. `on_event` hears of every prompt chunk and token; breaking cancels.
///
/// # Errors
/// As [`generate_with`].
pub fn generate(
    language_model: &LanguageModel,
    request: &Request,
    on_event: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
) -> Result<Generation> {
    let LanguageModel { model, tokenizer, eos } = language_model;
    generate_with(model, tokenizer.detokenizer(), eos, request, on_event)
}

/// [`generate()`] without a tokenizer: the detokenizer makes the text.
///
/// # Errors
/// When the prompt is empty, has ids outside the vocabulary or fills the model's context, when options
/// are out of range, and when the model fails.
pub fn generate_with(
    model: &Model,
    detokenizer: StreamingDetokenizer,
    eos: &EosTokenIds,
    request: &Request,
    on_event: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
) -> Result<Generation> {
    let max_tokens = request.max_tokens.min(room_in_context(&model.shape(), request.prompt.len())?);
    memory::reset_peak();
    let start = Instant::now();

    let mut generation = Generation {
        text: String::new(),
        tokens: Vec::new(),
        finish_reason: FinishReason::Cancelled,
        statistics: Statistics { prompt_tokens: request.prompt.len(), ..Statistics::default() },
    };
    let options = StepOptions {
        sampling: request.sampling.clone(),
        seed: request.seed,
        prefill_chunk: request.prefill_chunk,
        limit: Some(max_tokens),
    };
    let steps = Steps::start(model, &request.prompt, options, &mut |done| on_event(Event::Prompt(done)))?;
    let mut first_token = None;
    if let Some(steps) = steps {
        let mut text = AnswerText::new(detokenizer, &request.stop, request.continues_prompt);
        generation.finish_reason = FinishReason::Length;
        let mut steps = steps;
        for step in steps.by_ref() {
            let token = step?.token;
            first_token.get_or_insert_with(Instant::now);
            generation.tokens.push(token);
            let (new, ended) = text.push(token, eos);
            generation.text.push_str(&new);
            let flow = on_event(Event::Text(&new));
            if let Some(reason) = ended {
                generation.finish_reason = reason;
                break;
            }
            if flow.is_break() {
                generation.finish_reason = FinishReason::Cancelled;
                break;
            }
        }
        if model.tier() == Tier::L3 {
            // MLX counts the caches of its own.
            generation.statistics.peak_memory = steps.cache().nbytes();
        }
        let (rest, ended) = text.finish();
        generation.finish_reason = ended.unwrap_or(generation.finish_reason);
        if !rest.is_empty() {
            generation.text.push_str(&rest);
            let _ = on_event(Event::Text(&rest));
        }
    }
    let end = Instant::now();
    let first_token = first_token.unwrap_or(end);
    generation.statistics.generated_tokens = generation.tokens.len();
    generation.statistics.time_to_first_token = first_token - start;
    generation.statistics.decode_time = end - first_token;
    generation.statistics.peak_memory += memory::peak();
    Ok(generation)
}

/// How many tokens the model's positions leave room for behind a prompt of `length` tokens.
///
/// # Errors
/// When there is none.
pub(crate) fn room_in_context(shape: &Shape, length: usize) -> Result<usize> {
    let Some(positions) = shape.max_positions else { return Ok(usize::MAX) };
    match (positions as usize).saturating_sub(length) {
        0 => Err(Error::Prompt(format!(
            "the prompt has {length} tokens, which fills the model's context of {positions}: shorten it"
        ))),
        room => Ok(room),
    }
}
