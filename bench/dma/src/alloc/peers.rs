//! Allocators of other projects, as one would use them between threads: behind a mutex of the
//! standard library.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use address::PAGE_SIZE;
use anyhow::{Result, anyhow};
use range_alloc::RangeAllocator;
use vm_allocator::{AddressAllocator, AllocPolicy, RangeInclusive};

use super::subject::{Subject, Worker, parts, slot};
use super::{FIRST_PAGE, LAST_PAGE};

/// A peer behind its mutex, and one thread's way to it.
pub struct Locked<T>(Arc<Mutex<T>>);

impl<T> Locked<T> {
    fn new(allocator: T) -> Self {
        Self(Arc::new(Mutex::new(allocator)))
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, T> {
        // A thread that panicked has ended the run already.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send + 'static> Subject for Locked<T>
where
    Self: Worker,
{
    type Worker = Self;

    fn worker(&self, _: usize) -> Result<Self> {
        Ok(Self(Arc::clone(&self.0)))
    }
}

/// `range-alloc`: best fit in a sorted vector.
pub fn range_alloc() -> Locked<RangeAllocator<u64>> {
    Locked::new(RangeAllocator::new(FIRST_PAGE..LAST_PAGE + 1))
}

impl Worker for Locked<RangeAllocator<u64>> {
    #[inline]
    fn alloc(&mut self, pages: u64, _: u64) -> u64 {
        let found = self
            .lock()
            .allocate_range_aligned(pages, pages.next_power_of_two());
        found.map_or(0, |range| slot(range.start, pages))
    }

    #[inline]
    fn free(&mut self, slot: u64) {
        let (first, pages) = parts(slot);
        self.lock().free_range(first..first + pages);
    }
}

/// `vm-allocator`: an interval tree, first fit; in bytes, since its ranges have at least two units.
///
/// # Errors
/// The crate refuses the space.
pub fn vm_allocator() -> Result<Locked<AddressAllocator>> {
    let allocator = AddressAllocator::new(FIRST_PAGE * PAGE_SIZE, LAST_PAGE * PAGE_SIZE)
        .map_err(|error| anyhow!("vm-allocator: {error:?}"))?;
    Ok(Locked::new(allocator))
}

impl Worker for Locked<AddressAllocator> {
    #[inline]
    fn alloc(&mut self, pages: u64, _: u64) -> u64 {
        let (size, align) = (pages * PAGE_SIZE, pages.next_power_of_two() * PAGE_SIZE);
        let found = self.lock().allocate(size, align, AllocPolicy::FirstMatch);
        found.map_or(0, |range| slot(range.start() / PAGE_SIZE, pages))
    }

    #[inline]
    fn free(&mut self, slot: u64) {
        let (first, pages) = parts(slot);
        let start = first * PAGE_SIZE;
        let range = RangeInclusive::new(start, start + pages * PAGE_SIZE - 1);
        let range = range.expect("it was a range");
        self.lock().free(&range).expect("it was allocated");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs<S: Subject>(subject: &S) {
        let mut worker = subject.worker(0).expect("a worker");
        let mut other = subject.worker(1).expect("another worker");
        let held: Vec<_> = (1..=32)
            .map(|pages| worker.alloc(pages, LAST_PAGE))
            .collect();
        for slot in held {
            assert_ne!(slot, 0);
            other.free(slot);
        }
    }

    #[test]
    fn ranges_of_a_peer_are_freed_by_another_thread() {
        pairs(&range_alloc());
        pairs(&vm_allocator().expect("the space is valid"));
    }
}
