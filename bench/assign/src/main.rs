//! `make bench-assign`, native part: cost of a guest's map and unmap for an assigned device,
//! without a virtual machine and without an IOMMU of the host.
//!
//! A thread acts as the guest's vCPU. It changes entries of a translation table in RAM, then writes
//! a descriptor that invalidates these pages and a wait descriptor, stores IQT to the shared
//! register page, and spins until it sees the wait's status. The time starts with the first
//! descriptor. The unit, its owner, the sidecore, the shadow, its call thread and the container's
//! table are those of the product; the kernel behind them is a stub that answers at once.
//!
//! | key | configuration measured |
//! |---|---|
//! | `{map,unmap}_cycles_{1,32}_poll` | the assigned function, on a sidecore that polls |
//! | `…_sleep` | the same with a sidecore that sleeps before each submission: the store faults, and wakes it |
//! | `…_package` | the sidecore polls on another CPU package than the guest's; null where the machine has one, `package_reason` |
//! | `…_in_place` | the sidecore polls and makes the kernel's calls itself: no hand-over to a thread |
//! | `…_emulated` | the sidecore polls, with an emulated function, which does not follow invalidations |
//! | `…_invalidation` | the unit's part: equal to `…_emulated` |
//! | `…_shadow`, `…_hand_over`, `…_logic` | cost that the shadow adds to that; cost that the thread adds; both |
//! | `{map,unmap}_ratio_{1,32}` | `…_poll` ÷ `…_emulated`, of the same round |
//! | `map_unmap_cycles_{1,32}` | a map and an unmap, `…_poll` |
//!
//! Cycles are those of the time-stamp counter. A round yields the median of its submissions;
//! figures are medians of rounds. In each round all cases are measured one after the other.
//!
//! **Three threads take part in a submission** (guest, sidecore, call thread). With fewer CPUs the
//! guest yields while it waits (`mode` says so), and the hand-over includes a context switch.
//!
//! Not measured: the exit of a trapped register, which needs a guest; the work of the host's kernel
//! in a call (pinning pages, its own IOMMU's tables and invalidation).
#![deny(unsafe_code)]

mod guest;
mod machine;
mod parts;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use report::{Host, Measured, Object, host};
use serde_json::Value;
use sidecore::IdlePolicy;

use guest::PAGES;
use machine::{Behind, Machine};

/// Measures maps and unmaps of an assigned device on this machine.
#[derive(Parser)]
struct Args {
    /// Where the figures go, as one JSON object.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/report/assign-native.json"
    )]
    report: PathBuf,
    /// Rounds, each of all cases.
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Maps, and as many unmaps, of each case in a round; a fifth of that where the sidecore
    /// sleeps.
    #[arg(long, default_value_t = 1000)]
    submissions: u64,
}

/// Longest time until an idle sidecore sleeps.
const PATIENCE: Duration = Duration::from_secs(10);

/// Configuration of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    name: &'static str,
    behind: Behind,
    /// The sidecore sleeps before each submission.
    sleeps: bool,
    cpu: usize,
}

/// Cycles of a map and of an unmap, round by round.
#[derive(Clone, Debug, Default)]
struct Cycles {
    map: Vec<f64>,
    unmap: Vec<f64>,
}

fn middle(mut samples: Vec<u64>) -> f64 {
    report::numbers::percentile(&mut samples, 0.5) as f64
}

/// Measures one round of a case. Returns the median cycles of a map and of an unmap.
fn round(case: &Case, pages: u64, submissions: u64, yields: bool) -> Result<(f64, f64)> {
    let idle = match case.sleeps {
        true => IdlePolicy::Sleep,
        false => IdlePolicy::Poll,
    };
    let (machine, mut guest) = Machine::start(case.behind, case.cpu, idle)?;
    guest.yields = yields;
    let watch = machine.core.watch();
    let wait_until_asleep = || {
        let since = Instant::now();
        while case.sleeps && !watch.is_asleep() {
            ensure!(since.elapsed() < PATIENCE, "the sidecore does not sleep");
            std::thread::yield_now();
        }
        Ok(())
    };
    let warm_up = submissions / 10 + 1;
    let (mut maps, mut unmaps) = (Vec::new(), Vec::new());
    let before = machine.counts()?;
    for at in 0..warm_up + submissions {
        let first = at * 32 % PAGES;
        guest.set(first, pages, true);
        wait_until_asleep()?;
        let map = guest.tell(first, pages);
        guest.set(first, pages, false);
        wait_until_asleep()?;
        let unmap = guest.tell(first, pages);
        if at >= warm_up {
            maps.push(map);
            unmaps.push(unmap);
        }
    }
    let calls = match case.behind {
        Behind::Emulated => 0,
        Behind::Threaded | Behind::InPlace => warm_up + submissions,
    };
    machine.end(before, calls, pages)?;
    Ok((middle(maps), middle(unmaps)))
}

