//! `exitless-lab swap-lab` (`make bench-swap`): pages moved for a guest with too little memory, in
//! several ways, compared.
//!
//! The experiment of VSwapper's Figures 4.3, 4.9 and 4.10, half as large: a guest of 256 MiB, of
//! which 55 may be resident, uses its memory once, reads a 100 MiB disk four times through its page
//! cache, and has a process write 80 MiB and read them again. The limit is set when it has started,
//! the same for all.
//!
//! All ways are compared by counts of the emulated host's two disks: one has the swap area or
//! store, the other the image. Each run is in a control group that another process samples. Counts
//! that only the pager has are in the ledger's windows.
//!
//! Counts only: time in the lab is not meaningful.

mod beside;
pub(crate) mod experiment;
pub(crate) mod figures;
pub(crate) mod files;
pub(crate) mod memory_config;
pub(crate) mod plan;
pub(crate) mod watch;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lab::packages::Version;

use crate::system::host::Host;
use figures::Figures;
use files::Files;
use memory_config::MemoryConfig;

/// Oldest packaged kernel that traces stores to shared memory (6.7).
pub(crate) const KERNEL: Version = Version::new(6, 12);
/// Bytes of the disk that has the swap area or store.
pub(crate) const STORE: u64 = 1024 << 20;

/// Arguments of `exitless-lab swap-lab`.
#[derive(clap::Args)]
pub struct SwapLabArgs {
    /// Where the figures go, as one JSON object.
    #[arg(long, value_name = "FILE", default_value = "target/report/swap.json")]
    pub report: PathBuf,
    /// Number of times that each way runs: the figures are medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=20))]
    rounds: u32,
    /// Only these ways.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<MemoryConfig>,
    /// Only what is measured beside the ways: exits, and verified pages.
    #[arg(long, conflicts_with = "only")]
    beside: bool,
}

/// Runs all rounds; the status is 1 if a run failed.
pub fn main(args: &SwapLabArgs) -> Result<u8> {
    let start = Instant::now();
    let files = Files::make(&[STORE, experiment::IMAGE])?;
    let ways = match args.only.as_slice() {
        _ if args.beside => Vec::new(),
        [] => MemoryConfig::ALL.to_vec(),
        only => only.to_vec(),
    };
    let mut figures: Option<Figures> = None;
    for round in 0..args.rounds {
        // A new lab for each round, and after a run that failed, so that leftovers of one do not
        // affect the next.
        let mut lab = None;
        for &way in ways.iter().filter(|way| round < way.rounds(args.rounds)) {
            let host = in_lab(&mut lab, &files)?;
            let figures = known(&mut figures, host)?;
            eprintln!(
                "swap-lab: round {} of {}: {}",
                round + 1,
                args.rounds,
                way.name()
            );
            match experiment::run(host, way, &experiment::plan()) {
                Ok(run) => {
                    eprint!("{}", run.lines());
                    figures.add(way, run);
                }
                Err(error) => {
                    eprintln!("swap-lab: {}: {error:#}", way.name());
                    figures.failed(way, &error);
                    end(lab.take());
                }
            }
            // Figures measured so far are kept if a later run fails.
            figures.finish(start.elapsed());
            figures.write(&args.report)?;
        }
        if round == 0 && args.only.is_empty() {
            eprintln!("swap-lab: exits of reads; a minute of verified pages");
            let host = in_lab(&mut lab, &files)?;
            let figures = known(&mut figures, host)?;
            figures.beside(beside::Exits::count(host), beside::verify(host));
            figures.finish(start.elapsed());
            figures.write(&args.report)?;
        }
        end(lab.take());
    }
    let figures = figures.context("no round")?;
    print!("{}", figures.table());
    println!("\nfigures: {}", args.report.display());
    Ok(u8::from(figures.has_failed()))
}

/// Returns the lab, a new one if there is none.
fn in_lab<'a>(lab: &'a mut Option<Host>, files: &Files) -> Result<&'a Host> {
    if lab.is_none() {
        let host = Host::lab_with_disks(KERNEL, files.disks())?;
        experiment::prepare(&host)?;
        *lab = Some(host);
    }
    Ok(lab.as_ref().expect("made just now"))
}

/// Returns the figures, with the conditions of the first lab.
fn known<'a>(figures: &'a mut Option<Figures>, host: &Host) -> Result<&'a mut Figures> {
    match figures {
        Some(figures) => Ok(figures),
        None => Ok(figures.insert(Figures::new(host)?)),
    }
}

/// Ends a lab. One that does not answer is killed.
fn end(lab: Option<Host>) {
    if let Some(Err(error)) = lab.map(Host::shutdown) {
        eprintln!("swap-lab: {error:#}");
    }
}

/// Returns the pages of 4 KiB in so many MiB.
const fn pages(mib: u64) -> u64 {
    mib << 8
}

/// Returns a count of the ledger.
fn count(swap: &serde_json::Value, key: &str) -> Result<u64> {
    let value = swap[key].as_u64();
    ensure!(value.is_some(), "the ledger has no {key}: {swap}");
    Ok(value.unwrap_or_default())
}
