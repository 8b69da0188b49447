//! One file per command.

mod eval;

pub(crate) use eval::eval;

use std::path::Path;

use anyhow::{Context, Result};
use russet_engine::Sampling;
use russet_model::Model;

use crate::cli::{ModelArgs, SamplingArgs};

/// A model with the name to show for it.
pub(crate) struct Loaded {
    pub(crate) model: Model,
    pub(crate) name: String,
}

impl Loaded {
    fn load(reference: Option<&str>, args: &ModelArgs) -> Result<Self> {
        let dir = Path::new(reference.context("no model")?);
        let model = Model::load(dir, args.fidelity)?;
        Ok(Self { model, name: dir.display().to_string() })
    }
}

/// The model's recommended sampling, overridden by what the user gave.
fn sampling(args: &SamplingArgs, model: &Model) -> Sampling {
    let recommended =
        Sampling::recommended(model.checkpoint().generation_config(), model.shape().vocabulary);
    Sampling {
        temperature: args.temp.unwrap_or(recommended.temperature),
        top_p: args.top_p.unwrap_or(recommended.top_p),
        min_p: args.min_p.unwrap_or(recommended.min_p),
        min_tokens_to_keep: args.min_tokens_to_keep.unwrap_or(recommended.min_tokens_to_keep),
        xtc_probability: args.xtc_probability.unwrap_or(recommended.xtc_probability),
        xtc_threshold: args.xtc_threshold.unwrap_or(recommended.xtc_threshold),
        xtc_special_tokens: recommended.xtc_special_tokens,
        top_k: args.top_k.unwrap_or(recommended.top_k),
        logit_bias: args.logit_bias.clone(),
        repetition_penalty: args.repetition_penalty.or(recommended.repetition_penalty),
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        repetition_context_size: args
            .repetition_context_size
            .unwrap_or(recommended.repetition_context_size),
        presence_context_size: args.presence_context_size.unwrap_or(recommended.presence_context_size),
        frequency_context_size: args
            .frequency_context_size
            .unwrap_or(recommended.frequency_context_size),
    }
}

/// Prints one line of JSON to standard output.
fn print_json(value: &serde_json::Value) -> Result<()> {
    println!("{}", serde_json::to_string(value)?);
    Ok(())
}
