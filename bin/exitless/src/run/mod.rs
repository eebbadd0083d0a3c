//! `exitless run`: one virtual machine on this host's KVM.
//!
//! 1. [`args`]: the command line as clap sees it.
//! 2. [`config`]: checked. Every file is open and every value in range before anything starts; the
//!    first thing wrong is one line on stderr and exit status 2.
//! 3. [`machine`]: built step by step, run, wound down.
//!
//! Exit status: see [`crate::ending`].

pub mod args;
pub mod attach;
mod balloon;
pub mod composed;
pub mod config;
mod devices;
mod disk;
mod followed;
mod holes;
mod ledger;
mod machine;
mod memory;
mod net;
#[cfg(feature = "punch")]
mod punched;
mod ram;
mod remote;
mod remote_disk;
mod stopped;
mod swapped;

pub use args::RunArgs;

/// Runs `exitless run`.
pub fn main(args: &RunArgs) -> anyhow::Result<u8> {
    let config = config::Config::check(args)?;
    machine::run(config)
}
