//! This build beside another of ours: a ratio is of two figures of one round, so that what the
//! machine does meanwhile falls on both.

use anyhow::Result;
use report::Measured;

use super::{Bench, Disk, Kind, Peer, Server, all};
use vhost_blk::load::Mode;

/// Fewest rounds.
const ROUNDS: usize = 11;
/// Size of RAM and tmpfs disks, MiB.
const MIB: u32 = 256;

/// Six rows: null, RAM and tmpfs disks at depth 1 and 32, the guest polling. Keys: `ROW_vs_old`, of
/// IOPS.
pub fn pairs(bench: &mut Bench) -> Result<()> {
    let Some(beside) = bench.settings.beside.clone() else {
        return Ok(());
    };
    bench.record.section(
        "This build beside another, 4 KiB random reads, the guest polls: IOPS of this one \
             / of the other",
    );
    println!(
        "{:12} {:>7} {:>7} {:>7} {:>10} {:>10}",
        "", "median", "min", "max", "new", "old"
    );
    let peers = [Peer::Ours, Peer::Beside(beside)];
    for (name, kind) in [
        ("null", Kind::Null),
        ("ram", Kind::Ram(MIB)),
        ("tmpfs", Kind::Tmpfs(MIB)),
    ] {
        for depth in [1, 32] {
            let load =
                |bench: &Bench, server: &Server| bench.load(server, all(server, depth), Mode::Poll);
            let rounds = bench.settings.repetitions.max(ROUNDS);
            let [new, old] = bench.in_turns(&peers, &Disk::many(kind, 1), &load, rounds)?;
            let ratios = new.iter().zip(&old).map(|(new, old)| new / old).collect();
            let of = |runs| Measured::of(runs).expect("there are rounds");
            let (ratio, new, old) = (of(ratios), of(new), of(old));
            println!(
                "{:12} {:>7.3} {:>7.3} {:>7.3} {:>10.0} {:>10.0}",
                format!("{name}_d{depth}"),
                ratio.median,
                ratio.min,
                ratio.max,
                new.median,
                old.median
            );
            for (key, value) in [("", ratio.median), ("_min", ratio.min), ("_max", ratio.max)] {
                bench
                    .record
                    .number(&format!("{name}_d{depth}_vs_old{key}"), value);
            }
        }
    }
    Ok(())
}
