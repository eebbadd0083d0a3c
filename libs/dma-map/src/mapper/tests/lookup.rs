//! From an address of the device to memory.

use alloc::vec::Vec;

use super::*;

fn goes(
    core: &mut Core<TreeAllocator>,
    at: address::Iova,
    offset: u64,
) -> Option<(u64, iova::Access)> {
    let found = core.translate(at.checked_add(offset).unwrap())?;
    Some((found.phys.raw(), found.access))
}

#[test]
fn each_byte_of_a_mapping_is_found_under_every_policy() {
    for policy in policies() {
        let world = world(policy);
        let (mut core, mut other) = (world.core(0), world.core(1));
        let list = [Segment::new(PhysAddr::new(0x7f00), 0x1200), page(0x55)];
        let mapping = core
            .map_list(
                &DeviceLimits::default(),
                &list,
                Direction::FromDevice,
                &mut Vec::new(),
            )
            .unwrap();
        let (at, len) = (mapping.iova(), mapping.len());
        let write = iova::Access::Write;
        assert_eq!(goes(&mut core, at, 0), Some((0x7f00, write)));
        assert_eq!(goes(&mut other, at, 0x100), Some((0x8000, write)));
        assert_eq!(goes(&mut other, at, len - 1), Some((0x5_5fff, write)));
        assert_eq!(goes(&mut core, at, len), None);
        core.unmap(mapping).unwrap();
        assert_eq!(goes(&mut other, at, 0), None, "{policy:?}");
    }
}

#[test]
fn without_translation_an_address_leads_to_itself() {
    let world = world(Policy::OFF);
    let mut core = world.core(0);
    let found = core.translate(address::Iova::new(0x7010)).unwrap();
    assert_eq!(found.phys.raw(), 0x7010);
}

/// As the device finds it.
#[test]
fn idle_mapping_is_translated_until_torn_down() {
    let world = world(Policy::optimistic(16));
    let mut core = world.core(0);
    let mapping = core.map(&[page(1)], Direction::ToDevice).unwrap();
    let at = mapping.iova();
    core.unmap(mapping).unwrap();
    assert_eq!(goes(&mut core, at, 0), Some((0x1000, iova::Access::Read)));
    world.mapper.flush().unwrap();
    assert_eq!(goes(&mut core, at, 0), None);
}

/// Two users of one mapping end their uses by its address, on two cores in any order.
#[test]
fn a_shared_mapping_is_ended_by_its_address_once_by_each_user() {
    let world = world(Policy::SHARED);
    let (mut core, mut other) = (world.core(0), world.core(1));
    let first = core.map(&[page(1)], Direction::ToDevice).unwrap();
    let second = other.map(&[page(1)], Direction::ToDevice).unwrap();
    let (at, len) = (first.iova(), first.len());
    assert_eq!(at, second.iova());
    other.unmap_at(at, len).unwrap();
    assert_eq!(goes(&mut core, at, 0), Some((0x1000, iova::Access::Read)));
    core.unmap_at(at, len).unwrap();
    assert_eq!(goes(&mut core, at, 0), None);
    let refused = core.unmap_at(at, len);
    assert!(matches!(refused, Err(DmaUnmapError::NotAllocated(_))));
}
