//! `make bench-pviommu-native`: cost of the paravirtual IOMMU on this machine, without a virtual
//! machine.
//!
//! | key | what is timed |
//! |---|---|
//! | `map_unmap_per_s_polled` | pairs of a MAP and an UNMAP a second; the driver waits for each, a core polls the ring |
//! | `map_unmap_per_s_trap` | the same with a message to that core for each kick, as a trap sends it; the exit is not included |
//! | `request_ns_alone` | a request if one core does both sides in turns: its processor time, the driver included |
//! | `sweeps_per_request` | sweeps of the owner from a request to its answer, in that case |
//! | `translate_ns_N` | a lease of one page at random, of N mapped pages, begun and ended |
//! | `host_ns_{low,high}` | look-up of the host address of a page in 1 MiB of RAM: below 3 GiB, above 4 GiB |
//! | `host_ns_{low,high}_cached` | the same with a cache of the last window (`--iommu-hints cache=on`) |
//! | `host_ns_high_scattered`, `…_cached` | pages of 64 windows, at random: few hits |
//! | `pingpong_ns` | round trip of one cache line between two cores: a lower bound for a request |
//!
//! Figures of two threads need two idle cores. On a busy machine they mean little, as their spread
//! shows.
#![forbid(unsafe_code)]

use std::hint;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use guest_mem::{Dma, Gpa, GuestRam, Intent, Iova, LastWindow, PAGE_SIZE, Perm, PhysMem, View};
use report::{Host, Measured, Object, host};
use sidecore::{Activity, IdlePolicy, SidecoreBuilder};
use viommu_guest::{Bus, ByHand, DISK, Guest, attach, machine, map, unmap};

/// Measures the paravirtual IOMMU on this machine.
#[derive(Parser)]
struct Args {
    /// Where the figures go, as one JSON object.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/report/pviommu-native.json"
    )]
    report: PathBuf,
}

/// Number of runs of each measurement, after one that warms up.
const RUNS: usize = 15;
/// Number of pairs in a run.
const PAIRS: u64 = 20_000;
/// Number of pages that the pairs use.
const PAGES: u64 = 64;

/// Returns the median and the spread of [`RUNS`] results of `run`.
fn runs(mut run: impl FnMut() -> f64) -> Result<Measured> {
    run();
    let values: Vec<f64> = (0..RUNS).map(|_| run()).collect();
    Measured::of(values).context("there are runs")
}

/// Makes pairs of MAP and UNMAP; the endpoint is attached. Returns the seconds that they took.
fn pairs<B: Bus>(guest: &mut Guest<B>) -> f64 {
    let start = Instant::now();
    for pair in 0..PAIRS {
        let iova = (1 + pair % PAGES) * PAGE_SIZE;
        let statuses = [
            guest.request(&map(1, iova, 0x10_0000)),
            guest.request(&unmap(1, iova)),
        ];
        assert_eq!(statuses, [0, 0], "mapped and unmapped");
    }
    start.elapsed().as_secs_f64()
}

/// Measures pairs a second between two threads.
fn pairs_per_s(is_trapped: bool) -> Result<Measured> {
    let (owner, ram) = machine(is_trapped);
    let core = SidecoreBuilder::new("bench")
        .idle(IdlePolicy::Poll)
        .spawn(vec![owner])?;
    let mut guest = Guest::new(core.handle(0), ram);
    ensure!(guest.request(&attach(1, DISK)) == 0, "attached");
    let before = guest.kicks;
    let measured = runs(|| PAIRS as f64 / pairs(&mut guest));
    let requests = 2 * PAIRS * (1 + RUNS as u64);
    let kicks = guest.kicks - before;
    let is_right = match is_trapped {
        // At each wrap of the ring's indices the driver may kick once more or once less than it
        // makes requests.
        true => 1000 * kicks >= 999 * requests,
        false => kicks <= requests >> 15,
    };
    ensure!(is_right, "{kicks} kicks for {requests} requests");
    core.stop();
    measured
}

/// Measures the nanoseconds of a request on one thread, and the sweeps for each.
fn alone() -> Result<(Measured, Measured)> {
    let (owner, ram) = machine(false);
    let mut guest = Guest::new(ByHand::new(owner), ram);
    ensure!(guest.request(&attach(1, DISK)) == 0, "attached");
    while guest.bus.sweep() == Activity::Busy {}
    let requests = 2.0 * PAIRS as f64;
    let mut sweeps = Vec::new();
    let times = runs(|| {
        let before = guest.bus.sweeps;
        let seconds = pairs(&mut guest);
        sweeps.push((guest.bus.sweeps - before) as f64 / requests);
        seconds * 1e9 / requests
    })?;
    Ok((times, Measured::of(sweeps).context("there are runs")?))
}

