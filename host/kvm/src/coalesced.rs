//! KVM's coalesced-MMIO ring: register writes logged by the kernel, in order, without an exit to
//! user space.
//!
//! Documentation/virt/kvm/api.rst, `KVM_REGISTER_COALESCED_MMIO`. The ring is one page per machine,
//! seen through any vCPU's descriptor at page `KVM_COALESCED_MMIO_PAGE_OFFSET`: `first` (ours),
//! `last` (KVM's), entries.
//!
//! Producers: vCPUs inside the kernel, under KVM's own lock. Consumer: exactly one, which holds the
//! [`CoalescedRing`] and deals its entries out by address ([`zones`](crate::zones)). When the ring
//! is full KVM makes the write an ordinary exit (`KVM_EXIT_MMIO`) instead: the code that handles
//! that must have the ring drained first, or the order of writes breaks. The kernel writes this
//! page, not the guest; its fields are checked all the same.
//!
//! UNSAFETY: `mmap` of a kernel page and volatile access to it. (The helper in `kvm-ioctls` needs
//! `&mut VcpuFd`, which belongs to the vCPU's thread.)

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvm_bindings::{KVM_COALESCED_MMIO_PAGE_OFFSET, kvm_coalesced_mmio, kvm_coalesced_mmio_ring};
use kvm_ioctls::IoEventAddress;

use crate::Vm;

const PAGE: usize = 4096;
/// Entries of the ring; KVM keeps one free.
const ENTRIES: u32 =
    ((PAGE - size_of::<kvm_coalesced_mmio_ring>()) / size_of::<kvm_coalesced_mmio>()) as u32;

/// The ring's page.
struct RingPage(NonNull<kvm_coalesced_mmio_ring>);

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for RingPage {}
// SAFETY: shared accessors are loads of two atomic words; entries are read through
// `CoalescedRing::drain`, which needs `&mut`.
unsafe impl Sync for RingPage {}

impl RingPage {
    fn first(&self) -> &AtomicU32 {
        // SAFETY: an aligned field of the live page; only the consumer writes it.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0.as_ptr()).first) }
    }

    fn last(&self) -> &AtomicU32 {
        // SAFETY: an aligned field of the live page; the kernel writes it, we only load.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0.as_ptr()).last) }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        // Pairs with the kernel's write barrier before it moves `last`: the entry is there once
        // `last` says so.
        self.first().load(Ordering::Relaxed) == self.last().load(Ordering::Acquire)
    }
}

impl Drop for RingPage {
    fn drop(&mut self) {
        // SAFETY: this mapping, of this size, and no reference into it is left.
        unsafe { libc::munmap(self.0.as_ptr().cast(), PAGE) };
    }
}

/// The consumer's end of the ring. See the module's head.
pub struct CoalescedRing {
    page: Arc<RingPage>,
}

/// A view of the ring that takes nothing, beside its consumer.
pub struct RingProbe(Arc<RingPage>);

impl RingProbe {
    /// Returns whether nothing is logged. One acquire load: cheap enough for every sweep.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl CoalescedRing {
    /// Maps the ring of the machine that `vcpu` (any of its vCPUs' descriptors) belongs to. One
    /// consumer only: a second ring of one machine would take entries from the first.
    pub fn map(vcpu: BorrowedFd<'_>) -> io::Result<Self> {
        let offset = PAGE as libc::off_t * libc::off_t::from(KVM_COALESCED_MMIO_PAGE_OFFSET);
        // SAFETY: a fresh mapping at an address of the kernel's choice; the result is checked.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                offset,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let page = NonNull::new(page.cast()).expect("a fresh mapping is not at address zero");
        let page = Arc::new(RingPage(page));
        Ok(Self { page })
    }

    /// Returns a view of the ring.
    pub fn probe(&self) -> RingProbe {
        RingProbe(self.page.clone())
    }

    /// Returns whether nothing is logged.
    pub fn is_empty(&self) -> bool {
        self.page.is_empty()
    }

    /// Hands over up to `limit` logged writes, oldest first: guest-physical address, 1 to 8 bytes.
    /// Each place is given back after its call. Returns their number.
    pub fn drain(&mut self, limit: usize, mut each: impl FnMut(u64, &[u8])) -> usize {
        let mut first = self.page.first().load(Ordering::Relaxed) % ENTRIES;
        for count in 0..limit {
            if first == self.page.last().load(Ordering::Acquire) {
                return count;
            }
            // SAFETY: `first` is below ENTRIES, so the entry lies inside the page; the kernel does
            // not touch it until `first` has passed. Entries are plain integers.
            let entry = unsafe {
                let entries = (&raw const (*self.page.0.as_ptr()).coalesced_mmio)
                    .cast::<kvm_coalesced_mmio>();
                ptr::read_volatile(entries.add(first as usize))
            };
            let len = (entry.len as usize).min(entry.data.len());
            each(entry.phys_addr, &entry.data[..len]);
            first = (first + 1) % ENTRIES;
            // Release: the entry has been read before the kernel may overwrite it.
            self.page.first().store(first, Ordering::Release);
        }
        limit
    }
}

/// A range of guest-physical addresses whose writes are logged while registered.
pub struct CoalescedZone {
    vm: Arc<Vm>,
    address: u64,
    len: u32,
    registered: bool,
}

impl CoalescedZone {
    /// Creates a zone of `len` bytes at `address`, not registered yet.
    pub fn new(vm: Arc<Vm>, address: u64, len: u32) -> Self {
        Self {
            vm,
            address,
            len,
            registered: false,
        }
    }

    /// Returns the range of its addresses.
    pub fn addresses(&self) -> Range<u64> {
        self.address..self.address + u64::from(self.len)
    }

    /// Starts logging. Nothing to do if it already does. (KVM takes a grace period: not for a hot
    /// path.)
    pub fn register(&mut self) -> Result<(), kvm_ioctls::Error> {
        if !self.registered {
            self.vm
                .fd()
                .register_coalesced_mmio(IoEventAddress::Mmio(self.address), self.len)?;
            self.registered = true;
        }
        Ok(())
    }

    /// Stops logging: later writes exit. Entries logged before stay in the ring; drain it
    /// afterwards.
    pub fn unregister(&mut self) -> Result<(), kvm_ioctls::Error> {
        if self.registered {
            self.vm
                .fd()
                .unregister_coalesced_mmio(IoEventAddress::Mmio(self.address), self.len)?;
            self.registered = false;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests;
