//! One file per command.

mod bench;
mod chat;
mod completions;
mod embed;
mod eval;
mod fit;
mod inspect;
mod ls;
mod run;
mod serve;

pub(crate) use bench::bench;
pub(crate) use chat::chat;
pub(crate) use completions::completions;
pub(crate) use embed::embed;
pub(crate) use eval::eval;
pub(crate) use fit::fit;
pub(crate) use inspect::inspect;
pub(crate) use ls::ls;
pub(crate) use run::run;
pub(crate) use serve::serve;

use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use russet_engine::{LanguageModel, Sampling, Statistics, TextModel};
use russet_hub::{InstallOptions, Phase, STARTER_NAME, Store, install_starter};
use russet_model::Model;
use russet_text::EosTokenIds;
use serde_json::{Value, json};

use crate::cli::{ModelArgs, SamplingArgs, StoreArgs};
use crate::interrupt;

/// The folder of a model with the name to show for it.
struct Located {
    dir: PathBuf,
    name: String,
}

impl Located {
    /// The model that `reference` names; without one the starter model, installed if need be.
    fn find(reference: Option<&str>, args: &StoreArgs) -> Result<Self> {
        let store = args.open()?;
        let Some(reference) = reference else { return Self::starter(&store, args.offline) };
        let model = store.resolve(reference)?;
        Ok(Self { dir: model.path, name: model.name })
    }

    fn starter(store: &Store, offline: bool) -> Result<Self> {
        let options = InstallOptions { offline, ..InstallOptions::default() };
        let (mut bar, mut announced) = (None, false);
        let dir = install_starter(store, &options, &mut |progress| {
            let bar = bar.get_or_insert_with(install_bar);
            // What is only checked is not installed again.
            if progress.phase == Phase::Downloading && !announced {
                announced = true;
                bar.suspend(|| note(&format!("Installing the starter model {STARTER_NAME} (once)")));
            }
            bar.set_message(progress.phase.to_string());
            bar.set_length(progress.total.unwrap_or(0));
            bar.set_position(progress.done);
        })?;
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        Ok(Self { dir, name: STARTER_NAME.to_owned() })
    }

    fn load(&self, args: &ModelArgs) -> Result<LanguageModel> {
        LanguageModel::load(&self.dir, &args.load_options()?)
            .with_context(|| format!("cannot load {}", self.name))
    }

    fn open(&self, args: &ModelArgs) -> Result<TextModel> {
        TextModel::open(&self.dir, &args.load_options()?)
            .with_context(|| format!("cannot load {}", self.name))
    }

    fn load_weights(&self, text_model: TextModel, args: &ModelArgs) -> Result<Model> {
        text_model.load(&args.load_options()?).with_context(|| format!("cannot load {}", self.name))
    }

    fn load_model(&self, args: &ModelArgs) -> Result<Model> {
        Model::load(&self.dir, &args.load_options()?).with_context(|| format!("cannot load {}", self.name))
    }
}

fn install_bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{msg:12} {wide_bar} {bytes}/{total_bytes} {eta}") {
        bar.set_style(style);
    }
    bar
}

/// The model's recommended sampling, overridden by what the user gave.
fn sampling(args: &SamplingArgs, model: &Model) -> Sampling {
    let recommended = Sampling::recommended(model.checkpoint().generation_config(), model.shape().vocabulary);
    override_sampling(args, recommended)
}

/// Recommended sampling, overridden by what the user gave.
fn override_sampling(args: &SamplingArgs, recommended: Sampling) -> Sampling {
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
        repetition_context_size: args.repetition_context_size.unwrap_or(recommended.repetition_context_size),
        presence_context_size: args.presence_context_size.unwrap_or(recommended.presence_context_size),
        frequency_context_size: args.frequency_context_size.unwrap_or(recommended.frequency_context_size),
    }
}

/// [`sampling`] for text: line breaks and end-of-sequence tokens are never excluded by XTC, as in
/// mlx-lm's command line.
fn text_sampling(args: &SamplingArgs, model: &Model, line_break: Vec<u32>, eos: &EosTokenIds) -> Sampling {
    let xtc_special_tokens = line_break.into_iter().chain(eos.all.iter().copied()).collect();
    Sampling { xtc_special_tokens, ..sampling(args, model) }
}

/// The seed the user gave, or a random one.
fn seed(args: &SamplingArgs) -> u64 {
    args.seed.unwrap_or_else(|| {
        // The hasher's keys come from the operating system's random numbers.
        use std::hash::{BuildHasher, Hasher, RandomState};
        RandomState::new().build_hasher().finish()
    })
}

/// Goes on unless the user pressed ctrl-C.
fn unless_interrupted() -> ControlFlow<()> {
    if interrupt::is_requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// Statistics on two lines, for people.
fn print_statistics(s: &Statistics, model: &Model) {
    note(&format!(
        "prompt: {} tokens, {:.1} tokens/s, first token after {:.2} s",
        s.prompt_tokens,
        s.prefill_rate(),
        s.time_to_first_token.as_secs_f64()
    ));
    note(&format!(
        "answer: {} tokens, {:.1} tokens/s; fidelity {}; peak memory {:.0} MB besides {:.0} MB of weights",
        s.generated_tokens,
        s.decode_rate(),
        model.tier(),
        s.peak_memory as f64 / 1e6,
        model.footprint(0).weights as f64 / 1e6
    ));
}

/// Statistics for programs.
fn statistics_json(s: &Statistics) -> Value {
    json!({
        "prompt_tokens": s.prompt_tokens,
        "generated_tokens": s.generated_tokens,
        "ttft_ms": s.time_to_first_token.as_secs_f64() * 1e3,
        "prefill_tps": s.prefill_rate(),
        "decode_tps": s.decode_rate(),
        "peak_memory_bytes": s.peak_memory,
    })
}

/// Prints to standard output what `write` writes. Unlike with `println!`, a full disk or a closed pipe is an error.
fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = io::stdout().lock();
    write(&mut out).and_then(|()| out.flush()).context("cannot write to standard output")
}

/// Prints one line of JSON to standard output.
fn print_json(value: &Value) -> Result<()> {
    print(|out| writeln!(out, "{value}"))
}

/// The message of an error with those of its causes that it does not hold already.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match () {
        () if text.is_empty() => cause,
        () if text.contains(&cause) => text,
        () => format!("{text}: {cause}"),
    })
}

/// Prints a line to standard error, if that can be written to.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Whether standard error is seen by a person.
fn is_interactive() -> bool {
    std::io::stderr().is_terminal()
}
