//! Where table pages come from.
#![expect(
    unsafe_code,
    reason = "pages are memory that devices read: from addresses to references"
)]

use address::PhysAddr;
use lines::AtomicU64;

use super::format::ENTRIES;

/// A page of entries. Devices read it at any time, so every access is atomic.
pub type Table = [AtomicU64; ENTRIES];

/// A source of table pages, which knows where the CPU finds the page that a device finds at an address.
///
/// # Safety
/// `alloc` gives a page that is aligned to its size, fits the address bits of every format, is nobody
/// else's until it is freed, and reads as zeros. `entries` gives that page for that address, the same memory each time.
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
