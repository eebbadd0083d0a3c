//! An eventfd for signals to a peer: by a plain write, or, for a peer that has blocked one, by AIO.
//!
//! A guest's processor that is about to halt when its interrupt arrives does not halt, so a few
//! hundred nanoseconds more or less make a factor of two at depth 1. Measured on an EPYC (Linux
//! 6.18), for one signal:
//!
//! | way | ns | may wait for the peer |
//! |---|---|---|
//! | `write(2)` | 240 to 250 | yes |
//! | message to an io_uring with a registered eventfd (IORING_REGISTER_SEND_MSG_RING, Linux 6.13) | 395 | no |
//! | NOP of such a ring; with a registered ring descriptor, SINGLE_ISSUER, COOP_TASKRUN, NO_SQARRAY; with DEFER_TASKRUN | 500; 440; 470 | no |
//! | poll or read of Linux AIO with IOCB_FLAG_RESFD, completions reaped in user space or not | 680 to 760 | no |
//!
//! No way that never waits is nearly as fast as the write. So the write is used, under the
//! process's [`watchdog`], which ends a write that a peer makes wait. The peer's [`WritePermit`] is
//! withdrawn then, and all its eventfds are signalled by AIO from there on, also those of its next
//! connections. So a peer can block a sidecore once, for milliseconds.
//!
//! AIO is also used while signals are too few to keep the watchdog awake, and where there is no
//! watchdog. Where there is a watchdog and no AIO, a peer whose permit is withdrawn is not
//! signalled any more.

use std::{
    io,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use super::{
    never_waits, signal_eventfd,
    watchdog::{self, Wake, Written},
};

/// Permission to signal one peer's eventfds by writes, which the peer can make wait. It is
/// withdrawn for good from a peer that has done so. Clones are the same permit: everything that
/// belongs to the peer, now or later, on any thread, has one.
#[derive(Clone, Debug, Default)]
pub struct WritePermit {
    is_withdrawn: Arc<AtomicBool>,
}

impl WritePermit {
    /// Returns whether the peer has made a write wait.
    #[inline]
    pub fn is_withdrawn(&self) -> bool {
        // Relaxed: it orders nothing. A thread that sees it late is blocked once more, at most.
        self.is_withdrawn.load(Relaxed)
    }

    #[cold]
    fn withdraw(&self) {
        self.is_withdrawn.store(true, Relaxed);
    }
}

/// Eventfd that an untrusted peer has as well.
#[derive(Debug)]
pub struct PeerEventFd<F> {
    fd: F,
    permit: WritePermit,
}

impl<F: AsFd> PeerEventFd<F> {
    /// Wraps `fd`, an eventfd of the peer that has this permit.
    pub const fn new(fd: F, permit: WritePermit) -> Self {
        Self { fd, permit }
    }

    /// Adds one to the eventfd. One that is full stays full. It never waits, except in the one
    /// write that costs the peer its permit, and then for milliseconds.
    ///
    /// # Errors
    /// It is no eventfd; or the peer is not signalled any more (see the head of this module).
    #[inline]
    pub fn signal(&self) -> io::Result<()> {
        if self.write(Wake::IfFrequent)? {
            return Ok(());
        }
        self.signal_otherwise()
    }

    /// Writes, if that is permitted and watched; returns whether the eventfd is signalled.
    #[inline]
    fn write(&self, wake: Wake) -> io::Result<bool> {
        if self.permit.is_withdrawn() {
            return Ok(false);
        }
        let written = watchdog::write(self.fd.as_fd(), wake)?;
        if written == Written::Held {
            self.permit.withdraw();
        }
        Ok(written != Written::Unwatched)
    }

    #[cold]
    fn signal_otherwise(&self) -> io::Result<()> {
        if !never_waits() && watchdog::is_there() {
            return match self.write(Wake::Now)? {
                true => Ok(()),
                false => Err(io::ErrorKind::PermissionDenied.into()),
            };
        }
        signal_eventfd(self.fd.as_fd())
    }
}
