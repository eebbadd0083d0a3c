//! `exitless`: virtual machines whose I/O does not exit.
//!
//! This crate defines the subcommands of the program; the crate `vmm` implements them. It is a
//! library so that the tests of `exitless-lab` can parse the examples of all documents by this
//! command line.
//!
//! Exit status: that of the subcommand, 2 for a request that could not start (one line on stderr
//! gives the reason), 1 for a failure under way.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::{Arc, LazyLock};

use clap::{Parser, Subcommand};
use guest_mem::SourceId;
use vio::blk::Blk;
use virtio_pci::VirtioFunction;
use vmm::composition::Composition;
use vmm::run::{Assembly, Attached, MachineComposition, MakeFunctions};
use vmm::{device_worker, doctor, log, program, run, serve};

/// Version of the program, with the commit that it was built from if the makefile has set
/// `EXITLESS_COMMIT`.
static VERSION: LazyLock<String> =
    LazyLock::new(|| program::version(option_env!("EXITLESS_COMMIT")));

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

const DOCTOR_EXAMPLES: &str = "\
Examples:
  For people:
    exitless doctor
  For programs:
    exitless doctor --json

Exit status:
  0  Guests run here.
  1  They do not.";

const EXAMPLES: &str = "\
Examples:
  What this host offers, and what to do next:
    exitless doctor
  A guest behind the emulated VT-d unit, with a network:
    exitless run --kernel vmlinuz --initrd initrd.img --net responder
  A daemon whose log has what front ends do, an object a line:
    exitless serve --block id=disk0,path=ram:64M,socket=/tmp/disk0.sock --log info --log-format json

Exit status:
  0  The subcommand has done what it was asked for.
  1  It failed under way.
  2  It could not start; one line on standard error says why.
  other  The subcommand's own: see its page.

Files:
  /dev/kvm  The host's KVM, for machines.

Notes:
  Guests in an emulated host, counts of exits, tests of whole guests and parts that fail on purpose are in another program, \
exitless-lab.";

/// Virtual machines whose I/O does not exit.
#[derive(Debug, Parser)]
#[command(name = "exitless", version = VERSION.as_str(), about, after_long_help = EXAMPLES, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    log: log::LogArgs,
    /// The subcommand that is asked for.
    #[command(subcommand)]
    pub command: Command,
}

/// A subcommand.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a virtual machine.
    Run(Box<run::RunArgs>),
    /// Serve block devices to any VMM over vhost-user, all on a few cores.
    Serve(serve::ServeArgs),
    /// Be the device model of one disk; started by a machine whose disk has worker=on.
    DeviceWorker(device_worker::DeviceWorkerArgs),
    /// Say what this host offers to virtual machines, and what to do next.
    #[command(after_long_help = DOCTOR_EXAMPLES)]
    Doctor(doctor::DoctorArgs),
    /// Print a completion script for a shell: bash, elvish, fish, powershell or zsh.
    #[command(after_long_help = COMPLETIONS_EXAMPLES)]
    Completions(program::CompletionsArgs),
    /// Print the manual page (roff) of the program or a subcommand, or write all of them.
    #[command(after_long_help = MAN_EXAMPLES)]
    Man(program::ManArgs),
}

vmm::functions! {
    /// The functions of its machines: those that every program has.
    enum Functions {}
}

/// Composition of the product: nothing beyond the common functions.
struct Product;

impl Composition for Product {}

impl MachineComposition for Product {
    fn attach(&self, assembly: Assembly<'_>) -> anyhow::Result<Attached> {
        assembly.build::<Functions>(self)
    }
}

impl MakeFunctions<Functions> for Product {
    fn disk(&self, _number: usize, source: SourceId, disk: Blk) -> Functions {
        VirtioFunction::new(source, disk).into()
    }
}

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    program::main(
        |cli: &Cli| &cli.log,
        |cli| match cli.command {
            Command::Run(args) => run::main(&args, &(Arc::new(Product) as _)),
            Command::Serve(args) => serve::main(&args, &Product),
            Command::DeviceWorker(args) => device_worker::main(&args, |disk| disk),
            Command::Doctor(args) => doctor::main(&args, |_| None),
            Command::Completions(args) => program::completions::<Cli>(&args),
            Command::Man(args) => program::man::<Cli>(&args),
        },
    )
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory};

    use super::*;

    /// Returns the names of all hidden arguments, values and subcommands of a command.
    fn hidden(command: &Command) -> Vec<String> {
        let name = command.get_name();
        let mut found = Vec::new();
        if command.is_hide_set() {
            found.push(name.to_owned());
        }
        for arg in command.get_arguments() {
            let arg_name = format!("{name} {}", arg.get_id());
            if arg.is_hide_set() || arg.is_hide_short_help_set() || arg.is_hide_long_help_set() {
                found.push(arg_name.clone());
            }
            let values = arg.get_possible_values();
            let values = values.iter().filter(|value| value.is_hide_set());
            found.extend(values.map(|value| format!("{arg_name}={}", value.get_name())));
        }
        found.extend(command.get_subcommands().flat_map(hidden));
        found
    }

    #[test]
    fn nothing_in_the_command_tree_is_hidden() {
        let mut program = Cli::command();
        program.build();
        assert_eq!(hidden(&program), [""; 0]);
        // The check finds entries that are hidden.
        let arg = clap::Arg::new("arg").long("arg").hide(true);
        let below = Command::new("below").hide(true).arg(arg);
        let found = hidden(&Command::new("program").subcommand(below));
        assert_eq!(found, ["below", "below arg"]);
    }
}
