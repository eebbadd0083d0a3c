//! Cost of idle disks, and wake-ups of guests that sleep after every request.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{Aio, Bench, Disk, Kind, Peer, Server, all, server};
use vhost_blk::client::{Client, Options};
use vhost_blk::drive::drive;
use vhost_blk::load::Mode;
use vhost_blk::process::{cpu_time, memory_use};
use vhost_blk::ring::feature;

/// Size of a file disk, in MiB.
const MIB: u32 = 2;

/// Measures the cost of connected disks without load: null disks that were never used, and files in
/// memory that were.
pub fn idle(bench: &mut Bench) -> Result<()> {
    bench.record.section("Connected disks without load");
    for count in [8, 256] {
        for (what, kind) in [("", Kind::Null), ("used_", Kind::Tmpfs(MIB))] {
            for peer in [Peer::Ours, Peer::Qsd(Aio::Uring)] {
                match connected(bench, &peer, kind, count) {
                    Ok((cpu, own_kib, pss_kib)) => {
                        let suffix = if peer.is_ours() { "" } else { "_qsd" };
                        bench.record.line(&format!(
                            "{count:3} disks {:15} {:5} {cpu:6.2} % of a CPU, {pss_kib} KiB in \
                             all, {own_kib} KiB of its own more than before they connected",
                            if what.is_empty() {
                                ""
                            } else {
                                "that have worked"
                            },
                            peer.name()
                        ));
                        for (key, value) in [
                            ("cpu_percent", cpu),
                            ("own_kib", own_kib as f64),
                            ("pss_kib", pss_kib as f64),
                        ] {
                            let key = format!("idle_{what}{key}_{count}{suffix}");
                            bench.record.number(&key, value);
                        }
                    }
                    Err(error) => {
                        let row = format!("idle_{what}{count}");
                        bench.record.failed_row(&row, &peer, &error);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Returns the server's percentage of a CPU, its anonymous memory in KiB minus that before the
/// clients connected, and its proportional set size in KiB. Disks of files are loaded first, at
/// depth 32.
fn connected(bench: &Bench, peer: &Peer, kind: Kind, count: usize) -> Result<(f64, i64, u64)> {
    let server = server::start(&bench.settings, peer, &Disk::many(kind, count))?;
    let gone = || format!("the server is gone: {}", server.last_words());
    let before = memory_use(server.pid()).with_context(gone)?;
    if kind != Kind::Null {
        let load = bench.load(&server, all(&server, 32), Mode::Poll);
        drive(&load).with_context(gone)?;
    }
    let mut clients = Vec::new();
    for socket in server.sockets() {
        clients.push(Client::connect(socket, Options::new(4, 4096)).with_context(gone)?);
    }
    // The server's work for new connections has ended by then.
    thread::sleep(Duration::from_millis(500));
    let (start, cpu) = (Instant::now(), cpu_time(server.pid()).with_context(gone)?);
    thread::sleep(Duration::from_secs_f64(bench.settings.seconds * 3.0));
    let used = cpu_time(server.pid())
        .with_context(gone)?
        .saturating_sub(cpu);
    let seconds = start.elapsed().as_secs_f64();
    let after = memory_use(server.pid()).with_context(gone)?;
    let own = after.anonymous_kib as i64 - before.anonymous_kib as i64;
    Ok((used.as_secs_f64() / seconds * 100.0, own, after.pss_kib))
}

/// Measures a server that never spins, with a guest that sleeps after each request: every request
/// wakes both.
pub fn sleeps(bench: &mut Bench) -> Result<()> {
    let wanted = bench.settings.sleeps;
    bench.record.section(
        "Forced sleeps: a server that never spins, a guest that sleeps after every request",
    );
    let peer = Peer::OursIdle("sleep".to_owned());
    let mut all_kicks = 0;
    for (name, add, remove) in [
        ("split, event index", 0, 0),
        ("split, flags", 0, feature::EVENT_IDX),
        ("packed, event index", feature::PACKED, 0),
        ("packed, flags", feature::PACKED, feature::EVENT_IDX),
    ] {
        let (mut kicks, mut lost, mut requests) = (0, 0, 0);
        while kicks < wanted / 4 {
            let load = |bench: &Bench, server: &Server| {
                let mut run = bench.load(server, all(server, 1), Mode::Event);
                run.options.require(add);
                run.options.features &= !remove;
                run.measure = run.measure.mul_f64(5.0);
                run.seed = kicks;
                run
            };
            let report = match bench.once(&peer, &Disk::many(Kind::Null, 1), &load) {
                Ok(report) if report.kicks == 0 => {
                    Err(anyhow::anyhow!("no kicks at all: it does not sleep"))
                }
                other => other,
            };
            match report {
                Ok(report) => {
                    kicks += report.kicks;
                    lost += report.lost_wakeups;
                    requests += report.requests;
                }
                Err(error) => {
                    bench.record.failed_row(name, &peer, &error);
                    return Ok(());
                }
            }
        }
        bench.record.line(&format!(
            "{name:22} {requests} requests, {kicks} kicks, {lost} lost wake-ups"
        ));
        all_kicks += kicks;
    }
    bench.record.number("forced_sleeps", all_kicks as f64);
    Ok(())
}
