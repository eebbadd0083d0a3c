//! A program: from its command line to its exit status.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Parser;
use clap_complete::Shell;

use crate::log::LogArgs;
use crate::{ending, help, messages, moved};

pub use crate::output::check_report;

/// Returns the version of a program built from `commit`, as far as its makefile has named that.
pub fn version(commit: Option<&str>) -> String {
    let commit = commit.unwrap_or("unknown");
    format!("{} (commit {commit})", env!("CARGO_PKG_VERSION"))
}

/// Reads the command line, starts the log, runs what is asked for, and says why that failed. The
/// exit status is 2 then, else what `run` returns.
pub fn main<C: Parser>(
    log: impl FnOnce(&C) -> &LogArgs,
    run: impl FnOnce(C) -> Result<u8>,
) -> ExitCode {
    let cli = match parse::<C>() {
        Ok(cli) => cli,
        Err(status) => return status,
    };
    let budgets = log(&cli).start();
    let status = run(cli).unwrap_or_else(|error| {
        messages::say!("{}", messages::short(&format!("{error:#}")));
        2
    });
    budgets.finish();
    messages::finish(ending::WRITE_LIMIT);
    ExitCode::from(status)
}

/// Reads the command line, or answers it: help, or an error with a tip.
fn parse<C: Parser>() -> Result<C, ExitCode> {
    let command = C::command();
    messages::set_program(command.get_name());
    let mut command = help::unbroken(command);
    let parsed = command
        .try_get_matches_from_mut(std::env::args_os())
        .and_then(|matches| C::from_arg_matches(&matches));
    parsed.map_err(|error| {
        let args = std::env::args_os().skip(1);
        let args: Vec<String> = args.map(|arg| arg.to_string_lossy().into_owned()).collect();
        if let Some(place) = moved::of_error(&error, &command, &args) {
            messages::say!("{place}");
            return ExitCode::from(2);
        }
        help::print(error, &command, &args)
    })
}

/// Arguments of `completions`.
#[derive(clap::Args, Debug)]
pub struct CompletionsArgs {
    /// Which shell.
    shell: Shell,
}

/// Prints the completion script of a program.
///
/// # Errors
/// None.
pub fn completions<C: Parser>(args: &CompletionsArgs) -> Result<u8> {
    let mut command = C::command();
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    Ok(print(&script))
}

/// Arguments of `man`.
#[derive(clap::Args, Debug)]
pub struct ManArgs {
    /// A subcommand.
    #[arg(value_name = "SUBCOMMAND")]
    subcommand: Option<String>,
    /// Write the pages of the program and of each subcommand into this folder, which is made if
    /// need be.
    #[arg(long, value_name = "DIR", conflicts_with = "subcommand")]
    dir: Option<PathBuf>,
}

/// Prints the manual page of a program or of a subcommand, or writes all of them into a folder.
///
/// # Errors
/// There is no such subcommand, or a page cannot be written.
pub fn man<C: Parser>(args: &ManArgs) -> Result<u8> {
    let command = C::command();
    let subcommand = args.subcommand.as_deref();
    if let Some(dir) = &args.dir {
        help::write_manuals(&command, dir)?;
        return Ok(0);
    }
    if let Some(place) = subcommand.and_then(|name| moved::subcommand(&command, name)) {
        bail!("{place}");
    }
    let page = help::manual(&command, subcommand)?;
    Ok(print(page.as_bytes()))
}

/// Writes to standard output; the exit status. A reader that went away has seen enough.
fn print(text: &[u8]) -> u8 {
    let _ = std::io::stdout().write_all(text);
    0
}
