//! Tests of what an idle core keeps from others, and of the cost of remote frees to a core.

use super::*;
use crate::chunk::layout::MARKS;
use crate::chunk::owner_side::MEETINGS;

/// The first core takes everything, frees some of it itself, all over the space, and rests; the
/// second frees what is left.
fn freed_by_another(space: &ChunkAllocator, own: usize) -> (ChunkCore, ChunkCore) {
    let (mut a, mut b) = two_cores(space);
    for (at, range) in take_all(&mut a, 1).into_iter().enumerate() {
        let is_own = at * own / 0x1_0000 != (at + 1) * own / 0x1_0000;
        let core = if is_own { &mut a } else { &mut b };
        core.free(range).expect("allocated");
    }
    assert_eq!(space.stats().live_pages, 0);
    (a, b)
}

#[test]
fn an_owner_that_rests_keeps_the_chunks_of_its_free_lists_and_nothing_else() {
    for (own, retires) in [
        (0, false),
        (1, false),
        (200, false),
        (200, true),
        (5000, false),
    ] {
        for pages in [1, 16, 512] {
            let space = ChunkAllocator::with_config(
                aperture(0, 0xffff),
                2,
                ChunkConfig {
                    retires,
                    ..ChunkConfig::default()
                },
            );
            let space = space.expect("valid");
            let (mut a, mut b) = freed_by_another(&space, own);
            let listed = a.free_lists();
            let got = take_all(&mut b, pages);
            let chunk = |range: &IovaRange| range.first().raw() / CHUNK_PAGES;
            let touched = |range: &IovaRange| listed.iter().any(|one| chunk(one) == chunk(range));
            let all = (0..0x1_0000 / pages).map(|at| at * pages);
            let all = all.map(|at| IovaRange::new(IovaPfn::new(at), pages).expect("pages"));
            let lacking = all.filter(touched).count();
            assert_eq!(
                got.len() as u64 + lacking as u64,
                0x1_0000 / pages,
                "{pages} pages, {own} freed by their owner, {} in its lists",
                listed.len()
            );
            // The owner comes back: what it kept is allocated and freed as ever, in chunks that are
            // another's now.
            let again: Vec<_> = (0..listed.len())
                .map_while(|_| a.alloc(Request::pages(1)).ok())
                .collect();
            assert!(
                again
                    .iter()
                    .all(|range| !got.iter().any(|one| one.overlaps(*range)))
            );
            free_all(&mut b, again);
            free_all(&mut b, got);
            a.park();
            b.park();
            let whole = take_all(&mut b, 0x1_0000);
            assert_eq!(whole.len(), 1, "everything came back");
            free_all(&mut b, whole);
        }
    }
}

#[test]
fn a_few_remote_frees_do_not_slow_the_owner_for_good() {
    for strays in [1, 2, 8, 16] {
        let space = ChunkAllocator::new(aperture(0, 511), 2).expect("valid");
        let (mut a, mut b) = two_cores(&space);
        let mut live = take_all(&mut a, 1);
        free_all(&mut b, live.drain(..strays));
        let marks = |a: &ChunkCore| a.local.cache().known(0).expect("cached").tag() & MARKS;
        assert_ne!(marks(&a), 0);
        for _ in 0..MEETINGS {
            a.free(live.pop().expect("hundreds")).expect("allocated");
        }
        assert_eq!(marks(&a), 0, "{strays} ranges freed elsewhere");
        // By pins as well, as a mapper frees.
        b.free(live.pop().expect("hundreds")).expect("allocated");
        if strays == 16 {
            // It is the designated remote freer by now, and its marks are read for as long.
            continue;
        }
        for _ in 0..MEETINGS {
            let range = live.pop().expect("hundreds");
            let pinned = a.pin(range).expect("allocated");
            a.free_pinned(pinned);
        }
        assert_eq!(marks(&a), 0, "{strays} ranges freed elsewhere, by pins");
        free_all(&mut a, live);
        assert_eq!(space.stats().live_pages, 0);
    }
}

#[test]
fn a_refusal_where_nothing_came_back_looks_nowhere() {
    let space = ChunkAllocator::new(aperture(0, 0xffff), 2).expect("valid");
    let (mut a, mut b) = two_cores(&space);
    let kept = a.alloc(Request::pages(1)).expect("free");
    let all = take_all(&mut b, 1);
    let before = b.local.search().credit();
    for _ in 0..100 {
        assert!(b.alloc(Request::pages(1).without_drain()).is_err());
        assert!(b.alloc(Request::pages(8).without_drain()).is_err());
    }
    assert_eq!(b.local.search().credit(), before);
    // What comes back is found at once, without a call to the core that has it.
    b.free(all[0]).expect("allocated");
    assert_eq!(b.alloc(Request::pages(1)), Ok(all[0]));
    free_all(&mut a, all);
    a.free(kept).expect("allocated");
}

