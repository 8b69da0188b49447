use std::io::{IsTerminal, Read, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use russet_engine::{Event, FinishReason, Request, generate_with};
use russet_text::Tokenizer;
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
    let text_model = located.open(&args.loading)?;
    let (tokenizer, eos) = (&text_model.tokenizer, text_model.eos.clone());
    let prompt = prompt_tokens(tokenizer, &prompt, &args)?;
    let line_break = tokenizer.encode("\n", true)?;
    // The answer needs no more of the tokenizer, which is large.
    let detokenizer = tokenizer.detokenizer();
    let model = located.load_weights(text_model, &args.loading)?;
    let request = Request {
        prompt,
        sampling: text_sampling(&args.sampling, &model, line_break, &eos),
        seed: seed(&args.sampling),
        max_tokens: args.prompting.max_tokens,
        stop: args.prompting.stop.clone(),
        continues_prompt: args.raw,
        prefill_chunk: args.loading.prefill_chunk,
    };

    let mut out = std::io::stdout().lock();
    let mut write_error = None;
    let generation = generate_with(&model, detokenizer, &eos, &request, &mut |event| {
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
            "fidelity": model.tier().to_string(),
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
        print_statistics(&generation.statistics, &model);
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

fn prompt_tokens(tokenizer: &Tokenizer, prompt: &str, args: &RunArgs) -> Result<Vec<u32>> {
    if !args.raw && !tokenizer.has_chat_template() && args.prompting.system.is_some() {
        bail!("--system: the model has no chat template that could pass it on");
    }
    if args.raw || !tokenizer.has_chat_template() {
        return Ok(tokenizer.encode_prompt(prompt)?);
    }
    chat_tokens(tokenizer, &[json!({"role": "user", "content": prompt})], &args.prompting)
}

/// The tokens of a conversation, ready for an answer.
pub(super) fn chat_tokens(tokenizer: &Tokenizer, messages: &[Value], args: &PromptArgs) -> Result<Vec<u32>> {
    let system = args.system.iter().map(|text| json!({"role": "system", "content": text}));
    let messages: Vec<Value> = system.chain(messages.iter().cloned()).collect();
    let variables = args.chat_template_config.clone().unwrap_or_default();
    let text = tokenizer.apply_chat_template(&messages, None, true, &variables)?;
    Ok(tokenizer.encode(&text, false)?)
}
