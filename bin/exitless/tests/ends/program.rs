//! `exitless` as a child of a test.

use std::path::Path;
use std::process::Command;

use spawned::daemon::DaemonDir;
pub use spawned::program::*;

/// The program.
pub const EXITLESS: &str = env!("CARGO_BIN_EXE_exitless");

/// `exitless` with these arguments.
pub fn exitless(args: &[&str]) -> Command {
    command(EXITLESS, args)
}

/// `exitless run` of this kernel, without an IOMMU.
pub fn run(kernel: &Path) -> Command {
    run_of(EXITLESS, kernel)
}

/// A place for a daemon.
pub fn place() -> DaemonDir {
    DaemonDir::new(EXITLESS, env!("CARGO_TARGET_TMPDIR"))
}
