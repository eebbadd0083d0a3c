//! Real threads: owners that reuse, remote cores that expire, and a table of each mapping's state,
//! which the caches do not see. Every change of a mapping swaps its entry and checks the old value.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::SeqCst};
use std::thread;

use super::*;

const GONE: u8 = 0;
const LIVE: u8 = 1;
const IDLE: u8 = 2;

/// IOVA pages of one owner, and physical pages it maps.
const IOVAS: usize = 256;
const PAGES: u64 = 48;
const QUOTA: usize = 64;
const STEPS: u64 = 400_000;

fn tear_down(states: &[AtomicU8], batch: &Batch) {
    for expired in batch.entries() {
        let number = usize::try_from(expired.range.first().raw()).unwrap();
        let was = states[number].swap(GONE, SeqCst);
        assert_eq!(was, IDLE, "mapping {number} was torn down");
    }
}

/// Maps and unmaps at random; the clock moves with the owner's steps.
fn own(mut cache: OptimisticCache, states: &[AtomicU8], clock: &AtomicU64, seed: u64) {
    let mut batch = Batch::with_room(QUOTA);
    let mut live: Vec<(u64, IovaRange)> = Vec::new();
    let mut random = seed;
    let mut fresh = 0;
    for _ in 0..STEPS {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let now_ns = clock.fetch_add(random & 1, SeqCst);
        let is_map = live.len() < 8 || (live.len() < 40 && random & 2 == 0);
        if is_map {
            let number = (random >> 8) % PAGES;
            let range = match cache.acquire(page(number), now_ns) {
                Some(range) => {
                    let at = usize::try_from(range.first().raw()).unwrap();
                    assert_eq!(
                        states[at].swap(LIVE, SeqCst),
                        IDLE,
                        "mapping {at} was reused"
                    );
                    range
                }
                None => {
                    // At most 40 live and 64 stale: some IOVA is free.
                    let at = (0..IOVAS)
                        .map(|step| (fresh + step) % IOVAS)
                        .find(|&at| states[at].load(SeqCst) == GONE)
                        .expect("stale mappings are bounded");
                    fresh = at + 1;
                    assert_eq!(states[at].swap(LIVE, SeqCst), GONE);
                    iova(at as u64)
                }
            };
            live.push((number, range));
        } else {
            let at = usize::try_from(random >> 8).unwrap() % live.len();
            let (number, range) = live.swap_remove(at);
            let at = usize::try_from(range.first().raw()).unwrap();
            assert_eq!(states[at].swap(IDLE, SeqCst), LIVE);
            let released = cache.release(page(number), range, now_ns, &mut batch);
            if released == Released::TearDown {
                assert_eq!(states[at].swap(GONE, SeqCst), IDLE);
            }
            tear_down(states, &batch);
            cache.torn_down(&mut batch, now_ns);
        }
        let stale = states.iter().filter(|state| state.load(SeqCst) == IDLE);
        if random & 0xff00_0000 == 0 {
            assert!(stale.count() <= QUOTA);
        }
    }
    let now_ns = clock.load(SeqCst);
    while cache.drain(&mut batch) == Progress::More || !batch.is_empty() {
        tear_down(states, &batch);
        cache.torn_down(&mut batch, now_ns);
    }
    let counts = cache.counts();
    assert!(counts.hits > STEPS / 100, "{counts:?}");
    assert!(counts.stale_max <= QUOTA as u64);
}

#[test]
fn owners_and_strangers_never_both_get_a_mapping() {
    let clock = AtomicU64::new(0);
    let is_over = AtomicBool::new(false);
    let tables: Vec<Vec<AtomicU8>> = (0..2)
        .map(|_| (0..IOVAS).map(|_| AtomicU8::new(GONE)).collect())
        .collect();
    let caches: Vec<_> = (0..2).map(|_| OptimisticCache::new(QUOTA, 40)).collect();
    let expirers: Vec<_> = caches.iter().map(|c| c.expirer().unwrap()).collect();
    let expired = AtomicU64::new(0);
    thread::scope(|scope| {
        let remotes: Vec<_> = (0..2)
            .map(|remote| {
                let (clock, is_over, tables, expirers) = (&clock, &is_over, &tables, &expirers);
                let expired = &expired;
                scope.spawn(move || {
                    let mut batch = Batch::with_room(7 + remote);
                    while !is_over.load(SeqCst) {
                        for (states, expirer) in tables.iter().zip(expirers) {
                            // A remote core's clock may run ahead of an owner's last reading.
                            let now_ns = clock.load(SeqCst);
                            let _ = expirer.expire(now_ns, &mut batch);
                            tear_down(states, &batch);
                            expired.fetch_add(batch.entries().len() as u64, SeqCst);
                            expirer.torn_down(&mut batch, now_ns);
                        }
                        thread::yield_now();
                    }
                })
            })
            .collect();
        let owners: Vec<_> = caches
            .into_iter()
            .zip(&tables)
            .zip([0x9e37_79b9_7f4a_7c15, 0x3c6e_f372_fe94_f82b])
            .map(|((cache, states), seed)| {
                let clock = &clock;
                scope.spawn(move || own(cache, states, clock, seed))
            })
            .collect();
        let ends: Vec<_> = owners.into_iter().map(|owner| owner.join()).collect();
        is_over.store(true, SeqCst);
        let remotes: Vec<_> = remotes.into_iter().map(|s| s.join()).collect();
        assert!(ends.iter().chain(&remotes).all(Result::is_ok));
    });
    assert!(
        expired.load(SeqCst) > 0,
        "no stranger ever expired anything"
    );
    for states in &tables {
        assert!(states.iter().all(|state| state.load(SeqCst) != IDLE));
    }
}
