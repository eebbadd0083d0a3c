//! Disks that threads serve, since the host refuses rings.

use std::os::fd::BorrowedFd;
use std::os::unix::fs::OpenOptionsExt;

use super::*;

fn refusal() -> UringRefusal {
    UringRefusal {
        what: "io_uring_setup",
        error: std::io::Error::from_raw_os_error(libc::EPERM),
    }
}

fn threaded(file: &File, transfer: Transfer) -> RawDisk {
    let options = RawDiskOptions {
        transfer,
        depth: 4,
        ..Default::default()
    };
    RawDisk::with_threads(file.try_clone().unwrap(), options, refusal()).unwrap()
}

/// Likewise, on a file whose operations can be held.
fn held(fs: &HeldFs, name: &str, o_direct: bool, depth: u32) -> (RawDisk, Gate) {
    let gate = fs.create(name, 1 << 20);
    let options = RawDiskOptions {
        transfer: Transfer::Bounce,
        depth,
        o_direct,
        ..Default::default()
    };
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(if o_direct { libc::O_DIRECT } else { 0 })
        .open(fs.path(name))
        .unwrap();
    let mut disk = RawDisk::with_threads(file, options, refusal()).unwrap();
    for slot in 0..depth {
        assert!(disk.reserve(slot, 4096));
    }
    (disk, gate)
}

#[test]
fn everything_that_a_disk_does_is_done_without_a_ring() {
    let file = file(16384);
    let mut disk = threaded(&file, Transfer::Direct);
    assert_eq!(
        disk.uring_refusal().unwrap().to_string(),
        "io_uring_setup: Operation not permitted (os error 1)"
    );
    let mem = ArrayMem::new(8192);
    disk.attach(mem.keep_alive());
    let piece = |at: u64, len: u32| {
        let hva = mem.host(Gpa::new(at), u64::from(len), Intent::Write);
        Piece {
            hva: hva.unwrap(),
            len,
        }
    };
    // Scattered, and more than once, so that slots are used again.
    for round in 0..3u64 {
        let at = 4096 + round * 1024;
        mem.put(Gpa::new(0), &[0x50 + round as u8; 512]);
        mem.put(Gpa::new(4096), &[0x60 + round as u8; 512]);
        let write = Op::Write {
            offset: at,
            len: 1024,
            durable: round == 1,
        };
        disk.submit(2, write, &[piece(0, 512), piece(4096, 512)]);
        assert_eq!(wait(&mut disk).outcome, Outcome::Done);
        let read = Op::Read {
            offset: at,
            len: 1024,
        };
        disk.submit(2, read, &[piece(1024, 1000), piece(6144, 24)]);
        assert_eq!(wait(&mut disk).outcome, Outcome::Done);
        assert_eq!(mem.get::<1>(Gpa::new(1024)), [0x50 + round as u8]);
        assert_eq!(mem.get::<1>(Gpa::new(6144)), [0x60 + round as u8]);
    }
    assert_eq!(outcome(&mut disk, Op::Flush), Outcome::Done);
    for op in [
        Op::Discard {
            offset: 4096,
            len: 4096,
        },
        Op::WriteZeroes {
            offset: 8192,
            len: 4096,
            unmap: false,
        },
    ] {
        assert_eq!(outcome(&mut disk, op), Outcome::Done);
    }
    let read = Op::Read {
        offset: 4096,
        len: 8192,
    };
    mem.put(Gpa::new(0), &[1; 8192]);
    disk.submit(0, read, &[piece(0, 8192)]);
    assert_eq!(wait(&mut disk).outcome, Outcome::Done);
    assert_eq!(mem.get::<8192>(Gpa::new(0)), [0; 8192]);
}

