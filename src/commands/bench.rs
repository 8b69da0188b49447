use std::collections::BTreeSet;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use russet_engine::{Batch, BatchOptions, Sampling};
use russet_model::Model;
use serde_json::{Value, json};

use super::{Located, print, print_json};
use crate::cli::BenchArgs;
use crate::interrupt;

/// One timed run. Rates are those of all sequences together.
struct Run {
    prefill_tps: f64,
    decode_tps: f64,
    ttft_ms: f64,
}

pub(crate) fn bench(args: BenchArgs) -> Result<ExitCode> {
    interrupt::install()?;
    let located = Located::find(args.model.as_deref(), &args.loading.store)?;
    let model = located.load_model(&args.loading)?;
    if let Some(positions) = model.shape().max_positions
        && args.prompt_tokens + args.gen_tokens > positions as usize
    {
        bail!("--prompt-tokens and --gen-tokens: more than the model's context of {positions}");
    }
    let prompt = prompt(&model, args.prompt_tokens);

    let mut runs = Vec::new();
    for index in 0..=args.runs {
        let run = measure(&model, &prompt, &args)?;
        let Some(run) = run else { return Ok(ExitCode::from(interrupt::EXIT_CODE)) };
        // The first run warms caches and is not counted.
        if index > 0 {
            runs.push(run);
        }
    }
    let report = json!({
        "model": located.name,
        "device": russet_mlx::Device::default_device().to_string(),
        "threads": model.numerics().threads(),
        "fidelity": model.tier().to_string(),
        "prompt_tokens": args.prompt_tokens,
        "gen_tokens": args.gen_tokens,
        "sequences": args.sequences,
        "weights_bytes": model.footprint(0).weights,
        "peak_rss_bytes": peak_rss()?,
        "prefill_tps": spread(runs.iter().map(|r| r.prefill_tps)),
        "decode_tps": spread(runs.iter().map(|r| r.decode_tps)),
        "ttft_ms": spread(runs.iter().map(|r| r.ttft_ms)),
    });
    if args.json {
        print_json(&report)?
    } else {
        print(|out| write_text(out, &report))?
    }
    Ok(ExitCode::SUCCESS)
}

/// Token ids that are spread over the vocabulary; what they say does not matter for time.
fn prompt(model: &Model, count: usize) -> Vec<u32> {
    let vocabulary = model.shape().vocabulary as u64;
    (0..count as u64).map(|i| (i * 2_654_435_761 % vocabulary) as u32).collect()
}

fn measure(model: &Model, prompt: &[u32], args: &BenchArgs) -> Result<Option<Run>> {
    let start = Instant::now();
    let options = BatchOptions {
        width: args.sequences,
        prefill_chunk: args.loading.prefill_chunk,
        ..BatchOptions::default()
    };
    let mut batch = Batch::new(model, options)?;
    for _ in 0..args.sequences {
        batch.insert(prompt, Sampling::default(), 0, None)?;
    }
    // Sequences whose prompt is read already generate meanwhile; the time counts as that of the prompts.
    let mut begun = BTreeSet::new();
    while begun.len() < args.sequences {
        for step in batch.step()? {
            step.step?;
            begun.insert(step.id);
        }
        if interrupt::is_requested() {
            return Ok(None);
        }
    }
    let first = Instant::now();
    for _ in 0..args.gen_tokens {
        for step in batch.step()? {
            step.step?;
        }
        if interrupt::is_requested() {
            return Ok(None);
        }
    }
    let (ttft, decode) = ((first - start).as_secs_f64(), first.elapsed().as_secs_f64());
    let total = |tokens: usize| (tokens * args.sequences) as f64;
    Ok(Some(Run {
        prefill_tps: total(prompt.len()) / ttft,
        decode_tps: total(args.gen_tokens) / decode,
        ttft_ms: ttft * 1e3,
    }))
}

/// Median, minimum and maximum.
fn spread(values: impl Iterator<Item = f64>) -> Value {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let median = match (values.get(middle), values.len() % 2) {
        (Some(m), 1) => *m,
        (Some(m), _) => (values[middle - 1] + m) / 2.0,
        (None, _) => 0.0,
    };
    json!({"median": median, "min": values.first(), "max": values.last()})
}

/// The most memory that this process has had in RAM.
fn peak_rss() -> Result<u64> {
    // Linux's getrusage also counts what the program that started this one had.
    if let Ok(status) = std::fs::read_to_string("/proc/self/status")
        && let Some(peak) = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))
        && let Ok(kilobytes) = peak.trim_end_matches("kB").trim().parse::<u64>()
    {
        return Ok(kilobytes * 1024);
    }
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF)?;
    // Kilobytes on Linux, bytes on macOS.
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    Ok(usage.max_rss() as u64 * unit)
}

fn write_text(out: &mut dyn Write, report: &Value) -> io::Result<()> {
    for field in ["model", "device", "threads", "fidelity", "prompt_tokens", "gen_tokens", "sequences"] {
        let value = &report[field];
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        writeln!(out, "{field:<16} {value}")?;
    }
    for field in ["weights_bytes", "peak_rss_bytes"] {
        writeln!(out, "{field:<16} {:.1} MB", report[field].as_f64().unwrap_or(0.0) / 1e6)?;
    }
    writeln!(out, "{:<16} {:>10} {:>10} {:>10}", "", "median", "min", "max")?;
    for field in ["prefill_tps", "decode_tps", "ttft_ms"] {
        let value = |name: &str| report[field][name].as_f64().unwrap_or(0.0);
        writeln!(out, "{field:<16} {:>10.2} {:>10.2} {:>10.2}", value("median"), value("min"), value("max"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_middle_or_the_mean_of_the_two_middles() {
        assert_eq!(spread([3.0, 1.0, 2.0].into_iter()), json!({"median": 2.0, "min": 1.0, "max": 3.0}));
        assert_eq!(spread([4.0, 1.0, 2.0, 3.0].into_iter())["median"], 2.5);
    }

    #[test]
    fn peak_memory_is_in_bytes() {
        let peak = peak_rss().unwrap();
        assert!((1 << 20..1 << 40).contains(&peak), "{peak}");
    }
}
