//! Allocators of other people, as one would use them between threads: behind a mutex of the standard library.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use address::PAGE_SIZE;
use anyhow::{Result, anyhow};
use offset_allocator::{Allocation, Allocator};
use range_alloc::RangeAllocator;
use vm_allocator::{AddressAllocator, AllocPolicy, RangeInclusive};

use super::subject::{Subject, Worker};
use super::{FIRST_PAGE, LAST_PAGE};

/// A peer behind its mutex.
pub struct Peer<T>(Arc<Mutex<T>>);

/// One thread's way to it.
pub struct Locked<T>(Arc<Mutex<T>>);

impl<T> Peer<T> {
    fn new(allocator: T) -> Self {
        Self(Arc::new(Mutex::new(allocator)))
    }
}

impl<T> Locked<T> {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, T> {
        // A thread that panicked has ended the run already.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send + 'static> Subject for Peer<T>
where
    Locked<T>: Worker,
{
    type Worker = Locked<T>;

    fn worker(&self, _: usize) -> Result<Locked<T>> {
        Ok(Locked(Arc::clone(&self.0)))
    }
}

/// `range-alloc`: best fit in a sorted vector.
pub fn range_alloc() -> Peer<RangeAllocator<u64>> {
    Peer::new(RangeAllocator::new(FIRST_PAGE..LAST_PAGE + 1))
}

impl Worker for Locked<RangeAllocator<u64>> {
    type Range = (u64, u64);

    #[inline]
    fn alloc(&mut self, pages: u64) -> (u64, u64) {
        let range = self
            .lock()
            .allocate_range_aligned(pages, pages.next_power_of_two())
            .expect("the space is far larger than the window");
        (range.start, range.end)
    }

    #[inline]
    fn free(&mut self, (start, end): (u64, u64)) {
        self.lock().free_range(start..end);
    }
}

/// `offset-allocator`: bins in two levels of bitmaps, 32 bits, no alignment.
pub fn offset_allocator() -> Peer<Allocator<u32>> {
    Peer::new(Allocator::new(u32::MAX))
}

impl Worker for Locked<Allocator<u32>> {
    type Range = Allocation<u32>;

    #[inline]
    fn alloc(&mut self, pages: u64) -> Allocation<u32> {
        let pages = u32::try_from(pages).expect("ranges of the loops are small");
        let found = self.lock().allocate(pages);
        found.expect("the space is far larger than the window")
    }

    #[inline]
    fn free(&mut self, range: Allocation<u32>) {
        self.lock().free(range);
    }
}

/// `vm-allocator`: an interval tree, first fit; in bytes, since its ranges have at least two units.
///
/// # Errors
/// The crate refuses the space.
pub fn vm_allocator() -> Result<Peer<AddressAllocator>> {
    let allocator = AddressAllocator::new(FIRST_PAGE * PAGE_SIZE, LAST_PAGE * PAGE_SIZE)
        .map_err(|error| anyhow!("vm-allocator: {error:?}"))?;
    Ok(Peer::new(allocator))
}

impl Worker for Locked<AddressAllocator> {
    type Range = RangeInclusive;

    #[inline]
    fn alloc(&mut self, pages: u64) -> RangeInclusive {
        let found = self
            .lock()
            .allocate(pages, pages.next_power_of_two(), AllocPolicy::FirstMatch);
        found.expect("the space is far larger than the window")
    }

    #[inline]
    fn free(&mut self, range: RangeInclusive) {
        self.lock().free(&range).expect("it was allocated");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs<S: Subject>(subject: &S) {
        let mut worker = subject.worker(0).expect("a worker");
        let mut other = subject.worker(1).expect("another worker");
        let held: Vec<_> = (1..=32).map(|pages| worker.alloc(pages)).collect();
        for range in held {
            other.free(range);
        }
        let again = worker.alloc(32);
        worker.free(again);
    }

    #[test]
    fn what_one_thread_of_a_peer_allocates_another_frees() {
        pairs(&range_alloc());
        pairs(&offset_allocator());
        pairs(&vm_allocator().expect("the space is valid"));
    }
}
