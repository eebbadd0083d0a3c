//! The ring disk alone: what a file may do to it.

use std::io::Write;
use std::os::fd::FromRawFd;
use std::sync::Arc;

use guest_mem::test_utils::ArrayMem;
use guest_mem::{Gpa, PhysMem};

use super::*;

fn file(bytes: usize) -> File {
    // SAFETY: a terminated name, and nothing else of ours.
    let fd = unsafe { libc::memfd_create(c"vio-uring".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: just made, and nobody else's.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(&(0..bytes).map(|at| (at / 512) as u8).collect::<Vec<_>>())
        .unwrap();
    file
}

fn disk(file: &File, transfer: Transfer) -> UringFile {
    let options = UringOptions {
        transfer,
        depth: 4,
        ..Default::default()
    };
    UringFile::from_file(file.try_clone().unwrap(), options).unwrap()
}

fn wait(disk: &mut UringFile) -> Completion {
    let deadline = Instant::now() + Duration::from_secs(2);
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
fn memory_that_nobody_keeps_mapped_is_refused() {
    let file = file(8192);
    let mut disk = disk(&file, Transfer::Direct);
    let mem = ArrayMem::new(8192);
    let hva = mem.host(Gpa::new(0x800), 2048).unwrap();
    let refused = Completion {
        slot: 1,
        outcome: Outcome::Failed(libc::EFAULT),
    };
    let good = Piece { hva, len: 2048 };
    // Before there is any memory; memory of somebody else's making; past the end.
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

#[test]
fn zeroing_falls_back_to_a_hole_where_a_range_cannot_be_zeroed() {
    // tmpfs has no FALLOC_FL_ZERO_RANGE.
    let file = file(8192);
    let mut disk = disk(&file, Transfer::Bounce);
    disk.submit(
        0,
        Op::WriteZeroes {
            offset: 512,
            len: 1024,
            unmap: false,
        },
        &[],
    );
    assert_eq!(wait(&mut disk).outcome, Outcome::Done);
    assert!(disk.reserve(1, 2048));
    disk.submit(
        1,
        Op::Read {
            offset: 0,
            len: 2048,
        },
        &[],
    );
    assert_eq!(wait(&mut disk).outcome, Outcome::Done);
    assert_eq!(disk.buffer(1, 512)[..1024], [0; 1024]);
    assert_eq!(disk.buffer(1, 1536)[0], 3);
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
    let hva = mem.host(Gpa::new(0), 1 << 20).unwrap();
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
fn what_is_no_disk_is_refused() {
    let open = |path: &str| UringFile::open(Path::new(path), UringOptions::default());
    assert!(matches!(open("/nonexistent"), Err(UringError::Open(_))));
    let read_only = UringOptions {
        read_only: true,
        ..Default::default()
    };
    let null = UringFile::open(Path::new("/dev/null"), read_only);
    assert!(matches!(null, Err(UringError::Kind)));
    for bytes in [0, 100] {
        let refused = UringFile::from_file(file(bytes), UringOptions::default());
        assert!(matches!(refused, Err(UringError::Size(size)) if size == bytes as u64));
    }
    let deep = UringOptions {
        depth: 1025,
        ..Default::default()
    };
    assert!(matches!(
        UringFile::from_file(file(512), deep),
        Err(UringError::Depth(1025))
    ));
}

/// A file whose operations a test holds in the kernel, and a disk on it; `None` where there is no FUSE.
fn held(o_direct: bool) -> Option<(held_fs::HeldFs, held_fs::Gate, UringFile)> {
    let fs = held_fs::HeldFs::mount_or_skip()?;
    let gate = fs.create("disk", 1 << 20);
    let options = UringOptions {
        o_direct,
        depth: 4,
        ..Default::default()
    };
    let disk = UringFile::open(&fs.path("disk"), options).unwrap();
    Some((fs, gate, disk))
}

/// What an operation of each kind is, and how the file system knows it.
const HELD: [(Op, held_fs::Kind); 3] = [
    (
        Op::Read {
            offset: 8192,
            len: 4096,
        },
        held_fs::Kind::Read,
    ),
    (
        Op::Write {
            offset: 8192,
            len: 4096,
            durable: false,
        },
        held_fs::Kind::Write,
    ),
    (Op::Flush, held_fs::Kind::Sync),
];

/// A page of `mem` for the operation's data, if it has any.
fn pieces(mem: &ArrayMem, op: Op) -> Vec<Piece> {
    match op {
        Op::Read { len, .. } | Op::Write { len, .. } => {
            let hva = mem.host(Gpa::new(0x4000), u64::from(len)).unwrap();
            vec![Piece { hva, len }]
        }
        _ => Vec::new(),
    }
}

/// Submits to slot 1, and waits until the operation is held.
fn submit_held(disk: &mut UringFile, op: Op, pieces: &[Piece], gate: &held_fs::Gate) {
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
fn what_the_kernel_is_still_doing_cannot_be_cancelled_and_ends_well_later() {
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
            assert_eq!(wait(&mut disk).outcome, Outcome::NotCancellable, "{what}");
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
            // The kernel has it; nobody has looked. The cancellation's answer may come first.
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
