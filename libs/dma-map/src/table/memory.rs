//! Where table pages come from: [`HostMemory`], [`Arena`], or whatever else implements [`TableMemory`].
//!
//! * [`HostMemory`] takes pages from the global allocator; a device's address is the CPU's. For user-space
//!   drivers whose IOMMU maps the process one to one, for emulated devices, and for tests.
//! * [`Arena`] cuts a region that the caller has: a huge page, memory of a guest, a kernel's direct map.
//!
//! Called when a table is installed or released, so seldom; both take a lock for the list of free pages.
//! `entries` is on the path of every walk: an addition in `Arena`, nothing in `HostMemory`.
//!
//! Left out: devices that read tables past the CPU's caches (VT-d units with `ECAP.C` clear) need the lines of
//! changed entries written back; NUMA nodes: a memory per node is a memory of the caller's.
#![expect(
    unsafe_code,
    reason = "pages are memory that devices read: from addresses to references"
)]

use address::PhysAddr;
use alloc::sync::Arc;
use lines::AtomicU64;

use super::format::ENTRIES;

#[cfg(not(any(loom, shuttle)))]
pub use self::{arena::Arena, arena::ArenaError, host::HostMemory};

/// A page of entries. Devices read it at any time, so every access is atomic.
pub type Table = [AtomicU64; ENTRIES];

/// A source of table pages, which knows where the CPU finds the page that a device finds at an address.
///
/// # Safety
/// `alloc` gives a page that is aligned to its size, has at most 52 address bits, is nobody else's until it is
/// freed, and reads as zeros. `entries` gives that page for that address, the same memory each time.
pub unsafe trait TableMemory: Send + Sync {
    /// A page of zeros; `None` where there is none. The address is not 0.
    fn alloc(&self) -> Option<PhysAddr>;

    /// Takes a page back.
    ///
    /// # Safety
    /// `page` came from `alloc` of this memory and was not freed since; neither a reference from `entries` nor a
    /// device uses it any more.
    unsafe fn free(&self, page: PhysAddr);

    /// The entries of a page.
    ///
    /// # Safety
    /// `page` came from `alloc` of this memory, and is not freed while the reference is used.
    unsafe fn entries(&self, page: PhysAddr) -> &Table;
}

macro_rules! forward {
    ($($pointer:ty),*) => {$(
        // SAFETY: every call goes to the memory behind the pointer, always the same, which keeps the contract.
        unsafe impl<M: TableMemory> TableMemory for $pointer {
            fn alloc(&self) -> Option<PhysAddr> {
                (**self).alloc()
            }

            unsafe fn free(&self, page: PhysAddr) {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).free(page) }
            }

            #[inline]
            unsafe fn entries(&self, page: PhysAddr) -> &Table {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).entries(page) }
            }
        }
    )*};
}

forward!(&M, Arc<M>);

#[cfg(not(any(loom, shuttle)))]
mod host {
    use alloc::alloc::{alloc_zeroed, dealloc};
    use alloc::vec::Vec;
    use core::alloc::Layout;
    use core::ptr;

    use address::{PAGE_SIZE, PhysAddr};
    use lines::{AtomicUsize, Lock, Ordering};

    use super::{Table, TableMemory};

    /// Free pages kept for the next table, at most: 256 KiB.
    const POOL: usize = 64;
    const PAGE: Layout = match Layout::from_size_align(PAGE_SIZE as usize, PAGE_SIZE as usize) {
        Ok(layout) => layout,
        Err(_) => unreachable!(),
    };
    const _: () = assert!(size_of::<Table>() == PAGE.size());

    /// Pages of the global allocator. The address a device uses is the pointer's value.
    #[derive(Debug)]
    pub struct HostMemory {
        pool: Lock<Vec<PhysAddr>>,
        in_use: AtomicUsize,
        limit: usize,
    }

    impl HostMemory {
        /// As many pages as the allocator gives.
        pub fn new() -> Self {
            Self::with_limit(usize::MAX)
        }

