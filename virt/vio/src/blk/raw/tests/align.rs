//! Buffers of a guest that storage cannot take where they lie.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use guest_mem::Iommu;

use super::*;
use crate::QueueDevice;
use crate::blk::request::{STATUS_OK, kind};
use crate::blk::tests::support::{DATA, Guest, SlowControl, SlowDisk, image, raw_disk};

/// New bytes of a sector and the next one.
fn new_bytes() -> Vec<u8> {
    (0..1024).map(|at| (at % 251) as u8 ^ 0x5a).collect()
}

/// Two sectors, in pieces of which address, length, or both are odd; the last one is good.
const BUFFERS: [&[(u64, u32)]; 4] = [
    &[(DATA + 1, 1024)],
    &[(DATA, 100), (DATA + 0x1000, 924)],
    &[(DATA + 3, 513), (DATA + 0x2001, 10), (DATA + 0x3002, 501)],
    &[(DATA, 512), (DATA + 0x4000, 512)],
];

fn get(guest: &Guest, buffers: &[(u64, u32)]) -> Vec<u8> {
    let bytes = |&(at, len): &(u64, u32)| guest.driver.get(at, len as usize);
    buffers.iter().flat_map(bytes).collect()
}

fn put(guest: &Guest, buffers: &[(u64, u32)], bytes: &[u8]) {
    let mut rest = bytes;
    for &(at, len) in buffers {
        let (own, more) = rest.split_at(len as usize);
        guest.driver.put(at, own);
        rest = more;
    }
}

#[test]
fn buffers_that_lie_as_the_storage_cannot_take_them_reach_it_past_the_page_cache() {
    // A file system that checks alignment, if this is one.
    let dir = std::env::current_dir().unwrap();
    let path = dir.join(format!(".vio-align-{}", std::process::id()));
    std::fs::write(&path, image()).unwrap();
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path);
    let cached = File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let Ok(file) = opened else {
        println!("skipped: no O_DIRECT here");
        return;
    };
    let options = RawDiskOptions {
        o_direct: true,
        depth: 32,
        ..Default::default()
    };
    let disk = RawDisk::from_file(file, options).unwrap();
    if disk.alignment() > SECTOR as u32 {
        println!("skipped: blocks of {} bytes here", disk.alignment());
        return;
    }
    let mut guest = Guest::new(Box::new(disk));
    for (sector, buffers) in (8..).step_by(8).zip(BUFFERS) {
        let at = sector as usize * 512;
        let (status, _) = guest.run(kind::IN, sector, &[], buffers);
        assert_eq!(status, STATUS_OK, "{buffers:?}");
        assert_eq!(get(&guest, buffers), image()[at..at + 1024], "{buffers:?}");
        put(&guest, buffers, &new_bytes());
        let (status, _) = guest.run(kind::OUT, sector, buffers, &[]);
        assert_eq!(status, STATUS_OK, "{buffers:?}");
        let mut stored = vec![0; 1024];
        cached.read_exact_at(&mut stored, at as u64).unwrap();
        assert_eq!(stored, new_bytes(), "{buffers:?}");
    }
}

/// A disk that pretends to want addresses like this, whose requests the test lets end.
fn particular(memory: u32) -> (Guest, SlowControl) {
    let (mut disk, _) = raw_disk(Transfer::Direct);
    disk.alignment.memory = Some(memory);
    let (disk, control) = SlowDisk::new(disk).unwrap();
    (Guest::new(Box::new(disk)), control)
}

#[test]
fn only_buffers_that_storage_cannot_take_move_through_private_ones() {
    for (number, buffers) in BUFFERS.iter().enumerate() {
        let (mut guest, control) = particular(512);
        let mut dma = guest.dma();
        guest.request(0, kind::IN, 8, &[], buffers);
        guest.settle(&mut dma);
        let leased = dma.iommu.leases().len();
        let is_good = number == BUFFERS.len() - 1;
        assert_eq!(leased != 0, is_good, "{buffers:?}");
        control.set_open(true);
        guest.wait_used(&mut dma);
        assert_eq!(guest.status(0), STATUS_OK);
        assert_eq!(get(&guest, buffers), image()[4096..5120]);
    }
}

#[test]
fn a_request_waits_for_private_buffers_that_others_have() {
    let (mut guest, control) = particular(4096);
    let mut dma = guest.dma();
    // Of 8 MiB there are two of the three.
    let len = 3 << 20;
    for slot in 0..3 {
        guest.request(
            slot,
            kind::IN,
            slot,
            &[],
            &[(DATA + 1 + slot * (4 << 20), len)],
        );
    }
    guest.settle(&mut dma);
    assert_eq!((guest.blk.in_flight(), control.held()), (2, 2));
    control.set_open(true);
    for _ in 0..3 {
        guest.wait_used(&mut dma);
    }
    for slot in 0..3 {
        let at = slot as usize * 512;
        let bytes = guest.driver.get(DATA + 1 + slot * (4 << 20), len as usize);
        assert_eq!(guest.status(slot), STATUS_OK);
        assert!(bytes == image()[at..at + len as usize], "request {slot}");
    }
    assert_eq!(dma.iommu.leases().len(), 0);
}
