//! The default idle policy beside a core that always polls. Without spinners: CPUs halt, as those
//! of a host do.
//!
//! A ratio is of two figures of one round, so that what the machine does meanwhile falls on both.
//! Whether a policy keeps its promise all the time, and does not alternate between two ways of
//! working, is measured in ten windows after each other on one server: the slowest beside the
//! median, and that relative to polling in the same run (`…_slowest_window_vs_poll`).

use anyhow::{Context, Result};
use report::{Measured, median};

use super::prices::{PRICED, price_row};
use super::{Aio, Bench, Disk, Kind, Peer, Server, Summary, all};
use vhost_blk::load::{Mode, Pacing};

/// Fewest rounds, and windows.
const ROUNDS: usize = 10;
/// Seconds of a window.
const WINDOW: f64 = 2.0;
/// Size of the RAM disk, MiB: more than any cache.
const MIB: u32 = 256;

/// The section. Keys: `event_d1_vs_poll` and so on, `event_d1_slowest_window`,
/// `open20k_poisson_p50_us` and so on.
pub fn default(bench: &mut Bench) -> Result<()> {
    bench.keep_awake(false)?;
    let outcome = closed(bench)
        .and_then(|()| open(bench))
        .and_then(|()| prices(bench));
    bench.keep_awake(true)?;
    outcome
}

/// Guests that sleep after every request, or batch of them.
fn closed(bench: &mut Bench) -> Result<()> {
    bench.record.section(
        "The default policy beside `--idle poll`: guests that sleep, CPUs that halt; IOPS of the \
         default / of polling",
    );
    println!(
        "{:22} {:>7} {:>7} {:>7} {:>10} {:>10} {:>10} {:>10}",
        "", "median", "min", "max", "default", "poll", "slowest", "of poll"
    );
    for (name, kind, depth) in [
        ("event_d1", Kind::Null, 1),
        ("event_d32", Kind::Null, 32),
        ("ram_filled_event_d32", Kind::Ram(MIB), 32),
    ] {
        let disks = Disk::many(kind, 1);
        let load =
            |bench: &Bench, server: &Server| bench.load(server, all(server, depth), Mode::Event);
        let peers = [Peer::Ours, Peer::OursIdle("poll".to_owned())];
        let rounds = bench.settings.repetitions.max(ROUNDS);
        let [ours, polling] = bench
            .in_turns(&peers, &disks, &load, rounds)
            .with_context(|| name)?;
        // What the machine does meanwhile is in both: a core that always polls works in one way
        // only.
        let slowest = slowest_window(bench, &peers[0], &disks, depth).with_context(|| name)?;
        let poll_slowest = slowest_window(bench, &peers[1], &disks, depth).with_context(|| name)?;
        let ratios = ours.iter().zip(&polling).map(|(ours, poll)| ours / poll);
        let of = |runs: Vec<f64>| Measured::of(runs).expect("there are rounds");
        let ratio = of(ratios.collect());
        println!(
            "{name:22} {:>7.3} {:>7.3} {:>7.3} {:>10.0} {:>10.0} {slowest:>10.3} \
             {poll_slowest:>10.3}",
            ratio.median,
            ratio.min,
            ratio.max,
            of(ours).median,
            of(polling).median
        );
        for (key, value) in [
            ("vs_poll", ratio.median),
            ("vs_poll_min", ratio.min),
            ("vs_poll_max", ratio.max),
            ("slowest_window", slowest),
            ("poll_slowest_window", poll_slowest),
            ("slowest_window_vs_poll", slowest / poll_slowest),
        ] {
            bench.record.number(&format!("{name}_{key}"), value);
        }
    }
    Ok(())
}

/// IOPS of the slowest of windows after each other, all on one server, by their median.
fn slowest_window(bench: &mut Bench, peer: &Peer, disks: &[Disk], depth: u16) -> Result<f64> {
    let window = |bench: &Bench, server: &Server| {
        let mut run = bench.load(server, all(server, depth), Mode::Event);
        run.measure = std::time::Duration::from_secs_f64(WINDOW);
        run
    };
    let reports = bench.several(peer, disks, &window, ROUNDS)?;
    let windows: Vec<f64> = reports.iter().map(|report| report.iops).collect();
    Ok(windows.iter().copied().fold(f64::INFINITY, f64::min) / median(windows))
}

/// Requests that come at random, or at equal distances.
fn open(bench: &mut Bench) -> Result<()> {
    bench
        .record
        .section("20,000 requests a second, CPUs that halt (latency from the intended time)");
    let mut peers = vec![
        Peer::Ours,
        Peer::OursIdle("poll".to_owned()),
        Peer::OursIdle("sleep".to_owned()),
        Peer::Qsd(Aio::Uring),
    ];
    peers.extend(bench.settings.spdk.is_some().then_some(Peer::Spdk));
    for (name, pacing) in [
        ("poisson", Pacing::Poisson(20e3)),
        ("uniform", Pacing::Uniform(20e3)),
    ] {
        let names = ["default", "poll", "sleep", "peer", "peer"]
            .map(|peer| format!("open20k_{name}_{peer}"));
        let results = at_rate(bench, &names[..peers.len()], &peers, pacing)?;
        if let Some(ours) = &results[0] {
            for (key, value) in [
                ("p50_us", ours.p50_ns / 1e3),
                ("p90_us", ours.p90_ns / 1e3),
                ("cpu_percent", ours.server_cpu * 100.0),
            ] {
                bench.record.number(&format!("open20k_{name}_{key}"), value);
            }
        }
    }
    Ok(())
}

/// Measures the effect of a price where requests come once a millisecond.
fn prices(bench: &mut Bench) -> Result<()> {
    bench
        .record
        .section("1,000 requests a second at random times, by policy; CPUs that halt");
    let peers = PRICED.map(|idle| Peer::OursIdle(idle.to_owned()));
    let names = PRICED.map(price_row);
    at_rate(bench, &names, &peers, Pacing::Poisson(1e3))?;
    Ok(())
}

fn at_rate(
    bench: &mut Bench,
    names: &[String],
    peers: &[Peer],
    pacing: Pacing,
) -> Result<Vec<Option<Summary>>> {
    let disk = Disk::many(Kind::Null, 1);
    bench.rows(names, peers, &disk, ROUNDS, |bench, server| {
        super::open::paced(bench, server, pacing)
    })
}
