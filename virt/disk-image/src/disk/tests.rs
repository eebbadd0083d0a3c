//! Cases that cannot be provoked from outside: panics of the library, and operations that wait when
//! a disk is dropped.

use std::time::{Duration, Instant};

use vio::blk::Outcome;

use super::*;
use crate::ImageFormat;
use crate::image::PANIC;

const SIZE: usize = 1 << 20;

fn disk() -> (tempfile::TempDir, ImageDisk) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.raw");
    std::fs::write(&path, vec![3; SIZE]).expect("written");
    let options = ImageOptions {
        format: ImageFormat::Raw,
        depth: 8,
        ..ImageOptions::default()
    };
    let disk = ImageDisk::open(&path, options).expect("it opens");
    (folder, disk)
}

fn collect(disk: &mut ImageDisk, count: usize) -> Vec<Completion> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut done = Vec::new();
    while done.len() < count {
        assert!(Instant::now() < deadline, "only {done:?} ended");
        disk.poll(&mut done);
        std::thread::yield_now();
    }
    done
}

fn read(disk: &mut ImageDisk, slot: u32, offset: u64) {
    assert!(disk.reserve(slot, 512));
    disk.submit(slot, Op::Read { offset, len: 512 }, &[]);
}

#[test]
fn panic_ends_the_disk_and_nothing_else() {
    let (folder, mut disk) = disk();
    read(&mut disk, 0, 0);
    assert_eq!(collect(&mut disk, 1)[0].outcome, Outcome::Done);
    assert_eq!(disk.buffer(0, 0)[0], 3);
    disk.unreserve(0);

    read(&mut disk, 0, PANIC);
    assert_eq!(collect(&mut disk, 1)[0].outcome, Outcome::Failed(libc::EIO));
    disk.unreserve(0);
    for slot in 0..8 {
        read(&mut disk, slot, 0);
    }
    for completion in collect(&mut disk, 8) {
        assert_eq!(completion.outcome, Outcome::Failed(libc::EIO));
    }
    // Not even what goes past the queue reaches the file.
    let error = disk.image.overwrite(0, &[9; 512]).expect_err("dead");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    drop(disk);
    let bytes = std::fs::read(folder.path().join("disk.raw")).expect("read");
    assert!(bytes == vec![3; SIZE]);
}

#[test]
fn panic_under_the_gate_forbids_writing_before_the_gate_opens() {
    let (_folder, disk) = disk();
    let image = Arc::clone(&disk.image);
    let died = catch_unwind(AssertUnwindSafe(|| {
        image.group().expect("the image").write(PANIC, &[0; 512])
    }));
    assert!(died.is_err());
    assert!(image.overwrite(0, &[9; 512]).is_err());
}

#[test]
fn dropping_a_disk_with_operations_in_flight_ends() {
    for _ in 0..20 {
        let (_folder, mut disk) = disk();
        for slot in 0..8 {
            read(&mut disk, slot, u64::from(slot) * 512);
        }
        disk.flush();
        drop(disk);
    }
}

#[test]
fn buffers_are_bounded_and_an_idle_disk_has_room() {
    let (_folder, mut disk) = disk();
    for slot in 0..4 {
        assert!(disk.reserve(slot, MAX_TRANSFER));
    }
    assert!(!disk.reserve(4, 512), "more than the limit");
    disk.unreserve(0);
    assert!(disk.reserve(4, 512));
    for slot in 1..=4 {
        disk.unreserve(slot);
    }
    assert_eq!(disk.reserved, 0);
    assert!(disk.reserve(0, MAX_TRANSFER));
    assert_eq!(disk.buffer(0, 5).len(), MAX_TRANSFER as usize - 5);
}
