//! The caches of this crate, seen as a mapper sees them.

use address::PhysAddr;
use dma_map::testing::reuse_world::{EARLIEST_NS, Rules, Step, World, idle_only};
use dma_peers::reuse::*;
use dma_peers::{LruCache, RtcCache};
use iova::{Access, IovaPfn, IovaRange};
use proptest::prelude::*;

/// One page for reading and writing.
fn page(number: u64) -> Key {
    Key::new(PhysAddr::new(number << 12), 1, Access::ReadWrite).expect("a page")
}

fn iova(number: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(number), 1).expect("a page")
}

/// The IOVA pages of a batch, in its order.
fn numbers(batch: &Batch) -> Vec<u64> {
    let entries = batch.entries().iter();
    entries.map(|gone| gone.range.first().raw()).collect()
}

#[test]
fn accesses_and_sizes_do_not_alias() {
    let mut batch = Batch::with_room(8);
    let of = |pages, access| Key::new(PhysAddr::new(0x5000), pages, access).expect("a page");
    let caches: [&mut dyn ReuseCache; 2] = [&mut LruCache::new(8, 100), &mut RtcCache::new(100)];
    for cache in caches {
        let read = of(1, Access::Read);
        cache.insert(read, iova(7), 0);
        let kept = cache.release(read, iova(7), 0, &mut batch);
        assert_eq!(kept, Released::Kept);
        for (pages, access) in [
            (1, Access::Write),
            (1, Access::ReadWrite),
            (2, Access::Read),
        ] {
            assert_eq!(cache.acquire(of(pages, access), 1), None);
        }
        assert_eq!(cache.acquire(read, 1), Some(iova(7)));
    }
}

#[test]
fn a_range_too_long_for_a_word_is_not_kept() {
    let mut batch = Batch::with_room(1);
    let long = IovaRange::new(IovaPfn::new(0), 1 << 20).expect("in the space");
    let caches: [&mut dyn ReuseCache; 2] = [&mut LruCache::new(4, 10), &mut RtcCache::new(10)];
    for cache in caches {
        cache.insert(page(1), long, 0);
        assert_eq!(cache.acquire(page(1), 0), None);
        let released = cache.release(page(1), long, 0, &mut batch);
        assert_eq!(released, Released::TearDown);
    }
}

#[test]
fn rtc_entries_rest_for_three_to_four_cycles() {
    let mut batch = Batch::with_room(8);
    for (released_ns, last_ns) in [(100, 499), (199, 499)] {
        let mut cache = RtcCache::new(100);
        assert_eq!(
            cache.release(page(1), iova(1), released_ns, &mut batch),
            Released::Kept
        );
        for now_ns in released_ns..=last_ns {
            assert_eq!(cache.expire(now_ns, &mut batch), Progress::Done);
            assert!(batch.is_empty(), "at {now_ns}");
        }
        assert_eq!(cache.expire(last_ns + 1, &mut batch), Progress::Done);
        assert_eq!(numbers(&batch), [1]);
        cache.torn_down(&mut batch, last_ns + 1);
        assert!(cache.counts().stale_times.max_ns <= 400, "four cycles");
    }
}

#[test]
fn rtc_does_not_expire_what_is_in_use() {
    let mut cache = RtcCache::new(100);
    let mut batch = Batch::with_room(8);
    assert_eq!(
        cache.release(page(1), iova(1), 0, &mut batch),
        Released::Kept
    );
    assert_eq!(cache.acquire(page(1), 50), Some(iova(1)));
    assert_eq!(cache.acquire(page(1), 60), None, "REUSING counts no users");
    assert_eq!(cache.expire(10_000, &mut batch), Progress::Done);
    assert!(batch.is_empty());
    assert_eq!(
        cache.release(page(1), iova(1), 10_000, &mut batch),
        Released::Kept
    );
    assert_eq!(cache.expire(10_400, &mut batch), Progress::Done);
    assert_eq!(numbers(&batch), [1]);
}

fn a_step() -> impl Strategy<Value = Step> {
    (0..Step::CHOICES, any::<u64>()).prop_map(|(choice, number)| Step::chosen(choice, number))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn lru(quota in 1usize..24, steps in proptest::collection::vec(a_step(), 1..600)) {
        World::new(LruCache::new(quota, 100), idle_only(quota), EARLIEST_NS, 64).run(&steps);
    }

    #[test]
    fn rtc(room in 1usize..8, steps in proptest::collection::vec(a_step(), 1..600)) {
        // Three cycles at least, four at most.
        let contract = RiskContract { max_stale: None, max_age_ns: Some(400) };
        let rules = Rules { contract, keeps_while_it_can: false, ..idle_only(0) };
        World::new(RtcCache::new(100), rules, 300, room).run(&steps);
    }
}
