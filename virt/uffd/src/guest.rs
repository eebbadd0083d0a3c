//! A guest's memory, page by page: which pages are mapped for the guest, and whether they were
//! stored to.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use guest_mem::{Hva, PAGE_SIZE, SlotMapping};

use crate::scan::{self, Query};
use crate::{Fault, FaultKind, Features, Modes, Protection, Source, Uffd};

/// Detection of stores to protected pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// Stores are not detected.
    Unseen,
    /// A store to a protected page is no fault, but removes the protection, which leaves a trace.
    /// Linux 6.7.
    Traced,
}

/// A fault at a page of the memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// Number of the page in the file.
    pub page: u64,
    /// Reason of the fault.
    pub kind: FaultKind,
    /// Whether it is a store, as far as the kernel knows.
    pub is_write: bool,
}

/// Mappings of one memory file for a guest's memory slots. Absent pages are faults.
///
/// Pages are numbered as in the file. A page outside all mappings panics.
#[derive(Debug)]
pub struct GuestMapping {
    // Before the mappings, which are to outlast their registration.
    uffd: Uffd,
    pagemap: File,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    first: u64,
    mapping: Arc<SlotMapping>,
}

impl GuestMapping {
    /// Serves the faults of these mappings from now on, each with its offset in the file, in bytes.
    ///
    /// # Errors
    /// The kernel's reason with what to do.
    pub fn new(
        mappings: impl IntoIterator<Item = (u64, Arc<SlotMapping>)>,
        source: Source,
        stores: Stores,
    ) -> io::Result<Self> {
        let mut features = Features::MISSING_SHARED | Features::MINOR_SHARED;
        let mut modes = Modes::MISSING | Modes::MINOR;
        if stores == Stores::Traced {
            features = features
                | Features::WRITE_PROTECT
                | Features::WRITE_PROTECT_SHARED
                | Features::WRITE_PROTECT_ASYNC;
            modes = modes | Modes::WRITE_PROTECT;
        }
        let mut guest = Self {
            uffd: Uffd::open(source, features)?,
            pagemap: File::open("/proc/self/pagemap")?,
            parts: Vec::new(),
        };
        for (offset, mapping) in mappings {
            // SAFETY: no code makes references into a `SlotMapping`, and this one is kept until the
            // descriptor is dropped.
            unsafe { guest.uffd.register(mapping.hva(), mapping.len(), modes) }?;
            let first = offset / PAGE_SIZE;
            guest.parts.push(Part { first, mapping });
        }
        Ok(guest)
    }

    /// Returns the next access that waits; `None` if there is none now.
    ///
    /// # Errors
    /// The kernel's.
    pub fn next_fault(&self) -> io::Result<Option<PageFault>> {
        let fault = self.uffd.next_fault()?;
        Ok(fault.map(|fault| {
            let Fault {
                address,
                kind,
                is_write,
            } = fault;
            let mut found = self.parts.iter().filter_map(|part| {
                let inside = address.offset_from(part.mapping.hva())?;
                (inside < part.mapping.len()).then_some(part.first + inside / PAGE_SIZE)
            });
            PageFault {
                page: found.next().expect("a fault of a registered range"),
                kind,
                is_write,
            }
        }))
    }

