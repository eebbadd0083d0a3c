//! Guarantees of [`Ring`](crate::ring::Ring) for either layout.

use super::super::split::AVAIL_F_NO_INTERRUPT;
use super::world::{PACKED, World};
use super::*;
use crate::fake_driver::AnyDriver;
use crate::ring::{Ring, RingPosition, RingStart, StartError, Watch};

fn both(test: impl Fn(u64)) {
    test(ALL);
    test(PACKED);
}

/// Looks as often as it likes, and counts the loads of the driver's word.
#[test]
fn the_index_is_loaded_once_per_batch() {
    let mut world = World::new(8, ALL);
    for _ in 0..3 {
        world.offer(&[4], &[], false);
    }
    world.driver.publish();
    assert!(world.has_available());
    let AnyDriver::Split(driver) = &world.driver else {
        panic!("a split ring");
    };
    // Nonsense that would be a violation, were it looked at.
    driver.put_avail_idx(1000);
    for _ in 0..3 {
        assert!(world.has_available());
        assert!(world.take());
    }
    let found = world.ring.has_available(&mut world.dma);
    let want = Violation::AvailTooFar {
        idx: 1000,
        next_avail: 3,
    };
    assert_eq!(found, Err(want.into()));
}

#[test]
fn more_than_the_ring_holds_cannot_be_in_flight() {
    let mut world = World::new(4, ALL);
    for _ in 0..4 {
        world.offer(&[4], &[], false);
    }
    world.driver.publish();
    while world.take() {}
    let AnyDriver::Split(driver) = &world.driver else {
        panic!("a split ring");
    };
    // Four more, none of the first four returned.
    driver.put_avail_idx(8);
    assert!(world.ring.has_available(&mut world.dma).is_err());
    assert_eq!(world.ring.parked(), Some(Parked::Violation));
}

#[test]
fn arming_is_free_until_something_was_consumed() {
    both(|features| {
        let mut world = World::new(8, features);
        world.again(|ring, dma, _| ring.arm(dma));
        let page: [u8; 1024] = world.driver.mem().get(Gpa::new(RINGS));
        // No store: not even over what something else left there.
        world.driver.mem().put(Gpa::new(RINGS), &[0xa5; 1024]);
        for _ in 0..3 {
            world.again(|ring, dma, _| ring.disarm(dma));
            world.again(|ring, dma, _| ring.arm(dma));
        }
        let after: [u8; 1024] = world.driver.mem().get(Gpa::new(RINGS));
        assert_eq!(after, [0xa5; 1024]);
        world.driver.mem().put(Gpa::new(RINGS), &page);
        // A doorbell for the next chain, none for those behind it.
        world.offer(&[4], &[], false);
        assert!(world.driver.publish());
        assert!(world.take());
        world.again(|ring, dma, _| ring.disarm(dma));
        world.offer(&[4], &[], false);
        assert!(!world.driver.publish());
        assert!(world.take());
        world.again(|ring, dma, _| ring.arm(dma));
        world.offer(&[4], &[], false);
        assert!(world.driver.publish());
        world.drain();
    });
}

/// A ring of more than one page: a page that the ring reaches by a pointer is reported as in use,
/// so that it is not evicted, for as long as the pointer holds.
#[test]
fn pages_behind_pointers_that_hold_are_in_use() {
    both(|features| {
        let mut world = World::new(512, features);
        let config = world.driver.config();
        let pages: Vec<_> = (0..16)
            .map(|page| Gpa::new(RINGS + page * 0x1000))
            .collect();
        let pages = Pages::new(&pages).unwrap();
        let in_use = |world: &World| world.ring.in_use(world.dma.generation(), &pages);
        let page_of = |at: Iova| pages.touched(Gpa::new(at.raw()), 1);
        assert_eq!(in_use(&world), 0, "no pointer yet");
        assert!(!world.has_available());
        let word = if world.ring.is_packed() {
            config.desc
        } else {
            config.avail
        };
        assert_eq!(in_use(&world) & page_of(word), page_of(word));
        world.offer(&[4], &[], false);
        world.drain();
        let touched = page_of(config.desc) | page_of(config.avail) | page_of(config.used);
        assert_eq!(in_use(&world) & touched, touched);
        world.flush();
        assert_eq!(in_use(&world), 0, "they are asked for again");
        assert!(!world.has_available());
        assert_ne!(in_use(&world), 0);
    });
}

