use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use dma_map::iova::IovaPfn;

use super::*;
use crate::testing::{FakeCall, FakeKernel};

/// Memory of 256 pages that counts itself; no device reaches it.
struct Ram {
    address: u64,
    alive: Arc<AtomicUsize>,
}

// SAFETY: the fake kernel's device reaches nothing.
unsafe impl ExternalMemory for Ram {
    fn address(&self) -> u64 {
        self.address
    }

    fn len(&self) -> u64 {
        256 << 12
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A map, its kernel, and the number of pieces of memory that have not been released.
struct Fixture {
    map: ExternalMap<FakeKernel>,
    kernel: FakeKernel,
    alive: Arc<AtomicUsize>,
}

impl Fixture {
    fn new() -> Self {
        let kernel = FakeKernel::new();
        Self {
            map: ExternalMap::over(kernel.clone()),
            kernel,
            alive: Arc::default(),
        }
    }

    fn ram(&self, address: u64) -> Arc<Ram> {
        self.alive.fetch_add(1, Ordering::Relaxed);
        let alive = Arc::clone(&self.alive);
        Arc::new(Ram { address, alive })
    }

    /// Maps pages `first` on to memory of their own.
    fn lend(&self, first: u64, pages: u64) -> Result<(), ExternalMapError> {
        let ram = self.ram(0x7000_0000);
        let range = range(first, pages);
        self.map.map(range, ram, 0, Access::ReadWrite)
    }

    fn alive(&self) -> usize {
        self.alive.load(Ordering::Relaxed)
    }
}

fn range(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).unwrap()
}

#[test]
fn memory_is_held_until_the_kernel_has_unmapped_it() {
    let fixture = Fixture::new();
    let ram = fixture.ram(0x7000_0000);
    let map = |range, offset, access| fixture.map.map(range, ram.clone(), offset, access);
    map(range(16, 2), 0x3000, Access::ReadWrite).unwrap();
    map(range(18, 1), 0, Access::Read).unwrap();
    drop(ram);
    let mapped = fixture.kernel.mapped();
    let seen: Vec<_> = mapped
        .iter()
        .map(|one| (one.range, one.vaddr, one.access))
        .collect();
    assert_eq!(
        seen,
        [
            (range(16, 2), 0x7000_3000, Access::ReadWrite),
            (range(18, 1), 0x7000_0000, Access::Read),
        ]
    );
    assert_eq!(fixture.map.unmap(range(10, 8)), Ok(2 << 12));
    assert_eq!(fixture.alive(), 1, "the second mapping holds it");
    assert_eq!(fixture.map.unmap(range(0, 1 << 40)), Ok(1 << 12));
    assert_eq!(fixture.alive(), 0);
    assert_eq!((fixture.kernel.mappings(), fixture.map.mappings()), (0, 0));
}

/// The kernel is not asked for a mapping that it would refuse, or not see the fault of.
#[test]
fn memory_that_is_not_all_there_or_not_aligned_is_not_mapped() {
    let fixture = Fixture::new();
    let ram = fixture.ram(0x7000_0000);
    let len = 256 << 12;
    for (pages, offset) in [
        (257, 0),
        (1, len),
        (1, len - 0xfff),
        (256, 0x1000),
        (1, u64::MAX),
        (1, u64::MAX - 0xfff),
        (1 << 51, 0),
    ] {
        let refused = fixture
            .map
            .map(range(16, pages), ram.clone(), offset, Access::Read);
        let expected = ExternalMapError::Outside { offset, pages, len };
        assert_eq!(refused, Err(expected));
    }
    // All of the space has a length of 65 bits.
    let all = range(0, 1 << 52);
    let refused = fixture.map.map(all, ram.clone(), 0, Access::Read);
    assert!(matches!(refused, Err(ExternalMapError::Outside { .. })));
    let refused = fixture.map.map(range(16, 1), ram.clone(), 8, Access::Read);
    let vaddr = 0x7000_0008;
    assert_eq!(refused, Err(ExternalMapError::Misaligned { vaddr }));
    // An odd address and an offset that makes it even: it is the sum that counts.
    let odd = fixture.ram(0x7000_0800);
    fixture
        .map
        .map(range(16, 1), odd, 0x800, Access::Read)
        .unwrap();
    assert_eq!(fixture.kernel.calls().len(), 1, "the kernel was asked once");
    drop(ram);
    assert_eq!(fixture.alive(), 1, "what was refused is not kept");
}

#[test]
fn range_that_overlaps_or_cuts_a_mapping_changes_nothing() {
    let fixture = Fixture::new();
    fixture.lend(16, 4).unwrap();
    fixture.lend(24, 4).unwrap();
    for (first, pages, mapped) in [
        (16, 4, 16),
        (19, 1, 16),
        (10, 7, 16),
        (20, 5, 24),
        (17, 1, 16),
    ] {
        let (range, mapped) = (range(first, pages), range(mapped, 4));
        let refused = fixture.lend(first, pages);
        assert_eq!(refused, Err(ExternalMapError::Overlaps { range, mapped }));
    }
    for (first, pages, mapped) in [
        (16, 3, 16),
        (17, 3, 16),
        (18, 1, 16),
        (10, 9, 16),
        (16, 9, 24),
    ] {
        let (range, mapped) = (range(first, pages), range(mapped, 4));
        let refused = fixture.map.unmap(range);
        assert_eq!(refused, Err(ExternalUnmapError::Cuts { range, mapped }));
    }
    assert_eq!(fixture.map.unmap(range(20, 4)), Ok(0), "nothing is there");
    assert_eq!(fixture.map.calls(), Calls { maps: 2, unmaps: 0 });
    assert_eq!((fixture.kernel.mappings(), fixture.alive()), (2, 2));
}

/// A buffer of this crate can be lent too, and lives for as long as a device reaches it.
#[test]
fn buffer_is_lent_and_outlives_its_owner() {
    let Fixture { map, kernel, .. } = Fixture::new();
    let buffer = DmaBuffer::new(8192).unwrap();
    let (pages, address) = (Arc::downgrade(&buffer.0), buffer.0.address());
    let memory = Arc::new(buffer);
    map.map(range(16, 1), memory, 4096, Access::Read).unwrap();
    let vaddr = kernel.vaddr_of(range(16, 1).start());
    assert_eq!(vaddr, Some(address + 4096));
    assert!(pages.upgrade().is_some());
    map.unmap(range(16, 1)).unwrap();
    assert!(pages.upgrade().is_none());
}

#[test]
fn mappings_with_gaps_go_in_one_call() {
    let fixture = Fixture::new();
    (0..8).for_each(|at| fixture.lend(0x20 + 3 * at, 2).unwrap());
    assert_eq!(fixture.map.unmap(range(0x20, 32)), Ok(16 << 12));
    let unmap = fixture.kernel.calls()[8].call;
    let range = range(0x20, 23);
    assert_eq!(unmap, FakeCall::Unmap { range });
    assert_eq!((fixture.kernel.calls().len(), fixture.alive()), (9, 0));
}

/// Each error of a map call leaves nothing behind, and says what to do.
#[test]
fn refused_map_releases_the_memory_and_says_what_to_do() {
    for (errno, is_full, advice) in [
        (libc::ENOMEM, true, "RLIMIT_MEMLOCK"),
        (libc::ENOSPC, true, "dma_entry_limit"),
        (libc::EEXIST, false, "not this map's"),
        (libc::EINVAL, false, "IommuInfo::allowed"),
        (libc::EFAULT, false, "read-only"),
    ] {
        let fixture = Fixture::new();
        fixture.kernel.fail_nth(0, Errno(errno));
        let error = fixture.lend(16, 4).unwrap_err();
        assert!(error.to_string().contains(advice), "{error}");
        let ExternalMapError::Call(refused) = error else {
            panic!("{error}");
        };
        assert_eq!((refused.errno, refused.is_full()), (Errno(errno), is_full));
        assert_eq!(refused.limits.is_some(), is_full);
        assert_eq!((fixture.map.mappings(), fixture.alive()), (0, 0));
        fixture.lend(16, 4).unwrap();
    }
}

/// The kernel's silence: an unmap that did nothing, or less or more than there was, is no success.
#[test]
fn bytes_that_differ_keep_the_memory() {
    for unmapped in [0, 4096, 5 << 12, u64::MAX] {
        let fixture = Fixture::new();
        fixture.lend(16, 2).unwrap();
        fixture.lend(20, 2).unwrap();
        fixture.kernel.ignore_unmap_nth(0, unmapped);
        let failed = fixture.map.unmap(range(16, 8));
        let (range, mapped) = (range(16, 6), 4 << 12);
        let failed_with = UnmapFailed::Bytes {
            range,
            mapped,
            unmapped,
        };
        assert_eq!(failed, Err(ExternalUnmapError::Unmapped(failed_with)));
        assert_eq!((fixture.map.mappings(), fixture.alive()), (2, 2));
        assert!(matches!(
            fixture.lend(17, 1),
            Err(ExternalMapError::Overlaps { .. })
        ));
        // Only an answer that accounts for all of it releases any of it.
        assert_eq!(fixture.map.unmap(range), Ok(mapped));
        assert_eq!(fixture.alive(), 0);
    }
}

#[test]
fn part_that_is_gone_from_the_kernel_keeps_all_of_it() {
    let fixture = Fixture::new();
    fixture.lend(16, 2).unwrap();
    fixture.lend(20, 2).unwrap();
    // Another user of the container.
    assert_eq!(fixture.kernel.unmap_dma(range(16, 2)), Ok(2 << 12));
    for _ in 0..2 {
        let failed = fixture.map.unmap(range(16, 6));
        assert!(matches!(
            failed,
            Err(ExternalUnmapError::Unmapped(UnmapFailed::Bytes { .. }))
        ));
        assert_eq!(fixture.alive(), 2);
    }
    // The call over all of it does not account for it; what ends it is that the groups go.
    fixture.map.close().unwrap();
    assert_eq!(fixture.alive.load(Ordering::Relaxed), 0);
}

#[test]
fn unmap_that_fails_keeps_the_memory_and_can_be_tried_again() {
    let fixture = Fixture::new();
    fixture.lend(16, 2).unwrap();
    let errno = Errno(libc::EINTR);
    fixture.kernel.fail_nth(0, errno);
    let range = range(16, 2);
    let failed = UnmapFailed::Call { range, errno };
    let unmapped = fixture.map.unmap(range);
    assert_eq!(unmapped, Err(ExternalUnmapError::Unmapped(failed)));
    assert_eq!((fixture.map.mappings(), fixture.alive()), (1, 1));
    assert_eq!(fixture.map.unmap(range), Ok(2 << 12));
    assert_eq!(fixture.alive(), 0);
}

/// In closing and in dropping: unmapping all comes first, then the groups, then the memory is lost.
#[test]
fn closing_releases_what_no_device_reaches_and_loses_the_rest() {
    for by_drop in [false, true] {
        for (unmaps, is_detachable, lost) in [(true, false, 0), (false, true, 0), (false, false, 2)]
        {
            let Fixture { map, kernel, alive } = {
                let fixture = Fixture::new();
                fixture.lend(16, 2).unwrap();
                fixture.lend(1 << 30, 2).unwrap();
                fixture
            };
            if !unmaps {
                kernel.ignore_unmap_nth(0, 0);
            }
            kernel.set_detachable(is_detachable);
            match by_drop {
                true => drop(map),
                false => {
                    let closed = map.close();
                    assert_eq!(closed.is_err(), lost > 0, "{closed:?}");
                    if let Err(error) = closed {
                        assert_eq!((error.mappings, error.pages), (2, 4));
                        assert_eq!(error.detach, Errno(libc::EBUSY));
                        assert!(error.to_string().contains("have to be closed before"));
                    }
                }
            }
            assert_eq!(alive.load(Ordering::Relaxed), lost);
            let calls = kernel.calls().into_iter().skip(2);
            let calls = calls.map(|record| record.call);
            let range = range(16, (1 << 30) + 2 - 16);
            let mut expected = vec![FakeCall::Unmap { range }];
            expected.extend((!unmaps).then_some(FakeCall::Detach));
            assert_eq!(calls.collect::<Vec<_>>(), expected, "and no more");
        }
    }
}

/// A call under way counts as reachable from its beginning to its end, and the map can be looked at
/// meanwhile.
#[test]
fn call_under_way_is_within_reach_and_stops_no_look() {
    let fixture = Fixture::new();
    fixture.kernel.hold();
    std::thread::scope(|scope| {
        let map = scope.spawn(|| fixture.lend(16, 2));
        fixture.kernel.wait_begun(1);
        assert_eq!((fixture.map.mappings(), fixture.kernel.mappings()), (1, 0));
        let unmap = scope.spawn(|| fixture.map.unmap(range(16, 2)));
        fixture.kernel.release_one();
        map.join().unwrap().unwrap();
        fixture.kernel.wait_begun(2);
        assert_eq!((fixture.map.mappings(), fixture.alive()), (1, 1));
        fixture.kernel.release();
        assert_eq!(unmap.join().unwrap(), Ok(2 << 12));
    });
    assert_eq!((fixture.map.mappings(), fixture.alive()), (0, 0));
}

/// Cores that unmap the same range at once: one has the bytes, the other finds nothing, and no
/// disagreement is made up.
#[test]
fn ranges_unmapped_by_two_threads_at_once_agree_with_the_kernel() {
    let fixture = Fixture::new();
    for round in 0..500 {
        fixture.lend(16, 2).unwrap();
        let unmapped: Vec<u64> = std::thread::scope(|scope| {
            let unmap = || fixture.map.unmap(range(16, 2)).unwrap();
            let threads = [0; 2].map(|_| scope.spawn(unmap));
            threads.map(|thread| thread.join().unwrap()).into()
        });
        assert_eq!(unmapped.iter().sum::<u64>(), 2 << 12, "{round}");
    }
}

/// Any history, with failures of all kinds: memory is released exactly when no mapping of the
/// kernel can reach it.
#[test]
fn any_history_releases_exactly_what_the_kernel_has_unmapped() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let fixture = Fixture::new();
    fixture.kernel.limit_entries(24);
    // Naive: pages of each mapping by its first page.
    let mut model: BTreeMap<u64, u64> = BTreeMap::new();
    let mut disagreed = 0;
    for step in 0..20_000 {
        let (first, pages) = (random(96), 1 + random(12));
        let end = first + pages;
        let touched: Vec<(u64, u64)> = model
            .iter()
            .map(|(at, len)| (*at, at + len))
            .filter(|(start, last)| *start < end && *last > first)
            .collect();
        let is_refused = random(16) == 0;
        if is_refused {
            fixture.kernel.fail_all(Some(Errno(libc::EINTR)));
        }
        if random(2) == 0 {
            let mapped = fixture.lend(first, pages);
            let fits = touched.is_empty() && model.len() < 24 && !is_refused;
            assert_eq!(mapped.is_ok(), fits, "{step}: {mapped:?}");
            model.extend(fits.then_some((first, pages)));
        } else {
            let is_idle = random(8) == 0;
            if is_idle {
                fixture.kernel.ignore_unmap_nth(0, 0);
            }
            let unmapped = fixture.map.unmap(range(first, pages));
            let is_cut = touched
                .iter()
                .any(|(start, last)| *start < first || *last > end);
            let bytes: u64 = touched
                .iter()
                .map(|(start, last)| (last - start) << 12)
                .sum();
            match unmapped {
                Ok(found) => {
                    assert!(touched.is_empty() || !is_cut && !is_refused && !is_idle);
                    assert_eq!(found, bytes, "{step}");
                    model.retain(|at, _| !touched.iter().any(|(gone, _)| gone == at));
                }
                Err(ExternalUnmapError::Cuts { .. }) => assert!(is_cut, "{step}"),
                Err(ExternalUnmapError::Unmapped(_)) => {
                    assert!(is_refused || is_idle, "{step}");
                    disagreed += 1;
                }
            }
        }
        fixture.kernel.fail_all(None);
        // One that was not called for does nothing to the next call.
        fixture.kernel.forget_plans();
        assert_eq!(fixture.map.mappings(), model.len(), "{step}");
        assert_eq!(fixture.kernel.mappings(), model.len(), "{step}");
        assert_eq!(fixture.alive(), model.len(), "{step}");
    }
    assert!(disagreed > 100, "{disagreed}");
}
