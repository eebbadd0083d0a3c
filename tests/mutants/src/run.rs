//! Runs mutants one after the other.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::cargo::{self, Binary, Ending};
use crate::mutant::{Cfg, Expect, Mutant};
use crate::tree::{self, Copy};

/// Number of lines of a compiler's or a test's output that a failure shows.
const SHOWN: usize = 30;

/// Runner of mutants in copies of one source tree.
pub struct Runner {
    tree: PathBuf,
    /// Folder of the copies and their builds, by cfg.
    work: PathBuf,
    /// Longest time for a test, without its build.
    pub limit: Duration,
    copies: Vec<(Cfg, Copy)>,
    _alone: File,
}

/// Result of a mutant.
#[derive(Debug)]
pub struct Outcome {
    /// Summary of the observation if it is as expected, else the failure.
    pub verdict: Result<String, Failure>,
    /// Time of copying and building.
    pub built: Duration,
    /// Time of the test.
    pub ran: Duration,
}

/// Reason why a mutant does not pass.
#[derive(Debug, PartialEq, Eq)]
pub enum Failure {
    /// The patch file is invalid; the reason.
    Unreadable(String),
    /// The patch does not apply to the sources.
    DoesNotApply(String),
    /// The mutated sources do not compile; the compiler's output.
    DoesNotCompile(String),
    /// The package has no such test, or the test is ignored.
    NoSuchTest(String),
    /// The test of this name does not detect the mistake.
    Green(String),
    /// A test fails for an edit that has no effect; its output.
    Red(String),
    /// The test fails, but does not print the expected text; that text, and its output.
    RedForAnotherReason(String, String),
    /// The test exceeds the time limit.
    TimedOut(Duration),
    /// The time of the whole run was over before the test's. Neither is at fault.
    OutOfTime,
    /// The test's process ended abnormally, for example by a signal; the manner, and its output.
    Broken(String, String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(why) => write!(f, "its file: {why}"),
            Self::DoesNotApply(why) => write!(f, "it does not apply: {why}"),
            Self::DoesNotCompile(_) => write!(f, "it does not compile"),
            Self::NoSuchTest(test) => {
                write!(f, "0 tests ran: there is no {test}, or it is ignored")
            }
            Self::Green(test) => write!(f, "the mistake is not found: {test} passes"),
            Self::Red(_) => write!(f, "an edit that changes nothing is taken for a mistake"),
            Self::RedForAnotherReason(says, _) => {
                write!(
                    f,
                    "the test fails for another reason: it does not say «{says}»"
                )
            }
            Self::TimedOut(limit) => write!(
                f,
                "the test ran longer than {} s, which is no verdict (--limit)",
                limit.as_secs()
            ),
            Self::OutOfTime => write!(f, "the time of this run was over before the test was"),
            Self::Broken(how, _) => write!(f, "{how}, which is no verdict"),
        }
    }
}

impl Failure {
    /// Returns the last lines of the output, indented, for the report.
    #[must_use]
    pub fn details(&self) -> String {
        let output = match self {
            Self::DoesNotCompile(output)
            | Self::Red(output)
            | Self::RedForAnotherReason(_, output)
            | Self::Broken(_, output) => output,
            _ => return String::new(),
        };
        let lines: Vec<&str> = output.trim().lines().collect();
        let last = &lines[lines.len().saturating_sub(SHOWN)..];
        last.iter().map(|line| format!("    {line}\n")).collect()
    }

    /// Returns advice on how to renew a patch that has become stale.
    #[must_use]
    pub fn advice(&self, name: &str, what: &str) -> Option<String> {
        let is_stale = matches!(self, Self::DoesNotApply(_) | Self::DoesNotCompile(_));
        is_stale.then(|| {
            format!(
                "    To renew it, make the mistake in the sources by hand («{}»), then\n    \
                 cargo run --release -p mutants -- --record {name}",
                what.replace('\n', " ")
            )
        })
    }
}

