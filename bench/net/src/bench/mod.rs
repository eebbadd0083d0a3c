//! `vhost-net serve-bench`: our network server beside DPDK's vhost, on the same CPUs, under the
//! same client.
//!
//! Server and client have a CPU each. A row starts both servers, which stay connected; they take
//! turns in **windows** of a fraction of a second, each first in every other round, and the one
//! whose turn it is not stands still (SIGSTOP). A ratio is of two windows of one round, so that
//! what the machine does meanwhile falls on both: the same cell differs threefold within minutes on
//! a shared machine. Tables hold medians of rounds, and the extremes beside them.
//!
//! Frames are counted at the receiver, which is the client but for a sink: there they are counted
//! as their buffers come back, and DPDK's own count stands beside that. Of stamped frames one in
//! 256 is checked whole, and all are looked up in their sender's account. What is lost or wrong is
//! printed with the row.
//!
//! | section | what |
//! |---|---|
//! | `machine` | cache-line round trip, this client's ceiling |
//! | `split`, `packed` | guest to host, host to guest, loop; 64 and 1,518 bytes; both servers |
//! | `modes` | the loop in order, and with buffers that are not mergeable |
//! | `rr` | one frame there and back |
//! | `switch` | between two ports: our switch, and testpmd's `io`, which looks at no address |
//! | `misses` | a translation that another port's front end never answers for: how long, and a neighbour's latency |
//! | `quiet` | a quiet port, and a quiet disk, beside a flooding port on the same core |
//! | `ports` | 1 to 7 ports on one core: frames in all, Jain's index, where a rate each saturates it |
//! | `tap` | frames of 64,000 bytes into a TAP interface, beside bare writes of the same frames |
//!
//! A peer that is missing leaves its rows empty and its keys null; nothing is measured against a
//! guess. With `--only` a run measures some sections, and keeps the figures of the others that the
//! report has.

mod cells;
mod docs;
mod ports;
mod quiet;
mod record;
mod server;
mod tap;
mod unanswered;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use report::short;
use vhost_net::drive::{Driver, PortSpec, Report};
use vhost_net::host::{self, Priority};
use vhost_net::ring::feature;
use vhost_net::{Options, ceiling};

use record::{Record, Row};
use server::{Offer, Peer, Server};

type Section = (&'static str, fn(&mut Bench) -> Result<()>);

/// The sections, in their order.
const ALL: [Section; 10] = [
    ("machine", machine),
    ("split", cells::split),
    ("packed", cells::packed),
    ("modes", cells::modes),
    ("rr", cells::round_trip),
    ("switch", cells::switch),
    ("quiet", quiet::quiet),
    ("misses", unanswered::unanswered),
    ("ports", ports::ports),
    ("tap", tap::tap),
];

/// Their names.
pub const SECTIONS: [&str; ALL.len()] = {
    let mut names = [""; ALL.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = ALL[at].0;
        at += 1;
    }
    names
};

/// Settings of a measurement.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Our server's command line, with `{devices}`, `{cpu}` and `{idle}` in it.
    pub ours: String,
    /// Our source, as a device of the command line, with `{len}` for a frame's bytes in it.
    pub source: String,
    /// Our server's idle policy.
    pub idle: String,
    /// DPDK's testpmd: the program.
    pub testpmd: String,
    /// The server's CPU.
    pub server_cpu: usize,
    /// The client's CPU.
    pub client_cpu: usize,
    /// Measured per window.
    pub window: Duration,
    /// Rounds of windows.
    pub rounds: usize,
    /// The priority of server and client, from -20 to 19, as far as it is allowed.
    pub nice: i32,
    /// Only these sections.
    pub only: Vec<String>,
    /// File for the figures.
    pub report: PathBuf,
    /// File for a page made from them, if it is wanted.
    pub docs: Option<PathBuf>,
}

/// A measuring run.
pub struct Bench {
    settings: Settings,
    record: Record,
}

/// Measures, prints, and writes the report.
///
/// # Errors
/// The report cannot be written or the CPUs not used. A server that fails is a row that says so.
pub fn run(settings: Settings) -> Result<()> {
    let mut bench = Bench {
        record: Record::open(&settings)?,
        settings,
    };
    let priority = Priority::set(bench.settings.nice);
    if let Err(error) = &priority {
        let nice = bench.settings.nice;
        println!("priority {nice}: {error}; measured without");
    }
    bench.record.heading();
    for (name, section) in ALL {
        let only = &bench.settings.only;
        if only.is_empty() || only.iter().any(|only| only == name) {
            let start = Instant::now();
            section(&mut bench).with_context(|| format!("section {name}"))?;
            // What is there is not lost if a later section fails.
            bench.record.write(&bench.settings.report)?;
            println!("({name}: {:.0} s)", start.elapsed().as_secs_f64());
        }
    }
    bench.record.finish(&bench.settings.report)?;
    match &bench.settings.docs {
        Some(path) => docs::write(&bench.settings.report, path),
        None => Ok(()),
    }
}

/// Makes the page from the figures of an earlier run.
///
/// # Errors
/// They cannot be read, or it not written.
pub fn page(report: &std::path::Path, docs: &std::path::Path) -> Result<()> {
    docs::write(report, docs)
}

