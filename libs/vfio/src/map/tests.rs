use dma_map::iova::{Aperture, ChunkAllocator, CoreId};
use dma_map::{
    DeviceLimits, Direction, DmaMapError, DmaMapper, Domain, ManualClock, MapperCore, Policy,
};

use super::*;
use crate::error::Errno;
use crate::testing::{FakeCall, FakeKernel};

/// Ranges of the calls to unmap so far, those that failed among them.
fn unmapped(map: &Fake) -> Vec<IovaRange> {
    let calls = map.kernel().calls().into_iter();
    let unmaps = calls.filter_map(|record| match record.call {
        FakeCall::Unmap { range } => Some(range),
        _ => None,
    });
    unmaps.collect()
}

type Fake = VfioMap<FakeKernel>;

fn fake() -> Fake {
    Fake::over(FakeKernel::default())
}

fn range(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).unwrap()
}

const fn mappings(open: usize, closed: usize) -> Mappings {
    Mappings { open, closed }
}

/// Maps pages of `buffer` at these first pages.
fn map_each(map: &Fake, buffer: &DmaBuffer, at: &[(u64, u64)]) {
    for &(first, pages) in at {
        let phys = buffer.segment(0, 1).phys;
        map.map(range(first, pages), phys, Access::ReadWrite)
            .unwrap();
    }
}

#[test]
fn a_device_reaches_what_is_unmapped_until_it_is_invalidated() {
    let map = fake();
    let buffer = map.allocate(8192).unwrap();
    let phys = buffer.segment(4096, 1).phys;
    map.map(range(16, 1), phys, Access::Read).unwrap();
    assert_eq!(
        map.lookup(Iova::new(0x1_0123)),
        Some(Translation {
            phys: buffer.segment(4096 + 0x123, 1).phys,
            access: Access::Read,
            leaf_pages: 1,
        })
    );
    assert_eq!(map.lookup(Iova::new(0x1_1000)), None);
    map.unmap(range(16, 1)).unwrap();
    assert_eq!(map.lookup(Iova::new(0x1_0123)), None);
    assert!(map.kernel().reaches(16));
    assert_eq!(map.mappings(), mappings(0, 1));
    // Not to be given to any other mapping before.
    let again = map.map(range(16, 1), phys, Access::Read);
    let (iova, leaf_pages) = (Iova::new(0x1_0000), 1);
    assert_eq!(again, Err(MapError::AlreadyMapped { iova, leaf_pages }));
    map.flush(&[Command::Pages(range(17, 5))]).unwrap();
    assert!(map.kernel().reaches(16), "that was another's");
    map.flush(&[Command::Pages(range(16, 1))]).unwrap();
    assert!(!map.kernel().reaches(16));
    map.map(range(16, 1), phys, Access::Read).unwrap();
    assert_eq!(map.calls(), Calls { maps: 2, unmaps: 1 });
}

#[test]
fn neighbours_go_in_one_call_and_what_is_in_use_between_them_stays() {
    let map = fake();
    let buffer = map.allocate(1 << 20).unwrap();
    // Holes at 3 and 7; 12 stays open; then another run.
    let at = [(1, 2), (4, 3), (8, 4), (12, 1), (13, 1), (20, 8)];
    map_each(&map, &buffer, &at);
    for (first, pages) in at {
        if first != 12 {
            map.unmap(range(first, pages)).unwrap();
        }
    }
    map.flush(&[Command::Domain]).unwrap();
    assert_eq!(unmapped(&map), [range(1, 11), range(13, 15)]);
    assert_eq!(map.mappings(), mappings(1, 0));
    assert!(map.kernel().reaches(12));
    map.flush(&[Command::Global]).unwrap();
    assert_eq!(map.calls(), Calls { maps: 6, unmaps: 2 }, "nothing to do");
}

#[test]
fn a_command_for_a_part_covers_the_mapping_it_lies_in() {
    let map = fake();
    let buffer = map.allocate(1 << 16).unwrap();
    map_each(&map, &buffer, &[(8, 4), (12, 4), (16, 4)]);
    map.unmap(range(8, 12)).unwrap();
    map.flush(&[Command::Pages(range(10, 3))]).unwrap();
    assert_eq!(unmapped(&map), [range(8, 8)]);
    assert!(map.kernel().reaches(16));
}

