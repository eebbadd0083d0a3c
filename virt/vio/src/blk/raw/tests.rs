//! The raw disk alone, over files of every kind.

use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::Path;
use std::sync::Arc;

use fake_mem::ArrayMem;
use guest_mem::{Gpa, Intent, PhysMem};
use held_fs::{Gate, HeldFs, Kind};

use super::*;
use crate::blk::MAX_TRANSFER;

fn file(bytes: usize) -> File {
    // SAFETY: a terminated name, and nothing else of ours.
    let fd = unsafe { libc::memfd_create(c"vio-raw".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: just made, and owned by nothing else.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(&(0..bytes).map(|at| (at / 512) as u8).collect::<Vec<_>>())
        .unwrap();
    file
}

fn disk(file: &File, transfer: Transfer) -> RawDisk {
    let options = RawDiskOptions {
        transfer,
        depth: 4,
        ..Default::default()
    };
    RawDisk::from_file(file.try_clone().unwrap(), options).unwrap()
}

fn wait(disk: &mut RawDisk) -> Completion {
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut done = Vec::new();
    disk.flush();
    while done.is_empty() {
        disk.poll(&mut done);
        assert!(Instant::now() < deadline, "no completion");
    }
    assert_eq!(done.len(), 1);
    done[0]
}

const READ: Op = Op::Read {
    offset: 1024,
    len: 2048,
};

#[test]
fn a_file_truncated_under_us_is_an_error_not_a_hang() {
    let file = file(8192);
    let mut disk = disk(&file, Transfer::Bounce);
    assert!(disk.reserve(0, 2048));
    // Half of the read is left, then none.
    for (len, outcome) in [
        (8192, Outcome::Done),
        (2048, Outcome::Failed(libc::EIO)),
        (0, Outcome::Failed(libc::EIO)),
    ] {
        file.set_len(len).unwrap();
        disk.submit(0, READ, &[]);
        assert_eq!(wait(&mut disk), Completion { slot: 0, outcome });
    }
}

#[test]
fn memory_that_is_not_kept_mapped_is_refused() {
    let file = file(8192);
    let mut disk = disk(&file, Transfer::Direct);
    let mem = ArrayMem::new(8192);
    let hva = mem.host(Gpa::new(0x800), 2048, Intent::Read).unwrap();
    let refused = Completion {
        slot: 1,
        outcome: Outcome::Failed(libc::EFAULT),
    };
    let good = Piece { hva, len: 2048 };
    // Before there is any memory; memory that was not lent to the disk; past the end.
    disk.submit(1, READ, &[good]);
    assert_eq!(wait(&mut disk), refused);
    disk.attach(Arc::new(0u8));
    disk.submit(1, READ, &[good]);
    assert_eq!(wait(&mut disk), refused);
    disk.attach(mem.keep_alive());
    let outside = Piece {
        hva: hva.checked_add(6000).unwrap(),
        len: 2048,
    };
    disk.submit(1, READ, &[outside]);
    assert_eq!(wait(&mut disk), refused);
    disk.submit(1, READ, &[good]);
    assert_eq!(wait(&mut disk).outcome, Outcome::Done);
    assert_eq!(mem.get::<1>(Gpa::new(0x800)), [2]);
    assert_eq!(mem.get::<1>(Gpa::new(0xa00)), [3]);
    // A direct disk holds the guest's memory for as long as it may be written, and no longer.
    let keep = mem.keep_alive();
    let held = Arc::strong_count(&keep);
    disk.detach();
    assert_eq!(Arc::strong_count(&keep), held - 1);
}

/// Zeroes two of four pages of a file in memory, which has no FALLOC_FL_ZERO_RANGE; the pages it
/// has then.
fn zeroed(unmap: bool) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let file = file(16384);
    let mut disk = disk(&file, Transfer::Bounce);
    let op = Op::WriteZeroes {
        offset: 4096,
        len: 8192,
        unmap,
    };
    assert_eq!(outcome(&mut disk, op), Outcome::Done);
    let read = Op::Read {
        offset: 0,
        len: 16384,
    };
    assert!(disk.reserve(1, 16384));
    disk.submit(1, read, &[]);
    assert_eq!(wait(&mut disk).outcome, Outcome::Done);
    assert_eq!(disk.buffer(1, 4095)[0], 7);
    assert_eq!(disk.buffer(1, 4096)[..8192], [0; 8192]);
    assert_eq!(disk.buffer(1, 12288)[0], 24);
    file.metadata().unwrap().blocks() / 8
}

#[test]
fn zeroing_gives_blocks_back_only_where_it_may() {
    assert_eq!(zeroed(true), 2);
    assert_eq!(zeroed(false), 4);
}

#[test]
fn discard_is_not_offered_where_holes_cannot_be_punched() {
    use crate::QueueDevice;
    use crate::blk::request::feature::{DISCARD, WRITE_ZEROES};
    use crate::blk::{Blk, BlkConfig};
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let gate = fs.create("disk", 1 << 20);
    let offered = || {
        let disk = RawDisk::open(&fs.path("disk"), RawDiskOptions::default()).unwrap();
        let blk = Blk::new(BlkConfig::default(), Box::new(disk)).unwrap();
        blk.features() & (DISCARD | WRITE_ZEROES)
    };
    assert_eq!(offered(), DISCARD | WRITE_ZEROES);
    gate.refuse(Kind::Allocate, libc::EOPNOTSUPP);
    assert_eq!(offered(), WRITE_ZEROES, "zeroes can always be written");
    assert_eq!(gate.contents().metadata().unwrap().len(), 1 << 20);
}

#[test]
fn the_pool_is_bounded_and_comes_back() {
    let file = file(8192);
    let mut disk = disk(&file, Transfer::Bounce);
    assert!(disk.reserve(0, MAX_TRANSFER) && disk.reserve(1, MAX_TRANSFER));
    assert!(!disk.reserve(2, 1));
    disk.unreserve(0);
    assert!(disk.reserve(2, 1));
    assert_eq!(disk.buffer(2, 0).len(), 1);
    assert_eq!(disk.buffer(1, CHUNK - 3).len(), 3);
    assert_eq!(disk.buffer(1, MAX_TRANSFER - 5).len(), 5);
}

#[test]
#[should_panic(expected = "in flight")]
fn the_buffer_of_an_operation_in_flight_cannot_be_had() {
    let file = file(8192);
    let mut disk = disk(&file, Transfer::Bounce);
    assert!(disk.reserve(0, 2048));
    disk.submit(0, READ, &[]);
    disk.buffer(0, 0);
}

#[test]
fn cancelling_what_has_ended_reports_nothing_more() {
    let file = file(8192);
    let mut disk = disk(&file, Transfer::Bounce);
    assert!(disk.reserve(0, 2048));
    disk.submit(0, READ, &[]);
    disk.cancel(0);
    let first = wait(&mut disk);
    // Either it was faster or it was stopped; in both cases once.
    assert!(matches!(
        first.outcome,
        Outcome::Done | Outcome::Failed(libc::ECANCELED)
    ));
    let mut done = Vec::new();
    for _ in 0..100 {
        disk.poll(&mut done);
        disk.cancel(0);
    }
    assert_eq!(done, []);
    assert!(!disk.has_completions());
}

#[test]
fn dropping_waits_for_the_kernel() {
    let file = file(1 << 20);
    let mem = ArrayMem::new(1 << 20);
    let mut disk = disk(&file, Transfer::Direct);
    disk.attach(mem.keep_alive());
    let keep = mem.keep_alive();
    let hva = mem.host(Gpa::new(0), 1 << 20, Intent::Read).unwrap();
    disk.submit(
        0,
        Op::Read {
            offset: 0,
            len: 1 << 20,
        },
        &[Piece { hva, len: 1 << 20 }],
    );
    let held = Arc::strong_count(&keep);
    drop(disk);
    assert_eq!(
        Arc::strong_count(&keep),
        held - 1,
        "ended in time, so nothing is leaked"
    );
}

#[test]
fn files_that_are_no_disks_are_refused() {
    let open = |path: &str| RawDisk::open(Path::new(path), RawDiskOptions::default());
    assert!(matches!(open("/nonexistent"), Err(RawDiskError::Open(_))));
    let read_only = RawDiskOptions {
        read_only: true,
        ..Default::default()
    };
    let null = RawDisk::open(Path::new("/dev/null"), read_only);
    assert!(matches!(null, Err(RawDiskError::Kind)));
    for bytes in [0, 100] {
        let refused = RawDisk::from_file(file(bytes), RawDiskOptions::default());
        assert!(matches!(refused, Err(RawDiskError::Size(size)) if size == bytes as u64));
    }
    let deep = RawDiskOptions {
        depth: 1025,
        ..Default::default()
    };
    assert!(matches!(
        RawDisk::from_file(file(512), deep),
        Err(RawDiskError::Depth(1025))
    ));
}

/// Opening a file so that a FIFO is not waited for leaves O_NONBLOCK behind, and io_uring gives
/// nothing of such a file to its threads.
#[test]
fn a_file_is_served_without_o_nonblock() {
    let file = file(512);
    let fd = file.as_raw_fd();
    // SAFETY: our own descriptor, and commands without a pointer.
    let flags = |command, flags: libc::c_int| unsafe { libc::fcntl(fd, command, flags) };
    let before = flags(libc::F_GETFL, 0);
    assert_eq!(flags(libc::F_SETFL, before | libc::O_NONBLOCK), 0);
    // Its descriptor is a duplicate of ours: one open file, one set of flags.
    let _disk = disk(&file, Transfer::Direct);
    assert_eq!(flags(libc::F_GETFL, 0), before);
}

/// A disk on a file whose syncs can be held and fail, and with 4096 bytes reserved in each slot.
fn held_disk(fs: &HeldFs, name: &str, o_direct: bool) -> (RawDisk, Gate) {
    let gate = fs.create(name, 1 << 20);
    let options = RawDiskOptions {
        transfer: Transfer::Bounce,
        depth: 4,
        o_direct,
        ..Default::default()
    };
    let mut disk = RawDisk::open(&fs.path(name), options).unwrap();
    for slot in 0..4 {
        assert!(disk.reserve(slot, 4096));
    }
    (disk, gate)
}

fn outcome(disk: &mut RawDisk, op: Op) -> Outcome {
    disk.submit(0, op, &[]);
    wait(disk).outcome
}

fn write_4096(durable: bool) -> Op {
    Op::Write {
        offset: 4096,
        len: 4096,
        durable,
    }
}

const READ_4096: Op = Op::Read {
    offset: 4096,
    len: 4096,
};
const FAILED: Outcome = Outcome::Failed(libc::EIO);

#[test]
fn a_flush_that_failed_stays_failed_and_reads_and_writes_go_on() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    // It fails after a flush, or after a durable write.
    for (name, failing) in [("flush", Op::Flush), ("durable", write_4096(true))] {
        let (mut disk, gate) = held_disk(&fs, name, false);
        assert_eq!(outcome(&mut disk, Op::Flush), Outcome::Done);
        assert_eq!(outcome(&mut disk, write_4096(true)), Outcome::Done);
        gate.fail_next(Kind::Sync, libc::EIO);
        assert_eq!(outcome(&mut disk, failing), FAILED, "{name}");
        // The file would sync now; a reset of the device is no new file, nor is a move to another
        // core.
        let asked = gate.count(Kind::Sync);
        assert_eq!(outcome(&mut disk, Op::Flush), FAILED, "{name}");
        let mem = ArrayMem::new(4096);
        disk.detach();
        disk.attach(mem.keep_alive());
        disk.rebind();
        assert_eq!(outcome(&mut disk, Op::Flush), FAILED, "{name}");
        assert_eq!(outcome(&mut disk, write_4096(true)), FAILED, "{name}");
        assert_eq!(disk.run_now(Op::Flush, &[]), None);
        assert_eq!(gate.count(Kind::Sync), asked, "nobody asks any more");

        disk.buffer(0, 0).fill(7);
        assert_eq!(outcome(&mut disk, write_4096(false)), Outcome::Done);
        disk.buffer(0, 0).fill(0);
        assert_eq!(outcome(&mut disk, READ_4096), Outcome::Done);
        assert_eq!(disk.buffer(0, 4095), [7]);
        drop(disk);
        let options = RawDiskOptions::default();
        let mut disk = RawDisk::open(&fs.path(name), options).unwrap();
        assert_eq!(outcome(&mut disk, Op::Flush), Outcome::Done);
    }
}

