//! From logits to a token: the pipeline of `mlx_lm.sample_utils`, bit-exact for equal seeds.

use russet_mlx::random::{self, KeySequence};
use russet_mlx::{Array, Dtype, select};
use serde_json::{Map, Value};

use crate::{Error, Result};

/// How tokens are picked. Stages run in the order of the fields; those at their neutral value are
/// skipped and use no random number.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 picks the most likely token; otherwise logits are multiplied by `1 / temperature`.
    pub temperature: f64,
    /// Keep the most likely tokens that together reach this probability; off unless in (0, 1).
    pub top_p: f64,
    /// Keep tokens at least this fraction as likely as the best; off at 0.
    pub min_p: f64,
    /// Tokens that `min_p` always keeps.
    pub min_tokens_to_keep: i32,
    /// Chance that the most likely tokens above `xtc_threshold`, except the least likely of them, are
    /// excluded; off at 0.
    pub xtc_probability: f64,
    /// Probability above which `xtc_probability` excludes; at most 0.5.
    pub xtc_threshold: f64,
    /// Tokens that are never excluded by `xtc_probability`.
    pub xtc_special_tokens: Vec<u32>,
    /// Keep this many tokens; off at 0.
    pub top_k: i32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Divides positive and multiplies negative logits of recent tokens; off at `None` or 0.
    pub repetition_penalty: Option<f64>,
    /// Subtracted once from logits of recent tokens; off at `None` or 0.
    pub presence_penalty: Option<f64>,
    /// Subtracted from logits of recent tokens per occurrence; off at `None` or 0.
    pub frequency_penalty: Option<f64>,
    /// How many recent tokens, prompt included, `repetition_penalty` looks at; 0 means all.
    pub repetition_context_size: i32,
    /// How many recent tokens `presence_penalty` looks at.
    pub presence_context_size: i32,
    /// How many recent tokens `frequency_penalty` looks at.
    pub frequency_context_size: i32,
}

impl Default for Sampling {
    /// Greedy, as mlx-lm without options.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            min_p: 0.0,
            min_tokens_to_keep: 1,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            xtc_special_tokens: Vec::new(),
            top_k: 0,
            logit_bias: Vec::new(),
            repetition_penalty: None,
            presence_penalty: None,
            frequency_penalty: None,
            repetition_context_size: 20,
            presence_context_size: 20,
            frequency_context_size: 20,
        }
    }
}

impl Sampling {
    /// What a checkpoint's `generation_config.json` recommends; defaults for the rest. Values that
    /// cannot be used are ignored: they are recommendations.
    pub fn recommended(generation_config: &Map<String, Value>, vocabulary: i32) -> Self {
        let number = |name: &str, valid: fn(f64) -> bool| {
            generation_config.get(name).and_then(Value::as_f64).filter(|&v| valid(v))
        };
        let mut sampling = Self::default();
        if generation_config.get("do_sample") != Some(&Value::Bool(false)) {
            sampling.temperature = number("temperature", |t| t.is_finite() && t >= 0.0)
                .unwrap_or(if generation_config.contains_key("do_sample") { 1.0 } else { 0.0 });
            sampling.top_p = number("top_p", |p| (0.0..=1.0).contains(&p)).unwrap_or(sampling.top_p);
            sampling.min_p = number("min_p", |p| (0.0..=1.0).contains(&p)).unwrap_or(sampling.min_p);
            sampling.top_k = number("top_k", |k| k.fract() == 0.0 && k > 0.0 && k < f64::from(i32::MAX))
                .map(|k| k as i32)
                .filter(|&k| k < vocabulary)
                .unwrap_or(0);
        }
        // 1 is neutral; passing it on would cost a stage per token.
        sampling.repetition_penalty =
            number("repetition_penalty", |p| p.is_finite() && p > 0.0).filter(|&p| p != 1.0);
        sampling
    }