#[test]
fn mappings_are_unmapped_whole_or_not_at_all() {
    let map = fake();
    let buffer = map.allocate(1 << 16).unwrap();
    map_each(&map, &buffer, &[(8, 4), (12, 4), (20, 1)]);
    let part = |first| UnmapError::InsideHugeLeaf {
        iova: IovaPfn::new(first).start(),
        leaf_pages: 4,
    };
    let hole = |first| UnmapError::NotMapped {
        iova: IovaPfn::new(first).start(),
    };
    assert_eq!(map.unmap(range(9, 7)), Err(part(9)));
    assert_eq!(map.unmap(range(8, 7)), Err(part(12)));
    assert_eq!(map.unmap(range(7, 9)), Err(hole(7)));
    assert_eq!(map.unmap(range(8, 13)), Err(hole(16)));
    assert_eq!(map.mappings(), mappings(3, 0));
    assert_eq!(map.unmap(range(8, 8)), Ok(()));
    assert_eq!(map.unmap(range(8, 4)), Err(hole(8)));
}

#[test]
fn memory_that_is_not_the_maps_is_never_mapped() {
    let map = fake();
    let other = fake();
    let foreign = other.allocate(4096).unwrap();
    let buffer = map.allocate(8192).unwrap();
    let mine = buffer.segment(0, 1).phys;
    let gone = {
        let buffer = map.allocate(4096).unwrap();
        buffer.segment(0, 1).phys
    };
    let on_the_stack = [0_u8; 8192];
    let on_the_stack = PhysAddr::new(on_the_stack.as_ptr().addr() as u64).align_down(4096);
    let second = mine.checked_add(4096).unwrap();
    for (phys, pages) in [
        (foreign.segment(0, 1).phys, 1),
        (on_the_stack, 1),
        (gone, 1),
        (mine, 3),
        (second, 2),
        (second, 1 << 51),
        (PhysAddr::new(0), 1),
    ] {
        let refused = map.map(range(16, pages), phys, Access::ReadWrite);
        assert_eq!(
            refused,
            Err(MapError::Backend(Refused::Unknown { phys, pages }))
        );
    }
    let phys = mine.checked_add(8).unwrap();
    let refused = map.map(range(16, 1), phys, Access::ReadWrite);
    assert_eq!(refused, Err(MapError::PhysMisaligned { phys }));
    assert_eq!(map.calls().maps, 0, "the kernel was not asked");
}

#[test]
fn memory_outlives_its_buffer_for_as_long_as_the_device_reaches_it() {
    let map = fake();
    let buffer = map.allocate(4096).unwrap();
    let memory = Arc::downgrade(&buffer.0);
    map_each(&map, &buffer, &[(16, 1)]);
    drop(buffer);
    map.unmap(range(16, 1)).unwrap();
    assert!(memory.upgrade().is_some(), "closed, but within reach");
    map.kernel().fail_all(Some(Errno(libc::EIO)));
    let failed = map.flush(&[Command::Domain]);
    let status = libc::EIO.unsigned_abs().into();
    assert_eq!(failed, Err(InvalidateError::Stopped { status }));
    assert!(memory.upgrade().is_some(), "the kernel still has it");
    map.kernel().fail_all(None);
    map.flush(&[Command::Domain]).unwrap();
    assert!(memory.upgrade().is_none());
}

#[test]
fn the_last_clone_unmaps_what_is_left_and_loses_what_it_cannot() {
    for (errno, is_lost) in [(None, false), (Some(libc::EIO), true)] {
        let map = fake();
        let buffer = map.allocate(1 << 16).unwrap();
        let memory = Arc::downgrade(&buffer.0);
        map_each(&map, &buffer, &[(16, 1), (18, 2)]);
        map.unmap(range(16, 1)).unwrap();
        drop(buffer);
        map.kernel().fail_all(errno.map(Errno)); // taking the groups off as well
        drop(map);
        assert_eq!(memory.upgrade().is_some(), is_lost);
    }
}

type Core = MapperCore<ChunkAllocator, Fake, Fake, ManualClock>;

