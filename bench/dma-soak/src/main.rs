//! `cargo run --release -p dma-soak`: a billion mixed, checked operations over every IOVA allocator
//! and every mapping policy. At the end all resources must be released: live ranges and pages,
//! table pages, stale mappings.
//!
//! The operations are divided evenly among the *runs* of [`runs`]; each run uses one IOVA space, or
//! one mapper. The first half of a run is made by one thread that acts as three cores, the same for
//! the same seed; the second half by three threads at once. Completed runs are recorded in the file
//! `--state`, and an interrupted soak continues with the next run. Each run prints one line with
//! the time it took; a failure names the seed and the run.
//!
//! An operation is a map, an unmap, an allocation, a free, a pin and its end, a hand-over to
//! another core, an attempt that must be refused, an access by the device, a tick, a park.
//! Allocators are compared with a naive model, in phases (`iova::testing`). Mappers have no model
//! here: the property tests of `dma-map` check more, and are slower.
#![deny(unsafe_code)]

mod allocators;
mod hand;
mod mappers;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;

/// Number of cores of every run.
const CORES: usize = 3;

/// Soaks IOVA allocators and mapping policies.
#[derive(Parser)]
struct Args {
    /// Operations, all runs together.
    #[arg(long, value_name = "N", default_value_t = 1_000_000_000)]
    operations: u64,
    /// Seed by which the operations are chosen.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where runs that are over are noted, for these options and the tree that EXITLESS_SOAK_KEY
    /// names; without it every soak begins anew.
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Only runs whose name contains this.
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// No line per run.
    #[arg(long)]
    quiet: bool,
}

/// One IOVA space or mapper: its name, and a function of a number of operations and a seed.
struct Run {
    name: String,
    soak: Box<dyn Fn(u64, u64)>,
}

fn runs() -> Vec<Run> {
    let mut runs = allocators::runs();
    runs.extend(mappers::runs());
    runs
}

/// Completed runs, for these arguments.
struct Done {
    file: Option<PathBuf>,
    /// The first line of the file: the arguments of the soak.
    soak: String,
    names: BTreeSet<String>,
}

impl Done {
    fn read(args: &Args) -> Result<Self> {
        // `--only` is part of the key: the operations are divided among the runs that it selects.
        let tree = std::env::var("EXITLESS_SOAK_KEY").unwrap_or_default();
        let soak = format!(
            "operations {} seed {} only {:?} tree {tree}",
            args.operations, args.seed, args.only
        );
        let mut names = BTreeSet::new();
        if let Some(file) = &args.state
            && file.exists()
        {
            let text = fs::read_to_string(file)
                .with_context(|| format!("cannot read {}", file.display()))?;
            let mut lines = text.lines();
            // A record of a soak with other arguments is ignored.
            if lines.next() == Some(&soak) {
                names.extend(lines.map(String::from));
            }
        }
        Ok(Self {
            file: args.state.clone(),
            soak,
            names,
        })
    }

    fn add(&mut self, name: &str) -> Result<()> {
        self.names.insert(name.into());
        let Some(file) = &self.file else {
            return Ok(());
        };
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let names: Vec<_> = self.names.iter().map(String::as_str).collect();
        let text = format!("{}\n{}\n", self.soak, names.join("\n"));
        // Written to another file and renamed, so that the record is complete or unchanged.
        let new = file.with_extension("new");
        fs::write(&new, text).with_context(|| format!("cannot write {}", new.display()))?;
        fs::rename(&new, file).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Removes the record: the next soak starts from the beginning.
    fn clear(&self) -> Result<()> {
        match &self.file {
            Some(file) if file.exists() => {
                fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))
            }
            _ => Ok(()),
        }
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let (runs, others): (Vec<_>, Vec<_>) = runs()
        .into_iter()
        .partition(|run| run.name.contains(&args.only));
    let others: Vec<_> = others.iter().map(|run| run.name.to_string()).collect();
    ensure!(
        !runs.is_empty(),
        "no run's name contains {:?}; there are\n  {}",
        args.only,
        others.join("\n  ")
    );
    let mut done = Done::read(&args)?;
    let count = runs.len() as u64;
    let each = args.operations.div_ceil(count);
    let begin = Instant::now();
    let mut slowest = (Duration::ZERO, "");
    let before = runs
        .iter()
        .filter(|run| done.names.contains(&run.name))
        .count();
    if before > 0 {
        println!("dma-soak: {before} of {count} runs were over before");
    }
    for (index, run) in runs.iter().enumerate() {
        if done.names.contains(&run.name) {
            continue;
        }
        let since = Instant::now();
        // Printed if a check panics.
        let tell = Tell(format!(
            "dma-soak: failed in run {:?}: --operations {} --seed {} --only {:?}",
            run.name, each, args.seed, run.name
        ));
        (run.soak)(each, args.seed);
        drop(tell);
        let took = since.elapsed();
        slowest = slowest.max((took, &run.name));
        done.add(&run.name)?;
        if !args.quiet {
            println!(
                "dma-soak: {:>2}/{count} {:<40} {each} operations, {:.0} ns each",
                index + 1,
                run.name,
                took.as_nanos() as f64 / each as f64
            );
        }
    }
    println!(
        "dma-soak: {} operations over {count} allocators and policies, seed {}, {:.0} s (slowest: \
         {}, {:.1} s): \
         live ranges, table pages and stale mappings are back at zero",
        each * count,
        args.seed,
        begin.elapsed().as_secs_f64(),
        slowest.1,
        slowest.0.as_secs_f64()
    );
    done.clear()
}

/// Guard that prints its text if it is dropped by a panic.
struct Tell(String);

impl Drop for Tell {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_has_a_name_of_its_own_and_passes() {
        let runs = runs();
        let names: BTreeSet<_> = runs.iter().map(|run| &run.name).collect();
        assert_eq!(names.len(), runs.len());
        for run in &runs {
            println!("{}", run.name);
            (run.soak)(2_000, 7);
        }
    }

    #[test]
    fn a_soak_goes_on_where_it_was_interrupted() {
        let folder = std::env::temp_dir().join(format!("dma-soak-{}", std::process::id()));
        let args = |seed: &str| {
            let state = folder.join("state").display().to_string();
            Args::parse_from(["dma-soak", "--seed", seed, "--state", &state])
        };
        let mut done = Done::read(&args("3")).expect("no file is no error");
        done.add("tree").expect("writable");
        done.add("chunk").expect("writable");
        let again = Done::read(&args("3")).expect("readable");
        assert_eq!(again.names, done.names);
        assert!(Done::read(&args("4")).expect("readable").names.is_empty());
        let mut some = args("3");
        some.only = "tree".into();
        assert!(Done::read(&some).expect("readable").names.is_empty());
        again.clear().expect("there");
        assert!(Done::read(&args("3")).expect("no file").names.is_empty());
        fs::remove_dir_all(folder).expect("ours");
    }
}
