//! `make bench-worker`: cost of a disk whose device model is a process of its own, on this machine,
//! without any virtual machine.
//!
//! One thread is the guest's driver and the device's owner: it makes requests and polls the device.
//! In a virtual machine those are two threads. The disk is one of four, and each round measures a
//! window of each, one after the other, in an order that changes:
//!
//! | case | the device model |
//! |---|---|
//! | `direct` | in this process; data go between back end and guest memory in place, under leases |
//! | `bounce` | in this process; data are copied through private buffers (`--dma bounce`) |
//! | `worker` | in a process of its own, confined as a guest's, which polls while there are requests |
//! | `asleep` | the same, but it sleeps after each empty poll |
//!
//! `null` is a back end that does nothing, `tmpfs` a memory file of 64 MiB; reads and writes of 4
//! and 64 KiB, 1 and 32 at a time, at random.
//!
//! | key | figure |
//! |---|---|
//! | `iops_ratio_{4k,64k}_{d1,d32}` | `worker` ÷ `bounce`, of the same round: reads, `null` |
//! | `iops_ratio_…_{null_write,tmpfs_read,tmpfs_write}` | the same of the other loads |
//! | `iops_ratio_undisturbed_…`, `…_rounds` | the same of rounds in which each thread had a CPU for 90 % of both windows; their number |
//! | `iops_ratio_asleep_…` | `asleep` ÷ `bounce` |
//! | `iops_CASE_SIZE_DEPTH_LOAD` | requests a second |
//! | `cpu_ns_{owner,worker}_CASE_…` | processor time of either process for a request |
//! | `wakeups_per_1000_CASE_…`, `kicks_per_1000_CASE_…` | sleeps of the worker's threads; writes of its eventfd |
//! | `copies_per_request_CASE` | copies of a request's data by the owner: the most of any load |
//! | `copies_per_request`, `wakeups_per_1000` | of `worker`; 4 KiB reads from `null`, 32 at a time |
//! | `pingpong_ns_SIZE_DEPTH_LOAD` | a cache line from the owner's CPU to the workers' and back, just before: what no request can beat one by one, and what a host of virtual CPUs changes when it moves them; null on one CPU |
//! | `syscalls_allowed` | system calls that the worker may make |
//!
//! Figures are medians of rounds, `KEY_spread` the distance of the extremes. The owner has a CPU of
//! its own and the workers have one, if this program may use two; a guest's vCPU would need a
//! third. `free_cpus` is the number that were idle before, at most three. Windows are no longer
//! than a turn of the scheduler, so that on a busy machine some have their CPUs to themselves.
//!
//! Beside `null`, `tmpfs` flatters the worker: its back end does not queue a call that need not
//! wait, while `bounce` queues every one, by io_uring where the host has it (`tmpfs_bounce_by`).
//!
//! *Left out*: the back end's own copies (of `tmpfs` one, by the kernel, in each case; the worker
//! makes none besides, since its back end reads into the slot), and figures that need a guest:
//! their keys are null, with the reason in `guest_reason`.
#![forbid(unsafe_code)]

mod cases;
mod counted;
mod figures;
mod guest;
mod null;
mod process;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use disk_worker::Options;
use report::{Host, Object, host};
use vio::blk::{BlkConfig, BlockIo, RawDisk, RawDiskOptions, Transfer};

use cases::{BackEnd, CASES, Guests};
use figures::{Cell, Samples};
use guest::{DEEPEST, LONGEST, Load, Subject};
use null::Null;

/// Measures a disk whose device model is a process of its own, on this machine.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Where the figures go, as one JSON object.
    #[arg(long, value_name = "FILE", default_value = "target/report/worker.json")]
    report: PathBuf,
    /// Rounds, each of a window of every case.
    #[arg(long, default_value_t = 101)]
    rounds: usize,
    /// Length of a window in milliseconds.
    #[arg(long, default_value_t = 3)]
    window_ms: u64,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Be the worker of a disk that is measured.
    #[command(hide = true)]
    DeviceWorker(WorkerArgs),
}

