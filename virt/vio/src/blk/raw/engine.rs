//! The engine that carries a disk's calls out: the io_uring of the thread that polls the disk, or
//! threads of the disk's own where the host refuses io_uring.
//!
//! Both take the same calls ([`Call`]) and answer alike: with the number of the call (`user_data`)
//! and the kernel's result. So everything above them (the order of syncs, the ways to free and zero
//! a range, short transfers, cancellation) is written once.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::{opcode, squeue, types};

use super::threads::Threads;
use super::uring::{Seat, UringRefusal};

/// Bit of `user_data`: this is about a cancellation. Below it are the disk's slot, in the lowest 16
/// bits, and 16 bits for the ring. Above it the slot's operations are counted, so that the answer
/// to a cancellation is not taken for one about the slot's next operation.
pub(super) const CANCEL: u64 = 1 << 32;
/// Position in `user_data` of the count of the slot's operations.
pub(super) const USE_SHIFT: u32 = 33;

/// A system call on the disk's file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    /// preadv.
    Read {
        vectors: *const libc::iovec,
        count: u32,
        offset: u64,
    },
    /// pwritev; `durable`: the data are stable when it ends.
    Write {
        vectors: *const libc::iovec,
        count: u32,
        offset: u64,
        durable: bool,
    },
    /// fdatasync.
    Sync,
    /// fallocate.
    Fallocate { mode: i32, offset: u64, len: u64 },
}

impl Call {
    fn entry(self, file: &File) -> squeue::Entry {
        let fd = types::Fd(file.as_raw_fd());
        match self {
            Self::Read {
                vectors,
                count,
                offset,
            } => opcode::Readv::new(fd, vectors, count)
                .offset(offset)
                .build(),
            Self::Write {
                vectors,
                count,
                offset,
                durable,
            } => opcode::Writev::new(fd, vectors, count)
                .offset(offset)
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
}

/// The engine of one disk.
pub(super) enum Engine {
    /// The io_uring of the polling thread, in which a place is taken by the first call.
    Uring(Option<Seat>),
    /// Threads, since the host refuses io_uring or a part of it.
    Threads(Threads, UringRefusal),
}

impl Engine {
    /// To be called before a call is pushed.
    ///
    /// # Errors
    /// No ring is to be had now.
    pub(super) fn prepare(&mut self, depth: u32) -> io::Result<()> {
        if let Self::Uring(seat @ None) = self {
            *seat = Some(Seat::take(depth)?);
        }
        Ok(())
    }

    /// Queues a call, answered as `user_data`. `waits`: it may wait, so the thread that enters the
    /// ring is not to begin it.
    ///
    /// # Safety
    /// The memory that the call points to stays valid, and is used by no other code, until the call
    /// is answered.
    pub(super) unsafe fn push(
        &mut self,
        file: &Arc<File>,
        call: Call,
        waits: bool,
        user_data: u64,
    ) {
        match self {
            Self::Uring(seat) => {
                let seat = seat.as_ref().expect("prepared before anything is pushed");
                let flags = match waits {
                    true => squeue::Flags::ASYNC,
                    false => squeue::Flags::empty(),
                };
                // SAFETY: as the caller promises.
                unsafe { seat.push(call.entry(file).flags(flags), user_data) };
            }
            // SAFETY: as the caller promises.
            Self::Threads(threads, _) => unsafe { threads.push(call, user_data) },
        }
    }

    /// Asks to stop the call that is answered as `user_data`. A refusal is answered as `user_data`
    /// with [`CANCEL`] set.
    pub(super) fn cancel(&mut self, user_data: u64) {
        match self {
            Self::Uring(Some(seat)) => seat.cancel(user_data),
            Self::Uring(None) => {}
            Self::Threads(threads, _) => threads.cancel(user_data),
        }
    }

    /// Starts what is queued.
    pub(super) fn flush(&mut self) {
        match self {
            Self::Uring(Some(seat)) => seat.flush(),
            Self::Uring(None) => {}
            Self::Threads(threads, _) => threads.flush(),
        }
    }

    /// Has the kernel check once more for calls that have ended.
    pub(super) fn enter(&mut self) {
        match self {
            Self::Uring(Some(seat)) => seat.enter(),
            Self::Uring(None) => {}
            Self::Threads(threads, _) => threads.flush(),
        }
    }

    /// Replaces `answers` by what has been answered since the last time: `user_data` and result.
    pub(super) fn collect(&mut self, answers: &mut Vec<(u64, i32)>) {
        match self {
            Self::Uring(Some(seat)) => seat.collect(answers),
            Self::Uring(None) => answers.clear(),
            Self::Threads(threads, _) => threads.collect(answers),
        }
    }

    /// Whether there is anything to start or to collect.
    pub(super) fn has_events(&self) -> bool {
        match self {
            Self::Uring(seat) => seat.as_ref().is_some_and(Seat::has_events),
            Self::Threads(threads, _) => threads.has_events(),
        }
    }

    /// From now on answers make the descriptor readable.
    pub(super) fn arm(&mut self) {
        match self {
            Self::Uring(Some(seat)) => seat.arm(),
            Self::Uring(None) => {}
            Self::Threads(threads, _) => threads.arm(),
        }
    }

    /// The descriptor is not needed; a poll follows.
    pub(super) fn disarm(&mut self) {
        match self {
            Self::Uring(Some(seat)) => seat.disarm(),
            Self::Uring(None) => {}
            Self::Threads(threads, _) => threads.disarm(),
        }
    }

    /// The descriptor that answers make readable while it is armed.
    pub(super) fn wake_fd(&self) -> Option<RawFd> {
        match self {
            Self::Uring(seat) => seat.as_ref().map(Seat::wake_fd),
            Self::Threads(threads, _) => Some(threads.wake_fd()),
        }
    }

    /// Another thread will poll from now on; nothing is in flight.
    pub(super) fn rebind(&mut self) {
        if let Self::Uring(seat) = self {
            *seat = None;
        }
    }

    /// Gives up waiting for calls in flight; the memory that they point to is leaked.
    pub(super) fn abandon(&mut self) {
        if let Self::Threads(threads, _) = self {
            threads.abandon();
        }
    }

    /// The host's refusal of io_uring, where threads carry the calls out.
    pub(super) fn uring_refusal(&self) -> Option<&UringRefusal> {
        match self {
            Self::Uring(_) => None,
            Self::Threads(_, why) => Some(why),
        }
    }
}
