//! A stock kernel and its NVMe controller, mode by mode: what exits, and whether anything was lost.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use workload::BLOCK;
use workload::pattern::Checksum;

use super::machine::{CPU, Guest, Machine, Ran, Report, Run, SEED};

/// What goes without an exit, as the hypervisor's command line has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Mode {
    /// Nothing.
    Baseline,
    /// Delivery.
    Delivery,
    /// Delivery and completion.
    Eli,
    /// And the local APIC's timer.
    #[value(name = "eli+timer")]
    EliTimer,
}

impl Mode {
    /// All, in the order of the table.
    pub const ALL: [Self; 4] = [Self::Baseline, Self::Delivery, Self::Eli, Self::EliTimer];

    /// On the command line.
    pub const fn option(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Delivery => "delivery",
            Self::Eli => "eli",
            Self::EliTimer => "eli+timer",
        }
    }

    /// In keys of figures.
    pub const fn key(self) -> &'static str {
        match self {
            Self::EliTimer => "eli_timer",
            other => other.option(),
        }
    }
}

/// Reads before the window.
const WARMUP: u64 = 50;

/// Bytes of a disk on which `reads` reads are not made twice.
pub fn disk_bytes(reads: u64) -> usize {
    (reads + WARMUP) as usize * BLOCK
}

/// What a guest is asked to do.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Reads of 4 KiB, one at a time.
    pub reads: u64,
    /// Computed before each, µs.
    pub pause_us: u64,
    /// More of the kernel's command line.
    pub kernel: &'static str,
    /// The controller is behind an IOMMU.
    pub iommu: bool,
}

/// What a mode came to.
#[derive(Clone, Debug)]
pub struct Figures {
    /// The mode.
    pub mode: Mode,
    /// Reads in the window; each is verified.
    pub reads: u64,
    /// Interrupts that the guest counted, for the reads it made.
    pub interrupts: u64,
    /// Those reads.
    pub asked: u64,
    /// Exits on account of the device, by kind.
    pub device: Vec<(String, u64)>,
    /// Of the guest otherwise, of the timer, of the watchdog.
    pub guest: u64,
    /// See `guest`.
    pub timer: u64,
    /// See `guest`.
    pub watchdog: u64,
    /// All.
    pub exits: u64,
    /// Device interrupts caught.
    pub caught: u64,
    /// Exits of assigned vectors in direct mode.
    pub direct_exits: u64,
    /// Timer interrupts that the host saw.
    pub ticks: u64,
    /// Of the window's time that part which the guest had: the emulator's, and so no measure of a machine's.
    pub in_guest: f64,
    /// The window, ms of the emulated machine.
    pub ms: u64,
}

impl Figures {
    /// Exits of the device and of the guest, without those of ticks, per 1,000 interrupts.
    pub fn exits_per_1000(&self) -> f64 {
        let device: u64 = self.device.iter().map(|(_, count)| count).sum();
        // The marker that ends the window is the measurement's own.
        (device + self.guest).saturating_sub(1) as f64 * 1000.0 / self.reads as f64
    }

    /// Ticks per 1,000 reads.
    pub fn ticks_per_1000(&self) -> f64 {
        self.ticks as f64 * 1000.0 / self.reads as f64
    }

    /// Exits of this kind on account of the device.
    pub fn device_exits(&self, kind: &str) -> u64 {
        self.device
            .iter()
            .filter(|(name, _)| name == kind)
            .map(|(_, count)| count)
            .sum()
    }

    /// Interrupts lost, or taken twice.
    pub const fn lost_or_double(&self) -> u64 {
        self.interrupts.abs_diff(self.asked)
    }
}

/// Reads in `mode`.
pub fn reads(machine: &Machine, mode: Mode, work: &Work) -> Result<Figures> {
    let Work {
        reads,
        pause_us,
        kernel,
        iommu,
    } = *work;
    let script = format!(
        "grep nvme0q1 /proc/interrupts; workload reads /dev/nvme0n1 --count {reads} --warmup {WARMUP} --in-place \
         --pause-us {pause_us} && grep nvme0q1 /proc/interrupts"
    );
    let ran = run(machine, mode, (kernel, iommu), &script, reads)?;
    let window = ran.report("window")?;
    ensure!(
        !iommu || window.count("dma_faults") + window.count("irq_blocked") == 0,
        "the IOMMU has blocked what an honest guest did\n{}",
        ran.tail()
    );
    ensure!(line(&ran, "reads ok").is_some(), "no reads\n{}", ran.tail());
    verify(&ran, reads)?;
    let counts = interrupts(&ran);
    let [before, after] = counts[..] else {
        anyhow::bail!(
            "two counts of interrupts were expected: {counts:?}\n{}",
            ran.tail()
        );
    };
    Ok(figures(
        mode,
        reads,
        after - before,
        reads + WARMUP,
        &window,
    ))
}

fn figures(mode: Mode, reads: u64, interrupts: u64, asked: u64, window: &Report) -> Figures {
    Figures {
        mode,
        reads,
        interrupts,
        asked,
        device: window.exits_of("device"),
        guest: window.sum_of("guest"),
        timer: window.sum_of("timer"),
        watchdog: window.sum_of("watchdog"),
        exits: window.count("exits"),
        caught: window.count("device_caught"),
        direct_exits: window.count("device_exits_direct"),
        ticks: window.count("timer_caught"),
        in_guest: window.count("guest_cycles") as f64 / window.count("cycles").max(1) as f64,
        ms: window.count("ms"),
    }
}

/// Boots Linux for a script; it must end well.
pub fn run(
    machine: &Machine,
    mode: Mode,
    (kernel, iommu): (&str, bool),
    script: &str,
    work: u64,
) -> Result<Ran> {
    let way = if iommu { "required" } else { "auto" };
    let ran = machine.run(&Run {
        options: format!("mode={} trace=100 iommu={way}", mode.option()),
        guest: Guest::Linux(kernel, script),
        cpu: CPU,
        nvme: true,
        iommu,
        cpus: 1,
        limit: Duration::from_secs(90 + work / 200),
    })?;
    let status = lab::guest_image::run_status(&ran.console);
    ensure!(
        ran.ended && status == Some(0),
        "the guest ended with {status:?}, its machine {}\n{}",
        if ran.ended {
            "by itself"
        } else {
            "not in time"
        },
        ran.tail()
    );
    Ok(ran)
}

fn line<'a>(ran: &'a Ran, start: &str) -> Option<&'a str> {
    ran.console
        .lines()
        .find_map(|line| line.find(start).map(|at| &line[at..]))
}

/// What was read is what is on the disk.
fn verify(ran: &Ran, reads: u64) -> Result<()> {
    let mut content = vec![0; reads as usize * BLOCK];
    workload::pattern::fill(SEED, WARMUP * BLOCK as u64, &mut content);
    let expected = format!("fnv={:016x}", Checksum::of(&content));
    let said = line(ran, "reads ok").context("no reads")?;
    ensure!(
        said.contains(&expected),
        "{said}, which is not the disk's {expected}"
    );
    Ok(())
}

/// Counts of `/proc/interrupts`, as often as the script asked.
fn interrupts(ran: &Ran) -> Vec<u64> {
    let lines = ran
        .console
        .lines()
        .filter(|line| line.contains("nvme0q1") && line.contains(':'));
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
