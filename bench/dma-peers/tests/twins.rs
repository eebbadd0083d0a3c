//! The shared slab changes nothing that one core alone can see: step by step the LRU does the same.

use proptest::prelude::*;

use dma_peers::LruCache;
use dma_peers::reuse::{Batch, Counts, Key, OptimisticCache, ReuseCache};

use address::PhysAddr;
use iova::{Access, IovaPfn, IovaRange};

fn page(number: u64) -> Key {
    Key::new(PhysAddr::new(number << 12), 1, Access::ReadWrite).expect("a page")
}

fn iova(number: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(number), 1).expect("a page")
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Map(u64),
    Unmap(usize),
    Wait(u64),
    Expire,
    Drain,
    TearDown,
}

fn a_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u64..24).prop_map(Step::Map),
        6 => (0usize..64).prop_map(Step::Unmap),
        2 => (0u64..40).prop_map(Step::Wait),
        1 => Just(Step::Expire),
        1 => Just(Step::TearDown),
        (1) => Just(Step::Drain),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn optimistic_and_lru_agree(
        quota in 1usize..20,
        room in 1usize..6,
        steps in proptest::collection::vec(a_step(), 1..400),
    ) {
        let mut optimistic = OptimisticCache::new(quota, 60);
        let mut lru = LruCache::new(quota, 60);
        let mut batches = [Batch::with_room(room), Batch::with_room(room)];
        let mut live: Vec<(u64, IovaRange)> = Vec::new();
        let (mut now_ns, mut fresh) = (0, 100);
        for step in steps {
            let [ours, theirs] = &mut batches;
            match step {
                Step::Map(number) => {
                    let found = optimistic.acquire(page(number), now_ns);
                    prop_assert_eq!(found, lru.acquire(page(number), now_ns));
                    fresh += 1;
                    live.push((number, found.unwrap_or(iova(fresh))));
                }
                Step::Unmap(at) if !live.is_empty() => {
                    let (number, range) = live.swap_remove(at % live.len());
                    let kept = optimistic.release(page(number), range, now_ns, ours);
                    prop_assert_eq!(kept, lru.release(page(number), range, now_ns, theirs));
                }
                Step::Unmap(_) => {}
                Step::Wait(ns) => now_ns += ns,
                Step::Expire => {
                    prop_assert_eq!(optimistic.expire(now_ns, ours), lru.expire(now_ns, theirs));
                }
                Step::Drain => prop_assert_eq!(optimistic.drain(ours), lru.drain(theirs)),
                Step::TearDown => {
                    optimistic.torn_down(ours, now_ns);
                    lru.torn_down(theirs, now_ns);
                }
            }
            prop_assert_eq!(batches[0].entries(), batches[1].entries());
            let (a, b) = (optimistic.counts(), lru.counts());
            prop_assert_eq!(Counts { bytes: 0, ..a }, Counts { bytes: 0, ..b });
        }
    }
}
