//! `PAGEMAP_SCAN` (Linux 6.7), which lists pages that were stored to.
//!
//! Some kernels leave out those that are not mapped any more, unless nothing else is asked about pages. Whoever takes "not listed"
//! for "clean" loses them. This crate reads the pagemap itself; what is found here is for people.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use guest_mem::PAGE_SIZE;

use super::Trial;
use super::clean::Pages;
use crate::Protection;

/// What the request says of a page that was stored to and then unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagemapScan {
    /// The kernel has no such request.
    Absent,
    /// That it was stored to.
    Truthful,
    /// That it was not.
    MissesUnmapped,
}

// Numbers of `linux/fs.h`.
/// `_IOWR('f', 16, struct pm_scan_arg)`, whose argument is twelve words.
const PAGEMAP_SCAN: u64 = 0xc060_6610;
// Categories of a page.
const WRITTEN: u64 = 1 << 1;
const PRESENT: u64 = 1 << 3;

/// Stores to a page, unmaps it, and asks.
pub(super) fn ask(trial: &Trial) -> io::Result<PagemapScan> {
    const PAGE: u64 = Trial::LAST;
    trial.fill(PAGE, 1)?;
    trial.map(PAGE, Protection::WriteProtected)?;
    trial.store(PAGE, 2)?;
    trial.unmap(PAGE)?;
    match is_written(&trial.pagemap, trial.address(PAGE)) {
        Ok(true) => Ok(PagemapScan::Truthful),
        Ok(false) => Ok(PagemapScan::MissesUnmapped),
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => Ok(PagemapScan::Absent),
        Err(error) => Err(error),
    }
}

/// Whether the page is in the list of those that were stored to. `PRESENT` is asked for beside it: a list of nothing but what was
/// written is made by another function of the kernel, which was always right.
fn is_written(pagemap: &File, start: u64) -> io::Result<bool> {
    // start, end, categories
    let mut region = [0_u64; 3];
    let into = region.as_mut_ptr().expose_provenance() as u64;
    let mut words = [
        // size, flags
        12 * 8,
        0,
        // start, end, where it stopped
        start,
        start + PAGE_SIZE,
        0,
        // the list, and how many regions and pages it has room for (0: as many as there are)
        into,
        1,
        0,
        // categories: inverted, all of, any of, to be told
        0,
        WRITTEN,
        0,
        WRITTEN | PRESENT,
    ];
    // SAFETY: the request's number says that its argument is as long as `words`; it names room for one region, which is as
    // long as `region`. Both outlive the call. Without flags the request changes no page.
    let regions =
        unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN as _, words.as_mut_ptr()) };
    match regions {
        0.. => Ok(regions == 1 && region[2] & WRITTEN != 0),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Features, Source, Stores, Uffd};

    /// So that the other answers mean something: a page that was stored to and is mapped is in the list, one that was not is not.
    #[test]
    fn mapped_pages_are_told_apart() {
        if Uffd::open(Source::User, Features::WRITE_PROTECT_ASYNC).is_err() {
            return eprintln!("skipped: no asynchronous write protection");
        }
        let trial = Trial::new(Stores::Traced).expect("a trial");
        for is_stored in [false, true] {
            let page = Trial::FIRST + u64::from(is_stored);
            trial.fill(page, 1).unwrap();
            trial.map(page, Protection::WriteProtected).unwrap();
            if is_stored {
                trial.store(page, 2).unwrap();
            }
            match is_written(&trial.pagemap, trial.address(page)) {
                Ok(found) => assert_eq!(found, is_stored),
                Err(error) => return eprintln!("skipped: {error}"),
            }
        }
    }
}
