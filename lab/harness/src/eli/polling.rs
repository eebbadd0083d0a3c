//! A stock kernel and the block function, whose ring a core of the host polls: exits of a request
//! and of its completion.

use anyhow::{Result, ensure};
use workload::BLOCK;
use workload::pattern::Checksum;

use super::figures::{Figures, round};
use super::machine::{Machine, RAM_DISK_BYTES, Ran, SEED};
use super::modes::{self, Boot, Mode, WARMUP};

/// Figures of a mode.
struct Found {
    /// Reads in the window; each is verified.
    reads: u64,
    /// Exits on account of the block function's interrupts.
    exits: u64,
    /// Those of them before the guest's handler: all but the end of interrupt.
    before_handler: u64,
    /// Exits in direct mode.
    direct_exits: u64,
    /// Interrupts that the guest counted, and its reads.
    interrupts: u64,
    asked: u64,
    /// Timer interrupts that the host took.
    ticks: u64,
    /// Counts of the I/O core in the whole run: requests, interrupts, rings that stopped.
    served: u64,
    sent: u64,
    broken: u64,
}

/// Compares both modes with their bars.
pub fn compare(machine: &Machine, reads: u64, figures: &mut Figures) {
    figures.say(&format!(
        "\nblock function in memory, polled by a core: {reads} verified reads, Linux {}, exits per \
         1,000",
        machine.kernel()
    ));
    for mode in Mode::POLLING {
        eprintln!(
            "eli: {reads} reads of the block function, {}",
            mode.option()
        );
        let what = format!(
            "{reads} verified reads of the block function in mode {}",
            mode.option()
        );
        if let Some(found) = figures.claim_ok(&what, run(machine, mode, reads)) {
            tell(mode, &found, figures);
        }
    }
}

fn tell(mode: Mode, found: &Found, figures: &mut Figures) {
    let (key, option) = (mode.key(), mode.option());
    let exits = found.exits as f64 * 1000.0 / found.reads as f64;
    let before = found.before_handler as f64 / found.reads as f64;
    let ticks = found.ticks as f64 * 1000.0 / found.reads as f64;
    figures.say(&format!(
        "  {option:<12}{exits:>10.2} for completions, {before:.3} of each before its handler; \
         apart from these {ticks:.1} ticks"
    ));
    figures.set(&format!("exits_per_1000_pv_{key}"), round(exits));
    figures.set(
        &format!("exits_completion_to_handler_{key}"),
        (before * 1000.0).round() / 1000.0,
    );
    figures.set(&format!("reads_verified_pv_{key}"), found.reads as f64);
    let lost = found.interrupts.abs_diff(found.asked);
    figures.set(&format!("interrupts_lost_or_double_pv_{key}"), lost as f64);
    let (served, sent) = (found.served, found.sent);
    figures.claim(
        &format!("mode {option}: {lost} interrupts lost or double, 0"),
        lost == 0,
    );
    figures.claim(
        &format!(
            "mode {option}: {} exits in direct mode, 0",
            found.direct_exits
        ),
        found.direct_exits == 0,
    );
    figures.claim(&format!("mode {option}: no ring broke"), found.broken == 0);
    figures.claim(
        &format!(
            "mode {option}: the I/O core served {served} requests, {} of them reads, and sent \
             {sent} interrupts",
            found.asked
        ),
        served >= found.asked && sent >= found.asked,
    );
    match mode {
        Mode::Elvis => {
            figures.claim(
                &format!("mode {option}: {exits:.2} exits per 1,000, at most 50"),
                exits <= 50.0,
            );
        }
        _ => figures.claim(
            &format!("mode {option}: {exits:.2} exits per 1,000, at least 900"),
            exits >= 900.0,
        ),
    }
}

fn run(machine: &Machine, mode: Mode, reads: u64) -> Result<Found> {
    const NAME: &str = "virtio0-req.0";
    let script = format!(
        "grep {NAME} /proc/interrupts; workload reads /dev/vda --count {reads} --warmup {WARMUP} \
         --in-place \
         && grep {NAME} /proc/interrupts"
    );
    let ran = {
        let boot = Boot {
            kernel: "",
            iommu: false,
            cpus: 1,
            one_message: false,
        };
        modes::run(machine, mode, &boot, &script, reads)?
    };
    verify(&ran, reads)?;
    let counts = interrupts(&ran, NAME);
    let [before, after] = counts[..] else {
        anyhow::bail!(
            "two counts of interrupts were expected: {counts:?}\n{}",
            ran.tail()
        );
    };
    let window = ran.report("window")?;
    let exits = window.sum_of("pv");
    Ok(Found {
        reads,
        exits,
        before_handler: exits - window.count("eoi_pv"),
        direct_exits: window.count("device_exits_direct"),
        interrupts: after - before,
        asked: reads + WARMUP,
        ticks: window.count("timer_caught"),
        served: window.count("total_pv_served"),
        sent: window.count("total_pv_sent"),
        broken: window.count("total_pv_broken"),
    })
}

/// Compares the data read with the disk's content, which is read repeatedly.
fn verify(ran: &Ran, reads: u64) -> Result<()> {
    let mut disk = vec![0; RAM_DISK_BYTES];
    workload::pattern::fill(SEED, 0, &mut disk);
    let mut sum = Checksum::default();
    let blocks = disk.chunks(BLOCK).cycle().skip(WARMUP as usize);
    blocks.take(reads as usize).for_each(|block| sum.add(block));
    let expected = format!("fnv={:016x}", sum.value());
    let said = ran
        .console
        .lines()
        .find_map(|line| line.find("reads ok").map(|at| &line[at..]))
        .unwrap_or("no reads");
    ensure!(
        said.contains(&expected),
        "{said}, which is not the disk's {expected}\n{}",
        ran.tail()
    );
    Ok(())
}

/// Returns the counts of `/proc/interrupts`, for each reading by the script.
fn interrupts(ran: &Ran, name: &str) -> Vec<u64> {
    let lines = ran
        .console
        .lines()
        .filter(|line| line.contains(name) && line.contains(':'));
    lines
        .filter_map(|line| {
            line.split(':')
                .nth(1)?
                .split_whitespace()
                .next()?
                .parse()
                .ok()
        })
        .collect()
}
