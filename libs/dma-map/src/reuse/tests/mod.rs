//! Behaviour of the caches as the mapper sees it.

mod against_model;
mod quiet_owner;
mod stress;

use alloc::sync::Arc;

use address::PhysAddr;
use iova::{Access, IovaPfn, IovaRange};

use super::*;
use crate::testing::reuse::{OptimisticCache, *};

/// One page for reading and writing.
fn page(number: u64) -> Key {
    Key::new(PhysAddr::new(number << 12), 1, Access::ReadWrite).unwrap()
}

fn iova(number: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(number), 1).unwrap()
}

/// The IOVA pages of a batch, in its order.
fn numbers(batch: &Batch) -> Vec<u64> {
    let entries = batch.entries().iter();
    entries.map(|gone| gone.range.first().raw()).collect()
}

#[test]
fn accesses_and_sizes_do_not_alias() {
    let mut batch = Batch::with_room(8);
    let of = |pages, access| Key::new(PhysAddr::new(0x5000), pages, access).unwrap();
    let mut caches: [Box<dyn ReuseCache>; 2] = [
        Box::new(OptimisticCache::new(8, 100)),
        Box::new(SharingTable::new(8, 2)),
    ];
    for cache in &mut caches {
        cache.insert(of(1, Access::Read), iova(7), 0);
        if cache.expirer().is_some() {
            let kept = cache.release(of(1, Access::Read), iova(7), 0, &mut batch);
            assert_eq!(kept, Released::Kept);
        }
        for (pages, access) in [
            (1, Access::Write),
            (1, Access::ReadWrite),
            (2, Access::Read),
        ] {
            assert_eq!(cache.acquire(of(pages, access), 1), None);
        }
        assert_eq!(cache.acquire(of(1, Access::Read), 1), Some(iova(7)));
        assert!((cache.counts().hit_rate() - 0.25).abs() < 1e-9);
        assert!(cache.counts().bytes > 0);
    }
}

#[test]
fn a_full_cache_lets_the_oldest_go_together() {
    let mut cache = OptimisticCache::new(16, 1000);
    let mut batch = Batch::with_room(64);
    for number in 0..15 {
        let kept = cache.release(page(number), iova(number), number, &mut batch);
        assert_eq!((kept, batch.is_empty()), (Released::Kept, true));
    }
    // Used again: no longer the oldest.
    assert_eq!(cache.acquire(page(0), 20), Some(iova(0)));
    assert_eq!(
        cache.release(page(0), iova(0), 20, &mut batch),
        Released::Kept
    );
    assert_eq!(
        cache.release(page(15), iova(15), 21, &mut batch),
        Released::Kept
    );
    assert_eq!(numbers(&batch), [1, 2]);
    assert_eq!(cache.counts().stale, 16);
    cache.torn_down(&mut batch, 30);
    assert_eq!((cache.counts().stale, cache.counts().stale_max), (14, 16));
    assert_eq!(cache.counts().stale_times.max_ns, 29);
    assert_eq!(cache.acquire(page(1), 31), None);
}

#[test]
fn mapping_not_torn_down_keeps_its_place() {
    let mut cache = OptimisticCache::new(2, 1000);
    let mut batch = Batch::with_room(8);
    for number in 0..2 {
        assert_eq!(
            cache.release(page(number), iova(number), 0, &mut batch),
            Released::Kept
        );
    }
    assert_eq!(numbers(&batch), [0]);
    // One of two places is on its way out, the other goes now; none is left for the youngest.
    let refused = cache.release(page(2), iova(2), 0, &mut batch);
    assert_eq!(refused, Released::TearDown);
    assert_eq!(numbers(&batch), [0, 1]);
    assert_eq!(cache.counts().stale, 2);
    cache.torn_down(&mut batch, 1);
    assert_eq!(
        cache.release(page(2), iova(2), 1, &mut batch),
        Released::Kept
    );
}