#[test]
fn a_successor_does_not_trust_the_flags_it_finds() {
    // NO_NOTIFY left by a predecessor: without a store the driver would never ring.
    let features = ALL & !feature::EVENT_IDX;
    for features in [features, features | feature::RING_PACKED] {
        let mut world = World::new(8, features);
        world.again(|ring, dma, _| ring.disarm(dma));
        world.offer(&[4], &[], false);
        assert!(!world.driver.publish());
        world.ring = Ring::new(&world.driver.config(), 8, features).unwrap();
        world.ring.start(RingStart::Fresh).unwrap();
        world.again(|ring, dma, _| ring.arm(dma));
        world.drain();
        world.again(|ring, dma, _| ring.arm(dma));
        world.offer(&[4], &[], false);
        assert!(world.driver.publish());
    }
}

#[test]
fn a_watch_fires_when_there_is_something_and_not_before() {
    for (features, size) in [(ALL, 4), (PACKED, 3), (PACKED, 1)] {
        let mut world = World::new(size, features);
        let mut watch: Option<Watch> = None;
        for _ in 0..20 {
            world.ring.watch_in(&mut world.dma, &mut watch);
            let fires = |watch: &Option<Watch>| watch.as_ref().expect("made").fires();
            assert!(!fires(&watch));
            for _ in 0..size {
                world.offer(&[4], &[], false);
            }
            assert!(!fires(&watch), "not published");
            world.driver.publish();
            assert!(fires(&watch));
            while world.take() {}
            // The whole ring is outstanding.
            world.ring.watch_in(&mut world.dma, &mut watch);
            assert!(!fires(&watch));
            while !world.held.is_empty() {
                world.end(0, 0);
            }
            world.publish();
            assert!(!fires(&watch), "our own stores do not count");
            world.reap();
        }
    }
}

#[test]
fn in_order_one_entry_stands_for_a_batch() {
    // Four chains of 8 writable bytes; the third is written in part, so it ends a batch.
    let serve = |world: &mut World| {
        for _ in 0..4 {
            world.offer(&[4], &[8], false);
        }
        world.driver.publish();
        while world.take() {}
        // Ended in another order: nothing is published before the first.
        world.end(3, 8);
        world.end(1, 8);
        world.end(1, 3);
        assert_eq!(world.publish(), 0);
        world.end(0, 8);
        assert_eq!(world.publish(), 4);
    };
    let mut world = World::new(8, ALL | feature::IN_ORDER);
    serve(&mut world);
    let AnyDriver::Split(driver) = &world.driver else {
        panic!("a split ring");
    };
    assert_eq!(driver.used_idx(), 4);
    let used = driver.config().used.raw();
    let element = |slot: u64| {
        let at = Gpa::new(used + 4 + 8 * slot);
        (
            driver.mem().get_u32(at),
            driver.mem().get_u32(Gpa::new(at.raw() + 4)),
        )
    };
    let ids: Vec<u32> = world.account.iter().map(|(own, _)| own.id.into()).collect();
    // The first element returns three chains, the fourth one; between them nothing was written.
    assert_eq!(
        [0, 1, 2, 3].map(element),
        [(ids[2], 3), (0, 0), (0, 0), (ids[3], 8)]
    );
    world.reap();

    let mut world = World::new(8, PACKED | feature::IN_ORDER);
    serve(&mut world);
    let AnyDriver::Packed(driver) = &world.driver else {
        panic!("a packed ring");
    };
    let used: Vec<bool> = (0..8)
        .map(|at| driver.flags(at) & 0x8080 == 0x8080)
        .collect();
    // Chains of two descriptors.
    assert_eq!(used, [true, false, false, false, false, false, true, false]);
    world.reap();
    world.drain();
}