/// A mapper under `policy`, its map, and a core.
fn mapper(
    policy: Policy,
) -> (
    Fake,
    DmaMapper<ChunkAllocator, Fake, Fake, ManualClock>,
    Core,
) {
    let map = fake();
    let domain = Domain {
        allocator: ChunkAllocator::new(Aperture::of_bits(39).unwrap(), 1).unwrap(),
        table: map.clone(),
        invalidator: map.clone(),
        clock: ManualClock::new(),
    };
    let mapper = DmaMapper::new(domain, policy, DeviceLimits::default()).unwrap();
    let core = mapper.core(CoreId(0)).unwrap();
    (map, mapper, core)
}

/// The table at the crate's head.
#[test]
fn policies_differ_in_calls_and_reach_after_unmap() {
    const ROUNDS: u64 = 200;
    for (name, policy, reaches_after_unmap, maps, unmaps) in [
        ("strict", Policy::STRICT, false, ROUNDS, ROUNDS),
        ("combining", Policy::STRICT_COMBINING, false, ROUNDS, ROUNDS),
        ("shared", Policy::SHARED, false, ROUNDS, ROUNDS),
        ("async", Policy::ASYNC, false, ROUNDS, ROUNDS),
        ("deferred", Policy::DEFERRED, true, ROUNDS, 1),
        ("optimistic", Policy::optimistic(8), true, 1, 1),
    ] {
        let (map, mapper, mut core) = mapper(policy);
        let buffer = map.allocate(4096).unwrap();
        let mut reached = 0;
        for _ in 0..ROUNDS {
            let mapping = core
                .map(&[buffer.segment(8, 100)], Direction::FromDevice)
                .unwrap();
            let page = mapping.range().first().raw();
            assert!(map.kernel().reaches(page), "{name}");
            core.unmap(mapping).unwrap();
            reached += u64::from(map.kernel().reaches(page));
        }
        let expected = if reaches_after_unmap { ROUNDS } else { 0 };
        assert_eq!(reached, expected, "{name}");
        mapper.flush().unwrap();
        assert_eq!(map.kernel().mappings(), 0, "{name}: after a flush");
        assert_eq!(map.calls(), Calls { maps, unmaps }, "{name}");
    }
}

/// Cores that unmap at the same time, together or each for itself: after its unmap none finds its
/// page within reach, whichever core made the call, and no call unmaps a page that another core
/// uses.
#[test]
fn a_cores_invalidation_spares_what_other_cores_use() {
    const CORES: usize = 4;
    for policy in [Policy::STRICT, Policy::STRICT_COMBINING, Policy::ASYNC] {
        let map = fake();
        let domain = Domain {
            allocator: ChunkAllocator::new(Aperture::of_bits(39).unwrap(), CORES).unwrap(),
            table: map.clone(),
            invalidator: map.clone(),
            clock: ManualClock::new(),
        };
        let mapper = DmaMapper::new(domain, policy, DeviceLimits::default()).unwrap();
        std::thread::scope(|scope| {
            for core in 0..CORES {
                let (map, mut core) = (&map, mapper.core(CoreId(core)).unwrap());
                scope.spawn(move || {
                    let buffer = map.allocate(4096).unwrap();
                    for _ in 0..2000 {
                        let memory = [buffer.segment(0, 4096)];
                        let mapping = core.map(&memory, Direction::FromDevice).unwrap();
                        let page = mapping.range().first().raw();
                        assert!(map.kernel().reaches(page));
                        core.unmap(mapping).unwrap();
                        // No other core is given the page: it would come from this core.
                        assert!(!map.kernel().reaches(page));
                    }
                });
            }
        });
        mapper.flush().unwrap();
        assert_eq!(map.kernel().mappings(), 0, "{policy:?}");
    }
}

