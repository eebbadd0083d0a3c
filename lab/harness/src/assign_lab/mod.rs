//! `exitless-lab assign-lab` (`make bench-assign`): costs of a stock guest with an assigned NVMe
//! drive and network card, by its kernel's policy, the host's, and the register mode, and with all
//! memory pinned (`--iommu none`).
//!
//! | module | |
//! |---|---|
//! | `case` | the guests, the host's policies, the works |
//! | `matrix` | one boot: windows of the ledger under one policy after the other, changed while the guest runs |
//! | `peer` | QEMU in the same lab, for comparison |
//! | `figures` | bars, and the report |
//! | `results` | tables, and `docs/assign-results.md` |
//!
//! Counts only: time in the lab is not meaningful. Cycles of a map and an unmap are measured by
//! `bench/assign`, natively.

mod case;
mod figures;
mod matrix;
mod peer;
mod results;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lab::LabConfig;
use lab::assigned::Device;
use workload::pattern;

use crate::assign::{AssignLab, runs};
use case::{Case, Work};
use figures::Figures;

/// Arguments of `exitless-lab assign-lab`.
#[derive(clap::Args)]
pub struct AssignLabArgs {
    /// Where the figures go, as one JSON object.
    #[arg(long, value_name = "FILE", default_value = "target/report/assign.json")]
    pub report: PathBuf,
    /// Measured requests of each window, half of that where registers trap; 64 more come before
    /// them to warm up.
    #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u32).range(16..=2000))]
    count: u32,
    /// Only guests of these names (shared_strict, for example), and parts.
    #[arg(long, value_delimiter = ',', value_parser = parts())]
    only: Vec<String>,
    /// Only these works.
    #[arg(long, value_delimiter = ',', value_parser = Work::ALL.map(Work::name).to_vec())]
    works: Vec<String>,
    /// Figures that were measured natively (`assign-bench`), to be reported beside.
    #[arg(long, value_name = "FILE")]
    native: Option<PathBuf>,
    /// A page of results to be written.
    #[arg(long, value_name = "FILE")]
    docs: Option<PathBuf>,
    /// Writes the page from the figures of an earlier run, and measures nothing.
    #[arg(long, requires = "docs")]
    again: bool,
}

/// Bytes of the namespace that hold the pattern: more than any window reads.
const PATTERN: usize = 16 << 20;

/// Parts beside the guests of the matrix.
const PARTS: [&str; 5] = ["matrix", "rogue", "qemu", "reclaim", "kills"];

fn parts() -> clap::builder::PossibleValuesParser {
    let names = Case::ALL.iter().map(Case::name);
    let all = PARTS.map(str::to_owned).into_iter().chain(names);
    // They are leaked once, when the arguments are parsed.
    let all: Vec<&'static str> = all.map(|name| &*name.leak()).collect();
    all.into()
}

impl AssignLabArgs {
    fn has(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == part)
    }

    fn cases(&self) -> Vec<Case> {
        let all = Case::ALL.into_iter();
        all.filter(|case| self.has("matrix") || self.has(&case.name()))
            .collect()
    }

    fn works(&self, case: &Case) -> Vec<Work> {
        let all = case.works().iter().copied();
        all.filter(|work| self.works.is_empty() || self.works.iter().any(|it| it == work.name()))
            .collect()
    }
}

