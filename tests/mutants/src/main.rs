//! `cargo run --release -p mutants`: see `--help`, and the library's head for how it works.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;

use mutants::mutant::{Mutant, names};
use mutants::record::record;
use mutants::run::{Failure, Runner};
use mutants::sample::{Took, order};
use mutants::tree::git;

/// Makes known mistakes in a copy of the tree, one after the other, and sees the test that must
/// find each fail.
#[derive(Parser)]
#[command(after_help = "\
A mutant is a file tests/mutants/CRATE/NAME.patch: what the mistake is, which test finds it, a \
diff. It passes if exactly that test fails and says what it should (or passes, for an edit that \
changes nothing). A patch that does not apply, code that does not compile, no such test, a \
time-out, a signal: all of these fail.

To add one:
  1. make the mistake in the sources, and nothing else (what is to stay: git add)
  2. cargo run --release -p mutants -- --record CRATE/NAME
  3. fill in the head of tests/mutants/CRATE/NAME.patch
  4. undo the mistake, with the command that 2 has printed
  5. cargo run --release -p mutants -- CRATE/NAME
To renew one that no longer applies: 1, 2, 4, 5. Its head is kept.

Copies and builds are kept in target/mutants, one of each for the cfgs none, loom and shuttle: \
the first run with a cfg builds everything that its tests need, later ones what a mistake \
touches.")]
struct Args {
    /// Mutants to run: `CRATE/NAME`, or `CRATE` for all of one; all without any.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Runs as many as fit into so many seconds, others at each commit. A test that is still
    /// running then is ended, without a verdict; a build is not.
    #[arg(long, value_name = "SECONDS")]
    sample: Option<u64>,
    /// Seconds that a test may run, without its build.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    limit: u64,
    /// Prints the names, and runs nothing.
    #[arg(long, conflicts_with = "sample")]
    list: bool,
    /// Writes the difference between the sources and Git's index as the patch of this name, and
    /// runs nothing.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["names", "sample", "list"])]
    record: Option<String>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("mutants: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all is well.
fn run(args: &Args) -> Result<bool> {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let tree = tree.canonicalize().context("the tree")?;
    if let Some(name) = &args.record {
        println!("{}", record(&tree, name)?);
        return Ok(true);
    }
    let chosen = choose(names(&tree)?, &args.names)?;
    if args.list {
        chosen.iter().for_each(|name| println!("{name}"));
        return Ok(true);
    }
    if let Err(error) = git(&tree, &["ls-files", "--error-unmatch", "Cargo.toml"]) {
        // A tree from an archive, say, or of another version control.
        println!("mutants: skipped: a copy has Git's files, and this tree has none: {error:#}");
        return Ok(true);
    }
    let mut session = Session::new(&tree, args)?;
    let mut mutants = session.read(in_order(&tree, args, chosen)?);
    if args.sample.is_none() {
        // One cfg after the other, and crate by crate: each is built as seldom as can be.
        mutants.sort_by(|a, b| (a.head.cfg, &a.name).cmp(&(b.head.cfg, &b.name)));
    }
    let all = mutants.len() + session.failed;
    for mutant in mutants {
        match session.has_time_for(&mutant) {
            true => session.run(&mutant)?,
            false => session.left += 1,
        }
    }
    let Session {
        passed,
        failed,
        left,
        ..
    } = session;
    if left > 0 {
        println!("mutants: {left} of {all} are left to other commits");
    }
    println!("{passed} passed, {failed} failed");
    Ok(failed == 0 && passed > 0)
}

/// A run, and its tally.
struct Session {
    tree: PathBuf,
    runner: Runner,
    took: Took,
    took_file: PathBuf,
    began: Instant,
    time: Option<Duration>,
    has_run: bool,
    passed: usize,
    failed: usize,
    /// Those without a verdict, for want of time.
    left: usize,
}

impl Session {
    fn new(tree: &Path, args: &Args) -> Result<Self> {
        let work = tree.join("target/mutants");
        let runner = Runner::new(tree, &work, Duration::from_secs(args.limit))?;
        let took_file = work.join("took");
        Ok(Self {
            tree: tree.to_path_buf(),
            runner,
            took: Took::read(&took_file),
            took_file,
            began: Instant::now(),
            time: args.sample.map(Duration::from_secs),
            has_run: false,
            passed: 0,
            failed: 0,
            left: 0,
        })
    }

    /// Reads the patch files. One that cannot be read has failed.
    fn read(&mut self, names: Vec<String>) -> Vec<Mutant> {
        let mut mutants = Vec::new();
        for name in names {
            match Mutant::read(&self.tree, &name) {
                Ok(mutant) => mutants.push(mutant),
                Err(error) => self.fail(&name, &Failure::Unreadable(format!("{error:#}")), ""),
            }
        }
        mutants
    }

    /// Whether a mutant fits into the time that is left. The first one always does: a sample runs
    /// something.
    fn has_time_for(&self, mutant: &Mutant) -> bool {
        let has_built = self.runner.has_built(mutant);
        let expected = self.took.expected(&mutant.name, has_built);
        let fits = |time| self.began.elapsed() + expected <= time;
        !self.has_run || self.time.is_none_or(fits)
    }

    /// The end of a sample, when a test is ended. The first one has all the time that it takes,
    /// however long it was built.
    fn end(&self) -> Option<Instant> {
        let time = self.time.filter(|_| self.has_run);
        time.map(|time| self.began + time)
    }

    fn run(&mut self, mutant: &Mutant) -> Result<()> {
        let (name, cfg) = (&mutant.name, mutant.head.cfg);
        let was_built = self.runner.has_built(mutant);
        let expected = self.took.expected(name, was_built);
        let outcome = self.runner.run(mutant, self.end())?;
        self.has_run = true;
        let (built, ran) = (outcome.built.as_secs_f64(), outcome.ran.as_secs_f64());
        let seconds = format!(
            " (cfg {}, built in {built:.1} s, ran {ran:.1} s)",
            cfg.name()
        );
        let mut took = outcome.built + outcome.ran;
        match outcome.verdict {
            Ok(verdict) => {
                println!("ok {name}: {verdict}{seconds}");
                self.passed += 1;
            }
            Err(Failure::OutOfTime) => {
                println!("left {name}: {}{seconds}", Failure::OutOfTime);
                self.left += 1;
                // It takes longer than what was left.
                took = took.max(expected);
            }
            Err(failure) => {
                self.fail(name, &failure, &seconds);
                print!("{}", failure.details());
                if let Some(advice) = failure.advice(name, &mutant.head.what) {
                    println!("{advice}");
                }
            }
        }
        // The first build of a package with a cfg takes longer than any after it.
        if was_built {
            self.took.note(name, took);
            self.took.write(&self.took_file)?;
        }
        Ok(())
    }

    fn fail(&mut self, name: &str, failure: &Failure, seconds: &str) {
        println!("FAILED {name}: {failure}{seconds}");
        self.failed += 1;
    }
}

/// The mutants that are asked for: all of them, where none is.
fn choose(all: Vec<String>, asked: &[String]) -> Result<Vec<String>> {
    let is_meant = |name: &str, asked: &str| {
        name == asked
            || name
                .strip_prefix(asked)
                .is_some_and(|rest| rest.starts_with('/'))
    };
    for asked in asked {
        if !all.iter().any(|name| is_meant(name, asked)) {
            bail!("{asked}: no such mutant or crate; --list names them");
        }
    }
    let is_chosen =
        |name: &String| asked.is_empty() || asked.iter().any(|asked| is_meant(name, asked));
    let chosen: Vec<String> = all.into_iter().filter(is_chosen).collect();
    ensure!(!chosen.is_empty(), "no mutant in tests/mutants");
    Ok(chosen)
}

/// The names in the order in which they run: for a sample the commit's own, which it prints.
fn in_order(tree: &Path, args: &Args, names: Vec<String>) -> Result<Vec<String>> {
    let Some(seconds) = args.sample else {
        return Ok(names);
    };
    let commit = git(tree, &["rev-parse", "HEAD"]).context("a sample is chosen by the commit")?;
    let commit = commit.trim();
    println!("mutants: what goes into {seconds} s, chosen by commit {commit}");
    Ok(order(commit, names))
}