/// Number of the package of a CPU.
fn package(cpu: usize) -> Option<u32> {
    let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id");
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Returns a CPU of another package than `cpu`'s, or the reason why there is none.
fn elsewhere(cpu: usize, cpus: &[usize]) -> Result<usize, String> {
    let Some(here) = package(cpu) else {
        return Err("this kernel does not say which package a CPU belongs to".into());
    };
    let other = cpus
        .iter()
        .find(|other| package(**other).is_some_and(|it| it != here));
    let none = || {
        format!(
            "all {} CPUs that this program may use are of one package",
            cpus.len()
        )
    };
    other.copied().ok_or_else(none)
}

fn measured(runs: impl IntoIterator<Item = f64>) -> Measured {
    Measured::of(runs).expect("there are rounds")
}

fn set(report: &mut Object, key: &str, of: &Measured) {
    report.measured(key, of, 2);
    report.number(&format!("{key}_min"), report::object::round(of.min, 2));
    report.number(&format!("{key}_max"), report::object::round(of.max, 2));
    println!(
        "{key:<36}{:>12.1}{:>12.1}{:>12.1}",
        of.median, of.min, of.max
    );
}

/// Differences of two cases, of the same rounds.
fn difference(of: &[f64], less: &[f64]) -> Measured {
    measured(of.iter().zip(less).map(|(of, less)| of - less))
}

/// Reports one kind of submission, of `pages` pages.
fn set_all(report: &mut Object, call: &str, pages: u64, of: &dyn Fn(&str) -> Option<Vec<f64>>) {
    let key = |part: &str| format!("{call}_cycles_{pages}_{part}");
    for part in ["poll", "sleep", "package", "in_place", "emulated"] {
        match of(part) {
            Some(runs) => set(report, &key(part), &measured(runs)),
            None => report.missing(&key(part)),
        }
    }
    let (Some(poll), Some(in_place), Some(emulated)) = (of("poll"), of("in_place"), of("emulated"))
    else {
        return;
    };
    set(report, &key("invalidation"), &measured(emulated.clone()));
    set(report, &key("shadow"), &difference(&in_place, &emulated));
    set(report, &key("hand_over"), &difference(&poll, &in_place));
    set(report, &key("logic"), &difference(&poll, &emulated));
    let ratio = measured(
        poll.iter()
            .zip(&emulated)
            .map(|(poll, emulated)| poll / emulated),
    );
    set(report, &format!("{call}_ratio_{pages}"), &ratio);
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        args.rounds > 0 && args.submissions > 0,
        "nothing is asked for"
    );
    let cpus = host::cpus().context("the CPUs of this program")?;
    let [here, near, ..] = cpus[..] else {
        anyhow::bail!("a guest and a sidecore need two CPUs, and there is one");
    };
    let yields = cpus.len() < 3;
    let others = match yields {
        true => ", fewer CPUs than threads: the guest yields while it waits",
        false => "",
    };
    let machine = Host::read();
    let mode = format!(
        "native, release, no virtual machine, a kernel that answers at once, {} rounds of {} \
         submissions{others}",
        args.rounds, args.submissions
    );
    let mut report = Object::new(&machine, &mode);
    println!(
        "maps and unmaps of an assigned device on {machine}, Linux {}",
        machine.kernel
    );
    println!("{mode}");
    let polling = |name, behind, cpu| Case {
        name,
        behind,
        sleeps: false,
        cpu,
    };
    let mut cases = vec![
        polling("emulated", Behind::Emulated, near),
        polling("in_place", Behind::InPlace, near),
        polling("poll", Behind::Threaded, near),
        Case {
            sleeps: true,
            ..polling("sleep", Behind::Threaded, near)
        },
    ];
    match elsewhere(here, &cpus) {
        Ok(cpu) => cases.push(polling("package", Behind::Threaded, cpu)),
        Err(reason) => report.value("package_reason", reason),
    }
    host::pin(here).context("pinning the guest")?;
    println!(
        "{:<36}{:>12}{:>12}{:>12}",
        "TSC cycles", "median", "min", "max"
    );
    for pages in [1, 32] {
        let mut cycles = vec![Cycles::default(); cases.len()];
        for _ in 0..args.rounds {
            for (case, cycles) in cases.iter().zip(&mut cycles) {
                let submissions = match case.sleeps {
                    true => args.submissions.div_ceil(5),
                    false => args.submissions,
                };
                let (map, unmap) = round(case, pages, submissions, yields)
                    .with_context(|| format!("{}, {pages} pages", case.name))?;
                cycles.map.push(map);
                cycles.unmap.push(unmap);
            }
        }
        let of = |name: &str, pick: fn(&Cycles) -> &Vec<f64>| {
            let at = cases.iter().position(|case| case.name == name)?;
            Some(pick(&cycles[at]).clone())
        };
        set_all(&mut report, "map", pages, &|name| of(name, |it| &it.map));
        set_all(&mut report, "unmap", pages, &|name| {
            of(name, |it| &it.unmap)
        });
        let maps = of("poll", |it| &it.map).unwrap_or_default();
        let unmaps = of("poll", |it| &it.unmap).unwrap_or_default();
        let both = measured(maps.iter().zip(&unmaps).map(|(map, unmap)| map + unmap));
        set(&mut report, &format!("map_unmap_cycles_{pages}"), &both);
    }
    if report
        .keys()
        .get("package_reason")
        .and_then(Value::as_str)
        .is_some()
    {
        println!("another package: {}", report.text("package_reason"));
    }
    report
        .write(&args.report)
        .with_context(|| format!("writing {}", args.report.display()))?;
    println!("figures: {}", args.report.display());
    Ok(())
}