#[test]
fn range_freed_under_pin_is_available_without_its_owner() {
    for retires in [false, true] {
        let config = ChunkConfig {
            retires,
            ..ChunkConfig::default()
        };
        let space = ChunkAllocator::with_config(aperture(0, 0xffff), 2, config).expect("valid");
        let (mut a, mut b) = two_cores(&space);
        for range in take_all(&mut a, 1) {
            let pinned = b.pin(range).expect("allocated");
            b.free_pinned(pinned);
        }
        let got = take_all(&mut b, 1);
        assert_eq!(got.len(), 0x1_0000, "the owner rests");
        free_all(&mut b, got);
    }
}

#[test]
fn range_about_to_be_pinned_by_owner_is_not_collected() {
    let space = ChunkAllocator::new(aperture(0, 1023), 2).expect("valid");
    let (mut a, mut b) = two_cores(&space);
    let all = take_all(&mut a, 1);
    let (contested, others) = all.split_first().expect("hundreds");
    // Both unmap the same range. The owner has checked that there is no claim, and is slow to store
    // its pin.
    let page = contested.first().raw();
    a.local.owner_side().changing(page);
    let chunk = || a.local.cache().known(page).expect("cached");
    let pinned = chunk().state(page).pinned();
    for range in &all {
        let first = b.pin(*range).expect("allocated");
        b.free_pinned(first);
    }
    let is_near = |range: &IovaRange| range.first().raw() / CHUNK_PAGES == page / CHUNK_PAGES;
    let got = take_all(&mut b, 1);
    assert_eq!(got.len(), 512, "all of the other chunk");
    assert!(
        !got.iter().any(is_near),
        "the range may still be the owner's"
    );
    // The owner comes second: it releases its pin.
    chunk().set_state(page, pinned);
    assert!(
        b.alloc(Request::pages(1).without_drain()).is_err(),
        "it is pinned"
    );
    a.unpin(crate::Pinned::new(*contested, a.shared.space, false));
    assert!(a.free(*contested).is_err(), "it was freed");
    assert!(
        others
            .iter()
            .filter(|range| is_near(range))
            .all(|range| a.free(*range).is_err())
    );
    free_all(&mut b, got);
    a.park();
    b.park();
    assert_eq!(space.stats().live_pages, 0);
    let whole = take_all(&mut b, 1024);
    assert_eq!(whole.len(), 1, "everything came back");
    free_all(&mut b, whole);
}

#[test]
fn ranges_returned_to_words_by_retire_are_found_by_next_request() {
    let space = ChunkAllocator::retiring(aperture(0, 1023), 2).expect("valid");
    let (mut a, _b) = two_cores(&space);
    let mut all = take_all(&mut a, 1);
    assert!(a.alloc(Request::pages(1)).is_err());
    // Mostly free, so that it looks for chunks to retire; one range of each stays.
    let kept = [all.swap_remove(0), all.pop().expect("a thousand")];
    free_all(&mut a, all);
    assert_eq!(a.retire(), None);
    let got = take_all(&mut a, 1);
    assert_eq!(got.len(), 1022);
    free_all(&mut a, got.into_iter().chain(kept));
}

#[test]
fn a_space_without_a_fence_by_the_kernel_frees_and_refuses_the_same() {
    for fences in [Fences::new(), Fences::FULL] {
        let mut space = ChunkAllocator::new(aperture(0, 1023), 2).expect("valid");
        Arc::get_mut(&mut space.shared).expect("no core yet").fences = fences;
        for pages in [1, 8, 128] {
            let (mut a, mut b) = two_cores(&space);
            let all = take_all(&mut a, pages);
            assert_eq!(all.len() as u64, 1024 / pages);
            for (at, range) in all.iter().enumerate() {
                match at % 4 {
                    0 => b.free(*range).expect("allocated"),
                    1 => {
                        let pinned = a.pin(*range).expect("allocated");
                        assert!(a.free(*range).is_err(), "it is pinned");
                        a.free_pinned(pinned);
                    }
                    _ => a.free(*range).expect("allocated"),
                }
                assert!(a.free(*range).is_err(), "it was freed");
                assert!(b.free(*range).is_err(), "it was freed");
            }
            let again = take_all(&mut a, pages);
            assert_eq!(again.len() as u64, 1024 / pages, "{fences:?}");
            free_all(&mut a, again);
        }
    }
}
