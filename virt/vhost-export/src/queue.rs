//! A running ring's descriptors: how the guest kicks it and how it is called back, and when.
//!
//! **Calls are put off under load.** A driver that sleeps asks to be called at the next completion; if more
//! completions of the same ring are about to come, one call does for all. So a call waits while at least
//! [`LOAD`] requests of its ring are not done, but no longer than the configured delay, which is below what waking the guest takes. At
//! depth 1 nothing ever waits.

use std::os::fd::{AsFd, AsRawFd, RawFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::ReadWriteFlags;
use vhost_user::backend::{Kick, Refusal, SharedFd};
use vio::Interrupt;

/// Requests not done from which on a call may wait.
pub(crate) const LOAD: u16 = 4;

/// How the kernel shows an eventfd.
const EVENTFD: &str = "anon_inode:[eventfd]";

/// One running ring.
pub(crate) struct Queue {
    pub(crate) index: u16,
    pub(crate) kick: Kick,
    pub(crate) call: Option<SharedFd>,
    pub(crate) err: Option<SharedFd>,
    /// A call the driver wants that has not been made, and since when.
    pub(crate) call_since: Option<u64>,
}

impl Queue {
    /// The descriptor to wait for.
    pub(crate) fn kick_fd(&self) -> Option<RawFd> {
        match &self.kick {
            Kick::Fd(fd) => Some(fd.as_raw_fd()),
            Kick::Poll => None,
        }
    }

    /// Empties the kick; whether it had been rung.
    pub(crate) fn drain_kick(&self) -> bool {
        match &self.kick {
            Kick::Fd(fd) => drain(fd),
            Kick::Poll => false,
        }
    }

    /// Signals the driver.
    pub(crate) fn ring_call(&mut self) {
        self.call_since = None;
        if let Some(call) = &self.call {
            signal(call);
        }
    }

    /// Tells the front end that the ring is broken.
    pub(crate) fn ring_err(&self) {
        if let Some(err) = &self.err {
            signal(err);
        }
    }
}

/// Empties an eventfd. Never waits, also where the front end has made the descriptor a blocking one since.
pub(crate) fn drain(fd: &SharedFd) -> bool {
    let mut count = [0; 8];
    let mut buffers = [std::io::IoSliceMut::new(&mut count)];
    // An offset of -1: the file has no position.
    rustix::io::preadv2(fd, &mut buffers, u64::MAX, ReadWriteFlags::NOWAIT).is_ok()
}

/// Adds one to an eventfd. One that is full has been signalled often enough.
fn signal(fd: &SharedFd) {
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// Accepts a descriptor for signalling: an eventfd, which is made non-blocking.
pub(crate) fn check_eventfd(what: &str, fd: &SharedFd) -> Result<(), Refusal> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = std::fs::read_link(path).map_err(|error| {
        Refusal(format!(
            "the {what} descriptor cannot be looked at: {error}"
        ))
    })?;
    if target.as_os_str() != EVENTFD {
        return Err(Refusal(format!(
            "the {what} descriptor is {} where an eventfd is needed",
            target.display()
        )));
    }
    let nonblock = |fd: std::os::fd::BorrowedFd<'_>| -> rustix::io::Result<()> {
        let flags = fcntl_getfl(fd)?;
        if !flags.contains(OFlags::NONBLOCK) {
            fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
        }
        Ok(())
    };
    nonblock(fd.as_fd()).map_err(|error| {
        Refusal(format!(
            "the {what} descriptor cannot be made non-blocking: {error}"
        ))
    })
}

/// Where the device's interrupts go during one visit.
pub(crate) struct Calls<'a> {
    pub(crate) queues: &'a mut [Queue],
    pub(crate) now_ns: u64,
}

impl Interrupt for Calls<'_> {
    fn queue(&mut self, index: u16) {
        if let Some(queue) = self.queues.iter_mut().find(|queue| queue.index == index) {
            queue.call_since.get_or_insert(self.now_ns);
        }
    }

    fn config(&mut self) {
        for queue in &*self.queues {
            queue.ring_err();
        }
    }
}
