//! Reach of a device, and its end.

use alloc::vec::Vec;

use address::Iova;
use iova::Access;

use super::*;
use crate::testing::DeviceFault;

#[test]
fn strict_policies_leave_nothing_behind() {
    for policy in policies().filter(is_strict) {
        let world = world(policy);
        let mut core = world.core(0);
        for i in 0..1000 {
            let mapping = core
                .map(&[page(100 + i % 7)], Direction::Bidirectional)
                .unwrap();
            let iova = mapping.iova();
            assert!(world.device.access(iova, Access::ReadWrite).is_ok());
            core.unmap(mapping).unwrap();
            assert!(
                world.device.access(iova, Access::Read).is_err(),
                "{policy:?}"
            );
        }
        assert_eq!(world.mapper.risk().stale_max, 0);
    }
}

#[test]
fn the_device_may_do_what_the_direction_says_and_no_more() {
    let world = world(Policy::STRICT);
    let mut core = world.core(0);
    for (direction, allowed) in [
        (Direction::ToDevice, Access::Read),
        (Direction::FromDevice, Access::Write),
    ] {
        let mapping = core.map(&[page(9)], direction).unwrap();
        let iova = mapping.iova();
        for want in [Access::Read, Access::Write, Access::ReadWrite] {
            let got = world.device.access(iova, want);
            if want == allowed {
                assert_eq!(got, Ok(PhysAddr::new(9 << 12)));
            } else {
                assert_eq!(got, Err(DeviceFault::Denied { iova, allowed }));
            }
        }
        core.unmap(mapping).unwrap();
    }
}

#[test]
fn one_page_may_be_mapped_often() {
    for policy in policies() {
        let world = world(policy);
        let mut core = world.core(1);
        let both = core.map(&[page(5)], Direction::Bidirectional).unwrap();
        let read = core.map(&[page(5)], Direction::ToDevice).unwrap();
        let again = core.map(&[page(5)], Direction::ToDevice).unwrap();
        assert_ne!(both.iova(), read.iova());
        let read_at = again.iova();
        core.unmap(both).unwrap();
        core.unmap(read).unwrap();
        assert!(
            world.device.access(read_at, Access::Read).is_ok(),
            "{policy:?}"
        );
        core.unmap(again).unwrap();
    }
}

#[test]
fn deferred_closes_every_window_with_one_flush() {
    let world = world(Policy::DEFERRED);
    let mut core = world.core(0);
    let mut stale = Vec::new();
    for i in 0..249 {
        let mapping = core.map(&[page(i)], Direction::ToDevice).unwrap();
        world.device.access(mapping.iova(), Access::Read).unwrap();
        stale.push(mapping.iova());
        core.unmap(mapping).unwrap();
    }
    // The model device does keep what it saw: without this the test would prove nothing.
    assert!(
        stale
            .iter()
            .all(|iova| world.device.access(*iova, Access::Read).is_ok())
    );
    assert_eq!(
        (world.mapper.risk().stale_now, world.iotlb.commands()),
        (249, 0)
    );
    let mapping = core.map(&[page(1)], Direction::ToDevice).unwrap();
    core.unmap(mapping).unwrap();
    assert_eq!(
        (world.mapper.risk().stale_now, world.iotlb.commands()),
        (0, 1)
    );
    assert!(
        stale
            .iter()
            .all(|iova| world.device.access(*iova, Access::Read).is_err())
    );
    let risk = world.mapper.risk();
    assert_eq!((risk.stale_max, risk.stale_times.total()), (250, 250));
}

