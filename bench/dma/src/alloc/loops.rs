//! The loops: windows with random and with first-in-first-out replacement, and a ring from one core
//! to another.
//!
//! A window holds `live` ranges. With a burst of 0 a random one is freed and another allocated into
//! its slot, otherwise the `burst` oldest are freed together and as many allocated. A ring has one
//! thread allocate a batch of single pages and the other one free it. Of two threads that exchange,
//! each has a window of its own, and every so-manieth range that it would free goes to the other,
//! which frees it. A slot is a word for every allocator.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::Result;
use lines::CachePadded;

use super::LAST_PAGE;
use super::subject::{Subject, Worker};
use crate::measure::{BATCH, Random, Task, Tasks};

/// Slots of the loops with several ranges in flight.
pub const WINDOW: usize = 256;

/// Parameters of a thread of a window loop. Sizes are `from` pages and up to `mask` more, by bits
/// of a random number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Ranges held: a power of two, and a multiple of `burst`.
    pub live: usize,
    /// Oldest ranges that are replaced together; 0 for a random one.
    pub burst: usize,
    /// Pages, at least.
    pub from: u64,
    /// Pages beyond that, at most; a power of two less one.
    pub mask: u64,
    /// The highest page.
    pub last: u64,
    /// Number of the first ranges held, evenly spread, that another core frees; that core rests
    /// from then on.
    pub strays: usize,
}

impl Window {
    /// Single pages, a random one of `live` replaced.
    pub const fn of(live: usize) -> Self {
        Self {
            live,
            burst: 0,
            from: 1,
            mask: 0,
            last: LAST_PAGE,
            strays: 0,
        }
    }

    /// The same with the `burst` oldest replaced.
    #[must_use]
    pub const fn oldest(self, burst: usize) -> Self {
        Self { burst, ..self }
    }

    /// The same with `from` to `from + mask` pages.
    #[must_use]
    pub const fn pages(self, from: u64, mask: u64) -> Self {
        Self { from, mask, ..self }
    }

    /// The same after so many of its ranges were freed by another core.
    #[must_use]
    pub const fn strays(self, strays: usize) -> Self {
        Self { strays, ..self }
    }

    /// The same below `last`, inclusive.
    #[must_use]
    pub const fn below(self, last: u64) -> Self {
        Self { last, ..self }
    }
}

/// Threads of a window loop, one per worker.
///
/// # Errors
/// The subject has not so many workers.
pub fn windows<S: Subject>(subject: &S, threads: usize, window: Window) -> Result<Tasks> {
    let task = |id| -> Result<Box<dyn Task>> {
        let mut held = Held {
            worker: subject.worker(id)?,
            random: Random::of_core(id),
            slots: Vec::with_capacity(window.live),
            oldest: 0,
            // So that no size and no limit is a constant to the compiler, which sees the callers
            // and their arguments.
            window: std::hint::black_box(window),
            rests: None,
        };
        for _ in 0..window.live {
            let slot = another(&mut held.worker, held.window, held.random.bits());
            held.slots.push(slot);
        }
        if let Some(step) = window.live.checked_div(window.strays) {
            let mut other = subject.worker(threads + id)?;
            other.enter();
            for slot in held.slots.iter().step_by(step) {
                other.free(*slot);
            }
            held.worker.enter();
            for at in (0..window.live).step_by(step) {
                held.slots[at] = another(&mut held.worker, held.window, held.random.bits());
            }
            // A handle that is dropped would give up what it is to the owner's chunks.
            held.rests = Some(other);
        }
        Ok(Box::new(held))
    };
    (0..threads).map(task).collect()
}

/// State of a thread of a window loop.
struct Held<W: Worker> {
    worker: W,
    random: Random,
    slots: Vec<u64>,
    oldest: usize,
    window: Window,
    /// Handle that freed the strays.
    rests: Option<W>,
}

impl<W: Worker> Held<W> {
    fn replace_random(&mut self) -> u64 {
        let Self {
            worker,
            random,
            slots,
            window,
            ..
        } = self;
        // Of its own, so that it stays in registers: each load of the loop's waits for stores of
        // the allocator's before it.
        let mut numbers = random.clone();
        let mask = slots.len() - 1;
        for _ in 0..BATCH {
            let r = numbers.bits();
            let at = (r >> 32) as usize & mask;
            worker.free(slots[at]);
            slots[at] = another(worker, *window, r);
        }
        *random = numbers;
        BATCH
    }

    #[expect(
        clippy::needless_range_loop,
        reason = "by iterators Linux takes 13 ns where it takes 9"
    )]
    fn replace_oldest(&mut self) -> u64 {
        let Self {
            worker,
            random,
            slots,
            window,
            oldest,
            ..
        } = self;
        let mut numbers = random.clone();
        let burst = window.burst;
        let bursts = (BATCH as usize / burst).max(1);
        for _ in 0..bursts {
            for at in *oldest..*oldest + burst {
                worker.free(slots[at]);
            }
            for at in *oldest..*oldest + burst {
                slots[at] = another(worker, *window, numbers.bits());
            }
            *oldest = (*oldest + burst) & (slots.len() - 1);
        }
        *random = numbers;
        (bursts * burst) as u64
    }
}

