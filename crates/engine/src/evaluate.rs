//! Recording logits, and comparing two recordings.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use russet_mlx::{Array, Dtype, eval, load_safetensors, save_safetensors, stack};
use russet_model::{Cache, Model};

use crate::{Error, Result, Sampling, StepOptions, Steps};

/// What to record.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// One-token steps after the prompt.
    pub steps: usize,
    /// Prompt tokens per prefill call; the numerics' default where absent.
    pub prefill_chunk: Option<usize>,
    /// How tokens are picked.
    pub sampling: Sampling,
    /// Seed of the sampler.
    pub seed: u64,
}

impl Recording {
    /// Runs the model and returns, by name:
    ///
    /// - `prompt_tokens` `[P]`, int32;
    /// - `prompt_logits` `[V]`: raw logits of the last prompt position;
    /// - `step_logits` `[N, V]`: raw logits of each step;
    /// - `tokens` `[N + 1]`, int32: picked from `prompt_logits`, then from each step;
    /// - `logprobs` `[N, V]`: what the sampler saw for tokens 0…N-1.
    ///
    /// # Errors
    /// As [`Steps::start`].
    pub fn run(&self, model: &Model) -> Result<BTreeMap<String, Array>> {
        let options = StepOptions {
            sampling: self.sampling.clone(),
            seed: self.seed,
            prefill_chunk: self.prefill_chunk,
            limit: Some(self.steps + 1),
        };
        let start = Steps::start(model, &self.tokens, options, &mut |_| ControlFlow::Continue(()))?;
        let steps = start.ok_or_else(|| Error::Prompt("the prefill was cancelled".into()))?;
        let (mut tokens, mut logits, mut logprobs) = (Vec::new(), Vec::new(), Vec::new());
        for step in steps {
            let step = step?;
            eval(&[step.logits.clone(), step.logprobs.clone()])?;
            tokens.push(step.token);
            // Detached: the graph of a step would keep all former caches alive.
            logits.push(step.logits.detached()?);
            logprobs.push(step.logprobs.detached()?);
        }
        let mut arrays = BTreeMap::new();
        arrays.insert("prompt_tokens".to_owned(), token_array(&self.tokens)?);
        arrays.insert("tokens".to_owned(), token_array(&tokens)?);
        let step_logits = logits.split_off(1);
        arrays.extend(logits.pop().map(|a| ("prompt_logits".to_owned(), a)));
        if self.steps > 0 {
            logprobs.pop();
            arrays.insert("step_logits".to_owned(), stack(&step_logits, 0)?);
            arrays.insert("logprobs".to_owned(), stack(&logprobs, 0)?);
        }
        Ok(arrays)
    }

    /// [`Recording::run`] into a safetensors file with `metadata`.
    ///
    /// # Errors
    /// As [`Recording::run`], and when the file can't be written.
    pub fn write(&self, model: &Model, path: &Path, metadata: &BTreeMap<String, String>) -> Result<()> {
        Ok(save_safetensors(path, &self.run(model)?, metadata)?)
    }
}

fn token_array(tokens: &[u32]) -> Result<Array> {
    let tokens: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    Ok(Array::from_slice(&tokens, [tokens.len() as i32])?)
}

/// How two recordings differ.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Arrays in both files, with whether all their bytes are equal.
    pub arrays: Vec<(String, bool)>,
    /// Arrays in one file only, or with different shapes or dtypes.
    pub mismatched: Vec<String>,
    /// How the logits differ.
    pub divergence: Divergence,
}

impl Comparison {
    /// Whether the two hold the same arrays with the same bytes.
    pub fn is_bit_equal(&self) -> bool {
        self.mismatched.is_empty() && self.arrays.iter().all(|(_, equal)| *equal)
    }
}

/// Compares two files of [`Recording::write`] (or of the reference). KL, top-1 and differences are over
/// `prompt_logits` and `step_logits`.
///
/// # Errors
/// When a file can't be read or the two share no logits.
pub fn compare(a: &Path, b: &Path) -> Result<Comparison> {
    let (a, _) = load_safetensors(a)?;
    let (b, _) = load_safetensors(b)?;
    let mut arrays = Vec::new();
    let mut mismatched: Vec<String> = b.keys().filter(|name| !a.contains_key(*name)).cloned().collect();
    let mut sum = Sum::default();
    for (name, x) in &a {
        let Some(y) = b.get(name).filter(|y| x.shape() == y.shape() && x.dtype() == y.dtype()) else {
            mismatched.push(name.clone());
            continue;
        };
        arrays.push((name.clone(), x.to_bytes()? == y.to_bytes()?));
        if matches!(name.as_str(), "prompt_logits" | "step_logits") {
            let width = x.dim(-1)?.max(1) as usize;
            let values = |a: &Array| -> Result<Vec<f32>> { Ok(a.astype(Dtype::F32)?.to_vec()?) };
            sum.add(&values(x)?, &values(y)?, width);
        }
    }
    let divergence = sum.finish();
    if divergence.positions == 0 {
        return Err(Error::Prompt("the two files have no logits of the same shape and dtype".into()));
    }
    Ok(Comparison { arrays, mismatched, divergence })
}

