use std::io::{self, Write};
use std::process::ExitCode;
use std::time::UNIX_EPOCH;

use anyhow::Result;
use russet_hub::{Entry, Source};
use serde_json::{Value, json};

use super::{print, print_json};
use crate::cli::LsArgs;

pub(crate) fn ls(args: LsArgs) -> Result<ExitCode> {
    let entries = args.store.open()?.list()?;
    if args.json {
        print_json(&Value::Array(entries.iter().map(entry_json).collect()))?;
    } else {
        print(|out| write_text(out, &entries))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn write_text(out: &mut dyn Write, entries: &[Entry]) -> io::Result<()> {
    if entries.is_empty() {
        writeln!(out, "No models yet. `russet run` installs the starter model.")?;
    }
    let width = entries.iter().map(|e| e.name.chars().count()).max().unwrap_or(0);
    for entry in entries {
        let problems = match entry.problems.is_empty() {
            true => String::new(),
            false => format!("  ({})", entry.problems.join("; ")),
        };
        writeln!(
            out,
            "{:width$}  {:>9}  {}{problems}",
            entry.name,
            format!("{:.1} MB", entry.bytes as f64 / 1e6),
            source(entry)
        )?;
    }
    Ok(())
}

fn source(entry: &Entry) -> &'static str {
    match entry.source {
        Source::Directory => "directory",
        Source::HuggingFace => "huggingface",
        Source::Russet => "russet",
    }
}

fn entry_json(entry: &Entry) -> Value {
    json!({
        "name": entry.name,
        "path": entry.path,
        "bytes": entry.bytes,
        "source": source(entry),
        "revision": entry.revision,
        "modified": entry.modified.and_then(|t| Some(t.duration_since(UNIX_EPOCH).ok()?.as_secs())),
        "problems": entry.problems,
    })
}
