//! Several disks of one thread in one ring. Each test is a thread of its own, and so has rings of
//! its own.

use super::*;
use crate::blk::raw::uring::rooms;

/// Disks of which each holds bytes of its own.
fn numbered(count: u8) -> Vec<RawDisk> {
    let numbered = |number| {
        let file = file(8192);
        std::os::unix::fs::FileExt::write_all_at(&file, &[100 + number; 8192], 0).unwrap();
        let mut disk = disk(&file, Transfer::Bounce);
        for slot in 0..4 {
            assert!(disk.reserve(slot, 2048));
        }
        disk
    };
    (0..count).map(numbered).collect()
}

/// Whether what wakes the disk's owner is readable.
fn is_readable(disk: &RawDisk) -> bool {
    let mut fds = Vec::new();
    disk.wake_fds(&mut fds);
    let [fd] = fds.try_into().unwrap();
    let events = libc::POLLIN;
    let mut poll = libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    // SAFETY: one entry of ours, and no waiting.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

#[test]
fn any_disk_that_enters_the_kernel_reaps_completions_for_all() {
    let mut disks = numbered(5);
    for round in 0..100 {
        for disk in &mut disks {
            for slot in 0..4 {
                disk.buffer(slot, 0).fill(0);
                disk.submit(slot, READ, &[]);
            }
        }
        // One submits for all, and another takes in.
        let (first, other) = (round % 5, (round + 2) % 5);
        disks[first].flush();
        let mut taken = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(30);
        while taken.len() < 4 {
            disks[other].poll(&mut taken);
            assert!(Instant::now() < deadline);
        }
        for (number, disk) in disks.iter_mut().enumerate() {
            let mut done = Vec::new();
            if number == other {
                done = std::mem::take(&mut taken);
            }
            while done.len() < 4 {
                disk.poll(&mut done);
                assert!(Instant::now() < deadline);
            }
            let mut slots: Vec<_> = done.iter().map(|one| (one.slot, one.outcome)).collect();
            slots.sort_unstable_by_key(|&(slot, _)| slot);
            assert_eq!(slots, [0, 1, 2, 3].map(|slot| (slot, Outcome::Done)));
            for slot in 0..4 {
                let bytes = disk.buffer(slot, 0);
                assert!(bytes[..2048] == [100 + number as u8; 2048], "disk {number}");
            }
        }
    }
    assert_eq!(rooms(), [2048 - 5 * 4]);
}

#[test]
fn disks_beyond_the_room_of_a_ring_get_another_and_room_comes_back() {
    let deep = || {
        let options = RawDiskOptions {
            transfer: Transfer::Bounce,
            depth: 700,
            ..Default::default()
        };
        let mut disk = RawDisk::from_file(file(8192), options).unwrap();
        assert!(disk.reserve(0, 2048));
        assert_eq!(outcome(&mut disk, READ), Outcome::Done);
        disk
    };
    let mut disks: Vec<_> = (0..3).map(|_| deep()).collect();
    assert_eq!(rooms(), [648, 1348]);
    disks.remove(0);
    assert_eq!(rooms(), [1348, 1348]);
    // One that moves leaves its place, and comes back at its next operation.
    disks[0].rebind();
    assert_eq!(rooms(), [2048, 1348]);
    assert_eq!(outcome(&mut disks[0], READ), Outcome::Done);
    disks.push(deep());
    assert_eq!(rooms(), [648, 1348]);
    drop(disks);
    assert_eq!(rooms(), [2048, 2048]);
}

#[test]
fn a_disk_on_another_thread_reaches_no_ring_of_this_one() {
    let [mut ours, mut theirs] = numbered(2).try_into().ok().unwrap();
    assert_eq!(outcome(&mut ours, READ), Outcome::Done);
    std::thread::scope(|scope| {
        let moved = scope.spawn(|| {
            // It has a ring of its own, with the same number.
            assert_eq!(outcome(&mut theirs, READ), Outcome::Done);
            ours.submit(1, READ, &[]);
            let mut done = Vec::new();
            for _ in 0..100 {
                ours.poll(&mut done);
                ours.arm();
                ours.disarm();
                assert_eq!(outcome(&mut theirs, READ), Outcome::Done);
            }
            assert_eq!(done, []);
            assert_eq!(rooms(), [2048 - 4]);
        });
        moved.join().unwrap();
    });
    assert_eq!(rooms(), [2048 - 4]);
    std::mem::forget(ours);
}

/// A completion makes all armed disks' descriptors readable, and stays until the last of them has
/// been disarmed.
#[test]
fn no_disk_takes_the_wake_up_of_another() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut slow, slow_gate) = held_disk(&fs, "slow", true);
    let (mut quick, quick_gate) = held_disk(&fs, "quick", true);
    for round in 0..50 {
        slow_gate.hold(&[Kind::Read]);
        quick_gate.hold(&[Kind::Read]);
        submit_held(&mut slow, READ_4096, &[], &slow_gate);
        submit_held(&mut quick, READ_4096, &[], &quick_gate);
        slow.arm();
        quick.arm();
        assert!(!quick.has_completions() && !is_readable(&quick));
        let (first, gate, second) = match round % 2 {
            0 => (&mut slow, &quick_gate, &mut quick),
            _ => (&mut quick, &slow_gate, &mut slow),
        };
        gate.release();
        let deadline = Instant::now() + Duration::from_secs(30);
        while !is_readable(second) {
            assert!(Instant::now() < deadline, "nobody is woken");
        }
        assert!(is_readable(first));
        // The one that has nothing looks first, and sleeps again.
        first.disarm();
        let mut done = Vec::new();
        first.poll(&mut done);
        assert_eq!(done, []);
        assert!(is_readable(second));
        second.disarm();
        assert!(!is_readable(second));
        assert_eq!(wait(second).outcome, Outcome::Done);
        slow_gate.release();
        quick_gate.release();
        assert_eq!(wait(first).outcome, Outcome::Done);
    }
}

/// A disk that is dropped while the kernel holds its request delays no other, and its place is no
/// other's before the kernel is done.
#[test]
fn a_dropped_disk_keeps_its_place_until_the_kernel_has_answered() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (mut slow, gate) = held_disk(&fs, "slow", true);
    let [mut quick] = numbered(1).try_into().ok().unwrap();
    gate.hold(&[Kind::Read]);
    submit_held(&mut slow, READ_4096, &[], &gate);
    for _ in 0..100 {
        assert_eq!(outcome(&mut quick, READ), Outcome::Done);
    }
    drop(slow);
    assert_eq!(rooms(), [2048 - 8]);
    let [mut next] = numbered(1).try_into().ok().unwrap();
    assert_eq!(outcome(&mut next, READ), Outcome::Done);
    gate.release();
    let deadline = Instant::now() + Duration::from_secs(30);
    while rooms() != [2048 - 8] {
        assert_eq!(outcome(&mut quick, READ), Outcome::Done);
        assert_eq!(outcome(&mut next, READ), Outcome::Done);
        assert!(Instant::now() < deadline, "the place is lost");
    }
}