/// A write may fail for want of space and succeed when there is some again: that is no failed sync.
#[test]
fn a_durable_write_that_fails_before_its_sync_does_not_make_flushes_fail() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut disk, gate) = held_disk(&fs, "disk", false);
    gate.fail_next(Kind::Write, libc::ENOSPC);
    let full = Outcome::Failed(libc::ENOSPC);
    assert_eq!(outcome(&mut disk, write_4096(true)), full);
    assert_eq!(outcome(&mut disk, write_4096(true)), Outcome::Done);
    assert_eq!(outcome(&mut disk, Op::Flush), Outcome::Done);
}

/// There is no cache that could have lost anything.
#[test]
fn a_failed_flush_past_the_page_cache_may_be_tried_again() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut disk, gate) = held_disk(&fs, "disk", true);
    gate.fail_next(Kind::Sync, libc::EIO);
    assert_eq!(outcome(&mut disk, Op::Flush), FAILED);
    assert_eq!(outcome(&mut disk, Op::Flush), Outcome::Done);
}

/// The kernel reports an error to one sync only: none that runs beside it, or waits for it, may
/// succeed.
#[test]
fn a_flush_beside_one_that_fails_fails_too() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    for fails in [true, false] {
        let (mut disk, gate) = held_disk(&fs, if fails { "fails" } else { "ends" }, false);
        gate.hold(&[Kind::Sync]);
        for slot in 0..3 {
            disk.submit(slot, Op::Flush, &[]);
        }
        disk.flush();
        gate.wait_until_held(1);
        // One behind them, which needs a sync that begins after it was submitted.
        disk.submit(3, write_4096(true), &[]);
        disk.flush();
        if fails {
            gate.fail_next(Kind::Sync, libc::EIO);
        }
        gate.release();
        let mut done = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(30);
        while done.len() < 4 {
            disk.poll(&mut done);
            assert!(Instant::now() < deadline, "only {done:?}");
        }
        let expected = if fails { FAILED } else { Outcome::Done };
        for completion in &done {
            assert_eq!(completion.outcome, expected, "{done:?}");
        }
        let mut slots: Vec<_> = done.iter().map(|completion| completion.slot).collect();
        slots.sort_unstable();
        assert_eq!(slots, [0, 1, 2, 3]);
        // The first, and one for all that waited; the write may have come after that.
        let asked = gate.count(Kind::Sync);
        let most = if fails { 1 } else { 3 };
        assert!(asked <= most, "{asked} syncs");
    }
}

