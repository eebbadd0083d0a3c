//! `PAGEMAP_SCAN` (Linux 6.7): runs of pages of this process that match a query.
//!
//! Some kernels omit pages that were stored to and are no longer mapped if the query has other
//! conditions, too. A caller that took "not listed" for "clean" would lose them. [`Query::CLEAN`]
//! therefore asks for the opposite: a listed page is clean.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use guest_mem::{Hva, PAGE_SIZE};

// Constants of `linux/fs.h`.
/// `_IOWR('f', 16, struct pm_scan_arg)`, with an argument of twelve words.
const PAGEMAP_SCAN: u64 = 0xc060_6610;
/// Bytes of the argument.
const SIZE: u64 = 12 * 8;
// Categories of a page (`PAGE_IS_*`).
pub(crate) const WRITTEN: u64 = 1 << 1;
pub(crate) const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;

/// Query: condition for the listed pages, in sets of categories.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query {
    /// Categories that are inverted, here and below.
    pub inverted: u64,
    /// A page must have all of these.
    pub all_of: u64,
    /// A page must have at least one of these, unless the set is empty.
    pub any_of: u64,
    /// Categories that are reported for a run. Pages that differ in them are in different runs.
    pub told: u64,
}

impl Query {
    /// Pages write-protected when or after they were last mapped, and not stored to since. Such a
    /// page is mapped, or has left a PTE marker, which the kernel reports as a swapped page.
    pub(crate) const CLEAN: Self = Self {
        inverted: WRITTEN,
        all_of: WRITTEN,
        any_of: PRESENT | SWAPPED,
        told: 0,
    };
}

/// A run of pages: first byte, end, categories.
pub(crate) type Run = [u64; 3];

/// Returns the first runs of pages that match the query among `pages` from `start` on, as many as
/// `runs` has room for. Changes no page.
///
/// # Errors
/// The kernel's error; `ENOTTY` if it has no such request.
pub(crate) fn scan<'a>(
    pagemap: &File,
    start: Hva,
    pages: u64,
    query: Query,
    runs: &'a mut [Run],
) -> io::Result<&'a [Run]> {
    let into = runs.as_mut_ptr().expose_provenance() as u64;
    let mut words = [
        // size, flags
        SIZE,
        0,
        // start, end, where it stopped
        start.raw(),
        start.raw() + pages * PAGE_SIZE,
        0,
        // the list, how many runs it has room for, and pages (0: as many as there are)
        into,
        runs.len() as u64,
        0,
        query.inverted,
        query.all_of,
        query.any_of,
        query.told,
    ];
    // SAFETY: the request's number says that its argument is as long as `words`; it names room for
    // as many runs as `runs` has, each as long as a `Run`. Both outlive the call. Without flags the
    // request changes no page.
    let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN as _, words.as_mut_ptr()) };
    match usize::try_from(found) {
        // No more than there is room for.
        Ok(found) => Ok(&runs[..found]),
        Err(_) => Err(io::Error::last_os_error()),
    }
}
