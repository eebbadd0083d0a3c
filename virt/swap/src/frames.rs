//! The memory itself: a memory file, and what a guest has mapped of it.
//!
//! The pager reaches a page through the file, never through a mapping: nothing that it does can wait for itself.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{pread, pwrite};
use uffd::GuestMapping;

use crate::book::{Page, Protection, Seen};

/// Bytes of a page, of a block and of a slot.
pub const PAGE: usize = 4096;

/// What a page holds, where devices may read and write it past the page cache.
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
        write!(f, "page of {:#010x}", crc(self))
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

/// The check sum that a page has to have when it comes back.
pub fn crc(content: &Content) -> u32 {
    crc32fast::hash(&content[..])
}

/// A guest's memory file and mapping. Pages are numbered as in the file.
#[derive(Debug)]
pub struct Frames {
    file: OwnedFd,
    guest: GuestMapping,
}

impl Frames {
    /// Of this file; stores to the mapping are [`Traced`](uffd::Stores::Traced).
    pub fn new(file: OwnedFd, guest: GuestMapping) -> Self {
        Self { file, guest }
    }

    /// What the guest has mapped.
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

    /// Gives absent pages memory that holds zeroes, and maps them writable for the guest: both at once where nobody has given them
    /// memory yet.
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
                // What is there is not to be seen.
                let page = Page(first.0 + done);
                self.zero(page)?;
                self.map(page, 1, Protection::Writable)?;
                done += 1;
            }
        }
        Ok(())
    }

    /// Takes `count` pages from the guest; their memory, and the markers, stay.
    ///
    /// # Errors
    /// The kernel's.
    pub fn unmap(&self, first: Page, count: u32) -> io::Result<()> {
        self.guest.unmap(first.0.into(), count.into())
    }

    /// Gives the memory of `count` pages back.
    ///
    /// # Errors
    /// The kernel's.
    pub fn punch(&self, first: Page, count: u32) -> io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let len = u64::from(count) * PAGE as u64;
        Ok(fallocate(&self.file, hole, offset(first), len)?)
    }

    /// What a page holds; zeroes if it is absent, which gives it no memory.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read(&self, page: Page, into: &mut Content) -> io::Result<()> {
        match pread(&self.file, &mut into[..], offset(page))? {
            PAGE => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Lets a page hold this, with memory of its own if it was absent.
    ///
    /// # Errors
    /// The kernel's: no memory.
    pub fn write(&self, page: Page, content: &Content) -> io::Result<()> {
        match pwrite(&self.file, &content[..], offset(page))? {
            PAGE => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// What a page is that nobody can reach: [`Command::Examine`](crate::book::Command::Examine).
    ///
    /// # Errors
    /// The kernel's.
    pub fn examine(&self, page: Page) -> io::Result<Seen> {
        let mut content = Content::default();
        self.read(page, &mut content)?;
        Ok(Seen {
            is_clean: self.guest.is_protected(u64::from(page.0))?,
            is_zero: content.iter().all(|byte| *byte == 0),
            crc: crc(&content),
        })
    }

    /// Maps `count` pages that are in memory for the guest, and wakes who waits for them.
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
            // They are not mapped: nobody can change the answer.
            Protection::AsMarked => (page..page + count).try_for_each(|page| {
                let protection = match self.guest.is_protected(page)? {
                    true => uffd::Protection::WriteProtected,
                    false => uffd::Protection::Writable,
                };
                self.guest.map(page, 1, protection)
            }),
        }
    }
}

fn offset(page: Page) -> u64 {
    u64::from(page.0) * PAGE as u64
}
