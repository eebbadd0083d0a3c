//! Errors say what and where, and leave things as they were.

use iova::Access;

use super::*;
use crate::invalidate::InvalidateError;

#[test]
fn memory_that_is_none_is_refused() {
    let world = world(Policy::STRICT);
    let mut core = world.core(0);
    let end = PhysAddr::new(u64::MAX - 10);
    let to = Direction::ToDevice;
    assert_eq!(core.map(&[], to), Err(DmaMapError::NoSegments));
    let (index, phys) = (0, PhysAddr::new(7));
    assert_eq!(
        core.map(&[Segment::new(phys, 0)], to),
        Err(DmaMapError::Empty { index, phys })
    );
    let (phys, len) = (end, 12);
    assert_eq!(
        core.map(&[Segment::new(phys, len)], to),
        Err(DmaMapError::Wraps { index, phys, len })
    );
    let index = 1;
    assert_eq!(
        core.map(&[page(1), Segment::new(phys, len)], to),
        Err(DmaMapError::Wraps { index, phys, len })
    );
    let huge = core.map(&[Segment::new(PhysAddr::new(0), u64::MAX)], to);
    assert!(matches!(huge, Err(DmaMapError::Alloc(_))), "{huge:?}");
    let above = core.map(&[Segment::new(PhysAddr::new(1 << 60), 1)], to);
    assert!(matches!(above, Err(DmaMapError::Table(_))), "{above:?}");
    assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
}

#[test]
fn a_list_that_fails_halfway_leaves_nothing() {
    let world = world(Policy::DEFERRED);
    let mut core = world.core(0);
    let list = [page(1), page(2), Segment::new(PhysAddr::new(1 << 60), 1)];
    let mut out = Vec::new();
    let failed = core.map_list(
        &DeviceLimits::default(),
        &list,
        Direction::ToDevice,
        &mut out,
    );
    assert!(matches!(failed, Err(DmaMapError::Table(_))) && out.is_empty());
    assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
    assert_eq!(
        world.iotlb.commands(),
        1,
        "the device may have seen the first two"
    );
}

#[test]
fn another_domains_mapping_is_refused() {
    let (here, there) = (world(Policy::STRICT), world(Policy::STRICT));
    let (mut core, mut other) = (here.core(0), there.core(0));
    let mapping = core.map(&[page(1)], Direction::ToDevice).unwrap();
    let decoy = other.map(&[page(2)], Direction::ToDevice).unwrap();
    assert_eq!(mapping.iova(), decoy.iova(), "or the test shows nothing");
    let (iova, len) = (mapping.iova(), mapping.len());
    assert_eq!(
        other.unmap(mapping),
        Err(DmaUnmapError::OtherDomain { iova })
    );
    assert!(here.device.access(iova, Access::Read).is_ok());
    assert!(there.device.access(iova, Access::Read).is_ok());
    core.unmap_at(iova, len).unwrap();
    other.unmap(decoy).unwrap();
}

/// A mapping may outlive its domain, and the next domain may lie where that one did: it refuses the
/// mapping, and its own of the same IOVA stays.
#[test]
fn a_mapping_of_a_dropped_domain_is_refused_by_the_next_at_its_address() {
    let (mut dropped, mut next) = (world(Policy::STRICT), world(Policy::STRICT));
    let mapping = dropped.core(0).map(&[page(1)], Direction::ToDevice);
    let mapping = mapping.unwrap();
    let (old, new) = (&mut dropped.0.mapper.0, &mut next.0.mapper.0);
    let address = Arc::as_ptr(old);
    core::mem::swap(Arc::get_mut(old).unwrap(), Arc::get_mut(new).unwrap());
    core::mem::swap(old, new);
    drop(dropped);
    assert_eq!(Arc::as_ptr(&next.mapper.0), address);
    let mut core = next.core(0);
    let decoy = core.map(&[page(2)], Direction::ToDevice).unwrap();
    let iova = mapping.iova();
    assert_eq!(iova, decoy.iova(), "or the test shows nothing");
    assert_eq!(
        core.unmap(mapping),
        Err(DmaUnmapError::OtherDomain { iova })
    );
    assert!(next.device.access(iova, Access::Read).is_ok());
    core.unmap(decoy).unwrap();
}

