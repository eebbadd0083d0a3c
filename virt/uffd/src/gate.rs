//! Write protection of one register page, so that a sidecore that sleeps is woken by a guest's plain store.
//!
//! The protection covers one *mapping*: [`SlotMapping`], made for KVM's memory slot alone. The sidecore reads
//! and writes the registers through a mapping of its own and never meets the protection.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use guest_mem::{Hva, PAGE_SIZE};

use crate::{Features, Modes, Protection, Source, Uffd};

/// A second mapping of a register page, for KVM's memory slot.
#[derive(Debug)]
pub struct SlotMapping {
    hva: Hva,
}

impl SlotMapping {
    /// Maps the first 4 KiB of `memfd`, shared and writable.
    ///
    /// # Errors
    /// The kernel's, of mmap(2).
    pub fn new(memfd: BorrowedFd<'_>) -> io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE_SIZE as usize,
                prot,
                libc::MAP_SHARED,
                memfd.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            hva: Hva::new(start.expose_provenance() as u64),
        })
    }

    /// Where the page is mapped: `userspace_addr` of the memory slot.
    pub fn hva(&self) -> Hva {
        self.hva
    }
}

impl Drop for SlotMapping {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.hva.raw() as usize);
        // SAFETY: our own mapping, of which no pointer or reference was made in this process; a KVM slot
        // that still names it finds nothing there and faults the guest.
        unsafe { libc::munmap(start, PAGE_SIZE as usize) };
    }
}

/// A page whose write protection can be switched on and off, and a descriptor that is readable while a
/// store waits at it.
#[derive(Debug)]
pub struct WriteGate {
    // Before the mapping, which is to outlast its registration.
    uffd: Uffd,
    mapping: SlotMapping,
    is_protected: bool,
}

impl WriteGate {
    /// Watches `mapping`, not yet protected.
    ///
    /// A store meets the protection in kernel mode (KVM resolves the guest's fault): see [`Source::Kernel`].
    ///
    /// # Errors
    /// The mapping back, and the kernel's reason with what to do: no permission for kernel-mode faults, or
    /// no such feature.
    pub fn new(mapping: SlotMapping) -> Result<Self, (SlotMapping, io::Error)> {
        match watch(&mapping) {
            Ok(uffd) => Ok(Self {
                uffd,
                mapping,
                is_protected: false,
            }),
            Err(error) => Err((mapping, error)),
        }
    }

    /// What is watched.
    pub fn mapping(&self) -> &SlotMapping {
        &self.mapping
    }

    /// From its return on, a store to the page waits and makes the descriptor readable. A store that came
    /// before is in memory: read every register again before sleeping.
    ///
    /// # Errors
    /// The kernel's.
    pub fn protect(&mut self) -> io::Result<()> {
        self.write_protect(Protection::WriteProtected)?;
        self.is_protected = true;
        Ok(())
    }

    /// Lets waiting and later stores through; answers how many had been waiting.
    ///
    /// # Errors
    /// The kernel's.
    pub fn unprotect(&mut self) -> io::Result<u64> {
        if !self.is_protected {
            return Ok(0);
        }
        let waiting = self.drain();
        self.write_protect(Protection::Writable)?;
        self.is_protected = false;
        // One that arrived between the drain and the unprotect has been woken too; its message is stale.
        Ok(waiting + self.drain())
    }

    fn write_protect(&self, protection: Protection) -> io::Result<()> {
        let page = self.mapping.hva();
        self.uffd.write_protect(page, PAGE_SIZE, protection)
    }

    /// Reads the waiting messages: at most one a vCPU, so that the loop is bounded by their number.
    fn drain(&self) -> u64 {
        let mut count = 0;
        while let Ok(Some(_)) = self.uffd.next_fault() {
            count += 1;
        }
        count
    }
}

/// Readable while a store waits at the protected page.
impl AsFd for WriteGate {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

/// A descriptor on which faults at the write-protected `mapping` arrive.
fn watch(mapping: &SlotMapping) -> io::Result<Uffd> {
    let features = Features::WRITE_PROTECT | Features::WRITE_PROTECT_SHARED;
    let uffd = Uffd::open(Source::Kernel, features)?;
    // SAFETY: `WriteGate` keeps the mapping longer than the descriptor. Nobody makes references into it: it is KVM's.
    unsafe { uffd.register(mapping.hva(), PAGE_SIZE, Modes::WRITE_PROTECT) }?;
    Ok(uffd)
}
