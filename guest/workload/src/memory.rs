//! Anonymous memory of this process in whole pages, and the ways in which programs fill and free
//! it.
//!
//! It lies in chunks, each a mapping of its own, so that one can be unmapped and mapped again; a
//! [`Range`] of pages never leaves its chunk ([`Memory::end_of_chunk`]). A page is first touched by
//! its user, not here.
//!
//! UNSAFETY: the standard library has neither mmap(2) nor madvise(2), and no promise that a whole
//! page is filled or copied by one REP instruction, which is what kernels and C libraries do and a
//! hypervisor may treat in a way of its own.

use std::arch::asm;
use std::io;
use std::ops::Range;
use std::{ptr, slice};

use crate::BLOCK;

/// Size of a page in bytes; equal to that of a block, since content is copied between the two.
pub const PAGE: usize = BLOCK;

/// Pages of a chunk: 2 MiB, the size of a huge page.
pub const CHUNK: usize = 512;

/// Advice to the kernel on huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Huge {
    /// No huge pages here: each page is touched alone.
    Never,
    /// Huge pages where they fit.
    Maybe,
}

/// Instruction or call that stores bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Means {
    /// `rep stosb`, `rep movsb`.
    RepBytes,
    /// `rep stosq`, `rep movsq`.
    RepWords,
    /// `rep movsq` or `rep stosq` from the end to the beginning, as `memmove` does where source and
    /// destination overlap.
    RepBackwards,
    /// The compiler's and C library's choice.
    Library,
}

impl Means {
    /// All.
    pub const ALL: [Means; 4] = [
        Means::RepBytes,
        Means::RepWords,
        Means::RepBackwards,
        Means::Library,
    ];
}

/// Memory in chunks.
#[derive(Debug)]
pub struct Memory {
    chunks: Vec<Chunk>,
    pages: usize,
}

impl Memory {
    /// Maps `pages` pages.
    ///
    /// # Errors
    /// The system's own.
    pub fn new(pages: usize, huge: Huge) -> io::Result<Self> {
        let chunks = (0..pages)
            .step_by(CHUNK)
            .map(|first| Chunk::map(CHUNK.min(pages - first), huge))
            .collect::<io::Result<_>>()?;
        Ok(Self { chunks, pages })
    }

    /// Returns the number of pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Returns the end of the chunk in which `page` lies.
    #[must_use]
    pub fn end_of_chunk(&self, page: usize) -> usize {
        ((page / CHUNK + 1) * CHUNK).min(self.pages)
    }

    /// Returns the pages of the chunk in which `page` lies.
    #[must_use]
    pub fn chunk_of(&self, page: usize) -> Range<usize> {
        page / CHUNK * CHUNK..self.end_of_chunk(page)
    }

    /// Returns the content of some pages, as it is in memory now.
    ///
    /// # Panics
    /// If they are not in one chunk.
    #[must_use]
    #[expect(unsafe_code, reason = "see the module's head")]
    pub fn bytes(&self, pages: Range<usize>) -> &[u8] {
        let (start, len) = self.place(pages);
        // SAFETY: no instruction at all. It keeps the compiler from answering with values that it
        // has seen stored: the caller checks whether memory still holds them.
        unsafe { asm!("/* {0} */", in(reg) start, options(nostack, preserves_flags)) };
        // SAFETY: `place` has checked that the bytes are inside a readable mapping, which lives as
        // long as its chunk, and whose bytes the kernel has initialized; while `self` is borrowed
        // nothing stores to it, since all stores borrow it mutably.
        unsafe { slice::from_raw_parts(start, len) }
    }

    /// Returns the content of some pages, to change.
    ///
    /// # Panics
    /// If they are not in one chunk.
    #[expect(unsafe_code, reason = "see the module's head")]
    pub fn bytes_mut(&mut self, pages: Range<usize>) -> &mut [u8] {
        let (start, len) = self.place(pages);
        // SAFETY: as in `bytes`; the mapping is writable and private, and `self` is borrowed
        // mutably for as long.
        unsafe { slice::from_raw_parts_mut(start, len) }
    }