    /// Maps `count` pages that the file has, and wakes the accesses that wait for them. Pages that
    /// are mapped stay as they are.
    ///
    /// # Errors
    /// The kernel's.
    pub fn map(&self, first: u64, count: u64, protection: Protection) -> io::Result<()> {
        let (mut page, end) = (first, first + count);
        while page < end {
            let at = self.hva(page);
            let len = self.in_one_mapping(page, end - page) * PAGE_SIZE;
            match self.uffd.map_present(at, len, protection) {
                // Fewer than all: the address space is changing concurrently, or the next page is
                // mapped.
                Ok(done) => page += done / PAGE_SIZE,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    self.uffd.wake(at, PAGE_SIZE)?;
                    page += 1;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Adds pages of zeroes to the file, maps them, and wakes the accesses that wait for them.
    /// Returns their number: fewer than `count` if the next page is in the file, or is mapped.
    ///
    /// # Errors
    /// The kernel's: no memory.
    pub fn zero(&self, first: u64, count: u64) -> io::Result<u64> {
        let mut done = 0;
        while done < count {
            let len = self.in_one_mapping(first + done, count - done) * PAGE_SIZE;
            match self.uffd.zero(self.hva(first + done), len) {
                // Fewer than all: the address space is changing concurrently, or the next page is
                // there.
                Ok(bytes) => done += bytes / PAGE_SIZE,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Unmaps `count` pages; the file keeps them, and their protection keeps its trace. After its
    /// return no store reaches them through this mapping.
    ///
    /// # Errors
    /// The kernel's.
    pub fn unmap(&self, first: u64, count: u64) -> io::Result<()> {
        let (mut page, end) = (first, first + count);
        while page < end {
            let part = self.part(page);
            let pages = self.in_one_mapping(page, end - page);
            let offset = (page - part.first) * PAGE_SIZE;
            part.mapping.unmap(offset, pages * PAGE_SIZE)?;
            page += pages;
        }
        Ok(())
    }

    /// Protects a page that is mapped: the next store is detected.
    ///
    /// # Errors
    /// The kernel's.
    pub fn protect(&self, page: u64) -> io::Result<()> {
        self.uffd
            .write_protect(self.hva(page), PAGE_SIZE, Protection::WriteProtected)
    }

    /// Returns which of up to 64 pages were protected when they were last mapped or since, and have
    /// not been stored to through this mapping after that; the first is the lowest bit. The result
    /// is the same after a page is unmapped.
    ///
    /// # Errors
    /// The kernel's.
    ///
    /// # Panics
    /// For more than 64 pages.
    pub fn protected(&self, first: u64, count: u64) -> io::Result<u64> {
        assert!(count <= 64, "{count} pages");
        let (mut found, mut done) = (0, 0);
        while done < count {
            let pages = self.in_one_mapping(first + done, count - done);
            found |= self.protected_in_one(first + done, pages)? << done;
            done += pages;
        }
        Ok(found)
    }

    /// Returns the same for pages of one mapping, of which there is at least one.
    fn protected_in_one(&self, first: u64, count: u64) -> io::Result<u64> {
        let start = self.hva(first);
        // At most 32 runs: between two of them is a page that is not protected.
        let mut runs = [[0; 3]; 32];
        let runs = scan::scan(&self.pagemap, start, count, Query::CLEAN, &mut runs)?;
        let page = |address: u64| (address - start.raw()) / PAGE_SIZE;
        Ok(runs.iter().fold(0, |found, &[from, end, _]| {
            // At least one page, at most all 64.
            let pages = u64::MAX >> (64 - (page(end) - page(from)));
            found | pages << page(from)
        }))
    }

    /// Returns whether the page is [`protected`](Self::protected).
    ///
    /// # Errors
    /// The kernel's.
    pub fn is_protected(&self, page: u64) -> io::Result<bool> {
        Ok(self.protected(page, 1)? != 0)
    }

    /// Wakes the accesses that wait for the page; they are retried.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wake(&self, page: u64) -> io::Result<()> {
        self.uffd.wake(self.hva(page), PAGE_SIZE)
    }

    /// Returns how many of `count` pages from `first` on are in the mapping of `first`: mappings
    /// are adjacent in the file, but not in the address space.
    fn in_one_mapping(&self, first: u64, count: u64) -> u64 {
        let part = self.part(first);
        count.min(part.first + part.mapping.len() / PAGE_SIZE - first)
    }

    fn part(&self, page: u64) -> &Part {
        let is_inside = |part: &&Part| {
            let inside = page.checked_sub(part.first);
            inside.is_some_and(|inside| inside < part.mapping.len() / PAGE_SIZE)
        };
        let found = self.parts.iter().find(is_inside);
        found.expect("a page of a mapping")
    }

    fn hva(&self, page: u64) -> Hva {
        let part = self.part(page);
        Hva::new(part.mapping.hva().raw() + (page - part.first) * PAGE_SIZE)
    }
}

/// Readable while an access waits whose message has not been taken.
impl AsFd for GuestMapping {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}
