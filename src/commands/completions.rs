use std::process::ExitCode;

use anyhow::Result;
use clap::CommandFactory;
use clap_complete::Shell;

use super::print;
use crate::cli::Cli;

pub(crate) fn completions(shell: Shell) -> Result<ExitCode> {
    // clap_complete panics where it can't write; memory takes everything.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "russet", &mut script);
    print(|out| out.write_all(&script))?;
    Ok(ExitCode::SUCCESS)
}
