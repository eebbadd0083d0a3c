//! `exitless-lab`: tests and demonstrations of `exitless`.
//!
//! This file defines the subcommands. Those that test whole guests are in the crate `harness`;
//! `run` and `serve` are those of `exitless`, from the crate `vmm`.
//!
//! Exit status: that of the subcommand, 2 for a request that could not start (one line on stderr
//! gives the reason), 1 for a failure under way.
#![forbid(unsafe_code)]

mod doctor;
mod faults;

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, LazyLock};

use clap::{Parser, Subcommand};
use harness::{
    assign_lab, demo, eli, lab_cmd, pviommu_lab, selftest, serve_lab, serve_net_lab, swap_figures,
    swap_lab,
};
use vio_faults::scan::{SCANNING_ID, ScanDisk};
use vmm::{log, program, run, serve};

use faults::{FAULTS_OF_DAEMONS, FAULTS_OF_MACHINES, Faults, Faulty, Program};

/// Version of the program, with the commit that it was built from if the makefile has set
/// `EXITLESS_COMMIT`.
static VERSION: LazyLock<String> =
    LazyLock::new(|| program::version(option_env!("EXITLESS_COMMIT")));

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  For bash, from the next login on:
    mkdir -p ~/.local/share/bash-completion/completions
    exitless-lab completions bash >~/.local/share/bash-completion/completions/exitless-lab";

const MAN_EXAMPLES: &str = "\
Examples:
  One page, in a terminal:
    exitless-lab man lab | man -l -
  All of them, where man finds them:
    exitless-lab man --dir ~/.local/share/man/man1";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  For people:
    exitless-lab doctor
  For programs:
    exitless-lab doctor --json

Exit status:
  0  Guests run here, or in the lab.
  1  They run in neither.";

const EXAMPLES: &str = "\
Examples:
  Whether the lab can be started here, and what this host offers:
    exitless-lab doctor
  A guest inside an emulated host, which needs nothing of this one:
    exitless-lab lab -- run --kernel /boot/vmlinuz --initrd /boot/guest.img
  Exits of a stock guest, counted:
    exitless-lab demo

Exit status:
  0  The subcommand has done what it was asked for.
  1  It failed under way, or a check that it makes did not hold.
  2  It could not start; one line on standard error says why.
  other  The subcommand's own: see its page.

Files:
  ~/.cache/exitless/lab  What the lab has fetched and built. $XDG_CACHE_HOME/exitless/lab where that is set; $EXITLESS_LAB_DIR names \
another directory.
  exitless  The product, in the folder of this program: what is shown and tested.";

const RUN_EXAMPLES: &str = "\
Examples:
  A disk as slow as an SSD:
    exitless-lab run --kernel vmlinuz --initrd initramfs.cpio --disk path=disk.raw --fault disk0:latency=100
  A disk that writes where it may not, and an IOMMU that stops it:
    exitless-lab run --kernel vmlinuz --initrd initramfs.cpio --disk path=disk.raw --fault disk0:unmapped
  A swap store whose third write finds no room:
    exitless-lab run --kernel vmlinuz --initrd initramfs.cpio --memory 512M --resident 100M \\
        --swap path=/var/tmp/swap0,size=1G --fault swap:enospc@3

Exit status:
  0 to 7, 128+n  As of exitless run: see its page.

Signals:
  SIGTERM, SIGINT, SIGHUP, SIGQUIT  As of exitless run.

Files:
  /dev/kvm  The host's KVM, and others as of exitless run.";

const SERVE_EXAMPLES: &str = "\
Examples:
  A core that panics at the first request of its device:
    exitless-lab serve --block id=disk0,path=ram:64M,socket=/tmp/disk0.sock --fault disk0:panic

Exit status:
  0 to 5  As of exitless serve: see its page.

Signals:
  SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1  As of exitless serve.

Files:
  serve.toml  As of exitless serve.";

