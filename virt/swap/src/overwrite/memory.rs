//! Read access to the guest's memory: words and bytes at guest-physical addresses, of pages that
//! may be absent.

use guest_mem::{Gpa, PAGE_SIZE};

/// A guest's physical memory, of which pages may be absent.
///
/// Both calls answer `None` where the page is absent or no RAM, for any address at all: addresses
/// come from tables that the guest writes. They neither wait for a page nor give it memory, so that
/// asking changes nothing.
pub trait Memory {
    /// Returns the eight bytes at `at`, a multiple of 8, as a little-endian number.
    ///
    /// Read by one access: they are an entry of tables that other processors of the guest change
    /// meanwhile, and half of an old entry with half of a new one would be a translation that never
    /// was.
    fn word(&mut self, at: Gpa) -> Option<u64>;

    /// Copies the bytes from `at` on; all of them lie in one 4 KiB page. Those that the guest
    /// stores to meanwhile may be old or new.
    fn bytes(&mut self, at: Gpa, into: &mut [u8]) -> Option<()>;
}

/// Memory without one page: the page that is about to be overwritten is not read, whether it is
/// there or not.
pub(super) struct Without<'a, M> {
    pub(super) memory: &'a mut M,
    pub(super) page: Gpa,
}

impl<M: Memory> Memory for Without<'_, M> {
    fn word(&mut self, at: Gpa) -> Option<u64> {
        if at.align_down(PAGE_SIZE) == self.page {
            return None;
        }
        self.memory.word(at)
    }

    fn bytes(&mut self, at: Gpa, into: &mut [u8]) -> Option<()> {
        if at.align_down(PAGE_SIZE) == self.page {
            return None;
        }
        self.memory.bytes(at, into)
    }
}
