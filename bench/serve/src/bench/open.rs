//! Latency and processor time by offered rate.

use anyhow::Result;

use super::{Aio, Bench, Disk, Kind, Peer, Server, all};
use vhost_blk::drive::Run;
use vhost_blk::load::{Mode, Pacing};

/// Loads by name: constant rates, bursts of 10 ms with 90 ms of silence, and a step in the middle.
pub const LOADS: [(&str, Pacing); 6] = [
    ("10", Pacing::Poisson(10.0)),
    ("1000", Pacing::Poisson(1e3)),
    ("20000", Pacing::Poisson(20e3)),
    ("100000", Pacing::Poisson(100e3)),
    (
        "burst",
        Pacing::Burst {
            on_ns: 10_000_000,
            off_ns: 90_000_000,
            rate: 200e3,
        },
    ),
    (
        "step",
        Pacing::Step {
            from: 10.0,
            to: 100e3,
        },
    ),
];

/// A load on a server's only disk, with room for 128 at once.
pub fn paced(bench: &Bench, server: &Server, pacing: Pacing) -> Run {
    let mut vms = all(server, 128);
    for vm in &mut vms {
        vm.pacing = pacing;
    }
    bench.load(server, vms, Mode::Poll)
}

/// The same by name; longer where requests are few.
pub fn load(bench: &Bench, server: &Server, name: &str, pacing: Pacing) -> Run {
    let mut run = paced(bench, server, pacing);
    if name == "10" {
        run.measure *= 3;
    }
    run
}

/// The section.
pub fn open(bench: &mut Bench) -> Result<()> {
    bench.record.section(
        "One null disk, requests offered at random times (latency from the intended time)",
    );
    for (name, pacing) in LOADS {
        let row = format!("open_{name}");
        bench.row(
            &row,
            &[Peer::Ours, Peer::Qsd(Aio::Uring)],
            &Disk::many(Kind::Null, 1),
            |bench, server| load(bench, server, name, pacing),
        )?;
    }
    Ok(())
}