/// As in the mapper: a mapping that finds no place is torn down, even though one could be had now;
/// the next gets the place.
#[test]
fn mapping_without_place_is_torn_down_and_makes_room() {
    let mut cache = OptimisticCache::new(1, 1000);
    let slab = cache.slab();
    let mut batch = Batch::with_room(8);
    let kept = cache.release(page(0), iova(0), 0, &mut batch);
    assert_eq!((kept, numbers(&batch)), (Released::Kept, vec![0]));
    slab.torn_down(&mut batch, 1);
    let refused = cache.release(page(1), iova(1), 1, &mut batch);
    assert_eq!((refused, batch.is_empty()), (Released::TearDown, true));
    assert_eq!((cache.counts().evicted, cache.counts().stale), (2, 0));
    let kept = cache.release(page(2), iova(2), 1, &mut batch);
    assert_eq!(kept, Released::Kept);
    cache.torn_down(&mut batch, 2);
}

#[test]
fn a_range_too_long_for_a_word_is_not_kept() {
    let mut batch = Batch::with_room(1);
    let long = IovaRange::new(IovaPfn::new(0), 1 << 20).unwrap();
    for cache in [
        &mut OptimisticCache::new(4, 10) as &mut dyn ReuseCache,
        &mut SharingTable::new(4, 1),
    ] {
        cache.insert(page(1), long, 0);
        assert_eq!(cache.acquire(page(1), 0), None);
        assert_eq!(
            cache.release(page(1), long, 0, &mut batch),
            Released::TearDown
        );
    }
}

/// The owner takes, another thread tears down (an invalidation had failed); and the other way
/// round.
#[test]
fn owner_gets_places_back_from_any_tearing_thread() {
    for is_taken_by_owner in [true, false] {
        let mut cache = OptimisticCache::new(2, 10);
        let slab = cache.slab();
        let mut batch = Batch::with_room(4);
        for now_ns in [0, 20, 40] {
            let kept = cache.release(page(1), iova(1), now_ns, &mut batch);
            assert_eq!((kept, batch.is_empty()), (Released::Kept, true));
            if is_taken_by_owner {
                assert_eq!(cache.drain(&mut batch), Progress::Done);
                slab.torn_down(&mut batch, now_ns);
            } else {
                assert_eq!(slab.drain(&mut batch), Progress::Done);
                cache.torn_down(&mut batch, now_ns);
            }
        }
        assert_eq!(cache.counts().stale, 0);
    }
}

#[test]
#[should_panic(expected = "a mapping is torn down once, by who took it")]
fn another_caches_batch_is_refused() {
    let mut caches = [OptimisticCache::new(4, 10), OptimisticCache::new(4, 10)];
    let mut batch = Batch::with_room(4);
    for cache in &mut caches {
        let kept = cache.release(page(1), iova(1), 0, &mut batch);
        assert_eq!(kept, Released::Kept);
    }
    assert_eq!(caches[0].drain(&mut batch), Progress::Done);
    caches[1].torn_down(&mut batch, 10);
}

#[test]
fn a_shared_mapping_is_torn_down_by_its_last_user_on_whichever_core() {
    let table = SharingTable::new(64, 4);
    let mut cores = [table.clone(), table];
    let mut batch = Batch::with_room(1);
    assert_eq!(cores[0].acquire(page(3), 0), None);
    cores[0].insert(page(3), iova(9), 0);
    assert_eq!(cores[1].acquire(page(3), 0), Some(iova(9)));
    assert_eq!(
        cores[1].release(page(3), iova(9), 0, &mut batch),
        Released::InUse
    );
    assert_eq!(
        cores[1].release(page(3), iova(9), 0, &mut batch),
        Released::TearDown
    );
    assert_eq!(cores[0].acquire(page(3), 0), None);
    assert_eq!(cores[0].counts().entries, 0);
}

#[test]
fn a_sharing_table_forgets_only_what_has_one_user() {
    let mut cache = SharingTable::new(2, 1);
    let mut batch = Batch::with_room(1);
    for number in 0..2 {
        cache.insert(page(number), iova(number), 0);
        assert_eq!(cache.acquire(page(number), 0), Some(iova(number)));
    }
    // Both have two users: there is no room for a third.
    cache.insert(page(2), iova(2), 0);
    assert_eq!(cache.acquire(page(2), 0), None);
    assert_eq!(
        cache.release(page(0), iova(0), 0, &mut batch),
        Released::InUse
    );
    cache.insert(page(2), iova(2), 0);
    assert_eq!(cache.acquire(page(2), 0), Some(iova(2)));
    assert_eq!(cache.counts().evicted, 1);
    // Forgotten with its one user, whose unmap is the last.
    assert_eq!(
        cache.release(page(0), iova(0), 0, &mut batch),
        Released::TearDown
    );
}
