//! Single disks by kind and depth, and many disks on one core.

use anyhow::Result;

use super::{Aio, Bench, Disk, Kind, Peer, Summary, all};
use crate::load::Mode;
use crate::ring::feature;

/// Size of RAM and tmpfs disks, MiB: more than any cache.
const MIB: u32 = 256;

/// Null, RAM and tmpfs disks.
pub fn disks(bench: &mut Bench) -> Result<()> {
    bench.record.section("One disk, 4 KiB random reads");
    for (name, kind) in [
        ("null", Kind::Null),
        ("ram", Kind::Ram(MIB)),
        ("tmpfs", Kind::Tmpfs(MIB)),
    ] {
        for depth in [1, 32] {
            for (guest, mode) in [("poll", Mode::Poll), ("event", Mode::Event)] {
                let row = format!("{name}_d{depth}_{guest}");
                let peers = [&[Peer::Ours], kind.qsds()].concat();
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
    let peers = [Peer::Ours, Peer::Qsd(Aio::Uring)];
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
    let Some((Some(ours), qsds)) = results.split_first() else {
        return;
    };
    match (name, depth, mode) {
        ("null", 1, Mode::Poll) => {
            if let Some(rtt) = bench.record.get("rtt_ns") {
                bench.record.number("null_d1_p50_rtts", ours.p50_ns / rtt);
            }
        }
        ("null", 32, Mode::Poll) => {
            let kicks = ours.kicks_per_1000;
            bench.record.number("kicks_per_1000_busy", kicks);
        }
        _ => {}
    }
    // The null disk's is the one that the goals name.
    let event = match name {
        "null" => format!("event_d{depth}"),
        name => format!("{name}_event_d{depth}"),
    };
    if mode == Mode::Poll {
        let row = format!("{name}_d{depth}");
        versus_qsd(bench, &row, ours, qsds, &["iops", "p99"]);
    } else {
        versus_qsd(bench, &event, ours, qsds, &["p50", "p99"]);
    }
}

/// Keys `ROW_vs_qsd` of IOPS, `ROW_p50_vs_qsd`, `ROW_p99_vs_qsd` of times: ours / the better of theirs; `ROW_vs_qsd_uring`, ours /
/// the first of theirs, in IOPS.
pub fn versus_qsd(
    bench: &mut Bench,
    row: &str,
    ours: &Summary,
    qsds: &[Option<Summary>],
    figures: &[&str],
) {
    let theirs = |figure: &dyn Fn(&Summary) -> f64| {
        let measured = qsds.iter().flatten().map(figure);
        measured.reduce(f64::min)
    };
    for &figure in figures {
        let (key, ratio) = match figure {
            "iops" => (
                format!("{row}_vs_qsd"),
                theirs(&|qsd| 1.0 / qsd.iops).map(|least| ours.iops * least),
            ),
            "p50" => (
                format!("{row}_p50_vs_qsd"),
                theirs(&|qsd| qsd.p50_ns).map(|least| ours.p50_ns / least),
            ),
            _ => (
                format!("{row}_p99_vs_qsd"),
                theirs(&|qsd| qsd.p99_ns).map(|least| ours.p99_ns / least),
            ),
        };
        if let Some(ratio) = ratio {
            bench.record.number(&key, ratio);
        }
    }
    if let Some(Some(uring)) = qsds.first()
        && figures.contains(&"iops")
    {
        let key = format!("{row}_vs_qsd_uring");
        bench.record.number(&key, ours.iops / uring.iops);
    }
}

/// 1 to 256 disks on one core.
pub fn vms(bench: &mut Bench) -> Result<()> {
    bench.record.section("Null disks on one core, depth 4 each");
    for count in [1, 4, 16, 64, 256] {
        let row = format!("vms_{count}");
        let disks = Disk::many(Kind::Null, count);
        let peers = [Peer::Ours, Peer::Qsd(Aio::Uring)];
        let results = bench.row(&row, &peers, &disks, |bench, server| {
            bench.load(server, all(server, 4), Mode::Poll)
        })?;
        if let (256, [Some(ours), _]) = (count, results.as_slice()) {
            bench.record.number("served_of_256", ours.served);
        }
    }
    Ok(())
}
