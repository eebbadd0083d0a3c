//! Who carries a disk's calls out: the ring of the thread that polls it, or threads of the disk's own where the host has no
//! io_uring for us.
//!
//! Both are asked in the same words ([`Call`]) and answer in the same: a number for each call, and the kernel's result. So
//! everything above (the order of syncs, the ways to free and zero a range, short transfers, cancellation) is one code.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::{opcode, squeue, types};

use super::ring::Seat;
use super::threads::Threads;
use super::trial::RingRefusal;

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

/// Who carries calls out.
pub(super) enum Engine {
    /// The ring of the polling thread, in which a place is taken by the first call.
    Ring(Option<Seat>),
    /// Threads, since the host refuses something of rings.
    Threads(Threads, RingRefusal),
}

impl Engine {
    /// To be called before a call is pushed.
    ///
    /// # Errors
    /// No ring is to be had now.
    pub(super) fn prepare(&mut self, depth: u32) -> io::Result<()> {
        if let Self::Ring(seat @ None) = self {
            *seat = Some(Seat::take(depth)?);
        }
        Ok(())
    }

    /// Queues a call, answered as `user_data`. `waits`: it may wait, so the thread that enters the ring is not to begin it.
    ///
    /// # Safety
    /// What the call points to stays valid, and is used by no other code, until it is answered.
    pub(super) unsafe fn push(
        &mut self,
        file: &Arc<File>,
        call: Call,
        waits: bool,
        user_data: u64,
    ) {
        match self {
            Self::Ring(seat) => {
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

    /// Asks to stop the call that is answered as `user_data`. A refusal is answered as `user_data` with the bit of cancellations.
    pub(super) fn cancel(&mut self, user_data: u64) {
        match self {
            Self::Ring(Some(seat)) => seat.cancel(user_data),
            Self::Ring(None) => {}
            Self::Threads(threads, _) => threads.cancel(user_data),
        }
    }

    /// Starts what is queued.
    pub(super) fn flush(&mut self) {
        match self {
            Self::Ring(Some(seat)) => seat.flush(),
            Self::Ring(None) => {}
            Self::Threads(threads, _) => threads.flush(),
        }
    }

    /// Has the kernel look once more for what has ended.
    pub(super) fn enter(&mut self) {
        match self {
            Self::Ring(Some(seat)) => seat.enter(),
            Self::Ring(None) => {}
            Self::Threads(threads, _) => threads.flush(),
        }
    }

    /// Replaces `answers` by what has been answered since the last time: `user_data` and result.
    pub(super) fn collect(&mut self, answers: &mut Vec<(u64, i32)>) {
        match self {
            Self::Ring(Some(seat)) => seat.collect(answers),
            Self::Ring(None) => answers.clear(),
            Self::Threads(threads, _) => threads.collect(answers),
        }
    }

    /// Whether there is anything to start or to collect.
    pub(super) fn has_news(&self) -> bool {
        match self {
            Self::Ring(seat) => seat.as_ref().is_some_and(Seat::has_news),
            Self::Threads(threads, _) => threads.has_news(),
        }
    }

    /// From now on answers make the descriptor readable.
    pub(super) fn arm(&mut self) {
        match self {
            Self::Ring(Some(seat)) => seat.arm(),
            Self::Ring(None) => {}
            Self::Threads(threads, _) => threads.arm(),
        }
    }

    /// The descriptor is not needed; a poll follows.
    pub(super) fn disarm(&mut self) {
        match self {
            Self::Ring(Some(seat)) => seat.disarm(),
            Self::Ring(None) => {}
            Self::Threads(threads, _) => threads.disarm(),
        }
    }

    /// What becomes readable.
    pub(super) fn wake_fd(&self) -> Option<RawFd> {
        match self {
            Self::Ring(seat) => seat.as_ref().map(Seat::wake_fd),
            Self::Threads(threads, _) => Some(threads.wake_fd()),
        }
    }

    /// Another thread will poll from now on; nothing is in flight.
    pub(super) fn rebind(&mut self) {
        if let Self::Ring(seat) = self {
            *seat = None;
        }
    }

    /// Something is in flight that is not waited for, and what it points to is leaked.
    pub(super) fn abandon(&mut self) {
        if let Self::Threads(threads, _) = self {
            threads.abandon();
        }
    }

    /// Why it is not a ring.
    pub(super) fn without_ring(&self) -> Option<&RingRefusal> {
        match self {
            Self::Ring(_) => None,
            Self::Threads(_, why) => Some(why),
        }
    }
}