/// A new range, of a size by a random number.
#[inline(always)]
fn another(worker: &mut impl Worker, window: Window, r: u64) -> u64 {
    let pages = window.from + ((r >> 20) & window.mask);
    let slot = worker.alloc(pages, window.last);
    assert!(slot != 0, "the space is far larger than the window");
    slot
}

impl<W: Worker> Task for Held<W> {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        self.worker.enter();
        match self.window.burst {
            0 => self.replace_random(),
            _ => self.replace_oldest(),
        }
    }

    fn finish(&mut self) {
        self.worker.enter();
        for slot in std::mem::take(&mut self.slots) {
            self.worker.free(slot);
        }
    }
}

/// The two threads of a ring: core 0 allocates `burst` pages at a time, core 1 frees them; `burst`
/// divides 256.
///
/// # Errors
/// The subject has no two workers.
pub fn ring<S: Subject>(subject: &S, burst: usize) -> Result<Tasks> {
    let ring = Ring::new();
    let (burst, pages) = (burst as u64, std::hint::black_box(1));
    Ok(vec![
        Box::new(Producer {
            worker: subject.worker(0)?,
            ring: Arc::clone(&ring),
            burst,
            pages,
            head: 0,
        }),
        Box::new(Consumer {
            worker: subject.worker(1)?,
            ring,
            burst,
            tail: 0,
        }),
    ])
}

/// Two threads with a window of `live` single pages each, every `every`th of which, once it is done
/// with, is freed by the other.
///
/// # Errors
/// The subject has no two workers.
pub fn exchange<S: Subject>(subject: &S, live: usize, every: u64) -> Result<Tasks> {
    let rings = [(); 2].map(|()| Ring::new());
    let task = |id: usize| -> Result<Box<dyn Task>> {
        let mut worker = subject.worker(id)?;
        let window = std::hint::black_box(Window::of(live));
        let mut random = Random::of_core(id);
        let slots = (0..live).map(|_| another(&mut worker, window, random.bits()));
        Ok(Box::new(Exchange {
            slots: slots.collect(),
            worker,
            window,
            random,
            every: std::hint::black_box(every),
            to: Arc::clone(&rings[id]),
            from: Arc::clone(&rings[1 - id]),
            head: 0,
            tail: 0,
        }))
    };
    (0..2).map(task).collect()
}

struct Exchange<W: Worker> {
    worker: W,
    window: Window,
    random: Random,
    slots: Vec<u64>,
    every: u64,
    to: Arc<Ring>,
    from: Arc<Ring>,
    head: u64,
    tail: u64,
}

impl<W: Worker> Exchange<W> {
    /// Frees what has come from the other thread.
    fn free_others(&mut self) {
        // Acquire, with the other's release: its slots are written.
        let head = self.from.head.load(Ordering::Acquire);
        while self.tail < head {
            let page = self.from.slot(self.tail).load(Ordering::Relaxed);
            self.worker.free(page);
            self.tail += 1;
        }
        // Release, with the other's acquire: the slots are read.
        self.from.tail.store(self.tail, Ordering::Release);
    }
}

impl<W: Worker> Task for Exchange<W> {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        self.worker.enter();
        let mut numbers = self.random.clone();
        let mask = self.slots.len() - 1;
        for pair in 0..BATCH {
            let r = numbers.bits();
            let at = (r >> 32) as usize & mask;
            let is_others = pair % self.every == 0;
            // Acquire, with the other's release. Where the other thread does not run, this one
            // frees.
            if is_others && self.head - self.to.tail.load(Ordering::Acquire) < WINDOW as u64 {
                self.to
                    .slot(self.head)
                    .store(self.slots[at], Ordering::Relaxed);
                self.head += 1;
                // Release, with the other's acquire: the slot is written.
                self.to.head.store(self.head, Ordering::Release);
            } else {
                self.worker.free(self.slots[at]);
            }
            self.slots[at] = another(&mut self.worker, self.window, r);
            if pair % 64 == 0 {
                self.free_others();
            }
        }
        self.random = numbers;
        BATCH
    }

    fn finish(&mut self) {
        self.worker.enter();
        self.free_others();
        for slot in std::mem::take(&mut self.slots) {
            self.worker.free(slot);
        }
    }
}

/// Slots through which one core hands single pages to another: a word each, eight to a cache line.
struct Ring {
    /// Pages handed over; the producer's.
    head: CachePadded<AtomicU64>,
    /// Pages freed; the consumer's.
    tail: CachePadded<AtomicU64>,
    slots: Vec<AtomicU64>,
}

impl Ring {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            head: CachePadded::new(AtomicU64::new(0)),
            tail: CachePadded::new(AtomicU64::new(0)),
            slots: (0..WINDOW).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    #[inline]
    fn slot(&self, at: u64) -> &AtomicU64 {
        &self.slots[at as usize & (WINDOW - 1)]
    }
}

