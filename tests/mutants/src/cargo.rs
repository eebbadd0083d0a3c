//! Building and running one named test.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::mutant::{Cfg, Head, Target};

/// Interval at which a running test is polled.
const LOOK: Duration = Duration::from_millis(20);

/// A test binary.
#[derive(Debug)]
pub struct Binary {
    executable: PathBuf,
    /// The folder of its package, where `cargo test` runs it.
    folder: PathBuf,
}

/// Builds the binary that has a mutant's tests, in `tree`, into `target`. The inner error is the
/// compiler's output.
///
/// # Errors
/// Cargo does not run.
pub fn build(tree: &Path, target: &Path, head: &Head) -> Result<Result<Binary, String>> {
    let mut cargo = Command::new("cargo");
    cargo
        .current_dir(tree)
        .args(["test", "--release", "--locked", "--no-run", "--quiet"])
        .args([
            "--message-format=json-render-diagnostics",
            "-p",
            &head.package,
        ]);
    match &head.target {
        Target::Lib => cargo.arg("--lib"),
        Target::Test(name) => cargo.args(["--test", name]),
    };
    cargo
        .env("CARGO_TARGET_DIR", target)
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTFLAGS");
    if head.cfg != Cfg::None {
        cargo.env("RUSTFLAGS", format!("--cfg {}", head.cfg.name()));
    }
    let output = cargo.output().context("cargo")?;
    let binary = std::str::from_utf8(&output.stdout).ok().and_then(binary);
    let failure = || String::from_utf8_lossy(&output.stderr).into_owned();
    Ok(match binary {
        Some(binary) if output.status.success() => Ok(binary),
        _ => Err(failure()),
    })
}

/// The test binary among the messages of a build.
fn binary(messages: &str) -> Option<Binary> {
    messages.lines().find_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        let is_test = message["profile"]["test"].as_bool()?;
        let executable = message["executable"].as_str().filter(|_| is_test)?;
        let manifest = Path::new(message["manifest_path"].as_str()?);
        Some(Binary {
            executable: executable.into(),
            folder: manifest.parent()?.to_path_buf(),
        })
    })
}

/// The end of a test.
#[derive(Debug, PartialEq, Eq)]
pub enum Ending {
    /// It ran and passed.
    Passed,
    /// It ran and failed; its output.
    Failed(String),
    /// There is no test of this name.
    NoSuchTest,
    /// It took too long, and was killed.
    TimedOut,
    /// The process ended otherwise: by a signal, or without libtest's line.
    Broken(Broken),
}

/// An end that says nothing of the test.
#[derive(Debug, PartialEq, Eq)]
pub struct Broken {
    /// The exit status.
    pub status: String,
    /// Its output.
    pub printed: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the process ended ({}) and not the test", self.status)
    }
}

impl Binary {
    /// Runs one test alone, for `limit` at most, with its output in `log`.
    ///
    /// # Errors
    /// It cannot be started or waited for.
    pub fn run(
        &self,
        test: &str,
        env: &[(String, String)],
        log: &Path,
        limit: Duration,
    ) -> Result<Ending> {
        let output = File::create(log)?;
        let mut child = Command::new(&self.executable)
            .args(["--exact", test, "--test-threads=1", "--color=never"])
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .env("RUST_BACKTRACE", "0")
            .env_remove("RUST_TEST_NOCAPTURE")
            .stdin(Stdio::null())
            // One file: what a test prints past libtest counts as well.
            .stderr(output.try_clone()?)
            .stdout(output)
            .spawn()
            .with_context(|| format!("{}", self.executable.display()))?;
        let began = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if began.elapsed() > limit {
                child.kill()?;
                child.wait()?;
                return Ok(Ending::TimedOut);
            }
            thread::sleep(LOOK);
        };
        Ok(ending(test, status, &read(log)?))
    }
}

fn read(log: &Path) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(log)?).into_owned())
}

/// Reads libtest's verdict on a test that was run alone.
#[must_use]
pub fn ending(test: &str, status: ExitStatus, printed: &str) -> Ending {
    // libtest's own: 101 where a test failed.
    let (is_success, is_failure) = (status.success(), status.code() == Some(101));
    // Output of the test may stand in the middle of libtest's line, so the list of failures counts.
    let has_line = |line: &str| printed.lines().any(|printed| printed.trim_end() == line);
    if has_line("running 0 tests") && is_success {
        return Ending::NoSuchTest;
    }
    if has_line("running 1 test") {
        let result = |verdict: &str| {
            let line = format!("test result: {verdict}. ");
            printed.lines().any(|printed| printed.starts_with(&line))
        };
        let is_listed = has_line("failures:") && has_line(&format!("    {test}"));
        if is_failure && result("FAILED") && is_listed {
            return Ending::Failed(printed.to_string());
        }
        let is_ignored = printed
            .lines()
            .any(|printed| printed.starts_with("test result: ok. 0 passed; 0 failed; 1 ignored"));
        if is_success && result("ok") && !is_ignored {
            return Ending::Passed;
        }
        if is_ignored {
            return Ending::NoSuchTest;
        }
    }
    Ending::Broken(Broken {
        status: status.to_string(),
        printed: printed.to_string(),
    })
}

#[cfg(test)]
mod tests;
