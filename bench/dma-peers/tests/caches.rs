//! The caches that no policy uses, and stacks of them, one owner each. Once all is drained and torn
//! down by an invalidation that was answered, no released mapping is reached; until then, accesses
//! that reach one are counted.

use std::collections::BTreeMap;

use address::PhysAddr;
use dma_peers::reuse::{Batch, Key, OptimisticCache, Progress, Released, ReuseCache};
use dma_peers::{LruCache, RtcCache};
use iova::testing::Random;
use iova::{Access, IovaPfn, IovaRange};

const STEPS: u64 = 10_000;
const PAGES: u64 = 40;

/// Entries of the table and of the device's cache, by page of IOVA.
#[derive(Default)]
struct Hardware {
    entries: BTreeMap<u64, u64>,
    cached: BTreeMap<u64, u64>,
}

struct Owner {
    cache: Box<dyn ReuseCache>,
    batch: Batch,
    /// Its entries are cleared; the invalidation failed.
    is_cleared: bool,
    hardware: Hardware,
    /// Users of each page of IOVA.
    users: BTreeMap<u64, u32>,
    live: Vec<(Key, IovaRange)>,
    random: Random,
    now: u64,
    fresh: u64,
    barriers: u64,
}

impl Owner {
    fn map(&mut self) {
        let phys = self.random.below(PAGES);
        let key = Key::new(PhysAddr::new(phys << 12), 1, Access::Read).expect("one page");
        let range = match self.cache.acquire(key, self.now) {
            Some(range) => {
                assert_eq!(self.hardware.entries.get(&range.first().raw()), Some(&phys));
                range
            }
            None => {
                self.fresh += 1;
                let range = IovaRange::new(IovaPfn::new(self.fresh), 1).expect("one page");
                self.hardware.entries.insert(self.fresh, phys);
                self.cache.insert(key, range, self.now);
                range
            }
        };
        self.hardware.cached.insert(range.first().raw(), phys);
        *self.users.entry(range.first().raw()).or_default() += 1;
        self.live.push((key, range));
    }

    fn unmap(&mut self) {
        let at = self.random.below(self.live.len() as u64) as usize;
        let (key, range) = self.live.swap_remove(at);
        let iova = range.first().raw();
        // What joins a batch that waits is not cleared yet.
        let before = self.batch.entries().len();
        let released = self.cache.release(key, range, self.now, &mut self.batch);
        if self.is_cleared {
            for expired in &self.batch.entries()[before..] {
                self.hardware.entries.remove(&expired.range.first().raw());
            }
        }
        *self.users.get_mut(&iova).expect("mapped") -= 1;
        if released == Released::TearDown {
            self.hardware.entries.remove(&iova);
            // Strict, and not to be given up.
            self.hardware.cached.remove(&iova);
        }
        let _ = self.tear_down();
    }

    /// False where the hardware did not answer.
    fn tear_down(&mut self) -> bool {
        if self.batch.is_empty() {
            return true;
        }
        if !self.is_cleared {
            for expired in self.batch.entries() {
                let was = self.hardware.entries.remove(&expired.range.first().raw());
                assert!(was.is_some(), "it is mapped until here");
            }
            self.is_cleared = true;
        }
        if self.random.one_in(4) {
            return false;
        }
        for expired in self.batch.entries() {
            self.hardware.cached.remove(&expired.range.first().raw());
        }
        self.is_cleared = false;
        self.cache.torn_down(&mut self.batch, self.now);
        true
    }

    fn reached(&self) -> u64 {
        let Hardware { entries, cached } = &self.hardware;
        let is_reached = |iova: &u64| entries.contains_key(iova) || cached.contains_key(iova);
        let gone = self.users.iter().filter(|(_, users)| **users == 0);
        gone.filter(|(iova, _)| is_reached(iova)).count() as u64
    }

    /// Drains until all is torn down, or the hardware does not answer.
    fn barrier(&mut self) {
        loop {
            if !self.tear_down() {
                return;
            }
            let progress = self.cache.drain(&mut self.batch);
            if !self.tear_down() {
                return;
            }
            if progress == Progress::Done {
                break;
            }
        }
        assert_eq!((self.reached(), self.cache.counts().stale), (0, 0));
        self.users.retain(|_, users| *users > 0);
        self.barriers += 1;
    }

    fn run(&mut self) {
        for _ in 0..STEPS {
            match self.random.below(32) {
                0..16 if self.live.len() < 30 => self.map(),
                0..26 if !self.live.is_empty() => self.unmap(),
                26..30 => self.now += self.random.below(60),
                30 => {
                    let before = self.batch.entries().len();
                    let _ = self.cache.expire(self.now, &mut self.batch);
                    if self.is_cleared {
                        for expired in &self.batch.entries()[before..] {
                            self.hardware.entries.remove(&expired.range.first().raw());
                        }
                    }
                    let _ = self.tear_down();
                }
                _ if self.random.one_in(4) => self.barrier(),
                _ => {}
            }
            assert!(self.reached() <= self.cache.counts().stale);
        }
    }
}

#[test]
fn a_drained_cache_leaves_nothing_in_reach() {
    let caches: [(&str, Box<dyn ReuseCache>); 3] = [
        ("lru", Box::new(LruCache::new(12, 200))),
        ("rtc", Box::new(RtcCache::new(100))),
        ("optimistic", Box::new(OptimisticCache::new(12, 200))),
    ];
    for (seed, (name, cache)) in (1..).zip(caches) {
        println!("{name}");
        let mut owner = Owner {
            cache,
            batch: Batch::with_room(8),
            is_cleared: false,
            hardware: Hardware::default(),
            users: BTreeMap::new(),
            live: Vec::new(),
            random: Random::new(seed),
            now: 0,
            fresh: 0,
            barriers: 0,
        };
        owner.run();
        assert!(owner.barriers > 20, "{name}: {}", owner.barriers);
    }
}
