//! The loops: windows with random and with first-in-first-out replacement, and a ring from one core to another.
//!
//! | loop | what a thread does |
//! |---|---|
//! | a-1 | holds W ranges of a page; frees a random one and allocates another into its slot |
//! | a-B | holds W ranges of a page; frees the B oldest, then allocates B |
//! | c-1, c-B | the same with 1 to 32 pages |
//! | b-B | one thread allocates B ranges of a page into a ring of 256, the other one frees them |

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::Result;
use lines::CachePadded;

use super::subject::{OnePage, Subject, Worker};
use crate::measure::{BATCH, Random, Task, Tasks};

/// How large ranges are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// One page.
    One,
    /// 1 to 32 pages, by the random number's bits from this one on.
    UpTo32 {
        /// 20 in c-1, 40 in c-32.
        shift: u32,
    },
}

/// 1 to 32.
#[inline]
fn up_to_32(r: u64, shift: u32) -> u64 {
    1 + ((r >> shift) & 31)
}

impl Sizes {
    #[inline]
    fn pages(self, r: u64) -> u64 {
        match self {
            Self::One => 1,
            Self::UpTo32 { shift } => up_to_32(r, shift),
        }
    }
}

/// Slots of the loops with several ranges in flight.
pub const WINDOW: usize = 256;

/// Threads of a window loop, one per worker: with a `burst` of 1 the replaced slot is random, otherwise the oldest
/// `burst` are replaced together. `window` is a power of two and a multiple of `burst`.
///
/// # Errors
/// The subject has not so many workers.
pub fn windows<S: Subject>(
    subject: &S,
    threads: usize,
    window: usize,
    burst: usize,
    sizes: Sizes,
) -> Result<Tasks> {
    let task = |id| -> Result<Box<dyn Task>> {
        let mut worker = subject.worker(id)?;
        let mut random = Random::of_core(id);
        let slots = (0..window)
            .map(|_| worker.alloc(sizes.pages(random.bits())))
            .collect();
        let held = Held {
            worker,
            random,
            slots,
            sizes,
        };
        Ok(match burst {
            1 => Box::new(Randomly(held)),
            burst => Box::new(Fifo {
                held,
                burst,
                oldest: 0,
            }),
        })
    };
    (0..threads).map(task).collect()
}

/// What a thread of a window loop holds.
struct Held<W: Worker> {
    worker: W,
    random: Random,
    slots: Vec<W::Range>,
    sizes: Sizes,
}

impl<W: Worker> Held<W> {
    fn give_back(&mut self) {
        for range in self.slots.drain(..) {
            self.worker.free(range);
        }
    }
}

struct Randomly<W: Worker>(Held<W>);

impl<W: Worker> Held<W> {
    /// Replaces random ranges. The size is a function, not a value, so that a loop over single pages knows that it is one.
    #[inline]
    fn replace(&mut self, pages: impl Fn(u64) -> u64) {
        let mask = self.slots.len() - 1;
        for _ in 0..BATCH {
            let r = self.random.bits();
            let slot = &mut self.slots[(r >> 32) as usize & mask];
            self.worker.free(*slot);
            *slot = self.worker.alloc(pages(r));
        }
    }
}

impl<W: Worker> Task for Randomly<W> {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        let held = &mut self.0;
        match held.sizes {
            Sizes::One => held.replace(|_| 1),
            Sizes::UpTo32 { shift } => held.replace(|r| up_to_32(r, shift)),
        }
        BATCH
    }

    fn finish(&mut self) {
        self.0.give_back();
    }
}

struct Fifo<W: Worker> {
    held: Held<W>,
    burst: usize,
    oldest: usize,
}

impl<W: Worker> Task for Fifo<W> {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        let held = &mut self.held;
        for _ in 0..BATCH / self.burst as u64 {
            let slots = &mut held.slots[self.oldest..self.oldest + self.burst];
            for slot in slots.iter() {
                held.worker.free(*slot);
            }
            for slot in slots {
                *slot = match held.sizes {
                    Sizes::One => held.worker.alloc(1),
                    sizes => held.worker.alloc(sizes.pages(held.random.bits())),
                };
            }
            self.oldest = (self.oldest + self.burst) % held.slots.len();
        }
        BATCH
    }

    fn finish(&mut self) {
        self.held.give_back();
    }
}

/// The two threads of b-B: core 0 allocates, core 1 frees; `burst` divides 256.
///
/// # Errors
/// The subject has no two workers.
pub fn ring<S: Subject>(subject: &S, burst: usize) -> Result<Tasks>
where
    S::Worker: OnePage,
{
    let ring = Arc::new(Ring {
        head: CachePadded::new(AtomicU64::new(0)),
        tail: CachePadded::new(AtomicU64::new(0)),
        slots: (0..WINDOW).map(|_| AtomicU64::new(0)).collect(),
    });
    Ok(vec![
        Box::new(Producer {
            worker: subject.worker(0)?,
            ring: Arc::clone(&ring),
            burst: burst as u64,
            head: 0,
        }),
        Box::new(Consumer {
            worker: subject.worker(1)?,
            ring,
            burst: burst as u64,
            tail: 0,
        }),
    ])
}

/// Slots through which one core hands ranges of one page to another: a word each, eight to a cache line.
struct Ring {
    /// Ranges handed over; the producer's.
    head: CachePadded<AtomicU64>,
    /// Ranges freed; the consumer's.
    tail: CachePadded<AtomicU64>,
    slots: Vec<AtomicU64>,
}

