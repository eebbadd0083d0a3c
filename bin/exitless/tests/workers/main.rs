//! Disks whose device models are processes: verified requests while the processes are killed and
//! stopped, what they are left with, and that nothing of them stays.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod guest;
mod processes;

use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use guest::{Guest, SECTORS};
use processes::{Worker, descriptors, signal_all, workers};
use seeded::Random;
use vio::QueueDevice;
use vmm::run::worker::WorkerConfig;

const RESTARTS: WorkerConfig = WorkerConfig {
    is_unconfined: false,
    restarts: true,
};

/// An image of zeroes.
fn image() -> fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![0; SECTORS as usize * 512]).unwrap();
    file
}

#[test]
fn a_hundred_kills_lose_nothing_that_was_acknowledged() {
    let _alone = processes::alone();
    let mut random = Random::new(1);
    // A thread that has signalled an eventfd keeps a descriptor for that.
    let mut first = Guest::start(&image(), RESTARTS).unwrap();
    first.make_some(&mut random);
    first.finish();
    drop(first);
    let before = descriptors();
    let file = image();
    let mut guest = Guest::start(&file, RESTARTS).unwrap();
    let mut kills = 0;
    let deadline = Instant::now() + Duration::from_secs(120);
    while kills < 100 {
        assert!(Instant::now() < deadline, "{kills} kills");
        guest.make_some(&mut random);
        let polls = random.below(200);
        for _ in 0..polls {
            guest.poll();
        }
        // There may be none at this moment: one has ended and the next not begun.
        if let Some(worker) = workers().first() {
            worker.signal(libc::SIGKILL);
            kills += 1;
        }
        guest.finish();
    }
    assert!(!guest.device.needs_reset());
    guest.check(&file);
    drop(guest);
    assert_eq!(workers(), [] as [Worker; 0]);
    drop(file);
    assert_eq!(descriptors(), before);
}

#[test]
fn a_worker_that_dies_fails_its_device_where_that_is_asked_for() {
    let _alone = processes::alone();
    let file = image();
    let config = WorkerConfig {
        restarts: false,
        ..RESTARTS
    };
    let mut guest = Guest::start(&file, config).unwrap();
    guest.make_some(&mut Random::new(2));
    guest.finish();
    signal_all(libc::SIGKILL);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !guest.device.needs_reset() {
        assert!(Instant::now() < deadline, "it serves without a worker");
        guest.poll();
    }
    assert_eq!(workers(), [] as [Worker; 0]);
}

#[test]
fn an_unmap_beside_a_stopped_worker_is_complete_at_once() {
    let _alone = processes::alone();
    let file = image();
    let mut guest = Guest::start(&file, RESTARTS).unwrap();
    signal_all(libc::SIGSTOP);
    guest.make_some(&mut Random::new(3));
    for _ in 0..1000 {
        guest.poll();
    }
    assert!(guest.device.in_flight() > 0, "a stopped worker answers");
    // What an unmap waits for: leases, and devices that may touch memory. There is none.
    assert_eq!(guest.leases(), 0);
    assert!(!guest.device.touches_memory());
    assert_eq!(guest.device.stats().cancelled, 0);
    signal_all(libc::SIGCONT);
    guest.finish();
    guest.check(&file);
}

#[test]
fn a_worker_has_its_four_descriptors_and_no_right() {
    let _alone = processes::alone();
    let file = image();
    file.write_at(&[0xab; 512], 0).unwrap();
    let guest = Guest::start(&file, RESTARTS).unwrap();
    let all = workers();
    let [worker] = &all[..] else {
        panic!("one worker: {all:?}");
    };
    // Each of its threads, those of the disk as well. 2: a filter of system calls.
    for (key, value) in [
        ("Seccomp", "2"),
        ("NoNewPrivs", "1"),
        ("CapEff", "0000000000000000"),
        ("CapPrm", "0000000000000000"),
    ] {
        assert_eq!(worker.status(key), [value.to_owned()].into(), "{key}");
    }
    let Some(kinds) = worker.kinds() else {
        return println!("skipped: descriptors of a worker are shown to root alone");
    };
    // Standard ones are the owner's eventfd; the disk's threads have one of their own.
    assert_eq!(kinds.get("memfd"), Some(&1), "{kinds:?}");
    assert_eq!(kinds.get("file"), Some(&1), "{kinds:?}");
    assert_eq!(
        kinds.values().sum::<usize>(),
        2 + kinds["eventfd"],
        "{kinds:?}"
    );
    assert!(worker.maps().iter().all(|line| !line.contains("guest-ram")));
    drop(guest);
    assert_eq!(workers(), [] as [Worker; 0]);
}

#[test]
fn a_start_that_fails_says_why_and_leaves_nothing() {
    let _alone = processes::alone();
    let before = descriptors();
    let file = tempfile::tempfile().unwrap();
    file.set_len(1000).unwrap();
    let error = Guest::start(&file, RESTARTS).err().unwrap();
    assert!(format!("{error:#}").contains("1000 bytes"), "{error:#}");
    assert_eq!(workers(), [] as [Worker; 0]);
    drop(file);
    assert_eq!(descriptors(), before);
}
