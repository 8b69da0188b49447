use std::collections::BTreeMap;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use russet_engine::evaluate::{Divergence, Recording, compare};
use russet_model::{CpuOptions, KvType, LoadOptions, Model, Precision, Tier};
use serde_json::json;

use super::{Located, print, print_json, sampling};
use crate::cli::{EvalCommand, EvalCompareArgs, EvalErrorArgs, EvalLogitsArgs};

/// More than any context; keeps a typing error from filling the memory.
const MAX_RANDOM_TOKENS: u32 = 1 << 24;

pub(crate) fn eval(command: EvalCommand) -> Result<ExitCode> {
    match command {
        EvalCommand::Logits(args) => logits(&args),
        EvalCommand::Compare(args) => compare_files(&args),
        EvalCommand::Error(args) => error(&args),
    }
}

fn logits(args: &EvalLogitsArgs) -> Result<ExitCode> {
    if args.out.extension().is_none_or(|e| e != "safetensors") {
        bail!("--out {}: the file name must end in .safetensors", args.out.display());
    }
    let located = Located::find(args.model.as_deref(), &args.loading.store)?;
    let model = &located.load_model(&args.loading)?;
    let recording = Recording {
        tokens: parse_tokens(&args.tokens)?,
        steps: args.steps as usize,
        prefill_chunk: args.loading.prefill_chunk,
        sampling: sampling(&args.sampling, model),
        seed: args.sampling.seed.unwrap_or(0),
    };
    let metadata: BTreeMap<String, String> = [
        ("format", "mlx".to_owned()),
        ("russet", env!("CARGO_PKG_VERSION").to_owned()),
        ("mlx", russet_mlx::version()),
        ("device", russet_mlx::Device::default_device().to_string()),
        ("fidelity", model.tier().to_string()),
        ("model", located.name.clone()),
        ("args", format!("{recording:?}")),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    recording
        .write(model, &args.out, &metadata)
        .with_context(|| format!("cannot record logits to {}", args.out.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn compare_files(args: &EvalCompareArgs) -> Result<ExitCode> {
    let c = compare(&args.a, &args.b)
        .with_context(|| format!("cannot compare {} and {}", args.a.display(), args.b.display()))?;
    let equal = c.is_bit_equal();
    if args.json {
        print_json(&json!({
            "bit_equal": equal,
            "arrays": c.arrays.iter().map(|(name, equal)| (name.clone(), json!(equal))).collect::<serde_json::Map<_, _>>(),
            "mismatched": c.mismatched,
            "divergence": divergence_json(&c.divergence),
        }))?;
    } else {
        print(|out| {
            for (name, equal) in &c.arrays {
                writeln!(out, "{name:<16} {}", if *equal { "equal in every bit" } else { "differs" })?;
            }
            for name in &c.mismatched {
                writeln!(out, "{name:<16} missing in one file, or of another shape or dtype")?;
            }
            write_divergence(out, &c.divergence)
        })?;
    }
    Ok(if equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Compares the CPU kernels with the f32 computation of the same stored weights.
fn error(args: &EvalErrorArgs) -> Result<ExitCode> {
    let located = Located::find(args.model.as_deref(), &args.loading.store)?;
    let language_model = located.load(&args.loading)?;
    if language_model.model.tier() != Tier::L3 {
        bail!("eval error measures fidelity l3; this model runs at {}", language_model.model.tier());
    }
    let exact = CpuOptions {
        precision: Precision::F32,
        kv: KvType::F32,
        interleave: false,
        ..args.loading.cpu_options()
    };
    let reference = Model::load(&located.dir, &LoadOptions { cpu: exact, ..args.loading.load_options()? })?;
    let text = std::fs::read_to_string(&args.text)
        .with_context(|| format!("cannot read {}", args.text.display()))?;
    let tokens = language_model.tokenizer.encode(&text, true)?;
    if tokens.is_empty() {
        bail!("{}: the text has no tokens", args.text.display());
    }
    let chunk = args.loading.prefill_chunk.unwrap_or(64);
    let divergence = Divergence::measure(&reference, &language_model.model, &tokens, chunk)?;
    if args.json {
        print_json(&divergence_json(&divergence))?;
    } else {
        print(|out| write_divergence(out, &divergence))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn divergence_json(d: &Divergence) -> serde_json::Value {
    json!({
        "positions": d.positions,
        "max_difference": d.max_difference,
        "mean_kl": d.mean_kl,
        "max_kl": d.max_kl,
        "top1_agreement": d.top1_agreement,
    })
}

fn write_divergence(out: &mut dyn Write, d: &Divergence) -> io::Result<()> {
    writeln!(out, "positions        {}", d.positions)?;
    writeln!(out, "worst difference {:e}", d.max_difference)?;
    writeln!(out, "KL divergence    mean {:e}, max {:e} nats", d.mean_kl, d.max_kl)?;
    writeln!(out, "top-1 agreement  {:.2} %", d.top1_agreement * 100.0)
}

/// `1,2,3`, `@FILE` with such a list, or `rand:COUNT[:SEED[:HIGH]]`: a fixed linear congruential
/// generator, the same as in `oracle/`.
fn parse_tokens(text: &str) -> Result<Vec<u32>> {
    if let Some(path) = text.strip_prefix('@') {
        let list = std::fs::read_to_string(path).with_context(|| format!("--tokens {text}"))?;
        return parse_list(&list);
    }
    let Some(random) = text.strip_prefix("rand:") else { return parse_list(text) };
    let numbers = random
        .split(':')
        .map(|n| n.parse::<u32>().with_context(|| format!("--tokens {text}: '{n}' is not a number")))
        .collect::<Result<Vec<_>>>()?;
    let (count, seed, high) = match numbers[..] {
        [count] => (count, 1, 256),
        [count, seed] => (count, seed, 256),
        [count, seed, high] if high > 0 => (count, seed, high),
        _ => bail!("--tokens {text}: expected rand:COUNT[:SEED[:HIGH]] with HIGH at least 1"),
    };
    if count > MAX_RANDOM_TOKENS {
        bail!("--tokens {text}: at most {MAX_RANDOM_TOKENS} tokens");
    }
    let mut state = u64::from(seed);
    Ok((0..count)
        .map(|_| {
            state = (state * 1_103_515_245 + 12_345) & 0x7fff_ffff;
            ((state >> 8) % u64::from(high)) as u32
        })
        .collect())
}

fn parse_list(text: &str) -> Result<Vec<u32>> {
    text.split([',', '\n', ' '])
        .map(str::trim)
        .filter(|t| !t.is_empty())
        .map(|t| t.parse().with_context(|| format!("--tokens: '{t}' is not a token id")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_lists_are_read_in_every_form() {
        assert_eq!(parse_tokens("1, 2,3").unwrap(), [1, 2, 3]);
        assert_eq!(parse_tokens("rand:4:7:100").unwrap().len(), 4);
        assert!(parse_tokens("rand:4:7:100").unwrap().iter().all(|&t| t < 100));
        assert_eq!(parse_tokens("rand:3").unwrap(), parse_tokens("rand:3:1:256").unwrap());
        for bad in ["1,x", "rand:", "rand:1:2:0", "rand:1:2:3:4", "rand:99999999", "-1", "@/no/such/file"] {
            assert!(parse_tokens(bad).is_err(), "{bad}");
        }
    }
}
