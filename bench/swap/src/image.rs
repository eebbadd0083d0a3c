//! Content of absent pages: one page of content for each block, and a disk that copies them without
//! delay.
//!
//! The bare loops fill a page by the same copy, so that the comparison does not include the latency
//! of a disk.

use std::os::fd::RawFd;
use std::sync::Arc;

use guest_mem::{Gpa, GuestRam, KeepAlive, PAGE_SIZE, PhysMem};
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece, Transfer};

const PAGE: usize = PAGE_SIZE as usize;

/// Distance on the disk between the blocks of consecutive pages, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Blocks are contiguous: a fault also brings in the following pages.
    SideBySide = 1,
    /// Blocks are apart: a fault brings in one page.
    Apart = 64,
}

/// The contents of all pages.
#[derive(Clone)]
pub struct Image {
    content: Arc<[u8]>,
    layout: Layout,
}

impl Image {
    /// Creates the contents of `pages` pages.
    pub fn new(pages: usize, layout: Layout) -> Self {
        let page = |number: usize| {
            let word = (1 + number as u64) * 0x9e37_79b9_7f4a_7c15;
            (0..PAGE / 8).flat_map(move |at| word.rotate_left(at as u32 % 61).to_ne_bytes())
        };
        Self {
            content: (0..pages).flat_map(page).collect(),
            layout,
        }
    }

    /// Returns the content of a page.
    pub fn page(&self, number: usize) -> &[u8] {
        &self.content[number * PAGE..][..PAGE]
    }

    /// Returns the first byte of a page.
    pub fn first_byte(&self, number: usize) -> u8 {
        self.content[number * PAGE]
    }

    /// Returns a page's position on the disk, in bytes.
    pub fn offset(&self, number: usize) -> u64 {
        number as u64 * self.layout as u64 * PAGE_SIZE
    }

    fn number(&self, offset: u64) -> usize {
        (offset / PAGE_SIZE / self.layout as u64) as usize
    }
}

/// A disk with these blocks. A request is complete when it is submitted; the next poll returns its
/// completion.
pub struct Disk {
    image: Image,
    ram: GuestRam,
    done: Vec<Completion>,
}

impl Disk {
    /// Creates a disk for guest memory that begins at address 0.
    pub fn new(image: Image, ram: GuestRam) -> Self {
        Self {
            image,
            ram,
            done: Vec::new(),
        }
    }
}

impl BlockIo for Disk {
    fn capacity(&self) -> u64 {
        self.image.offset(self.image.content.len() / PAGE)
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn depth(&self) -> u32 {
        64
    }

    fn transfer(&self) -> Transfer {
        Transfer::Direct
    }

    fn attach(&mut self, _: KeepAlive) {}

    fn detach(&mut self) {}

    fn reserve(&mut self, _: u32, _: u32) -> bool {
        unreachable!("data move straight")
    }

    fn buffer(&mut self, _: u32, _: u32) -> &mut [u8] {
        unreachable!("data move straight")
    }

    fn unreserve(&mut self, _: u32) {}

    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]) {
        let Op::Read { offset, .. } = op else {
            panic!("nothing is written here: {op:?}");
        };
        let mut number = self.image.number(offset);
        let base = self.ram.regions()[0].hva;
        for piece in pieces {
            let gpa = Gpa::new(piece.hva.raw() - base.raw());
            let pages = piece.len as usize / PAGE;
            let bytes = &self.image.content[number * PAGE..][..pages * PAGE];
            self.ram.write(gpa, bytes).expect("a piece of its memory");
            number += pages;
        }
        self.done.push(Completion {
            slot,
            outcome: Outcome::Done,
        });
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
    }

    fn has_completions(&mut self) -> bool {
        !self.done.is_empty()
    }

    fn cancel(&mut self, _: u32) {
        unreachable!("nobody cancels")
    }

    fn arm(&mut self) {}

    fn disarm(&mut self) {}

    fn wake_fds(&self, _: &mut Vec<RawFd>) {}
}
