//! Page of device registers in memory that the guest may map, and its interface for an engine.
//!
//! The engine publishes registers into a page ([`RegPage::store32`]) and, where the page is
//! writable by the guest, picks up its stores ([`RegPage::load32`]). The other side of every
//! ordering here is the guest's driver, running on a vCPU: its MMIO accessors order a register
//! store after earlier stores to memory, and later loads after a register load.
//!
//! Offsets are register numbers, constants of a specification. One that is misaligned or outside
//! the page is a bug of the engine and panics.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::addr::{Hva, PAGE_SIZE};
use crate::map_error::MapError;
use crate::mapping::{HugePages, Mapping};

/// One 4 KiB page of little-endian registers, shared with a guest.
pub trait RegPage {
    /// Loads 4 bytes with acquire ordering. Pairs with the guest's register store: its earlier
    /// stores to memory (descriptors before a queue tail) are visible to later loads.
    fn load32(&self, offset: u16) -> u32;

    /// Loads 8 bytes with acquire ordering, as [`load32`](RegPage::load32).
    fn load64(&self, offset: u16) -> u64;

    /// Stores 4 bytes with release ordering. Pairs with the guest's register load: if the load sees
    /// the value, the guest sees all earlier stores to its memory.
    fn store32(&self, offset: u16, value: u32);

    /// Stores 8 bytes with release ordering, as [`store32`](RegPage::store32).
    fn store64(&self, offset: u16, value: u64);

    /// Stores `new` if the register holds `current`, and returns its old value: `Ok` if `new` was
    /// stored. For registers to which the guest stores as well: its store, made between our load
    /// and this, is seen and not overwritten. Success acquires and releases; failure acquires, so
    /// that the value found can be acted upon.
    fn compare_exchange32(&self, offset: u16, current: u32, new: u32) -> Result<u32, u32>;

    /// As [`compare_exchange32`](RegPage::compare_exchange32), for 8 bytes.
    fn compare_exchange64(&self, offset: u16, current: u64, new: u64) -> Result<u64, u64>;
}

/// A register page in a memory file of its own, ready to become a KVM memory slot. A clone is
/// another handle to the same page.
///
/// ```
/// use guest_mem::{RegPage, RegisterPage};
/// # fn main() -> Result<(), guest_mem::MapError> {
/// let page = RegisterPage::new()?;
/// page.store32(0x1c, 0x8000_0000);
/// assert_eq!(page.compare_exchange32(0x1c, 0x8000_0000, 0), Ok(0x8000_0000));
/// assert_eq!(page.load64(0x18), 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RegisterPage {
    page: Arc<Mapping>,
}

impl RegisterPage {
    /// A zeroed page.
    pub fn new() -> Result<Self, MapError> {
        let page = Mapping::memfd(c"register-page", PAGE_SIZE as usize, HugePages::Never)?;
        Ok(Self {
            page: Arc::new(page),
        })
    }

    /// A zeroed page in plain memory, for tests and model checkers: same accesses, no system call,
    /// and no [`memfd`](Self::memfd).
    pub fn in_heap() -> Self {
        Self {
            page: Arc::new(Mapping::heap(PAGE_SIZE as usize)),
        }
    }

    /// Returns the address of the page in this process, for a memory slot and for arming. It stays
    /// mapped while a handle to the page exists.
    pub fn hva(&self) -> Hva {
        self.page.hva(0)
    }

    /// The memory file behind the page.
    pub fn memfd(&self) -> BorrowedFd<'_> {
        self.page.fd().expect("a register page is a memory file")
    }
}

impl RegPage for RegisterPage {
    #[inline]
    fn load32(&self, offset: u16) -> u32 {
        self.page.load(offset.into(), Ordering::Acquire)
    }

    #[inline]
    fn load64(&self, offset: u16) -> u64 {
        self.page.load(offset.into(), Ordering::Acquire)
    }

    #[inline]
    fn store32(&self, offset: u16, value: u32) {
        self.page.store(offset.into(), value, Ordering::Release);
    }

    #[inline]
    fn store64(&self, offset: u16, value: u64) {
        self.page.store(offset.into(), value, Ordering::Release);
    }

    #[inline]
    fn compare_exchange32(&self, offset: u16, current: u32, new: u32) -> Result<u32, u32> {
        self.page.compare_exchange(offset.into(), current, new)
    }

    #[inline]
    fn compare_exchange64(&self, offset: u16, current: u64, new: u64) -> Result<u64, u64> {
        self.page.compare_exchange(offset.into(), current, new)
    }
}