    /// Fills pages with `word`, by one instruction or call. [`Means::RepBytes`] repeats its lowest
    /// byte.
    ///
    /// # Panics
    /// If they are not in one chunk.
    #[expect(unsafe_code, reason = "see the module's head")]
    pub fn set(&mut self, pages: Range<usize>, word: u64, means: Means) {
        let (start, len) = self.place(pages);
        match means {
            // SAFETY: stores `len` bytes from `start` on, upwards (the direction flag is clear
            // between instructions of Rust): inside a writable mapping of ours, as `place` has
            // checked, that `self` borrows mutably.
            Means::RepBytes => unsafe {
                asm!("rep stosb", inout("rcx") len => _, inout("rdi") start => _, in("al") word as u8,
                    options(nostack, preserves_flags));
            },
            // SAFETY: the same; `len` is a multiple of a page and so of eight.
            Means::RepWords => unsafe {
                asm!("rep stosq", inout("rcx") len / 8 => _, inout("rdi") start => _, in("rax") word,
                    options(nostack, preserves_flags));
            },
            // SAFETY: the same from the last word on, downwards; the direction flag is clear again
            // behind it.
            Means::RepBackwards => unsafe {
                asm!("std", "rep stosq", "cld", inout("rcx") len / 8 => _,
                    inout("rdi") start.add(len - 8) => _, in("rax") word, options(nostack));
            },
            Means::Library => {
                // SAFETY: as in `bytes_mut`.
                let bytes = unsafe { slice::from_raw_parts_mut(start, len) };
                for piece in bytes.as_chunks_mut::<8>().0 {
                    *piece = word.to_le_bytes();
                }
            }
        }
    }

    /// Copies pages to as many from `to` on, by one instruction or call.
    ///
    /// # Panics
    /// If either are not in one chunk, or one page is among both.
    #[expect(unsafe_code, reason = "see the module's head")]
    pub fn copy(&mut self, from: Range<usize>, to: usize, means: Means) {
        let to = to..to + from.len();
        assert!(
            from.end <= to.start || to.end <= from.start,
            "no page is copied onto itself: {from:?}, {to:?}"
        );
        let ((from, len), (to, _)) = (self.place(from), self.place(to));
        // SAFETY: both are inside mappings of ours, as `place` has checked, and `self` is borrowed
        // mutably; different pages do not overlap, as the assertion and separate chunks say.
        unsafe { transfer(from, to, len, means) };
    }

    /// Stores `data` by one instruction or call, from byte `at` of the first of some pages on.
    ///
    /// # Panics
    /// If the pages are not in one chunk, or `data` does not end in the last of them.
    #[expect(unsafe_code, reason = "see the module's head")]
    pub fn store(&mut self, pages: Range<usize>, at: usize, data: &[u8], means: Means) {
        let (start, len) = self.place(pages);
        assert!(
            at < PAGE && (len - PAGE + 1..=len).contains(&(at + data.len())),
            "{} bytes from {at} on end in the last of {len}",
            data.len()
        );
        // SAFETY: the destination is inside a mapping of ours, as `place` and the assertion have
        // checked, and `self` is borrowed mutably, so that `data` is none of it.
        unsafe { transfer(data.as_ptr(), start.add(at), data.len(), means) };
    }

    /// Frees pages (`MADV_DONTNEED`): they read as zeros from then on.
    ///
    /// # Errors
    /// The system's own.
    ///
    /// # Panics
    /// If they are not in one chunk.
    #[expect(unsafe_code, reason = "see the module's head")]
    pub fn give_back(&mut self, pages: Range<usize>) -> io::Result<()> {
        let (start, len) = self.place(pages);
        // SAFETY: whole pages of a private anonymous mapping of ours, as `place` has checked. Their
        // content becomes zeros, and no reference to it exists, since `self` is borrowed mutably.
        done(unsafe { libc::madvise(start.cast(), len, libc::MADV_DONTNEED) })
    }

    /// Replaces pages by a new mapping: they read as zeros from then on.
    ///
    /// # Errors
    /// The system's own; the pages are as they were.
    ///
    /// # Panics
    /// If they are not in one chunk.
    #[expect(unsafe_code, reason = "see the module's head")]
    pub fn replace(&mut self, pages: Range<usize>) -> io::Result<()> {
        let (start, len) = self.place(pages);
        let flags = libc::MAP_FIXED;
        // SAFETY: takes the place of whole pages of a mapping of ours, as `place` has checked, and
        // of nothing else; as for references, see `give_back`.
        let mapped = unsafe { map_at(start, len, flags) }?;
        assert_eq!(mapped, start, "MAP_FIXED maps where it is told to");
        Ok(())
    }

    /// Unmaps the chunk in which `page` lies, and maps as many new pages, which read as zeros, at
    /// an address of the kernel's choice.
    ///
    /// # Errors
    /// The system's own; the memory is not to be used any more.
    pub fn remap(&mut self, page: usize, huge: Huge) -> io::Result<()> {
        let chunk = &mut self.chunks[page / CHUNK];
        let pages = chunk.pages;
        *chunk = Chunk::NONE;
        *chunk = Chunk::map(pages, huge)?;
        Ok(())
    }

