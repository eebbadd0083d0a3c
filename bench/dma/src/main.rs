//! `make bench-dma`: cost of IOVA allocation and DMA mapping on this machine, beside Linux's own
//! code and other peers.
//!
//! | section | what |
//! |---|---|
//! | `alloc` | the loops over ours and Linux's allocator, every allocator of the papers, two crates of other projects; failing, starving, idle, cold, bytes |
//! | `table` | p-S over the lock-free table and the locked ones |
//! | `two` | two threads against one, beside two that share nothing: a-1, c-1, map and unmap through the real allocator |
//! | `map` | the loops d: deferred and strict policies, with and without tables; map and unmap of 4 KiB and 2 MiB beside Linux's |
//! | `nic` | a network card's load: the share of `off` that each policy reaches; stale mappings; percentiles |
//! | `memory` | leaf tables after c-1 and after an epoch; table pages over a hundred iterations |
//! | `reuse` | LRU, optimistic teardown and the reverse translation cache: hit rate, time, bytes |
//! | `model` | four to 16 cores, by the discrete-event model where it holds at two; never a measurement |
//!
//! Figures go to one flat JSON object, plots beside it, and with `--docs` a results page that is
//! made from the object alone, losses included. Ratios to Linux are void where
//! `EXITLESS_LINUX_IOVA` names no build of its code (`scripts/linux-iova.sh` makes one).
#![deny(unsafe_code)]

mod alloc;
mod docs;
mod doubled;
mod map;
mod measure;
mod memory;
mod model;
mod nic;
mod paper;
mod plots;
mod record;
mod replay;
mod reuse;
mod table;

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use report::{Host, Object, host};

use alloc::section::WORKLOADS;
use measure::{Primitives, Turns};
use record::Record;

/// Measures IOVA allocation and DMA mapping on this machine.
#[derive(Parser)]
struct Args {
    /// Where the figures go, as one JSON object; plots lie in a directory beside it.
    #[arg(long, value_name = "FILE", default_value = "target/report/dma.json")]
    report: PathBuf,
    /// Short runs: a test that everything runs, no figures.
    #[arg(long)]
    quick: bool,
    /// Only these sections.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Only these loops of the section `alloc`, by the names in their keys (`a1`, `stray_w256`),
    /// and nothing else.
    #[arg(long = "loop", value_name = "NAME")]
    loops: Vec<String>,
    /// Write the results page there, from the figures alone.
    #[arg(long, value_name = "FILE")]
    docs: Option<PathBuf>,
    /// Measure nothing: page and plots from the figures that `--report` names.
    #[arg(long)]
    again: bool,
    /// Measure nothing: replay the traces of guests that lie beside these figures
    /// (`make bench-pviommu`), and add to them what the policies' models remove.
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    /// Length of one run, milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 120)]
    millis: u64,
    /// Runs of each figure.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=50))]
    runs: u8,
}

type Section = fn(&Turns, &mut Record);

/// The section whose loops can be named.
const OF_LOOPS: &str = "alloc";

/// The sections, in their order.
const SECTIONS: [(&str, Section); 8] = [
    (OF_LOOPS, alloc::section::measure),
    ("table", table::section::measure),
    ("two", doubled::measure),
    ("map", map::section::measure),
    ("nic", nic::section::measure),
    ("memory", memory::measure),
    ("reuse", reuse::measure),
    ("model", model::measure),
];

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(report) = &args.replay {
        return replay::run(report);
    }
    if !args.again {
        measure(&args)?;
    }
    let named = || args.report.display().to_string();
    let figures = Object::read(&args.report).with_context(named)?;
    let plots = args.report.with_extension("");
    let drawn = plots::draw(&figures, &plots).with_context(|| plots.display().to_string())?;
    println!(
        "\nfigures: {}; {} plots in {}",
        args.report.display(),
        drawn.len(),
        plots.display()
    );
    if let Some(file) = &args.docs {
        fs::write(file, docs::page(&figures, &drawn))
            .with_context(|| file.display().to_string())?;
        println!("results page: {}", file.display());
    }
    Ok(())
}

impl Args {
    /// The sections to run: those named, or all. A loop that is named leaves only its own.
    fn sections(&self) -> Result<Vec<(&'static str, Section)>> {
        let names = SECTIONS.map(|(name, _)| name);
        known("section", &self.only, &names)?;
        let mut loops = WORKLOADS.map(|workload| workload.name).to_vec();
        loops.sort_unstable();
        loops.dedup();
        known("loop", &self.loops, &loops)?;
        if let Some(other) = self.only.iter().find(|only| *only != OF_LOOPS)
            && !self.loops.is_empty()
        {
            bail!(
                "--loop leaves nothing of the section {other:?}: loops are of the section \
                 {OF_LOOPS:?}"
            );
        }
        let mut sections = SECTIONS.to_vec();
        sections.retain(|(name, _)| match self.loops.is_empty() {
            true => self.only.is_empty() || self.only.iter().any(|only| only == name),
            false => *name == OF_LOOPS,
        });
        Ok(sections)
    }
}

/// Refuses a name that is not in the list.
fn known(what: &str, asked: &[String], names: &[&str]) -> Result<()> {
    match asked.iter().find(|name| !names.contains(&name.as_str())) {
        Some(unknown) => bail!(
            "there is no {what} {unknown:?} (there are {})",
            names.join(", ")
        ),
        None => Ok(()),
    }
}

/// Runs the sections; what is there is written after each.
fn measure(args: &Args) -> Result<()> {
    let sections = args.sections()?;
    let mut turns = Turns {
        time: Duration::from_millis(args.millis),
        runs: usize::from(args.runs),
        cpus: host::cpus().context("which CPUs there are")?,
        busy: Cell::new(0),
        loops: args.loops.clone(),
    };
    if args.quick {
        (turns.time, turns.runs) = (Duration::from_millis(2), 1);
    }
    let primitives = Primitives::measure(&turns)?;
    let mut record = Record::new(&Host::read(), &turns, &primitives, args.quick);
    if let Some(linux) = alloc::linux() {
        println!("Linux {}'s own code beside ours", linux.version());
        record.text("linux_version", linux.version());
    }
    for (_, section) in sections {
        section(&turns, &mut record);
        record.busy(&turns);
        record
            .write(&args.report)
            .with_context(|| args.report.display().to_string())?;
    }
    record.summary();
    Ok(())
}
