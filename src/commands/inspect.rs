use std::collections::BTreeMap;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use russet_model::profile::{Capability, Profile, Resolution};
use russet_model::{Checkpoint, Model};
use serde_json::{Value, json};

use super::{Located, print, print_json};
use crate::cli::InspectArgs;

pub(crate) fn inspect(args: InspectArgs) -> Result<ExitCode> {
    let located = Located::find(args.model.as_deref(), &args.loading.store)?;
    let cannot_load = || format!("cannot load {}", located.name);
    let options = args.loading.load_options()?;
    let checkpoint = Checkpoint::open(&located.dir).with_context(cannot_load)?;
    let resolution = Resolution::choose(&checkpoint, &options.profile).with_context(cannot_load)?;
    let why_not = resolution.check_engine(&checkpoint).err().map(|error| error.to_string());

    let mut report = json!({
        "model": located.name,
        "path": located.dir,
        "architecture": checkpoint.model_type()?,
        "profile": profile(resolution.profile()),
        "resolution": resolution_report(&resolution),
        "runs": why_not.is_none(),
        "why_not": why_not,
    });
    if why_not.is_none() {
        let model = Model::from_profile(checkpoint, resolution, options.fidelity, options.cpu)
            .with_context(cannot_load)?;
        let of_model = model_report(&model, args.context as usize);
        if let (Value::Object(report), Value::Object(of_model)) = (&mut report, of_model) {
            report.extend(of_model);
        }
    }
    if args.json {
        print_json(&report)?
    } else {
        print(|out| write_text(out, &report))?
    }
    Ok(ExitCode::SUCCESS)
}

/// A profile, in the form in which --profiles reads it.
fn profile(profile: &Profile) -> Value {
    let (graph, tier) = (profile.graph(), profile.tier());
    json!({
        "id": profile.id(),
        "artifact_fingerprint": profile.artifact().map(|a| a.fingerprint.to_string()),
        "config_fingerprint": profile.artifact().map(|a| a.config.to_string()),
        "fidelity": {"tier": tier.id(), "oracle": tier.oracle(), "claim": tier.claim()},
        "required_capabilities": ids(profile.required()),
        "execution": {
            "loader": graph.loader().id(),
            "graph": graph.id(),
            "loop": graph.loop_kind().id(),
            "specialization": profile.specialization().id(),
            "implementation": profile.specialization().implementation(),
        },
    })
}

/// How the profile was found, and what the engine makes of it.
fn resolution_report(resolution: &Resolution) -> Value {
    let (required, missing) = (resolution.profile().required(), resolution.missing());
    json!({
        "reason": resolution.reason(),
        "exact": resolution.is_exact(),
        "artifact_fingerprint": resolution.artifact().map(ToString::to_string),
        "config_fingerprint": resolution.config().to_string(),
        "present_capabilities": ids(required.difference(missing)),
        "missing_capabilities": ids(missing),
    })
}

fn ids<'a>(capabilities: impl IntoIterator<Item = &'a Capability>) -> Vec<&'static str> {
    capabilities.into_iter().map(|capability| capability.id()).collect()
}

/// What only a loaded model tells.
fn model_report(model: &Model, context: usize) -> Value {
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
    json!({
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
    })
}

/// The same report for people.
fn write_text(out: &mut dyn Write, report: &Value) -> io::Result<()> {
    let text = |value: &Value| match value {
        Value::String(s) => s.clone(),
        Value::Null => "none".to_owned(),
        other => other.to_string(),
    };
    let megabytes = |value: &Value| format!("{:.1} MB", value.as_f64().unwrap_or(0.0) / 1e6);
    let list = |value: &Value| match value.as_array().map(Vec::as_slice) {
        None | Some([]) => "none".to_owned(),
        Some(values) => values.iter().map(text).collect::<Vec<_>>().join(", "),
    };
    let mut line = |label: &str, value: String| writeln!(out, "{label:<16} {value}");
    for field in ["model", "path", "architecture"] {
        line(field, text(&report[field]))?;
    }
    let (profile, resolution) = (&report["profile"], &report["resolution"]);
    line("profile", text(&profile["id"]))?;
    line("chosen for", text(&resolution["reason"]))?;
    let promise = &profile["fidelity"];
    let oracle = promise["oracle"].as_str().map_or_else(String::new, |oracle| format!(" with {oracle}"));
    line(
        "promise",
        format!("{} ({}{oracle})", text(&promise["tier"]).to_uppercase(), text(&promise["claim"])),
    )?;
    let execution = &profile["execution"];
    let parts = ["loader", "graph", "loop", "specialization"].map(|part| text(&execution[part]));
    line("composition", parts.join(" · "))?;
    line("implementation", text(&execution["implementation"]))?;
    line("requires", list(&profile["required_capabilities"]))?;
    line("engine has", list(&resolution["present_capabilities"]))?;
    line("engine lacks", list(&resolution["missing_capabilities"]))?;
    line("artifact", text(&resolution["artifact_fingerprint"]))?;
    line("config", text(&resolution["config_fingerprint"]))?;
    if report["runs"] == false {
        return line("runs", format!("no: {}", text(&report["why_not"])));
    }
    for field in ["fidelity", "device", "mlx", "parameters", "layers"] {
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