    /// Returns the address of pages, and their length in bytes.
    fn place(&self, pages: Range<usize>) -> (*mut u8, usize) {
        let chunk = &self.chunks[pages.start / CHUNK];
        let first = pages.start % CHUNK;
        let count = pages.len();
        assert!(
            count > 0 && first + count <= chunk.pages,
            "pages {pages:?} in one chunk"
        );
        (chunk.start.wrapping_add(first * PAGE), count * PAGE)
    }
}

/// Copies bytes by one instruction or call. Words are for multiples of eight bytes; others go as
/// bytes.
///
/// # Safety
/// `len` bytes are readable at `from`, and writable at `to`; no other code accesses the latter, and
/// the two do not overlap.
#[expect(unsafe_code, reason = "see the module's head")]
unsafe fn transfer(from: *const u8, to: *mut u8, len: usize, means: Means) {
    let has_words = len.is_multiple_of(8) && len > 0;
    match means {
        // SAFETY: reads and stores `len` bytes upwards (the direction flag is clear between
        // instructions of Rust): the caller's promise.
        Means::RepWords if has_words => unsafe {
            asm!("rep movsq", inout("rcx") len / 8 => _, inout("rdi") to => _, inout("rsi") from => _,
                options(nostack, preserves_flags));
        },
        // SAFETY: the same bytes from the last word on, downwards; the flag is clear again behind
        // it.
        Means::RepBackwards if has_words => unsafe {
            asm!("std", "rep movsq", "cld", inout("rcx") len / 8 => _,
                inout("rdi") to.add(len - 8) => _, inout("rsi") from.add(len - 8) => _, options(nostack));
        },
        // SAFETY: as for words.
        Means::RepBytes | Means::RepWords | Means::RepBackwards => unsafe {
            asm!("rep movsb", inout("rcx") len => _, inout("rdi") to => _, inout("rsi") from => _,
                options(nostack, preserves_flags));
        },
        // SAFETY: the caller's promise.
        Means::Library => unsafe { ptr::copy_nonoverlapping(from, to, len) },
    }
}

/// A private, anonymous mapping of `pages` pages from `start` on, readable and writable, that no
/// other chunk shows.
#[derive(Debug)]
struct Chunk {
    start: *mut u8,
    pages: usize,
}

impl Chunk {
    /// No mapping.
    const NONE: Self = Self {
        start: ptr::null_mut(),
        pages: 0,
    };

    #[expect(unsafe_code, reason = "see the module's head")]
    fn map(pages: usize, huge: Huge) -> io::Result<Self> {
        let len = pages * PAGE;
        // SAFETY: no fixed place: a new mapping where nothing was.
        let start = unsafe { map_at(ptr::null_mut(), len, 0) }?;
        let advice = match huge {
            Huge::Never => libc::MADV_NOHUGEPAGE,
            Huge::Maybe => libc::MADV_HUGEPAGE,
        };
        // SAFETY: the mapping above; changes no content. A kernel without huge pages refuses, and
        // has none either way.
        unsafe { libc::madvise(start.cast(), len, advice) };
        Ok(Self { start, pages })
    }
}

impl Drop for Chunk {
    #[expect(unsafe_code, reason = "see the module's head")]
    fn drop(&mut self) {
        if self.pages > 0 {
            // SAFETY: exactly what `map` has mapped; its owner goes, and references borrowed that.
            unsafe { libc::munmap(self.start.cast(), self.pages * PAGE) };
        }
    }
}

