//! `exitless` as a child of a test that ends by itself.

use std::path::Path;
use std::process::Command;

pub use spawned::short::{RunResult, end, start};

/// `exitless` with these arguments, in this folder.
pub fn exitless<S: AsRef<str>>(folder: &Path, args: &[S]) -> Command {
    spawned::short::command(env!("CARGO_BIN_EXE_exitless"), folder, args)
}

/// Runs it to its end.
pub fn run<S: AsRef<str>>(folder: &Path, args: &[S]) -> RunResult {
    spawned::short::run(env!("CARGO_BIN_EXE_exitless"), folder, args)
}
