//! What the demo runs, one function for each thing it shows.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::figures::{Figures, PerRead, round};
use super::{DemoArgs, say};
use crate::system::guest::{Guest, Mode, Outcome, RunningGuest};
use crate::system::host::Host;
use crate::system::workloads::{self, DISK_BYTES, Rogue};

/// The measured disk answers no sooner than a disk, and later than a timer tick of the guest: so each answer finds
/// it halted, in every mode. A file in memory answers while the guest is on its way there, or both its tick and
/// the answer wake it, and then a race decides what an interrupt costs. The disk spreads its answers over one tick of 4 ms, so
/// that those which still meet one are as many in each mode.
pub const LATENCY_MS: u32 = 6;
/// Reads before each window.
const WARMUP: u32 = 100;
const SEED_HOST: u64 = 11;
const SEED_GUEST: u64 = 12;
/// Length of the window in which a guest does nothing.
const IDLE_SECONDS: u32 = 6;

/// The disk that is read; all guests may use it at once.
const READS: &str = "reads.img";

/// A guest that reads `windows` times, between markers.
fn reader(host: &Host, mode: Mode, args: &DemoArgs, windows: u32) -> Guest {
    let reads = args.reads;
    let script =
        format!("workload reads /dev/vda --count {reads} --warmup {WARMUP} --windows {windows}");
    let mut guest = Guest::new(mode, script);
    guest.pin = host.quiet_pin().map(str::to_owned);
    let (path, latency) = (host.path(READS), LATENCY_MS * 1000);
    guest
        .disks
        .push(format!("path={path},latency={latency},readonly=on"));
    guest
}

/// The first `count` windows of a reader.
fn windows_of(outcome: &Outcome, count: u32, reads: u32) -> Result<Vec<PerRead>> {
    let windows = outcome.windows();
    ensure!(
        windows.len() >= count as usize,
        "the guest marked {} windows, not {count}",
        windows.len()
    );
    let of_window = |window: &Value| {
        ensure!(
            window["histograms"].as_bool() == Some(true),
            "no exit histograms: tracefs is not available to `exitless run` on this host"
        );
        Ok(PerRead::of(window, reads))
    };
    windows[..count as usize].iter().map(of_window).collect()
}

/// The measured reads. Four guests, one for each mode, take turns: while one reads its window the others are
/// stopped. So whatever drifts on the host meets all modes alike.
pub fn windows(host: &Host, args: &DemoArgs, figures: &mut Figures) -> Result<()> {
    let rounds = args.rounds;
    host.put(READS, &workloads::pattern(SEED_HOST))?;
    let mut guests: Vec<(Mode, RunningGuest<'_>)> = Vec::new();
    for round in 1..=rounds {
        for (turn, mode) in Mode::ALL.into_iter().enumerate() {
            say(&format!(
                "round {round} of {rounds}: {} direct reads, {}",
                args.reads,
                mode.name()
            ));
            if round == 1 {
                let mut guest = reader(host, mode, args, rounds);
                guest.limit *= 1 + rounds;
                guests.push((mode, guest.spawn(host)?));
            } else {
                guests[turn].1.resume()?;
            }
            let guest = &mut guests[turn].1;
            // The reads that begin before it stops are part of the next window's warm-up.
            guest.wait_for(&format!("reads window={round} of={rounds}"))?;
            guest.pause()?;
        }
    }
    for (mode, guest) in guests {
        guest.resume()?;
        let outcome = guest.wait()?;
        outcome.check()?;
        for window in windows_of(&outcome, rounds, args.reads)? {
            figures.add_window(mode, window);
        }
    }
    figures.summarize();
    Ok(())
}

/// The same reads with a sidecore that sleeps, one window for each mode. The last guest, `shared`, then does nothing
/// for a while, and after that shows everything else.
pub fn adaptive(host: &Host, args: &DemoArgs, figures: &mut Figures) -> Result<()> {
    host.put(READS, &workloads::pattern(SEED_HOST))?;
    for mode in Mode::ALL {
        say(&format!(
            "--idle adaptive: {} direct reads, {}",
            args.reads,
            mode.name()
        ));
        let mut guest = reader(host, mode, args, 1);
        guest.idle = "adaptive";
        if mode == Mode::Shared {
            say("and then: an idle guest, data both ways, ping, two disks that attack");
            guest.script.push_str(&format!(
                " && sleep 1 && workload idle --seconds {IDLE_SECONDS}"
            ));
            add_function(&mut guest, host)?;
        }
        let outcome = guest.try_run(host)?;
        for window in windows_of(&outcome, 1, args.reads)
            .with_context(|| format!("in mode {}\n{}", mode.name(), outcome.tail()))?
        {
            figures.set_adaptive(mode, window);
        }
        if mode == Mode::Shared {
            idle(&outcome, figures)?;
            check_function(&outcome, host, figures)?;
        } else {
            outcome.check()?;
        }
    }
    Ok(())
}

fn idle(outcome: &Outcome, figures: &mut Figures) -> Result<()> {
    let window = outcome
        .windows()
        .get(1)
        .context("the guest marked no idle window")?;
    let seconds = window["duration_ns"].as_f64().unwrap_or(f64::NAN) / 1e9;
    let exits = window["exits"]["total"].as_f64().unwrap_or(f64::NAN);
    let cpu = window["sidecore"]["cpu_ns"].as_f64().unwrap_or(f64::NAN) / 1e9;
    figures.set("idle_exits_per_s", round(exits / seconds));
    figures.set("idle_sidecore_cpu_percent", round(100.0 * cpu / seconds));
    Ok(())
}

/// Number of the disk that data go to and come from; the disks that attack follow.
const DATA_DISK: usize = 1;

/// What the host wrote the guest reads, and what the guest writes the host finds; a ping through virtio-net; and two
/// disks that attack.
fn add_function(guest: &mut Guest, host: &Host) -> Result<()> {
    let network = workloads::network_script(5, 50);
    guest.script.push_str(&format!(
        "; workload check-pattern /dev/vdb --bytes {DISK_BYTES} --seed {SEED_HOST} && \
         workload write-pattern /dev/vdb --bytes {DISK_BYTES} --seed {SEED_GUEST} && \
         echo data ok; {network}"
    ));
    workloads::add_network(guest);
    workloads::add_disk(guest, host, SEED_HOST, "")?;
    for rogue in Rogue::ALL {
        rogue.add(guest, host)?;
    }
    Ok(())
}

fn check_function(outcome: &Outcome, host: &Host, figures: &mut Figures) -> Result<()> {
    let content = workloads::disk_content(host, DATA_DISK)?;
    let wrong = workload::pattern::first_difference(SEED_GUEST, 0, &content);
    let data_ok = outcome.line("data ok").is_some() && wrong.is_none();
    figures.claim("data_verified", data_ok, || {
        let tail = outcome.tail();
        format!("first wrong byte on the host: {wrong:?}\n{tail}")
    });
    figures.claim_ok("ping_ok", workloads::check_network(outcome));
    let blocked = [DATA_DISK + 1, DATA_DISK + 2]
        .into_iter()
        .try_for_each(|disk| workloads::check_blocked(outcome, disk));
    figures.claim_ok("rogue_dma_blocked", blocked);
    Ok(())
}
