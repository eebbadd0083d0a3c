//! Images made by qemu-img, used through the back end, and looked at by QEMU's tools afterwards.

mod support;

use std::path::Path;

use disk_image::ImageOptions;
use seeded::Random;
use support::{Driver, check, compress, contents, create, folder, follow, has_qemu, options, run};
use vio::blk::{BlockIo, Op, Outcome};

/// Bytes of the disks here.
const SIZE: u64 = 24 << 20;

/// Random operations, several in flight on ranges that do not touch, against a model.
fn exercise(driver: &mut Driver, model: &mut [u8], seed: u64, rounds: usize) {
    let mut random = Random::new(seed);
    for _ in 0..rounds {
        // Each of the lanes has a part of the disk of its own.
        let lanes = 1 + random.below(8);
        let lane_len = model.len() as u64 / lanes / 512 * 512;
        let (mut flying, mut discarded) = (Vec::new(), Vec::new());
        for lane in 0..lanes {
            let start = lane * lane_len + random.below(lane_len / 512) * 512;
            let most = (lane_len - (start - lane * lane_len)).min(300 << 10);
            let len = (1 + random.below(most / 512)) * 512;
            let (offset, range) = (start, start as usize..(start + len) as usize);
            let mut data = Vec::new();
            let op = match random.below(10) {
                0 => Op::Discard { offset, len },
                1 | 2 => Op::WriteZeroes {
                    offset,
                    len,
                    unmap: random.below(2) == 0,
                },
                3 => Op::Flush,
                4 | 5 => Op::Read {
                    offset,
                    len: len as u32,
                },
                _ => {
                    data = vec![0; len as usize];
                    random.fill(&mut data);
                    Op::Write {
                        offset,
                        len: len as u32,
                        durable: random.below(50) == 0,
                    }
                }
            };
            flying.push((driver.start(op, &data), op, data, range));
        }
        while !flying.is_empty() {
            for (completion, read) in driver.wait() {
                assert_eq!(completion.outcome, Outcome::Done);
                let at = flying
                    .iter()
                    .position(|(slot, ..)| *slot == completion.slot);
                let (_, op, data, range) = flying.swap_remove(at.expect("in flight"));
                match op {
                    Op::Read { .. } => assert!(read == model[range], "read something else"),
                    Op::Write { .. } => model[range].copy_from_slice(&data),
                    Op::WriteZeroes { .. } => model[range].fill(0),
                    Op::Discard { .. } | Op::Flush => {}
                }
                if let Op::Discard { offset, len } = op {
                    discarded.push((offset, len));
                }
            }
        }
        for (offset, len) in discarded {
            // Anything may be there now; from now on it is this.
            let now = driver.read(offset, len as u32).expect("read");
            model[offset as usize..(offset + len) as usize].copy_from_slice(&now);
        }
    }
}

fn verify(driver: &mut Driver, model: &[u8]) {
    for (at, expected) in model.chunks(1 << 20).enumerate() {
        let read = driver.read((at as u64) << 20, expected.len() as u32);
        assert!(
            read.expect("read") == expected,
            "contents differ in MiB {at}"
        );
    }
}

fn random_operations_on(image_options: &str, seed: u64) {
    random_operations(image_options, SIZE, seed);
}

fn random_operations(image_options: &str, size: u64, seed: u64) {
    if !has_qemu() {
        return;
    }
    let (_folder, path) = folder();
    create(&path, image_options, size);
    let mut model = vec![0; size as usize];
    for seed in [seed, seed + 100] {
        let mut driver = Driver::open(&path, options()).expect("it opens");
        assert_eq!(driver.disk.capacity(), size);
        verify(&mut driver, &model);
        exercise(&mut driver, &mut model, seed, 40);
        verify(&mut driver, &model);
        drop(driver);
        check(&path, false);
        assert!(contents(&path) == model, "QEMU reads something else");
    }
}

