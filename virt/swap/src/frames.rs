//! Guest memory: a memory file, and the guest's mappings of it.
//!
//! The pager accesses a page through the file, never through a mapping, so that no access of its
//! own waits for a fault that it has to serve.

use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::OwnedFd;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::{Errno, pread, pwrite};
use uffd::GuestMapping;

use crate::residency::{Page, PageExamination, Protection};

/// Bytes of a page, of a block and of a slot.
pub const PAGE: usize = 4096;

/// Content of a page, aligned for I/O of devices past the page cache.
#[derive(Clone, PartialEq, Eq)]
#[repr(C, align(4096))]
pub struct Content([u8; PAGE]);

impl Default for Content {
    fn default() -> Self {
        Self([0; PAGE])
    }
}

impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "page of {:#010x}", crc(&self[..]))
    }
}

impl Deref for Content {
    type Target = [u8; PAGE];

    fn deref(&self) -> &[u8; PAGE] {
        &self.0
    }
}

impl DerefMut for Content {
    fn deref_mut(&mut self) -> &mut [u8; PAGE] {
        &mut self.0
    }
}

/// Returns the CRC that a page must have when it comes back.
pub fn crc(content: &[u8]) -> u32 {
    crc32fast::hash(content)
}

/// Compares a word at a time, and stops at the first that is not 0.
fn is_zero(content: &[u8]) -> bool {
    let (words, rest) = content.as_chunks::<64>();
    let are_zero = |word: &[u8; 64]| word.iter().fold(0, |all, byte| all | byte) == 0;
    words.iter().all(are_zero) && rest.iter().all(|byte| *byte == 0)
}

/// Pages whose uffd-wp bits are read at once.
const MARKS: u32 = 64;

/// Buffer into which pages are read, a few at a time, so that they are in the cache when their CRC
/// is computed. It begins with a page: to 16 bytes behind one, where the heap has large blocks, the
/// kernel's copy takes a twentieth to a sixth longer, and to 8 bytes behind five times as long (an
/// EPYC, `rep movsb`).
pub struct Buffer {
    bytes: Box<[u8]>,
    skip: usize,
}

impl Buffer {
    const PAGES: usize = 16;

    /// Returns the first `count` pages, or as many as it has.
    fn pages(&mut self, count: u32) -> &mut [u8] {
        let count = (count as usize).min(Self::PAGES);
        &mut self.bytes[self.skip..][..count * PAGE]
    }
}

impl Default for Buffer {
    fn default() -> Self {
        let bytes: Box<[u8]> = vec![0; (Self::PAGES + 1) * PAGE].into();
        let skip = bytes.as_ptr().align_offset(PAGE).min(PAGE);
        Self { bytes, skip }
    }
}

/// A guest's memory file and mapping. Pages are numbered as in the file.
#[derive(Debug)]
pub struct Frames {
    file: OwnedFd,
    guest: GuestMapping,
}

impl Frames {
    /// Creates it for this file; stores to the mapping are [`Traced`](uffd::Stores::Traced).
    pub fn new(file: OwnedFd, guest: GuestMapping) -> Self {
        Self { file, guest }
    }

    /// Returns the guest's mappings.
    pub fn guest(&self) -> &GuestMapping {
        &self.guest
    }

    /// Gives an absent page memory that holds zeroes.
    ///
    /// # Errors
    /// The kernel's: no memory.
    pub fn zero(&self, page: Page) -> io::Result<()> {
        self.write(page, &Content::default())
    }

    /// Gives absent pages memory that holds zeroes, and maps them writable for the guest: in one
    /// call for pages that have no memory yet.
    ///
    /// # Errors
    /// The kernel's: no memory.
    pub fn zero_and_map(&self, first: Page, count: u32) -> io::Result<()> {
        let mut done = 0;
        while done < count {
            // No more than was asked for.
            done += self
                .guest
                .zero((first.0 + done).into(), (count - done).into())? as u32;
            if done < count {
                // Content that is there must not be seen.
                let page = Page(first.0 + done);
                self.zero(page)?;
                self.map(page, 1, Protection::Writable)?;
                done += 1;
            }
        }
        Ok(())
    }

