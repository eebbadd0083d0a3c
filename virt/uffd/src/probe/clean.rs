//! Clean evidence: `PAGEMAP_SCAN` lists a page that has not been stored to
//! ([`Query::CLEAN`](crate::scan::Query::CLEAN)).
//!
//! The evidence must be positive. A page that was stored to, or about which nothing is known, must
//! not be listed, mapped or not: a pager would drop it. A page that was mapped protected and never
//! stored to must be listed, mapped or not: otherwise a pager writes it out needlessly.

use std::io;

use super::Trial;
use crate::Protection;

/// Pages of a memory file, and a mapping of them. None is in the file at first.
pub(super) trait Pages {
    /// Writes `value` to the page in the file.
    fn fill(&self, page: u64, value: u64) -> io::Result<()>;
    /// Returns the page's value in the file.
    fn value(&self, page: u64) -> io::Result<u64>;
    /// Stores to the mapping. Fails where a guest would wait.
    fn store(&self, page: u64, value: u64) -> io::Result<()>;
    /// Maps the page that the file has.
    fn map(&self, page: u64, protection: Protection) -> io::Result<()>;
    /// Fills an absent page with zeroes and maps it writable; returns whether it was absent.
    fn zero(&self, page: u64) -> io::Result<bool>;
    /// Protects a mapped page.
    fn protect(&self, page: u64) -> io::Result<()>;
    /// Unmaps the page.
    fn unmap(&self, page: u64) -> io::Result<()>;
    /// Removes the page from the file.
    fn punch(&self, page: u64) -> io::Result<()>;
    /// Returns whether it is listed.
    fn is_protected(&self, page: u64) -> io::Result<bool>;
    /// Returns whether an access waits for an answer.
    fn has_fault(&self) -> io::Result<bool>;
}

/// Goes through the states of a page that is paged.
///
/// # Errors
/// The first result that is wrong.
pub(super) fn check(pages: &impl Pages) -> Result<(), String> {
    const PAGE: u64 = Trial::FIRST;
    let listed = |expected: bool, otherwise: &str| match pages.is_protected(PAGE) {
        Ok(found) if found == expected => Ok(()),
        Ok(_) => Err(format!("{otherwise} (PAGEMAP_SCAN)")),
        Err(error) => Err(format!("PAGEMAP_SCAN is refused: {error}")),
    };
    let done = |result: io::Result<()>, step: &str| {
        result.map_err(|error| format!("{step} is refused: {error}"))
    };
    let fill = |value| done(pages.fill(PAGE, value), "writing to a memory file");
    let unmap = || done(pages.unmap(PAGE), "MADV_DONTNEED of a memory file's page");
    let punch = || done(pages.punch(PAGE), "FALLOC_FL_PUNCH_HOLE of a memory file");
    let map_protected = || {
        let mapped = pages.map(PAGE, Protection::WriteProtected);
        done(mapped, "UFFDIO_CONTINUE with write protection")
    };
    let map_writable = || done(pages.map(PAGE, Protection::Writable), "UFFDIO_CONTINUE");

    listed(
        false,
        "a page that was never mapped reads as write-protected",
    )?;
    fill(1)?;
    map_protected()?;
    listed(
        true,
        "a page mapped write-protected by UFFDIO_CONTINUE does not read so",
    )?;
    unmap()?;
    listed(
        true,
        "MADV_DONTNEED makes a write-protected page read as stored to",
    )?;
    punch()?;
    fill(1)?;
    listed(
        true,
        "a punched hole makes a write-protected page read as stored to",
    )?;

    map_protected()?;
    listed(true, "a page mapped write-protected again does not read so")?;
    done(
        pages.store(PAGE, 2),
        "a store to a page mapped write-protected",
    )?;
    match pages.has_fault() {
        Ok(false) => {}
        Ok(true) => return Err("a store to a write-protected page waits for an answer".into()),
        Err(error) => return Err(format!("userfaultfd cannot be read: {error}")),
    }
    match pages.value(PAGE) {
        Ok(2) => {}
        Ok(_) => return Err("a store to a mapped page is not in its memory file".into()),
        Err(error) => return Err(format!("reading a memory file is refused: {error}")),
    }
    listed(
        false,
        "a page that was stored to reads as write-protected still",
    )?;
    unmap()?;
    listed(
        false,
        "a page that was stored to reads as write-protected once it is unmapped",
    )?;

    map_writable()?;
    done(pages.protect(PAGE), "UFFDIO_WRITEPROTECT of a mapped page")?;
    listed(
        true,
        "a page write-protected by UFFDIO_WRITEPROTECT does not read so",
    )?;
    unmap()?;
    map_writable()?;
    listed(
        false,
        "a page mapped writable after it was write-protected reads as write-protected still",
    )?;

    done(pages.protect(PAGE), "UFFDIO_WRITEPROTECT of a mapped page")?;
    unmap()?;
    punch()?;
    match pages.zero(PAGE) {
        Ok(true) => {}
        Ok(false) => return Err("UFFDIO_ZEROPAGE does not fill a page that was punched".into()),
        Err(error) => return Err(format!("UFFDIO_ZEROPAGE is refused: {error}")),
    }
    listed(
        false,
        "a page given zeroes after it was write-protected reads as write-protected still",
    )
}

#[cfg(test)]
mod tests;
