//! `exitless`: virtual machines whose I/O does not exit.
//!
//! This file only names the subcommands and turns their outcome into an exit status; each lives in a
//! module of its own. Exit status: what the subcommand says ([`ending`]), 2 for a request that could not start
//! (one line on stderr says why), 1 for a failure under way.

mod doctor;
mod ending;
mod flood;
mod image_format;
mod image_lock;
mod lacks;
mod messages;
mod notify;
mod output;
mod resident;
mod run;
mod serve;
mod terminal;
mod values;

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::sync::LazyLock;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use harness::{demo, eli, lab_cmd, selftest, serve_lab, swap_figures, swap_lab};

/// With the commit that it was built from, as far as the makefile has said.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let commit = option_env!("EXITLESS_COMMIT").unwrap_or("unknown");
    format!("{} (commit {commit})", env!("CARGO_PKG_VERSION"))
});

/// Virtual machines whose I/O does not exit.
#[derive(Parser)]
#[command(name = "exitless", version = VERSION.as_str(), about, max_term_width = 100)]
struct Cli {
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
    /// Count the exits of an assigned device's interrupts under the micro-hypervisor, in four modes, and attack it.
    Eli(eli::EliArgs),
    /// Boot whole guests and check what comes of it; what `make test` and `make soak` run.
    Selftest(selftest::SelftestArgs),
    /// Run an exitless command inside an emulated AMD host, where KVM is complete.
    Lab(lab_cmd::LabArgs),
    /// Say what this host offers to virtual machines, and what to do next.
    Doctor(doctor::DoctorArgs),
    /// Print a completion script for a shell: bash, elvish, fish, powershell or zsh.
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page (roff); `exitless man run` prints that of a subcommand.
    Man {
        /// A subcommand.
        subcommand: Option<String>,
    },
    /// Count the exits of guests that share one `exitless serve`; what `make bench-serve-lab` runs.
    #[command(hide = true)]
    ServeLab(serve_lab::ServeLabArgs),
    /// Count what guests with too little memory move, five ways; what `make bench-swap` runs.
    #[command(hide = true)]
    SwapLab(swap_lab::SwapLabArgs),
    /// Count what guests with too little memory move, by memory allowed, by program, and four at once; what
    /// `make bench-swap-figures` runs.
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

/// The page of the program or of a subcommand.
fn manual(subcommand: Option<&str>) -> anyhow::Result<clap_mangen::Man> {
    let mut command = Cli::command();
    // So that each subcommand knows its whole name.
    command.build();
    if let Some(name) = subcommand {
        command = command
            .find_subcommand(name)
            .with_context(|| format!("there is no subcommand {name:?}; see `exitless help`"))?
            .clone();
    }
    Ok(clap_mangen::Man::new(command))
}

fn man(subcommand: Option<&str>) -> anyhow::Result<u8> {
    manual(subcommand)?
        .render(&mut std::io::stdout())
        .context("writing the page")?;
    Ok(0)
}

/// A command that writes a report, if that can be written: better said now than after the last measurement.
fn with_report(report: &Path, main: impl FnOnce() -> anyhow::Result<u8>) -> anyhow::Result<u8> {
    output::check_report("--report", report)?;
    main()
}

/// Events of guests and devices go to standard error. `RUST_LOG` chooses which: a level, or a list such as
/// `warn,machine=debug`. Warnings and errors have the budgets that are answered.
fn start_log() -> flood::Budgets {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::util::SubscriberInitExt;

    let quiet = Targets::new().with_default(LevelFilter::WARN);
    let chosen = match std::env::var("RUST_LOG") {
        Ok(text) => text.parse().unwrap_or_else(|error| {
            eprintln!("exitless: RUST_LOG={text:?} is not understood ({error}); taking `warn`");
            quiet
        }),
        Err(_) => quiet,
    };
    let budgets = flood::Budgets::new(messages::print);
    tracing_subscriber::registry()
        .with(
            tracing_subscriber::fmt::layer()
                .with_writer(|| messages::Log)
                .with_ansi(std::io::stderr().is_terminal()),
        )
        .with(budgets.clone())
        .with(chosen)
        .init();
    budgets
}

fn main() -> ExitCode {
    let budgets = start_log();
    let outcome = match Cli::parse().command {
        Command::Run(args) => run::main(&args),
        Command::Serve(args) => serve::main(&args),
        Command::Demo(args) => with_report(&args.report, || demo::main(&args)),
        Command::Eli(args) => with_report(&args.report, || eli::main(&args)),
        Command::Selftest(args) => selftest::main(&args),
        Command::Lab(args) => lab_cmd::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::Completions { shell } => completions(shell),
        Command::Man { subcommand } => man(subcommand.as_deref()),
        Command::ServeLab(args) => with_report(&args.report, || serve_lab::main(&args)),
        Command::SwapLab(args) => with_report(&args.report, || swap_lab::main(&args)),
        Command::SwapFigures(args) => with_report(&args.report, || swap_figures::main(&args)),
        Command::Payload(args) => selftest::payload::main(&args),
    };
    let status = outcome.unwrap_or_else(|error| {
        messages::say!("{error:#}");
        2
    });
    budgets.finish();
    messages::finish(ending::WRITE_LIMIT);
    ExitCode::from(status)
}

#[cfg(test)]
mod tests;
