use std::process::ExitCode;

use anyhow::Result;
use russet_engine::EngineOptions;
use serde_json::json;

use super::{Located, print, print_json};
use crate::cli::FitArgs;

pub(crate) fn fit(args: FitArgs) -> Result<ExitCode> {
    let located = Located::find(args.model.as_deref(), &args.loading.store)?;
    let model = located.load_model(&args.loading)?;
    let context = args.context as usize;
    let options = EngineOptions { memory_budget: args.memory_budget, ..EngineOptions::default() };
    // A short sequence is not read in chunks of full length.
    let chunk = args.loading.prefill_chunk.unwrap_or_else(|| options.chunk(&model)).min(context);
    let plan = EngineOptions { prefill_chunk: Some(chunk), ..options }.memory_plan(&model);
    let sequences = args.sequences as usize;
    let states = plan.sequence(context).saturating_mul(sequences);
    let total = plan.fixed().saturating_add(states);
    let fits = total <= plan.budget();
    let positions = model.shape().max_positions.map_or(usize::MAX, |positions| positions.max(0) as usize);
    // A sequence alone is checked when it is asked for, so the longest is that of one.
    let longest = plan.longest(positions.min(1 << 24));
    if args.json {
        print_json(&json!({
            "model": located.name,
            "fidelity": model.tier().to_string(),
            "context": context,
            "sequences": sequences,
            "weights_bytes": plan.weights(),
            "overhead_bytes": plan.overhead(),
            "state_bytes_per_sequence": plan.sequence(context),
            "total_bytes": total,
            "budget_bytes": plan.budget(),
            "fits": fits,
            "longest_sequence": longest,
            "max_positions": model.shape().max_positions,
        }))?;
    } else {
        let megabytes = |bytes: usize| format!("{:.1} MB", bytes as f64 / 1e6);
        let each = match sequences {
            1 => format!("of {context} tokens"),
            n => format!("of {n} sequences of {context} tokens"),
        };
        print(|out| {
            let mut line = |label: &str, value: String| writeln!(out, "{label:<16} {value}");
            line("model", located.name.clone())?;
            line("weights", megabytes(plan.weights()))?;
            line("program, a call", megabytes(plan.overhead()))?;
            line("state", format!("{} {each}", megabytes(states)))?;
            line("total", megabytes(total))?;
            line("may be used", megabytes(plan.budget()))?;
            line("fits", if fits { "yes" } else { "no" }.into())?;
            line("longest sequence", format!("{longest} tokens"))
        })?;
    }
    Ok(if fits { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
