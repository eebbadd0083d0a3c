//! The slot protocol in every order that loom knows. `tests/mutants/dma-map` breaks each ordering
//! and each swap in turn: the model has to notice every time. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p dma-map --lib --release model`.

use alloc::sync::Arc;

use address::PhysAddr;
use iova::{Access, IovaPfn, IovaRange};
use lines::{AtomicU64, Ordering};
use loom::thread;

use super::super::{Batch, Key, OptimisticCache, Progress};
use super::{PackedRange, Slot};

fn iova(number: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(number), 1).expect("one page")
}

fn packed(number: u64) -> PackedRange {
    PackedRange::new(iova(number)).expect("one page")
}

/// One slot and the page-table entry of the mapping in it: the number of the IOVA page, 0 for none.
/// Relaxed: only the slot orders it.
struct World {
    slot: Slot,
    entry: AtomicU64,
}

/// Any thread but the owner: expires a mapping that is idle since 1. Returns whether it got it.
fn expire(world: &World) -> bool {
    let Some(range) = world.slot.take(1) else {
        return false;
    };
    assert_eq!(
        range,
        iova(7),
        "the taker sees the range that was published"
    );
    let was = world.entry.load(Ordering::Relaxed);
    assert_eq!(was, 7, "the taker finds the mapping in place");
    world.entry.store(0, Ordering::Relaxed);
    world.slot.finish();
    true
}

/// An owner that maps, unmaps, reuses, while remote cores expire.
fn run(remotes: usize) {
    loom::model(move || {
        let world = Arc::new(World {
            slot: Slot::default(),
            entry: AtomicU64::new(0),
        });
        let remotes: Vec<_> = (0..remotes)
            .map(|_| {
                let world = world.clone();
                thread::spawn(move || expire(&world))
            })
            .collect();
        world.entry.store(7, Ordering::Relaxed);
        world.slot.publish(packed(7), 1);
        let is_reused = world.slot.reuse(1);
        if is_reused {
            // A driver has it: whatever others do, it stays.
            thread::yield_now();
            let is_mapped = world.entry.load(Ordering::Relaxed) == 7;
            assert!(is_mapped, "a mapping in use was torn down");
        } else if world.slot.is_owned() {
            let is_gone = world.entry.load(Ordering::Relaxed) == 0;
            assert!(is_gone, "the slot came back before the mapping was gone");
        }
        let ends = remotes.into_iter().map(|s| s.join().expect("it ends"));
        let takers = usize::from(is_reused) + ends.filter(|&took| took).count();
        assert_eq!(takers, 1, "one got it");
        assert!(world.slot.is_owned(), "the slot is the owner's again");
        let is_mapped = world.entry.load(Ordering::Relaxed) == 7;
        assert_eq!(is_mapped, is_reused, "mapped if and only if reused");
    });
}

#[test]
fn model_one_thread_gets_an_idle_mapping() {
    run(1);
    run(2);
}

fn page(number: u64) -> Key {
    Key::new(PhysAddr::new(number << 12), 1, Access::ReadWrite).expect("one page")
}

/// The whole cache with two slots: an owner that releases, acquires and releases, and a timer that
/// expires. At most two involuntary switches in a run: the cache has too many steps for all orders.
#[test]
fn model_a_cache_loses_no_slot_and_no_mapping() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let mut cache = OptimisticCache::new(2, 10);
        let expirer = cache.slab();
        // Page-table entries of IOVA pages 1 and 2.
        let entries = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let timer = thread::spawn({
            let entries = entries.clone();
            move || {
                let mut batch = Batch::with_room(2);
                let _ = expirer.expire(20, &mut batch);
                tear_down(&entries, &batch);
                expirer.torn_down(&mut batch, 20);
            }
        });
        let mut batch = Batch::with_room(2);
        entries[0].store(1, Ordering::Relaxed);
        assert!(
            cache.keep(page(5), iova(1), iova(1), 0).is_ok(),
            "it is kept"
        );
        let second = match cache.hit(page(5), 5) {
            Some(range) => {
                assert_eq!(range, iova(1));
                assert_eq!(entries[0].load(Ordering::Relaxed), 1, "a hit is mapped");
                range
            }
            None => {
                entries[1].store(1, Ordering::Relaxed);
                iova(2)
            }
        };
        let kept = cache.keep(page(5), second, second, 6);
        if kept.expect("one of two places at least is free") {
            cache.make_room(6, &mut batch);
        }
        tear_down(&entries, &batch);
        cache.finish(&mut batch, 6, drop);
        timer.join().expect("it ends");
        assert_eq!(cache.drain(&mut batch), Progress::Done);
        tear_down(&entries, &batch);
        cache.finish(&mut batch, 30, drop);
        assert_eq!(cache.slab().counts().stale, 0);
        for entry in entries.iter() {
            assert_eq!(entry.load(Ordering::Relaxed), 0, "all is torn down");
        }
        assert!(
            cache.keep(page(5), iova(1), iova(1), 31).is_ok(),
            "it is kept"
        );
    });
}

fn entry(entries: &[AtomicU64; 2], range: IovaRange) -> &AtomicU64 {
    match range.first().raw() {
        1 => &entries[0],
        _ => &entries[1],
    }
}

fn tear_down(entries: &[AtomicU64; 2], batch: &Batch) {
    for expired in batch.entries() {
        let entry = entry(entries, expired.range);
        assert_eq!(entry.load(Ordering::Relaxed), 1, "it is mapped until here");
        entry.store(0, Ordering::Relaxed);
    }
}
