//! Time to the call of a guest at depth 1 that sleeps after each request. CPUs halt, as those of a
//! guest do.
//!
//! Two times decide: whether the call arrives while the guest's processor is still on its way to
//! halt (100 ns later halve what the reference reaches, and a few requests in a hundred that come
//! too late cost a third of the rest), and, where it has halted, whether the host keeps a halted
//! processor running for a while. The second is the host's policy, which changes from second to
//! second, and makes a factor of eight. So windows are short, servers take turns, each window is
//! sorted by its *regime*, and a ratio is of two windows of one round and of the same regime.
//!
//! The reference is a server that only returns the request and writes the call ([`ceiling`]): no
//! server calls sooner.

use std::time::Duration;

use anyhow::{Context, Result};
use report::{Measured, median};

use super::{Bench, Disk, Kind, Peer, all};
use vhost_blk::ceiling;
use vhost_blk::drive::{Run, drive};
use vhost_blk::host;
use vhost_blk::load::{Mix, Mode, VmSpec};
use vhost_blk::stats::Report;

/// Rounds at least.
const ROUNDS: usize = 12;
/// Seconds of a window.
const WINDOW: f64 = 0.4;
/// A window's p50 below which the guest's processor has been awake or been kept running, in
/// nanoseconds: a halted one takes 16 µs and more.
const AWAKE_NS: u64 = 10_000;

/// The server of a window.
#[derive(Clone)]
enum Server {
    Peer(&'static str, Peer),
    Reference,
}

impl Server {
    const fn name(&self) -> &'static str {
        match self {
            Self::Peer(name, _) => name,
            Self::Reference => "reference",
        }
    }
}

/// State of a window's guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Regime {
    Awake,
    Halted,
}

impl Regime {
    const fn of(p50_ns: u64) -> Self {
        match p50_ns < AWAKE_NS {
            true => Self::Awake,
            false => Self::Halted,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Awake => "awake",
            Self::Halted => "halted",
        }
    }
}

/// One window.
#[derive(Clone, Copy, Debug)]
struct Window {
    regime: Regime,
    iops: f64,
    p50_ns: f64,
}

/// The section. Keys: `calls_REGIME_SERVER_iops`, `…_p50_ns` and `…_windows`,
/// `calls_REGIME_vs_SERVER` of IOPS.
pub fn calls(bench: &mut Bench) -> Result<()> {
    bench.keep_awake(false)?;
    let outcome = rounds(bench);
    bench.keep_awake(true)?;
    outcome
}

fn rounds(bench: &mut Bench) -> Result<()> {
    bench.record.section(
        "A guest that sleeps, depth 1, null disk, CPUs that halt: windows by whether its processor \
         was awake",
    );
    let mut servers = vec![
        Server::Peer("ours", Peer::Ours),
        Server::Peer("poll", Peer::OursIdle("poll".to_owned())),
        Server::Reference,
    ];
    if bench.settings.spdk.is_some() {
        servers.push(Server::Peer("spdk", Peer::Spdk));
    }
    let mut windows: Vec<Vec<Window>> = vec![Vec::new(); servers.len()];
    for round in 0..bench.settings.repetitions.max(ROUNDS) {
        for turn in 0..servers.len() {
            let at = (turn + round) % servers.len();
            let report = window(bench, &servers[at]).with_context(|| servers[at].name())?;
            windows[at].push(Window {
                regime: Regime::of(report.latency.p50_ns),
                iops: report.iops,
                p50_ns: report.latency.p50_ns as f64,
            });
        }
    }
    println!(
        "{:8} {:10} {:>7} {:>10} {:>8} {:>9} {:>14}",
        "", "", "windows", "IOPS", "p50 µs", "ours / it", "min and max"
    );
    for regime in [Regime::Awake, Regime::Halted] {
        for (server, own) in servers.iter().zip(&windows) {
            row(bench, regime, server.name(), own, &windows[0]);
        }
    }
    Ok(())
}

/// One server's windows of a regime, beside ours.
fn row(bench: &mut Bench, regime: Regime, name: &str, own: &[Window], ours: &[Window]) {
    let of_regime = || own.iter().filter(|window| window.regime == regime);
    let iops = median(of_regime().map(|window| window.iops));
    let p50_ns = median(of_regime().map(|window| window.p50_ns));
    let ratio = Measured::of(ratios(regime, ours, own));
    let count = of_regime().count();
    let prefix = format!("calls_{}", regime.name());
    bench
        .record
        .number(&format!("{prefix}_{name}_windows"), count as f64);
    if count != 0 {
        bench.record.number(&format!("{prefix}_{name}_iops"), iops);
        bench
            .record
            .number(&format!("{prefix}_{name}_p50_ns"), p50_ns);
    }
    let text = ratio.map_or_else(String::new, |ratio| {
        format!("{:>9.3} {:>7.3}{:>7.3}", ratio.median, ratio.min, ratio.max)
    });
    if let Some(ratio) = ratio.filter(|_| name != "ours") {
        bench
            .record
            .number(&format!("{prefix}_vs_{name}"), ratio.median);
    }
    println!(
        "{:8} {name:10} {count:>7} {iops:>10.0} {:>8.2} {text}",
        regime.name(),
        p50_ns / 1e3
    );
}

/// Our IOPS by the other's, of rounds in which both were in this regime.
fn ratios(regime: Regime, ours: &[Window], theirs: &[Window]) -> Vec<f64> {
    let pairs = ours.iter().zip(theirs);
    pairs
        .filter(|(ours, theirs)| ours.regime == regime && theirs.regime == regime)
        .map(|(ours, theirs)| ours.iops / theirs.iops)
        .collect()
}

fn window(bench: &mut Bench, server: &Server) -> Result<Report> {
    let measure = Duration::from_secs_f64(WINDOW);
    match server {
        Server::Peer(_, peer) => bench.once(peer, &Disk::many(Kind::Null, 1), &|bench, server| {
            let mut run = bench.load(server, all(server, 1), Mode::Event);
            (run.warm_up, run.measure) = (measure / 4, measure);
            run
        }),
        Server::Reference => reference(bench, measure),
    }
}

fn reference(bench: &Bench, measure: Duration) -> Result<Report> {
    let socket = std::env::temp_dir().join(format!("vb{}-reference", std::process::id()));
    let server = ceiling::serve(&socket, Some(bench.settings.server_cpu), true)?;
    host::pin(bench.settings.client_cpu)?;
    let report = drive(&Run {
        vms: vec![VmSpec::closed(socket.clone(), 1, 4096)],
        options: vhost_blk::client::Options::new(1, 4096),
        mix: Mix::READS,
        sectors: None,
        mode: Mode::Event,
        warm_up: measure / 4,
        measure,
        seed: 1,
        server: None,
    });
    drop(server);
    // Whether or not it is still there.
    let _ = std::fs::remove_file(&socket);
    Ok(report?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(of: &[(u64, f64)]) -> Vec<Window> {
        let window = |&(p50_ns, iops)| Window {
            regime: Regime::of(p50_ns),
            iops,
            p50_ns: p50_ns as f64,
        };
        of.iter().map(window).collect()
    }

    #[test]
    fn only_windows_of_one_round_and_of_the_same_regime_are_compared() {
        let ours = windows(&[(2_000, 300.0), (2_000, 300.0), (20_000, 40.0)]);
        let theirs = windows(&[(2_000, 600.0), (20_000, 50.0), (20_000, 50.0)]);
        assert_eq!(ratios(Regime::Awake, &ours, &theirs), [0.5]);
        assert_eq!(ratios(Regime::Halted, &ours, &theirs), [0.8]);
    }
}
