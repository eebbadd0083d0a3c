//! Throughput of an image through the back end, without a guest:
//! `throughput IMAGE [SECONDS PER CASE]`.
//!
//! Overwrites the image. Cases: random 4 KiB writes to clusters that are not there yet (each makes
//! one and writes metadata), 64 KiB writes in order, then random 4 KiB writes and reads of clusters
//! that are there, 16 in flight and 1 in flight.

mod drive;

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use disk_image::{ImageDisk, ImageOptions};
use drive::drive;
use vio::blk::{BlockIo, Op};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let path = PathBuf::from(arguments.next().ok_or("which image?")?);
    let seconds = match arguments.next() {
        Some(text) => text.to_string_lossy().parse()?,
        None => 2.0,
    };
    let mut disk = ImageDisk::open(&path, ImageOptions::default())?;
    let limit = Duration::from_secs_f64(seconds);
    let size = disk.capacity();
    let discard = Op::Discard {
        offset: 0,
        len: size,
    };
    // Operation number, to its first byte.
    let scattered = |at: u64| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (size >> 12)) << 12;
    // Each in a cluster of its own, of 64 KiB.
    let fresh = |at: u64| (at.wrapping_mul(0x9e37_79b1) % (size >> 16)) << 16;
    let in_order = |at: u64| (at << 16) % size;
    for depth in [16, 1] {
        drive(&mut disk, 1, 1, limit, |_| discard)?;
        report("fresh 4 KiB writes", depth, 4096, || {
            drive(&mut disk, depth, size >> 16, limit, |at| {
                write(fresh(at), 4096)
            })
        })?;
        drive(&mut disk, 1, 1, limit, |_| discard)?;
        report("fresh 64 KiB writes", depth, 65536, || {
            drive(&mut disk, depth, size >> 16, limit, |at| {
                write(in_order(at), 65536)
            })
        })?;
        // Everything is there from here on.
        drive(&mut disk, 16, size >> 16, limit * 100, |at| {
            write(in_order(at), 65536)
        })?;
        report("4 KiB writes", depth, 4096, || {
            drive(&mut disk, depth, u64::MAX, limit, |at| {
                write(scattered(at), 4096)
            })
        })?;
        report("4 KiB reads", depth, 4096, || {
            drive(&mut disk, depth, u64::MAX, limit, |at| Op::Read {
                offset: scattered(at),
                len: 4096,
            })
        })?;
        report("64 KiB reads", depth, 65536, || {
            drive(&mut disk, depth, u64::MAX, limit, |at| Op::Read {
                offset: in_order(at),
                len: 65536,
            })
        })?;
    }
    Ok(())
}

fn write(offset: u64, len: u32) -> Op {
    Op::Write {
        offset,
        len,
        durable: false,
    }
}

fn report(
    name: &str,
    depth: u32,
    len: u64,
    case: impl FnOnce() -> Result<u64, Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let count = case()?;
    let rate = count as f64 / start.elapsed().as_secs_f64();
    println!(
        "{name:20} {depth:3} in flight  {rate:9.0}/s  {:7.0} MiB/s",
        rate * len as f64 / f64::from(1 << 20)
    );
    Ok(())
}
