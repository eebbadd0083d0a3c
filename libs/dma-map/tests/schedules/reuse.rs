//! Owners of idle mappings, which take them back, and remote cores, which expire them meanwhile:
//! one of them gets each.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use address::PhysAddr;
use dma_map::testing::reuse::{Batch, Key, OptimisticCache, Progress, Released, ReuseCache, Slab};
use iova::{Access, IovaPfn, IovaRange};
use random_schedules::{any, fail, has_failed, holds, point, thread};

const ROUNDS: usize = 6;
/// Mappings that an owner keeps, and their residency, nanoseconds.
const KEPT: usize = 2;
const RESIDENCY: u64 = 2;

/// By IOVA: whether the mapping is in use, or idle. Without the mappings that are torn down.
type Table = Mutex<BTreeMap<u64, bool>>;

fn tear_down(table: &Table, range: IovaRange) {
    let first = range.first().raw();
    let was = table.lock().expect("nobody panics with it").remove(&first);
    if was != Some(false) {
        fail(format!(
            "mapping {first} was torn down, and in use was {was:?}"
        ));
    }
}

fn tear_down_all(table: &Table, batch: &Batch) {
    point();
    batch
        .entries()
        .iter()
        .for_each(|idle| tear_down(table, idle.range));
}

fn own(table: &Table, mut cache: OptimisticCache, id: u64) -> OptimisticCache {
    let use_it = |iova: u64, in_use: bool| {
        let mut table = table.lock().expect("nobody panics with it");
        table.insert(iova, in_use)
    };
    let mut batch = Batch::with_room(KEPT + 1);
    for round in 0..ROUNDS as u64 {
        let key = Key::new(PhysAddr::new(any(2) << 12), 1, Access::Read).expect("one page");
        let range = match cache.acquire(key, round) {
            Some(range) => {
                if use_it(range.first().raw(), true) != Some(false) {
                    fail("a mapping was reused that was gone");
                }
                range
            }
            None => {
                let iova = id * 100 + round;
                use_it(iova, true);
                IovaRange::new(IovaPfn::new(iova), 1).expect("one page")
            }
        };
        point();
        use_it(range.first().raw(), false);
        match cache.release(key, range, round, &mut batch) {
            Released::Kept => {}
            Released::TearDown | Released::InUse => tear_down(table, range),
        }
        tear_down_all(table, &batch);
        cache.torn_down(&mut batch, round);
        if has_failed() {
            break;
        }
    }
    cache
}

fn expire(table: &Table, expirers: &[Arc<Slab>]) {
    let mut batch = Batch::with_room(KEPT);
    for now in 0..ROUNDS as u64 + RESIDENCY {
        for expirer in expirers {
            let _ = expirer.expire(now, &mut batch);
            tear_down_all(table, &batch);
            expirer.torn_down(&mut batch, now);
        }
        if has_failed() {
            return;
        }
    }
}

fn model() {
    let table = Arc::new(Table::default());
    let caches: Vec<_> = (0..2)
        .map(|_| OptimisticCache::new(KEPT, RESIDENCY))
        .collect();
    let expirers: Vec<_> = caches.iter().map(OptimisticCache::slab).collect();
    let remotes: Vec<_> = (0..2 + any(3))
        .map(|_| {
            let (table, expirers) = (Arc::clone(&table), expirers.clone());
            thread::spawn(move || expire(&table, &expirers))
        })
        .collect();
    let owners = (0..).zip(caches).map(|(id, cache)| {
        let table = Arc::clone(&table);
        thread::spawn(move || own(&table, cache, id))
    });
    let owners: Vec<_> = owners.collect();
    for remote in remotes {
        remote.join().expect("a model ends at a panic");
    }
    for owner in owners {
        let mut cache = owner.join().expect("a model ends at a panic");
        if has_failed() {
            continue;
        }
        let mut batch = Batch::with_room(KEPT);
        assert_eq!(cache.drain(&mut batch), Progress::Done);
        tear_down_all(&table, &batch);
        cache.torn_down(&mut batch, 100);
        if cache.counts().stale != 0 {
            fail("something stays idle after all is drained");
        }
    }
    let left = table.lock().expect("nobody panics with it").len();
    if left != 0 {
        fail(format!("{left} mappings are lost"));
    }
}

#[test]
fn one_thread_gets_an_idle_mapping() {
    holds(10_000, model);
}
