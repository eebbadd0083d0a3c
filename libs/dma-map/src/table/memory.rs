//! Sources of table pages: [`HostMemory`], or another implementation of [`TableMemory`]: a kernel's
//! page allocator and its direct map, a huge page, a region of a guest.
//!
//! `alloc` and `free` are called when a table is installed or released, so seldom; `entries` is on
//! the path of every walk.
//!
//! Left out: devices that read tables past the CPU's caches (VT-d units with `ECAP.C` clear) need
//! the lines of changed entries written back; NUMA nodes: a memory per node is a memory of the
//! caller's.
#![expect(
    unsafe_code,
    reason = "pages are memory that devices read: from addresses to references"
)]

use address::PhysAddr;
use alloc::sync::Arc;
use lines::AtomicU64;

use super::format::ENTRIES;

#[cfg(not(any(loom, shuttle)))]
pub use self::host::HostMemory;

/// A page of entries. Devices read it at any time, so every access is atomic.
pub type Table = [AtomicU64; ENTRIES];

/// A source of table pages, which maps the address that a device uses for a page to the CPU's.
///
/// # Safety
/// `alloc` gives a page that is aligned to its size, has at most 52 address bits, belongs to no
/// other user until it is freed, and reads as zeros. `entries` gives that page for that address,
/// the same memory each time.
pub unsafe trait TableMemory: Send + Sync {
    /// A page of zeros; `None` where there is none. The address is not 0.
    fn alloc(&self) -> Option<PhysAddr>;

    /// Takes a page back.
    ///
    /// # Safety
    /// `page` came from `alloc` of this memory and was not freed since; neither a reference from
    /// `entries` nor a device uses it any more.
    unsafe fn free(&self, page: PhysAddr);

    /// The entries of a page.
    ///
    /// # Safety
    /// `page` came from `alloc` of this memory, and is not freed while the reference is used.
    unsafe fn entries(&self, page: PhysAddr) -> &Table;
}

macro_rules! forward {
    ($($pointer:ty),*) => {$(
        // SAFETY: every call goes to the memory behind the pointer, always the same, which keeps
        // the contract.
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
    use lines::Lock;

    use super::{Table, TableMemory};

    /// Free pages kept for the next table, at most: 256 KiB.
    const POOL: usize = 64;
    const PAGE: Layout = match Layout::from_size_align(PAGE_SIZE as usize, PAGE_SIZE as usize) {
        Ok(layout) => layout,
        Err(_) => unreachable!(),
    };
    const _: () = assert!(size_of::<Table>() == PAGE.size());

    /// Pages of the global allocator. The address that a device uses is the pointer's value: for
    /// user-space drivers whose IOMMU maps the process one to one, for emulated devices, and for
    /// tests.
    #[derive(Debug, Default)]
    pub struct HostMemory(Lock<Vec<PhysAddr>>);

    impl HostMemory {
        /// No pages yet.
        pub fn new() -> Self {
            Self::default()
        }
    }

    // SAFETY: `alloc_zeroed` gives pages of that size and alignment, zeroed, with no other user;
    // pooled ones are zeroed again; addresses above 52 bits are not given out. The pointer is its
    // address, so `entries` gives the same memory.
    unsafe impl TableMemory for HostMemory {
        fn alloc(&self) -> Option<PhysAddr> {
            if let Some(page) = self.0.lock().pop() {
                let memory = ptr::with_exposed_provenance_mut::<u8>(page.raw() as usize);
                // SAFETY: pages in the pool came from `alloc_zeroed(PAGE)` below, and `free`'s
                // callers gave up every use of them: these bytes are ours alone.
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

        unsafe fn free(&self, page: PhysAddr) {
            let mut pool = self.0.lock();
            let room = POOL - pool.len();
            if room > 0 && pool.try_reserve_exact(room).is_ok() {
                pool.push(page);
                return;
            }
            drop(pool);
            let memory = ptr::with_exposed_provenance_mut(page.raw() as usize);
            // SAFETY: the caller promises that it came from `alloc`, so from `alloc_zeroed` with
            // this layout, and that it is no longer used.
            unsafe { dealloc(memory, PAGE) };
        }

        #[inline]
        unsafe fn entries(&self, page: PhysAddr) -> &Table {
            // SAFETY: the caller promises a live page of `alloc`: that many aligned, initialized
            // bytes, whose provenance was exposed there, and which are only accessed atomically
            // while they are live.
            unsafe { &*ptr::with_exposed_provenance::<Table>(page.raw() as usize) }
        }
    }

    impl Drop for HostMemory {
        fn drop(&mut self) {
            for page in self.0.get_mut().drain(..) {
                let memory = ptr::with_exposed_provenance_mut(page.raw() as usize);
                // SAFETY: pages in the pool came from `alloc_zeroed` with this layout and are not
                // used.
                unsafe { dealloc(memory, PAGE) };
            }
        }
    }
}