    /// Checks the ranges for a model with this many tokens.
    ///
    /// # Errors
    /// Naming the first option that is out of its range.
    pub fn check(&self, vocabulary: i32) -> Result<()> {
        let fail = |option, message: String| Err(Error::Option { option, message });
        let unit = |option, value: f64| match (0.0..=1.0).contains(&value) {
            true => Ok(()),
            false => fail(option, format!("{value} is not in [0, 1]")),
        };
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return fail("temp", format!("{} is not a number of at least 0", self.temperature));
        }
        unit("top-p", self.top_p)?;
        unit("min-p", self.min_p)?;
        unit("xtc-probability", self.xtc_probability)?;
        if !(0.0..=0.5).contains(&self.xtc_threshold) {
            return fail("xtc-threshold", format!("{} is not in [0, 0.5]", self.xtc_threshold));
        }
        if !(0..vocabulary).contains(&self.top_k) {
            return fail("top-k", format!("{} is not in [0, {vocabulary})", self.top_k));
        }
        if !(1..=vocabulary).contains(&self.min_tokens_to_keep) {
            let message = format!("{} is not in [1, {vocabulary}]", self.min_tokens_to_keep);
            return fail("min-tokens-to-keep", message);
        }
        for (option, penalty) in [
            ("repetition-penalty", self.repetition_penalty),
            ("presence-penalty", self.presence_penalty),
            ("frequency-penalty", self.frequency_penalty),
        ] {
            if let Some(p) = penalty
                && (!p.is_finite() || (option == "repetition-penalty" && p < 0.0))
            {
                return fail(option, format!("{p} is not a usable penalty"));
            }
        }
        for (option, size) in [
            ("repetition-context-size", self.repetition_context_size),
            ("presence-context-size", self.presence_context_size),
            ("frequency-context-size", self.frequency_context_size),
        ] {
            if size < 0 {
                return fail(option, format!("{size} is not a number of at least 0"));
            }
        }
        let outside = |token: u32| i64::from(token) >= i64::from(vocabulary);
        if let Some((token, _)) = self.logit_bias.iter().find(|(t, b)| outside(*t) || b.is_nan()) {
            return fail("logit-bias", format!("token {token} is not in the vocabulary, or its bias is NaN"));
        }
        if let Some(token) = self.xtc_special_tokens.iter().find(|&&t| outside(t)) {
            return fail("xtc-special-tokens", format!("token {token} is not in the vocabulary"));
        }
        Ok(())
    }

    /// Whether processors need the tokens so far.
    pub(crate) fn has_processors(&self) -> bool {
        let on = |p: Option<f64>| p.is_some_and(|p| p != 0.0);
        !self.logit_bias.is_empty()
            || on(self.repetition_penalty)
            || on(self.presence_penalty)
            || on(self.frequency_penalty)
    }

    /// Applies bias and penalties to `logits` `[1, vocabulary]`. `tokens` are all tokens so far.
    pub(crate) fn process(&self, logits: &Array, tokens: &Array) -> russet_mlx::Result<Array> {
        let mut logits = logits.clone();
        if !self.logit_bias.is_empty() {
            let (ids, biases): (Vec<u32>, Vec<f32>) = self.logit_bias.iter().copied().unzip();
            let count = ids.len() as i32;
            let ids = Array::from_slice(&ids, [count])?;
            logits = logits.scatter_add(&[ids], &columns(&Array::from_slice(&biases, [1, count])?)?, [1])?;
        }
        // 0 means all, as a slice from -0 does in Python.
        let recent = |size: i32| tokens.slice_axis(0, -size.min(tokens.dim(0)?), i32::MAX);
        let on = |p: Option<f64>| p.filter(|&p| p != 0.0);
        if let Some(penalty) = on(self.repetition_penalty) {
            let tokens = recent(self.repetition_context_size)?;
            let old = logits.take(&tokens, 1)?;
            let new = select(&old.less(0)?, &old.multiply(penalty)?, &old.divide(penalty)?)?;
            logits = logits.scatter(&[tokens], &columns(&new)?, [1])?;
        }
        if let Some(penalty) = on(self.presence_penalty) {
            let tokens = recent(self.presence_context_size)?;
            let new = logits.take(&tokens, 1)?.subtract(penalty)?;
            logits = logits.scatter(&[tokens], &columns(&new)?, [1])?;
        }
        if let Some(penalty) = on(self.frequency_penalty) {
            let tokens = recent(self.frequency_context_size)?;
            let penalty = Array::full([1, tokens.dim(0)?], -penalty, logits.dtype())?;
            logits = logits.scatter_add(&[tokens], &columns(&penalty)?, [1])?;
        }
        Ok(logits)
    }

    /// Picks a token from `logprobs` `[1, vocabulary]`; returns `[1]`.
    pub(crate) fn sample(&self, logprobs: &Array, keys: &mut KeySequence) -> russet_mlx::Result<Array> {
        if self.temperature == 0.0 {
            return logprobs.argmax(-1, false);
        }
        let mut logprobs = logprobs.clone();
        if self.top_p > 0.0 && self.top_p < 1.0 {
            logprobs = top_p(&logprobs, self.top_p)?;
        }
        if self.min_p != 0.0 {
            logprobs = min_p(&logprobs, self.min_p, self.min_tokens_to_keep)?;
        }
        if self.xtc_probability > 0.0 {
            logprobs = self.xtc(&logprobs, &keys.next_key()?)?;
        }
        if self.top_k > 0 {
            logprobs = top_k(&logprobs, self.top_k)?;
        }
        random::categorical(&logprobs.multiply(1.0 / self.temperature)?, -1, &keys.next_key()?)
    }

    /// Excludes top choices (XTC).
    fn xtc(&self, logprobs: &Array, key: &Array) -> russet_mlx::Result<Array> {
        let probs = logprobs.softmax(-1, false)?;
        let above = select(&probs.greater(self.xtc_threshold)?, &probs, f64::INFINITY)?;
        let mut excluded = probs.greater(&above.min([-1], true)?)?;
        if !self.xtc_special_tokens.is_empty() {
            let ids = Array::from_slice(&self.xtc_special_tokens, [1, self.xtc_special_tokens.len() as i32])?;
            excluded = excluded.put_along_axis(&ids, &Array::scalar_int(0, Dtype::Bool)?, -1)?;
        }
        let draw = random::uniform(0.0, 1.0, [0i32; 0], Dtype::F32, key)?;
        let filtered = select(&excluded, f64::NEG_INFINITY, logprobs)?;
        select(&draw.greater(self.xtc_probability)?, logprobs, &filtered)
    }
}

