//! `exitless`: virtual machines whose I/O does not exit.
//!
//! This file only names the subcommands and turns their outcome into an exit status; each lives in a
//! module of its own. Exit status: what the subcommand says, 2 for a request that could not start
//! (one line on stderr says why), 1 for a failure under way.

#![allow(
    dead_code,
    unused_imports,
    reason = "parts of the machine wait for the devices that use them"
)]

mod acpi;
mod console;
mod demo;
mod doctor;
mod irq;
mod lab_cmd;
mod ledger;
mod pci;
mod run;
mod system;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Virtual machines whose I/O does not exit.
#[derive(Parser)]
#[command(name = "exitless", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a virtual machine.
    Run(Box<run::RunArgs>),
    /// Show the main job: exits with no IOMMU, trap, logged and shared, side by side.
    Demo(demo::DemoArgs),
    /// Run an exitless command inside an emulated AMD host, where KVM is complete.
    Lab(lab_cmd::LabArgs),
    /// Say what this host offers to virtual machines, and what to do next.
    Doctor(doctor::DoctorArgs),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Run(args) => run::main(&args),
        Command::Demo(args) => demo::main(&args),
        Command::Lab(args) => lab_cmd::main(&args),
        Command::Doctor(args) => doctor::main(&args),
    };
    match outcome {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("exitless: {error:#}");
            ExitCode::from(2)
        }
    }
}
