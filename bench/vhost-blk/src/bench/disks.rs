//! Single disks by kind and depth, and many disks on one core.

use anyhow::Result;

use super::{Bench, Disk, Kind, Peer, Summary, all};
use crate::load::Mode;
use crate::ring::feature;

/// Size of RAM and tmpfs disks, MiB: more than any cache.
const MIB: u32 = 256;

/// Null, RAM and tmpfs disks.
pub fn disks(bench: &mut Bench) -> Result<()> {
    bench.record.section("One disk, 4 KiB random reads");
    let peers = [Peer::Ours, Peer::Qsd];
    for (name, kind) in [
        ("null", Kind::Null),
        ("ram", Kind::Ram(MIB)),
        ("tmpfs", Kind::Tmpfs(MIB)),
    ] {
        for depth in [1, 32] {
            for (guest, mode) in [("poll", Mode::Poll), ("event", Mode::Event)] {
                let row = format!("{name}_d{depth}_{guest}");
                let results = bench.row(&row, &peers, &Disk::many(kind, 1), |bench, server| {
                    bench.load(server, all(server, depth), mode)
                })?;
                keys(bench, name, depth, mode, &results);
            }
        }
    }
    for depth in [1, 32] {
        let row = format!("null_d{depth}_packed");
        bench.row(
            &row,
            &[Peer::Ours],
            &Disk::many(Kind::Null, 1),
            |bench, server| {
                let mut run = bench.load(server, all(server, depth), Mode::Poll);
                run.options.require(feature::PACKED);
                run
            },
        )?;
    }
    bench.keep_awake(false)?;
    for (guest, mode) in [("poll", Mode::Poll), ("event", Mode::Event)] {
        let row = format!("null_d1_{guest}_hlt");
        bench.row(&row, &peers, &Disk::many(Kind::Null, 1), |bench, server| {
            bench.load(server, all(server, 1), mode)
        })?;
    }
    bench.keep_awake(true)
}

fn keys(bench: &mut Bench, name: &str, depth: u16, mode: Mode, results: &[Option<Summary>]) {
    if let [Some(ours), _] = results
        && (name, depth, mode) == ("null", 1, Mode::Poll)
        && let Some(rtt) = bench.record.get("rtt_ns")
    {
        bench.record.number("null_d1_p50_rtts", ours.p50_ns / rtt);
    }
    if let [Some(ours), _] = results
        && (name, depth, mode) == ("null", 32, Mode::Poll)
    {
        bench
            .record
            .number("kicks_per_1000_busy", ours.kicks_per_1000);
    }
    let [Some(ours), Some(qsd)] = results else {
        return;
    };
    match mode {
        Mode::Poll => {
            let key = format!("{name}_d{depth}_vs_qsd");
            bench.record.number(&key, ours.iops / qsd.iops);
            let key = format!("{name}_d{depth}_p99_vs_qsd");
            bench.record.number(&key, ours.p99_ns / qsd.p99_ns);
        }
        _ => {
            for (part, ours, qsd) in [
                ("p50", ours.p50_ns, qsd.p50_ns),
                ("p99", ours.p99_ns, qsd.p99_ns),
            ] {
                // The null disk's is the one that the goals name.
                let key = match name {
                    "null" => format!("event_d{depth}_{part}_vs_qsd"),
                    name => format!("{name}_event_d{depth}_{part}_vs_qsd"),
                };
                bench.record.number(&key, ours / qsd);
            }
        }
    }
}

/// 1 to 256 disks on one core.
pub fn vms(bench: &mut Bench) -> Result<()> {
    bench.record.section("Null disks on one core, depth 4 each");
    for count in [1, 4, 16, 64, 256] {
        let row = format!("vms_{count}");
        let disks = Disk::many(Kind::Null, count);
        let results = bench.row(&row, &[Peer::Ours, Peer::Qsd], &disks, |bench, server| {
            bench.load(server, all(server, 4), Mode::Poll)
        })?;
        if let (256, [Some(ours), _]) = (count, results.as_slice()) {
            bench.record.number("served_of_256", ours.served);
        }
    }
    Ok(())
}
