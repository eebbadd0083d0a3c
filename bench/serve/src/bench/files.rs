//! Files on a disk: requests through io_uring, or through the page cache as the kernel sees fit.

use anyhow::Result;

use super::disks::versus;
use super::{Bench, Disk, Kind, all};
use vhost_blk::load::{Mix, Mode};

/// Size of the files, MiB.
const MIB: u32 = 256;
/// 4 KiB each.
const READS: Mix = Mix::READS;
const MIXED: Mix = Mix {
    read: 70,
    flush: 0,
    is_sequential: false,
};
/// A flush for each write: its latency is recorded apart.
const FLUSHED: Mix = Mix {
    read: 0,
    flush: 50,
    is_sequential: false,
};

/// The section. Keys: `buffered_d32_vs_qsd`, `mixed_d32_vs_qsd_uring` and so on.
pub fn files(bench: &mut Bench) -> Result<()> {
    let directory = bench.settings.files.clone();
    std::fs::create_dir_all(&directory)?;
    bench.record.section(&format!(
        "One disk in a file in {} ({}), 4 KiB at random, the guest polls",
        directory.display(),
        file_system(&directory)
    ));
    for (name, kind, mix, depth) in [
        ("buffered_d1", Kind::Buffered(MIB), READS, 1),
        ("buffered_d32", Kind::Buffered(MIB), READS, 32),
        ("direct_d1", Kind::Direct(MIB), READS, 1),
        ("direct_d32", Kind::Direct(MIB), READS, 32),
        ("mixed_d32", Kind::Buffered(MIB), MIXED, 32),
        ("mixed_direct_d32", Kind::Direct(MIB), MIXED, 32),
        ("flush_d1", Kind::Buffered(MIB), FLUSHED, 1),
    ] {
        let peers = bench.peers(kind);
        let results = bench.row(name, &peers, &Disk::many(kind, 1), |bench, server| {
            let mut run = bench.load(server, all(server, depth), Mode::Poll);
            run.mix = mix;
            run
        })?;
        if let Some((Some(ours), peers)) = results.split_first() {
            versus(bench, name, ours, peers, &["iops", "p50", "p99", "flush"]);
        }
    }
    Ok(())
}

/// The type of the file system that holds a directory, as the kernel names it.
fn file_system(directory: &std::path::Path) -> String {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let Ok(directory) = directory.canonicalize() else {
        return "unknown".to_owned();
    };
    // The mount on the longest way to it; of two on one place the later.
    let holds = |line: &str| {
        let mut words = line.split(' ').skip(1);
        let (place, kind) = (words.next()?, words.next()?);
        directory
            .starts_with(place)
            .then(|| (place.len(), kind.to_owned()))
    };
    let found = mounts.lines().filter_map(holds).max_by_key(|found| found.0);
    found.map_or_else(|| "unknown".to_owned(), |found| found.1)
}
