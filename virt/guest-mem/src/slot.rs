//! Mappings behind a guest's memory slots.
//!
//! The hypervisor and the devices reach a page through two separate mappings, so that changes to
//! the first (write protection, unmapped pages, faults that a pager handles) do not affect accesses
//! through the second. Anonymous memory has a single mapping.
//!
//! UNSAFETY: advice on a mapping of our own. Nothing here is dereferenced.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::addr::{Hva, PAGE_SIZE};
use crate::mapping::{HugePages, Mapping, align_of_len};
use crate::reserve::Reservation;

/// Memory that a guest's memory slot shows: a mapping of shared memory made for it, or anonymous
/// memory, which devices reach there too. No reference into it is made in this process. The code
/// that passes it to a slot keeps it at least as long as the slot.
#[derive(Debug)]
pub struct SlotMapping {
    start: NonNull<u8>,
    len: usize,
    hold: Hold,
}

#[derive(Debug)]
enum Hold {
    /// A mapping of its own.
    Own { _reservation: Reservation },
    /// The owner's.
    Shared { _mapping: Arc<Mapping> },
}

// SAFETY: address space belongs to the process, not to a thread, and nothing is reached through
// this.
unsafe impl Send for SlotMapping {}
// SAFETY: as for `Send`; there are no shared accessors.
unsafe impl Sync for SlotMapping {}

impl SlotMapping {
    /// Maps `len` bytes of `file` from `offset` (multiples of 4096, `len` not 0), shared and
    /// writable, aligned so that huge pages of the file are ones in memory.
    ///
    /// # Errors
    /// The kernel's, of mmap(2).
    pub fn new(
        file: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        huge_pages: HugePages,
    ) -> io::Result<Self> {
        let too_large = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let len = usize::try_from(len).map_err(too_large)?;
        let (reservation, start) = Reservation::map(file, offset, len, align_of_len(len))?;
        huge_pages.advise(start, len);
        let hold = Hold::Own {
            _reservation: reservation,
        };
        Ok(Self { start, len, hold })
    }

    /// All or a part of memory that there is no other mapping of.
    pub(crate) fn shared(mapping: &Arc<Mapping>, offset: u64, len: u64) -> io::Result<Self> {
        let at = Hva::new(mapping.hva(0).raw() + offset);
        let start = mapping
            .pointer(at, len)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let hold = Hold::Shared {
            _mapping: mapping.clone(),
        };
        // Inside a mapping, whose length is a `usize`.
        let len = len as usize;
        Ok(Self { start, len, hold })
    }

    /// The first 4 KiB of `file`: a register page.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_page(file: BorrowedFd<'_>) -> io::Result<Self> {
        Self::new(file, 0, PAGE_SIZE, HugePages::Never)
    }

    /// Start address: `userspace_addr` of the memory slot.
    pub fn hva(&self) -> Hva {
        Hva::new(self.start.as_ptr().expose_provenance() as u64)
    }

    /// Unmaps `len` bytes from `offset` on (multiples of 4096): the file keeps their content, and
    /// the next access through this mapping maps them anew.
    ///
    /// # Errors
    /// The kernel's, of madvise(2); `InvalidInput` for a range that is not inside; `Unsupported` if
    /// there is no file to keep the content.
    pub fn unmap(&self, offset: u64, len: u64) -> io::Result<()> {
        if let Hold::Shared { .. } = self.hold {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let end = offset.checked_add(len);
        if end.is_none_or(|end| end > self.len()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: checked just above to lie inside the mapping, whose length is a `usize`.
        let start = unsafe { self.start.add(offset as usize) };
        // SAFETY: the range is of a shared mapping of ours: its content is the file's.
        match unsafe { libc::madvise(start.as_ptr().cast(), len as usize, libc::MADV_DONTNEED) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Bytes: `memory_size` of the memory slot.
    #[expect(
        clippy::len_without_is_empty,
        reason = "mmap(2) makes no empty mapping"
    )]
    pub fn len(&self) -> u64 {
        self.len as u64
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use crate::{Gpa, GuestRam, HugePages, PhysMem};

    /// Returns the flags of the mapping that starts at `hva`, as the kernel reports them.
    fn flags(hva: u64) -> String {
        let maps = fs::read_to_string("/proc/self/smaps").expect("the kernel tells mappings");
        let head = format!("{hva:x}-");
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&head));
        let flags = lines.find(|line| line.starts_with("VmFlags"));
        flags.unwrap_or_default().to_owned()
    }

    #[test]
    fn a_slots_mapping_shows_the_same_bytes_and_pages_of_the_size_that_was_asked_for() {
        for (huge_pages, flag) in [(HugePages::Advise, " hg"), (HugePages::Never, " nh")] {
            let ram = GuestRam::with_pages(&[(Gpa::new(0), 4 << 20)], huge_pages).unwrap();
            ram.write(Gpa::new(0x1234), b"guest").unwrap();
            let region = &ram.regions()[0];
            let slot = ram.slot_mapping(region).unwrap();
            assert_eq!((slot.len(), slot.hva().raw() % (2 << 20)), (4 << 20, 0));
            assert_ne!(slot.hva(), region.hva);
            // SAFETY: five bytes inside the mapping, which no thread writes.
            let seen = unsafe { *((slot.hva().raw() + 0x1234) as *const [u8; 5]) };
            assert_eq!(&seen, b"guest");
            for hva in [slot.hva(), region.hva] {
                let flags = flags(hva.raw());
                // A kernel without huge pages knows neither word.
                if flags.contains(" hg") || flags.contains(" nh") {
                    assert!(flags.contains(flag), "{flags}");
                }
            }
        }
    }
}
