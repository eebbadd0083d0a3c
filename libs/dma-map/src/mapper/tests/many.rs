//! Many mappings ended at once.

use alloc::vec::Vec;

use address::Iova;
use iova::Access;

use super::*;
use crate::testing::TICK;

/// `count` mappings of a page each, all of which the device has seen.
fn mapped(world: &World, core: &mut Core<TreeAllocator>, count: u64) -> Vec<Mapping> {
    let mappings = (0..count).map(|at| core.map(&[page(at)], Direction::ToDevice).unwrap());
    let mappings: Vec<_> = mappings.collect();
    for mapping in &mappings {
        world.device.access(mapping.iova(), Access::Read).unwrap();
    }
    mappings
}

fn iovas(mappings: &[Mapping]) -> Vec<Iova> {
    mappings.iter().map(Mapping::iova).collect()
}

fn reached(world: &World, iovas: &[Iova]) -> usize {
    let is_reached = |iova: &&Iova| world.device.access(**iova, Access::Read).is_ok();
    iovas.iter().filter(is_reached).count()
}

#[test]
fn every_policy_ends_a_list_as_it_ends_each() {
    for (policy, count) in policies().flat_map(|policy| [1, 2, 32, 33, 100].map(|n| (policy, n))) {
        let world = world(policy);
        let mut core = world.core(0);
        let mut mappings = mapped(&world, &mut core, count);
        let iovas = iovas(&mappings);
        core.unmap_many(&mut mappings).unwrap();
        assert!(mappings.is_empty());
        let risk = world.mapper.risk();
        risk.check(TICK).unwrap();
        let open = reached(&world, &iovas) as u64;
        match is_strict(&policy) {
            true => assert_eq!(
                (open, risk.stale_max),
                (0, 0),
                "{policy:?}: reached after its list was unmapped"
            ),
            false => assert!(open <= risk.stale_now, "{policy:?}: {open}, {risk:?}"),
        }
        core.park().unwrap();
        assert_eq!(reached(&world, &iovas), 0, "{policy:?}");
        assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
    }
}

/// The reference: one by one.
#[test]
fn neighbours_share_a_command_and_groups_a_submission() {
    for (policy, one_by_one) in [(Policy::STRICT, 64), (Policy::SHARED, 64)] {
        let world = world(policy);
        let mut core = world.core(0);
        for mapping in mapped(&world, &mut core, 64) {
            core.unmap(mapping).unwrap();
        }
        assert_eq!(world.iotlb.commands(), one_by_one);
        let mut mappings = mapped(&world, &mut core, 64);
        core.unmap_many(&mut mappings).unwrap();
        // Two groups of pages that lie in one piece.
        assert_eq!(world.iotlb.commands(), one_by_one + 2, "{policy:?}");
        // Every second one: a command each, of which so many are a domain's.
        let (mut mappings, odd) = mapped(&world, &mut core, 64)
            .into_iter()
            .partition::<Vec<_>, _>(|mapping| mapping.range().first().raw() % 2 == 0);
        core.unmap_many(&mut mappings).unwrap();
        assert_eq!(world.iotlb.commands(), one_by_one + 3, "{policy:?}");
        mappings.extend(odd);
        core.unmap_many(&mut mappings).unwrap();
    }
}

/// Those before it have ended; it and those behind it are as they were.
#[test]
fn a_mapping_that_is_refused_is_named_and_begins_the_list() {
    let (here, there) = (world(Policy::STRICT), world(Policy::STRICT));
    let (mut core, mut other) = (here.core(0), there.core(0));
    for at in [0, 5, 31, 32, 40] {
        let mut mappings = mapped(&here, &mut core, 48);
        let all = iovas(&mappings);
        let foreign = other.map(&[page(9)], Direction::ToDevice).unwrap();
        let iova = foreign.iova();
        mappings.insert(at, foreign);
        let error = core.unmap_many(&mut mappings).unwrap_err();
        let source = DmaUnmapError::OtherDomain { iova };
        assert_eq!(error, UnmapManyError { index: at, source });
        assert_eq!((mappings.len(), reached(&here, &all)), (49 - at, 48 - at));
        assert_eq!(reached(&here, &all[..at]), 0);
        assert!(there.device.access(iova, Access::Read).is_ok());
        other.unmap(mappings.remove(0)).unwrap();
        core.unmap_many(&mut mappings).unwrap();
        assert_eq!(reached(&here, &all), 0);
    }
}

#[test]
fn shared_mappings_end_with_their_last_user() {
    let world = world(Policy::SHARED);
    let mut core = world.core(0);
    let (mut first, mut second) = (mapped(&world, &mut core, 40), mapped(&world, &mut core, 40));
    let all = iovas(&first);
    assert_eq!(all, iovas(&second));
    core.unmap_many(&mut first).unwrap();
    assert_eq!(reached(&world, &all), 40);
    core.unmap_many(&mut second).unwrap();
    assert_eq!(reached(&world, &all), 0);
}

/// Each mapping of a group whose invalidation was not answered waits, counted; when there is no
/// room for more, mappings stay.
#[test]
fn unmap_many_on_dead_device_leaves_stale_mappings_out_of_the_list() {
    for policy in [Policy::STRICT, Policy::STRICT_COMBINING, Policy::SHARED] {
        let world = world(policy);
        let mut core = world.core(0);
        let mut mappings = mapped(&world, &mut core, 100);
        let all = iovas(&mappings);
        world.iotlb.die_for(1000);
        let mut ended = 0;
        // Groups of 32, until the 64 places of a strict queue are taken.
        for (index, left) in [(0, 68), (0, 36)] {
            let error = core.unmap_many(&mut mappings).unwrap_err();
            assert!(
                matches!(error.source, DmaUnmapError::NotInvalidated { iova, .. } if iova == all[ended]),
                "{error:?}"
            );
            assert_eq!((error.index, mappings.len()), (index, left), "{policy:?}");
            ended = 100 - left;
            assert_eq!(world.mapper.risk().stale_now, ended as u64);
        }
        let error = core.unmap_many(&mut mappings).unwrap_err();
        assert!(matches!(error.source, DmaUnmapError::NoRoom { .. }));
        assert_eq!((error.index, mappings.len()), (0, 36));
        assert_eq!(reached(&world, &all), 100);
        world.iotlb.die_for(0);
        core.unmap_many(&mut mappings).unwrap();
        assert_eq!(reached(&world, &all), 0, "{policy:?}");
        core.park().unwrap();
        let live = world.mapper.allocator_stats().live_ranges;
        assert_eq!((world.mapper.risk().stale_now, live), (0, 0));
    }
}

#[test]
fn an_asynchronous_group_has_one_ticket() {
    let world = world(Policy::ASYNC);
    let mut core = world.core(0);
    let mut mappings = mapped(&world, &mut core, 30);
    let all = iovas(&mappings);
    core.unmap_many(&mut mappings).unwrap();
    // The ticket of a second submission was never polled: there was none.
    assert!(world.iotlb.commands() <= 1, "{}", world.iotlb.commands());
    core.park().unwrap();
    assert_eq!(reached(&world, &all), 0);
}
