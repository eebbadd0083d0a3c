//! Guest memory lent to a container.
//!
//! UNSAFETY: the promise that memory stays mapped while a device may reach it, of
//! [`PhysMem::host`](guest_mem::PhysMem::host) and its [`KeepAlive`].
#![expect(
    unsafe_code,
    reason = "it answers for the memory that a device reaches"
)]

use guest_mem::{Access, Gpa, Hva, Intent, KeepAlive, PhysMem};

/// Host memory behind a run of guest pages, kept mapped.
pub struct Pinned {
    hva: Hva,
    len: u64,
    _keep: KeepAlive,
}

impl Pinned {
    /// The memory at `len` bytes from `gpa` on, for a device that writes it. It is the *device's*
    /// mapping, never a memory slot's, where a fault would be the pager's.
    ///
    /// # Errors
    /// As [`PhysMem::host`].
    pub(crate) fn ask<M: PhysMem>(mem: &M, gpa: Gpa, len: u64, intent: Intent) -> Access<Self> {
        Ok(Self {
            hva: mem.host(gpa, len, intent)?,
            len,
            _keep: mem.keep_alive(),
        })
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.len
    }
}

// SAFETY: `PhysMem::host` has checked that all of it is RAM, contiguous here, and `_keep` keeps it
// mapped. Guest memory is reached by atomics and raw copies alone (`guest_mem::word`), since a
// guest's processors change it at any moment as well.
unsafe impl vfio::ExternalMemory for Pinned {
    fn address(&self) -> u64 {
        self.hva.raw()
    }

    fn len(&self) -> u64 {
        self.len
    }
}
