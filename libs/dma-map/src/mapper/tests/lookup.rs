//! From an address of the device to memory.

use alloc::vec::Vec;

use super::*;
use crate::table::Translation;

#[test]
fn each_byte_of_a_mapping_is_found_under_every_policy() {
    for policy in policies() {
        let world = world(policy);
        let (mut core, mut other) = (world.core(0), world.core(1));
        let list = [Segment::new(PhysAddr::new(0x7f00), 0x1200), page(0x55)];
        let mut mapping = core
            .map_list(&list, Direction::FromDevice, &mut Vec::new())
            .unwrap();
        let at = |found: Option<Translation>| found.map(|found| (found.phys.raw(), found.access));
        let write = iova::Access::Write;
        assert_eq!(at(core.lookup(&mut mapping, 0)), Some((0x7f00, write)));
        assert_eq!(at(other.lookup(&mut mapping, 0x100)), Some((0x8000, write)));
        let last = mapping.len() - 1;
        assert_eq!(
            at(other.lookup(&mut mapping, last)),
            Some((0x5_5fff, write))
        );
        assert_eq!(core.lookup(&mut mapping, last + 1), None);
        let (iova, len) = (mapping.iova(), mapping.len());
        assert_eq!(at(other.lookup_at(iova, len, 0x100)), Some((0x8000, write)));
        assert_eq!(other.lookup_at(iova, 4096, 0), None, "a part of it");
        core.unmap(mapping).unwrap();
        assert_eq!(other.lookup_at(iova, len, 0), None, "{policy:?}");
    }
}

#[test]
fn another_mappers_mapping_is_not_looked_up() {
    let (world, elsewhere) = (world(Policy::STRICT), world(Policy::STRICT));
    let mut core = world.core(0);
    let mut theirs = elsewhere
        .core(0)
        .map(&[page(1)], Direction::ToDevice)
        .unwrap();
    // The same address means something else here.
    let ours = core.map(&[page(2)], Direction::ToDevice).unwrap();
    assert_eq!(ours.iova(), theirs.iova());
    assert_eq!(core.lookup(&mut theirs, 0), None);
}

#[test]
fn without_translation_an_address_leads_to_itself() {
    let world = world(Policy::OFF);
    let mut core = world.core(0);
    let mut mapping = core.map(&[page(7)], Direction::ToDevice).unwrap();
    let found = core.lookup(&mut mapping, 0x10).unwrap();
    assert_eq!(found.phys.raw(), 0x7010);
}

/// An idle mapping is nobody's.
#[test]
fn what_a_cache_keeps_is_not_looked_up() {
    let world = world(Policy::optimistic(16));
    let mut core = world.core(0);
    let mapping = core.map(&[page(1)], Direction::ToDevice).unwrap();
    let (iova, len) = (mapping.iova(), mapping.len());
    core.unmap(mapping).unwrap();
    assert_eq!(core.lookup_at(iova, len, 0), None);
}