#[test]
fn default_image_holds_what_was_written() {
    random_operations_on("", 1);
}

#[test]
fn smallest_clusters_hold_what_was_written() {
    random_operations_on("cluster_size=512", 2);
}

#[test]
fn largest_clusters_hold_what_was_written() {
    random_operations_on("cluster_size=2M", 3);
}

#[test]
fn one_bit_refcounts_hold_what_was_written() {
    random_operations_on("cluster_size=4k,refcount_bits=1", 4);
}

#[test]
fn wide_refcounts_hold_what_was_written() {
    random_operations_on("cluster_size=1k,refcount_bits=64", 5);
}

#[test]
fn version_2_holds_what_was_written() {
    random_operations_on("compat=0.10,cluster_size=16k", 6);
}

#[test]
fn preallocated_image_holds_what_was_written() {
    random_operations_on("preallocation=metadata", 7);
}

#[test]
fn lazy_refcounts_are_kept_up_to_date() {
    random_operations_on("lazy_refcounts=on", 8);
}

#[test]
fn disk_that_ends_inside_a_cluster_holds_what_was_written() {
    random_operations("", (3 << 20) + 512, 9);
    random_operations("cluster_size=2M", (5 << 20) + 1536, 10);
}

/// A raw base, a compressed qcow2 on it, and an overlay that is written to.
#[test]
fn chain_with_compressed_clusters_holds_what_was_written() {
    if !has_qemu() {
        return;
    }
    let (folder, path) = folder();
    let raw = folder.path().join("base.raw");
    let middle = folder.path().join("middle.qcow2");
    let mut model = vec![0; SIZE as usize];
    // Compressible, and the last quarter empty.
    for (at, byte) in model[..SIZE as usize / 4 * 3].iter_mut().enumerate() {
        *byte = (at >> 9) as u8;
    }
    std::fs::write(&raw, &model).expect("written");
    compress(&raw, "", &middle);
    // Compressed clusters in the image that is written to.
    std::fs::copy(&middle, &path).expect("copied");
    let mut own = model.clone();
    let mut driver = Driver::open(&path, options()).expect("it opens");
    verify(&mut driver, &own);
    exercise(&mut driver, &mut own, 11, 80);
    verify(&mut driver, &own);
    drop(driver);
    check(&path, false);
    assert!(contents(&path) == own, "QEMU reads something else");
    std::fs::remove_file(&path).expect("removed");

    // And behind it, by a relative name.
    run(&format!(
        "qemu-img create -q -f qcow2 -b middle.qcow2 -F qcow2 {}",
        path.display()
    ));
    let mut driver = Driver::open(&path, follow()).expect("it opens");
    verify(&mut driver, &model);
    exercise(&mut driver, &mut model, 12, 80);
    verify(&mut driver, &model);
    drop(driver);
    check(&path, false);
    assert!(contents(&path) == model, "QEMU reads something else");
}

#[test]
fn snapshot_stays_as_it_was() {
    if !has_qemu() {
        return;
    }
    let (folder, path) = folder();
    create(&path, "cluster_size=4k", SIZE);
    let mut model = vec![0; SIZE as usize];
    let mut driver = Driver::open(&path, options()).expect("it opens");
    exercise(&mut driver, &mut model, 21, 40);
    drop(driver);
    run(&format!("qemu-img snapshot -c before {}", path.display()));
    let before = model.clone();
    let mut driver = Driver::open(&path, options()).expect("it opens");
    verify(&mut driver, &model);
    exercise(&mut driver, &mut model, 22, 60);
    drop(driver);
    check(&path, false);
    assert!(contents(&path) == model, "QEMU reads something else");
    let raw = folder.path().join("before.raw");
    run(&format!(
        "qemu-img convert -O raw -l before {} {}",
        path.display(),
        raw.display()
    ));
    assert!(
        std::fs::read(raw).expect("read") == before,
        "the snapshot changed"
    );
}

