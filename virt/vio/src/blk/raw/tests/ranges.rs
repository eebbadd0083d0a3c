//! Discards and write-zeroes where the file system has no call for them, and misaligned transfers
//! past the page cache.

use std::os::unix::fs::FileExt;

use super::*;
use crate::blk::range::ZERO_PIECE;

/// A file of this many bytes that are not zero, without fallocate, and a disk on it.
fn without_fallocate(fs: &HeldFs, name: &str, len: usize) -> (RawDisk, Gate) {
    let gate = fs.create(name, 0);
    gate.contents().write_all_at(&vec![7; len], 0).unwrap();
    let options = RawDiskOptions {
        depth: 16,
        ..Default::default()
    };
    let disk = RawDisk::open(&fs.path(name), options).unwrap();
    gate.refuse(Kind::Allocate, libc::EOPNOTSUPP);
    (disk, gate)
}

fn zero(offset: u64, len: u64) -> Op {
    Op::WriteZeroes {
        offset,
        len,
        unmap: true,
    }
}

fn contents(gate: &Gate) -> Vec<u8> {
    let mut bytes = vec![0; gate.contents().metadata().unwrap().len() as usize];
    gate.contents().read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn a_range_for_which_there_is_no_call_is_written() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut disk, gate) = without_fallocate(&fs, "disk", 5 << 20);
    let (offset, len) = (512, (4 << 20) + 1024);
    assert_eq!(outcome(&mut disk, zero(offset, len)), Outcome::Done);
    let mut expected = vec![7; 5 << 20];
    expected[offset as usize..][..len as usize].fill(0);
    assert!(contents(&gate) == expected);
    // Two calls, and none after that.
    let asked = gate.count(Kind::Allocate);
    assert_eq!(outcome(&mut disk, zero(0, 512)), Outcome::Done);
    assert_eq!(gate.count(Kind::Allocate), asked);
}

#[test]
fn a_discard_that_the_file_refuses_succeeds_and_changes_nothing() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut disk, gate) = without_fallocate(&fs, "disk", 1 << 20);
    let op = Op::Discard {
        offset: 0,
        len: 1 << 20,
    };
    assert_eq!(outcome(&mut disk, op), Outcome::Done);
    assert!(contents(&gate) == vec![7; 1 << 20]);
}

/// UNSUPP would say that nothing was done.
#[test]
fn zeroes_that_fail_half_way_are_an_error() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    for errno in [libc::EIO, libc::ENOSPC, libc::EOPNOTSUPP] {
        let name = format!("disk{errno}");
        let (mut disk, gate) = without_fallocate(&fs, &name, 4 << 20);
        gate.hold(&[Kind::Write]);
        disk.submit(0, zero(0, 4 << 20), &[]);
        disk.flush();
        // The calls are refused, and the first writes come.
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut done = Vec::new();
        while gate.held() == 0 {
            disk.poll(&mut done);
            assert!(done.is_empty() && Instant::now() < deadline);
        }
        gate.let_through(1);
        gate.refuse(Kind::Write, errno);
        gate.release();
        let expected = if errno == libc::ENOSPC {
            errno
        } else {
            libc::EIO
        };
        assert_eq!(wait(&mut disk).outcome, Outcome::Failed(expected));
        assert!(
            contents(&gate).ends_with(&[7; 4096]),
            "the rest is not written"
        );
    }
}

#[test]
fn few_zeroes_are_in_flight_and_a_short_request_does_not_wait_for_a_long_one() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    const LONG: u64 = 12 << 20;
    let (mut disk, gate) = without_fallocate(&fs, "disk", 13 << 20);
    assert_eq!(outcome(&mut disk, zero(0, 512)), Outcome::Done);
    disk.submit(0, zero(0, LONG), &[]);
    for slot in 1..8 {
        disk.submit(slot, zero(LONG + u64::from(slot) * 512, 512), &[]);
    }
    assert_eq!(disk.in_flight, 8);
    let mut order = Vec::new();
    while order.len() < 8 {
        order.push(wait_any(&mut disk).slot);
    }
    assert_eq!(order.last(), Some(&0), "{order:?}");
    assert!(contents(&gate)[..LONG as usize] == vec![0; LONG as usize]);
}

/// As `wait`, where more than one may have ended.
fn wait_any(disk: &mut RawDisk) -> Completion {
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut done = Vec::new();
    while done.is_empty() {
        disk.poll(&mut done);
        assert!(Instant::now() < deadline, "no completion");
    }
    let first = done.remove(0);
    // Reported again by the next poll.
    disk.early.splice(0..0, done);
    first
}

