//! What is particular to chunks: whose they are, how they come back, what strangers may do.

use alloc::vec::Vec;

use super::*;
use crate::testing::Random;
use crate::{AllocError, CoreAllocator, Request};

fn aperture(first: u64, last: u64) -> Aperture {
    Aperture::new(IovaPfn::new(first), IovaPfn::new(last), &[]).expect("pages")
}

fn two_cores(space: &ChunkAllocator) -> (ChunkCore, ChunkCore) {
    (
        space.claim(CoreId(0)).expect("free"),
        space.claim(CoreId(1)).expect("free"),
    )
}

#[test]
fn cores_allocate_from_different_leaf_tables() {
    let space = ChunkAllocator::new(aperture(1, 0xf_ffff), 2).expect("valid");
    let (mut a, mut b) = two_cores(&space);
    let leaf = |range: IovaRange| range.first().raw() / CHUNK_PAGES;
    let of_a = leaf(a.alloc(Request::pages(1)).expect("free"));
    let of_b = leaf(b.alloc(Request::pages(1)).expect("free"));
    assert_ne!(of_a, of_b);
}

#[test]
fn a_stranger_frees_once_and_the_owner_gets_it_back() {
    let space = ChunkAllocator::new(aperture(0, 511), 2).expect("valid");
    let (mut a, mut b) = two_cores(&space);
    let all: Vec<_> = (0..512)
        .map(|_| a.alloc(Request::pages(1)).expect("512 pages"))
        .collect();
    for range in &all {
        b.free(*range).expect("allocated");
        assert_eq!(
            b.free(*range),
            Err(FreeError::NotAllocated { range: *range })
        );
        assert_eq!(
            a.free(*range),
            Err(FreeError::NotAllocated { range: *range })
        );
    }
    assert_eq!(space.stats().live_ranges, 0);
    let again: Vec<_> = (0..512)
        .map(|_| a.alloc(Request::pages(1)).expect("came back"))
        .collect();
    assert!(a.alloc(Request::pages(1)).is_err());
    again
        .into_iter()
        .for_each(|range| a.free(range).expect("allocated"));
}

#[test]
fn what_a_stranger_has_pinned_nobody_else_frees() {
    let space = ChunkAllocator::new(aperture(0, 0xffff), 3).expect("valid");
    let (mut a, mut b) = two_cores(&space);
    let mut c = space.claim(CoreId(2)).expect("free");
    let range = a.alloc(Request::pages(2)).expect("free");
    let refused = Err(FreeError::NotAllocated { range });
    let pinned = b.pin(range).expect("allocated");
    assert_eq!(
        (a.free(range), b.free(range), c.free(range)),
        (refused, refused, refused)
    );
    assert!(a.pin(range).is_err() && c.pin(range).is_err());
    b.unpin(pinned);
    let pinned = a.pin(range).expect("let go");
    assert_eq!((a.free(range), b.free(range)), (refused, refused));
    c.free_pinned(pinned);
    assert_eq!(a.free(range), refused);
    assert_eq!(space.stats().live_ranges, 0);
}

#[test]
fn a_pin_outlives_its_owners_handle() {
    let space = ChunkAllocator::new(aperture(0, 0xffff), 2).expect("valid");
    let (mut a, mut b) = two_cores(&space);
    let range = a.alloc(Request::pages(1)).expect("free");
    let pinned = a.pin(range).expect("allocated");
    drop(a);
    assert!(b.free(range).is_err(), "it is pinned");
    b.free_pinned(pinned);
    assert!(b.free(range).is_err(), "it is freed");
    assert_eq!(space.stats().live_pages, 0);
}

#[test]
fn orphans_are_adopted_and_their_space_comes_back() {
    let space = ChunkAllocator::new(aperture(0, 1023), 2).expect("valid");
    let (mut a, mut b) = two_cores(&space);
    let kept: Vec<_> = (0..100)
        .map(|_| a.alloc(Request::pages(4)).expect("free"))
        .collect();
    a.park();
    assert!(matches!(
        b.alloc(Request::pages(1024)),
        Err(AllocError::Exhausted { .. })
    ));
    kept.into_iter()
        .for_each(|range| b.free(range).expect("allocated"));
    let all = b.alloc(Request::pages(1024)).expect("everything is free");
    b.free(all).expect("allocated");
}

#[test]
fn exhaustion_asks_the_others_and_they_answer() {
    let space = ChunkAllocator::new(aperture(0, 1023), 2).expect("valid");
    let (mut a, mut b) = two_cores(&space);
    let ranges = [
        a.alloc(Request::pages(1)).expect("free"),
        a.alloc(Request::pages(256)).expect("free"),
    ];
    ranges
        .into_iter()
        .for_each(|range| a.free(range).expect("allocated"));
    let whole = Request::pages(1024);
    assert!(matches!(
        b.alloc(whole),
        Err(AllocError::Exhausted { asked: 1, .. })
    ));
    // The other core's next operation gives back what it keeps.
    let one = a.alloc(Request::pages(1)).expect("free");
    a.free(one).expect("allocated");
    assert!(b.alloc(whole).is_err());
    a.park();
    let all = b.alloc(whole).expect("everything was given back");
    b.free(all).expect("allocated");
}