#[test]
fn without_barriers_it_holds_what_was_written() {
    if !has_qemu() {
        return;
    }
    let (_folder, path) = folder();
    create(&path, "", SIZE);
    let mut model = vec![0; SIZE as usize];
    let fast = ImageOptions {
        barriers: false,
        ..options()
    };
    let mut driver = Driver::open(&path, fast).expect("it opens");
    exercise(&mut driver, &mut model, 31, 20);
    drop(driver);
    check(&path, false);
    assert!(contents(&path) == model, "QEMU reads something else");
}

/// Space that was discarded is used again, and given back to the host.
#[test]
fn discarded_clusters_leave_the_file() {
    use std::os::unix::fs::MetadataExt;
    if !has_qemu() {
        return;
    }
    let (_folder, path) = folder();
    create(&path, "", SIZE);
    let mut driver = Driver::open(&path, options()).expect("it opens");
    let used = || std::fs::metadata(&path).expect("it exists");
    let mut most = 0;
    for round in 0..8 {
        for mib in 0..SIZE >> 20 {
            driver
                .write(mib << 20, &[round + 1; 1 << 20])
                .expect("written");
        }
        most = most.max(used().len());
        let discard = Op::Discard {
            offset: 0,
            len: SIZE,
        };
        driver.act(discard, &[]).expect("discarded");
        assert_eq!(driver.read(0, 1 << 20), Ok(vec![0; 1 << 20]));
        assert!(
            used().blocks() * 512 < 2 << 20,
            "{} blocks",
            used().blocks()
        );
    }
    assert!(most < SIZE + (2 << 20), "the file grew to {most} bytes");
    drop(driver);
    check(&path, false);
}

/// The child of the test below, under a limit on the length of files.
#[test]
#[ignore = "the child of the test below"]
fn writer_without_space() {
    let Ok(path) = std::env::var("DISK_IMAGE_WRITER") else {
        return;
    };
    let mut driver = Driver::open(Path::new(&path), options()).expect("it opens");
    let block = |at: u64| vec![at as u8 + 1; 64 << 10];
    let mut full = 0;
    let errno = loop {
        match driver.write(full << 16, &block(full)) {
            Ok(()) => full += 1,
            Err(errno) => break errno,
        }
    };
    assert_eq!(errno, libc::EFBIG);
    assert!(full > 40, "{full}");
    // What is there stays, and may be written.
    driver.flush().expect("flushed");
    driver.write(0, &block(9)).expect("written");
    driver.write(0, &block(0)).expect("written");
    for at in 0..full {
        assert!(
            driver.read(at << 16, 64 << 10) == Ok(block(at)),
            "block {at}"
        );
    }
    // Space that is discarded is free for other clusters.
    let discard = Op::Discard {
        offset: 0,
        len: 4 << 16,
    };
    driver.act(discard, &[]).expect("discarded");
    for at in full..full + 3 {
        driver
            .write(at << 16, &block(at))
            .expect("there is space again");
    }
    drop(driver);
    println!("full at {full}");
}

#[test]
fn want_of_space_is_an_error_and_no_harm() {
    if !has_qemu() {
        return;
    }
    let (_folder, path) = folder();
    create(&path, "", SIZE);
    let output = std::process::Command::new("bash")
        // In KiB. The signal that comes with the error would end the process.
        .args(["-c", "trap '' XFSZ; ulimit -f 4096; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().expect("this program"))
        .args([
            "--exact",
            "writer_without_space",
            "--ignored",
            "--nocapture",
        ])
        .env("DISK_IMAGE_WRITER", &path)
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let full: usize = text
        .split("full at ")
        .nth(1)
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|number| number.parse().ok())
        .expect("it said so");
    check(&path, false);
    let contents = contents(&path);
    for at in 4..full + 3 {
        let block = &contents[at << 16..][..64 << 10];
        assert!(block.iter().all(|&byte| byte == at as u8 + 1), "block {at}");
    }
}