#[test]
fn a_call_that_no_thread_has_begun_is_cancelled_and_one_that_waits_is_not() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let threads = crate::blk::raw::threads::THREADS as u32;
    let (mut disk, gate) = held(&fs, "disk", true, threads + 1);
    gate.hold(&[Kind::Read]);
    for slot in 0..=threads {
        let read = Op::Read {
            offset: u64::from(slot) * 4096,
            len: 4096,
        };
        disk.submit(slot, read, &[]);
    }
    disk.flush();
    gate.wait_until_held(threads as usize);
    // The last one waits for a thread, the first for the storage.
    disk.cancel(threads);
    let cancelled = Completion {
        slot: threads,
        outcome: Outcome::Failed(libc::ECANCELED),
    };
    assert_eq!(wait(&mut disk), cancelled);
    disk.cancel(0);
    let refused = Completion {
        slot: 0,
        outcome: Outcome::NotCancellable,
    };
    assert_eq!(wait(&mut disk), refused);
    gate.release();
    let mut done = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(30);
    while done.len() < threads as usize {
        disk.poll(&mut done);
        assert!(Instant::now() < deadline, "{done:?}");
    }
    assert!(done.iter().all(|done| done.outcome == Outcome::Done));
    assert_eq!(disk.in_flight, 0);
}

#[test]
fn an_owner_that_sleeps_is_woken_by_an_answer() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut disk, gate) = held(&fs, "disk", true, 1);
    let mut fds = Vec::new();
    disk.wake_fds(&mut fds);
    // SAFETY: the disk keeps it open, and outlives this.
    let fd = unsafe { BorrowedFd::borrow_raw(fds[0]) };
    let readable = |seconds| {
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let limit = Timespec {
            tv_sec: seconds,
            tv_nsec: 0,
        };
        poll(&mut fds, Some(&limit)).unwrap() == 1
    };
    for _ in 0..3 {
        gate.hold(&[Kind::Read]);
        let read = Op::Read {
            offset: 0,
            len: 4096,
        };
        disk.submit(0, read, &[]);
        disk.flush();
        gate.wait_until_held(1);
        disk.arm();
        assert!(!disk.has_completions() && !readable(0));
        gate.release();
        assert!(readable(30), "nothing woke the owner");
        assert!(disk.has_completions());
        disk.disarm();
        assert_eq!(wait(&mut disk).outcome, Outcome::Done);
    }
}

#[test]
fn a_disk_dropped_in_a_call_leaves_its_thread_and_memory_to_the_call() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut disk, gate) = held(&fs, "disk", true, 1);
    gate.hold(&[Kind::Read]);
    let read = Op::Read {
        offset: 0,
        len: 4096,
    };
    disk.submit(0, read, &[]);
    disk.flush();
    gate.wait_until_held(1);
    let file = Arc::downgrade(&disk.file);
    let since = Instant::now();
    drop(disk);
    assert!(since.elapsed() < DROP_LIMIT * 2, "it was waited for");
    assert!(file.upgrade().is_some(), "closed under the call");
    gate.release();
    let deadline = Instant::now() + Duration::from_secs(30);
    while file.upgrade().is_some() {
        assert!(Instant::now() < deadline, "the file stays open");
        std::thread::yield_now();
    }
}

#[test]
fn a_sync_that_failed_is_the_last_also_by_threads() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut disk, gate) = held(&fs, "disk", false, 4);
    assert_eq!(outcome(&mut disk, write_4096(true)), Outcome::Done);
    gate.fail_next(Kind::Sync, libc::EIO);
    assert_eq!(outcome(&mut disk, write_4096(true)), FAILED);
    assert_eq!(outcome(&mut disk, Op::Flush), FAILED);
    assert_eq!(outcome(&mut disk, READ_4096), Outcome::Done);
    // Past the page cache a sync may be tried again.
    let (mut disk, gate) = held(&fs, "direct", true, 4);
    gate.fail_next(Kind::Sync, libc::EIO);
    assert_eq!(outcome(&mut disk, write_4096(true)), FAILED);
    assert_eq!(outcome(&mut disk, write_4096(true)), Outcome::Done);
}
