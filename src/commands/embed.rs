use std::io::{self, BufRead};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use russet_engine::{Embedder, Purpose};
use serde_json::json;

use super::{Located, print, print_json};
use crate::cli::EmbedArgs;

pub(crate) fn embed(args: &EmbedArgs) -> Result<ExitCode> {
    let texts = match args.texts.is_empty() {
        false => args.texts.clone(),
        true => {
            io::stdin().lock().lines().collect::<io::Result<_>>().context("cannot read standard input")?
        }
    };
    if texts.is_empty() {
        bail!("there is no text: give texts as arguments, or lines on standard input");
    }
    let located = Located::find(Some(&args.model), &args.loading.store)?;
    let embedder = Embedder::load(&located.dir, &args.loading.load_options()?)
        .with_context(|| format!("cannot load {}", located.name))?;
    let purpose = match (&args.instruction, args.query) {
        (Some(task), _) => Purpose::Instruction(task),
        (None, true) => Purpose::Query,
        (None, false) => Purpose::Document,
    };
    let mut results = Vec::new();
    for text in &texts {
        let tokens = embedder.embedding().tokens(text, purpose)?;
        let embedding = embedder.embed(&tokens, args.dimensions)?;
        match args.json {
            true => results.push(json!({ "tokens": tokens.len(), "embedding": embedding })),
            false => print(|out| writeln!(out, "{}", json!(embedding)))?,
        }
    }
    if args.json {
        print_json(&json!({
            "model": located.name,
            "fidelity": embedder.model().tier().to_string(),
            "embeddings": results,
        }))?;
    }
    Ok(ExitCode::SUCCESS)
}