/// Maps `len` bytes of private anonymous memory.
///
/// # Safety
/// With `MAP_FIXED` the bytes at `start` belong to the caller, who gives up what they were.
#[expect(unsafe_code, reason = "see the module's head")]
unsafe fn map_at(start: *mut u8, len: usize, flags: libc::c_int) -> io::Result<*mut u8> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // Memory is reserved when it is touched, not here or by fork(2): a balloon may have taken it.
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | flags;
    // SAFETY: without MAP_FIXED nothing that exists is changed; with it, the caller's promise.
    let mapped = unsafe { libc::mmap(start.cast(), len, access, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(mapped.cast())
}

fn done(result: libc::c_int) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More than two chunks.
    const PAGES: usize = 2 * CHUNK + 3;

    /// Content of a page that [`memory`] fills.
    fn first(page: usize) -> u8 {
        page as u8 | 1
    }

    fn memory() -> Memory {
        let mut memory = Memory::new(PAGES, Huge::Never).unwrap();
        for page in 0..PAGES {
            memory.bytes_mut(page..page + 1).fill(first(page));
        }
        memory
    }

    fn has(memory: &Memory, page: usize, byte: u8) -> bool {
        let bytes = memory.bytes(page..page + 1);
        bytes.iter().all(|found| *found == byte)
    }

    #[test]
    fn chunks_end_where_they_say() {
        let memory = memory();
        assert_eq!(memory.end_of_chunk(0), CHUNK);
        assert_eq!(memory.end_of_chunk(CHUNK), 2 * CHUNK);
        assert_eq!(memory.chunk_of(PAGES - 1), 2 * CHUNK..PAGES);
        assert_eq!(memory.bytes(2 * CHUNK..PAGES).len(), 3 * PAGE);
    }

    #[test]
    #[should_panic(expected = "in one chunk")]
    fn pages_of_two_chunks_are_refused() {
        let _ = memory().bytes(CHUNK - 1..CHUNK + 1);
    }

    #[test]
    #[should_panic(expected = "in one chunk")]
    fn pages_past_the_end_are_refused() {
        let _ = memory().bytes(PAGES - 1..PAGES + 1);
    }

    #[test]
    fn pages_are_set_and_copied_alone_by_all_means() {
        let mut memory = memory();
        let in_order = u64::from_le_bytes([1, 2, 3, 4, 5, 6, 7, 8]);
        for (at, means) in (10..).step_by(10).zip(Means::ALL) {
            let copy = CHUNK + at;
            memory.set(at..at + 2, in_order, means);
            memory.copy(at..at + 2, copy, means);
            let unit: &[u8] = match means {
                Means::RepBytes => &[1],
                _ => &[1, 2, 3, 4, 5, 6, 7, 8],
            };
            for start in [at, copy] {
                let mut units = memory.bytes(start..start + 2).chunks(unit.len());
                assert!(units.all(|found| found == unit), "{means:?}");
                for beside in [start - 1, start + 2] {
                    assert!(has(&memory, beside, first(beside)), "{means:?}");
                }
            }
        }
    }

    #[test]
    fn bytes_are_stored_where_they_are_told_to_be_by_all_means() {
        for means in Means::ALL {
            for len in [1, 8, PAGE + 9, PAGE + 16] {
                let (mut memory, at) = (memory(), PAGE - 3);
                let data: Vec<u8> = (0..len).map(|n| n as u8 ^ 0x5a).collect();
                let pages = 20..20 + (at + len).div_ceil(PAGE);
                memory.store(pages.clone(), at, &data, means);
                let found = memory.bytes(pages.clone());
                assert_eq!(found[at..at + len], data, "{means:?}");
                assert!(found[..at].iter().all(|byte| *byte == first(20)));
                let last = first(pages.end - 1);
                assert!(found[at + len..].iter().all(|byte| *byte == last));
                assert!(has(&memory, 19, first(19)) && has(&memory, pages.end, first(pages.end)));
            }
        }
    }

    #[test]
    #[should_panic(expected = "end in the last")]
    fn bytes_past_the_pages_are_refused() {
        memory().store(0..2, PAGE - 1, &[0; PAGE + 2], Means::RepBytes);
    }

    #[test]
    #[should_panic(expected = "onto itself")]
    fn overlapping_copies_are_refused() {
        memory().copy(0..4, 3, Means::Library);
    }

    #[test]
    fn freed_pages_read_as_zeros_and_their_neighbours_do_not() {
        let mut memory = memory();
        memory.give_back(5..7).unwrap();
        memory.replace(CHUNK + 5..CHUNK + 7).unwrap();
        for gone in [5, 6, CHUNK + 5, CHUNK + 6] {
            assert!(has(&memory, gone, 0), "page {gone}");
        }
        for kept in [4, 7, CHUNK + 4, CHUNK + 7] {
            assert!(has(&memory, kept, first(kept)), "page {kept}");
        }
        memory.remap(CHUNK + 9, Huge::Maybe).unwrap();
        assert!(memory.chunk_of(CHUNK).all(|page| has(&memory, page, 0)));
        for kept in [CHUNK - 1, 2 * CHUNK] {
            assert!(has(&memory, kept, first(kept)), "page {kept}");
        }
        memory.bytes_mut(CHUNK..2 * CHUNK).fill(9);
        assert!(has(&memory, 2 * CHUNK - 1, 9));
    }
}
