use std::collections::BTreeMap;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use russet_model::Model;
use serde_json::{Value, json};

use super::{Located, print, print_json};
use crate::cli::InspectArgs;

pub(crate) fn inspect(args: InspectArgs) -> Result<ExitCode> {
    let located = Located::find(args.model.as_deref(), &args.loading.store)?;
    let model = located.load_model(&args.loading)?;
    let report = report(&located, &model, args.context as usize)?;
    if args.json {
        print_json(&report)?
    } else {
        print(|out| write_text(out, &report))?
    }
    Ok(ExitCode::SUCCESS)
}

fn report(located: &Located, model: &Model, context: usize) -> Result<Value> {
    let shape = model.shape();
    let footprint = model.footprint(context);
    let mut dtypes: BTreeMap<String, usize> = BTreeMap::new();
    for (_, tensor) in model.files().tensors() {
        *dtypes.entry(tensor.dtype.to_string()).or_default() += tensor.nbytes();
    }
    let files: Vec<Value> = model
        .files()
        .files()
        .map(|(path, bytes)| json!({"name": path.file_name().map(|n| n.to_string_lossy()), "bytes": bytes}))
        .collect();
    Ok(json!({
        "model": located.name,
        "path": located.dir,
        "architecture": model.checkpoint().model_type()?,
        "fidelity": model.tier().to_string(),
        "device": russet_mlx::Device::default_device().to_string(),
        "mlx": russet_mlx::version(),
        "parameters": model.parameters(),
        "layers": shape.layers,
        "hidden_size": shape.hidden,
        "vocabulary": shape.vocabulary,
        "max_positions": shape.max_positions,
        "quantization": model.quantization().map(|q| q.default_quantization().to_string()),
        "quantization_overrides": model.quantization().map_or_else(Default::default, |q| {
            q.modules()
                .map(|(path, q)| (path.to_owned(), json!(q.map_or("dense".to_owned(), |q| q.to_string()))))
                .collect::<serde_json::Map<_, _>>()
        }),
        "bytes_by_dtype": dtypes,
        "files": files,
        "memory": {
            "context": context,
            "weights_bytes": footprint.weights,
            "weights_mapped": footprint.weights_mapped,
            "weights_interleaved_bytes": footprint.weights_interleaved,
            "kv_cache_bytes": footprint.kv_cache,
        },
    }))
}

/// The same report for people.
fn write_text(out: &mut dyn Write, report: &Value) -> io::Result<()> {
    let text = |value: &Value| match value {
        Value::String(s) => s.clone(),
        Value::Null => "none".to_owned(),
        other => other.to_string(),
    };
    let megabytes = |value: &Value| format!("{:.1} MB", value.as_f64().unwrap_or(0.0) / 1e6);
    let mut line = |label: &str, value: String| writeln!(out, "{label:<16} {value}");
    for field in ["model", "path", "architecture", "fidelity", "device", "mlx", "parameters", "layers"] {
        line(field, text(&report[field]))?;
    }
    for field in ["hidden_size", "vocabulary", "max_positions", "quantization"] {
        line(field, text(&report[field]))?;
    }
    for (module, quantization) in report["quantization_overrides"].as_object().into_iter().flatten() {
        line("", format!("{module}: {}", text(quantization)))?;
    }
    for (dtype, bytes) in report["bytes_by_dtype"].as_object().into_iter().flatten() {
        line(dtype, megabytes(bytes))?;
    }
    for file in report["files"].as_array().into_iter().flatten() {
        line("file", format!("{} ({})", text(&file["name"]), megabytes(&file["bytes"])))?;
    }
    let memory = &report["memory"];
    let kind = if memory["weights_mapped"] == true { "mapped from the files" } else { "copied" };
    line("weights", format!("{} ({kind})", megabytes(&memory["weights_bytes"])))?;
    line("interleaved", format!("{} besides", megabytes(&memory["weights_interleaved_bytes"])))?;
    line("kv_cache", format!("{} for {} tokens", megabytes(&memory["kv_cache_bytes"]), memory["context"]))
}
