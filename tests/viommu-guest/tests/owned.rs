//! The function under its owner: the time of its answers, and the kicks that it asks for.

use guest_mem::{Iommu, Iova, Perm};
use sidecore::{Activity, Poller};
use viommu_guest::{ByHand, DISK, Guest, attach, detach, machine, map, unmap};

fn guest(is_trapped: bool) -> Guest<ByHand> {
    let (owner, ram) = machine(is_trapped);
    Guest::new(ByHand::new(owner), ram)
}

/// Sweeps until nothing is left to do.
fn settle(guest: &mut Guest<ByHand>) {
    for _ in 0..1000 {
        if guest.bus.sweep() == Activity::Idle {
            return;
        }
    }
    panic!("it is busy for ever");
}

/// A domain's life, with one request at a time.
fn requests() -> Vec<Vec<u8>> {
    vec![
        attach(7, DISK),
        map(7, 0x1000, 0x9000),
        map(7, 0x2000, 0xa000),
        unmap(7, 0x1000),
        unmap(7, 0x2000),
        detach(7, DISK),
    ]
}

#[test]
fn a_request_is_answered_within_the_sweep_that_takes_it() {
    let mut guest = guest(false);
    // What the start has left.
    settle(&mut guest);
    for request in requests() {
        guest.put(&request);
        guest.bus.sweep();
        assert_eq!(guest.answer(), Some(0), "{request:?}");
    }
}

#[test]
fn polling_device_needs_no_kick_and_sleeping_device_one() {
    let mut guest = guest(false);
    settle(&mut guest);
    // The very first request needs a kick: a ring begins so.
    assert_eq!(guest.request(&attach(1, DISK)), 0);
    assert_eq!(guest.request(&detach(1, DISK)), 0);
    for request in requests() {
        assert!(!guest.put(&request), "it is awake");
        guest.bus.sweep();
        assert_eq!(guest.answer(), Some(0));
    }
    guest
        .bus
        .owner
        .arm(&mut guest.bus.wakes)
        .expect("it sleeps");
    assert!(!guest.bus.owner.has_work());
    assert!(guest.put(&attach(7, DISK)), "it sleeps");
    assert!(guest.bus.owner.has_work());
    guest.bus.owner.disarm();
    guest.bus.sweep();
    assert_eq!(guest.answer(), Some(0));
    assert!(!guest.put(&detach(7, DISK)), "it is awake again");
}

#[test]
fn a_trapped_device_gets_a_kick_for_each_request_and_sees_none_before() {
    let mut guest = guest(true);
    settle(&mut guest);
    for request in requests() {
        assert!(guest.put(&request), "it wants each kick");
        for _ in 0..5000 {
            guest.bus.sweep();
        }
        assert_eq!(guest.answer(), None, "nobody has looked: {request:?}");
        guest.kick();
        let mut sweeps = 0;
        let status = loop {
            if let Some(status) = guest.answer() {
                break status;
            }
            guest.bus.sweep();
            sweeps += 1;
            assert!(sweeps < 100, "no answer: {request:?}");
        };
        assert_eq!(status, 0, "{request:?}");
        assert_eq!(sweeps, 1, "{request:?}");
        // It finds nothing more, and asks for the next kick.
        settle(&mut guest);
    }
    assert_eq!(guest.kicks, 6);
}

#[test]
fn a_trapped_device_is_notified_of_the_end_of_an_access_that_an_unmap_waits_for() {
    for is_trapped in [false, true] {
        let mut guest = guest(is_trapped);
        assert_eq!(guest.request(&attach(7, DISK)), 0);
        assert_eq!(guest.request(&map(7, 0x1000, 0x9000)), 0);
        let ram = guest.ram.clone();
        let lease = {
            let unit = guest.bus.unit();
            let mut view = guest_mem::View::new(unit, &ram, DISK);
            guest_mem::Dma::lease(&mut view, Iova::new(0x1000), 8, Perm::Write).expect("mapped")
        };
        if guest.put(&unmap(7, 0x1000)) {
            guest.kick();
        }
        for _ in 0..100 {
            guest.bus.sweep();
        }
        assert_eq!(guest.answer(), None, "a device holds the page");
        guest_mem::Leases::end(guest.bus.unit().leases_mut(), lease.id);
        for _ in 0..3 {
            guest.bus.sweep();
        }
        assert_eq!(guest.answer(), Some(0), "trapped: {is_trapped}");
    }
}
