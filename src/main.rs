//! Russet: local inference for MLX checkpoints.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod cli;
mod commands;
mod interrupt;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use cli::{Cli, Command};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => commands::run(args),
        Command::Chat(args) => commands::chat(args),
        Command::Inspect(args) => commands::inspect(args),
        Command::Ls(args) => commands::ls(args),
        Command::Bench(args) => commands::bench(args),
        Command::Eval(command) => commands::eval(command),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "russet", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
