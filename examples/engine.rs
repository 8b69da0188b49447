//! An engine without a server: two answers at once, streamed as they come, of which one is cancelled.
//!
//!     cargo run --release --example engine -- path/to/a/checkpoint

use std::io::{Write, stdout};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use russet_engine::{Engine, EngineOptions, LanguageModel, Output, Request, SubmitOptions};
use russet_model::LoadOptions;

fn main() -> Result<()> {
    let dir: PathBuf = std::env::args_os().nth(1).context("name the folder of a checkpoint")?.into();
    // The model lives on the engine's thread, and so it is loaded there.
    let load = move || LanguageModel::load(&dir, &LoadOptions::default());
    let engine = Engine::start(load, EngineOptions::default())?;
    let tokenizer = &engine.facts().tokenizer;

    let ask = |prompt: &str, max_tokens: usize| -> Result<_> {
        let request =
            Request { continues_prompt: true, ..Request::new(tokenizer.encode_prompt(prompt)?, max_tokens) };
        Ok(engine.submit(request, SubmitOptions::default())?)
    };
    let mut short = ask("The capital of France is", 24)?;
    let mut endless = ask("Once upon a time", 100_000)?;

    // Both are generated together from here on; what is not read yet waits in memory.
    while let Some(output) = short.blocking_next() {
        match output {
            Output::Token { text, .. } => print(&text)?,
            Output::End { text, finish_reason, statistics } => {
                print(&text)?;
                print(&format!(
                    "\n[{}, {} tokens, {:.1} tokens/s]\n",
                    finish_reason.name(),
                    statistics.generated_tokens,
                    statistics.decode_rate()
                ))?;
            }
            Output::Failed(e) => return Err(e.into()),
        }
    }
    for _ in 0..10 {
        if let Some(Output::Token { text, .. }) = endless.blocking_next() {
            print(&text)?;
        }
    }
    // Whoever lets go of an answer ends it.
    drop(endless);
    print("… [cancelled]\n")?;
    engine.stop(Instant::now() + Duration::from_secs(5));
    Ok(())
}

fn print(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}