/// The kernel knows nothing of it yet, so nothing keeps it from ending.
#[test]
fn a_flush_that_waits_for_another_is_cancelled_at_once() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut disk, gate) = held_disk(&fs, "disk", false);
    gate.hold(&[Kind::Sync]);
    for slot in 0..3 {
        disk.submit(slot, Op::Flush, &[]);
    }
    disk.flush();
    gate.wait_until_held(1);
    disk.cancel(1);
    let first = wait(&mut disk);
    let stopped = Outcome::Failed(libc::ECANCELED);
    assert_eq!((first.slot, first.outcome), (1, stopped));
    gate.release();
    for slot in [0, 2] {
        let next = wait(&mut disk);
        assert_eq!((next.slot, next.outcome), (slot, Outcome::Done));
    }
}

/// A file whose operations a test holds in the kernel, and a disk on it; `None` where there is no
/// FUSE.
fn held(o_direct: bool) -> Option<(HeldFs, Gate, RawDisk)> {
    let fs = HeldFs::mount_or_skip()?;
    let gate = fs.create("disk", 1 << 20);
    let options = RawDiskOptions {
        o_direct,
        depth: 4,
        ..Default::default()
    };
    let disk = RawDisk::open(&fs.path("disk"), options).unwrap();
    Some((fs, gate, disk))
}

