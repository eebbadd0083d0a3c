//! Tests of what is particular to chunks: their owners, their return, and operations by remote
//! cores.

mod possession;

use alloc::vec::Vec;

use super::layout::{REMOTE_FREER, tag_in};
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
fn remote_free_succeeds_once_and_owner_gets_range_back() {
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
fn range_pinned_by_remote_core_is_freed_by_no_other() {
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
fn abandoned_chunks_are_reclaimed_and_their_space_comes_back() {
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

/// A core that retires now and then while ranges of mixed sizes come and go, and after the last
/// one, gives back all but a few chunks. The free ranges that it keeps ready lie in many chunks,
/// and may be all that keeps these.
#[test]
fn free_lists_do_not_keep_empty_chunks() {
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
fn chunk_claimed_by_remote_core_is_not_retired() {
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

fn free_all(core: &mut ChunkCore, ranges: impl IntoIterator<Item = IovaRange>) {
    for range in ranges {
        core.free(range).expect("allocated");
    }
}

fn take_all(core: &mut ChunkCore, pages: u64) -> Vec<IovaRange> {
    take_all_of(core, Request::pages(pages))
}

fn take_all_of(core: &mut ChunkCore, request: Request) -> Vec<IovaRange> {
    core::iter::from_fn(|| core.alloc(request).ok()).collect()
}

#[test]
fn words_of_one_class_serve_larger_and_smaller_ones_when_nothing_else_is_left() {
    let space = ChunkAllocator::new(aperture(0, 2047), 1).expect("valid");
    let mut core = space.claim(CoreId(0)).expect("free");
    let mut all = take_all(&mut core, 1);
    assert_eq!(all.len(), 2048);
    // One page of each word stays: 63 of 64 pages are free, and no word is.
    let stays = |range: &IovaRange| range.first().raw().is_multiple_of(64);
    let kept: Vec<_> = all.iter().copied().filter(stays).collect();
    free_all(&mut core, all.drain(..).filter(|range| !stays(range)));
    let halves = take_all(&mut core, 32);
    assert_eq!(halves.len(), 32, "the upper half of each word");
    let pairs = take_all(&mut core, 2);
    assert_eq!(pairs.len(), 32 * 15, "what is free in the lower halves");
    for range in &pairs {
        let part = IovaRange::new(range.first(), 1).expect("a page");
        assert_eq!(core.free(part), Err(FreeError::Mismatch { range: part }));
        let rest = IovaRange::new(range.last(), 1).expect("a page");
        assert_eq!(core.free(rest), Err(FreeError::Mismatch { range: rest }));
    }
    let live = space.stats();
    assert_eq!(live.live_ranges, 32 + 32 + 32 * 15);
    assert_eq!(live.live_pages, 32 + 32 * 32 + 32 * 30);
    free_all(&mut core, pairs);
    free_all(&mut core, halves);
    free_all(&mut core, kept);
    let whole = core.alloc(Request::pages(2048)).expect("all is free");
    core.free(whole).expect("allocated");
}

#[test]
fn all_that_is_free_can_be_had_after_a_change_of_size() {
    for (before, after) in [(4, 1), (16, 1), (64, 2), (1, 4)] {
        let space = ChunkAllocator::new(aperture(0, 4095), 2).expect("valid");
        let (mut core, mut other) = two_cores(&space);
        let all = take_all(&mut core, before);
        let (kept, freed): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|range| range.first().raw() / 16 % 2 == 0);
        let free: u64 = freed.iter().map(|range| range.pages()).sum();
        // Some by another core.
        let (own, others) = freed.split_at(freed.len() / 2);
        free_all(&mut core, own.iter().copied());
        free_all(&mut other, others.iter().copied());
        let again = take_all(&mut core, after);
        assert_eq!(
            again.len() as u64 * after,
            free,
            "{before} to {after} pages"
        );
        free_all(&mut other, again);
        free_all(&mut other, kept);
        other.park();
        core.park();
        assert_eq!(space.stats().live_pages, 0);
    }
}

/// Chunks that are taken, reclaimed or given back count as slow operations.
#[test]
fn an_allocation_that_fails_again_moves_no_chunk() {
    let space = ChunkAllocator::new(Aperture::of_bits(48).expect("valid"), 2).expect("valid");
    let (mut core, mut other) = two_cores(&space);
    let high = other.alloc(Request::pages(1)).expect("free");
    let low = |pages| Request::pages(pages).at_most(IovaPfn::new(0xf_ffff));
    let kept = take_all_of(&mut core, low(64));
    // These pay for the chunks that it must search.
    for _ in 0..100 {
        assert!(core.alloc(low(64)).is_err());
    }
    let before = space.stats().slow;
    for pages in [64, 200, 512, 64].repeat(100) {
        let failed = core.alloc(low(pages));
        assert!(
            matches!(failed, Err(AllocError::Exhausted { asked: 1, .. })),
            "{failed:?}"
        );
        // Cores whose space is above 4 GiB are not asked.
        let one = other.alloc(Request::pages(1)).expect("free");
        other.free(one).expect("allocated");
    }
    let moved = space.stats().slow - before;
    assert!(moved <= 4, "{moved} chunks for 400 failures");
    other.free(high).expect("allocated");
    free_all(&mut core, kept);
}

#[test]
fn a_starving_core_calls_for_drains_ever_more_rarely() {
    let space = ChunkAllocator::new(aperture(0, 2047), 2).expect("valid");
    let (mut a, mut b) = two_cores(&space);
    let kept = a.alloc(Request::pages(1)).expect("free");
    let all = take_all(&mut b, 256);
    let calls = || space.shared.drain.load(Ordering::Relaxed);
    let before = calls();
    for _ in 0..1000 {
        let failed = b.alloc(Request::pages(256).without_drain());
        assert!(matches!(
            failed,
            Err(AllocError::Exhausted { asked: 0, .. })
        ));
    }
    assert_eq!(calls(), before, "it said that it will not ask");
    for _ in 0..10_000 {
        assert!(b.alloc(Request::pages(256)).is_err());
    }
    assert!(
        calls() - before <= 10 + 10,
        "1, 2, 4, ... 1024, then each 1024th"
    );
    assert!(calls() > before);
    free_all(&mut b, all);
    a.free(kept).expect("allocated");
}

#[test]
fn ranges_freed_by_idle_core_are_available_but_for_a_bound() {
    let space = ChunkAllocator::new(aperture(0, 8191), 2).expect("valid");
    let (mut a, mut b) = two_cores(&space);
    let all = take_all(&mut a, 1);
    assert_eq!(all.len(), 8192);
    free_all(&mut a, all);
    // It does nothing any more.
    let got = take_all(&mut b, 1);
    assert!(got.len() >= 8192 - 2048, "{} pages of 8192", got.len());
    free_all(&mut b, got);
}

#[test]
fn freed_runs_do_not_pile_up_until_they_are_retired() {
    let space = ChunkAllocator::retiring(Aperture::of_bits(48).expect("valid"), 1).expect("valid");
    let mut core = space.claim(CoreId(0)).expect("free");
    let mut live: Vec<_> = (0..256)
        .map(|_| core.alloc(Request::pages(512)).expect("room"))
        .collect();
    let before = space.stats().bytes;
    for at in 0..10_000 {
        let slot = &mut live[at * 7 % 256];
        core.free(*slot).expect("allocated");
        *slot = core.alloc(Request::pages(512)).expect("room");
    }
    assert_eq!(space.stats().bytes, before);
    free_all(&mut core, live);
    let retired: Vec<_> = core::iter::from_fn(|| core.retire()).collect();
    assert!(retired.len() >= 256);
    retired.into_iter().for_each(|chunk| core.recycle(chunk));
}

#[test]
fn a_pinned_run_that_is_freed_can_be_retired() {
    let space = ChunkAllocator::retiring(aperture(0, 1023), 1).expect("valid");
    let mut core = space.claim(CoreId(0)).expect("free");
    let run = core.alloc(Request::pages(1024)).expect("free");
    let pinned = core.pin(run).expect("allocated");
    assert!(core.free(run).is_err() && core.pin(run).is_err());
    core.free_pinned(pinned);
    let retired: Vec<_> = core::iter::from_fn(|| core.retire()).collect();
    assert_eq!(retired.len(), 2);
    retired.into_iter().for_each(|chunk| core.recycle(chunk));
}

#[test]
fn limits_below_the_aperture_take_what_is_kept_ready() {
    let space = ChunkAllocator::new(Aperture::of_bits(48).expect("valid"), 1).expect("valid");
    let mut core = space.claim(CoreId(0)).expect("free");
    for bits in 32..=48 {
        let last = IovaPfn::new((1 << (bits - 12)) - 1);
        for request in [1, 2].map(|pages| Request::pages(pages).at_most(last)) {
            let range = core.alloc(request).expect("free");
            core.free(range).expect("allocated");
            assert_eq!(
                core.local.cache_mut().take(&request),
                Some(range),
                "{bits} bits"
            );
            core.free(range).expect("allocated");
        }
    }
}

#[test]
fn live_ranges_stay_cached_up_to_four_gib() {
    let space = ChunkAllocator::new(Aperture::of_bits(48).expect("valid"), 1).expect("valid");
    let mut core = space.claim(CoreId(0)).expect("free");
    let mut another = || core.alloc(Request::pages(256)).expect("free");
    let live: Vec<_> = (0..1 << 12).map(|_| another()).collect();
    for range in &live {
        assert!(core.local.cache().known(range.first().raw()).is_some());
    }
    free_all(&mut core, live);
}

#[test]
fn live_ranges_of_several_zones_stay_cached_together() {
    let space = ChunkAllocator::new(Aperture::of_bits(48).expect("valid"), 1).expect("valid");
    let mut core = space.claim(CoreId(0)).expect("free");
    let live = [32, 36, 39, 48].map(|bits| {
        let last = IovaPfn::new((1 << (bits - 12)) - 1);
        core.alloc(Request::pages(1).at_most(last)).expect("free")
    });
    for range in live {
        assert!(core.local.cache().known(range.first().raw()).is_some());
    }
    free_all(&mut core, live);
}

#[test]
fn designated_freer_that_reclaims_the_chunk_has_no_mark_there() {
    let space = ChunkAllocator::new(aperture(0, 1023), 2).expect("valid");
    let (mut owner, mut freer) = two_cores(&space);
    let live: Vec<_> = (0..32)
        .map(|_| owner.alloc(Request::pages(1)).expect("free"))
        .collect();
    let page = live[0].first().raw();
    free_all(&mut freer, live);
    let tag = |core: &ChunkCore| core.local.cache().known(page).expect("in mind").tag();
    assert_ne!(tag(&freer) & REMOTE_FREER, 0);
    owner.park();
    let range = freer.alloc(Request::pages(1)).expect("free");
    assert_eq!(range.first().raw() / CHUNK_PAGES, page / CHUNK_PAGES);
    assert_eq!(tag(&freer), tag_in(0, 2));
    freer.free(range).expect("allocated");
}

#[test]
fn tree_range_in_cached_block_is_freed_and_pinned_as_any() {
    // One chunk, and pages on both sides of it in the same block.
    let space = ChunkAllocator::new(aperture(100, 1100), 1).expect("valid");
    let mut core = space.claim(CoreId(0)).expect("free");
    let mut live = take_all(&mut core, 1);
    let of_tree: Vec<_> = (live.iter().copied())
        .filter(|range| !(512..1024).contains(&range.first().raw()))
        .collect();
    assert_eq!(of_tree.len(), 412 + 77);
    for range in of_tree {
        assert!(core.local.cache().known(range.first().raw()).is_some());
        let pinned = core.pin(range).expect("allocated");
        assert!(core.free(range).is_err() && core.pin(range).is_err());
        core.free_pinned(pinned);
        assert!(core.free(range).is_err());
        live.retain(|one| *one != range);
    }
    free_all(&mut core, live);
}

#[test]
#[should_panic(expected = "was pinned in another space")]
fn range_pinned_in_another_space_is_not_freed() {
    let spaces = [0; 2].map(|_| ChunkAllocator::new(aperture(0, 1023), 1).expect("valid"));
    let mut cores = spaces
        .each_ref()
        .map(|space| space.claim(CoreId(0)).expect("free"));
    let ranges = cores
        .each_mut()
        .map(|core| core.alloc(Request::pages(1)).expect("free"));
    assert_eq!(ranges[0], ranges[1], "ranges are plain numbers");
    let pinned = cores[0].pin(ranges[0]).expect("allocated");
    cores[1].free_pinned(pinned);
}