/// A device that does not answer: the unmap returns an error, the IOVA is not allocated again, and
/// comes back when the device answers.
#[test]
fn an_invalidation_that_times_out_keeps_the_iova() {
    for policy in [Policy::STRICT, Policy::STRICT_COMBINING] {
        let world = World::of(space(2, 1), policy, DeviceLimits::default());
        let mut core = world.core(0);
        let mapping = core.map(&[page(1)], Direction::ToDevice).unwrap();
        let iova = mapping.iova();
        world.device.access(iova, Access::Read).unwrap();
        world.iotlb.die_for(1);
        let source = InvalidateError::TimedOut {
            waited_ns: 1_000_000_000,
        };
        assert_eq!(
            core.unmap(mapping),
            Err(DmaUnmapError::NotInvalidated { iova, source })
        );
        assert!(
            world.device.access(iova, Access::Read).is_ok(),
            "it did not answer"
        );
        let risk = world.mapper.risk();
        assert_eq!(
            risk.stale_now, 1,
            "a strict policy that could not keep its promise says so"
        );
        assert!(risk.check(0).is_err());
        let other = core.map(&[page(2)], Direction::ToDevice).unwrap();
        assert_ne!(other.iova(), iova);
        core.unmap(other).unwrap();
        // That one was answered, and a flush for the first follows it.
        assert!(world.device.access(iova, Access::Read).is_err());
        assert_eq!(world.mapper.risk().stale_now, 0);
        core.park().unwrap();
        assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
    }
}

