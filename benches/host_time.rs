//! Time that the host spends on one decode step with MLX: on building the step's graph and on handing it to the
//! device; and that of the whole step.
//!
//! `cargo bench --bench host_time -- MODEL [STEPS]` prints the medians in microseconds as one line of JSON.
//! `benches/compare/host_time.py` sets them against mlx-lm's.

#![allow(clippy::print_stdout, reason = "a benchmark prints")]

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use russet_mlx::{Array, async_eval, eval};
use russet_model::{Cache, Fidelity, LoadOptions, Model, Tier};

const PROMPT: u32 = 64;
const WARM_UP: usize = 20;

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1).filter(|a| !a.starts_with('-'));
    let dir = words.next().context("give the folder of a model")?;
    let steps: usize = words.next().map_or(Ok(200), |n| n.parse()).context("STEPS is no number")?;
    let model = Model::load(Path::new(&dir), &LoadOptions::new(Fidelity::Tier(Tier::L1)))?;
    let mut cache = model.new_cache();
    let prompt: Vec<u32> = (0..PROMPT).collect();
    let mut token = next_token(&model, &Array::from_slice(&prompt, [1, PROMPT as i32])?, &mut cache)?;
    eval(&[token.clone()])?;

    let mut samples = Vec::new();
    for step in 0..WARM_UP + steps {
        let start = Instant::now();
        token = next_token(&model, &token.expand_dims([0])?, &mut cache)?;
        let built = start.elapsed();
        async_eval(&[token.clone()])?;
        let launched = start.elapsed();
        token.item::<u32>()?;
        if step >= WARM_UP {
            samples.push([built, launched - built, start.elapsed()].map(|t| t.as_secs_f64() * 1e6));
        }
    }
    let median = |part: usize| {
        let mut values: Vec<f64> = samples.iter().map(|sample| sample[part]).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    println!("{}", serde_json::json!({"build": median(0), "launch": median(1), "step": median(2)}));
    Ok(())
}

/// The most likely token `[1]` after `tokens` `[1, seq]`, not computed yet, by the operations of a greedy step.
fn next_token(model: &Model, tokens: &Array, cache: &mut Cache) -> Result<Array> {
    let hidden = model.forward(tokens, cache)?;
    let logits = model.logits(&hidden)?.slice_axis(1, -1, i32::MAX)?.squeeze([1])?;
    let logprobs = logits.subtract(&logits.logsumexp([0, 1], true)?)?;
    Ok(logprobs.argmax(-1, false)?)
}
