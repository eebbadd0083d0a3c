//! Several devices of one domain, each with limits of its own.

use super::*;

fn crosses(element: DeviceSegment, boundary: u64) -> bool {
    let first = element.iova.raw();
    first / boundary != (first + element.len - 1) / boundary
}

const MASK_20: u64 = 0xf_ffff;

#[test]
fn a_device_with_a_lower_mask_is_served_beside_others() {
    for policy in policies() {
        let world = world(policy);
        let mut core = world.core(0);
        let low = DeviceLimits::of_bits(20);
        for number in 0..64 {
            let wide = core.map(&[page(number)], Direction::ToDevice).unwrap();
            let narrow = core
                .map_for(&low, &[page(number)], Direction::ToDevice)
                .unwrap();
            assert!(narrow.iova().raw() + 4095 <= MASK_20, "{policy:?}");
            assert!(
                wide.iova().raw() > MASK_20,
                "the allocator begins at the top"
            );
            core.unmap(wide).unwrap();
            core.unmap_at(narrow.iova(), narrow.len()).unwrap();
        }
    }
}

/// A mapping that a 64-bit device has left idle lies where the other does not reach.
#[test]
fn an_idle_mapping_is_not_found_for_a_device_that_cannot_reach_it() {
    let world = world(Policy::optimistic(16));
    let mut core = world.core(0);
    let wide = core.map(&[page(1)], Direction::ToDevice).unwrap();
    core.unmap(wide).unwrap();
    let low = DeviceLimits::of_bits(20);
    let narrow = core.map_for(&low, &[page(1)], Direction::ToDevice).unwrap();
    assert!(narrow.iova().raw() <= MASK_20);
    core.unmap(narrow).unwrap();
}

/// The mapper's own limits are what is found again may lie within: a device cannot widen them.
#[test]
fn limits_of_a_device_only_narrow_those_of_the_mapper() {
    let world = World::of(space(1 << 16, 1), Policy::STRICT, DeviceLimits::of_bits(20));
    let mut core = world.core(0);
    let wide = DeviceLimits::default();
    let mapping = core
        .map_for(&wide, &[page(1)], Direction::ToDevice)
        .unwrap();
    assert!(mapping.iova().raw() <= MASK_20);
    core.unmap(mapping).unwrap();
}

#[test]
fn no_element_crosses_a_boundary() {
    const BOUNDARY: u64 = 0x1_0000;
    let only = DeviceLimits::default().with_boundary(BOUNDARY);
    let limits = only.with_max_segment(0x3000);
    for policy in policies() {
        let world = world(policy);
        let mut core = world.core(0);
        let mut live = Vec::new();
        for round in 1..40 {
            // Ranges of odd lengths, so that the space between them is where a careless one would
            // cross.
            live.push(
                core.map(
                    &[Segment::new(PhysAddr::new(round << 20), 0x3000)],
                    Direction::ToDevice,
                )
                .unwrap(),
            );
            let segments = [
                Segment::new(PhysAddr::new(round << 24 | 0x800), round * 0x1234),
                page(round),
            ];
            let mut out = Vec::new();
            live.push(
                core.map_list(&limits, &segments, Direction::ToDevice, &mut out)
                    .unwrap(),
            );
            assert!(
                out.iter()
                    .all(|element| !crosses(*element, BOUNDARY) && element.len <= 0x3000)
            );
            let bytes: u64 = out.iter().map(|element| element.len).sum();
            assert_eq!(bytes, segments[0].len + segments[1].len);
            let segment = Segment::new(PhysAddr::new(round << 24 | 0x10), 0x400 * round);
            let mapping = core
                .map_for(&only, &[segment], Direction::ToDevice)
                .unwrap();
            let (iova, len) = (mapping.iova(), mapping.len());
            assert!(
                !crosses(DeviceSegment { iova, len }, BOUNDARY),
                "{policy:?} {iova:#x} {len:#x}"
            );
            live.push(mapping);
        }
        live.into_iter()
            .for_each(|mapping| core.unmap(mapping).unwrap());
    }
}

#[test]
fn one_element_longer_than_between_two_boundaries_is_refused() {
    let world = world(Policy::STRICT);
    let mut core = world.core(0);
    let limits = DeviceLimits::default().with_boundary(0x1_0000);
    let max = 0x1_0000;
    // With its offset it touches a 17th page.
    let long = Segment::new(PhysAddr::new(0x10_0010), max);
    let refused = core.map_for(&limits, &[long], Direction::ToDevice);
    let len = 0x1_1000;
    assert_eq!(refused, Err(DmaMapError::TooLong { len, max }));
    assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
}

#[test]
fn without_translation_a_boundary_is_kept_or_refused() {
    let world = world(Policy::OFF);
    let mut core = world.core(0);
    let limits = DeviceLimits::default().with_boundary(0x1_0000);
    let over = Segment::new(PhysAddr::new(0x1_f000), 0x2000);
    let refused = core.map_for(&limits, &[over], Direction::ToDevice);
    let (len, max) = (0x2000, 0x1000);
    assert_eq!(refused, Err(DmaMapError::TooLong { len, max }));
    let mut out = Vec::new();
    let mapping = core.map_list(&limits, &[over], Direction::ToDevice, &mut out);
    core.unmap(mapping.unwrap()).unwrap();
    assert_eq!(
        out.iter().map(|element| element.len).collect::<Vec<_>>(),
        [0x1000, 0x1000]
    );
}

#[test]
fn a_list_without_memory_for_its_elements_maps_nothing() {
    let limits = DeviceLimits::default().with_max_segment(1);
    let world = World::of(space(1 << 16, 1), Policy::STRICT, limits);
    let mut core = world.core(0);
    let mut out = Vec::new();
    let endless = Segment::new(PhysAddr::new(0), 1 << 58);
    let refused = core.map_list(&limits, &[endless], Direction::ToDevice, &mut out);
    assert!(
        matches!(refused, Err(DmaMapError::OutOfMemory { .. })),
        "{refused:?}"
    );
    assert_eq!(
        (out.len(), world.mapper.allocator_stats().live_ranges),
        (0, 0)
    );
}
