//! Fairness: equal disks under unequal loads, weights, quiet disks beside a loud one.

use anyhow::Result;

use super::{Aio, Bench, Disk, Kind, Peer, Server, all};
use vhost_blk::load::{Mode, VmSpec};

/// All at depth 32, two at depth 128; every other disk makes requests of 64 KiB.
fn unequal(server: &Server) -> Vec<VmSpec> {
    let disk = |(at, socket): (usize, &std::path::PathBuf)| {
        let depth = if at < 2 { 128 } else { 32 };
        let block = if at % 2 == 0 { 4096 } else { 65536 };
        VmSpec::closed(socket.clone(), depth, block)
    };
    server.sockets().iter().enumerate().map(disk).collect()
}

/// The section.
pub fn fair(bench: &mut Bench) -> Result<()> {
    bench
        .record
        .section("Fairness (Jain's index over served cost / weight; RAM disks)");
    for (count, mib) in [(16, 32), (64, 8)] {
        let row = format!("fair_{count}");
        let disks = Disk::many(Kind::Ram(mib), count);
        let results = bench.row(
            &row,
            &[Peer::Ours, Peer::Qsd(Aio::Uring)],
            &disks,
            |bench, server| bench.load(server, unequal(server), Mode::Poll),
        )?;
        if let [Some(ours), _] = results.as_slice() {
            bench.record.number(&format!("jain_{count}"), ours.jain);
        }
    }
    weights(bench)?;
    for (name, kind) in [("null", Kind::Null), ("ram", Kind::Ram(32))] {
        quiet(bench, name, kind)?;
    }
    Ok(())
}

const WEIGHTS: [u32; 6] = [1, 1, 2, 2, 4, 4];

fn weights(bench: &mut Bench) -> Result<()> {
    let kind = Kind::Ram(32);
    let disks = WEIGHTS.map(|weight| Disk { kind, weight });
    let mut worst = Vec::new();
    for _ in 0..bench.settings.repetitions {
        let report = bench.once(&Peer::Ours, &disks, &|bench: &Bench, server: &Server| {
            let mut vms = all(server, 64);
            for (vm, weight) in vms.iter_mut().zip(WEIGHTS) {
                vm.weight = weight.into();
            }
            bench.load(server, vms, Mode::Poll)
        });
        match report {
            Ok(report) => {
                let shares: Vec<_> = report
                    .vms
                    .iter()
                    .map(|vm| vm.cost_per_s / vm.weight)
                    .collect();
                let mean = shares.iter().sum::<f64>() / shares.len() as f64;
                let error = shares
                    .iter()
                    .map(|share| (share / mean - 1.0).abs())
                    .fold(0.0, f64::max);
                worst.push(error * 100.0);
            }
            Err(error) => {
                bench.record.failed_row("weights", &Peer::Ours, &error);
                return Ok(());
            }
        }
    }
    let error = report::median(worst);
    bench.record.number("weights_error_percent", error);
    bench.record.line(&format!(
        "weights 1:1:2:2:4:4: at most {error:.1} % from the share"
    ));
    Ok(())
}

/// Fifteen disks at depth 1, alone and beside one at depth 128.
fn quiet(bench: &mut Bench, name: &str, kind: Kind) -> Result<()> {
    let disks = Disk::many(kind, 16);
    let peers = [Peer::Ours, Peer::Qsd(Aio::Uring)];
    let alone = bench.row(
        &format!("quiet_{name}_alone"),
        &peers,
        &disks,
        |bench, server| {
            let mut vms = all(server, 1);
            vms.truncate(15);
            bench.load(server, vms, Mode::Poll)
        },
    )?;
    let beside = bench.row(
        &format!("quiet_{name}_beside_loud"),
        &peers,
        &disks,
        |bench, server| {
            let mut vms = all(server, 1);
            if let Some(loud) = vms.last_mut() {
                (loud.depth, loud.group) = (128, 1);
            }
            bench.load(server, vms, Mode::Poll)
        },
    )?;
    for ((peer, alone), beside) in peers.iter().zip(alone).zip(beside) {
        let (Some(alone), Some(beside)) = (alone, beside) else {
            continue;
        };
        let (Some(before), Some(after)) = (alone.group_p99_ns.first(), beside.group_p99_ns.first())
        else {
            continue;
        };
        let ratio = after / before;
        bench.record.line(&format!(
            "    quiet disks of {}: p99 {:.1} µs alone, {:.1} µs beside the loud one: {ratio:.2} \
             times",
            peer.name(),
            before / 1e3,
            after / 1e3
        ));
        let suffix = if !peer.is_ours() { "_qsd" } else { "" };
        bench
            .record
            .number(&format!("quiet_p99_vs_alone_{name}{suffix}"), ratio);
    }
    Ok(())
}