/// An operation of each kind, and the request of it that the file system sees.
const HELD: [(Op, Kind); 3] = [
    (
        Op::Read {
            offset: 8192,
            len: 4096,
        },
        Kind::Read,
    ),
    (
        Op::Write {
            offset: 8192,
            len: 4096,
            durable: false,
        },
        Kind::Write,
    ),
    (Op::Flush, Kind::Sync),
];

/// A page of `mem` for the operation's data, if it has any.
fn pieces(mem: &ArrayMem, op: Op) -> Vec<Piece> {
    match op {
        Op::Read { len, .. } | Op::Write { len, .. } => {
            let hva = mem
                .host(Gpa::new(0x4000), u64::from(len), Intent::Read)
                .unwrap();
            vec![Piece { hva, len }]
        }
        _ => Vec::new(),
    }
}

/// Submits to slot 1, and waits until the operation is held.
fn submit_held(disk: &mut RawDisk, op: Op, pieces: &[Piece], gate: &Gate) {
    disk.submit(1, op, pieces);
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut done = Vec::new();
    // The kernel tries again, each time we enter it, before it gives the operation to a thread.
    while gate.held() == 0 {
        disk.poll(&mut done);
        assert_eq!(done, []);
        assert!(Instant::now() < deadline, "it is not held");
    }
}

