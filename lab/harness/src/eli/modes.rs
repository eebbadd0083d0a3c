//! A stock kernel and its NVMe controller, mode by mode: its exits, and whether an interrupt was
//! lost.

use std::time::Duration;

use anyhow::{Result, ensure};
use workload::BLOCK;
use workload::pattern::Checksum;

use super::machine::{CPU, Guest, Machine, Ran, Report, Run, SEED};

/// Mode of the hypervisor, as on its command line: the events that take no exit.
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
    /// The same, and requests: a core polls a block function's ring.
    Elvis,
    /// Those alone.
    Poll,
}

impl Mode {
    /// All modes in which a device is assigned, in the order of the table.
    pub const ALL: [Self; 4] = [Self::Baseline, Self::Delivery, Self::Eli, Self::EliTimer];

    /// Modes in which a core polls.
    pub const POLLING: [Self; 2] = [Self::Poll, Self::Elvis];

    /// Returns its name on the command line.
    pub const fn option(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Delivery => "delivery",
            Self::Eli => "eli",
            Self::EliTimer => "eli+timer",
            Self::Elvis => "elvis",
            Self::Poll => "poll",
        }
    }

    /// Returns its name in keys of figures.
    pub const fn key(self) -> &'static str {
        match self {
            Self::EliTimer => "eli_timer",
            other => other.option(),
        }
    }
}

/// Reads before the window.
pub const WARMUP: u64 = 50;

/// Returns the size of a disk on which `reads` reads do not repeat a block.
pub fn disk_bytes(reads: u64) -> usize {
    (reads + WARMUP) as usize * BLOCK
}

/// Work of a guest.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Reads of 4 KiB, one at a time.
    pub reads: u64,
    /// Computation before each read, µs.
    pub pause_us: u64,
    /// Additional options of the kernel's command line.
    pub kernel: &'static str,
    /// Whether the controller is behind an IOMMU.
    pub iommu: bool,
    /// Number of the guest's processors, each of which makes its part of the reads.
    pub cpus: u32,
}

/// Result of a mode.
#[derive(Clone, Debug)]
pub struct Figures {
    /// The mode.
    pub mode: Mode,
    /// Number of the guest's processors.
    pub cpus: u32,
    /// Reads in the window; each is verified.
    pub reads: u64,
    /// Interrupts lost, or taken twice: those that the guest counted, against the reads that it
    /// made.
    pub lost_or_double: u64,
    /// Exits on account of the device, by kind.
    pub device: Vec<(String, u64)>,
    /// Other exits of the guest.
    pub guest: u64,
    /// Exits of the timer.
    pub timer: u64,
    /// Exits of the watchdog.
    pub watchdog: u64,
    /// All exits.
    pub exits: u64,
    /// Device interrupts caught.
    pub caught: u64,
    /// Exits of assigned vectors in direct mode.
    pub direct_exits: u64,
    /// Timer interrupts that the host saw.
    pub ticks: u64,
    /// Part of the window's time that the guest had, of each processor's time: the emulator's, and
    /// therefore no measure of a real machine's.
    pub in_guest: f64,
    /// Length of the window, ms of the emulated machine.
    pub ms: u64,
}

impl Figures {
    /// Returns the exits of the device and of the guest, without those of ticks, per 1,000
    /// interrupts.
    pub fn exits_per_1000(&self) -> f64 {
        let device: u64 = self.device.iter().map(|(_, count)| count).sum();
        // The marker that ends the window belongs to the measurement.
        (device + self.guest).saturating_sub(1) as f64 * 1000.0 / self.reads as f64
    }

    /// Returns the exits of the device alone, per 1,000 interrupts.
    pub fn device_exits_per_1000(&self) -> f64 {
        let device: u64 = self.device.iter().map(|(_, count)| count).sum();
        device as f64 * 1000.0 / self.reads as f64
    }

    /// Returns the ticks per 1,000 reads.
    pub fn ticks_per_1000(&self) -> f64 {
        self.ticks as f64 * 1000.0 / self.reads as f64
    }

    /// Returns the exits of this kind on account of the device.
    pub fn device_exits(&self, kind: &str) -> u64 {
        self.device
            .iter()
            .filter(|(name, _)| name == kind)
            .map(|(_, count)| count)
            .sum()
    }
}

