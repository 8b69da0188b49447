use std::io::{IsTerminal, Read, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use russet_engine::{Event, FinishReason, LanguageModel, Request, generate};
use serde_json::{Value, json};

use super::{
    Located, is_interactive, note, print, print_json, print_statistics, seed, statistics_json, text_sampling,
    unless_interrupted,
};
use crate::cli::{PromptArgs, RunArgs};
use crate::interrupt;

pub(crate) fn run(args: RunArgs) -> Result<ExitCode> {
    let (reference, prompt) = model_and_prompt(&args)?;
    // A wrong name is reported before a prompt is waited for, an empty prompt before anything is installed.
    let named = reference.map(|name| Located::find(Some(&name), &args.loading.store)).transpose()?;
    let prompt = match prompt {
        Some(prompt) if prompt != "-" => prompt,
        given => read_prompt(given.is_some())?,
    };
    if prompt.is_empty() {
        bail!("the prompt is empty");
    }
    // From here on there is something to stop; while the prompt is read, ctrl-C ends the program.
    interrupt::install()?;
    let located = match named {
        Some(located) => located,
        None => Located::find(None, &args.loading.store)?,
    };
    let language_model = located.load(&args.loading)?;
    let request = Request {
        prompt: prompt_tokens(&language_model, &prompt, &args)?,
        sampling: text_sampling(&args.sampling, &language_model)?,
        seed: seed(&args.sampling),
        max_tokens: args.prompting.max_tokens,
        stop: args.prompting.stop.clone(),
        continues_prompt: args.raw,
        prefill_chunk: args.loading.prefill_chunk,
    };

    let mut out = std::io::stdout().lock();
    let mut write_error = None;
    let generation = generate(&language_model, &request, &mut |event| {
        if let (Event::Text(text), false) = (event, args.json)
            && let Err(e) = out.write_all(text.as_bytes()).and_then(|()| out.flush())
        {
            write_error = Some(e);
            return ControlFlow::Break(());
        }
        unless_interrupted()
    })?;
    drop(out);
    if let Some(e) = write_error {
        return Err(e).context("cannot write to standard output");
    }

    if args.json {
        print_json(&json!({
            "model": located.name,
            "fidelity": language_model.model.tier().to_string(),
            "text": generation.text,
            "tokens": generation.tokens,
            "finish_reason": generation.finish_reason.name(),
            "seed": request.seed,
            "timings": statistics_json(&generation.statistics),
        }))?;
    } else {
        print(|out| writeln!(out))?;
        if is_interactive() {
            note("");
        }
        print_statistics(&generation.statistics, &language_model.model);
    }
    Ok(match generation.finish_reason {
        FinishReason::Cancelled => ExitCode::from(interrupt::EXIT_CODE),
        FinishReason::Stop | FinishReason::Length => ExitCode::SUCCESS,
    })
}

/// Which positional is what: two are MODEL and PROMPT; one is a MODEL if it names one, else a PROMPT.
fn model_and_prompt(args: &RunArgs) -> Result<(Option<String>, Option<String>)> {
    let (mut model, mut prompt) = (args.model.clone(), args.prompt.clone());
    let mut positionals = args.positionals.iter();
    match (positionals.next(), positionals.next()) {
        (None, _) => {}
        (Some(first), None) if model.is_some() && prompt.is_none() => prompt = Some(first.clone()),
        (Some(first), None) if model.is_none() && prompt.is_some() => model = Some(first.clone()),
        (Some(first), None) if model.is_none() => {
            match args.loading.store.open()?.resolve(first) {
                Err(russet_hub::Error::ModelNotFound { .. }) => prompt = Some(first.clone()),
                // What names a model that can't be used is no prompt: loading it says why.
                Ok(_) | Err(_) => model = Some(first.clone()),
            }
        }
        (Some(first), Some(second)) if model.is_none() && prompt.is_none() => {
            (model, prompt) = (Some(first.clone()), Some(second.clone()));
        }
        _ => bail!("the model or the prompt is given twice: as a positional and with --model or --prompt"),
    }
    Ok((model, prompt))
}

fn read_prompt(asked_for: bool) -> Result<String> {
    let mut stdin = std::io::stdin().lock();
    if stdin.is_terminal() && !asked_for {
        bail!("no prompt: give it as an argument, for example russet run \"What is a glacier?\"");
    }
    let mut prompt = String::new();
    stdin.read_to_string(&mut prompt).context("cannot read the prompt from standard input")?;
    Ok(prompt)
}

fn prompt_tokens(language_model: &LanguageModel, prompt: &str, args: &RunArgs) -> Result<Vec<u32>> {
    let tokenizer = &language_model.tokenizer;
    if !args.raw && !tokenizer.has_chat_template() && args.prompting.system.is_some() {
        bail!("--system: the model has no chat template that could pass it on");
    }
    if args.raw || !tokenizer.has_chat_template() {
        return Ok(tokenizer.encode_prompt(prompt)?);
    }
    chat_tokens(language_model, &[json!({"role": "user", "content": prompt})], &args.prompting)
}

/// The tokens of a conversation, ready for an answer.
pub(super) fn chat_tokens(
    language_model: &LanguageModel,
    messages: &[Value],
    args: &PromptArgs,
) -> Result<Vec<u32>> {
    let system = args.system.iter().map(|text| json!({"role": "system", "content": text}));
    let messages: Vec<Value> = system.chain(messages.iter().cloned()).collect();
    let variables = args.chat_template_config.clone().unwrap_or_default();
    let text = language_model.tokenizer.apply_chat_template(&messages, None, true, &variables)?;
    Ok(language_model.tokenizer.encode(&text, false)?)
}
