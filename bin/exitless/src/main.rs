//! `exitless`: virtual machines whose I/O does not exit.
//!
//! This file only names the subcommands and turns their outcome into an exit status; each lives in a
//! module of its own. Exit status: what the subcommand says, 2 for a request that could not start
//! (one line on stderr says why), 1 for a failure under way.

mod doctor;
mod lab_cmd;

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
    /// Run an exitless command inside an emulated AMD host, where KVM is complete.
    Lab(lab_cmd::LabArgs),
    /// Say what this host offers to virtual machines, and what to do next.
    Doctor(doctor::DoctorArgs),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
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