#[test]
fn a_ring_starts_only_where_it_can() {
    let split = |next_avail, next_used, replay: &[u16]| RingStart::Split {
        next_avail,
        next_used,
        replay: replay.to_vec(),
    };
    let packed = |at: u16, replay: &[usize]| RingStart::Packed {
        avail: (at, true),
        used: (at, false),
        replay: replay
            .iter()
            .map(|&len| (0, vec![desc(BUFFER, 4, 0, 0); len]))
            .collect(),
    };
    let start = |features, at: RingStart| World::new(4, features).ring.start(at);
    assert_eq!(start(ALL, packed(0, &[])), Err(StartError::Layout));
    assert_eq!(start(PACKED, split(0, 0, &[])), Err(StartError::Layout));
    assert_eq!(start(ALL, split(3, 0, &[0, 1, 3])), Ok(()));
    assert_eq!(start(ALL, split(0, 0, &[4])), Err(StartError::Replay));
    assert_eq!(start(ALL, split(0, 0, &[1, 1])), Err(StartError::Replay));
    assert_eq!(start(PACKED, packed(3, &[1, 3])), Ok(()));
    assert_eq!(start(PACKED, packed(4, &[])), Err(StartError::Position(4)));
    assert_eq!(start(PACKED, packed(0, &[2, 3])), Err(StartError::Replay));
    assert_eq!(start(PACKED, packed(0, &[0])), Err(StartError::Replay));
    both(|features| {
        let mut world = World::new(4, features);
        world.offer(&[4], &[], false);
        world.driver.publish();
        world.take();
        assert_eq!(world.ring.start(RingStart::Fresh), Err(StartError::InUse));
        world.drain();
        world.ring.start(RingStart::Fresh).unwrap();
    });
}

#[test]
fn a_ring_goes_on_from_its_position() {
    both(|features| {
        let mut world = World::new(4, features);
        for round in 0..30 {
            for _ in 0..1 + round % 2 {
                world.offer(&[4], &[8], round % 3 == 0);
            }
            world.drain();
            assert_eq!(world.ring.in_flight(), 0);
            let saved = world.ring.save().expect("idle");
            assert_eq!(saved.is_packed, features == PACKED);
            let start = match world.ring.position() {
                RingPosition::Split {
                    next_avail,
                    next_used,
                } => {
                    assert_eq!((saved.next_avail, saved.next_used), (next_avail, next_used));
                    RingStart::Split {
                        next_avail,
                        next_used,
                        replay: Vec::new(),
                    }
                }
                RingPosition::Packed { avail, used } => {
                    assert_eq!(saved.next_avail, avail.0 | u16::from(avail.1) << 15);
                    RingStart::Packed {
                        avail,
                        used,
                        replay: Vec::new(),
                    }
                }
            };
            world.ring = Ring::new(&world.driver.config(), 4, features).unwrap();
            world.ring.start(start).unwrap();
        }
    });
}

#[test]
fn requests_in_flight_are_counted_and_not_saved() {
    both(|features| {
        let mut world = World::new(8, features);
        for _ in 0..3 {
            world.offer(&[4], &[], false);
        }
        world.driver.publish();
        world.take();
        world.take();
        assert_eq!(world.ring.in_flight(), 2);
        world.end(0, 0);
        assert_eq!((world.ring.in_flight(), world.ring.staged()), (2, 1));
        assert_eq!(world.ring.save(), None);
        world.publish();
        assert_eq!((world.ring.in_flight(), world.ring.staged()), (1, 0));
        assert_eq!(world.ring.save(), None);
        world.reap();
        world.drain();
        assert!(world.ring.save().is_some());
    });
}

#[test]
fn flags_of_a_split_driver_without_events_decide() {
    let mut world = World::new(8, ALL & !feature::EVENT_IDX);
    for flags in [0, AVAIL_F_NO_INTERRUPT] {
        let AnyDriver::Split(driver) = &world.driver else {
            panic!("a split ring");
        };
        driver.put_avail_flags(flags);
        world.offer(&[4], &[], false);
        world.driver.publish();
        world.take();
        world.end(0, 0);
        let wanted = world.again(|ring, dma, _| ring.publish(dma));
        assert_eq!(wanted, flags == 0);
        world.published += 1;
        world.reap();
    }
}