/// The machine itself.
fn machine(bench: &mut Bench) -> Result<()> {
    let cpus = (bench.settings.server_cpu, bench.settings.client_cpu);
    let rtt = host::round_trip(cpus.1, cpus.0)?;
    bench.record.number("rtt_ns", rtt.median);
    println!(
        "cache-line round trip between CPUs {} and {}: {:.0} ns (fastest {:.0})",
        cpus.1, cpus.0, rtt.median, rtt.min
    );
    for (whose, cpu) in [("server", cpus.0), ("client", cpus.1)] {
        let seen = host::Interruptions::of(cpu, 10 * bench.settings.window)?;
        let record = &mut bench.record;
        record.number(&format!("interruptions_{whose}_per_s"), seen.per_s.round());
        let percent = report::object::round(100.0 * seen.share, 2);
        record.number(&format!("interruptions_{whose}_percent"), percent);
        println!(
            "the {whose}'s CPU is taken away for more than 5 µs {:.0} times a second, {percent} % \
             of the time",
            seen.per_s
        );
    }
    for (name, features) in [("split", 0), ("packed", feature::PACKED)] {
        for (direction, kind) in [
            ("g2h", ceiling::Kind::Sink),
            ("h2g", ceiling::Kind::Source(64)),
            ("loop", ceiling::Kind::Loop),
        ] {
            let options = Options::new().require(features);
            let report = ceiling::measure(cpus, &options, kind, 64, bench.settings.window * 4)?;
            let rate = cells::rate(direction, &report);
            let key = format!("ceiling_{direction}_{name}_mpps");
            bench
                .record
                .number(&key, report::object::round(rate / 1e6, 3));
            let rate = short(rate);
            println!("this client's ceiling, {direction} {name}, 64 bytes: {rate} frames/s");
        }
    }
    Ok(())
}

/// A server, and the ports that load it.
struct Contender {
    peer: Peer,
    server: Server,
    driver: Driver,
    reports: Vec<Report>,
}

impl Bench {
    /// Starts a server with the ports that `specs` makes of its sockets. It stands still then.
    fn contend(
        &self,
        peer: Peer,
        offer: &Offer,
        specs: &dyn Fn(Peer, &[PathBuf]) -> Vec<PortSpec>,
    ) -> Result<Contender> {
        let server = server::start(&self.settings, peer, offer)?;
        host::pin(self.settings.client_cpu)?;
        let driver = Driver::connect(&specs(peer, server.sockets()));
        let driver = driver.with_context(|| server.last_words())?;
        server.pause()?;
        Ok(Contender {
            peer,
            server,
            driver,
            reports: Vec::new(),
        })
    }

    /// A turn of a server: one window.
    fn turn(&self, contender: &mut Contender) -> Result<()> {
        let Contender { server, driver, .. } = contender;
        server.resume()?;
        let window = self.settings.window;
        let report = driver.measure(window / 4, window, Some(server.pid()));
        let report = report.with_context(|| server.last_words())?;
        server.pause()?;
        contender.reports.push(report);
        Ok(())
    }

    /// Measures one row: the servers take turns.
    fn row(
        &mut self,
        name: &str,
        offer: &Offer,
        specs: &dyn Fn(Peer, &[PathBuf]) -> Vec<PortSpec>,
        value: &dyn Fn(&Report) -> f64,
    ) -> Result<Row> {
        let mut row = Row::new(name);
        let mut contenders = Vec::new();
        for peer in Peer::ALL {
            match self.contend(peer, offer, specs) {
                Ok(contender) => contenders.push(contender),
                Err(error) => row.failed(peer, &error),
            }
        }
        for round in 0..self.settings.rounds {
            let mut failed = None;
            let count = contenders.len();
            for turn in 0..count {
                let at = (turn + round) % count;
                if let Err(error) = self.turn(&mut contenders[at]) {
                    row.failed(contenders[at].peer, &error);
                    failed = Some(at);
                    break;
                }
            }
            if let Some(at) = failed {
                // One failure is enough: the row says so.
                contenders.remove(at);
            }
        }
        for contender in contenders {
            row.measured(contender.peer, &contender.reports, value);
            let sent: u64 = contender.reports.iter().map(taken).sum();
            if contender.peer == Peer::Dpdk && offer.behind == server::Behind::Sink {
                contender.server.resume()?;
                drop(contender.driver);
                // Without its last table there is nothing to compare.
                let log = contender.server.end().unwrap_or_default();
                row.said(received_by_testpmd(&log), sent);
            }
        }
        self.record.row(&row);
        Ok(row)
    }
}

fn taken(report: &Report) -> u64 {
    report.ports.iter().map(|port| port.taken).sum()
}

/// Returns the total of received frames that testpmd prints at its end.
fn received_by_testpmd(log: &str) -> Option<u64> {
    let totals = log
        .split("Accumulated forward statistics for all ports")
        .nth(1)?;
    let count = totals
        .split("RX-packets:")
        .nth(1)?
        .split_whitespace()
        .next()?;
    count.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_received_by_testpmd_are_read_from_its_last_table() {
        let log = "  ---------------------- Forward statistics for port 0  ----\n  RX-packets: 7  \
             \n\
            +++++++++++++++ Accumulated forward statistics for all ports+++++\n  \
            RX-packets: 12345          RX-dropped: 0             RX-total: 12345\n";
        assert_eq!(received_by_testpmd(log), Some(12345));
        assert_eq!(received_by_testpmd("RX-packets: 7"), None);
    }
}