/// Arguments of the worker: those of `disk_worker::start`, as far as a measured disk has them, and
/// ours.
#[derive(clap::Args)]
struct WorkerArgs {
    #[arg(long)]
    owner: u32,
    #[arg(long)]
    block: u32,
    #[arg(long)]
    id: String,
    /// Empty polls before it sleeps.
    #[arg(long)]
    looks: u32,
    /// Requests do nothing.
    #[arg(long)]
    null: bool,
}

/// Is the worker.
fn worker(args: &WorkerArgs) -> Result<()> {
    let config = BlkConfig::default();
    ensure!(args.id.is_empty(), "a measured disk has no number");
    let options = Options {
        owner: args.owner,
        read_only: false,
        direct: false,
        block: args.block,
        serial: config.serial,
        is_unconfined: false,
        looks: args.looks,
    };
    let wrap = |disk: Box<dyn BlockIo>| -> Box<dyn BlockIo> {
        match args.null {
            true => Box::new(Null::new(disk.capacity(), Transfer::Direct)),
            false => disk,
        }
    };
    let Err(error) = disk_worker::serve(&options, wrap);
    Err(error.into())
}

/// CPUs of the owner and of the workers, if there are two.
fn two_cpus() -> Result<Option<(usize, usize)>> {
    Ok(
        match host::cpus().context("the CPUs of this program")?[..] {
            [owner, workers, ..] => Some((owner, workers)),
            _ => None,
        },
    )
}

/// The loads of each back end.
fn loads() -> impl Iterator<Item = Load> {
    let sizes = [false, true].map(|is_write| [4096, LONGEST].map(|len| (is_write, len)));
    sizes.into_iter().flatten().flat_map(|(is_write, len)| {
        [1, DEEPEST].map(|depth| Load {
            len,
            depth,
            is_write,
        })
    })
}

/// Measures `load` in windows of length `time`.
fn measure(
    subjects: &mut [Box<dyn Subject>],
    load: Load,
    rounds: usize,
    time: Duration,
) -> Result<Samples> {
    let mut samples = vec![Vec::new(); CASES.len()];
    for round in 0..rounds {
        for turn in 0..CASES.len() {
            let at = (round + turn) % CASES.len();
            let sample = subjects[at].window(load, time);
            samples[at].push(sample.with_context(|| format!("{}, {load:?}", CASES[at].name()))?);
        }
    }
    Ok(Samples(samples))
}

/// Number of CPUs that this program may use and that are idle; three are enough to know.
fn free_cpus() -> Result<usize> {
    let mut free = 0;
    for cpu in host::cpus().context("the CPUs of this program")? {
        if host::idle(&[cpu], Duration::from_millis(200)) > 0.9 {
            free += 1;
        }
        if free == 3 {
            break;
        }
    }
    Ok(free)
}

/// Runs of which the round trip of a cache line is the median.
const TRIP_RUNS: usize = 201;

/// Keys of figures of whole guests.
const OF_GUESTS: [&str; 6] = [
    "attack_pages_in_process",
    "attack_bytes_in_process",
    "attack_pages_worker",
    "attack_bytes_worker",
    "after_unmap_blocked_of_1000",
    "kills_clean_of_100",
];
const GUEST_REASON: &str =
    "attacks, unmaps and kills are tests of whole guests and of exitless, not measured here";

/// Starts the report: the machine, and which CPUs there were.
fn begin(args: &Args, cpus: Option<(usize, usize)>) -> Result<Object> {
    let free = free_cpus()?;
    let machine = Host::read();
    let place = match cpus {
        Some((owner, workers)) => format!("owner on CPU {owner}, workers on CPU {workers}"),
        None => "owner and workers on one CPU: figures of its scheduler".to_owned(),
    };
    let mode = format!(
        "native, release, no virtual machine, {} rounds of {} ms, {place}",
        args.rounds, args.window_ms
    );
    let mut report = Object::new(&machine, &mode);
    report.value("cpus", machine.cpus);
    report.value("free_cpus", free);
    println!(
        "a disk whose device model is a process, on {machine}, Linux {}",
        machine.kernel
    );
    println!("{mode}");
    if free < 3 {
        let reason = format!(
            "three free CPUs were not there: of {} were {free} idle before; owner and workers \
             share them with \
             all else that runs here (load {:.1})",
            machine.cpus, machine.load_average
        );
        println!("{reason}");
        report.value("free_cpus_reason", reason);
    }
    Ok(report)
}

