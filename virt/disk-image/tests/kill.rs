//! A writer killed at any moment loses no write that was reported done, and leaves an image that
//! QEMU finds sound.
//!
//! The writer is this program again. It reports through a pipe the writes that it starts and those
//! that have ended. The parent kills it after a random time and compares. `DISK_IMAGE_KILLS=1000`
//! kills that often.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use disk_image::ImageOptions;
use seeded::Random;
use support::{Driver, check, compress, contents, create, folder, follow, has_qemu};
use vio::blk::{Op, Outcome};

const SIZE: u64 = 64 << 20;
/// Unit of the writes; each is 1 to 24 of them.
const BLOCK: u64 = 4096;
/// Unit of atomic writes, in bytes, whatever the size of a cluster.
const SECTOR: u64 = 512;

/// A sector says where it is and which generation wrote it; generation 0 was never written.
fn fill(sector: &mut [u8], number: u64, generation: u64) {
    for word in sector.chunks_mut(16) {
        word[..8].copy_from_slice(&number.to_le_bytes());
        word[8..].copy_from_slice(&generation.to_le_bytes());
    }
}

/// The writer: for ever. Lines: `s first count generation` before it starts one, `d generation`
/// after it ended. (`x` for a discard, `z` for zeroes, `f` for a flush).
#[test]
#[ignore = "the child of the test below"]
fn writer() {
    let Ok(path) = std::env::var("DISK_IMAGE_WRITER") else {
        return;
    };
    let seed: u64 = std::env::var("DISK_IMAGE_SEED")
        .expect("set with the path")
        .parse()
        .expect("a number");
    // The death of the process needs no barriers; every other writer has them nevertheless.
    let options = ImageOptions {
        barriers: seed.is_multiple_of(2),
        ..follow()
    };
    let mut driver = Driver::open(Path::new(&path), options).expect("it opens");
    let mut random = Random::new(seed);
    let mut generation = seed << 32;
    let mut flying: Vec<(u32, u64, u64, u64)> = Vec::new();
    let out = std::io::stdout();
    loop {
        while flying.len() < 8 {
            let count = 1 + random.below(24);
            let first = random.below(SIZE / BLOCK - count);
            if flying
                .iter()
                .any(|(_, other, n, _)| first < other + n && *other < first + count)
            {
                continue;
            }
            generation += 1;
            let (offset, len) = (first * BLOCK, count * BLOCK);
            let kind = random.below(12);
            let mut data = Vec::new();
            let op = match kind {
                0 => Op::Discard { offset, len },
                1 => Op::WriteZeroes {
                    offset,
                    len,
                    unmap: random.below(2) == 0,
                },
                2 => Op::Flush,
                _ => {
                    data = vec![0; len as usize];
                    for (at, sector) in data.chunks_mut(SECTOR as usize).enumerate() {
                        fill(sector, offset / SECTOR + at as u64, generation);
                    }
                    Op::Write {
                        offset,
                        len: len as u32,
                        durable: false,
                    }
                }
            };
            let letter = match kind {
                0 => 'x',
                1 => 'z',
                2 => 'f',
                _ => 's',
            };
            writeln!(out.lock(), "{letter} {first} {count} {generation}")
                .expect("the parent reads");
            let slot = driver.start(op, &data);
            flying.push((slot, first, count, generation));
        }
        for (completion, _) in driver.wait() {
            assert_eq!(completion.outcome, Outcome::Done);
            let at = flying
                .iter()
                .position(|(slot, ..)| *slot == completion.slot);
            let (.., generation) = flying.swap_remove(at.expect("in flight"));
            writeln!(out.lock(), "d {generation}").expect("the parent reads");
        }
    }
}

/// Generations that a sector may hold: the last write that ended, or any started after it.
#[derive(Clone, Debug, Default)]
struct AllowedContent {
    may_be: Vec<u64>,
}

fn sectors(first: u64, count: u64) -> std::ops::Range<usize> {
    let per_block = (BLOCK / SECTOR) as usize;
    first as usize * per_block..(first + count) as usize * per_block
}

