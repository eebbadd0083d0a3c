//! The bounds hold where the owner has stopped for ever.

use std::sync::mpsc;
use std::thread;

use super::*;

const QUOTA: usize = 32;
const RESIDENCY_NS: u64 = 1000;

#[test]
fn another_thread_closes_the_window_of_an_owner_that_stopped() {
    let (to_timer, from_owner) = mpsc::channel();
    let (stop, stopped) = mpsc::channel::<()>();
    let owner = thread::spawn(move || {
        let mut cache = OptimisticCache::new(QUOTA, RESIDENCY_NS);
        let mut batch = Batch::with_room(QUOTA);
        for number in 0..20 {
            let now_ns = 100 + 10 * number;
            let kept = cache.release(page(number), iova(number), now_ns, &mut batch);
            assert_eq!(kept, Released::Kept);
        }
        to_timer.send(cache.expirer().unwrap()).unwrap();
        // From here on it makes no call until all is over.
        let _ = stopped.recv();
        cache
    });
    let expirer: Arc<Slab> = from_owner.recv().unwrap();
    let mut batch = Batch::with_room(QUOTA);
    for tick_ns in (0..3000).step_by(50) {
        assert_eq!(expirer.expire(tick_ns, &mut batch), Progress::Done);
        let due = (0..20).filter(|number| {
            let at_ns = 100 + 10 * number + RESIDENCY_NS;
            at_ns <= tick_ns && at_ns + 50 > tick_ns
        });
        assert_eq!(numbers(&batch), due.collect::<Vec<_>>(), "at {tick_ns}");
        expirer.torn_down(&mut batch, tick_ns);
    }
    stop.send(()).unwrap();
    let mut cache = owner.join().unwrap();
    let counts = cache.counts();
    assert_eq!((counts.stale, counts.expired), (0, 20));
    assert!(counts.stale_max <= QUOTA as u64 && counts.stale_times.max_ns <= RESIDENCY_NS + 50);
    // The owner finds nothing, and, after a notice, all its places.
    assert_eq!(cache.acquire(page(3), 3000), None);
    cache.torn_down(&mut batch, 3000);
    for number in 0..QUOTA as u64 - 1 {
        assert_eq!(
            cache.release(page(number), iova(number), 3000, &mut batch),
            Released::Kept
        );
    }
    assert!(batch.is_empty());
}

#[test]
fn a_small_batch_is_filled_again_until_done() {
    let mut cache = OptimisticCache::new(QUOTA, RESIDENCY_NS);
    let mut batch = Batch::with_room(8);
    for number in 0..20 {
        assert_eq!(
            cache.release(page(number), iova(number), 0, &mut batch),
            Released::Kept
        );
    }
    let expirer = cache.expirer().unwrap();
    drop(cache);
    let mut all = Vec::new();
    loop {
        let progress = expirer.expire(RESIDENCY_NS, &mut batch);
        all.extend(numbers(&batch));
        expirer.torn_down(&mut batch, RESIDENCY_NS);
        if progress == Progress::Done {
            break;
        }
    }
    assert_eq!(all, (0..20).collect::<Vec<_>>());
}

#[test]
fn draining_ignores_the_age() {
    let mut cache = OptimisticCache::new(QUOTA, RESIDENCY_NS);
    let mut batch = Batch::with_room(QUOTA);
    assert_eq!(
        cache.release(page(1), iova(1), 500, &mut batch),
        Released::Kept
    );
    let expirer = cache.expirer().unwrap();
    assert_eq!(expirer.drain(&mut batch), Progress::Done);
    assert_eq!(numbers(&batch), [1]);
    // Held by the batch alone: neither found nor taken a second time.
    assert_eq!(cache.acquire(page(1), 500), None);
    assert_eq!(cache.drain(&mut Batch::with_room(1)), Progress::Done);
    assert_eq!(cache.counts().stale, 1);
    expirer.torn_down(&mut batch, 600);
    assert_eq!(cache.counts().stale, 0);
}

/// An entry that a lagging clock dates before `due_ns` is due when its own time is over.
#[test]
fn a_clock_that_goes_back_does_not_lengthen_a_window() {
    let mut cache = OptimisticCache::new(QUOTA, RESIDENCY_NS);
    let mut batch = Batch::with_room(QUOTA);
    assert_eq!(
        cache.release(page(1), iova(1), 5000, &mut batch),
        Released::Kept
    );
    assert_eq!(
        cache.release(page(2), iova(2), 4000, &mut batch),
        Released::Kept
    );
    let expirer = cache.expirer().unwrap();
    assert_eq!(expirer.expire(4999, &mut batch), Progress::Done);
    assert!(batch.is_empty());
    assert_eq!(expirer.expire(5000, &mut batch), Progress::Done);
    assert_eq!(numbers(&batch), [2]);
}