#[test]
fn large_classes_and_runs_are_aligned_and_exact() {
    let space = ChunkAllocator::new(aperture(0, 0xffff), 1).expect("valid");
    let mut core = space.claim(CoreId(0)).expect("free");
    for pages in [65, 128, 200, 256, 257, 512, 513, 1024, 1536, 5000] {
        let range = core.alloc(Request::pages(pages)).expect("free");
        assert!(
            range.pages() >= pages
                && range
                    .first()
                    .raw()
                    .is_multiple_of(pages.next_power_of_two())
        );
        let part = IovaRange::new(range.first(), range.pages() / 2).expect("fits");
        assert_eq!(
            core.free(part),
            Err(FreeError::Mismatch { range: part }),
            "{pages}"
        );
        core.free(range).expect("allocated");
        assert_eq!(
            core.free(range),
            Err(FreeError::NotAllocated { range }),
            "{pages}"
        );
    }
}

#[test]
fn limits_choose_the_zone() {
    let space = ChunkAllocator::new(Aperture::of_bits(48).expect("valid"), 1).expect("valid");
    let mut core = space.claim(CoreId(0)).expect("free");
    for bits in [24, 30, 32, 36, 39, 48] {
        let last = IovaPfn::new((1 << (bits - 12)) - 1);
        let range = core.alloc(Request::pages(16).at_most(last)).expect("free");
        assert!(range.last() <= last, "{bits}");
        core.free(range).expect("allocated");
    }
}

#[test]
fn emptied_chunks_wait_to_be_retired_and_come_back_by_recycling() {
    let space = ChunkAllocator::retiring(aperture(0, 4095), 1).expect("valid");
    let mut core = space.claim(CoreId(0)).expect("free");
    let all: Vec<_> = (0..8 * 512)
        .map(|_| core.alloc(Request::pages(1)).expect("8 chunks"))
        .collect();
    assert!(core.retire().is_none());
    all.into_iter()
        .for_each(|range| core.free(range).expect("allocated"));
    let retired: Vec<_> = core::iter::from_fn(|| core.retire()).collect();
    assert_eq!(retired.len(), 7, "one stays");
    assert_eq!(space.stats().chunks, 1);
    assert!(
        core.alloc(Request::pages(1024)).is_err(),
        "retired chunks are nobody's"
    );
    retired.into_iter().for_each(|chunk| core.recycle(chunk));
    let run = core.alloc(Request::pages(4096)).expect("all of it");
    core.free(run).expect("allocated");
    let retired: Vec<_> = core::iter::from_fn(|| core.retire()).collect();
    assert_eq!(retired.len(), 8);
}

/// Whoever retires now and then while ranges of mixed sizes come and go, and after the last one: all but a few chunks go.
/// The free ranges that a core keeps ready lie in many chunks, and may be all that keeps these.
#[test]
fn what_a_core_keeps_ready_does_not_keep_its_chunks() {
    for seed in 1..40 {
        let space = ChunkAllocator::retiring(aperture(0, 0xf_ffff), 1).expect("valid");
        let mut core = space.claim(CoreId(0)).expect("free");
        let mut random = Random::new(seed);
        let mut live: Vec<_> = (0..256)
            .map(|_| {
                core.alloc(Request::pages(1 + random.below(32)))
                    .expect("room")
            })
            .collect();
        let retire = |core: &mut ChunkCore| {
            let retired: Vec<_> = core::iter::from_fn(|| core.retire()).take(64).collect();
            retired.into_iter().for_each(|chunk| core.recycle(chunk));
        };
        for turn in 0..4000 {
            let at = random.below(live.len() as u64) as usize;
            core.free(live.swap_remove(at)).expect("allocated");
            live.push(
                core.alloc(Request::pages(1 + random.below(32)))
                    .expect("room"),
            );
            if turn % 256 == 0 {
                retire(&mut core);
            }
        }
        for (at, range) in live.drain(..).enumerate() {
            core.free(range).expect("allocated");
            if at == 240 {
                retire(&mut core);
            }
        }
        for _ in 0..2 {
            retire(&mut core);
            let one = core.alloc(Request::pages(1)).expect("room");
            core.free(one).expect("allocated");
        }
        let chunks = space.stats().chunks;
        assert!(chunks <= 6, "seed {seed}: {chunks} chunks for six classes");
    }
}

#[test]
fn a_chunk_that_a_stranger_claims_is_not_retired() {
    let space = ChunkAllocator::retiring(aperture(0, 4095), 2).expect("valid");
    let (mut a, mut b) = two_cores(&space);
    let all: Vec<_> = (0..1024)
        .map(|_| a.alloc(Request::pages(1)).expect("2 chunks"))
        .collect();
    let last = all[1023];
    let pinned = b.pin(last).expect("allocated");
    all[..1023]
        .iter()
        .for_each(|range| a.free(*range).expect("allocated"));
    let first: Vec<_> = core::iter::from_fn(|| a.retire()).collect();
    assert!(first.iter().all(|chunk| !chunk.range().contains(last)));
    b.free_pinned(pinned);
    first.into_iter().for_each(|chunk| a.recycle(chunk));
    assert_eq!(space.stats().live_ranges, 0);
}
