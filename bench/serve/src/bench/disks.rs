//! Single disks by kind and depth, and many disks on one core.

use anyhow::Result;

use super::{Aio, Bench, Disk, Kind, Peer, Summary, all};
use vhost_blk::load::Mode;
use vhost_blk::ring::feature;

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
                let peers = bench.peers(kind);
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
    let Some((Some(ours), peers)) = results.split_first() else {
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
        versus(bench, &row, ours, peers, &["iops", "p99"]);
    } else {
        versus(bench, &event, ours, peers, &["p50", "p99"]);
    }
}

/// Keys `ROW_vs_qsd` of IOPS, `ROW_p50_vs_qsd`, `ROW_p99_vs_qsd` of times: ours / the better of
/// qemu-storage-daemon's; likewise `…_vs_spdk`, and `ROW_vs_qsd_uring` of IOPS. `peers` as
/// [`Bench::peers`] has them, without ours.
pub fn versus(
    bench: &mut Bench,
    row: &str,
    ours: &Summary,
    peers: &[Option<Summary>],
    figures: &[&str],
) {
    let (spdk, qsds) = match peers {
        [qsds @ .., spdk] if bench.settings.spdk.is_some() => (spdk.as_slice(), qsds),
        qsds => (&[][..], qsds),
    };
    let (spdk, qsds): (Vec<_>, Vec<_>) = (spdk.iter().collect(), qsds.iter().flatten().collect());
    for (peer, theirs) in [("qsd", &qsds), ("spdk", &spdk)] {
        for &figure in figures {
            let (part, more_is_better, of): (_, _, fn(&Summary) -> f64) = match figure {
                "iops" => ("", true, |summary| summary.iops),
                "p50" => ("_p50", false, |summary| summary.p50_ns),
                "flush" => ("_flush_p50", false, |summary| summary.flush_p50_ns),
                _ => ("_p99", false, |summary| summary.p99_ns),
            };
            let better = if more_is_better { f64::max } else { f64::min };
            let best = theirs.iter().map(|summary| of(summary)).reduce(better);
            if let Some(best) = best.filter(|best| best.is_finite()) {
                let key = format!("{row}{part}_vs_{peer}");
                bench.record.number(&key, of(ours) / best);
            }
        }
    }
    if let Some(Some(uring)) = peers.first()
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
        let peers = bench.peers(Kind::Null);
        let results = bench.row(&row, &peers, &disks, |bench, server| {
            bench.load(server, all(server, 4), Mode::Poll)
        })?;
        if let (256, [Some(ours), ..]) = (count, results.as_slice()) {
            bench.record.number("served_of_256", ours.served);
        }
    }
    Ok(())
}
