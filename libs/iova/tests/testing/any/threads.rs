//! Any allocator: threads that allocate, hand ranges to each other and free them; a shared bitmap
//! shows overlaps.

use std::prelude::v1::*;
use std::sync::{Barrier, mpsc};
use std::{println, thread};

use crate::testing::{Random, Shared, World};
use crate::{Aperture, ApertureError, CoreAllocator, IovaAllocator, IovaPfn, IovaRange, Request};

const THREADS: usize = 4;
const STEPS: usize = 20_000;
const PAGES: u64 = 1 << 14;

fn give_back(
    core: &mut impl CoreAllocator,
    range: IovaRange,
    bitmap: &Shared,
    random: &mut Random,
) {
    if random.below(2) == 0 {
        bitmap.flip(range, true);
        core.free(range).expect("it is ours");
        return;
    }
    let pinned = core.pin(range).expect("it is ours");
    assert!(core.free(range).is_err());
    bitmap.flip(range, true);
    core.free_pinned(pinned);
}

fn work(
    mut core: impl CoreAllocator,
    inbox: &mpsc::Receiver<IovaRange>,
    next: mpsc::SyncSender<IovaRange>,
    bitmap: &Shared,
) -> (usize, usize) {
    let mut random = Random::new(core.core().0 as u64);
    let (mut done, mut failed) = (0, 0);
    for step in 0..STEPS {
        let pages = 1 + random.below(if step % 16 == 0 { 600 } else { 16 });
        match core.alloc(Request::pages(pages)) {
            Ok(range) => {
                bitmap.flip(range, false);
                done += 1;
                if let Err(mpsc::TrySendError::Full(range)) = next.try_send(range) {
                    give_back(&mut core, range, bitmap, &mut random);
                }
            }
            Err(_) => failed += 1,
        }
        while let Ok(range) = inbox.try_recv() {
            give_back(&mut core, range, bitmap, &mut random);
            if random.below(3) == 0 {
                break;
            }
        }
        if random.below(5000) == 0 {
            core.park();
        }
    }
    drop(next);
    while let Ok(range) = inbox.recv() {
        give_back(&mut core, range, bitmap, &mut random);
    }
    (done, failed)
}

/// Runs the threads on what `make` makes.
pub fn stress<A: IovaAllocator>(make: impl Fn(Aperture, usize) -> Result<A, ApertureError>) {
    let pages = Aperture::new(IovaPfn::new(1), IovaPfn::new(PAGES - 1), &[]);
    let aperture = pages.expect("a constant with pages");
    let space = make(aperture.clone(), THREADS).expect("cores");
    let bitmap = Shared::new(&World {
        aperture,
        ..World::small(THREADS)
    });
    let (senders, inboxes): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::sync_channel(64)).unzip();
    let start = Barrier::new(THREADS);
    let mut senders = senders.into_iter();
    let first = senders.next();
    let senders = senders.chain(first);
    let (done, failed) = thread::scope(|scope| {
        let threads: Vec<_> = inboxes
            .into_iter()
            .zip(senders)
            .map(|(inbox, next)| {
                let core = space.register().expect("a handle each");
                let (bitmap, start) = (&bitmap, &start);
                scope.spawn(move || {
                    start.wait();
                    work(core, &inbox, next, bitmap)
                })
            })
            .collect();
        let results = threads.into_iter().map(|t| t.join().expect("no panic"));
        results.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    });
    println!("{done} allocations, {failed} refused");
    assert!(done > STEPS, "the space was nearly always full");
    assert!(bitmap.is_empty());
    let stats = space.stats();
    assert_eq!((stats.live_ranges, stats.live_pages), (0, 0));
    let mut core = space.register().expect("all came back");
    for _ in 0..PAGES / 4096 - 1 {
        core.alloc(Request::pages(4096))
            .expect("everything is free");
    }
}

/// Makes a test for each `NAME: CONSTRUCTOR`.
#[doc(hidden)]
#[macro_export]
macro_rules! any_allocator_with_threads {
    ($($name:ident: $make:expr,)*) => {$(
        #[test]
        fn $name() {
            $crate::testing::any::threads::stress($make);
        }
    )*};
}

pub use any_allocator_with_threads as allocators;
