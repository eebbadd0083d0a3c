//! `exitless`: virtual machines whose I/O does not exit.
//!
//! This file only names the subcommands and turns their outcome into an exit status; each lives in
//! a module of its own, [`help`] answers `--help` and `man`, [`log`] has the options of all. Exit
//! status: what the subcommand says ([`ending`]), 2 for a request that could not start (one line on
//! stderr says why), 1 for a failure under way.

mod doctor;
mod ending;
mod flood;
mod help;
mod host_memory;
mod image_format;
mod image_lock;
mod lacks;
mod log;
mod log_line;
mod messages;
mod notify;
mod output;
mod resident;
mod run;
mod serve;
mod terminal;
mod values;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::LazyLock;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use harness::{demo, eli, lab_cmd, selftest, serve_lab, swap_figures, swap_lab};

/// With the commit that it was built from, as far as the makefile has said.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let commit = option_env!("EXITLESS_COMMIT").unwrap_or("unknown");
    format!("{} (commit {commit})", env!("CARGO_PKG_VERSION"))
});

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  For bash, from the next login on:
    mkdir -p ~/.local/share/bash-completion/completions
    exitless completions bash >~/.local/share/bash-completion/completions/exitless";

const MAN_EXAMPLES: &str = "\
Examples:
  One page, in a terminal:
    exitless man serve | man -l -
  All of them, where man finds them:
    exitless man --dir ~/.local/share/man/man1";

const EXAMPLES: &str = "\
Examples:
  What this host offers, and what to do next:
    exitless doctor
  A guest inside an emulated host, which needs nothing of this one:
    exitless lab -- run --kernel /boot/vmlinuz --initrd /boot/guest.img
  A daemon whose log has what front ends do, an object a line:
    exitless serve --block id=disk0,path=ram:64M,socket=/tmp/disk0.sock --log info --log-format json

Exit status:
  0  The subcommand has done what it was asked for.
  1  It failed under way, or a check that it makes did not hold.
  2  It could not start; one line on standard error says why.
  other  The subcommand's own: see its page.";

/// Virtual machines whose I/O does not exit.
#[derive(Parser)]
#[command(name = "exitless", version = VERSION.as_str(), about, after_long_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    log: log::LogArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a virtual machine.
    Run(Box<run::RunArgs>),
    /// Serve block devices to any VMM over vhost-user, all on a few cores.
    Serve(serve::ServeArgs),
    /// Show the main job: exits with no IOMMU, trap, logged and shared, side by side.
    Demo(demo::DemoArgs),
    /// Count the exits of an assigned device's interrupts under the micro-hypervisor, in four
    /// modes, and attack it.
    Eli(eli::EliArgs),
    /// Boot whole guests and check what comes of it; what `make test` and `make soak` run.
    Selftest(selftest::SelftestArgs),
    /// Run an exitless command inside an emulated AMD host, where KVM is complete.
    Lab(lab_cmd::LabArgs),
    /// Say what this host offers to virtual machines, and what to do next.
    Doctor(doctor::DoctorArgs),
    /// Print a completion script for a shell: bash, elvish, fish, powershell or zsh.
    #[command(after_long_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page (roff) of the program or a subcommand, or write all of them.
    #[command(after_long_help = MAN_EXAMPLES)]
    Man {
        /// A subcommand.
        #[arg(value_name = "SUBCOMMAND")]
        subcommand: Option<String>,
        /// Write the pages of the program and of each subcommand into this folder, which is made if
        /// need be.
        #[arg(long, value_name = "DIR", conflicts_with = "subcommand")]
        dir: Option<PathBuf>,
    },
    /// Count the exits of guests that share one `exitless serve`; what `make bench-serve-lab` runs.
    #[command(hide = true)]
    ServeLab(serve_lab::ServeLabArgs),
    /// Count what guests with too little memory move, five ways; what `make bench-swap` runs.
    #[command(hide = true)]
    SwapLab(swap_lab::SwapLabArgs),
    /// Count what guests with too little memory move, by memory allowed, by program, and four at
    /// once; what `make bench-swap-figures` runs.
    #[command(hide = true)]
    SwapFigures(swap_figures::SwapFiguresArgs),
    /// Force a sidecore to sleep under a small guest, and count lost wake-ups.
    #[command(hide = true)]
    Payload(selftest::payload::PayloadArgs),
}

fn completions(shell: clap_complete::Shell) -> anyhow::Result<u8> {
    clap_complete::generate(
        shell,
        &mut Cli::command(),
        "exitless",
        &mut std::io::stdout(),
    );
    Ok(0)
}

fn man(subcommand: Option<&str>, dir: Option<&Path>) -> anyhow::Result<u8> {
    let command = Cli::command();
    if let Some(dir) = dir {
        help::write_manuals(&command, dir)?;
        return Ok(0);
    }
    let page = help::manual(&command, subcommand)?;
    // A reader that went away has seen enough.
    let _ = std::io::stdout().write_all(page.as_bytes());
    Ok(0)
}

/// A command that writes a report, if that can be written: better said now than after the last
/// measurement.
fn with_report(report: &Path, main: impl FnOnce() -> anyhow::Result<u8>) -> anyhow::Result<u8> {
    output::check_report("--report", report)?;
    main()
}

/// Reads the command line, or answers it: help, or an error with a tip.
fn parse() -> Result<Cli, ExitCode> {
    let mut command = help::unbroken(Cli::command());
    let parsed = command
        .try_get_matches_from_mut(std::env::args_os())
        .and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map_err(|error| {
        let args = std::env::args_os().skip(1);
        let args: Vec<String> = args.map(|arg| arg.to_string_lossy().into_owned()).collect();
        help::print(error, &command, &args)
    })
}

fn main() -> ExitCode {
    let cli = match parse() {
        Ok(cli) => cli,
        Err(status) => return status,
    };
    let budgets = cli.log.start();
    let outcome = match cli.command {
        Command::Run(args) => run::main(&args),
        Command::Serve(args) => serve::main(&args),
        Command::Demo(args) => with_report(&args.report, || demo::main(&args)),
        Command::Eli(args) => with_report(&args.report, || eli::main(&args)),
        Command::Selftest(args) => selftest::main(&args),
        Command::Lab(args) => lab_cmd::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::Completions { shell } => completions(shell),
        Command::Man { subcommand, dir } => man(subcommand.as_deref(), dir.as_deref()),
        Command::ServeLab(args) => with_report(&args.report, || serve_lab::main(&args)),
        Command::SwapLab(args) => with_report(&args.report, || swap_lab::main(&args)),
        Command::SwapFigures(args) => with_report(&args.report, || swap_figures::main(&args)),
        Command::Payload(args) => selftest::payload::main(&args),
    };
    let status = outcome.unwrap_or_else(|error| {
        messages::say!("{}", messages::short(&format!("{error:#}")));
        2
    });
    budgets.finish();
    messages::finish(ending::WRITE_LIMIT);
    ExitCode::from(status)
}

#[cfg(test)]
mod tests;
