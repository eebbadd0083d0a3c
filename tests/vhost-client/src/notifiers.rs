//! A ring's two eventfds, counted.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// Kick and call of one ring.
#[derive(Debug)]
pub struct Notifiers {
    kick: OwnedFd,
    call: OwnedFd,
    /// Kicks written: what a guest pays with an exit.
    pub kicks: u64,
    /// Calls read: what a guest takes as interrupts.
    pub calls: u64,
}

impl Notifiers {
    /// Two new ones.
    ///
    /// # Errors
    /// No eventfds are left.
    pub fn new() -> Result<Self, Errno> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self {
            kick: eventfd(0, flags)?,
            call: eventfd(0, flags)?,
            kicks: 0,
            calls: 0,
        })
    }

    /// The eventfd written to kick.
    pub fn kick_fd(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    /// The eventfd that calls arrive on.
    pub fn call_fd(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    /// Kicks.
    #[cold]
    pub fn kick(&mut self) {
        self.kicks += 1;
        // Fails only if 2^64 - 2 kicks wait unread, and then one more says nothing new.
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// Reads and counts the calls that came.
    pub fn take_calls(&mut self) -> u64 {
        let mut count = [0; 8];
        // An error is EAGAIN: none came.
        let calls = match rustix::io::read(&self.call, &mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        };
        self.calls += calls;
        calls
    }

    /// Forgets what was counted. Calls that were not read stay so.
    pub const fn start_counting(&mut self) {
        (self.kicks, self.calls) = (0, 0);
    }
}
