//! Russet: local inference for MLX checkpoints.
mod cli;
mod commands;
mod interrupt;

use std::io;
use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => commands::run(args),
        Command::Chat(args) => commands::chat(args),
        Command::Serve(args) => commands::serve(*args),
        Command::Embed(args) => commands::embed(&args),
        Command::Fit(args) => commands::fit(args),
        Command::Inspect(args) => commands::inspect(args),
        Command::Ls(args) => commands::ls(args),
        Command::Bench(args) => commands::bench(args),
        Command::Eval(command) => commands::eval(command),
        Command::Completions { shell } => commands::completions(shell),
    };
    result.unwrap_or_else(|error| {
        // The reader of a pipe has what it wanted.
        if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) {
            return ExitCode::SUCCESS;
        }
        commands::note(&format!("error: {}", commands::describe(&error)));
        match error.downcast_ref() {
            Some(russet_hub::Error::Interrupted) => ExitCode::from(interrupt::EXIT_CODE),
            _ => ExitCode::FAILURE,
        }
    })
}