        /// At most `limit` pages at a time.
        pub fn with_limit(limit: usize) -> Self {
            Self {
                pool: Lock::new(Vec::new()),
                in_use: AtomicUsize::new(0),
                limit,
            }
        }

        /// Pages allocated and not freed.
        pub fn pages_in_use(&self) -> usize {
            self.in_use.load(Ordering::Relaxed)
        }

        fn page(&self) -> Option<PhysAddr> {
            if let Some(page) = self.pool.lock().pop() {
                let memory = ptr::with_exposed_provenance_mut::<u8>(page.raw() as usize);
                // SAFETY: pages in the pool came from `alloc_zeroed(PAGE)` below, and `free`'s callers gave up
                // every use of them: these bytes are ours alone.
                unsafe { memory.write_bytes(0, PAGE.size()) };
                return Some(page);
            }
            // SAFETY: the layout's size is not 0.
            let memory = unsafe { alloc_zeroed(PAGE) };
            let raw = memory.expose_provenance() as u64;
            if raw >> 52 != 0 {
                // SAFETY: allocated just above with this layout.
                unsafe { dealloc(memory, PAGE) };
                return None;
            }
            (raw != 0).then_some(PhysAddr::new(raw))
        }
    }

    impl Default for HostMemory {
        fn default() -> Self {
            Self::new()
        }
    }

    // SAFETY: `alloc_zeroed` gives pages of that size and alignment, zeroed, nobody else's; pooled ones are zeroed
    // again; addresses above 52 bits are not given out. The pointer is its address, so `entries` gives the same memory.
    unsafe impl TableMemory for HostMemory {
        fn alloc(&self) -> Option<PhysAddr> {
            let counted = self
                .in_use
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                    (used < self.limit).then_some(used + 1)
                });
            counted.ok()?;
            let page = self.page();
            if page.is_none() {
                self.in_use.fetch_sub(1, Ordering::Relaxed);
            }
            page
        }

        unsafe fn free(&self, page: PhysAddr) {
            self.in_use.fetch_sub(1, Ordering::Relaxed);
            let mut pool = self.pool.lock();
            let room = POOL - pool.len();
            if room > 0 && pool.try_reserve_exact(room).is_ok() {
                pool.push(page);
                return;
            }
            drop(pool);
            let memory = ptr::with_exposed_provenance_mut(page.raw() as usize);
            // SAFETY: the caller promises that it came from `alloc`, so from `alloc_zeroed` with this layout, and
            // that nobody uses it.
            unsafe { dealloc(memory, PAGE) };
        }

        #[inline]
        unsafe fn entries(&self, page: PhysAddr) -> &Table {
            // SAFETY: the caller promises a live page of `alloc`: that many aligned, initialized bytes, whose
            // provenance was exposed there, and which are only accessed atomically while they are live.
            unsafe { &*ptr::with_exposed_provenance::<Table>(page.raw() as usize) }
        }
    }

    impl Drop for HostMemory {
        fn drop(&mut self) {
            for page in self.pool.get_mut().drain(..) {
                let memory = ptr::with_exposed_provenance_mut(page.raw() as usize);
                // SAFETY: pages in the pool came from `alloc_zeroed` with this layout and nobody uses them.
                unsafe { dealloc(memory, PAGE) };
            }
        }
    }
}

#[cfg(not(any(loom, shuttle)))]
mod arena {
    use alloc::vec::Vec;
    use core::ptr::NonNull;

    use address::{PAGE_SIZE, PhysAddr};
    use lines::{Lock, Ordering};
    use thiserror::Error;

    use super::{Table, TableMemory};

    /// Pages of a region that the caller has.
    #[derive(Debug)]
    pub struct Arena {
        base: PhysAddr,
        memory: NonNull<Table>,
        pages: usize,
        state: Lock<State>,
    }

