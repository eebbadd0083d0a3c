//! The system calls that an operation is made of, and the names by which their answers are known.
//!
//! UNSAFETY: `preadv`, `preadv2` and `pwritev` with addresses for which the caller answers.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::{opcode, squeue, types};
use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::Errno;

/// Bit of `user_data`: this is about a cancellation. Below it are the disk's slot, in the lowest 16
/// bits, and 16 bits for the ring. Above it the slot's operations are counted, so that the answer
/// to a cancellation is not taken for one about the slot's next operation.
pub(super) const CANCEL: u64 = 1 << 32;
/// Position in `user_data` of the count of the slot's operations.
pub(super) const USE_SHIFT: u32 = 33;

/// Data that a call moves: vectors in memory, and the first byte in the file, below 2^63 as the
/// size of a disk is, which was a file offset.
#[derive(Clone, Copy, Debug)]
pub(super) struct Vectors {
    first: *const libc::iovec,
    count: u32,
    offset: u64,
}

impl Vectors {
    /// Those in `all`.
    pub(super) fn new(all: &[libc::iovec], offset: u64) -> Self {
        Self {
            first: all.as_ptr(),
            count: all.len() as u32,
            offset,
        }
    }
}

/// A system call on the disk's file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    /// preadv.
    Read(Vectors),
    /// pwritev; `durable`: the data are stable when it ends.
    Write { data: Vectors, durable: bool },
    /// fdatasync.
    Sync,
    /// fallocate.
    Fallocate { mode: i32, offset: u64, len: u64 },
}

impl Call {
    /// The entry of an io_uring that carries it out on `fd`.
    pub(super) fn entry(self, fd: types::Fd) -> squeue::Entry {
        match self {
            Self::Read(data) => opcode::Readv::new(fd, data.first, data.count)
                .offset(data.offset)
                .build(),
            Self::Write { data, durable } => opcode::Writev::new(fd, data.first, data.count)
                .offset(data.offset)
                .rw_flags(if durable { libc::RWF_DSYNC } else { 0 })
                .build(),
            Self::Sync => opcode::Fsync::new(fd)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            Self::Fallocate { mode, offset, len } => opcode::Fallocate::new(fd, len)
                .offset(offset)
                .mode(mode)
                .build(),
        }
    }

    /// Carries it out in this thread. Returns the result that io_uring would return.
    ///
    /// # Safety
    /// The vectors, and what they point to, are valid and used by no other code during the call.
    pub(super) unsafe fn run(self, file: &File) -> i32 {
        match self {
            // SAFETY: as the caller promises.
            Self::Read(data) => unsafe { readv(file, data, 0) },
            Self::Write { data, durable } => {
                // SAFETY: as the caller promises.
                match (unsafe { writev(file, data) }, durable) {
                    (moved @ 1.., true) => match ended(fdatasync(file)) {
                        0 => moved,
                        failed => failed,
                    },
                    (moved, _) => moved,
                }
            }
            Self::Sync => ended(fdatasync(file)),
            Self::Fallocate { mode, offset, len } => {
                let mode = FallocateFlags::from_bits_retain(mode as u32);
                match fallocate(file, mode, offset, len) {
                    // What the host forbids it has not got, and there is another way.
                    Err(Errno::NOSYS | Errno::PERM | Errno::ACCESS) => -libc::EOPNOTSUPP,
                    done => ended(done),
                }
            }
        }
    }
}

/// preadv, with these flags if there are any: the bytes it has moved, fewer than 2^31, or its error
/// number, negative.
///
/// # Safety
/// The vectors, and what they point to, are valid and used by no other code during the call.
pub(super) unsafe fn readv(file: &File, data: Vectors, flags: i32) -> i32 {
    let (fd, count, offset) = (file.as_raw_fd(), data.count as i32, data.offset as i64);
    // SAFETY: as the caller promises.
    transferred(unsafe {
        match flags {
            0 => libc::preadv(fd, data.first, count, offset),
            flags => libc::preadv2(fd, data.first, count, offset, flags),
        }
    })
}

/// pwritev; answers as [`readv`].
///
/// # Safety
/// As that of [`readv`].
pub(super) unsafe fn writev(file: &File, data: Vectors) -> i32 {
    let (fd, count, offset) = (file.as_raw_fd(), data.count as i32, data.offset as i64);
    // SAFETY: as the caller promises.
    transferred(unsafe { libc::pwritev(fd, data.first, count, offset) })
}

fn transferred(moved: isize) -> i32 {
    match moved {
        0.. => moved as i32,
        _ => -io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO),
    }
}

fn ended(done: rustix::io::Result<()>) -> i32 {
    done.map_or_else(|errno| -errno.raw_os_error(), |()| 0)
}