/// How far a model's next-token distributions are from those of a reference, over a text.
#[derive(Clone, Debug, Default)]
pub struct Divergence {
    /// Positions compared.
    pub positions: usize,
    /// Mean over positions of KL(reference ‖ model) in nats.
    pub mean_kl: f64,
    /// Largest KL of a position in nats.
    pub max_kl: f64,
    /// Fraction of positions whose most likely token is the same.
    pub top1_agreement: f64,
    /// Largest difference of two logits of the same position and token.
    pub max_difference: f64,
}

impl Divergence {
    /// Compares `model` with `reference` on `tokens`: both read the text (teacher forcing), `chunk` tokens
    /// per call, and their logits at every position are compared.
    ///
    /// # Errors
    /// When the models have different vocabularies, the text has ids outside of them, or a model fails.
    pub fn measure(reference: &Model, model: &Model, tokens: &[u32], chunk: usize) -> Result<Self> {
        let vocabulary = model.shape().vocabulary;
        if reference.shape().vocabulary != vocabulary {
            return Err(Error::Prompt("the two models have different vocabularies".into()));
        }
        reference.check_tokens(tokens)?;
        let (mut cache_a, mut cache_b) = (reference.new_cache(), model.new_cache());
        let mut sum = Sum::default();
        for chunk in tokens.chunks(chunk.max(1)) {
            let tokens = Array::from_slice(chunk, [1, chunk.len() as i32])?;
            let logits = |model: &Model, cache: &mut Cache| -> Result<Vec<f32>> {
                let hidden = model.forward(&tokens, cache)?;
                Ok(model.logits(&hidden)?.astype(Dtype::F32)?.to_vec()?)
            };
            let (a, b) = (logits(reference, &mut cache_a)?, logits(model, &mut cache_b)?);
            sum.add(&a, &b, vocabulary.max(1) as usize);
        }
        Ok(sum.finish())
    }
}

/// Adds up differences of rows of logits.
#[derive(Default)]
struct Sum {
    total: Divergence,
    agreements: usize,
}

impl Sum {
    fn add(&mut self, a: &[f32], b: &[f32], width: usize) {
        for (p, q) in a.chunks(width).zip(b.chunks(width)) {
            let kl = kl_divergence(p, q);
            let difference = p.iter().zip(q).map(|(p, q)| f64::from((p - q).abs())).fold(0.0, f64::max);
            self.total.positions += 1;
            self.total.max_difference = self.total.max_difference.max(difference);
            self.total.mean_kl += kl;
            self.total.max_kl = self.total.max_kl.max(kl);
            self.agreements += usize::from(argmax(p) == argmax(q));
        }
    }

    fn finish(mut self) -> Divergence {
        let positions = self.total.positions.max(1) as f64;
        self.total.mean_kl /= positions;
        self.total.top1_agreement = self.agreements as f64 / positions;
        self.total
    }
}

/// KL(p ‖ q) in nats of the softmax distributions of two rows of logits.
pub fn kl_divergence(p: &[f32], q: &[f32]) -> f64 {
    let normalizer = |x: &[f32]| {
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from(max) + x.iter().map(|&v| f64::from(v - max).exp()).sum::<f64>().ln()
    };
    let (np, nq) = (normalizer(p), normalizer(q));
    p.iter()
        .zip(q)
        .map(|(&p, &q)| {
            let (p, q) = (f64::from(p) - np, f64::from(q) - nq);
            if p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - q) }
        })
        .sum()
}

/// The first of the largest values.
fn argmax(x: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in x.iter().enumerate() {
        if *v > x[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kl_of_equal_rows_is_zero_and_of_known_rows_is_right() {
        assert_eq!(kl_divergence(&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]), 0.0);
        // Adding a constant to all logits changes nothing.
        assert!(kl_divergence(&[1.0, 2.0], &[11.0, 12.0]).abs() < 1e-6);
        // p = (1/2, 1/2), q = (1/4, 3/4): KL = ln 2 - ln(3) / 2 + ln(2) … = 0.1438…
        let kl = kl_divergence(&[0.0, 0.0], &[0.0, 3f32.ln()]);
        assert!((kl - 0.143_841).abs() < 1e-5, "{kl}");
    }

    #[test]
    fn argmax_takes_the_first_of_equals() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    }
}
