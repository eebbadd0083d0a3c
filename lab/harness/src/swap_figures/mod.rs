//! `exitless-lab swap-figures` (`make bench-swap-figures`): the remaining figures of the paper's
//! evaluation, as counts.
//!
//! | section | of the thesis | what |
//! |---|---|---|
//! | `sweep` | Figure 4.5 | a disk read in order, with more and more of the guest in memory |
//! | `tracked` | 4.15 | pages that the pager knows to be backed by blocks, and the guest's own page cache |
//! | `compile`, `compress`, `collect` | 4.11 to 4.13 | memory use of compilers, compressors and collectors |
//! | `phased` | 4.4, 4.14 | four guests that start one after another on one host |
//!
//! A run is one of [`swap_lab`](crate::swap_lab)'s with another plan; `phased` has its own. Each
//! piece of work has a lab of its own, in which the ways follow each other. Tables, plots
//! (`target/report/swap/`) and one JSON object are written anew after each run, so that figures
//! measured so far are kept.
//!
//! Left out: times and throughput, which a lab cannot show, and Windows guests.

mod figures;
mod phased;
mod works;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::swap_lab::experiment;
use crate::swap_lab::files::Files;
use crate::swap_lab::memory_config::MemoryConfig;
use crate::swap_lab::{KERNEL, STORE};
use crate::system::host::Host;
use figures::Figures;
use works::Work;

/// Arguments of `exitless-lab swap-figures`.
#[derive(clap::Args)]
pub struct SwapFiguresArgs {
    /// Where the figures go, as one JSON object; plots go to `swap/` beside it.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/report/swap-figures.json"
    )]
    pub report: PathBuf,
    /// Number of times that each run is made: tables and plots have medians.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=20))]
    rounds: u32,
    /// Only these sections.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Section>,
    /// Only these ways: of baseline, balloon, both and, with four guests, balloon-both.
    #[arg(long, value_enum, value_delimiter = ',')]
    ways: Vec<MemoryConfig>,
}

/// A section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
enum Section {
    /// A disk read in order, with more and more of the guest in memory.
    Sweep,
    /// Pages backed by blocks, and the guest's page cache.
    Tracked,
    /// A compiler's memory.
    Compile,
    /// A compressor's.
    Compress,
    /// A garbage collector's.
    Collect,
    /// Four guests that start one after another.
    Phased,
}

/// Ways that are compared.
const WAYS: [MemoryConfig; 3] = [
    MemoryConfig::Baseline,
    MemoryConfig::Balloon,
    MemoryConfig::Both,
];
/// Ways that are compared with four guests.
const PHASED_WAYS: [MemoryConfig; 4] = [
    MemoryConfig::Baseline,
    MemoryConfig::Balloon,
    MemoryConfig::Both,
    MemoryConfig::BalloonBoth,
];

impl Section {
    /// Returns the runs that it needs.
    fn runs(self) -> Vec<(Work, MemoryConfig)> {
        let of = |work: Work| WAYS.map(|way| (work, way)).to_vec();
        match self {
            Self::Sweep => works::LIMITS
                .into_iter()
                .map(Work::Read)
                .flat_map(of)
                .collect(),
            Self::Tracked => vec![
                (Work::Compile, MemoryConfig::Both),
                (Work::Compress, MemoryConfig::Both),
            ],
            Self::Compile => of(Work::Compile),
            Self::Compress => of(Work::Compress),
            Self::Collect => of(Work::Collect),
            Self::Phased => Vec::new(),
        }
    }
}

/// Makes all runs; the status is 1 if one failed.
pub fn main(args: &SwapFiguresArgs) -> Result<u8> {
    let start = Instant::now();
    let is_asked = |section| args.only.is_empty() || args.only.contains(&section);
    let is_wanted = |way: &MemoryConfig| args.ways.is_empty() || args.ways.contains(way);
    let sections = <Section as clap::ValueEnum>::value_variants();
    let asked = sections.iter().filter(|section| is_asked(**section));
    let runs: BTreeSet<(Work, MemoryConfig)> = asked.flat_map(|section| section.runs()).collect();
    let runs: BTreeSet<_> = runs.into_iter().filter(|(_, way)| is_wanted(way)).collect();
    let has_phased = is_asked(Section::Phased) && PHASED_WAYS.iter().any(is_wanted);
    if runs.is_empty() && !has_phased {
        bail!(
            "--only and --ways together select nothing: `tracked` has the way both, `phased` {}, \
             all others {}",
            names(&PHASED_WAYS),
            names(&WAYS)
        );
    }
    let works: BTreeSet<Work> = runs.iter().map(|(work, _)| *work).collect();
    let mut figures = Figures::default();
    let write = |figures: &Figures| figures.write(&args.report, start.elapsed());
    for round in 1..=args.rounds {
        let say = |name: &str, way: MemoryConfig| {
            let rounds = args.rounds;
            eprintln!(
                "swap-figures: round {round} of {rounds}: {name}, {}",
                way.name()
            );
        };
        for &work in &works {
            let files = Files::make(&[STORE, works::IMAGE])?;
            let ways = runs.iter().filter(|run| run.0 == work).map(|run| run.1);
            in_lab(&files, &mut figures, ways, |host, figures, way| {
                say(&work.name(), way);
                let run = experiment::run(host, way, &work.plan())?;
                eprint!("{}", run.lines());
                figures.add(work, way, run)?;
                write(figures)
            })?;
        }
        if is_asked(Section::Phased) {
            let files = Files::make(&phased::disks())?;
            let ways = PHASED_WAYS.into_iter().filter(is_wanted);
            in_lab(&files, &mut figures, ways, |host, figures, way| {
                say("four guests", way);
                figures.add_phased(way, phased::run(host, way)?);
                write(figures)
            })?;
        }
    }
    // The report includes failures.
    write(&figures)?;
    print!("{}", figures.tables());
    println!("\nfigures: {}", args.report.display());
    Ok(u8::from(figures.has_failed()))
}

fn names(ways: &[MemoryConfig]) -> String {
    let values = ways.iter().filter_map(clap::ValueEnum::to_possible_value);
    let names: Vec<_> = values.map(|value| value.get_name().to_owned()).collect();
    names.join(", ")
}

/// Runs `each` way in a lab whose disks are `files`. After a way that failed the lab is a new one,
/// since a guest that hangs may hold resources that the next one needs.
fn in_lab(
    files: &Files,
    figures: &mut Figures,
    ways: impl Iterator<Item = MemoryConfig>,
    each: impl Fn(&Host, &mut Figures, MemoryConfig) -> Result<()>,
) -> Result<()> {
    let mut lab: Option<Host> = None;
    for way in ways {
        let host = match lab.take() {
            Some(host) => host,
            None => {
                let host = Host::lab_with_disks(KERNEL, files.disks())?;
                figures.conditions(&host)?;
                experiment::prepare(&host).context("writing the image")?;
                host
            }
        };
        match each(&host, figures, way) {
            Ok(()) => lab = Some(host),
            Err(error) => {
                eprintln!("swap-figures: {}: {error:#}", way.name());
                figures.failed(way, &error);
                host.shutdown()?;
            }
        }
    }
    lab.map_or(Ok(()), Host::shutdown)
}