#[test]
fn a_running_operation_cannot_be_cancelled_and_ends_well_later() {
    for o_direct in [false, true] {
        for (op, kind) in HELD {
            let Some((_fs, gate, mut disk)) = held(o_direct) else {
                return;
            };
            let mem = ArrayMem::new(1 << 20);
            disk.attach(mem.keep_alive());
            gate.hold(&[kind]);
            submit_held(&mut disk, op, &pieces(&mem, op), &gate);
            disk.cancel(1);
            let what = format!("{op:?}, direct: {o_direct}");
            let answer = wait(&mut disk).outcome;
            if answer == Outcome::Failed(libc::ECANCELED) && kind == Kind::Read && !o_direct {
                // Read-ahead is held, and no thread of the kernel has taken the read itself yet:
                // nothing touches its page.
                gate.release();
                assert_eq!(mem.get::<4096>(Gpa::new(0x4000)), [0; 4096], "{what}");
                continue;
            }
            assert_eq!(answer, Outcome::NotCancellable, "{what}");
            let mut done = Vec::new();
            disk.poll(&mut done);
            assert_eq!(done, [], "{what}: said once, and still in flight");
            gate.release();
            assert_eq!(wait(&mut disk).outcome, Outcome::Done, "{what}");
        }
    }
}

#[test]
fn an_operation_that_ended_before_its_cancellation_has_ended_well() {
    for (op, kind) in HELD {
        let Some((_fs, gate, mut disk)) = held(true) else {
            return;
        };
        let mem = ArrayMem::new(1 << 20);
        disk.attach(mem.keep_alive());
        for round in 0..50 {
            gate.hold(&[kind]);
            submit_held(&mut disk, op, &pieces(&mem, op), &gate);
            gate.release();
            // The kernel has it; no poll has run. The cancellation's answer may come first.
            while !disk.has_completions() {
                std::thread::yield_now();
            }
            disk.cancel(1);
            let first = wait(&mut disk);
            assert_eq!(first.outcome, Outcome::Done, "{op:?}, round {round}");
            let mut done = Vec::new();
            disk.poll(&mut done);
            assert_eq!(done, [], "{op:?}, round {round}");
        }
    }
}

mod align;
mod lent;
mod ranges;
mod threads;
