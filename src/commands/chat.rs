use std::io::{self, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;

use anyhow::{Result, bail};
use russet_engine::{Event, FinishReason, LanguageModel, Request, Statistics, generate};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use super::run::chat_tokens;
use super::{Located, describe, note, print, print_statistics, seed, text_sampling, unless_interrupted};
use crate::cli::ChatArgs;
use crate::interrupt;

const HELP: &str = "\
/reset          forget the conversation
/system TEXT    set the system message and forget the conversation
/stats          show times of the last answer
/help           show this
/quit           leave (as ctrl-D does)
ctrl-C stops an answer.";

pub(crate) fn chat(mut args: ChatArgs) -> Result<ExitCode> {
    interrupt::install()?;
    let located = Located::find(args.model.as_deref(), &args.loading.store)?;
    let language_model = located.load(&args.loading)?;
    if !language_model.tokenizer.has_chat_template() {
        bail!("{} has no chat template; use russet run --raw", located.name);
    }
    note(&format!("{}, fidelity {}. /help lists commands.", located.name, language_model.model.tier()));

    let mut editor = DefaultEditor::new()?;
    let mut messages: Vec<Value> = Vec::new();
    let mut statistics: Option<Statistics> = None;
    loop {
        let line = match editor.readline("> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => continue,
            Err(ReadlineError::Eof) => break,
            Err(e) => return Err(e.into()),
        };
        let text = line.trim();
        if text.is_empty() {
            continue;
        }
        // A history that can't grow is no reason to stop.
        let _ = editor.add_history_entry(text);
        match text.split_once(' ').unwrap_or((text, "")) {
            ("/quit" | "/exit", "") => break,
            ("/help", "") => print(|out| writeln!(out, "{HELP}"))?,
            ("/reset", "") => messages.clear(),
            ("/system", system) => {
                args.prompting.system = Some(system.trim().to_owned()).filter(|s| !s.is_empty());
                messages.clear();
            }
            ("/stats", "") => match &statistics {
                Some(statistics) => print_statistics(statistics, &language_model.model),
                None => print(|out| writeln!(out, "No answer yet."))?,
            },
            (command, _) if command.starts_with('/') => {
                print(|out| writeln!(out, "Unknown command {command}. /help lists commands."))?;
            }
            _ => {
                messages.push(json!({"role": "user", "content": text}));
                match answer(&language_model, &messages, &args) {
                    Ok((text, answer_statistics)) => {
                        messages.push(json!({"role": "assistant", "content": text}));
                        statistics = Some(answer_statistics);
                    }
                    // Nobody can read answers any more.
                    Err(e) if e.is::<io::Error>() => return Err(e),
                    // The conversation goes on without the message that could not be answered.
                    Err(e) => {
                        note(&format!("error: {}", describe(&e)));
                        messages.pop();
                    }
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn answer(
    language_model: &LanguageModel,
    messages: &[Value],
    args: &ChatArgs,
) -> Result<(String, Statistics)> {
    let LanguageModel { model, tokenizer, eos } = language_model;
    let request = Request {
        prompt: chat_tokens(tokenizer, messages, &args.prompting)?,
        sampling: text_sampling(&args.sampling, model, tokenizer.encode("\n", true)?, eos),
        seed: seed(&args.sampling),
        max_tokens: args.prompting.max_tokens,
        stop: args.prompting.stop.clone(),
        continues_prompt: false,
        prefill_chunk: args.loading.prefill_chunk,
    };
    interrupt::take();
    let mut out = io::stdout().lock();
    let generation = generate(language_model, &request, &mut |event| {
        if let Event::Text(text) = event
            && out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err()
        {
            return ControlFlow::Break(());
        }
        unless_interrupted()
    })?;
    writeln!(out)?;
    if generation.finish_reason == FinishReason::Cancelled {
        interrupt::take();
        writeln!(out, "[stopped]")?;
    }
    Ok((generation.text, generation.statistics))
}