#[test]
fn a_dead_device_fills_the_queue_and_then_unmaps_are_refused() {
    let window = Window {
        entries: 4,
        ..Window::DEFAULT
    };
    let policy = Policy::DEFERRED.with_teardown(Teardown::Deferred(window));
    let world = world(policy);
    let mut core = world.core(0);
    world.iotlb.die_for(1000);
    let mut refused = 0;
    for i in 0..6 {
        let mapping = core.map(&[page(i)], Direction::ToDevice).unwrap();
        let (iova, len) = (mapping.iova(), mapping.len());
        match core.unmap(mapping) {
            Ok(()) => assert!(i < 3),
            Err(DmaUnmapError::NotInvalidated { .. }) => assert_eq!(i, 3),
            Err(DmaUnmapError::NoRoom { .. }) => {
                assert!(i > 3);
                refused += 1;
                assert!(world.device.access(iova, Access::Read).is_ok(), "it lives");
                assert!(core.unmap_at(iova, len).is_err());
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!((refused, world.mapper.risk().stale_now), (2, 4));
    drop(core);
    assert_eq!(
        world.mapper.risk().stale_now,
        4,
        "nothing is forgotten with the handle"
    );
    world.iotlb.die_for(0);
    world.mapper.flush().unwrap();
    assert_eq!(world.mapper.risk().stale_now, 0);
    world.core(1).park().unwrap();
    assert_eq!(
        world.mapper.allocator_stats().live_ranges,
        2,
        "those refused"
    );
}

/// More of them than are torn down together. Another core gets their IOVAs once they are out of
/// reach, whether or not the dropped core's number is claimed again.
#[test]
fn idle_mappings_of_a_dead_device_stay_reported_and_others_adopt_them() {
    const COUNT: u64 = 100;
    let world = world(Policy::optimistic(256));
    let mut core = world.core(0);
    let live: Vec<_> = (0..COUNT)
        .map(|at| core.map(&[page(at)], Direction::ToDevice).unwrap())
        .collect();
    let iovas: Vec<_> = live.iter().map(Mapping::iova).collect();
    let reached = || {
        let is_reached = |iova: &&address::Iova| world.device.access(**iova, Access::Read).is_ok();
        iovas.iter().filter(is_reached).count() as u64
    };
    assert_eq!(reached(), COUNT);
    live.into_iter()
        .for_each(|mapping| core.unmap(mapping).unwrap());
    world.iotlb.die_for(2);
    assert!(core.park().is_err());
    drop(core);
    assert_eq!((reached(), world.mapper.risk().stale_now), (COUNT, COUNT));
    world.mapper.flush().unwrap();
    assert_eq!((reached(), world.mapper.risk().stale_now), (0, 0));
    world.core(1).park().unwrap();
    assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
    // Its next owner finds all places free.
    let mut core = world.core(0);
    let live: Vec<_> = (0..250)
        .map(|at| core.map(&[page(at)], Direction::ToDevice).unwrap())
        .collect();
    live.into_iter()
        .for_each(|mapping| core.unmap(mapping).unwrap());
    assert_eq!(world.mapper.risk().stale_now, 250);
    core.park().unwrap();
    assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
}

#[test]
fn mappings_that_join_a_failed_batch_are_cleared_too() {
    let idle = Optimistic {
        quota: 8,
        residency: Duration::from_millis(5),
    };
    let world = world(Policy::STRICT.with_reuse(Reuse::Optimistic(idle)));
    let mut core = world.core(0);
    let maps: Vec<_> = (0..64)
        .map(|at| core.map(&[page(at)], Direction::Bidirectional).unwrap())
        .collect();
    let iovas: Vec<_> = maps.iter().map(Mapping::iova).collect();
    // The device has cached nothing: pages that it reaches at the end are still mapped.
    world.iotlb.die_for(20);
    for mapping in maps {
        // Kept, torn down, or refused for now: each at its turn, on the common path and on the slow
        // one.
        let _ = core.unmap(mapping);
        world.clock.pass(TICK);
    }
    world.iotlb.die_for(0);
    for _ in 0..2 {
        world.mapper.flush().unwrap();
        core.park().unwrap();
    }
    assert_eq!(world.mapper.risk().stale_now, 0);
    let reached = |iova: &address::Iova| world.device.access(*iova, Access::Read).is_ok();
    assert_eq!(iovas.iter().filter(|iova| reached(iova)).count(), 0);
}

#[test]
fn without_translation_high_memory_is_refused() {
    let high = Segment::new(PhysAddr::new(1 << 40), 64);
    let (phys, last) = (high.phys, 0xffff_ffff);
    let world = World::of(space(64, 1), Policy::OFF, DeviceLimits::of_bits(32));
    let mut core = world.core(0);
    let refused = Err(DmaMapError::Unaddressable { phys, last });
    assert_eq!(core.map(&[high], Direction::ToDevice), refused);
    let mut out = Vec::new();
    let (any, list) = (DeviceLimits::default(), [page(7), high]);
    assert_eq!(
        core.map_list(&any, &list, Direction::ToDevice, &mut out),
        refused
    );
    assert!(out.is_empty());
    let low = core.map(&[page(7)], Direction::ToDevice).unwrap();
    assert_eq!(low.iova().raw(), 7 << 12);
    core.unmap(low).unwrap();
    assert!(world.mapper.risk().is_unprotected);
}

/// Adjacent pages are one element, as with translation.
#[test]
fn without_translation_a_list_is_where_the_memory_is() {
    let world = world(Policy::OFF);
    let mut core = world.core(0);
    let mut out = Vec::new();
    let (any, list) = (DeviceLimits::default(), [page(9), page(7), page(8)]);
    let mapping = core.map_list(&any, &list, Direction::ToDevice, &mut out);
    core.unmap(mapping.unwrap()).unwrap();
    let element = |number: u64, len| DeviceSegment {
        iova: address::Iova::new(number << 12),
        len,
    };
    assert_eq!(out, [element(9, 0x1000), element(7, 0x2000)]);
    let gap = core.map(&list, Direction::ToDevice);
    assert_eq!(gap, Err(DmaMapError::Gap { index: 0 }));
    let joined = core.map(&list[1..], Direction::ToDevice).unwrap();
    assert_eq!((joined.iova().raw(), joined.len()), (7 << 12, 0x2000));
}

#[test]
fn stacked_policies_report_the_sum() {
    let (guest, host) = (world(Policy::DEFERRED), world(Policy::optimistic(256)));
    let stacked = guest.mapper.risk().over(&host.mapper.risk());
    assert_eq!(stacked.contract.max_stale, Some(3 * (250 + 256)));
    assert_eq!(stacked.contract.max_age_ns, Some(20_000_000));
    let off = world(Policy::OFF);
    let open = guest.mapper.risk().over(&off.mapper.risk());
    assert_eq!(open.contract.max_age_ns, None);
}
