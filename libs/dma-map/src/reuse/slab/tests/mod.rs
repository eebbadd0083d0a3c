use std::sync::mpsc;
use std::time::Duration;

use iova::{IovaPfn, IovaRange};

use super::*;

/// An interrupt may have come in the middle of a look.
#[test]
fn whether_something_is_due_is_answered_while_somebody_looks() {
    let slab = Slab::new(2, 10);
    let range = IovaRange::new(IovaPfn::new(7), 1).unwrap();
    slab.publish(1, PackedRange::new(range).unwrap(), 5);
    assert_eq!((slab.is_due(14), slab.is_due(15)), (false, true));
    let looking = slab.expiry_scan.lock();
    std::thread::scope(|scope| {
        let (told, answer) = mpsc::channel();
        let slab = &slab;
        scope.spawn(move || told.send((slab.is_due(14), slab.is_due(15))));
        let early = answer.recv_timeout(Duration::from_secs(10));
        drop(looking);
        assert_eq!(early, Ok((false, true)));
    });
    let mut batch = Batch::with_room(2);
    assert_eq!(slab.expire(15, &mut batch), Progress::Done);
    assert!(!slab.is_due(15), "taken");
    slab.torn_down(&mut batch, 16);
}

/// Another thread that counts, or scans for due mappings, is no reason to return `Done`.
#[test]
fn drain_takes_idle_mappings_while_another_thread_scans() {
    let slab = Slab::new(2, 10);
    let range = IovaRange::new(IovaPfn::new(7), 1).unwrap();
    slab.publish(1, PackedRange::new(range).unwrap(), 5);
    let looking = slab.expiry_scan.lock();
    std::thread::scope(|scope| {
        let (told, answer) = mpsc::channel();
        let slab = &slab;
        scope.spawn(move || {
            let mut batch = Batch::with_room(2);
            let progress = slab.drain(&mut batch);
            told.send((progress, batch.entries().len())).unwrap();
            slab.torn_down(&mut batch, 6);
        });
        // A wrong answer does not wait for us.
        let early = answer.recv_timeout(Duration::from_millis(50)).ok();
        drop(looking);
        let answer = early.unwrap_or_else(|| answer.recv().unwrap());
        assert_eq!(answer, (Progress::Done, 1));
    });
    assert!(slab.slot(1).is_owned());
}