/// Tests and demonstrations of exitless: whole guests in an emulated host, and machines whose parts
/// fail on purpose.
#[derive(Parser)]
#[command(name = "exitless-lab", version = VERSION.as_str(), about, after_long_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    log: log::LogArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run an exitless command inside an emulated AMD host, where KVM is complete.
    Lab(lab_cmd::LabArgs),
    /// Show the main job: exits with no IOMMU, trap, logged and shared, side by side.
    Demo(demo::DemoArgs),
    /// Count the exits of an assigned device's interrupts under the micro-hypervisor, in four
    /// modes, and attack it.
    Eli(eli::EliArgs),
    /// Boot whole guests and check what comes of it; what `make test` and `make soak` run.
    Selftest(selftest::SelftestArgs),
    /// Run a virtual machine as `exitless run` does, with parts that fail on purpose.
    Run(Box<RunArgs>),
    /// Be the device model of one disk of a machine, as `exitless device-worker` is. One whose
    /// serial number is scan-memory attacks its process's memory when it is asked to.
    #[command(hide = true)]
    DeviceWorker(vmm::device_worker::DeviceWorkerArgs),
    /// Serve block devices as `exitless serve` does, with parts that fail on purpose.
    Serve(ServeArgs),
    /// Count requests, kicks and exits of reads behind the paravirtual IOMMU, by driver and policy;
    /// what `make bench-pviommu` runs.
    #[command(hide = true)]
    PviommuLab(pviommu_lab::PviommuLabArgs),
    /// Count the exits of guests that share one `exitless serve`; what `make bench-serve-lab` runs.
    #[command(hide = true)]
    ServeLab(serve_lab::ServeLabArgs),
    /// Count the exits of guests whose network one `exitless serve` moves, and beside it the
    /// kernel's vhost-net; what `make bench-serve-net-lab` runs.
    #[command(hide = true)]
    ServeNetLab(serve_net_lab::ServeNetLabArgs),
    /// Count what guests with too little memory move, five ways; what `make bench-swap` runs.
    #[command(hide = true)]
    SwapLab(swap_lab::SwapLabArgs),
    /// Count what guests with too little memory move, by memory allowed, by program, and four at
    /// once; what `make bench-swap-figures` runs.
    #[command(hide = true)]
    SwapFigures(swap_figures::SwapFiguresArgs),
    /// Count what guests with assigned devices cost, by the guest's policy, the host's and the
    /// register mode; what `make bench-assign` runs.
    #[command(hide = true)]
    AssignLab(assign_lab::AssignLabArgs),
    /// Force a sidecore to sleep under a small guest, and count lost wake-ups.
    #[command(hide = true)]
    Payload(selftest::payload::PayloadArgs),
    /// Say what this host offers to virtual machines and to the lab, and what to do next.
    #[command(after_long_help = DOCTOR_EXAMPLES)]
    Doctor(vmm::doctor::DoctorArgs),
    /// Print a completion script for a shell: bash, elvish, fish, powershell or zsh.
    #[command(after_long_help = COMPLETIONS_EXAMPLES)]
    Completions(program::CompletionsArgs),
    /// Print the manual page (roff) of the program or a subcommand, or write all of them.
    #[command(after_long_help = MAN_EXAMPLES)]
    Man(program::ManArgs),
}

/// Arguments of `exitless-lab run`.
#[derive(clap::Args)]
#[command(after_long_help = RUN_EXAMPLES)]
struct RunArgs {
    #[command(flatten)]
    run: run::RunArgs,

    /// A part that fails on purpose; repeat for more (see --help).
    #[arg(long, value_name = "WHERE:WHAT", help_heading = "Faults", long_help = FAULTS_OF_MACHINES)]
    fault: Vec<String>,
}

/// Arguments of `exitless-lab serve`.
#[derive(clap::Args)]
#[command(after_long_help = SERVE_EXAMPLES)]
struct ServeArgs {
    #[command(flatten)]
    serve: serve::ServeArgs,

    /// A part that fails on purpose; repeat for more (see --help).
    #[arg(long, value_name = "WHERE:WHAT", help_heading = "Faults", long_help = FAULTS_OF_DAEMONS)]
    fault: Vec<String>,
}

/// Runs a command that writes a report, after a check that the report's file can be written: better
/// before the first measurement than after the last.
fn with_report(report: &Path, main: impl FnOnce() -> anyhow::Result<u8>) -> anyhow::Result<u8> {
    program::check_report("--report", report)?;
    main()
}

fn run(command: Command) -> anyhow::Result<u8> {
    match command {
        Command::Lab(args) => lab_cmd::main(&args),
        Command::Demo(args) => with_report(&args.report, || demo::main(&args)),
        Command::Eli(args) => with_report(&args.report, || eli::main(&args)),
        Command::Selftest(args) => selftest::main(&args),
        Command::Run(args) => {
            let faults = Faults::parse(Program::Machine, &args.fault)?;
            run::main(&args.run, &(Arc::new(Faulty::new(faults)) as _))
        }
        Command::DeviceWorker(args) => {
            vmm::device_worker::main(&args, |disk| match args.id == SCANNING_ID {
                true => Box::new(ScanDisk::new(disk)),
                false => disk,
            })
        }
        Command::Serve(args) => {
            let faults = Faults::parse(Program::Daemon, &args.fault)?;
            serve::main(&args.serve, &Faulty::new(faults))
        }
        Command::PviommuLab(args) => with_report(&args.report, || pviommu_lab::main(&args)),
        Command::ServeLab(args) => with_report(&args.report, || serve_lab::main(&args)),
        Command::ServeNetLab(args) => with_report(&args.report, || serve_net_lab::main(&args)),
        Command::SwapLab(args) => with_report(&args.report, || swap_lab::main(&args)),
        Command::SwapFigures(args) => with_report(&args.report, || swap_figures::main(&args)),
        Command::AssignLab(args) => with_report(&args.report, || assign_lab::main(&args)),
        Command::Payload(args) => selftest::payload::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::Completions(args) => program::completions::<Cli>(&args),
        Command::Man(args) => program::man::<Cli>(&args),
    }
}

fn main() -> ExitCode {
    program::main(|cli: &Cli| &cli.log, |cli| run(cli.command))
}

#[cfg(test)]
mod help_tests;