#[test]
fn a_request_is_cancelled_between_two_pieces_and_one_that_waits_at_once() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut disk, gate) = without_fallocate(&fs, "disk", 8 << 20);
    assert_eq!(outcome(&mut disk, zero(0, 512)), Outcome::Done);
    gate.hold(&[Kind::Write]);
    for slot in 0..4 {
        disk.submit(slot, zero(u64::from(slot) << 21, 2 << 20), &[]);
    }
    disk.flush();
    gate.wait_until_held(1);
    // Two are written, two wait for them; the kernel is in one of the first.
    disk.cancel(3);
    let stopped = Outcome::Failed(libc::ECANCELED);
    let third = wait(&mut disk);
    assert_eq!((third.slot, third.outcome), (3, stopped));
    disk.cancel(0);
    disk.cancel(1);
    disk.cancel(2);
    gate.release();
    let mut ended = Vec::new();
    while ended.len() < 3 {
        let Completion { slot, outcome } = wait_any(&mut disk);
        if outcome != Outcome::NotCancellable {
            assert_eq!(outcome, stopped, "slot {slot}");
            ended.push(slot);
        }
    }
    assert!(ended.contains(&2) && disk.in_flight == 0);
    let written = contents(&gate);
    for slot in 0..4 {
        let second = (slot << 21) + ZERO_PIECE as usize;
        assert_eq!(written[second], 7, "no second piece of slot {slot}");
    }
    // What was cancelled has given its turn back.
    assert_eq!(outcome(&mut disk, zero(0, 8 << 20)), Outcome::Done);
    assert!(contents(&gate) == vec![0; 8 << 20]);
}

/// A disk past the page cache that takes blocks of 4096 bytes only, of bytes that differ by sector;
/// and its file.
fn with_large_blocks(fs: &HeldFs) -> (RawDisk, Gate) {
    let gate = fs.create("disk", 0);
    let bytes: Vec<u8> = (0..1 << 20).map(|at| (at / 512) as u8).collect();
    gate.contents().write_all_at(&bytes, 0).unwrap();
    let options = RawDiskOptions {
        o_direct: true,
        depth: 16,
        transfer: Transfer::Bounce,
        ..Default::default()
    };
    let mut disk = RawDisk::open(&fs.path("disk"), options).unwrap();
    disk.alignment.block = 4096;
    disk.support.data_block = 4096;
    (disk, gate)
}

#[test]
fn misaligned_writes_of_one_block_beside_each_other_lose_nothing() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut disk, gate) = with_large_blocks(&fs);
    gate.refuse(Kind::Allocate, libc::EOPNOTSUPP);
    let mut expected = contents(&gate);
    // Sixteen sectors of two blocks: some are written, some zeroed, each by a request of its own,
    // all at once.
    for slot in 0..16u32 {
        let offset = u64::from(slot) * 512;
        let own = &mut expected[offset as usize..][..512];
        if slot.is_multiple_of(3) {
            disk.submit(slot, zero(offset, 512), &[]);
            own.fill(0);
        } else {
            assert!(disk.reserve(slot, 512));
            disk.buffer(slot, 0).fill(0x80 | slot as u8);
            own.fill(0x80 | slot as u8);
            let op = Op::Write {
                offset,
                len: 512,
                durable: slot.is_multiple_of(2),
            };
            disk.submit(slot, op, &[]);
        }
    }
    for _ in 0..16 {
        assert_eq!(wait_any(&mut disk).outcome, Outcome::Done);
    }
    assert!(contents(&gate) == expected);
}

#[test]
fn an_aligned_write_waits_for_a_misaligned_one_and_a_read_does_not() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut disk, gate) = with_large_blocks(&fs);
    for slot in 0..3 {
        assert!(disk.reserve(slot, 4096));
        disk.buffer(slot, 0).fill(0xaa);
    }
    let write = |offset| Op::Write {
        offset,
        len: 4096,
        durable: false,
    };
    gate.hold(&[Kind::Write]);
    disk.submit(0, write(512), &[]);
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut done = Vec::new();
    while gate.held() == 0 {
        disk.poll(&mut done);
        assert!(done.is_empty() && Instant::now() < deadline);
    }
    disk.submit(1, write(4096), &[]);
    let read = Op::Read {
        offset: 8192,
        len: 4096,
    };
    disk.submit(2, read, &[]);
    assert_eq!(wait(&mut disk).slot, 2);
    assert_eq!(gate.held(), 1, "the aligned one has not begun");
    gate.release();
    assert_eq!([wait_any(&mut disk).slot, wait_any(&mut disk).slot], [0, 1]);
    let contents = contents(&gate);
    assert!(contents[..512] == [0; 512] && contents[512..8192] == [0xaa; 7680]);
    assert_eq!(contents[8192], 16);
}

#[test]
fn misaligned_data_in_guest_memory_are_refused() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut disk, _gate) = with_large_blocks(&fs);
    let mem = ArrayMem::new(8192);
    disk.attach(mem.keep_alive());
    let hva = mem.host(Gpa::new(0), 4096, Intent::Read).unwrap();
    let piece = [Piece { hva, len: 4096 }];
    let read = Op::Read {
        offset: 512,
        len: 4096,
    };
    assert!(
        !disk.takes(read, &piece),
        "they go through a private buffer"
    );
    disk.submit(0, read, &piece);
    assert_eq!(wait(&mut disk).outcome, Outcome::Failed(libc::EINVAL));
}
