//! Signals as a queue: blocked in every thread, taken by the one that waits.

use std::io;

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// SIGINT or SIGTERM: end.
    End,
    /// SIGUSR1: write the counters.
    Stats,
}

/// The signals taken here.
pub struct Signals {
    set: libc::sigset_t,
}

impl Signals {
    /// Blocks the signals for this thread and those it starts from now on: call it before any is started.
    ///
    /// # Errors
    /// The system refuses.
    pub fn block() -> io::Result<Self> {
        // SAFETY: all-zero is a valid place for a set, which sigemptyset fills; each call gets a valid signal number.
        let set = unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGUSR1] {
                libc::sigaddset(&raw mut set, signal);
            }
            set
        };
        // SAFETY: a filled set, and no wish for the old one.
        let error =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        match error {
            0 => Ok(Self { set }),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// Waits for the next one.
    pub fn wait(&self) -> Asked {
        loop {
            let mut signal = 0;
            // SAFETY: a filled set and a place for the number.
            let error = unsafe { libc::sigwait(&raw const self.set, &raw mut signal) };
            match (error, signal) {
                (0, libc::SIGUSR1) => return Asked::Stats,
                (0, _) => return Asked::End,
                // Only EINVAL is documented, and the set is valid; trying again is all that is left.
                _ => {}
            }
        }
    }
}

/// Whether a signal that ends the daemon has come and not been taken, where they are blocked.
pub fn is_end_pending() -> bool {
    // SAFETY: all-zero is a valid place for a set, which sigpending fills, or which stays empty; the numbers are valid.
    unsafe {
        let mut pending = std::mem::zeroed();
        libc::sigpending(&raw mut pending);
        [libc::SIGINT, libc::SIGTERM]
            .into_iter()
            .any(|signal| libc::sigismember(&raw const pending, signal) == 1)
    }
}
