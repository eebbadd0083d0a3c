//! Builds the programs that run inside: the guest's `workload`, the lab's agent and its `lab-dm`,
//! and on request the driver of `libs/vfio`.
//!
//! They are linked statically, so that an image needs no library for them, and go to a target
//! directory of their own, in the lab's cache: a start from within `cargo test` must not wait for
//! the lock that `cargo test` holds. Without `cargo`, programs built earlier are used.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::LabError;
use crate::packages::{cache_dir, find_program, full_or, unique, workspace_dir};
use crate::prune;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Returns the guest's `workload`, built if its sources or those of its dependencies changed.
///
/// # Errors
/// [`LabError::Build`] with the end of the compiler's output.
pub fn workload() -> Result<PathBuf, LabError> {
    static_program("workload", "--bin", "workload", &["guest/workload", "libs"])
}

/// Returns the lab's agent, built if its sources changed.
///
/// # Errors
/// [`LabError::Build`] with the end of the compiler's output.
pub fn agent() -> Result<PathBuf, LabError> {
    static_program("lab", "--bin", "lab-agent", &["lab/src"])
}

/// Returns the lab's program for device-mapper devices, built if its sources changed.
///
/// # Errors
/// [`LabError::Build`] with the end of the compiler's output.
pub fn device_mapper() -> Result<PathBuf, LabError> {
    static_program("lab", "--bin", "lab-dm", &["lab/src"])
}

/// Returns the NVMe driver in user space, built if its sources or those of its dependencies
/// changed. A lab has it only if it is included.
///
/// # Errors
/// [`LabError::Build`] with the end of the compiler's output.
pub fn nvme_driver() -> Result<PathBuf, LabError> {
    static_program("vfio", "--example", "nvme", &["libs"])
}

/// Returns whether `binary` is younger than every file below `sources`: then the compiler need not
/// be run, which takes longer than the rest of an image.
fn is_current(binary: &Path, sources: &Path) -> bool {
    let modified = |path: &Path| path.metadata().and_then(|m| m.modified());
    let Ok(built) = modified(binary) else {
        return false;
    };
    let mut pending = vec![sources.to_path_buf()];
    while let Some(path) = pending.pop() {
        // The directory's own time shows removals of files.
        if !modified(&path).is_ok_and(|changed| changed < built) {
            return false;
        }
        if let Ok(entries) = fs::read_dir(&path) {
            pending.extend(entries.flatten().map(|entry| entry.path()));
        }
    }
    true
}

/// Returns the reason why the lab's three programs cannot be found or built, as far as can be
/// determined without trying.
pub(crate) fn obstacle() -> Option<String> {
    obstacle_in(&workspace_dir(), &programs_dir(), cargo().is_some())
}

fn obstacle_in(sources: &Path, target_dir: &Path, has_cargo: bool) -> Option<String> {
    let is_built = |program| binary(target_dir, program).is_file();
    let can_build = has_cargo && sources.join("Cargo.toml").is_file();
    let is_there = can_build
        || ["workload", "lab-agent", "lab-dm"]
            .iter()
            .all(|p| is_built(p));
    (!is_there).then(|| {
        format!(
            "its own programs are not built yet, which takes cargo and the source tree {}",
            sources.display()
        )
    })
}

fn cargo() -> Option<PathBuf> {
    let given = env::var_os("CARGO").map(PathBuf::from);
    given.or_else(|| find_program("cargo"))
}

fn binary(target_dir: &Path, program: &str) -> PathBuf {
    target_dir.join(TARGET).join("release").join(program)
}

/// Returns the directory of this source tree's programs: those of two trees have the same names.
/// Old directories are removed ([`prune`]).
#[must_use]
pub fn programs_dir() -> PathBuf {
    let mut hash = DefaultHasher::new();
    workspace_dir().hash(&mut hash);
    cache_dir().join(format!("programs-{:016x}", hash.finish()))
}

/// Builds a program if it is older than the sources in `dirs`. `kind` is cargo's option for it:
/// `--bin`, or `--example`, which cargo puts into a folder of their own.
fn static_program(
    package: &'static str,
    kind: &str,
    program: &'static str,
    dirs: &[&str],
) -> Result<PathBuf, LabError> {
    let failed = |reason: String| LabError::Build {
        what: package.into(),
        reason,
    };
    let target_dir = programs_dir();
    prune::note_use(&target_dir);
    let binary = match kind {
        "--example" => binary(&target_dir, "examples").join(program),
        _ => binary(&target_dir, program),
    };
    let sources = workspace_dir();
    if dirs
        .iter()
        .all(|dir| is_current(&binary, &sources.join(dir)))
    {
        return Ok(binary);
    }
    let (Some(cargo), true) = (cargo(), sources.join("Cargo.toml").is_file()) else {
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
            kind,
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
        // Flags of the outer build (a sanitizer, an instrumented cfg) must not apply to these.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_BUILD_TARGET")
        .stdin(Stdio::null());
    let out = command.output().map_err(|e| failed(e.to_string()))?;
    if !out.status.success() {
        let words = String::from_utf8_lossy(&out.stderr);
        let last = words.lines().rev().take(12).collect::<Vec<_>>();
        let reason = last.into_iter().rev().collect::<Vec<_>>().join("\n");
        return Err(full_or(&target_dir, failed(reason)));
    }
    prune::keep_few(&cache_dir(), &target_dir);
    Ok(binary)
}

/// Returns a program or module without debugging information, which is most of a Rust program's
/// size: every byte is copied by an emulated processor. Symbols stay, for backtraces. Without the
/// tool the file is returned as it is.
pub(crate) fn stripped(program: &Path) -> Result<Vec<u8>, LabError> {
    let read = |file: &Path| fs::read(file).map_err(LabError::host("read", file));
    let copy = env::temp_dir().join(format!("exitless-strip-{}", unique()));
    let status = Command::new("objcopy")
        .arg("--strip-debug")
        .arg(program)
        .arg(&copy)
        .status();
    let data = match status {
        Ok(status) if status.success() => read(&copy),
        _ => read(program),
    };
    // It may not exist.
    let _ = fs::remove_file(&copy);
    data
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_are_neither_built_nor_can_be_are_an_obstacle() {
        let dir = tempfile::tempdir().expect("a directory");
        let (sources, target) = (dir.path().join("sources"), dir.path().join("target"));
        let is_obstructed = |has_cargo| obstacle_in(&sources, &target, has_cargo).is_some();
        assert!(is_obstructed(true) && is_obstructed(false));
        fs::create_dir_all(&sources).expect("a directory");
        fs::write(sources.join("Cargo.toml"), "").expect("a file");
        assert!(!is_obstructed(true) && is_obstructed(false));
        for program in ["workload", "lab-agent", "lab-dm"] {
            assert!(is_obstructed(false), "without {program}");
            let binary = binary(&target, program);
            fs::create_dir_all(binary.parent().expect("one")).expect("a directory");
            fs::write(binary, "").expect("a file");
        }
        assert!(!is_obstructed(false));
    }
}