/// A limit on mappings: unmapped but not invalidated mappings, and idle ones, are released first;
/// then the error names the limit.
#[test]
fn unused_mappings_make_room_at_the_mapping_limit() {
    const LIMIT: usize = 8;
    for policy in [Policy::STRICT, Policy::DEFERRED, Policy::optimistic(64)] {
        let (map, _mapper, mut core) = mapper(policy);
        map.kernel().limit_entries(LIMIT);
        let buffer = map.allocate(64 << 12).unwrap();
        let page = |at: usize| [buffer.segment(at << 12, 4096)];
        for at in 0..64 {
            let mapping = core.map(&page(at), Direction::ToDevice).unwrap();
            core.unmap(mapping).unwrap();
        }
        let live = (0..LIMIT).map(|at| core.map(&page(at), Direction::ToDevice).unwrap());
        let live: Vec<_> = live.collect();
        let full = core.map(&page(LIMIT), Direction::ToDevice).unwrap_err();
        let DmaMapError::Table(MapError::Full(refused)) = full else {
            panic!("{full:?}");
        };
        assert!(refused.to_string().contains("dma_entry_limit"));
        for mapping in live {
            core.unmap(mapping).unwrap();
        }
    }
}

/// A kernel that will not unmap: the IOVA stays out of use, and a later flush ends it.
#[test]
fn an_unmap_that_the_kernel_refuses_is_tried_again() {
    let (map, mapper, mut core) = mapper(Policy::STRICT);
    let buffer = map.allocate(4096).unwrap();
    let mapping = core
        .map(&[buffer.segment(0, 4096)], Direction::FromDevice)
        .unwrap();
    let page = mapping.range().first().raw();
    map.kernel().fail_all(Some(Errno(libc::EINTR)));
    assert!(core.unmap(mapping).is_err());
    assert_eq!(mapper.risk().stale_now, 1);
    map.kernel().fail_all(None);
    let other = core
        .map(&[buffer.segment(0, 4096)], Direction::FromDevice)
        .unwrap();
    assert_ne!(other.range().first().raw(), page);
    mapper.flush().unwrap();
    assert_eq!(mapper.risk().stale_now, 0);
    assert!(!map.kernel().reaches(page));
    core.unmap(other).unwrap();
}

/// An unmap that did nothing is a success to the kernel, with 0 bytes.
#[test]
fn unmap_that_did_nothing_keeps_the_memory() {
    for is_detachable in [true, false] {
        let map = fake();
        let kernel = map.kernel().clone();
        let buffer = map.allocate(8192).unwrap();
        let memory = Arc::downgrade(&buffer.0);
        map_each(&map, &buffer, &[(16, 2)]);
        drop(buffer);
        map.unmap(range(16, 2)).unwrap();
        kernel.ignore_unmap_nth(0, 0);
        kernel.ignore_unmap_nth(1, 4096);
        for _ in 0..2 {
            assert!(map.flush(&[Command::Domain]).is_err());
            assert_eq!(map.mappings(), mappings(0, 1), "it may be reached");
            assert!(kernel.reaches(17) && memory.upgrade().is_some());
        }
        kernel.ignore_unmap_nth(0, 0);
        kernel.set_detachable(is_detachable);
        drop(map);
        assert_eq!(memory.upgrade().is_none(), is_detachable);
        assert_eq!(kernel.reaches(17), !is_detachable);
    }
}

/// Any sequence: what the kernel has is what the book has, open and closed, and no call is refused.
#[test]
fn the_book_and_the_kernel_agree() {
    let map = fake();
    let buffer = map.allocate(64 << 10).unwrap();
    let phys = buffer.segment(0, 1).phys;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let mut open: Vec<IovaRange> = Vec::new();
    for _ in 0..20_000 {
        let range = range(random(200), 1 + random(8));
        match random(6) {
            0..=2 => {
                let is_free = !(range.first().raw()..=range.last().raw())
                    .any(|page| map.kernel().reaches(page));
                let mapped = map.map(range, phys, Access::Read);
                assert_eq!(mapped.is_ok(), is_free, "{range}: {mapped:?}");
                open.extend(is_free.then_some(range));
            }
            3 | 4 if !open.is_empty() => {
                let range = open.swap_remove(random(open.len() as u64) as usize);
                map.unmap(range).unwrap();
            }
            5 if random(4) == 0 => map.flush(&[Command::Domain]).unwrap(),
            _ => map.flush(&[Command::Pages(range)]).unwrap(),
        }
        let now = map.mappings();
        assert_eq!(now.open, open.len());
        assert_eq!(map.kernel().mappings(), now.open + now.closed);
    }
}