/// Measures reads in `mode`.
pub fn reads(machine: &Machine, mode: Mode, work: &Work) -> Result<Figures> {
    let Work {
        reads,
        pause_us,
        kernel,
        iommu,
        cpus,
    } = *work;
    let each = reads / u64::from(cpus);
    let read = |cpu: u32| {
        let bits = 1 << cpu;
        format!(
            "taskset {bits} workload reads /dev/nvme0n1 --count {each} --warmup {WARMUP} \
             --in-place --pause-us {pause_us} && "
        )
    };
    let read: String = (0..cpus).map(read).collect();
    let count = "grep nvme0q[1-9] /proc/interrupts";
    let script = format!("{count}; {read}{count}");
    let boot = Boot {
        kernel,
        iommu,
        cpus,
        one_message: false,
    };
    let ran = run(machine, mode, &boot, &script, reads)?;
    let windows = ran.reports().filter(|report| report.is("window"));
    let window = Report::sum(windows);
    ensure!(
        !iommu || window.count("dma_faults") + window.count("irq_blocked") == 0,
        "the IOMMU has blocked what an honest guest did\n{}",
        ran.tail()
    );
    let foreign = ran.report("end")?.count("core1_foreign");
    ensure!(
        cpus == 1 || foreign == 0,
        "{foreign} interrupts at the core that watches\n{}",
        ran.tail()
    );
    verify(&ran, each, cpus)?;
    let counts = interrupts(&ran, cpus)?;
    // Each processor's reads take interrupts of its own.
    let lost_or_double = counts
        .iter()
        .map(|count| count.abs_diff(each + WARMUP))
        .sum();
    let reads = each * u64::from(cpus);
    Ok(figures((mode, cpus), reads, lost_or_double, &window))
}

fn figures((mode, cpus): (Mode, u32), reads: u64, lost_or_double: u64, window: &Report) -> Figures {
    Figures {
        mode,
        cpus,
        reads,
        lost_or_double,
        device: window.exits_of("device"),
        guest: window.sum_of("guest"),
        timer: window.sum_of("timer"),
        watchdog: window.sum_of("watchdog"),
        exits: window.count("exits"),
        caught: window.count("device_caught"),
        direct_exits: window.count("device_exits_direct"),
        ticks: window.count("timer_caught"),
        in_guest: window.count("guest_cycles") as f64
            / (window.count("cycles") * u64::from(cpus)).max(1) as f64,
        ms: window.count("ms"),
    }
}

/// Machine on which Linux is booted.
pub struct Boot<'a> {
    /// Additional options of the kernel's command line.
    pub kernel: &'a str,
    /// Whether the controller is behind an IOMMU.
    pub iommu: bool,
    /// Number of the guest's processors. With more than one the machine has another, which watches.
    pub cpus: u32,
    /// Whether the controller has one interrupt message, which the guest may move.
    pub one_message: bool,
}

/// Boots Linux for a script, which must succeed.
pub fn run(machine: &Machine, mode: Mode, boot: &Boot<'_>, script: &str, work: u64) -> Result<Ran> {
    let Boot {
        kernel,
        iommu,
        cpus,
        one_message,
    } = *boot;
    let way = if iommu { "required" } else { "auto" };
    let polls = Mode::POLLING.contains(&mode);
    let ran = machine.run(&Run {
        options: format!("mode={} cpus={cpus} trace=100 iommu={way}", mode.option()),
        guest: Guest::Linux(kernel, script),
        cpu: CPU,
        nvme: !polls,
        one_message,
        ram_disk: polls,
        iommu,
        // One more, which watches or polls.
        cpus: if cpus == 1 && !polls { 1 } else { cpus + 1 },
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

/// Checks that the data read is the disk's content, and was read `times` times.
pub fn verify(ran: &Ran, reads: u64, times: u32) -> Result<()> {
    let mut content = vec![0; reads as usize * BLOCK];
    workload::pattern::fill(SEED, WARMUP * BLOCK as u64, &mut content);
    let expected = format!("fnv={:016x}", Checksum::of(&content));
    let said: Vec<&str> = ran
        .console
        .lines()
        .filter_map(|line| line.find("reads ok").map(|at| &line[at..]))
        .collect();
    ensure!(
        said.len() == times as usize && said.iter().all(|line| line.contains(&expected)),
        "{said:?}, which is not {times} times the disk's {expected}\n{}",
        ran.tail()
    );
    Ok(())
}

/// Returns the device's interrupts that each of the guest's processors counted
/// (`/proc/interrupts`), between two readings by the script.
pub fn interrupts(ran: &Ran, cpus: u32) -> Result<Vec<u64>> {
    let lines = ran
        .console
        .lines()
        .filter(|line| line.contains("nvme0q") && line.contains(':'));
    let counts = |line: &str| -> Vec<u64> {
        let words = line.split(':').nth(1).unwrap_or("").split_whitespace();
        words
            .take(cpus as usize)
            .filter_map(|word| word.parse().ok())
            .collect()
    };
    let rows: Vec<Vec<u64>> = lines.map(counts).collect();
    ensure!(
        !rows.is_empty()
            && rows.len().is_multiple_of(2)
            && rows.iter().all(|row| row.len() == cpus as usize),
        "two counts of interrupts were expected: {rows:?}\n{}",
        ran.tail()
    );
    let (before, after) = rows.split_at(rows.len() / 2);
    let sum = |rows: &[Vec<u64>], cpu: usize| -> u64 { rows.iter().map(|row| row[cpu]).sum() };
    let cpus = 0..cpus as usize;
    Ok(cpus
        .map(|cpu| sum(after, cpu).wrapping_sub(sum(before, cpu)))
        .collect())
}