/// Runs all boots; the status is 1 if one failed, or a figure does not meet its bar.
pub fn main(args: &AssignLabArgs) -> Result<u8> {
    let native = args.native.as_deref().map(report::Object::read).transpose();
    let native = native.context("reading the native figures")?;
    if args.again {
        let mut object = report::Object::read(&args.report)
            .with_context(|| format!("reading {}", args.report.display()))?;
        if native.is_some() {
            figures::add_native(&mut object, native.as_ref());
        }
        return write_docs(args, &object).map(|()| 0);
    }
    let start = Instant::now();
    eprintln!("assign-lab: starting the host that runs the guests …");
    let lab = start_lab()?;
    let mut figures = Figures::new(lab.host(), args.count, native.as_ref())?;
    for case in args.cases() {
        eprintln!(
            "assign-lab: {} s: {}",
            start.elapsed().as_secs(),
            case.name()
        );
        match matrix::boot(&lab, case, &args.works(&case), args.count) {
            Ok(boot) => {
                eprint!("{}", results::lines(&boot));
                figures.add(&lab, boot);
            }
            Err(error) => {
                eprintln!("assign-lab: {}: {error:#}", case.name());
                figures.failed(&case.name(), &error);
            }
        }
        // Figures measured so far are kept if a later run fails.
        write(args, &mut figures, start)?;
    }
    if args.has("rogue") {
        eprintln!("assign-lab: {} s: rogue DMA", start.elapsed().as_secs());
        figures.rogue(rogue(&lab));
        write(args, &mut figures, start)?;
    }
    if args.has("qemu") {
        eprintln!("assign-lab: {} s: QEMU beside", start.elapsed().as_secs());
        figures.peer(peer::run(&lab, args.count));
        write(args, &mut figures, start)?;
    }
    // The following parts write to all of the drive.
    let (_, content) = lab.shutdown()?;
    if let Err(wrong) = pattern::check(u64::from(case::SEED), 0, &content[..PATTERN]) {
        figures.failed("content", &anyhow::Error::msg(wrong));
    }
    if args.has("reclaim") {
        eprintln!(
            "assign-lab: {} s: memory reclaimed under load",
            start.elapsed().as_secs()
        );
        figures.reclaimed(in_a_lab(|lab| runs::reclaim_under_load(lab, 60, 10_000)));
        write(args, &mut figures, start)?;
    }
    if args.has("kills") {
        eprintln!("assign-lab: {} s: {KILLS} kills", start.elapsed().as_secs());
        figures.kills(in_a_lab(|lab| runs::kill_at_random_points(lab, KILLS, 35)));
    }
    let object = write(args, &mut figures, start)?;
    print!("{}", results::tables(&object));
    println!("figures: {}", args.report.display());
    Ok(u8::from(!figures.holds()))
}

/// Writes the report and the page, with the figures so far.
fn write(args: &AssignLabArgs, figures: &mut Figures, start: Instant) -> Result<report::Object> {
    let object = figures.write(&args.report, start.elapsed())?;
    write_docs(args, &object)?;
    Ok(object)
}

fn write_docs(args: &AssignLabArgs, object: &report::Object) -> Result<()> {
    let Some(docs) = &args.docs else {
        return Ok(());
    };
    std::fs::write(docs, results::page(object))
        .with_context(|| format!("writing {}", docs.display()))
}

/// Number of times that a VMM is killed.
const KILLS: u64 = 20;

/// Runs in a lab of its own.
fn in_a_lab<T>(run: impl FnOnce(&AssignLab) -> Result<T>) -> Result<T> {
    let lab = start_lab()?;
    let of = run(&lab)?;
    lab.shutdown()?;
    Ok(of)
}

/// Starts the lab, writes the pattern to its drive, and binds its devices.
fn start_lab() -> Result<AssignLab> {
    let lab = AssignLab::start(LabConfig::default())?;
    lab.host().script(&format!(
        "workload write-pattern /dev/nvme0n1 --bytes {PATTERN} --seed {}",
        case::SEED
    ))?;
    for device in [Device::Nvme, Device::Net, Device::Edu] {
        lab.bind(device)?;
    }
    Ok(lab)
}

/// Tries DMA that no mapping allows, by `edu` in a guest. Returns the number of the three states
/// whose accesses were blocked and are in the host's log.
fn rogue(lab: &AssignLab) -> Result<u32> {
    use crate::assign::{Guest, Mode, rogue_script};
    use lab::assigned::DmaAccess;
    let mut guest = Guest::new(Mode::Shared, rogue_script("--pause-ms 2500"));
    guest.limit = std::time::Duration::from_secs(600);
    let run = lab.run(&guest, &[(Device::Edu, "")])?;
    run.outcome.check()?;
    let console = run.outcome.console.replace('\r', "");
    let is_blocked = |state: &str| {
        let mut lines = console
            .lines()
            .filter(|line| line.starts_with(&format!("rogue {state} ")))
            .peekable();
        lines.peek().is_some()
            && lines.all(|line| {
                let field = |key: &str| {
                    let mut words = line.split_whitespace();
                    words.find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
                };
                let iova = field("iova").and_then(|text| text.strip_prefix("0x"));
                let iova = iova.and_then(|text| u64::from_str_radix(text, 16).ok());
                let access = match field("access") {
                    Some("write") => DmaAccess::Write,
                    _ => DmaAccess::Read,
                };
                let address = lab.address(Device::Edu);
                field("blocked") == Some("yes")
                    && iova.is_some_and(|iova| run.faults.has(address, access, iova))
            })
    };
    let states = ["unmapped", "read-only", "revoked"];
    let blocked = states.into_iter().filter(|state| is_blocked(state)).count();
    ensure!(
        blocked == states.len(),
        "{blocked} of 3:\n{console}\n{}",
        run.faults
    );
    Ok(blocked as u32)
}
