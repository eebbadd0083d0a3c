//! The scenarios of the demo, one function for each.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::column::Column;
use super::figures::Figures;
use super::per_io::{PerIo, round};
use super::windows::ColumnWindows;
use super::{DemoArgs, Table, claims, report, say};
use crate::system::guest::{Guest, Outcome, RunningGuest};
use crate::system::host::Host;
use crate::system::workloads::{self, DISK_BYTES, Rogue};

/// Latency of the measured disk, ms: longer than a timer tick of the guest, so that each answer
/// finds the guest halted, in every mode. A file in memory answers while the guest is about to
/// halt, or both its tick and the answer wake it, and then a race decides on the cost of an
/// interrupt. The disk spreads its answers over one tick of 4 ms, so that those which still
/// coincide with one are as many in each mode.
const LATENCY_MS: u32 = 6;
const SEED_HOST: u64 = 11;
const SEED_GUEST: u64 = 12;
/// Length of the window in which a guest is idle, s.
const IDLE_SECONDS: u32 = 6;

/// The disk that is read; all guests may use it at the same time.
const READS: &str = "reads.img";

/// Runs all scenarios. Returns the function that renders the tables.
pub fn run(host: &Host, args: &DemoArgs, figures: &mut Figures) -> Result<Table> {
    let longest = LATENCY_MS * 5 / 3;
    figures.set(
        "mode",
        format!("one 4 KiB direct read at a time, disk latency {LATENCY_MS} to {longest} ms"),
    );
    figures.set("reads_per_window", args.reads());
    let windows = windows(host, args, figures)?;
    let adaptive = adaptive(host, args, figures)?;
    Ok(Box::new(move |figures| {
        report::table(figures, &windows, &adaptive)
    }))
}

/// Returns a guest that reads in `windows` windows, between markers.
fn reader(host: &Host, column: Column, args: &DemoArgs, windows: u32) -> Guest {
    let (reads, warmup) = (args.reads(), args.warmup());
    let mut guest = column.guest(&format!(
        "workload reads /dev/vda --count {reads} --warmup {warmup} --windows {windows}"
    ));
    guest.pin = host.quiet_pin().map(str::to_owned);
    let (path, latency) = (host.path(READS), LATENCY_MS * 1000);
    guest.disks.push(format!("path={path},readonly=on"));
    guest.faults.push(format!("disk0:latency={latency}"));
    guest
}

/// Returns the first `count` of these windows of the ledger, of `requests` requests each.
pub fn windows_of(windows: &[Value], count: u32, requests: u32) -> Result<Vec<PerIo>> {
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
        Ok(PerIo::of(window, requests))
    };
    windows[..count as usize].iter().map(of_window).collect()
}

/// Measures the reads: first of the guests that differ in their registers, then of those whose
/// kernels have their default policy.
fn windows(host: &Host, args: &DemoArgs, figures: &mut Figures) -> Result<ColumnWindows> {
    host.put(READS, &workloads::pattern(SEED_HOST))?;
    let mut windows = ColumnWindows::new(&Column::ALL);
    for columns in [&Column::STRICT[..], &Column::STOCK] {
        for (column, outcome) in in_turns(host, args, columns)? {
            for window in windows_of(outcome.windows(), args.rounds, args.reads())? {
                windows.add(column, window);
            }
            if column == Column::Default {
                figures.set_defaults(&outcome);
            }
        }
    }
    claims::summarize(figures, &windows);
    Ok(windows)
}

/// Runs guests of these columns in turns: while one reads its window the others are stopped, so
/// that any drift of the host affects all of them alike.
fn in_turns(host: &Host, args: &DemoArgs, columns: &[Column]) -> Result<Vec<(Column, Outcome)>> {
    let (rounds, reads) = (args.rounds, args.reads());
    let mut guests: Vec<(Column, RunningGuest<'_>)> = Vec::new();
    for round in 1..=rounds {
        for (turn, column) in columns.iter().copied().enumerate() {
            say(&format!(
                "round {round} of {rounds}: {reads} direct reads, {}",
                column.name()
            ));
            if round == 1 {
                let mut guest = reader(host, column, args, rounds);
                guest.script.push_str(" --step");
                guest.limit *= 1 + rounds;
                guests.push((column, guest.spawn(host)?));
            } else {
                go_on(&mut guests[turn].1)?;
            }
            let guest = &mut guests[turn].1;
            guest.wait_for(&format!("reads window={round} of={rounds}"))?;
            guest.pause()?;
        }
    }
    let end = |(column, mut guest): (Column, RunningGuest<'_>)| {
        go_on(&mut guest)?;
        let outcome = guest.wait()?;
        outcome.check()?;
        column.check(&outcome)?;
        Ok((column, outcome))
    };
    guests.into_iter().map(end).collect()
}

/// Resumes a guest that was stopped, and waits for a line.
fn go_on(guest: &mut RunningGuest<'_>) -> Result<()> {
    guest.resume()?;
    guest.type_in("\n")
}

/// Measures the same reads with a sidecore that sleeps, one window for each mode. The last guest,
/// `shared`, is then idle for a while, and after that runs all other scenarios.
fn adaptive(host: &Host, args: &DemoArgs, figures: &mut Figures) -> Result<ColumnWindows> {
    const IDLE: &str = "adaptive";
    let mut windows = ColumnWindows::with_idle(&Column::STRICT, IDLE);
    for column in Column::STRICT {
        say(&format!(
            "--idle {IDLE}: {} direct reads, {}",
            args.reads(),
            column.name()
        ));
        let mut guest = reader(host, column, args, 1);
        guest.idle = IDLE;
        if column == Column::Shared {
            say("and then: an idle guest, data both ways, ping, two disks that attack");
            guest.script.push_str(&format!(
                " && sleep 1 && workload idle --seconds {IDLE_SECONDS}"
            ));
            add_function(&mut guest, host)?;
        }
        let outcome = guest.try_run(host)?;
        for window in windows_of(outcome.windows(), 1, args.reads())
            .with_context(|| format!("in mode {}\n{}", column.name(), outcome.tail()))?
        {
            windows.add(column, window);
        }
        column.check(&outcome)?;
        if column == Column::Shared {
            idle(&outcome, figures)?;
            check_function(&outcome, host, figures)?;
        } else {
            outcome.check()?;
        }
    }
    windows.set(
        figures,
        |column| format!("{}_adaptive", column.name()),
        "io",
    );
    Ok(windows)
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

/// Number of the disk that data are copied to and from; the disks that attack follow.
const DATA_DISK: usize = 1;

/// Adds the functional checks: the guest reads the host's data, the host the guest's; a ping
/// through virtio-net; and two disks that attack.
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
