//! Russet: local inference for MLX checkpoints.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod cli;
mod commands;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Eval(command) => commands::eval(command),
        _ => unreachable!(),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
