//! The papers' guarantees, few visits to the depot and bounded caches; and the handling of limits
//! and exhaustion.

use std::vec::Vec;

use proptest::prelude::*;

use super::*;

const SIZE: usize = 8;

fn small(aperture: Aperture, cores: usize) -> MagazineAllocator {
    let config = MagazineConfig {
        size: SIZE,
        depot: 2,
    };
    MagazineAllocator::with_config(aperture, cores, config).expect("cores")
}

fn wide() -> Aperture {
    Aperture::of_bits(48).expect("valid")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Between two visits to the depot lie at least a magazine's worth of operations, whatever the
    /// pattern.
    #[test]
    fn a_magazine_of_operations_lies_between_two_visits(
        runs in prop::collection::vec((any::<bool>(), 1..3 * SIZE), 1..60),
    ) {
        let space = small(wide(), 1);
        let mut core = space.claim(CoreId(0)).expect("free");
        let mut out: Vec<IovaRange> = Vec::new();
        let (mut since, mut slow) = (SIZE, 0);
        for (is_alloc, count) in runs {
            for _ in 0..count {
                match is_alloc {
                    true => out.push(core.alloc(Request::pages(2)).expect("room")),
                    false => match out.pop() {
                        Some(range) => core.free(range).expect("out"),
                        None => continue,
                    },
                }
                since += 1;
                if core.counts.slow != slow {
                    prop_assert_eq!(core.counts.slow, slow + 1);
                    prop_assert!(since > SIZE, "visited after {} operations", since);
                    slow = core.counts.slow;
                    // The operation that visits is the first of the next ones.
                    since = 1;
                }
            }
        }
    }
}

#[test]
fn caches_are_bounded_and_what_overflows_is_the_trees_again() {
    let space = small(wide(), 2);
    let mut makers = space.claim(CoreId(0)).expect("free");
    let mut frees = space.claim(CoreId(1)).expect("free");
    let out: Vec<_> = (0..1000)
        .map(|_| makers.alloc(Request::pages(1)).expect("room"))
        .collect();
    for range in out {
        frees.free(range).expect("out");
    }
    let stats = space.stats();
    assert_eq!((stats.live_ranges, stats.live_pages), (0, 0));
    // Two magazines per core, two in the depot.
    assert!(stats.cached_pages <= 6 * SIZE as u64, "{stats:?}");
    frees.park();
    makers.park();
    let parked = space.stats().cached_pages;
    assert!(parked <= 2 * SIZE as u64, "{parked}");
}

#[test]
fn a_foreign_free_is_as_cheap_as_a_local_one() {
    let space = MagazineAllocator::new(wide(), 2).expect("cores");
    let mut one = space.claim(CoreId(0)).expect("free");
    let mut two = space.claim(CoreId(1)).expect("free");
    for _ in 0..127 * 20 {
        let range = one.alloc(Request::pages(1)).expect("room");
        two.free(range).expect("out");
    }
    let visits = one.counts.slow + two.counts.slow;
    assert!(visits <= 2 * 20 + 2, "{visits} visits");
}

#[test]
fn limits_have_magazines_of_their_own() {
    let space = small(wide(), 1);
    let mut core = space.claim(CoreId(0)).expect("free");
    let low = IovaPfn::new(LOW_LAST);
    for _ in 0..100 {
        let high = core.alloc(Request::pages(1)).expect("room");
        let low = core.alloc(Request::pages(1).at_most(low)).expect("room");
        assert!(high.first().raw() > LOW_LAST && low.last().raw() <= LOW_LAST);
        core.free(low).expect("out");
        core.free(high).expect("out");
    }
    assert!(core.counts.slow <= 4, "the magazines serve both");
    let tiny = core.alloc(Request::pages(1).at_most(IovaPfn::new(50)));
    assert!(tiny.expect("room").last().raw() <= 50);
}

#[test]
fn core_that_finds_no_range_asks_the_others_to_drain() {
    let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(16), &[]).expect("pages");
    let space = small(aperture, 3);
    let mut one = space.claim(CoreId(0)).expect("free");
    let mut two = space.claim(CoreId(1)).expect("free");
    // Eight pages in the magazine of the first, eight in the second's.
    let kept = one.alloc(Request::pages(1)).expect("room");
    let other = two.alloc(Request::pages(1)).expect("room");
    two.free(other).expect("out");
    let error = one
        .alloc(Request::pages(8))
        .expect_err("two pieces are cached");
    assert!(
        matches!(error, AllocError::Exhausted { asked: 1, .. }),
        "{error:?}"
    );
    // The second sees the flag at its next operation, even one that fails.
    assert!(two.free(other).is_err());
    assert!(one.alloc(Request::pages(8)).is_ok());
    assert_eq!(one.free(kept), Ok(()));
}

#[test]
fn a_range_freed_twice_at_once_does_not_stay_doubled() {
    let space = small(wide(), 2);
    let mut one = space.claim(CoreId(0)).expect("free");
    let mut two = space.claim(CoreId(1)).expect("free");
    let range = one.alloc(Request::pages(1)).expect("room");
    // As if both had loaded "allocated" before either stored "cached".
    one.free(range).expect("out");
    one.shared
        .backing
        .states
        .set_allocated(range.first().raw(), 0);
    two.free(range).expect("looks out");
    let first = one.alloc(Request::pages(1)).expect("room");
    let second = two.alloc(Request::pages(1)).expect("room");
    assert_eq!(first, range);
    assert_ne!(second, range, "the second copy is dropped");
    assert_eq!(space.stats().live_ranges, 2);
}
