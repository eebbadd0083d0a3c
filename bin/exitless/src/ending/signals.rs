//! Signals, heard by a thread that waits for nothing else.
//!
//! They are blocked in every thread and taken by this one, which touches no guest's memory, no disk and no terminal output: whatever
//! the rest of the process waits for, a signal is heard. What the signals that end come to, one after another:
//!
//! | | SIGINT, SIGTERM, SIGHUP | SIGQUIT |
//! |---|---|---|
//! | first, where there is a grace | [`Asked::Press`]: a guest is asked to power off | [`Asked::End`] |
//! | next, or the grace is over; first, where there is none | [`Asked::End`]: an end in order | [`Asked::End`] |
//! | during the end | the process ends where it is ([`leave`]), with a status of its own | the same |
//!
//! After [`next_ends_at_once`] any does the last: somebody has been told what the end waits for.
//!
//! A sender may send twice at one go (timeout(1) signals its child and then the group that the child is in), so
//! what comes within [`ONE_REQUEST`] of a signal that changed something is the same request.
//!
//! SIGHUP counts unless it was ignored when the process started (nohup).
//!
//! UNSAFETY: `sigaction`, `pthread_sigmask`, `signalfd`, and `poll` and `read` on descriptors held here.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

mod requests;

use requests::{Requests, Step};

use super::{STATUS_AT_ONCE, leave};
use crate::messages::say;

/// Signals that end in order.
const ORDERLY: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// Signals within this time are one request.
pub const ONE_REQUEST: Duration = Duration::from_millis(200);

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Ask the guest to power off; the signal's number.
    Press(i32),
    /// End in order; the signal's number.
    End(i32),
    /// SIGUSR1: write the counters.
    Stats,
}

/// A signal has asked for the end.
static IS_END_ASKED: AtomicBool = AtomicBool::new(false);

/// Whether a signal has asked for the end: for those who wait for something before anybody takes what
/// [`listen`](Signals::listen) reports.
pub fn is_end_asked() -> bool {
    IS_END_ASKED.load(Ordering::SeqCst)
}

/// The next signal that ends does so at once, be it the first.
static ENDS_AT_ONCE: AtomicBool = AtomicBool::new(false);

/// From now on the first signal that ends does so at once. SeqCst, as everything here: once in a process's life.
pub fn next_ends_at_once() {
    ENDS_AT_ONCE.store(true, Ordering::SeqCst);
}

/// The signals, blocked.
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks the signals that end, and `more`, for this thread and every thread it starts from now on: call it before
    /// any other thread exists, or a signal may still end the process at once.
    ///
    /// # Errors
    /// The system refuses.
    pub fn block(more: &[libc::c_int]) -> io::Result<Self> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the set, sigaddset changes it; both get valid pointers and numbers.
        let set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for &signal in ORDERLY.iter().chain(more) {
                if signal != libc::SIGHUP || !is_ignored(signal) {
                    libc::sigaddset(set.as_mut_ptr(), signal);
                }
            }
            set.assume_init()
        };
        // SAFETY: a valid set; the old mask is not asked for.
        let error = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: a valid set; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: signalfd has just given us this descriptor.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Starts the thread. It calls `on`, which must not wait, for each signal but the one that ends at once, and lives as long as
    /// the process. The first signal presses if `grace` is more than nothing, and that is how long it gives.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn listen(
        self,
        grace: Duration,
        mut on: impl FnMut(Asked) + Send + 'static,
    ) -> io::Result<()> {
        let mut requests = Requests::new(grace);
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                loop {
                    let step = match self.wait(requests.deadline()) {
                        Some(libc::SIGUSR1) => Step::Do(Asked::Stats),
                        Some(signal) => {
                            let at_once = ENDS_AT_ONCE.load(Ordering::SeqCst);
                            requests.signal(signal, Instant::now(), at_once)
                        }
                        None => requests.time_out(Instant::now()),
                    };
                    match step {
                        Step::Nothing => {}
                        Step::AtOnce(signal) => at_once(signal),
                        Step::Do(asked) => {
                            if asked != Asked::Stats {
                                IS_END_ASKED.store(true, Ordering::SeqCst);
                            }
                            on(asked);
                        }
                    }
                }
            })
            .map(drop)
    }

    /// The next signal; `None`: there was none before the deadline, or nobody knows.
    fn wait(&self, deadline: Option<Instant>) -> Option<libc::c_int> {
        let timeout = deadline.map_or(-1, |deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            // Rounded up: not a moment early. A long one is waited for in parts.
            i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
        });
        let mut signals = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one descriptor that is open, a structure that outlives the call.
        if unsafe { libc::poll(&raw mut signals, 1, timeout) } <= 0 {
            return None;
        }
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let len = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the buffer has room for the one record asked for.
        let read = unsafe { libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), len) };
        // Else interrupted by the vCPU's signal, which is nobody's to send here; there is no other error.
        (read == len as isize).then(|| {
            // SAFETY: a full record was read, so it is initialised.
            unsafe { info.assume_init() }.ssi_signo as libc::c_int
        })
    }
}

fn at_once(signal: libc::c_int) -> ! {
    say!(
        "signal {signal} while the end was under way: ending at once, with status {STATUS_AT_ONCE}"
    );
    leave(STATUS_AT_ONCE)
}

fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: asks only; the result has room for one action, and all zeroes is one.
    let action = unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    action.sa_sigaction == libc::SIG_IGN
}