/// `[1, n]` values as the updates of a scatter along axis 1: `[n, 1, 1]`.
fn columns(values: &Array) -> russet_mlx::Result<Array> {
    values.transpose_all()?.expand_dims([2])
}

fn top_p(logprobs: &Array, top_p: f64) -> russet_mlx::Result<Array> {
    let sorted = logprobs.sort(-1)?;
    let probs = sorted.astype(Dtype::F32)?.exp()?;
    let above = probs.cumsum(-1, true, false)?;
    let total = above.slice_axis(-1, 0, 1)?.add(&probs.slice_axis(-1, 0, 1)?)?;
    let dropped = above.greater_equal(&total.multiply(top_p)?)?.sum([-1], true)?;
    let threshold = sorted.take_along_axis(&dropped, -1)?;
    select(&logprobs.less(&threshold)?, f64::NEG_INFINITY, logprobs)
}

fn min_p(logprobs: &Array, min_p: f64, keep: i32) -> russet_mlx::Result<Array> {
    let threshold = logprobs.max([-1], true)?.add(min_p.ln())?;
    let mut removed = logprobs.less(&threshold)?;
    if keep > 1 {
        let best = logprobs.argpartition(-keep, -1)?.slice_axis(-1, -keep, i32::MAX)?;
        removed = removed.put_along_axis(&best, &Array::scalar_int(0, Dtype::Bool)?, -1)?;
    }
    select(&removed, f64::NEG_INFINITY, logprobs)
}

fn top_k(logprobs: &Array, k: i32) -> russet_mlx::Result<Array> {
    let rest = logprobs.negative()?.argpartition(k - 1, -1)?.slice_axis(-1, k, i32::MAX)?;
    logprobs.put_along_axis(&rest, f64::NEG_INFINITY, -1)
}
