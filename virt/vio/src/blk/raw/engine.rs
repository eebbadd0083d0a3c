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

use io_uring::{squeue, types};

use super::call::Call;
use super::threads::Threads;
use super::uring::{UringRefusal, UringShare};

/// The engine of one disk.
pub(super) enum Engine {
    /// The io_uring of the polling thread, in which a place is taken by the first call.
    Uring(UringShare),
    /// Threads, since the host refuses io_uring or a part of it.
    Threads(Threads, UringRefusal),
}

macro_rules! each {
    ($self:ident, $own:ident => $then:expr) => {
        match $self {
            Engine::Uring($own) => $then,
            Engine::Threads($own, _) => $then,
        }
    };
}

impl Engine {
    /// To be called before a call is pushed.
    ///
    /// # Errors
    /// No ring is to be had now.
    pub(super) fn prepare(&mut self, depth: u32) -> io::Result<()> {
        match self {
            Self::Uring(share) => share.take(depth),
            Self::Threads(..) => Ok(()),
        }
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
            Self::Uring(share) => {
                let flags = match waits {
                    true => squeue::Flags::ASYNC,
                    false => squeue::Flags::empty(),
                };
                let entry = call.entry(types::Fd(file.as_raw_fd())).flags(flags);
                // SAFETY: as the caller promises.
                unsafe { share.push(entry, user_data) };
            }
            // SAFETY: as the caller promises.
            Self::Threads(threads, _) => unsafe { threads.push(call, user_data) },
        }
    }

    /// Asks to stop the call that is answered as `user_data`. A refusal is answered as `user_data`
    /// with [`CANCEL`](super::call::CANCEL) set.
    pub(super) fn cancel(&mut self, user_data: u64) {
        each!(self, own => own.cancel(user_data));
    }

    /// Starts the queued calls.
    pub(super) fn flush(&mut self) {
        each!(self, own => own.flush());
    }

    /// Has the kernel check once more for calls that have ended.
    pub(super) fn enter(&mut self) {
        each!(self, own => own.enter());
    }

    /// Replaces `answers` by the answers since the last call: `user_data` and result.
    pub(super) fn collect(&mut self, answers: &mut Vec<(u64, i32)>) {
        each!(self, own => own.collect(answers));
    }

    /// Whether there is anything to start or to collect.
    pub(super) fn has_events(&self) -> bool {
        each!(self, own => own.has_events())
    }

    /// From now on answers make the descriptor readable.
    pub(super) fn arm(&mut self) {
        each!(self, own => own.arm());
    }

    /// The descriptor is not needed; a poll follows.
    pub(super) fn disarm(&mut self) {
        each!(self, own => own.disarm());
    }

    /// The descriptor that answers make readable while it is armed.
    pub(super) fn wake_fd(&self) -> Option<RawFd> {
        each!(self, own => own.wake_fd())
    }

    /// Another thread will poll from now on; nothing is in flight.
    pub(super) fn rebind(&mut self) {
        if let Self::Uring(share) = self {
            *share = UringShare::default();
        }
    }

    /// Abandons calls in flight; the memory that they point to is leaked.
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
