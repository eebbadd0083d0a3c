//! Write protection of one register page, so that a sidecore that sleeps is woken by a guest's
//! plain store.
//!
//! The protection covers one *mapping*: [`SlotMapping`], made for KVM's memory slot alone. The
//! sidecore reads and writes the registers through a mapping of its own and never meets the
//! protection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use guest_mem::{PAGE_SIZE, SlotMapping};

use crate::{Features, Modes, Protection, Source, Uffd};

/// A page whose write protection can be switched on and off, and a descriptor that is readable
/// while a store waits at it.
#[derive(Debug)]
pub struct WriteGate {
    // Before the mapping, which is to outlast its registration.
    uffd: Uffd,
    mapping: Arc<SlotMapping>,
    is_protected: bool,
}

impl WriteGate {
    /// Watches `mapping`, not yet protected.
    ///
    /// A store meets the protection in kernel mode (KVM resolves the guest's fault): see
    /// [`Source::Kernel`].
    ///
    /// # Errors
    /// The kernel's reason with what to do: no permission for kernel-mode faults, or no such
    /// feature.
    pub fn new(mapping: Arc<SlotMapping>) -> io::Result<Self> {
        Ok(Self {
            uffd: watch(&mapping)?,
            mapping,
            is_protected: false,
        })
    }

    /// Returns the watched mapping.
    pub fn mapping(&self) -> &SlotMapping {
        &self.mapping
    }

    /// Protects the page: from its return on, a store to the page waits and makes the descriptor
    /// readable. Earlier stores are in memory: the caller must re-read every register before
    /// sleeping.
    ///
    /// # Errors
    /// The kernel's.
    pub fn protect(&mut self) -> io::Result<()> {
        self.write_protect(Protection::WriteProtected)?;
        self.is_protected = true;
        Ok(())
    }

    /// Permits waiting and later stores; returns the number that had been waiting.
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
        // One that arrived between the drain and the unprotect has been woken too; its message is
        // stale.
        Ok(waiting + self.drain())
    }

    fn write_protect(&self, protection: Protection) -> io::Result<()> {
        let page = self.mapping.hva();
        self.uffd.write_protect(page, PAGE_SIZE, protection)
    }

    /// Reads the waiting messages: at most one for each vCPU, so that the loop is bounded by their
    /// number.
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

/// Opens a descriptor on which faults at the write-protected `mapping` arrive.
fn watch(mapping: &SlotMapping) -> io::Result<Uffd> {
    let features = Features::WRITE_PROTECT | Features::WRITE_PROTECT_SHARED;
    let uffd = Uffd::open(Source::Kernel, features)?;
    // SAFETY: `WriteGate` keeps the mapping longer than the descriptor. No code makes references
    // into it: it is KVM's.
    unsafe { uffd.register(mapping.hva(), PAGE_SIZE, Modes::WRITE_PROTECT) }?;
    Ok(uffd)
}
