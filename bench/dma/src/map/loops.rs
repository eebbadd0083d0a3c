//! d-def and d-str: a window of 256 one-page mappings per thread; the oldest is unmapped, another
//! is mapped.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use address::{PAGE_SHIFT, PhysAddr};
use anyhow::Result;
use dma_map::table::IoMap;
use dma_map::{Clock, Direction, Mapping, Segment};
use lines::Lock;

use super::rig::{Core, Facts, Rig, Time};
use crate::alloc::LAST_PAGE;
use crate::alloc::loops::WINDOW;
use crate::alloc::subject::{Subject, Worker};
use crate::measure::{BATCH, Task, Tasks};

/// Facts of the mappers of all runs.
#[derive(Clone, Default)]
pub struct Sink(Arc<Mutex<Vec<Facts>>>);

impl Sink {
    /// Adds what one run left.
    pub fn push(&self, facts: Facts) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(facts);
    }

    /// Takes the facts of all runs, in their order.
    pub fn take(&self) -> Vec<Facts> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The memory that is mapped: a gigabyte per core.
const PAGES: u64 = 1 << 18;

/// Pairs between two looks at the clock: a quarter of a millisecond where a pair takes a
/// microsecond.
const LOOK: u64 = 256;

/// One page of core `id`'s memory; which one counts up, so that what was unmapped lately is not
/// mapped again soon.
#[inline]
fn page(id: usize, count: u64) -> Segment {
    let page = (1 << 20) + id as u64 * PAGES + (count & (PAGES - 1));
    Segment::new(PhysAddr::new(page << PAGE_SHIFT), 1 << PAGE_SHIFT)
}

/// Threads of the loop over a mapper. What it says after the run goes to `sink`.
///
/// # Errors
/// The mapper has not so many cores, or a window of mappings cannot be made.
pub fn windows<T: IoMap + 'static>(
    rig: &Arc<Rig<T>>,
    threads: usize,
    sink: &Sink,
) -> Result<Tasks> {
    let task = |id| -> Result<Box<dyn Task>> {
        let mut core = rig.core(id)?;
        let mut window = Vec::with_capacity(WINDOW);
        for count in 0..WINDOW as u64 {
            window.push(Some(core.map(&[page(id, count)], Direction::FromDevice)?));
        }
        Ok(Box::new(Window {
            id,
            core,
            window,
            count: WINDOW as u64,
            is_last: id + 1 == threads,
            rig: Arc::clone(rig),
            sink: sink.clone(),
        }))
    };
    (0..threads).map(task).collect()
}

struct Window<T: IoMap + 'static> {
    id: usize,
    core: Core<T>,
    window: Vec<Option<Mapping>>,
    count: u64,
    is_last: bool,
    rig: Arc<Rig<T>>,
    sink: Sink,
}

impl<T: IoMap + 'static> Task for Window<T> {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        for pair in 0..BATCH {
            if pair % LOOK == 0 {
                self.rig.tick_when_due();
            }
            let slot = &mut self.window[self.count as usize & (WINDOW - 1)];
            let oldest = slot.take().expect("the window is full");
            self.core.unmap(oldest).expect("it is mapped");
            let mapping = self
                .core
                .map(&[page(self.id, self.count)], Direction::FromDevice);
            // Not `expect`: it takes the error by reference, so that the mapping goes through
            // memory with it.
            let Ok(mapping) = mapping else {
                panic!("the space is far larger than the window")
            };
            *slot = Some(mapping);
            self.count += 1;
        }
        BATCH
    }

    fn finish(&mut self) {
        self.core.publish();
        self.rig.did(self.count - WINDOW as u64);
        if self.is_last {
            self.sink.push(self.rig.facts());
        }
        for mapping in self.window.drain(..).flatten() {
            self.core.unmap(mapping).expect("it is mapped");
        }
    }
}

/// The same with nothing but an allocator, one lock, and a busy wait of `flush_ns` under it: a free
/// on serial hardware in the fewest instructions.
///
/// # Errors
/// The subject has not so many workers.
pub fn bare<S: Subject>(subject: &S, threads: usize, flush_ns: u64) -> Result<Tasks> {
    let lock = Arc::new(Lock::new(()));
    let time = Time::shared();
    let task = |id| -> Result<Box<dyn Task>> {
        let mut worker = subject.worker(id)?;
        Ok(Box::new(Bare {
            slots: (0..WINDOW).map(|_| worker.alloc(1, LAST_PAGE)).collect(),
            worker,
            oldest: 0,
            lock: Arc::clone(&lock),
            time: Arc::clone(&time),
            flush_ns,
        }))
    };
    (0..threads).map(task).collect()
}

struct Bare<W: Worker> {
    worker: W,
    slots: Vec<u64>,
    oldest: usize,
    lock: Arc<Lock<()>>,
    time: Arc<Time>,
    flush_ns: u64,
}

impl<W: Worker> Task for Bare<W> {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        for _ in 0..BATCH {
            let slot = &mut self.slots[self.oldest];
            let held = self.lock.lock();
            if self.flush_ns > 0 {
                let end = self.time.now() + self.flush_ns;
                while self.time.now() < end {
                    std::hint::spin_loop();
                }
            }
            drop(held);
            self.worker.free(*slot);
            *slot = self.worker.alloc(1, LAST_PAGE);
            self.oldest = (self.oldest + 1) & (WINDOW - 1);
        }
        BATCH
    }

    fn finish(&mut self) {
        for slot in self.slots.drain(..) {
            self.worker.free(slot);
        }
    }
}