    /// Returns the next pages that take memory, of those from `at` to `end`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn next_present(&self, at: u32, end: u32) -> io::Result<Option<Range<u32>>> {
        if at >= end {
            return Ok(None);
        }
        let first = match seek(&self.file, SeekFrom::Data(offset(Page(at)))) {
            // No data from there on.
            Err(Errno::NXIO) => return Ok(None),
            other => other? / PAGE as u64,
        };
        let hole = seek(&self.file, SeekFrom::Hole(first * PAGE as u64))?;
        let run = first..hole.div_ceil(PAGE as u64).min(end.into());
        // No further than `end`.
        Ok((!run.is_empty()).then_some(run.start as u32..run.end as u32))
    }

    /// Unmaps `count` pages from the guest; their memory, and the PTE markers with their uffd-wp
    /// bits, stay.
    ///
    /// # Errors
    /// The kernel's.
    pub fn unmap(&self, first: Page, count: u32) -> io::Result<()> {
        self.guest.unmap(first.0.into(), count.into())
    }

    /// Frees the memory of `count` pages.
    ///
    /// # Errors
    /// The kernel's.
    pub fn punch(&self, first: Page, count: u32) -> io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let len = u64::from(count) * PAGE as u64;
        Ok(fallocate(&self.file, hole, offset(first), len)?)
    }

    /// Sets the content of a page, which gets memory of its own if it was absent.
    ///
    /// # Errors
    /// The kernel's: no memory.
    pub fn write(&self, page: Page, content: &Content) -> io::Result<()> {
        match pwrite(&self.file, &content[..], offset(page))? {
            PAGE => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Passes on the content of `count` pages, one by one, read by way of `buffer`; zeroes if they
    /// are absent, which gives them no memory.
    ///
    /// # Errors
    /// The kernel's; some pages may have been passed on.
    pub fn read_each(
        &self,
        first: Page,
        count: u32,
        buffer: &mut Buffer,
        mut tell: impl FnMut(Page, &[u8]),
    ) -> io::Result<()> {
        let (mut page, end) = (first.0, first.0 + count);
        while page < end {
            let bytes = buffer.pages(end - page);
            if pread(&self.file, &mut *bytes, offset(Page(page)))? != bytes.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            for content in bytes.chunks_exact(PAGE) {
                tell(Page(page), content);
                page += 1;
            }
        }
        Ok(())
    }

    /// Examines `count` pages that no vCPU and no device reaches:
    /// [`Command::Examine`](crate::residency::Command::Examine).
    ///
    /// # Errors
    /// The kernel's; some results may have been passed on.
    pub fn examine(
        &self,
        first: Page,
        count: u32,
        buffer: &mut Buffer,
        mut tell: impl FnMut(Page, PageExamination),
    ) -> io::Result<()> {
        let (mut at, end) = (first.0, first.0 + count);
        while at < end {
            let (first, count) = (at, (end - at).min(MARKS));
            let clean = self.guest.protected(first.into(), count.into())?;
            self.read_each(Page(first), count, buffer, |page, content| {
                let seen = PageExamination {
                    is_clean: clean >> (page.0 - first) & 1 != 0,
                    is_zero: is_zero(content),
                    crc: crc(content),
                };
                tell(page, seen);
            })?;
            at += count;
        }
        Ok(())
    }

    /// Maps `count` pages that are in memory for the guest, and wakes the accesses that wait for
    /// them.
    ///
    /// # Errors
    /// The kernel's.
    pub fn map(&self, first: Page, count: u32, protection: Protection) -> io::Result<()> {
        let (page, count) = (u64::from(first.0), u64::from(count));
        match protection {
            Protection::Writable => self.guest.map(page, count, uffd::Protection::Writable),
            Protection::Protected => {
                let protection = uffd::Protection::WriteProtected;
                self.guest.map(page, count, protection)
            }
            Protection::AsMarked => self.map_as_marked(first, count as u32),
        }
    }

    fn map_as_marked(&self, first: Page, count: u32) -> io::Result<()> {
        let (mut at, end) = (first.0, first.0 + count);
        while at < end {
            // They are not mapped, so no store can change the answer.
            let marks = self
                .guest
                .protected(at.into(), (end - at).min(MARKS).into())?;
            let (protection, alike) = match marks & 1 {
                0 => (uffd::Protection::Writable, marks.trailing_zeros()),
                _ => (uffd::Protection::WriteProtected, marks.trailing_ones()),
            };
            let alike = alike.min((end - at).min(MARKS));
            self.guest.map(at.into(), alike.into(), protection)?;
            at += alike;
        }
        Ok(())
    }
}

fn offset(page: Page) -> u64 {
    u64::from(page.0) * PAGE as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_are_distinguished_from_a_page_with_one_bit_set() {
        let mut content = Content::default();
        assert!(is_zero(&content[..]));
        for at in [0, 63, 64, 2047, PAGE - 1] {
            content[at] = 0x80;
            assert!(!is_zero(&content[..]), "{at}");
            content[at] = 0;
        }
        assert!(!is_zero(&[0, 0, 1]) && is_zero(&[0; 65]));
    }
}
