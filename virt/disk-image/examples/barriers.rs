//! Cost of barriers: 4 KiB random writes to a qcow2 image, with and without barriers, that need new
//! clusters or not.
//!
//! `make bench-image`, or `barriers FOLDER`. Each run writes for a second to a fresh image of 64
//! KiB clusters in `bench` in that folder (`target`; so the file system there is measured, and one
//! in memory has nothing to sync), and ends with a flush, which counts. *New clusters*: each write
//! goes to a cluster of its own, the worst case there is. *Overwrites*: to 64 MiB that were written
//! before. The four kinds take turns, five times; the table has medians and the spread of each.

mod drive;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use disk_image::{ImageDisk, ImageOptions};
use drive::drive;
use report::{Host, Measured, Object};
use vio::blk::Op;

const TURNS: usize = 5;
const LIMIT: Duration = Duration::from_secs(1);
const DEPTHS: [u32; 2] = [1, 32];
const CLUSTER: u64 = 64 << 10;
/// Clusters that overwrites go to.
const WRITTEN: u64 = 1 << 10;
/// The disk: more clusters than a run can fill.
const SIZE: u64 = 64 << 30;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let root = std::env::args_os().nth(1).unwrap_or("target".into());
    let root = PathBuf::from(root);
    let folder = root.join("bench");
    std::fs::create_dir_all(&folder)?;
    let path = folder.join(format!("barriers-{}.qcow2", std::process::id()));

    let mut cases = Vec::new();
    for is_new in [true, false] {
        for depth in DEPTHS {
            for barriers in [false, true] {
                cases.push((is_new, depth, barriers, Vec::new()));
            }
        }
    }
    for _ in 0..TURNS {
        for (is_new, depth, barriers, rates) in &mut cases {
            let rate = run(&path, *is_new, *depth, *barriers);
            let _ = std::fs::remove_file(&path);
            rates.push(rate?);
        }
    }

    let host = Host::read();
    let mut object = Object::new(&host, "disk-image");
    println!(
        "{}, {} CPUs, Linux {}, load {}",
        host.model, host.cpus, host.kernel, host.load_average
    );
    println!("4 KiB random writes per second, median of {TURNS} (lowest to highest)");
    for (is_new, depth, barriers, rates) in cases {
        let measured = Measured::of(rates).ok_or("no runs")?;
        let what = if is_new { "new_clusters" } else { "overwrites" };
        let how = if barriers { "barriers" } else { "none" };
        object.measured(&format!("{what}_{depth}_{how}_iops"), &measured, 0);
        println!(
            "{what:13} {depth:3} in flight, barriers {:3}  {:9.0}  ({:.0} to {:.0})",
            if barriers { "on" } else { "off" },
            measured.median,
            measured.min,
            measured.max
        );
    }
    object.write(&root.join("report/disk-image.json"))?;
    Ok(())
}

/// Writes per second of one run.
fn run(path: &Path, is_new: bool, depth: u32, barriers: bool) -> Result<f64> {
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(path)
        .arg(SIZE.to_string())
        .status()
        .map_err(|error| format!("qemu-img (Debian: qemu-utils): {error}"))?;
    if !made.success() {
        return Err("qemu-img made no image".into());
    }
    let options = ImageOptions {
        barriers,
        ..ImageOptions::default()
    };
    let mut disk = ImageDisk::open(path, options)?;
    let write = |offset, len| Op::Write {
        offset,
        len,
        durable: false,
    };
    if !is_new {
        drive(&mut disk, 16, WRITTEN, LIMIT * 60, |at| {
            write(at * CLUSTER, CLUSTER as u32)
        })?;
        drive(&mut disk, 1, 1, LIMIT, |_| Op::Flush)?;
    }
    // A multiplication by an odd number goes through all clusters before it comes back to one.
    let scattered = |at: u64| at.wrapping_mul(0x9e37_79b1);
    let start = Instant::now();
    let count = drive(&mut disk, depth, u64::MAX, LIMIT, |at| match is_new {
        true => write(scattered(at) % (SIZE / CLUSTER) * CLUSTER, 4096),
        false => write(scattered(at) % (WRITTEN * CLUSTER / 4096) * 4096, 4096),
    })?;
    drive(&mut disk, 1, 1, LIMIT, |_| Op::Flush)?;
    Ok(count as f64 / start.elapsed().as_secs_f64())
}