/// One life of a writer.
fn live_and_die(path: &Path, seed: u64, life: Duration, known: &mut [AllowedContent]) -> usize {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "writer", "--ignored", "--nocapture"])
        .env("DISK_IMAGE_WRITER", path)
        .env("DISK_IMAGE_SEED", seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let out = child.stdout.take().expect("piped");
    let killer = std::thread::spawn(move || {
        std::thread::sleep(life);
        child.kill().expect("it lives");
        child.wait().expect("it dies")
    });
    let mut started = std::collections::HashMap::new();
    let mut ended = 0;
    let mut lines = BufReader::new(out);
    let mut line = String::new();
    while lines.read_line(&mut line).expect("text") != 0 {
        // A line that the kill cut short is ignored.
        if line.ends_with('\n') {
            let mut words = line.split_whitespace();
            let letter = words.next().unwrap_or_default().to_owned();
            let numbers: Vec<u64> = words.filter_map(|word| word.parse().ok()).collect();
            match (letter.as_str(), &numbers[..]) {
                ("s" | "z" | "x", &[first, count, generation]) => {
                    let value = if letter == "s" { generation } else { 0 };
                    // What is discarded may be zero from now on, or what it was.
                    if letter != "x" {
                        started.insert(generation, (first, count, value));
                    }
                    for sector in &mut known[sectors(first, count)] {
                        sector.may_be.push(value);
                    }
                }
                ("d", &[generation]) => {
                    if let Some((first, count, value)) = started.remove(&generation) {
                        ended += 1;
                        for sector in &mut known[sectors(first, count)] {
                            sector.may_be = vec![value];
                        }
                    }
                }
                _ => {}
            }
        }
        line.clear();
    }
    let status = killer.join().expect("the killer");
    assert!(
        std::os::unix::process::ExitStatusExt::signal(&status) == Some(libc::SIGKILL),
        "the writer ended by itself: {status:?}"
    );
    ended
}

fn verify(contents: &[u8], known: &mut [AllowedContent]) {
    let mut expected = vec![0; SECTOR as usize];
    for (number, (sector, known)) in contents.chunks(SECTOR as usize).zip(known).enumerate() {
        let found = known.may_be.iter().find(|&&generation| {
            if generation == 0 {
                expected.fill(0);
            } else {
                fill(&mut expected, number as u64, generation);
            }
            expected == sector
        });
        let found = *found.unwrap_or_else(|| {
            panic!(
                "sector {number} holds {:?}, and {:?} was written",
                &sector[..16],
                known.may_be
            )
        });
        known.may_be = vec![found];
    }
}

/// `initial`: the generation that all sectors are of.
fn kill_often(path: &Path, seed: u64, initial: u64) {
    let kills: u64 = std::env::var("DISK_IMAGE_KILLS")
        .ok()
        .and_then(|kills| kills.parse().ok())
        .unwrap_or(20);
    let mut known = vec![
        AllowedContent {
            may_be: vec![initial]
        };
        (SIZE / SECTOR) as usize
    ];
    let mut random = Random::new(seed);
    let mut ended = 0;
    for life in 0..kills.div_ceil(3) {
        let millis = 20 + random.below(250);
        ended += live_and_die(path, seed + life, Duration::from_millis(millis), &mut known);
        check(path, true);
        verify(&contents(path), &mut known);
    }
    assert!(ended > 100, "the writers did next to nothing: {ended}");
    // And we open what they left.
    let mut driver = Driver::open(path, follow()).expect("it opens");
    driver.write(0, &[7; 512]).expect("written");
    drop(driver);
    check(path, true);
}

#[test]
fn killed_writer_loses_nothing() {
    if !has_qemu() {
        return;
    }
    let (_folder, path) = folder();
    create(&path, "", SIZE);
    kill_often(&path, 1, 0);
}

/// Small clusters: many tables are made, so a kill between their writes is likely.
#[test]
fn killed_writer_of_small_clusters_loses_nothing() {
    if !has_qemu() {
        return;
    }
    let (_folder, path) = folder();
    create(&path, "cluster_size=512,refcount_bits=64", SIZE);
    kill_often(&path, 1000, 0);
}

/// Writes replace clusters, so that some are freed and used again.
#[test]
fn killed_writer_of_compressed_clusters_loses_nothing() {
    if !has_qemu() {
        return;
    }
    let (folder, path) = folder();
    let raw = folder.path().join("raw");
    let mut bytes = vec![0; SIZE as usize];
    for (number, sector) in bytes.chunks_mut(SECTOR as usize).enumerate() {
        fill(sector, number as u64, 5);
    }
    std::fs::write(&raw, bytes).expect("written");
    compress(&raw, "cluster_size=16k", &path);
    kill_often(&path, 2000, 5);
}
