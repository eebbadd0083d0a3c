//! `exitless-lab` as a child of a test.

use std::path::Path;
use std::process::Command;

use spawned::daemon::DaemonDir;
pub use spawned::program::*;

/// The program.
pub const LAB: &str = env!("CARGO_BIN_EXE_exitless-lab");

/// `exitless-lab run` of this kernel, without an IOMMU.
pub fn run(kernel: &Path) -> Command {
    run_of(LAB, kernel)
}

/// A place for a daemon.
pub fn place() -> DaemonDir {
    DaemonDir::new(LAB, env!("CARGO_TARGET_TMPDIR"))
}
