//! The order in which a journal is called, seen from the memory, and what happens when it refuses.

use std::sync::{Arc, Mutex};

use super::world::{PACKED, World, violation};
use super::*;
use crate::ring::{Journal, JournalError, RingStart};

/// Calls, and whether the ring's memory had changed since the call before.
type Log = Arc<Mutex<Vec<(String, bool)>>>;

struct Recorder {
    log: Log,
    mem: ArrayMem,
    seen: Vec<u8>,
    next: u16,
    /// Number of requests that are still accepted.
    room: u16,
}

impl Recorder {
    fn note(&mut self, what: String) {
        let now = self.mem.get::<0x400>(Gpa::new(RINGS)).to_vec();
        let changed = now != self.seen;
        self.seen = now;
        self.log.lock().unwrap().push((what, changed));
    }
}

impl Journal for Recorder {
    fn begin(&mut self, head: u16, descs: &[RawDescriptor]) -> Result<u16, JournalError> {
        self.room = self.room.checked_sub(1).ok_or(JournalError)?;
        self.next += 1;
        let descs: Vec<_> = descs.iter().map(|desc| (desc.len, desc.next)).collect();
        self.note(format!("begin {head} {descs:?}"));
        Ok(self.next)
    }

    fn complete(&mut self, head: u16, slot: u16) {
        self.note(format!("complete {head} {slot}"));
    }

    fn advance(&mut self) {
        self.note("advance".into());
    }

    fn commit(&mut self) {
        self.note("commit".into());
    }
}

fn journaled(features: u64, room: u16) -> (World, Log) {
    let mut world = World::new(8, features);
    let log = Log::default();
    world.ring.set_journal(Box::new(Recorder {
        log: log.clone(),
        mem: world.driver.mem().clone(),
        seen: world.driver.mem().get::<0x400>(Gpa::new(RINGS)).to_vec(),
        next: 100,
        room,
    }));
    (world, log)
}

#[test]
fn a_batch_is_opened_and_closed_around_the_ring_s_stores() {
    for features in [
        ALL,
        PACKED,
        ALL | feature::IN_ORDER,
        PACKED | feature::IN_ORDER,
    ] {
        let (mut world, log) = journaled(features, 8);
        world.offer(&[4], &[6], false);
        world.offer(&[5], &[], false);
        world.driver.publish();
        let ids: Vec<u16> = world.offered.iter().map(|own| own.id).collect();
        world.take();
        world.end(0, 6);
        // Between staging and publishing others may be taken.
        world.take();
        world.end(0, 0);
        world.again(|ring, dma, _| ring.publish(dma));
        let log = log.lock().unwrap();
        let raw = |descs: &str| {
            if features & feature::RING_PACKED == 0 {
                "[]"
            } else {
                descs
            }
            .to_owned()
        };
        let first = raw(&format!("[(4, {}), (6, {})]", 0xbeef, ids[0]));
        let names: Vec<_> = log.iter().map(|(what, _)| what.as_str()).collect();
        let want = [
            format!("begin {} {first}", ids[0]),
            format!("begin {} {}", ids[1], raw(&format!("[(5, {})]", ids[1]))),
            format!("complete {} 101", ids[0]),
            format!("complete {} 102", ids[1]),
            "advance".into(),
            "commit".into(),
        ];
        assert_eq!(names, want);
        let changed: Vec<bool> = log.iter().map(|(_, changed)| *changed).collect();
        // The driver's own stores come first. Split rings hold used elements, unseen, since they
        // were staged (the second journal call finds the first one).
        let staged = features & (feature::RING_PACKED | feature::IN_ORDER) == 0;
        let in_order = features & (feature::RING_PACKED | feature::IN_ORDER) == feature::IN_ORDER;
        assert_eq!(
            changed,
            [true, staged, staged || in_order, false, false, true]
        );
    }
}

