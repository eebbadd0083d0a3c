//! A guest's memory, page by page: what of it is mapped for the guest, and whether it was stored
//! to.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use guest_mem::{Hva, PAGE_SIZE, SlotMapping};

use crate::scan::{self, Query};
use crate::{Fault, FaultKind, Features, Modes, Protection, Source, Uffd};

/// What becomes known of stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// Nothing.
    Unseen,
    /// A store to a protected page is no fault, but takes the protection away, which shows. Linux
    /// 6.7.
    Traced,
}

/// A fault at a page of the memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// Its number in the file.
    pub page: u64,
    /// Why it is one.
    pub kind: FaultKind,
    /// Whether it is a store, as far as the kernel knows.
    pub is_write: bool,
}

/// The mappings that a guest's memory slots show of one memory file. Absent pages are faults.
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
    /// Takes over the faults of these mappings, each with its offset in the file, in bytes.
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
            // SAFETY: nobody makes references into a `SlotMapping`, and this one is kept until the
            // descriptor is dropped.
            unsafe { guest.uffd.register(mapping.hva(), mapping.len(), modes) }?;
            let first = offset / PAGE_SIZE;
            guest.parts.push(Part { first, mapping });
        }
        Ok(guest)
    }

    /// The next access that waits; `None` if there is none now.
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

    /// Maps `count` pages that the file has, and wakes who waits for them. Those that are mapped
    /// stay as they are.
    ///
    /// # Errors
    /// The kernel's.
    pub fn map(&self, first: u64, count: u64, protection: Protection) -> io::Result<()> {
        let (mut page, end) = (first, first + count);
        while page < end {
            let at = self.hva(page);
            let len = self.in_one_mapping(page, end - page) * PAGE_SIZE;
            match self.uffd.map_present(at, len, protection) {
                // Less than all: the address space is changing under us, or the next one is mapped.
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

    /// Gives pages that the file has not zeroes, maps them, and wakes who waits for them; how many:
    /// fewer than `count` if the next one is in the file, or is mapped.
    ///
    /// # Errors
    /// The kernel's: no memory.
    pub fn zero(&self, first: u64, count: u64) -> io::Result<u64> {
        let mut done = 0;
        while done < count {
            let len = self.in_one_mapping(first + done, count - done) * PAGE_SIZE;
            match self.uffd.zero(self.hva(first + done), len) {
                // Less than all: the address space is changing under us, or the next one is there.
                Ok(bytes) => done += bytes / PAGE_SIZE,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Takes the mapping of `count` pages away; the file keeps them, and the protection its trace.
    /// From its return on no store reaches them from here.
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

    /// Protects a page that is mapped: the next store shows.
    ///
    /// # Errors
    /// The kernel's.
    pub fn protect(&self, page: u64) -> io::Result<()> {
        self.uffd
            .write_protect(self.hva(page), PAGE_SIZE, Protection::WriteProtected)
    }

    /// Which of up to 64 pages were protected when they were last mapped or since, and nobody has
    /// stored to from here after that; the first is the lowest bit. So it stays when a page is
    /// unmapped.
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

    /// The same of pages of one mapping, of which there is at least one.
    fn protected_in_one(&self, first: u64, count: u64) -> io::Result<u64> {
        let start = self.hva(first);
        // One that is not in between two that are.
        let mut runs = [[0; 3]; 32];
        let runs = scan::scan(&self.pagemap, start, count, Query::CLEAN, &mut runs)?;
        let page = |address: u64| (address - start.raw()) / PAGE_SIZE;
        Ok(runs.iter().fold(0, |found, &[from, end, _]| {
            // At least one page, at most all 64.
            let pages = u64::MAX >> (64 - (page(end) - page(from)));
            found | pages << page(from)
        }))
    }

    /// Whether the page is [`protected`](Self::protected).
    ///
    /// # Errors
    /// The kernel's.
    pub fn is_protected(&self, page: u64) -> io::Result<bool> {
        Ok(self.protected(page, 1)? != 0)
    }

    /// Lets accesses that wait for the page try again.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wake(&self, page: u64) -> io::Result<()> {
        self.uffd.wake(self.hva(page), PAGE_SIZE)
    }

    /// How many of `count` pages from `first` on lie in the mapping that `first` lies in: in the
    /// file mappings follow each other, and in the address space they do not.
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

/// Readable while an access waits whose message nobody has taken.
impl AsFd for GuestMapping {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}