struct Producer<W: Worker> {
    worker: W,
    ring: Arc<Ring>,
    burst: u64,
    pages: u64,
    head: u64,
}

impl<W: Worker> Task for Producer<W> {
    fn batch(&mut self, stop: &AtomicBool) -> u64 {
        self.worker.enter();
        for _ in 0..BATCH / self.burst {
            // Acquire, with the consumer's release: it has read the slots that are written next.
            while self.head + self.burst - self.ring.tail.load(Ordering::Acquire) > WINDOW as u64 {
                if stop.load(Ordering::Relaxed) {
                    return 0;
                }
                spin_loop();
            }
            for at in self.head..self.head + self.burst {
                let page = self.worker.alloc(self.pages, LAST_PAGE);
                // Published by the head below.
                self.ring.slot(at).store(page, Ordering::Relaxed);
            }
            self.head += self.burst;
            // Release, with the consumer's acquire: the slots are written.
            self.ring.head.store(self.head, Ordering::Release);
        }
        // The consumer counts the pairs.
        0
    }

    fn finish(&mut self) {
        self.worker.enter();
        let tail = self.ring.tail.load(Ordering::Acquire);
        for at in tail..self.head {
            let page = self.ring.slot(at).load(Ordering::Relaxed);
            self.worker.free(page);
        }
    }
}

struct Consumer<W: Worker> {
    worker: W,
    ring: Arc<Ring>,
    burst: u64,
    tail: u64,
}

impl<W: Worker> Task for Consumer<W> {
    fn batch(&mut self, stop: &AtomicBool) -> u64 {
        self.worker.enter();
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
                self.worker.free(page);
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
    struct CountingSubject(Arc<Mutex<(u64, HashMap<u64, u64>)>>);

    impl Subject for CountingSubject {
        type Worker = Self;

        fn worker(&self, _: usize) -> Result<Self> {
            Ok(self.clone())
        }
    }

    impl Worker for CountingSubject {
        fn alloc(&mut self, pages: u64, _: u64) -> u64 {
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

    impl CountingSubject {
        fn live(&self) -> Vec<u64> {
            let book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let mut sizes: Vec<_> = book.1.values().copied().collect();
            sizes.sort_unstable();
            sizes
        }
    }

    #[test]
    fn windows_stay_full_and_give_everything_back() {
        let one = Window::of(WINDOW);
        let many = one.pages(1, 31);
        for window in [one, one.oldest(32), one.oldest(256), many, many.oldest(32)] {
            let book = CountingSubject::default();
            let mut tasks = windows(&book, 2, window).expect("workers");
            for task in &mut tasks {
                assert_eq!(task.batch(&AtomicBool::new(false)), BATCH);
            }
            let live = book.live();
            assert_eq!(live.len(), 2 * WINDOW);
            assert_eq!((live[0], live[live.len() - 1]), (1, 1 + window.mask));
            tasks.iter_mut().for_each(|task| task.finish());
            assert!(book.live().is_empty());
            let made = book.0.lock().unwrap_or_else(PoisonError::into_inner).0;
            assert_eq!(made, 2 * (WINDOW as u64 + BATCH), "pairs were done");
        }
    }

    #[test]
    fn a_burst_larger_than_a_batch_is_whole() {
        let book = CountingSubject::default();
        let window = Window::of(8192).oldest(4096);
        let mut tasks = windows(&book, 1, window).expect("workers");
        assert_eq!(tasks[0].batch(&AtomicBool::new(false)), 4096);
        assert_eq!(book.live().len(), 8192);
    }

    #[test]
    fn the_first_in_is_the_first_out() {
        let book = CountingSubject::default();
        let mut tasks = windows(&book, 1, Window::of(WINDOW).oldest(32)).expect("workers");
        tasks[0].batch(&AtomicBool::new(false));
        let book = book.0.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = book.1.keys().min().copied();
        assert_eq!(oldest, Some(book.0 - WINDOW as u64 + 1));
    }

    #[test]
    fn ranges_that_pass_through_a_ring_are_freed_once() {
        let cpus = host::cpus().expect("known");
        if cpus.len() < 2 {
            println!("skipped: one CPU");
            return;
        }
        for burst in [1, 32] {
            let book = CountingSubject::default();
            let tasks = ring(&book, burst).expect("workers");
            let found = run(tasks, &cpus, Duration::from_millis(20)).expect("ran");
            assert!(found.pairs > 0);
            assert!(book.live().is_empty());
        }
        for every in [1, 8] {
            let book = CountingSubject::default();
            let tasks = exchange(&book, 128, every).expect("workers");
            let found = run(tasks, &cpus, Duration::from_millis(20)).expect("ran");
            assert!(found.pairs > 0);
        }
        let control = ring(&Nothing, 32).expect("workers");
        assert!(run(control, &cpus, Duration::from_millis(5)).is_ok());
    }
}
