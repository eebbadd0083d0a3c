//! File descriptors of a running ring: kick, call and error, and the coalescing of calls.
//!
//! **Calls are put off under load.** A driver that sleeps asks to be called at the next completion;
//! if more completions of the same ring are about to come, one call does for all. So a call waits
//! while at least [`LOAD`] requests of its ring are not done, but no longer than the configured
//! delay, which is below what waking the guest takes. At depth 1 nothing ever waits.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::SendFlags;
use sidecore::{PeerEventFd, WritePermit};
use vhost_user::backend::{Kick, Refusal, SharedFd};
use vio::Interrupt;

use crate::deferred_drop::EVENTFD;

/// Requests not done from which on a call may wait.
pub(crate) const LOAD: u16 = 4;

/// One running ring.
pub(crate) struct Queue {
    pub(crate) index: u16,
    pub(crate) kick: Kick,
    pub(crate) call: Option<Notifier>,
    pub(crate) err: Option<Notifier>,
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

    /// Empties the kick, and returns whether it had been rung. Never waits, even where the front
    /// end has made the descriptor blocking since.
    pub(crate) fn drain_kick(&self) -> bool {
        match &self.kick {
            Kick::Fd(fd) => sidecore::drain_eventfd(fd.as_fd()),
            Kick::Poll => false,
        }
    }

    /// Signals the driver.
    pub(crate) fn ring_call(&mut self) {
        self.call_since = None;
        if let Some(call) = &mut self.call {
            call.notify();
        }
    }

    /// Notifies the front end that the ring is broken.
    pub(crate) fn ring_err(&mut self) {
        if let Some(err) = &mut self.err {
            err.notify();
        }
    }
}

/// Descriptor by which the front end is notified.
#[derive(Debug)]
pub(crate) enum Notifier {
    /// An eventfd.
    Event(PeerEventFd<SharedFd>),
    /// A socket.
    Socket(SharedFd),
}

impl Notifier {
    /// Accepts an eventfd, which is made non-blocking, or a socket: user-mode Linux, whose
    /// interrupts come as signals, which eventfds do not send, gives one end of a pair.
    pub(crate) fn accept(what: &str, fd: SharedFd, permit: &WritePermit) -> Result<Self, Refusal> {
        let target = kind(what, &fd)?;
        let is_socket = target
            .as_os_str()
            .as_encoded_bytes()
            .starts_with(b"socket:");
        if is_socket {
            return Ok(Self::Socket(fd));
        }
        check_kind(what, &fd, &target)?;
        Ok(Self::Event(PeerEventFd::new(fd, permit.clone())))
    }

    /// Adds one to the eventfd, or sends the same eight bytes. One that is full has been rung often
    /// enough. A front end that has made the eventfd a blocking one since holds this once, for
    /// milliseconds: see [`PeerEventFd::signal`].
    pub(crate) fn notify(&mut self) {
        match self {
            Self::Event(eventfd) => {
                let _ = eventfd.signal();
            }
            Self::Socket(fd) => {
                let one = 1_u64.to_ne_bytes();
                let _ = rustix::net::send(fd, &one, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            }
        }
    }
}

/// Accepts a descriptor for waiting: an eventfd, which is made non-blocking.
pub(crate) fn check_eventfd(what: &str, fd: &SharedFd) -> Result<(), Refusal> {
    check_kind(what, fd, &kind(what, fd)?)
}

/// Returns the kernel's name of the file behind a descriptor.
fn kind(what: &str, fd: &SharedFd) -> Result<PathBuf, Refusal> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    std::fs::read_link(path).map_err(|error| {
        Refusal(format!(
            "the {what} descriptor cannot be looked at: {error}"
        ))
    })
}

fn check_kind(what: &str, fd: &SharedFd, target: &Path) -> Result<(), Refusal> {
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

/// Sink of the device's interrupts during one visit.
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
        for queue in &mut *self.queues {
            queue.ring_err();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_full_eventfd_or_socket_is_rung_without_waiting() {
        let full = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let permit = WritePermit::default();
        Notifier::accept("call", SharedFd::from(full), &permit)
            .unwrap()
            .notify();

        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let ours = SharedFd::from(OwnedFd::from(ours));
        let mut notifier = Notifier::accept("call", ours, &permit).unwrap();
        notifier.notify();
        let mut bytes = [0; 8];
        theirs.read_exact(&mut bytes).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), 1);
        // Far more than the socket holds.
        for _ in 0..100_000 {
            notifier.notify();
        }
        drop(theirs);
        notifier.notify();
    }

    #[test]
    fn anything_else_is_refused() {
        let file = || SharedFd::from(OwnedFd::from(tempfile::tempfile().unwrap()));
        assert!(Notifier::accept("call", file(), &WritePermit::default()).is_err());
        assert!(check_eventfd("kick", &file()).is_err());
        let (socket, _other) = UnixStream::pair().unwrap();
        assert!(check_eventfd("kick", &SharedFd::from(OwnedFd::from(socket))).is_err());
    }
}
