//! Barriers in every order that loom knows, with each rule broken in turn: the model has to notice
//! every time. Run with `RUSTFLAGS="--cfg loom" cargo test -p dma-map --lib --release model`.

use alloc::sync::Arc;

use address::PhysAddr;
use iova::{Access, IovaPfn, IovaRange};
use lines::{AtomicBool, AtomicU64, Lock, Ordering};
use loom::thread;

use super::lines::{CoreLines, Leaving};
use crate::reuse::{Batch, Key, OptimisticCache, Progress, Slab};

/// Mistake of a barrier, or of an owner.
#[derive(Clone, Copy, PartialEq)]
enum Wrong {
    Nothing,
    /// The barrier passes by a core whose lock is held.
    Passes,
    /// The owner takes without the lock.
    Takes,
}

/// One mapping: its entry, and whether the device has it cached. Relaxed: only the lock orders
/// them.
#[derive(Default)]
struct World {
    leaving: Lock<Leaving>,
    /// The unmap has returned.
    is_gone: AtomicBool,
    entry: AtomicU64,
    cached: AtomicU64,
}

impl World {
    /// Clears and invalidates a batch, between taking it and reporting it.
    fn tear_down(&self, batch: &Batch) {
        for _ in batch.entries() {
            self.entry.store(0, Ordering::Relaxed);
            self.cached.store(0, Ordering::Relaxed);
        }
    }

    /// Takes all idle mappings out of reach. Returns whether the device reaches none.
    fn barrier(&self, expirer: &Slab, wrong: Wrong) -> bool {
        let leaving = match wrong {
            Wrong::Passes => self.leaving.try_lock(),
            _ => Some(self.leaving.lock()),
        };
        if let Some(mut leaving) = leaving {
            let batch = leaving.batch();
            assert_eq!(expirer.drain(batch), Progress::Done);
            self.tear_down(batch);
            expirer.torn_down(batch, 2);
        }
        self.cached.load(Ordering::Relaxed) == 0 && self.entry.load(Ordering::Relaxed) == 0
    }
}

/// An owner that unmaps and makes room for the next, and a flusher that wants the unmapped page out
/// of reach.
fn run(wrong: Wrong) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let world = Arc::new(World::default());
        let mut cache = OptimisticCache::new(1, 10);
        let expirer = cache.slab();
        let flusher = thread::spawn({
            let world = Arc::clone(&world);
            move || {
                if world.is_gone.load(Ordering::Acquire) {
                    assert!(
                        world.barrier(&expirer, wrong),
                        "what was unmapped before is reached after a barrier"
                    );
                }
            }
        });
        world.entry.store(1, Ordering::Relaxed);
        world.cached.store(1, Ordering::Relaxed);
        let key = Key::new(PhysAddr::new(5 << 12), 1, Access::Read).expect("one page");
        let range = IovaRange::new(IovaPfn::new(1), 1).expect("one page");
        assert_eq!(cache.keep(key, range, range, 0), Ok(true), "the only place");
        world.is_gone.store(true, Ordering::Release);
        let nobodys = Lock::new(Leaving::default());
        let mut leaving = match wrong {
            Wrong::Takes => nobodys.lock(),
            _ => world.leaving.lock(),
        };
        let batch = leaving.batch();
        cache.make_room(1, batch);
        world.tear_down(batch);
        cache.finish(batch, 1, drop);
        drop(leaving);
        flusher.join().expect("it ends");
        assert_eq!(world.cached.load(Ordering::Relaxed), 0);
    });
}

fn is_caught(run: impl Fn() + std::panic::UnwindSafe) -> bool {
    std::panic::catch_unwind(run).is_err()
}

#[test]
fn model_a_barrier_finds_everything_idle_leaving_or_gone() {
    run(Wrong::Nothing);
}

#[test]
fn model_catches_a_barrier_that_passes_by_the_busy() {
    assert!(is_caught(|| run(Wrong::Passes)));
}

#[test]
fn model_catches_an_owner_that_takes_without_the_lock() {
    assert!(is_caught(|| run(Wrong::Takes)));
}

/// A core with one mapping that no invalidation has covered is dropped; another thread counts the
/// stale mappings meanwhile.
fn leave(settles_first: bool, asks_orphans_first: bool) {
    loom::model(move || {
        let line = Arc::new(CoreLines::default());
        let abandoned = Arc::new(Lock::new(0));
        line.owner.queued.store(1, Ordering::Relaxed);
        let asking = thread::spawn({
            let (line, abandoned) = (Arc::clone(&line), Arc::clone(&abandoned));
            move || {
                let waiting = || *abandoned.lock();
                let known = match asks_orphans_first {
                    true => waiting() + line.stale(),
                    false => line.stale() + waiting(),
                };
                assert!(known >= 1, "what is reached is not counted");
            }
        });
        if settles_first {
            line.settle();
        }
        let mut waiting = abandoned.lock();
        *waiting = 1;
        line.settle();
        drop(waiting);
        asking.join().expect("it ends");
        assert_eq!((line.stale(), *abandoned.lock()), (0, 1));
    });
}

#[test]
fn model_work_of_a_dropped_core_is_always_counted() {
    leave(false, false);
}

#[test]
fn model_catches_numbers_that_are_given_up_first() {
    assert!(is_caught(|| leave(true, false)));
}

#[test]
fn model_catches_a_count_that_reads_abandoned_work_first() {
    assert!(is_caught(|| leave(false, true)));
}

/// A core with room for one fills its queue twice, with a flush in between; another thread counts
/// the stale mappings meanwhile.
#[test]
fn model_no_more_is_counted_than_the_queue_has_room_for() {
    loom::model(|| {
        let line = Arc::new(CoreLines::default());
        let asking = thread::spawn({
            let line = Arc::clone(&line);
            move || assert!(line.stale() <= 1, "more than there ever were at one time")
        });
        line.owner.queued.store(1, Ordering::Release);
        line.flusher.covered.fetch_max(1, Ordering::Release);
        line.owner.queued.store(2, Ordering::Release);
        asking.join().expect("it ends");
        assert_eq!(line.stale(), 1);
    });
}