impl Ring {
    #[inline]
    fn slot(&self, at: u64) -> &AtomicU64 {
        &self.slots[at as usize & (WINDOW - 1)]
    }
}

struct Producer<W: OnePage> {
    worker: W,
    ring: Arc<Ring>,
    burst: u64,
    head: u64,
}

impl<W: OnePage> Task for Producer<W> {
    fn batch(&mut self, stop: &AtomicBool) -> u64 {
        for _ in 0..BATCH / self.burst {
            // Acquire, with the consumer's release: it has read the slots that are written next.
            while self.head + self.burst - self.ring.tail.load(Ordering::Acquire) > WINDOW as u64 {
                if stop.load(Ordering::Relaxed) {
                    return 0;
                }
                spin_loop();
            }
            for at in self.head..self.head + self.burst {
                let range = self.worker.alloc(1);
                // Published by the head below.
                self.ring.slot(at).store(W::page(range), Ordering::Relaxed);
            }
            self.head += self.burst;
            // Release, with the consumer's acquire: the slots are written.
            self.ring.head.store(self.head, Ordering::Release);
        }
        // The consumer counts the pairs.
        0
    }

    fn finish(&mut self) {
        let tail = self.ring.tail.load(Ordering::Acquire);
        for at in tail..self.head {
            let page = self.ring.slot(at).load(Ordering::Relaxed);
            self.worker.free(W::at(page));
        }
    }
}

struct Consumer<W: OnePage> {
    worker: W,
    ring: Arc<Ring>,
    burst: u64,
    tail: u64,
}

impl<W: OnePage> Task for Consumer<W> {
    fn batch(&mut self, stop: &AtomicBool) -> u64 {
        for done in 0..BATCH / self.burst {
            // Acquire, with the producer's release.
            while self.ring.head.load(Ordering::Acquire) - self.tail < self.burst {
                if stop.load(Ordering::Relaxed) {
                    return done * self.burst;
                }
                spin_loop();
            }
            for at in self.tail..self.tail + self.burst {
                let page = self.ring.slot(at).load(Ordering::Relaxed);
                self.worker.free(W::at(page));
            }
            self.tail += self.burst;
            // Release, with the producer's acquire: the slots are read.
            self.ring.tail.store(self.tail, Ordering::Release);
        }
        BATCH
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::{Mutex, PoisonError};
    use std::time::Duration;

    use report::host;

    use super::super::subject::Nothing;
    use super::*;
    use crate::measure::run;

    /// Counts what is allocated, by size, and refuses what is not.
    #[derive(Clone, Default)]
    struct Book(Arc<Mutex<(u64, HashMap<u64, u64>)>>);

    impl Subject for Book {
        type Worker = Self;

        fn worker(&self, _: usize) -> Result<Self> {
            Ok(self.clone())
        }
    }

    impl Worker for Book {
        type Range = u64;

        fn alloc(&mut self, pages: u64) -> u64 {
            let mut book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            book.0 += 1;
            let page = book.0;
            book.1.insert(page, pages);
            page
        }

        fn free(&mut self, page: u64) {
            let mut book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            assert!(book.1.remove(&page).is_some(), "{page} is allocated");
        }
    }

    impl OnePage for Book {
        fn page(range: u64) -> u64 {
            range
        }

        fn at(page: u64) -> u64 {
            page
        }
    }

    impl Book {
        fn live(&self) -> Vec<u64> {
            let book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let mut sizes: Vec<_> = book.1.values().copied().collect();
            sizes.sort_unstable();
            sizes
        }
    }

    #[test]
    fn windows_stay_full_and_give_everything_back() {
        for (burst, sizes) in [
            (1, Sizes::One),
            (32, Sizes::One),
            (256, Sizes::One),
            (1, Sizes::UpTo32 { shift: 20 }),
            (32, Sizes::UpTo32 { shift: 40 }),
        ] {
            let book = Book::default();
            let mut tasks = windows(&book, 2, WINDOW, burst, sizes).expect("workers");
            for task in &mut tasks {
                assert_eq!(task.batch(&AtomicBool::new(false)), BATCH);
            }
            let live = book.live();
            assert_eq!(live.len(), 2 * WINDOW);
            let widest = if sizes == Sizes::One { 1 } else { 32 };
            assert_eq!((live[0], live[live.len() - 1]), (1, widest));
            tasks.iter_mut().for_each(|task| task.finish());
            assert!(book.live().is_empty());
            let made = book.0.lock().unwrap_or_else(PoisonError::into_inner).0;
            assert_eq!(made, 2 * (WINDOW as u64 + BATCH), "pairs were done");
        }
    }

    #[test]
    fn the_first_in_is_the_first_out() {
        let book = Book::default();
        let mut tasks = windows(&book, 1, WINDOW, 32, Sizes::One).expect("workers");
        tasks[0].batch(&AtomicBool::new(false));
        let book = book.0.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = book.1.keys().min().copied();
        assert_eq!(oldest, Some(book.0 - WINDOW as u64 + 1));
    }

    #[test]
    fn what_goes_through_a_ring_is_freed_once() {
        let cpus = host::cpus().expect("known");
        if cpus.len() < 2 {
            println!("skipped: one CPU");
            return;
        }
        for burst in [1, 32] {
            let book = Book::default();
            let tasks = ring(&book, burst).expect("workers");
            let found = run(tasks, &cpus, Duration::from_millis(20)).expect("ran");
            assert!(found.pairs > 0);
            assert!(book.live().is_empty());
        }
        let control = ring(&Nothing, 32).expect("workers");
        assert!(run(control, &cpus, Duration::from_millis(5)).is_ok());
    }
}
