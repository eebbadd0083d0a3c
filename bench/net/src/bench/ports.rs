//! Several ports on one core.

use std::path::PathBuf;

use anyhow::Result;
use report::{median, object};
use vhost_net::drive::{Load, PortSpec, Report};
use vhost_net::frame::MIN_FRAME;
use vhost_net::{Options, ceiling};

use super::Bench;
use super::server::{Behind, Offer, Peer};

/// Most ports.
const PORTS: usize = 7;
/// So many ports of that rate are as much as one port takes.
const PARTS: f64 = 4.0;
/// A rate is served in full from this part of it on.
const IN_FULL: f64 = 0.98;

/// Jain's index of frames received.
fn jain(report: &Report) -> f64 {
    let rates = || report.ports.iter().map(|port| port.received_per_s);
    let squares: f64 = rates().map(|rate| rate * rate).sum();
    let sum: f64 = rates().sum();
    sum * sum / (squares * rates().count() as f64)
}

/// The section: 1 to 7 looped ports with full windows, then with a rate each.
pub fn ports(bench: &mut Bench) -> Result<()> {
    bench.record.section(
        "1 to 7 looped ports on one core at 64 bytes, split rings, a full window each: frames per \
         second in all",
    );
    let mut alone = None;
    for count in 1..=PORTS {
        let row = bench.row(
            &format!("ports_{count}"),
            &Offer::new(Behind::Loop, count),
            &specs(Load::Window(ceiling::WINDOW)),
            &|report| report.sum(|port| port.received_per_s),
        )?;
        for (peer, reports) in row.reports() {
            let rate = median(
                reports
                    .iter()
                    .map(|report| report.sum(|p| p.received_per_s)),
            );
            if (count, peer) == (1, Peer::Ours) {
                alone = Some(rate);
            }
            let index = object::round(median(reports.iter().map(jain)), 5);
            let suffix = if peer == Peer::Ours { "" } else { "_dpdk" };
            bench.record.number(&format!("jain_{count}{suffix}"), index);
        }
    }
    let Some(alone) = alone else { return Ok(()) };
    saturation(bench, alone / PARTS)
}

fn specs(load: Load) -> impl Fn(Peer, &[PathBuf]) -> Vec<PortSpec> {
    move |_, sockets| {
        let port = |socket: &PathBuf| PortSpec::looped(socket, Options::new(), load, MIN_FRAME);
        sockets.iter().map(port).collect()
    }
}

/// Finds the number of ports with such a rate each that are served in full.
fn saturation(bench: &mut Bench, rate: f64) -> Result<()> {
    bench.record.section(&format!(
        "The same, ours, with {} frames per second each: the part that is served",
        report::short(rate)
    ));
    let mut last_in_full = 0;
    for count in 1..=PORTS {
        let offer = Offer::new(Behind::Loop, count);
        let mut contender = bench.contend(Peer::Ours, &offer, &specs(Load::Rate(rate)))?;
        for _ in 0..bench.settings.rounds.min(3) {
            bench.turn(&mut contender)?;
        }
        let served = |report: &Report| report.sum(|port| port.received_per_s);
        let part = median(contender.reports.iter().map(served)) / (rate * count as f64);
        let p99 = |report: &Report| {
            let worst = report
                .ports
                .iter()
                .map(|port| port.latency.quantile(0.99))
                .max();
            worst.unwrap_or(0) as f64
        };
        let p99 = median(contender.reports.iter().map(p99));
        println!(
            "{count} ports: {part:.3} served, worst p99 {:.1} µs",
            p99 / 1e3
        );
        let key = format!("ports_{count}_served_of_offered");
        bench.record.number(&key, object::round(part, 4));
        if part >= IN_FULL && last_in_full + 1 == count {
            last_in_full = count;
        }
    }
    bench
        .record
        .number("ports_offered_mpps_each", object::round(rate / 1e6, 3));
    bench
        .record
        .number("ports_saturated_at", (last_in_full + 1) as f64);
    Ok(())
}
