//! A range of address space with memory mapped in its middle and inaccessible pages on either side.
//!
//! If a kernel interface uses a wrong length, it faults on those instead of reaching a neighbouring
//! mapping. And a mapping can start at the boundary that huge pages need.
//!
//! UNSAFETY: `mmap` and `munmap`. Nothing here is dereferenced.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::{self, NonNull};

use crate::addr::PAGE_SIZE;

/// Reserved address space, unmapped as a whole when dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: address space belongs to the process, not to a thread, and nothing is reached through
// this.
unsafe impl Send for Reservation {}
// SAFETY: as for `Send`; there are no shared accessors.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Maps `len` private, writable bytes that hold zeroes, and returns their start, a multiple of
    /// `align`. Conditions are those of [`map`](Self::map).
    pub(crate) fn anonymous(len: usize, align: usize) -> io::Result<(Self, NonNull<u8>)> {
        Self::map_as(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0, len, align)
    }

    /// Maps `len` bytes of `file` from `offset` on, shared and writable, and returns their start.
    /// The address and `offset` are congruent modulo `align`, a power of two of at least a page: so
    /// an aligned huge page of the file is one in memory. `len` and `offset` are multiples
    /// of 4096 (of the huge page for a file of huge pages), `len` is not 0. The host refuses other
    /// defects of the file.
    pub(crate) fn map(
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        align: usize,
    ) -> io::Result<(Self, NonNull<u8>)> {
        Self::map_as(libc::MAP_SHARED, file.as_raw_fd(), offset, len, align)
    }

    fn map_as(
        flags: libc::c_int,
        fd: RawFd,
        offset: u64,
        len: usize,
        align: usize,
    ) -> io::Result<(Self, NonNull<u8>)> {
        let page = PAGE_SIZE as usize;
        debug_assert!(align.is_power_of_two() && align >= page);
        let file_offset = libc::off_t::try_from(offset)
            .map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        let reserved = align
            .checked_add(2 * page)
            .and_then(|around| around.checked_add(len))
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: a new private mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                reserved,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let nonnull = |pointer: *mut u8| NonNull::new(pointer).expect("mmap never answers page 0");
        // From here on an error unmaps the reservation.
        let reservation = Self {
            start: nonnull(start.cast()),
            len: reserved,
        };
        let start = start.cast::<u8>();
        // The first address with the remainder `rest` that leaves a guard page below: less than
        // `align + page` in, so that with `len` after it at least one page is left above.
        let rest = (offset % align as u64) as usize;
        let skip = page + (rest.wrapping_sub(start.addr() + page) & (align - 1));
        // SAFETY: `skip + len < align + page + len = reserved - page`, inside the reservation,
        // which nothing accesses; replacing a part of it affects nothing else.
        // NORESERVE: pages of a huge-page file are its owner's to reserve, and other files need
        // none.
        let base = unsafe {
            libc::mmap(
                start.add(skip).cast(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags | libc::MAP_FIXED | libc::MAP_NORESERVE,
                fd,
                file_offset,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok((reservation, nonnull(base.cast())))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the reservation holds one mapping and its guards only, and is dropped by the last
        // owner of the pointers into it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}
