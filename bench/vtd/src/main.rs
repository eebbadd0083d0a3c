//! `make bench-vtd`: cost of the emulated VT-d unit on this machine, without a virtual machine.
//!
//! | key | operation |
//! |---|---|
//! | `translate_hit_ns` | 4 KiB: IOTLB hit, permission check, host address, lease begun and ended |
//! | `translate_hit_64k_ns` | the same for 64 KiB in one call: sixteen pages, one lease |
//! | `translate_miss_ns` | one page: a four-level walk, then as above |
//! | `drain_N_ns` | N page-selective invalidations and the wait behind them, in one step |
//! | `sidecore_ns_per_unmap` | time of the sidecore for a strict unmap as Linux makes it: one page-selective invalidation and its wait, found in a shared register page |
//! | `reaction_ns` | from a store to IQT in a shared register page until the guest sees the wait's status word |
//! | `pingpong_ns` | round trip of one cache line between two cores: a lower bound for `reaction_ns` |
//!
//! | `translate_hit_vs_5898c32`, `translate_hit_64k_…`, `translate_scattered_64k_…`, `drain_256_…` | this build ÷ the build of commit 5898c32, measured in turns, also with 8,192 other leases in flight |
//!
//! Figures of two threads need two idle cores. On a busy machine they mean little, as their spread
//! shows.
#![forbid(unsafe_code)]

mod guest;
mod measure;
mod paired;
mod threads;

use std::hint;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use guest_mem::{Dma, Gpa, Iova, PAGE_SIZE, Perm, PhysMem, RegPage, RegisterPage, View};
use report::{Host, Measured, Object, host};
use vtd::AccessLen;
use vtd::front::Shared;
use vtd::spec::registers;

use guest::{DISK, Guest, IOVA, PAGES, Quiet, STATUS};
use measure::measure;

/// Measures the emulated VT-d unit on this machine.
#[derive(Parser)]
struct Args {
    /// Where the figures go, as one JSON object.
    #[arg(long, value_name = "FILE", default_value = "target/report/vtd.json")]
    report: PathBuf,
    /// The measuring program of the old build (`scripts/old.sh vtd-case`); without it there are no
    /// ratios.
    #[arg(long, value_name = "PROGRAM")]
    old: Option<PathBuf>,
}

fn translate_hit(pages: u64) -> Result<Measured> {
    let guest = Guest::new()?;
    let mut unit = guest.unit();
    let mut dma = View::new(&mut unit, &guest.ram, DISK);
    Ok(measure(200_000 / pages as u32, |i| {
        // 64 different addresses, so that the branch predictor does not learn a single one.
        let start = IOVA + u64::from(i % 64) * pages * PAGE_SIZE;
        let iova = Iova::new(hint::black_box(start));
        let lease = dma
            .lease(iova, (pages * PAGE_SIZE) as u32, Perm::Write)
            .expect("mapped");
        hint::black_box(lease.hva);
        dma.release(lease.id);
    }))
}

fn translate_miss() -> Result<Measured> {
    let guest = Guest::new()?;
    let mut unit = guest.unit();
    let mut dma = View::new(&mut unit, &guest.ram, DISK);
    // More pages than the IOTLB has entries (4096), in order: every look-up is a miss.
    Ok(measure(PAGES as u32, |i| {
        let iova = Iova::new(hint::black_box(IOVA + u64::from(i) * PAGE_SIZE));
        let lease = dma
            .lease(iova, PAGE_SIZE as u32, Perm::Write)
            .expect("mapped");
        hint::black_box(lease.hva);
        dma.release(lease.id);
    }))
}

fn drain(descriptors: u64) -> Result<Measured> {
    let mut guest = Guest::new()?;
    let mut unit = guest.unit();
    // The guest fills the queue outside the timed part. A single step is too short to be timed, so
    // the queue is long.
    let runs = (0..301_u32)
        .map(|i| {
            guest.invalidate_pages(descriptors - 1);
            let tail = guest.wait(i);
            unit.write(registers::IQT, AccessLen::B4, tail);
            let start = std::time::Instant::now();
            unit.step(&guest.ram, 0, &mut Quiet);
            let time = start.elapsed().as_nanos() as f64;
            assert_eq!(
                unit.read(registers::IQH, AccessLen::B8),
                tail,
                "the queue is empty"
            );
            time
        })
        .collect();
    Ok(measure::of(runs))
}

/// Measures an unmap. The guest's own part is measured separately and subtracted.
fn unmap() -> Result<Measured> {
    const UNMAPS: u32 = 20_000;
    let mut guest = Guest::new()?;
    let mut unit = guest.unit();
    let page = RegisterPage::new().context("register page")?;
    let mut shared = Shared::enter(&mut unit, &page);
    let ram = guest.ram.clone();
    let mut value = 0;
    let mut run = |is_served: bool| {
        let start = std::time::Instant::now();
        for _ in 0..UNMAPS {
            value += 1;
            guest.invalidate_pages(1);
            page.store32(registers::IQT, guest.wait(value) as u32);
            if is_served {
                shared.sweep(&mut unit, &page, &ram, 0, &mut Quiet);
            }
        }
        let time = start.elapsed().as_nanos() as f64 / f64::from(UNMAPS);
        // Also serves the descriptors that are left over.
        shared.sweep(&mut unit, &page, &ram, 0, &mut Quiet);
        assert_eq!(
            ram.read_u64(Gpa::new(STATUS)).ok(),
            Some(u64::from(value)),
            "served to the last"
        );
        time
    };
    run(true);
    let pairs = (0..15).map(|_| {
        let guest_alone = run(false);
        run(true) - guest_alone
    });
    Ok(measure::of(pairs.collect()))
}

fn main() -> Result<()> {
    let args = Args::parse();
    let rows: Vec<(&str, Measured)> = vec![
        ("translate_hit_ns", translate_hit(1)?),
        ("translate_hit_64k_ns", translate_hit(16)?),
        ("translate_miss_ns", translate_miss()?),
        // A queue of 256 holds 255 descriptors at a time.
        ("drain_1_ns", drain(1)?),
        ("drain_16_ns", drain(16)?),
        ("drain_256_ns", drain(255)?),
        ("sidecore_ns_per_unmap", unmap()?),
        ("reaction_ns", threads::reaction()?),
        ("pingpong_ns", host::first_round_trip()?),
    ];
    let host = Host::read();
    let mut report = Object::new(&host, "native, release, no virtual machine");
    println!(
        "the emulated VT-d unit on {}, Linux {}",
        host.model, host.kernel
    );
    print!("{}", report.measured_rows("ns", &rows));
    if let Some(old) = &args.old {
        println!(
            "{:<48}{:>8}{:>8}{:>8}{:>11}{:>11}",
            "beside 5898c32", "median", "min", "max", "new ns", "old ns"
        );
        for pair in paired::run(old)? {
            let paired::Pair {
                key,
                ratio,
                new,
                old,
            } = pair;
            let (low, high) = (ratio.min, ratio.max);
            println!(
                "{key:<48}{:>8.2}{low:>8.2}{high:>8.2}{:>11.1}{:>11.1}",
                ratio.median, new.median, old.median
            );
            report.measured(key, &ratio, 3);
        }
    }
    report
        .write(&args.report)
        .with_context(|| format!("writing {}", args.report.display()))?;
    println!("figures: {}", args.report.display());
    Ok(())
}
