//! `exitless-lab pviommu-lab` (`make bench-pviommu`): requests, kicks and exits of a stock guest's
//! disk reads behind the paravirtual IOMMU, by driver and policy, and their peers in the same run:
//! no IOMMU, emulated VT-d.
//!
//! One boot each, of Debian's 6.12 with one vCPU, the sidecore polling. A window is direct 4 KiB
//! reads one at a time, into one page, or into 512 in turns; it is warmed up by the same process
//! over the same pages. Requests are counted by the host. Requests that the guest's driver makes
//! while it boots are not part of a window.
//!
//! Besides: the network (`net`), the time for which a released buffer can still be reached
//! (`late`), the effect of the hints of MAPs (`hopt`), bounce buffers (`bounces`), and one list of
//! cases against this IOMMU and QEMU's ([`spec`]).
//!
//! Counts only: time in the lab is not meaningful.

mod bounces;
mod figures;
mod hopt;
mod late;
mod net;
pub mod spec;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use lab::packages::Version;
use serde_json::Value;

use crate::system::guest::{Driver, Guest, Mode};
use crate::system::host::{GuestModule, Host, Kernels};
use crate::system::workloads;
use figures::{Figures, Window};
use late::Late;

/// Arguments of `exitless-lab pviommu-lab`.
#[derive(clap::Args)]
pub struct PviommuLabArgs {
    /// Where the figures go, as one JSON object.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/report/pviommu.json"
    )]
    pub report: PathBuf,
    /// Measured reads of each window.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(100..=4000))]
    reads: u32,
    /// Rows whose name contains this, and no others.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

impl PviommuLabArgs {
    /// Returns whether the row of this name is to be measured.
    fn is_wanted(&self, name: &str) -> bool {
        let only = self.only.as_ref();
        only.is_none_or(|text| name.contains(text))
    }
}

/// Debian's kernel with a virtio-iommu driver of its own.
const KERNEL: Version = Version::new(6, 12);

/// Pages of the second window: twice as many as a cache of Linux's for I/O virtual addresses holds.
const BUFFERS: u32 = 512;

/// A guest that is measured.
struct Row {
    /// Name in keys and in the table.
    name: &'static str,
    mode: Mode,
    driver: Driver,
    is_strict: bool,
    /// Whether each kick exits.
    is_trapped: bool,
}

impl Row {
    const fn new(name: &'static str, mode: Mode, driver: Driver) -> Self {
        Self {
            name,
            mode,
            driver,
            is_strict: true,
            is_trapped: false,
        }
    }

    const fn lazy(self) -> Self {
        Self {
            is_strict: false,
            ..self
        }
    }

    const fn trapped(self) -> Self {
        Self {
            is_trapped: true,
            ..self
        }
    }
}

/// Rows that are measured, in this order.
const ROWS: [Row; 12] = {
    const fn ours(name: &'static str, parameters: &'static [&'static str]) -> Row {
        Row::new(name, Mode::Virtio, Driver::Module(parameters))
    }
    const fn stock(name: &'static str) -> Row {
        Row::new(name, Mode::Virtio, Driver::Stock)
    }
    [
        Row::new("no_iommu", Mode::None, Driver::Stock),
        Row::new("vtd", Mode::Shared, Driver::Stock),
        Row::new("vtd_lazy", Mode::Shared, Driver::Stock).lazy(),
        stock("stock"),
        stock("stock_lazy").lazy(),
        stock("stock_trap").trapped(),
        stock("stock_lazy_trap").lazy().trapped(),
        ours("none", &[]),
        ours("shared", &["reuse=shared"]),
        ours("async", &["reuse=async"]),
        ours("optimistic", &["reuse=optimistic"]),
        ours("rtc", &["reuse=rtc"]),
    ]
};

/// Measures all rows.
pub fn main(args: &PviommuLabArgs) -> Result<u8> {
    let mut figures = None;
    let mut told = String::new();
    if in_guests(args).next().is_some() {
        told += &measure_guests(args, &mut figures)?;
    }
    if hopt::names_of_waits().any(|name| args.is_wanted(name)) {
        let wants = |name: &str| args.is_wanted(name);
        told += &hopt::measure_waits(&args.report, args.reads, &mut figures, &wants)?;
    }
    if args.is_wanted(spec::NAME) {
        told += &spec::measure(args, &mut figures)?.table();
    }
    let figures = figures.context("no row has that name")?;
    if figures.has_rows() {
        println!("{}", figures.table());
    }
    println!("{told}\nfigures: {}", args.report.display());
    Ok(0)
}

/// Returns the names of the wanted rows that are measured in guests with a driver for the IOMMU.
fn in_guests(args: &PviommuLabArgs) -> impl Iterator<Item = &'static str> {
    let reads = ROWS.iter().map(|row| row.name);
    let rows = reads.chain(net::names()).chain(late::NAMES);
    let rows = rows.chain(hopt::names()).chain(bounces::NAMES);
    rows.filter(|name| args.is_wanted(name))
}

/// Measures these rows, in one lab. Returns the text beside the table of reads.
fn measure_guests(args: &PviommuLabArgs, figures: &mut Option<Figures>) -> Result<String> {
    let host = Host::start_with_kernels(Kernels {
        guest: Some(KERNEL),
        module: Some(GuestModule::Driver),
        ..Kernels::default()
    })?;
    let figures = figures.insert(Figures::new(&host, args.reads)?);
    for row in ROWS.iter().filter(|row| args.is_wanted(row.name)) {
        eprintln!("pviommu-lab: {}", row.name);
        let windows = measure(&host, row, args.reads).with_context(|| row.name)?;
        figures.add(row.name, &windows);
        // Figures measured so far are kept if a later row fails.
        figures.write(&args.report)?;
    }
    let wants = |name: &str| args.is_wanted(name);
    let mut told = net::measure(&host, &args.report, figures, &wants)?;
    let late = Late::measure(&host, wants)?;
    for (key, value) in late.values() {
        figures.put(&key, value);
    }
    told += &late.table();
    figures.write(&args.report)?;
    for measure in [hopt::measure, bounces::measure] {
        told += &measure(&host, &args.report, figures, &wants)?;
    }
    host.shutdown()?;
    Ok(told)
}

/// Pins the sidecore of a guest in the lab to the processor that the emulated host keeps free.
fn pin(guest: &mut Guest, host: &Host) {
    if matches!(host, Host::Lab(_)) {
        guest.pin = Some("2,0".into());
    }
}

/// Measures the windows of a row: one page, and many.
fn measure(host: &Host, row: &Row, reads: u32) -> Result<[Window; 2]> {
    let disk = workloads::disk_node(row.mode, 0);
    let read = |buffers: u32| {
        format!(
            "workload reads {disk} --in-place --count {reads} --warmup {} --buffers {buffers}",
            200 + 2 * buffers
        )
    };
    let script = format!("{} && {}", read(1), read(BUFFERS));
    let mut guest = Guest::new(row.mode, script);
    (guest.driver, guest.is_strict) = (row.driver, row.is_strict);
    guest.limit = Duration::from_secs(600);
    if row.is_trapped {
        let flags = ["--iommu-mode", "trap"];
        guest.flags.extend(flags.map(String::from));
    }
    pin(&mut guest, host);
    workloads::add_disk(&mut guest, host, 1, "")?;
    let outcome = guest.run(host)?;
    let [one, many]: &[Value; 2] = outcome
        .windows()
        .try_into()
        .context("two windows in the ledger")?;
    Ok([Window::of(one, reads), Window::of(many, reads)])
}