/// Measures all loads of `guests`; `cpus`: of the owner and of the workers, if there are two;
/// `copies`: the most of any load so far, by case.
fn measure_all(
    report: &mut Object,
    guests: &mut Guests,
    args: &Args,
    cpus: Option<(usize, usize)>,
    copies: &mut [f64; CASES.len()],
) -> Result<()> {
    let time = Duration::from_millis(args.window_ms);
    let Guests {
        back_end, subjects, ..
    } = guests;
    for load in loads() {
        for (subject, copies) in subjects.iter_mut().zip(&mut *copies) {
            *copies = copies.max(subject.copies(load)?);
        }
        let trip = cpus.map(|(owner, workers)| host::round_trip_of(owner, workers, TRIP_RUNS));
        let trip = trip.transpose().context("a cache line's round trip")?;
        let samples = measure(subjects, load, args.rounds, time)?;
        let cell = Cell {
            load,
            back_end: *back_end,
        };
        println!("{}", figures::set(report, &cell, &samples, trip)?);
    }
    if *back_end == BackEnd::Tmpfs {
        for (subject, case) in subjects.iter_mut().zip(CASES) {
            subject.verify().with_context(|| case.name())?;
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(Command::DeviceWorker(args)) = args.command {
        return worker(&args);
    }
    ensure!(
        args.rounds > 0 && args.window_ms > 0,
        "nothing is asked for"
    );
    let cpus = two_cpus()?;
    let mut report = begin(&args, cpus)?;
    let image = cases::image().context("a memory file")?;
    let disk = RawDisk::from_file(image.try_clone()?, RawDiskOptions::default())?;
    let calls = match disk.uring_refusal() {
        None => "io_uring".to_owned(),
        Some(why) => format!("threads: {why}"),
    };
    drop(disk);
    println!("bounce over tmpfs by {calls}; direct and the worker by calls that do not wait");
    report.value("tmpfs_bounce_by", calls);
    // All of them before this thread is pinned: processes and threads begin on its CPU.
    let of_workers = cpus.map(|(_, workers)| workers);
    let mut null = Guests::start(BackEnd::Null, &image, of_workers)?;
    let mut tmpfs = Guests::start(BackEnd::Tmpfs, &image, of_workers)?;
    report.value("syscalls_allowed", tmpfs.confined.calls);
    if let Some((owner, _)) = cpus {
        host::pin(owner).context("pinning the owner")?;
    }
    println!("{}", figures::heading());
    let mut copies = [0.0; CASES.len()];
    for guests in [&mut null, &mut tmpfs] {
        measure_all(&mut report, guests, &args, cpus, &mut copies)?;
    }
    println!("copies of a request's data by the owner, the most of any load:");
    for (case, copies) in CASES.iter().zip(copies) {
        let key = format!("copies_per_request_{}", case.name());
        report.number(&key, report::round(copies, 2));
        println!("  {:<8}{copies:.2}", case.name());
    }
    for (key, of) in [
        ("copies_per_request", "copies_per_request_worker"),
        (
            "wakeups_per_1000",
            "wakeups_per_1000_worker_4k_d32_null_read",
        ),
    ] {
        let value = report.get(of).context("it was set")?;
        report.number(key, value);
    }
    for key in OF_GUESTS {
        report.missing(key);
    }
    report.value("guest_reason", GUEST_REASON);
    report
        .write(&args.report)
        .with_context(|| format!("writing {}", args.report.display()))?;
    println!("figures: {}", args.report.display());
    Ok(())
}
