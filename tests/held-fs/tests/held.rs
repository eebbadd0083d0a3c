//! Guarantees that tests may rely on.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use held_fs::{Gate, HeldFs, Kind};

const PAGE: usize = 4096;

#[repr(align(4096))]
struct Page([u8; PAGE]);

fn open(fs: &HeldFs, flags: i32) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(flags);
    options.open(fs.path("file")).unwrap()
}

/// Runs `call` in a thread while operations of its kind are held; it must not return before they
/// are released.
fn is_held(gate: &Gate, kind: Kind, call: impl FnOnce() + Send + 'static) {
    gate.hold(&[kind]);
    let (tell, told) = mpsc::channel();
    let thread = thread::spawn(move || {
        call();
        tell.send(()).unwrap();
    });
    gate.wait_until_held(1);
    assert!(
        told.recv_timeout(Duration::from_millis(50)).is_err(),
        "{kind:?} was not held"
    );
    assert_eq!(gate.count(kind), 1);
    gate.release();
    thread.join().unwrap();
    assert_eq!(gate.held(), 0);
}

#[test]
fn every_kind_is_held_until_released_buffered_and_direct() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    for flags in [0, libc::O_DIRECT] {
        let gate = fs.create("file", 1 << 20);
        gate.contents().write_all_at(&[7; PAGE], 0).unwrap();
        let file = open(&fs, flags);
        is_held(&gate, Kind::Read, move || {
            let mut page = Page([0; PAGE]);
            file.read_exact_at(&mut page.0, 0).unwrap();
            assert_eq!(page.0, [7; PAGE]);
        });
        let file = open(&fs, flags);
        is_held(&gate, Kind::Write, move || {
            file.write_all_at(&Page([8; PAGE]).0, 8192).unwrap();
        });
        let file = open(&fs, flags);
        is_held(&gate, Kind::Sync, move || file.sync_data().unwrap());
        let file = open(&fs, flags);
        is_held(&gate, Kind::Allocate, move || {
            let mode =
                rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file, mode, 0, 4096).unwrap();
        });
        let mut page = [1; PAGE];
        gate.contents().read_exact_at(&mut page, 0).unwrap();
        assert_eq!(page, [0; PAGE], "punched");
        gate.contents().read_exact_at(&mut page, 8192).unwrap();
        assert_eq!(page, [8; PAGE], "written");
        fs::remove_file(fs.path("file")).unwrap();
    }
}

#[test]
fn one_operation_fails_with_the_errno_asked_for_and_the_next_does_not() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let gate = fs.create("file", 1 << 20);
    let file = open(&fs, 0);
    gate.fail_next(Kind::Sync, libc::ENOSPC);
    let error = file.sync_data().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    file.sync_data().unwrap();
    gate.fail_next(Kind::Write, libc::EIO);
    assert!(file.write_all_at(&[1; PAGE], 0).is_err());
    file.write_all_at(&[1; PAGE], 0).unwrap();
}

#[test]
fn files_do_not_wait_for_each_other_and_are_ordinary_files() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let slow = fs.create("file", 1 << 20);
    let file = open(&fs, 0);
    is_held(&slow, Kind::Write, move || {
        file.write_all_at(&[1; PAGE], 0).unwrap()
    });
    slow.hold(&Kind::ALL);
    let file = open(&fs, 0);
    let held = thread::spawn(move || file.sync_data().unwrap());
    slow.wait_until_held(1);
    fs::write(fs.path("other"), b"quick").unwrap();
    assert_eq!(fs::read(fs.path("other")).unwrap(), b"quick");
    assert_eq!(fs::read_dir(fs.path("")).unwrap().count(), 2);
    let other = fs.gate("other");
    assert_eq!(other.count(Kind::Write), 1);
    slow.let_through(1);
    held.join().unwrap();
}

#[test]
fn a_panicking_test_ends_with_everything_released_and_unmounted() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let root = fs.path("");
    let gate = fs.create("file", 1 << 20);
    gate.hold(&[Kind::Sync]);
    let file = open(&fs, 0);
    let held = thread::spawn(move || file.sync_data().unwrap());
    let panicked = catch_unwind(AssertUnwindSafe(move || {
        let _fs = fs;
        gate.wait_until_held(1);
        std::panic::resume_unwind(Box::new("a test fails"));
    }));
    assert!(panicked.is_err());
    held.join().unwrap();
    assert!(!root.exists(), "{} is left behind", root.display());
}

/// Child that the next test kills: waits for ever, with an operation held.
#[test]
#[ignore = "the child of another test"]
fn child_that_waits() {
    let fs = HeldFs::mount().unwrap();
    let gate = fs.create("file", 1 << 20);
    gate.hold(&[Kind::Sync]);
    let file = open(&fs, 0);
    let held = thread::spawn(move || file.sync_data());
    gate.wait_until_held(1);
    println!("held at {}", fs.path("").display());
    let _ = held.join();
}

#[test]
fn a_process_killed_with_an_operation_held_ends_and_is_unmounted() {
    if HeldFs::mount_or_skip().is_none() {
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_waits", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let root = lines.map(Result::unwrap).find_map(|line| {
        let (_, root) = line.split_once("held at ")?;
        Some(root.to_owned())
    });
    let root = root.unwrap();
    assert!(
        fs::read_to_string("/proc/mounts")
            .unwrap()
            .contains(root.trim_end_matches('/'))
    );
    child.kill().unwrap();
    // Hangs for ever if the connection is not aborted.
    child.wait().unwrap();
    let is_mounted = || {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        mounts.contains(root.trim_end_matches('/'))
    };
    while is_mounted() {
        thread::sleep(Duration::from_millis(20));
    }
    fs::remove_dir(&root).unwrap();
}
