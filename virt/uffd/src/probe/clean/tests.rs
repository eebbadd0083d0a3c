//! A correct kernel passes, and a kernel that lies about a single thing is found out.

use std::cell::RefCell;

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    NeverMappedReadsProtected,
    ContinueRefusesProtection,
    ContinueForgetsProtection,
    ContinueForgetsProtectionOverATrace,
    UnmapForgets,
    PunchForgets,
    StoreIsRefused,
    StoreIsHeard,
    StoreGoesElsewhere,
    StoreLeavesProtection,
    UnmappedReadsProtected,
    WriteProtectForgets,
    WritableKeepsTheTrace,
    ZeroKeepsTheTrace,
    ZeroDoesNothing,
}

/// A page under a kernel with at most one fault.
#[derive(Debug, Default)]
struct Page {
    value: Option<u64>,
    is_mapped: bool,
    was_mapped: bool,
    marker: bool,
    was_stored_to: bool,
    fault: bool,
}

struct Kernel {
    lie: Option<Lie>,
    page: RefCell<Page>,
}

impl Kernel {
    fn new(lie: Option<Lie>) -> Self {
        Self {
            lie,
            page: RefCell::default(),
        }
    }

    fn tells(&self, lie: Lie) -> bool {
        self.lie == Some(lie)
    }
}

fn refused<T>() -> io::Result<T> {
    Err(io::ErrorKind::InvalidInput.into())
}

impl Pages for Kernel {
    fn fill(&self, _: u64, value: u64) -> io::Result<()> {
        self.page.borrow_mut().value = Some(value);
        Ok(())
    }

    fn value(&self, _: u64) -> io::Result<u64> {
        Ok(self.page.borrow().value.unwrap_or(0))
    }

    fn store(&self, _: u64, value: u64) -> io::Result<()> {
        let mut page = self.page.borrow_mut();
        if !page.is_mapped || self.tells(Lie::StoreIsRefused) {
            return refused();
        }
        if !self.tells(Lie::StoreGoesElsewhere) {
            page.value = Some(value);
        }
        page.fault = self.tells(Lie::StoreIsHeard);
        page.was_stored_to = true;
        page.marker &= self.tells(Lie::StoreLeavesProtection);
        Ok(())
    }

    fn map(&self, _: u64, protection: Protection) -> io::Result<()> {
        let mut page = self.page.borrow_mut();
        if page.value.is_none() {
            return refused();
        }
        page.is_mapped = true;
        page.was_mapped = true;
        page.was_stored_to = false;
        match protection {
            Protection::WriteProtected if self.tells(Lie::ContinueRefusesProtection) => {
                return refused();
            }
            Protection::WriteProtected => {
                let forgets = match page.marker {
                    true => Lie::ContinueForgetsProtectionOverATrace,
                    false => Lie::ContinueForgetsProtection,
                };
                page.marker = !self.tells(forgets);
            }
            Protection::Writable => page.marker &= self.tells(Lie::WritableKeepsTheTrace),
        }
        Ok(())
    }

    fn zero(&self, _: u64) -> io::Result<bool> {
        let mut page = self.page.borrow_mut();
        if page.value.is_some() || self.tells(Lie::ZeroDoesNothing) {
            return Ok(false);
        }
        page.value = Some(0);
        page.is_mapped = true;
        page.marker &= self.tells(Lie::ZeroKeepsTheTrace);
        Ok(true)
    }

    fn protect(&self, _: u64) -> io::Result<()> {
        let mut page = self.page.borrow_mut();
        page.marker = !self.tells(Lie::WriteProtectForgets);
        Ok(())
    }

    fn unmap(&self, _: u64) -> io::Result<()> {
        let mut page = self.page.borrow_mut();
        page.is_mapped = false;
        page.marker &= !self.tells(Lie::UnmapForgets);
        Ok(())
    }

    fn punch(&self, _: u64) -> io::Result<()> {
        let mut page = self.page.borrow_mut();
        page.value = None;
        page.marker &= !self.tells(Lie::PunchForgets);
        Ok(())
    }

    fn is_protected(&self, _: u64) -> io::Result<bool> {
        let page = self.page.borrow();
        let lies = match (page.was_mapped, page.is_mapped) {
            (false, _) => self.tells(Lie::NeverMappedReadsProtected),
            (_, false) => page.was_stored_to && self.tells(Lie::UnmappedReadsProtected),
            _ => false,
        };
        Ok(page.marker || lies)
    }

    fn has_fault(&self) -> io::Result<bool> {
        Ok(self.page.borrow().fault)
    }
}

#[test]
fn a_kernel_that_tells_the_truth_passes() {
    assert_eq!(check(&Kernel::new(None)), Ok(()));
}

#[test]
fn each_lie_is_found_and_named() {
    for (lie, words) in [
        (Lie::NeverMappedReadsProtected, "never mapped"),
        (Lie::ContinueRefusesProtection, "is refused"),
        (Lie::ContinueForgetsProtection, "by UFFDIO_CONTINUE"),
        (
            Lie::ContinueForgetsProtectionOverATrace,
            "write-protected again",
        ),
        (Lie::UnmapForgets, "MADV_DONTNEED makes"),
        (Lie::PunchForgets, "punched hole makes"),
        (Lie::StoreIsRefused, "a store to a page"),
        (Lie::StoreIsHeard, "waits for an answer"),
        (Lie::StoreGoesElsewhere, "not in its memory file"),
        (
            Lie::StoreLeavesProtection,
            "stored to reads as write-protected still",
        ),
        (Lie::UnmappedReadsProtected, "once it is unmapped"),
        (Lie::WriteProtectForgets, "by UFFDIO_WRITEPROTECT"),
        (Lie::WritableKeepsTheTrace, "mapped writable after"),
        (Lie::ZeroKeepsTheTrace, "given zeroes after"),
        (Lie::ZeroDoesNothing, "does not fill"),
    ] {
        let said = check(&Kernel::new(Some(lie))).unwrap_err();
        assert!(said.contains(words), "{lie:?}: {said}");
    }
}
