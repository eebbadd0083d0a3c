//! The bound of memory, slabs that come and go, and exhaustion.

use std::vec::Vec;

use super::*;

fn space(arena_pages: u64, cores: usize) -> SlabAllocator {
    let aperture = Aperture::new(IovaPfn::new(0x1000), IovaPfn::new(1 << 36), &[]);
    let config = SlabConfig {
        arena_pages,
        list: 16,
    };
    SlabAllocator::with_config(aperture.expect("pages"), cores, config).expect("cores")
}

/// Bound that the module's head gives, and the fixed parts.
fn bound(pages: usize, cores: usize, from_tree: usize) -> usize {
    let states = pages + (36 << 10);
    let lists = cores * 10 * 16 * 8;
    states + pages / 8 + 128 * pages / 4096 + lists + 112 * from_tree + (8 << 10)
}

#[test]
fn memory_stays_within_its_bound_however_full_the_arena() {
    let pages = 1 << 16;
    let space = space(pages, 2);
    let mut one = space.claim(CoreId(0)).expect("free");
    let mut two = space.claim(CoreId(1)).expect("free");
    let mut most = 0;
    for round in 0..6u64 {
        let size = 1 << (round % 3);
        let mut out = Vec::new();
        while let Ok(range) = one.alloc(Request::pages(size)) {
            out.push(range);
            if out.len() % 512 == 0 {
                most = most.max(space.stats().bytes);
            }
        }
        let got: u64 = out.iter().map(|range| range.pages()).sum();
        assert_eq!(got, pages, "all of the arena is given");
        most = most.max(space.stats().bytes);
        for range in out {
            two.free(range).expect("out");
        }
        two.park();
        one.park();
        let stats = space.stats();
        assert_eq!((stats.live_pages, stats.cached_pages), (0, 0), "{stats:?}");
    }
    // Nothing but slabs: what comes from the tree itself is what an exhausted class takes last.
    let bound = bound(pages as usize, 2, 0);
    assert!(most <= bound, "{most} bytes, bound {bound}");
}

#[test]
fn nothing_lies_above_the_arena() {
    let space = space(8192, 1);
    let mut core = space.claim(CoreId(0)).expect("free");
    let large = core.alloc(Request::pages(4096)).expect("room");
    let last = 0x1000 + 8191;
    assert!(large.last().raw() <= last);
    while let Ok(range) = core.alloc(Request::pages(1)) {
        assert!((0x1000..=last).contains(&range.first().raw()));
    }
    let outside = range_at(last + 1, 1);
    let refused = FreeError::Outside { range: outside };
    assert_eq!(core.free(outside), Err(refused));
    assert!(matches!(
        core.alloc(Request::pages(8193)),
        Err(AllocError::Impossible { .. })
    ));
}

#[test]
fn a_slab_cannot_be_freed_as_a_range() {
    let space = space(8192, 1);
    let mut core = space.claim(CoreId(0)).expect("free");
    let range = core.alloc(Request::pages(1)).expect("room");
    let slab = slab_range(range.first().raw() >> SLAB_ORDER);
    assert!(core.free(slab).is_err() && core.pin(slab).is_err());
    core.free(range).expect("out");
    assert!(core.free(slab).is_err());
}

#[test]
fn slabs_dissolve_before_an_allocation_fails() {
    let space = space(4096, 2);
    let mut one = space.claim(CoreId(0)).expect("free");
    let mut two = space.claim(CoreId(1)).expect("free");
    // All of the arena is a slab of single pages, with one in use by each core.
    let kept = one.alloc(Request::pages(1)).expect("room");
    let other = two.alloc(Request::pages(1)).expect("room");
    assert!(matches!(
        one.alloc(Request::pages(2048)),
        Ok(range) if !range.overlaps(kept) && !range.overlaps(other)
    ));
    // What was in use is freed as before.
    one.free(other).expect("out");
    two.free(kept).expect("out");
    assert!(two.free(kept).is_err());
}
