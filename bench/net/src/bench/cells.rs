//! Frames per second of one port: both directions and the loop, over each kind of ring; a round
//! trip; two ports.

use std::path::PathBuf;

use anyhow::Result;
use vhost_net::client::feature as net;
use vhost_net::drive::{Load, PortSpec, Report};
use vhost_net::frame::{MAX_FRAME, MIN_FRAME, mac};
use vhost_net::ring::feature;
use vhost_net::{Options, ceiling};

use super::Bench;
use super::server::{Behind, Offer, Peer};

/// Directions, from the guest.
const DIRECTIONS: [&str; 3] = ["g2h", "h2g", "loop"];

/// Frames per second at the receiver.
pub fn rate(direction: &str, report: &Report) -> f64 {
    match direction {
        "g2h" => report.sum(|port| port.taken_per_s),
        _ => report.sum(|port| port.received_per_s),
    }
}

/// One cell.
fn cell(
    bench: &mut Bench,
    name: &str,
    direction: &'static str,
    options: &Options,
    frame_len: u32,
) -> Result<()> {
    let behind = match direction {
        "g2h" => Behind::Sink,
        "h2g" => Behind::Source(frame_len),
        _ => Behind::Loop,
    };
    let specs = |_, sockets: &[PathBuf]| {
        let options = options.clone();
        let socket = &sockets[0];
        vec![match direction {
            "g2h" => PortSpec::to_sink(socket, options, Load::Flood, frame_len),
            "h2g" => PortSpec::from_source(socket, options, frame_len),
            _ => PortSpec::looped(socket, options, Load::Window(ceiling::WINDOW), frame_len),
        }]
    };
    let offer = Offer::new(behind, 1);
    let row = bench.row(name, &offer, &specs, &|report| rate(direction, report))?;
    bench.record.ratio(&format!("{name}_vs_dpdk"), &row);
    Ok(())
}

fn ring(bench: &mut Bench, ring: &str, features: u64) -> Result<()> {
    bench.record.section(&format!(
        "One pair, {ring} rings of 256 entries, mergeable buffers: frames per second at the \
         receiver"
    ));
    for (suffix, frame_len) in [("", MIN_FRAME), ("_1518", MAX_FRAME)] {
        for direction in DIRECTIONS {
            let name = format!("net_{direction}_{ring}{suffix}");
            let options = Options::new().require(features);
            cell(bench, &name, direction, &options, frame_len)?;
        }
    }
    bench.record.geometric_mean();
    Ok(())
}

/// The section.
pub fn split(bench: &mut Bench) -> Result<()> {
    ring(bench, "split", 0)
}

/// The section.
pub fn packed(bench: &mut Bench) -> Result<()> {
    ring(bench, "packed", feature::PACKED)
}

/// The section: what else can be negotiated.
pub fn modes(bench: &mut Bench) -> Result<()> {
    bench
        .record
        .section("The loop at 64 bytes, otherwise negotiated: frames per second at the receiver");
    for (ring, packed) in [("split", 0), ("packed", feature::PACKED)] {
        let in_order = Options::new().require(packed | feature::IN_ORDER);
        let single = in_order.clone().without(net::MRG_RXBUF);
        cell(
            bench,
            &format!("net_loop_{ring}_in_order"),
            "loop",
            &in_order,
            MIN_FRAME,
        )?;
        cell(
            bench,
            &format!("net_loop_{ring}_in_order_single"),
            "loop",
            &single,
            MIN_FRAME,
        )?;
    }
    Ok(())
}

/// The section: one frame under way.
pub fn round_trip(bench: &mut Bench) -> Result<()> {
    bench
        .record
        .section("One frame of 64 bytes there and back: nanoseconds at the median, split ring");
    let specs = |_, sockets: &[PathBuf]| {
        let load = Load::Window(1);
        vec![PortSpec::looped(
            &sockets[0],
            Options::new(),
            load,
            MIN_FRAME,
        )]
    };
    let p50 = |report: &Report| report.ports[0].latency.quantile(0.5) as f64;
    let row = bench.row("rr_p50", &Offer::new(Behind::Loop, 1), &specs, &p50)?;
    bench.record.ratio("rr_p50_vs_dpdk", &row);
    for (peer, reports) in row.reports() {
        let p99 = reports
            .iter()
            .map(|report| report.ports[0].latency.quantile(0.99) as f64);
        let key = format!("rr_p99_{}_ns", peer.name());
        bench.record.number(&key, report::median(p99));
    }
    Ok(())
}

/// The section: from one port to another, and a trickle back, by which a switch learns where the
/// other port is.
pub fn switch(bench: &mut Bench) -> Result<()> {
    bench.record.section(
        "From one port to another at 64 bytes, split rings: our switch, testpmd's io; frames per \
         second at the receiver",
    );
    let specs = |_: Peer, sockets: &[PathBuf]| {
        let port = |at: usize, load| PortSpec {
            addresses: (mac(2 - at as u8), mac(1 + at as u8)),
            ..PortSpec::looped(&sockets[at], Options::new(), load, MIN_FRAME)
        };
        vec![
            port(0, Load::Window(ceiling::WINDOW)),
            port(1, Load::Rate(1000.0)),
        ]
    };
    let offer = Offer::new(Behind::Between, 2);
    let row = bench.row("switch", &offer, &specs, &|report| {
        report.ports[1].received_per_s
    })?;
    bench.record.ratio("switch_vs_testpmd_io", &row);
    Ok(())
}