    #[derive(Debug)]
    struct State {
        /// Pages below were given out at least once.
        fresh: usize,
        /// Of those, the free ones. Room for all of them is reserved.
        free: Vec<usize>,
    }

    /// A region that cannot hold tables.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
    pub enum ArenaError {
        /// The device's address is 0, not aligned to a page, or reaches past 52 bits.
        #[error("base: {pages} pages at {base:#x} are no table memory")]
        Base {
            /// The address given.
            base: PhysAddr,
            /// The size given.
            pages: usize,
        },
        /// The CPU's address is not aligned to a page.
        #[error("memory: {0:#x} is not aligned to a page")]
        Memory(usize),
        /// No memory for the list of free pages.
        #[error("pages: no memory for a list of {0}")]
        Pages(usize),
    }

    impl Arena {
        /// The `pages` pages that devices find at `base` and the CPU at `memory`.
        ///
        /// # Errors
        /// [`ArenaError`], by argument.
        ///
        /// # Safety
        /// For the life of the arena the region is mapped readable and writable, and nobody else writes it.
        pub unsafe fn new(
            base: PhysAddr,
            memory: NonNull<u8>,
            pages: usize,
        ) -> Result<Self, ArenaError> {
            let end = (pages as u64)
                .checked_mul(PAGE_SIZE)
                .and_then(|len| base.checked_add(len));
            if base.raw() == 0
                || !base.is_aligned(PAGE_SIZE)
                || end.is_none_or(|end| end.raw() > 1 << 52)
            {
                return Err(ArenaError::Base { base, pages });
            }
            if !memory.addr().get().is_multiple_of(PAGE_SIZE as usize) {
                return Err(ArenaError::Memory(memory.addr().get()));
            }
            let mut free = Vec::new();
            if free.try_reserve_exact(pages).is_err() {
                return Err(ArenaError::Pages(pages));
            }
            Ok(Self {
                base,
                memory: memory.cast(),
                pages,
                state: Lock::new(State { fresh: 0, free }),
            })
        }

        /// Pages allocated and not freed.
        pub fn pages_in_use(&self) -> usize {
            let state = self.state.lock();
            state.fresh - state.free.len()
        }

        #[inline]
        fn index(&self, page: PhysAddr) -> usize {
            (page.raw().wrapping_sub(self.base.raw()) / PAGE_SIZE) as usize
        }

        #[inline]
        fn table(&self, index: usize) -> &Table {
            assert!(index < self.pages, "a page of this arena");
            // SAFETY: `new`'s caller promises that the region is mapped while the arena lives, the index lies in it,
            // and `new` checked the alignment. Any bits are entries. Only this arena's users write it, atomically.
            unsafe { self.memory.add(index).as_ref() }
        }
    }

    // SAFETY: the pointer is to memory that all threads may access, per the contract of `new`; all accesses are atomic.
    unsafe impl Send for Arena {}
    // SAFETY: as above; the list of free pages is behind a lock.
    unsafe impl Sync for Arena {}

    // SAFETY: `new` checked alignment and address bits; an index is either below `fresh` or in `free`, so nobody has
    // it twice; `alloc` zeroes; address and pointer differ by a constant.
    unsafe impl TableMemory for Arena {
        fn alloc(&self) -> Option<PhysAddr> {
            let mut state = self.state.lock();
            let index = match state.free.pop() {
                Some(index) => index,
                None if state.fresh < self.pages => {
                    state.fresh += 1;
                    state.fresh - 1
                }
                None => return None,
            };
            drop(state);
            for entry in self.table(index) {
                entry.store(0, Ordering::Relaxed);
            }
            self.base.checked_add(index as u64 * PAGE_SIZE)
        }

        unsafe fn free(&self, page: PhysAddr) {
            let index = self.index(page);
            assert!(index < self.pages, "a page of this arena");
            self.state.lock().free.push(index);
        }

        #[inline]
        unsafe fn entries(&self, page: PhysAddr) -> &Table {
            self.table(self.index(page))
        }
    }
}