/// Measures the nanoseconds of an access to one of `pages` pages.
fn translate(pages: u64) -> Result<Measured> {
    const ACCESSES: u64 = 200_000;
    let (owner, ram) = machine(false);
    let mut guest = Guest::new(ByHand::new(owner), ram);
    ensure!(guest.request(&attach(1, DISK)) == 0, "attached");
    for page in 1..=pages {
        let phys = page % 256 * PAGE_SIZE;
        ensure!(
            guest.request(&map(1, page * PAGE_SIZE, phys)) == 0,
            "mapped"
        );
    }
    let ram = guest.ram.clone();
    let mut random = seeded::Random::new(1);
    let order: Vec<u64> = (0..ACCESSES).map(|_| 1 + random.below(pages)).collect();
    let mut dma = View::new(guest.bus.unit(), &ram, DISK);
    runs(|| {
        let start = Instant::now();
        for page in &order {
            let iova = Iova::new(hint::black_box(page * PAGE_SIZE));
            let lease = dma
                .lease(iova, PAGE_SIZE as u32, Perm::Write)
                .expect("mapped");
            hint::black_box(lease.hva);
            dma.release(lease.id);
        }
        start.elapsed().as_nanos() as f64 / ACCESSES as f64
    })
}

/// Start of RAM above the 32-bit hole.
const HIGH: u64 = 4 << 30;
/// Bytes of RAM below and above the hole.
const RAM: u64 = 64 << 20;

/// Measures the nanoseconds of a look-up among the `pages` pages from `base` on, at random.
fn host_address(mem: &impl PhysMem, base: u64, pages: u64) -> Result<Measured> {
    const LOOKUPS: u64 = 1_000_000;
    let mut random = seeded::Random::new(2);
    let order: Vec<u64> = (0..LOOKUPS).map(|_| random.below(pages)).collect();
    runs(|| {
        let start = Instant::now();
        for page in &order {
            let gpa = Gpa::new(hint::black_box(base + page * PAGE_SIZE));
            let hva = mem.host(gpa, PAGE_SIZE, Intent::Write);
            hint::black_box(hva.expect("RAM"));
        }
        start.elapsed().as_nanos() as f64 / LOOKUPS as f64
    })
}

/// Measures the rows of [`host_address`].
fn host_addresses() -> Result<Vec<(&'static str, Measured)>> {
    const WINDOW: u64 = 256;
    let ram = GuestRam::new(&[(Gpa::new(0), RAM), (Gpa::new(HIGH), RAM)])?;
    let cached = LastWindow::new(ram.clone(), true);
    let all = RAM / PAGE_SIZE;
    Ok(vec![
        ("host_ns_low", host_address(&ram, 0, WINDOW)?),
        ("host_ns_low_cached", host_address(&cached, 0, WINDOW)?),
        ("host_ns_high", host_address(&ram, HIGH, WINDOW)?),
        ("host_ns_high_cached", host_address(&cached, HIGH, WINDOW)?),
        ("host_ns_high_scattered", host_address(&ram, HIGH, all)?),
        (
            "host_ns_high_scattered_cached",
            host_address(&cached, HIGH, all)?,
        ),
    ])
}

fn main() -> Result<()> {
    let args = Args::parse();
    let (alone, sweeps) = alone()?;
    let mut rows: Vec<(&str, Measured)> = vec![
        ("map_unmap_per_s_polled", pairs_per_s(false)?),
        ("map_unmap_per_s_trap", pairs_per_s(true)?),
        ("request_ns_alone", alone),
        ("sweeps_per_request", sweeps),
        ("translate_ns_16", translate(16)?),
        ("translate_ns_4096", translate(4096)?),
        ("translate_ns_65536", translate(65_536)?),
        ("pingpong_ns", host::first_round_trip()?),
    ];
    rows.extend(host_addresses()?);
    let host = Host::read();
    let mut report = Object::new(&host, "native, release, no virtual machine");
    println!(
        "the paravirtual IOMMU on {}, Linux {}",
        host.model, host.kernel
    );
    print!("{}", report.measured_rows("", &rows));
    report
        .write(&args.report)
        .with_context(|| format!("writing {}", args.report.display()))?;
    println!("figures: {}", args.report.display());
    Ok(())
}