impl Runner {
    /// Creates a runner for the tree at `tree`; copies are kept in `work`.
    ///
    /// # Errors
    /// Another runner is using `work`, or the folder cannot be created.
    pub fn new(tree: &Path, work: &Path, limit: Duration) -> Result<Self> {
        fs::create_dir_all(work)?;
        let alone = File::create(work.join("lock"))?;
        rustix::fs::flock(&alone, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .with_context(|| format!("another run is using {}", work.display()))?;
        Ok(Self {
            tree: tree.to_path_buf(),
            work: work.to_path_buf(),
            limit,
            copies: Vec::new(),
            _alone: alone,
        })
    }

    /// Returns whether this mutant's package was built with its cfg before.
    #[must_use]
    pub fn has_built(&self, mutant: &Mutant) -> bool {
        self.mark(mutant).is_file()
    }

    /// Returns the path of the file that records such a build. It is in the build folder, so that
    /// both are removed together.
    fn mark(&self, mutant: &Mutant) -> PathBuf {
        let name = format!("has-built-{}", mutant.head.package);
        self.target(mutant.head.cfg).join(name)
    }

    fn target(&self, cfg: Cfg) -> PathBuf {
        self.work.join(cfg.name()).join("target")
    }

    /// Returns the copy of the tree for a cfg, made at its first use.
    fn copy(&mut self, cfg: Cfg) -> Result<&Copy> {
        let known = self.copies.iter().position(|(of, _)| *of == cfg);
        let at = match known {
            Some(at) => at,
            None => {
                let copy = Copy::of(&self.tree, self.work.join(cfg.name()).join("tree"))?;
                self.copies.push((cfg, copy));
                self.copies.len() - 1
            }
        };
        Ok(&self.copies[at].1)
    }

    /// Applies one mutant to the copy for its cfg, runs its tests, and reverts it. A test that is
    /// still running at `end` has no verdict; a build is not interrupted.
    ///
    /// # Errors
    /// An error that is not the mutant's fault: no Cargo, no space on the disk.
    pub fn run(&mut self, mutant: &Mutant, end: Option<Instant>) -> Result<Outcome> {
        let began = Instant::now();
        let (target, mark) = (self.target(mutant.head.cfg), self.mark(mutant));
        let limit = self.limit;
        let log = self.work.join("log");
        let copy = self.copy(mutant.head.cfg)?;
        let applied = match copy.apply(&mutant.patch) {
            Ok(applied) => applied,
            Err(error) if tree::is_misfit(&error) => {
                return Ok(Outcome {
                    verdict: Err(Failure::DoesNotApply(format!("{error:#}"))),
                    built: began.elapsed(),
                    ran: Duration::ZERO,
                });
            }
            Err(error) => return Err(error),
        };
        let binary = cargo::build(copy.root(), &target, &mutant.head);
        let built = began.elapsed();
        let verdict = binary.and_then(|binary| match binary {
            Ok(binary) => {
                fs::write(mark, "")?;
                test_all(&binary, mutant, &log, limit, end)
            }
            Err(errors) => Ok(Err(Failure::DoesNotCompile(errors))),
        });
        applied.undo()?;
        Ok(Outcome {
            verdict: verdict?,
            built,
            ran: began.elapsed() - built,
        })
    }
}

/// Runs the tests of a mutant, until the first with an unexpected result, or until `end`.
fn test_all(
    binary: &Binary,
    mutant: &Mutant,
    log: &Path,
    limit: Duration,
    end: Option<Instant>,
) -> Result<Result<String, Failure>> {
    let head = &mutant.head;
    for test in &head.tests {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let is_cut = left.is_some_and(|left| left < limit);
        let ending = binary.run(test, &head.env, log, left.unwrap_or(limit).min(limit))?;
        if ending == Ending::TimedOut && is_cut {
            return Ok(Err(Failure::OutOfTime));
        }
        if let Err(failure) = verdict(test, &head.expect, ending, limit) {
            return Ok(Err(failure));
        }
    }
    let tests = head.tests.join(", ");
    Ok(Ok(match head.expect {
        Expect::Red(_) => format!("red: {tests}"),
        Expect::Green => format!("green, as it should be: {tests}"),
    }))
}

/// Judges the result of one test of a mutant.
fn verdict(test: &str, expect: &Expect, ending: Ending, limit: Duration) -> Result<(), Failure> {
    match (ending, expect) {
        (Ending::Failed(printed), Expect::Red(says)) => match printed.contains(says) {
            true => Ok(()),
            false => Err(Failure::RedForAnotherReason(says.clone(), printed)),
        },
        (Ending::Failed(printed), Expect::Green) => Err(Failure::Red(printed)),
        (Ending::Passed, Expect::Green) => Ok(()),
        (Ending::Passed, Expect::Red(_)) => Err(Failure::Green(test.to_string())),
        (Ending::NoSuchTest, _) => Err(Failure::NoSuchTest(test.to_string())),
        (Ending::TimedOut, _) => Err(Failure::TimedOut(limit)),
        (Ending::Broken(broken), _) => Err(Failure::Broken(broken.to_string(), broken.printed)),
    }
}