#[test]
fn in_order_with_a_journal_each_request_has_its_own_entry() {
    for features in [ALL | feature::IN_ORDER, PACKED | feature::IN_ORDER] {
        let (mut world, _) = journaled(features, 8);
        for _ in 0..3 {
            world.offer(&[4], &[], false);
        }
        world.driver.publish();
        let ids: Vec<u16> = world.offered.iter().map(|own| own.id).collect();
        while world.take() {}
        for _ in 0..3 {
            world.end(0, 0);
        }
        world.publish();
        let found: Vec<u16> = (0..3)
            .map(|nth| {
                let config = world.driver.config();
                let at = match features & feature::RING_PACKED {
                    0 => config.used.raw() + 4 + 8 * nth,
                    _ => config.desc.raw() + 16 * nth + 12,
                };
                world.driver.mem().get_u16(Gpa::new(at))
            })
            .collect();
        assert_eq!(found, ids);
        world.reap();
    }
}

#[test]
fn a_ring_whose_journal_refuses_publishes_nothing_more() {
    for features in [ALL, PACKED] {
        let (mut world, _) = journaled(features, 1);
        for _ in 0..2 {
            world.offer(&[4], &[], false);
        }
        world.driver.publish();
        world.take();
        assert_eq!(world.ring.parked(), None);
        world.take();
        assert_eq!(world.ring.parked(), Some(Parked::Violation));
        world.end(0, 0);
        let published = world.ring.publish(&mut world.dma);
        assert_eq!(violation(published), Violation::Journal);
        assert_eq!(world.driver.used(), None);
    }
}

#[test]
fn a_head_in_flight_is_not_recorded_twice() {
    let (mut world, _) = journaled(ALL, 8);
    world.offer(&[4], &[], false);
    world.driver.publish();
    let head = world.offered[0].id;
    world.take();
    let crate::fake_driver::AnyDriver::Split(driver) = &world.driver else {
        panic!("a split ring");
    };
    driver.put_avail(1, head);
    driver.put_avail_idx(2);
    let peeked = world.ring.peek(&mut world.dma, &mut world.chain);
    assert_eq!(violation(peeked), Violation::InFlight(head));
}

#[test]
fn replayed_chains_come_first_and_are_checked() {
    // Split: heads 2 and 1, in this order, then what is new.
    let mut world = World::new(4, ALL);
    for _ in 0..3 {
        world.offer(&[4], &[], false);
    }
    world.driver.publish();
    let ids: Vec<u16> = world.offered.iter().map(|own| own.id).collect();
    let replay = vec![ids[1], ids[0]];
    world
        .ring
        .start(RingStart::Split {
            next_avail: 2,
            next_used: 0,
            replay,
        })
        .unwrap();
    assert_eq!((world.ring.replaying(), world.ring.in_flight()), (2, 0));
    world.offered.swap(0, 1);
    assert!(world.has_available());
    assert!(world.take() && world.take());
    assert_eq!((world.ring.replaying(), world.ring.in_flight()), (0, 2));
    assert!(world.take() && !world.take());
    world.drain();
    // Packed: what the ring holds by now does not matter, what the journal kept does.
    let start = |descs: Vec<RawDescriptor>| {
        let mut world = World::new(4, PACKED);
        let replay = vec![(5, descs)];
        let (avail, used) = ((2, true), (0, true));
        world
            .ring
            .start(RingStart::Packed {
                avail,
                used,
                replay,
            })
            .unwrap();
        let peeked = world.ring.peek(&mut world.dma, &mut world.chain);
        (world, peeked)
    };
    let descs = vec![desc(BUFFER, 4, 1, 9), desc(BUFFER, 6, 2, 3)];
    let (mut world, peeked) = start(descs);
    assert_eq!(peeked, Ok(true));
    assert_eq!((world.chain.head(), world.chain.writable().len()), (3, 6));
    let token = world.ring.advance(&world.chain);
    assert_eq!((world.ring.replaying(), world.ring.in_flight()), (0, 1));
    world.ring.stage(&mut world.dma, token, 6).unwrap();
    world.ring.publish(&mut world.dma).unwrap();
    let at = RingPosition::Packed {
        avail: (2, true),
        used: (2, true),
    };
    assert_eq!(world.ring.position(), at);
    let (_, peeked) = start(vec![desc(BUFFER, 4, 2, 9), desc(BUFFER, 6, 0, 3)]);
    assert_eq!(violation(peeked), Violation::Order);
    let (_, peeked) = start(vec![desc(BUFFER, 16, 4, 9), desc(BUFFER, 6, 0, 3)]);
    assert_eq!(violation(peeked), Violation::Indirect);
}
