//! Memories for tables: one that counts its pages and may run out of them, and one that devices
//! find elsewhere.
#![expect(unsafe_code, reason = "implements an unsafe trait")]

use alloc::vec::Vec;
use core::ptr::NonNull;

use address::{PAGE_SIZE, PhysAddr};
use lines::{AtomicUsize, Lock, Ordering};

use crate::table::{HostMemory, Table, TableMemory};

/// [`HostMemory`] with a limit.
pub struct CountedMemory {
    host: HostMemory,
    in_use: AtomicUsize,
    limit: usize,
}

impl CountedMemory {
    /// As many pages as the allocator gives.
    pub fn new() -> Self {
        Self::with_limit(usize::MAX)
    }

    /// At most `limit` pages at a time.
    pub fn with_limit(limit: usize) -> Self {
        Self {
            host: HostMemory::new(),
            in_use: AtomicUsize::new(0),
            limit,
        }
    }

    /// Pages allocated and not freed.
    pub fn pages_in_use(&self) -> usize {
        self.in_use.load(Ordering::Relaxed)
    }
}

impl Default for CountedMemory {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: every call goes to the host's memory.
unsafe impl TableMemory for CountedMemory {
    fn alloc(&self) -> Option<PhysAddr> {
        if self.in_use.fetch_add(1, Ordering::Relaxed) >= self.limit {
            self.in_use.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        self.host.alloc()
    }

    unsafe fn free(&self, page: PhysAddr) {
        self.in_use.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { self.host.free(page) }
    }

    unsafe fn entries(&self, page: PhysAddr) -> &Table {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.host.entries(page) }
    }
}

/// Pages of a region that a device finds elsewhere than the CPU, as in a guest's memory or a
/// kernel's direct map.
pub struct RegionMemory {
    base: PhysAddr,
    memory: NonNull<Table>,
    pages: usize,
    free: Lock<Vec<usize>>,
}

impl RegionMemory {
    /// The `pages` pages that devices find at `base`, not 0, and the CPU at `memory`; both begin a
    /// page.
    ///
    /// # Safety
    /// While this lives, the region is mapped readable and writable, and has no other writer.
    pub unsafe fn new(base: PhysAddr, memory: NonNull<u8>, pages: usize) -> Self {
        assert!(base.raw() != 0 && base.is_aligned(PAGE_SIZE));
        assert_eq!(memory.addr().get() % PAGE_SIZE as usize, 0);
        Self {
            base,
            memory: memory.cast(),
            pages,
            free: Lock::new((0..pages).collect()),
        }
    }

    /// Pages allocated and not freed.
    pub fn pages_in_use(&self) -> usize {
        self.pages - self.free.lock().len()
    }

    fn index(&self, page: PhysAddr) -> usize {
        let index = (page.raw().wrapping_sub(self.base.raw()) / PAGE_SIZE) as usize;
        assert!(index < self.pages, "a page of this region");
        index
    }
}

// SAFETY: the pointer is to memory that all threads may access, per the contract of `new`; all
// accesses are atomic.
unsafe impl Send for RegionMemory {}
// SAFETY: as above; the list of free pages is behind a lock.
unsafe impl Sync for RegionMemory {}

// SAFETY: `new` checked alignment; a page whose index is in `free` has no user, and is zeroed when
// it is given out; address and pointer differ by a constant.
unsafe impl TableMemory for RegionMemory {
    fn alloc(&self) -> Option<PhysAddr> {
        let index = self.free.lock().pop()?;
        let page = self.base.checked_add(index as u64 * PAGE_SIZE)?;
        // SAFETY: taken just above, so it has no other user.
        for entry in unsafe { self.entries(page) } {
            entry.store(0, Ordering::Relaxed);
        }
        Some(page)
    }

    unsafe fn free(&self, page: PhysAddr) {
        self.free.lock().push(self.index(page));
    }

    unsafe fn entries(&self, page: PhysAddr) -> &Table {
        // SAFETY: the index lies in the region, which is mapped while this lives, per the contract
        // of `new`. Any bits are entries. Only users of this memory write it, atomically.
        unsafe { self.memory.add(self.index(page)).as_ref() }
    }
}
