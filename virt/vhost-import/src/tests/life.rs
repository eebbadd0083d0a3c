//! Start, stop, resume, reset.

use super::*;
use std::os::fd::AsFd;

#[test]
fn the_guest_is_offered_what_the_back_end_offers_without_what_is_not_for_guests() {
    let mut plan = plan();
    // Packed rings, ACCESS_PLATFORM, LOG_ALL, a writable configuration.
    plan.features |= 1 << 34 | 1 << 33 | 1 << 26 | 1 << 11;
    let back_end = BackEnd::new(plan);
    let guest = Guest::connect(&back_end, 2);
    let expected = feature::VERSION_1 | feature::EVENT_IDX | 1 << 6 | 1 << 9 | 1 << 12;
    assert_eq!(guest.import.features(), expected);
    assert_eq!(guest.import.queue_sizes(), [256, 256]);
    let mut space = [0xff; 64];
    guest.import.read_config(0, &mut space);
    assert_eq!(space[..8], 2048_u64.to_le_bytes());
    assert_eq!(space[34..36], 2_u16.to_le_bytes());
    assert_eq!(space[60..], [0; 4]);
    guest.import.read_config(u64::MAX, &mut space);
    assert_eq!(space, [0; 64]);
}

#[test]
fn the_memory_shared_is_guest_ram_by_its_own_file() {
    let back_end = BackEnd::new(plan());
    let guest = Guest::connect(&back_end, 1);
    guest.ram.write(Gpa::new(HIGH + 5), b"here").unwrap();
    let memory = back_end.seen().memory.clone().unwrap();
    let places: Vec<_> = memory
        .iter()
        .map(|region| (region.place.guest_addr, region.place.size))
        .collect();
    assert_eq!(places, [(0, RAM), (HIGH, RAM)]);
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::from(memory[1].fd.try_clone().unwrap());
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, memory[1].place.mmap_offset + 5)
        .unwrap();
    assert_eq!(&bytes, b"here");
}

#[test]
fn a_start_describes_every_ring_and_enables_it() {
    let back_end = BackEnd::new(plan());
    let mut guest = Guest::connect(&back_end, 2);
    guest.start();
    eventually("both rings", || {
        let seen = back_end.seen();
        seen.is_serving(0) && seen.is_serving(1)
    });
    let seen = back_end.seen();
    assert_eq!(
        seen.features.last(),
        Some(&(guest.import.features() | 1 << 30))
    );
    let memory = seen.memory.as_ref().unwrap();
    for (config, ring) in seen.started.iter().zip(guest.rings()) {
        // Addresses are in the region's user address space.
        let region = &memory[usize::from(ring.index % 2)].place;
        let guest_addr = |user: u64| user - region.user_addr + region.guest_addr;
        assert_eq!(guest_addr(config.desc), ring.desc.raw());
        assert_eq!(guest_addr(config.avail), ring.avail.raw());
        assert_eq!(guest_addr(config.used), ring.used.raw());
        assert_eq!(
            (config.size, config.base),
            (SIZE, vhost_user::backend::RingBase::Split(0))
        );
        assert!(config.call.is_some() && config.err.is_some());
    }
    assert_eq!((seen.inflight_made, seen.inflight_given.len()), (1, 1));
}

#[test]
fn a_stop_asks_for_every_ring_and_a_resume_goes_on_where_they_stood() {
    let back_end = BackEnd::new(plan());
    let mut guest = Guest::connect(&back_end, 2);
    guest.start();
    guest.stop();
    assert_eq!(back_end.seen().stopped, [0, 1]);
    guest.import.resume();
    eventually("started again", || back_end.seen().started.len() == 4);
    let base = back_end.seen().started[3].base;
    assert_eq!(base, vhost_user::backend::RingBase::Split(7));
    // The same region: nothing was in flight, but a crash comes when it likes.
    let seen = back_end.seen();
    assert_eq!((seen.inflight_made, seen.inflight_given.len()), (1, 2));
}

#[test]
fn a_reset_forgets_and_the_next_start_is_fresh() {
    let back_end = BackEnd::new(plan());
    let mut guest = Guest::connect(&back_end, 1);
    for round in 1..=3 {
        guest.start();
        guest.stop();
        guest.import.reset();
        let seen = back_end.seen();
        let base = seen.started.last().unwrap().base;
        assert_eq!(base, vhost_user::backend::RingBase::Split(0));
        assert_eq!((seen.inflight_made, seen.connections), (round, 1));
    }
    assert!(!guest.import.needs_reset());
}

#[test]
fn a_doorbell_that_came_to_us_is_passed_on() {
    let back_end = BackEnd::new(plan());
    let mut guest = Guest::connect(&back_end, 1);
    guest.start();
    eventually("started", || back_end.seen().is_serving(0));
    guest.import.kick(0);
    guest.import.kick(9);
    let vhost_user::backend::Kick::Fd(kick) = back_end.seen().started[0].kick.clone() else {
        panic!("a descriptor")
    };
    assert!(sidecore::drain_eventfd(kick.as_fd()));
}

#[test]
fn without_memory_slots_and_acknowledgements_it_works_too() {
    use vhost_user::wire::ProtocolFeatures;
    let plan = Plan {
        protocol: ProtocolFeatures::CONFIG,
        ..plan()
    };
    let back_end = BackEnd::new(plan);
    let mut guest = Guest::connect(&back_end, 1);
    guest.start();
    eventually("started", || back_end.seen().is_serving(0));
    assert_eq!(back_end.seen().memory.as_ref().unwrap().len(), 2);
    guest.stop();
}
