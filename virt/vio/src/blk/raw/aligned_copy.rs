//! Memory that every storage takes, and copies in it of the blocks around a range of bytes.
//!
//! Bounds: a copy has two blocks more than the private buffer, of which there is a pool, or than a
//! block.

/// Memory that every storage takes.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
pub(super) struct Page([u8; Page::LEN]);

impl Page {
    pub(super) const LEN: usize = 4096;
    pub(super) const ZERO: Self = Self([0; Self::LEN]);

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// The whole blocks in which a range of bytes lies.
pub(super) struct AlignedCopy {
    pages: Vec<Page>,
    /// Offset in the file of the first block.
    start: u64,
    /// Bytes of all of them.
    len: u32,
    /// Bytes before the range.
    skip: u32,
    /// Bytes of the range.
    pub(super) data: u32,
}

impl AlignedCopy {
    pub(super) fn new(offset: u64, data: u32, block: u32) -> Self {
        let skip = (offset % u64::from(block)) as u32;
        let len = (skip + data).next_multiple_of(block);
        Self {
            pages: vec![Page::ZERO; (len as usize).div_ceil(Page::LEN)],
            start: offset - u64::from(skip),
            len,
            skip,
            data,
        }
    }

    /// Returns the offset of its blocks in the file, and their length, in bytes.
    pub(super) fn extent(&self) -> (u64, u32) {
        (self.start, self.len)
    }

    pub(super) fn vector(&mut self) -> libc::iovec {
        libc::iovec {
            iov_base: self.pages.as_mut_ptr().cast(),
            iov_len: self.len as usize,
        }
    }

    /// The range's bytes from `at` on: not empty, but perhaps only a part of the rest.
    pub(super) fn data(&mut self, at: u32) -> &mut [u8] {
        let from = (self.skip + at) as usize;
        let within = from % Page::LEN;
        let left = (self.data - at) as usize;
        let page = &mut self.pages[from / Page::LEN].0[within..];
        let len = page.len().min(left);
        &mut page[..len]
    }

    pub(super) fn zero(&mut self) {
        let mut at = 0;
        while at < self.data {
            let piece = self.data(at);
            piece.fill(0);
            at += piece.len() as u32;
        }
    }
}