#[test]
fn optimistic_reuses_the_mapping_and_the_device_keeps_it() {
    let world = world(Policy::optimistic(256));
    let mut core = world.core(0);
    let first = core.map(&[page(5)], Direction::ToDevice).unwrap();
    let iova = first.iova();
    core.unmap(first).unwrap();
    assert!(
        world.device.access(iova, Access::Read).is_ok(),
        "idle, still mapped"
    );
    assert_eq!(world.mapper.risk().stale_now, 1);
    // The same page for another direction is another mapping.
    let written = core.map(&[page(5)], Direction::FromDevice).unwrap();
    assert_ne!(written.iova(), iova);
    let again = core.map(&[page(5)], Direction::ToDevice).unwrap();
    assert_eq!((again.iova(), world.mapper.risk().stale_now), (iova, 0));
    assert_eq!(world.iotlb.commands(), 0);
    core.unmap(again).unwrap();
    core.unmap(written).unwrap();
    // An idle mapping is not for any core to unmap.
    let mut other = world.core(1);
    assert!(core.unmap_at(iova, 1).is_err() && other.unmap_at(iova, 1).is_err());
    core.park().unwrap();
    assert!(world.device.access(iova, Access::Read).is_err());
}

#[test]
fn a_list_is_one_stretch_of_pages() {
    let world = world(Policy::STRICT);
    let mut core = world.core(0);
    let list = [
        Segment::new(PhysAddr::new(0x5800), 0x800),
        Segment::new(PhysAddr::new(0x9000), 0x1000),
        Segment::new(PhysAddr::new(0x2100), 0x10),
    ];
    let mut out = Vec::new();
    let mapping = core
        .map_list(
            &DeviceLimits::default(),
            &list,
            Direction::ToDevice,
            &mut out,
        )
        .unwrap();
    assert_eq!(out.len(), 2);
    assert_eq!((out[0].iova, out[0].len), (mapping.iova(), 0x1800));
    assert_eq!(out[1].len, 0x10);
    for (element, offset, phys) in [
        (0, 0, 0x5800),
        (0, 0x7ff, 0x5fff),
        (0, 0x800, 0x9000),
        (1, 0, 0x2100),
    ] {
        let iova = out[element].iova.checked_add(offset).unwrap();
        assert_eq!(
            world.device.access(iova, Access::Read),
            Ok(PhysAddr::new(phys))
        );
    }
    assert_eq!(mapping.range().pages(), 3);
    core.unmap(mapping).unwrap();
    assert!(world.device.access(out[1].iova, Access::Read).is_err());
    // Two segments that meet are one mapping; three that do not are refused without a trace.
    assert!(matches!(
        core.map(&list, Direction::ToDevice),
        Err(DmaMapError::Gap { index: 1 })
    ));
    let joined = core.map(&list[..2], Direction::ToDevice).unwrap();
    assert_eq!(joined.len(), 0x1800);
    core.unmap(joined).unwrap();
}

#[test]
fn long_elements_are_cut_for_the_device() {
    let limits = DeviceLimits::of_bits(32).with_max_segment(0x1000);
    let world = World::of(space(1 << 12, 1), Policy::STRICT, limits);
    let mut core = world.core(0);
    let mut out = Vec::new();
    let list = [Segment::new(PhysAddr::new(0x100), 0x2100)];
    let mapping = core
        .map_list(
            &DeviceLimits::default(),
            &list,
            Direction::ToDevice,
            &mut out,
        )
        .unwrap();
    let lens: Vec<u64> = out.iter().map(|element| element.len).collect();
    assert_eq!(lens, [0x1000, 0x1000, 0x100]);
    core.unmap(mapping).unwrap();
    assert!(matches!(
        core.map(&list, Direction::ToDevice),
        Err(DmaMapError::TooLong {
            len: 0x2100,
            max: 0x1000
        })
    ));
}

#[test]
fn no_iova_lies_above_the_mask() {
    let world = World::of(space(1 << 16, 1), Policy::STRICT, DeviceLimits::of_bits(24));
    let mut core = world.core(0);
    let mut held = Vec::new();
    let error = loop {
        match core.map(&[page(1)], Direction::ToDevice) {
            Ok(mapping) => held.push(mapping),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, DmaMapError::Alloc(_)), "{error:?}");
    assert_eq!(held.len(), 0xfff);
    let last = Iova::new((1 << 24) - 1);
    assert!(held.iter().all(|mapping| mapping.iova() <= last));
    for mapping in held.drain(..) {
        core.unmap(mapping).unwrap();
    }
}
