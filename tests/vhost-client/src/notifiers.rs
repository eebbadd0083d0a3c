//! The two eventfds of a ring, with counts.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// Kick and call eventfds of one ring.
#[derive(Debug)]
pub struct Notifiers {
    kick: OwnedFd,
    call: OwnedFd,
    /// Kicks written; a guest would pay an exit for each.
    pub kicks: u64,
    /// Calls read; a guest would take an interrupt for each.
    pub calls: u64,
}

impl Notifiers {
    /// Creates two eventfds.
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

    /// Returns the eventfd that the driver writes to kick the device.
    pub fn kick_fd(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    /// Returns the eventfd on which calls arrive.
    pub fn call_fd(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    /// Kicks the device.
    #[cold]
    pub fn kick(&mut self) {
        self.kicks += 1;
        // It fails only if 2^64 - 2 kicks are unread; one more would add nothing then.
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// Reads the calls that have arrived, adds them to `calls`, and returns their number.
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

    /// Resets the counts. Unread calls stay unread.
    pub const fn start_counting(&mut self) {
        (self.kicks, self.calls) = (0, 0);
    }
}
