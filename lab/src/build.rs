//! Builds the programs that run inside: the guest's `workload` and the lab's agent.
//!
//! Both are linked statically, so that an image needs no library for them, and go to a target
//! directory of their own (`target/lab/cargo`): a start from within `cargo test` must not wait for
//! the lock that `cargo test` holds. Without `cargo`, programs built earlier are used.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::LabError;
use crate::packages::{cache_dir, find_program, workspace_dir};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The guest's `workload`, built if its sources changed.
///
/// # Errors
/// [`LabError::Build`] with the compiler's last words.
pub fn workload() -> Result<PathBuf, LabError> {
    static_program("workload", "workload")
}

/// The lab's agent, built if its sources changed.
///
/// # Errors
/// [`LabError::Build`] with the compiler's last words.
pub fn agent() -> Result<PathBuf, LabError> {
    static_program("lab", "lab-agent")
}

fn static_program(package: &'static str, program: &'static str) -> Result<PathBuf, LabError> {
    let failed = |reason: String| LabError::Build {
        what: package,
        reason,
    };
    let target_dir = cache_dir().join("cargo");
    let binary = target_dir.join(TARGET).join("release").join(program);
    let cargo = env::var_os("CARGO")
        .map(PathBuf::from)
        .or_else(|| find_program("cargo"));
    let sources = workspace_dir();
    let (Some(cargo), true) = (cargo, sources.join("Cargo.toml").is_file()) else {
        if binary.is_file() {
            return Ok(binary);
        }
        return Err(failed(format!(
            "it needs cargo and the source tree {}",
            sources.display()
        )));
    };
    let mut command = Command::new(cargo);
    command
        .current_dir(&sources)
        .args([
            "rustc",
            "--quiet",
            "--release",
            "--package",
            package,
            "--bin",
            program,
        ])
        .args(["--target", TARGET, "--target-dir"])
        .arg(&target_dir)
        // Stripped: every byte is copied by an emulated processor.
        .args([
            "--",
            "-C",
            "target-feature=+crt-static",
            "-C",
            "strip=symbols",
        ])
        // Flags of the outer build (a sanitizer, an instrumented cfg) are not meant for these.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_BUILD_TARGET")
        .stdin(Stdio::null());
    let out = command.output().map_err(|e| failed(e.to_string()))?;
    if !out.status.success() {
        let words = String::from_utf8_lossy(&out.stderr);
        let last = words.lines().rev().take(12).collect::<Vec<_>>();
        return Err(failed(
            last.into_iter().rev().collect::<Vec<_>>().join("\n"),
        ));
    }
    Ok(binary)
}
