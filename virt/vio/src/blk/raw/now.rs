//! Operations that end at once: reads from the page cache, and anything on a file that lies in
//! memory.
//!
//! | file | reads | writes | flush |
//! |---|---|---|---|
//! | tmpfs, ramfs, memfd | preadv | pwritev | nothing to do |
//! | other, buffered | preadv2(RWF_NOWAIT) | the ring | the ring |
//! | O_DIRECT, block device | the ring | the ring | the ring |
//!
//! A file in memory has no device to wait for (a host that swaps it out delays its reader,
//! and would as much in the ring). RWF_NOWAIT reads what is cached and refuses the rest; where most
//! is refused the attempts are made rarer, up to one in 64 reads, so that a cold disk does not pay
//! for two system calls each time.

use std::fs::File;

use super::call::{self, Vectors};

/// File systems whose files are memory: the kernel's uapi `linux/magic.h`.
const IN_MEMORY: [u32; 2] = [0x0102_1994, 0x8584_58f6];

/// Highest rarity: one read in 2^`rarity` is tried.
const MAX_RARITY: u32 = 6;

/// Calls on one file that need not wait.
pub(super) struct Now {
    class: Class,
    /// Failed attempts make it rarer, successful ones restore it.
    rarity: u32,
    /// Reads since the last attempt.
    skipped: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    /// Nothing.
    Nothing,
    /// Reads that the page cache can answer.
    Cached,
    /// Everything that moves data.
    InMemory,
}

impl Now {
    /// For `file`; `is_regular` and not O_DIRECT, or nothing can.
    pub(super) fn new(file: &File, is_cached: bool) -> Self {
        let class = match is_cached {
            false => Class::Nothing,
            true if is_in_memory(file) => Class::InMemory,
            true => Class::Cached,
        };
        Self {
            class,
            rarity: 0,
            skipped: 0,
        }
    }

    /// Whether a flush has nothing to do.
    pub(super) fn flush_is_free(&self) -> bool {
        self.class == Class::InMemory
    }

    /// Reads at `offset` into all of `iovecs`, `len` bytes; `None` if that would wait, or failed in
    /// any way.
    pub(super) fn read(
        &mut self,
        file: &File,
        iovecs: &[libc::iovec],
        offset: u64,
        len: u32,
    ) -> Option<()> {
        let flags = match self.class {
            Class::Nothing => return None,
            Class::InMemory => 0,
            Class::Cached if self.skipped < (1 << self.rarity) - 1 => {
                self.skipped += 1;
                return None;
            }
            Class::Cached => libc::RWF_NOWAIT,
        };
        self.skipped = 0;
        // SAFETY: the vectors are the caller's own, and they point to memory that it has checked to
        // stay mapped during the call and that no code has references to.
        let moved = unsafe { call::readv(file, Vectors::new(iovecs, offset), flags) };
        if moved == len as i32 {
            self.rarity = 0;
            return Some(());
        }
        if moved == -libc::EOPNOTSUPP {
            self.class = Class::Nothing;
        }
        self.rarity = (self.rarity + 1).min(MAX_RARITY);
        None
    }

    /// Writes all of `iovecs`, `len` bytes, at `offset`; `None` if that would wait, or failed in
    /// any way.
    pub(super) fn write(
        &self,
        file: &File,
        iovecs: &[libc::iovec],
        offset: u64,
        len: u32,
    ) -> Option<()> {
        if self.class != Class::InMemory {
            return None;
        }
        // SAFETY: as in `read`.
        let moved = unsafe { call::writev(file, Vectors::new(iovecs, offset)) };
        (moved == len as i32).then_some(())
    }
}

/// Whether an operation on `file` may wait where io_uring asks it not to: file systems without
/// RWF_NOWAIT, such as FUSE and NFS, and devices above such devices. io_uring gives what waits to
/// its threads by itself, but not where the file also says that it can be polled, as FUSE's do.
pub(super) fn may_wait(file: &File) -> bool {
    let mut byte = [0u8];
    let vector = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    // SAFETY: one vector of ours, of one byte of ours.
    let moved = unsafe { call::readv(file, Vectors::new(&[vector], 0), libc::RWF_NOWAIT) };
    // With O_DIRECT one byte is misaligned, but RWF_NOWAIT is looked at first.
    moved == -libc::EOPNOTSUPP
}

fn is_in_memory(file: &File) -> bool {
    super::file_system(file).is_some_and(|magic| IN_MEMORY.contains(&magic))
}
