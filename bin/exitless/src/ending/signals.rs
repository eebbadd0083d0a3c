//! Signals, heard by a thread that waits for nothing else.
//!
//! They are blocked in every thread and taken by this one, which touches no guest, no disk and no terminal output: whatever
//! the rest of the process waits for, a signal is heard. The first of those that end asks for an end in order; another one
//! ends the process where it is ([`leave`]), with a status of its own. After [`next_ends_at_once`] the first one does so: somebody has
//! been told what the end waits for.
//!
//! A sender may send twice at one go (timeout(1) signals its child and then the group that the child is in), so
//! what comes within [`ONE_REQUEST`] of the first signal is the same request.
//!
//! SIGHUP ends in order too, unless it was ignored when the process started (nohup).
//!
//! UNSAFETY: `sigaction`, `pthread_sigmask`, `signalfd` and `read` on a descriptor held here.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{STATUS_AT_ONCE, leave};
use crate::messages::say;

/// Signals that end in order.
const ORDERLY: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// Signals within this time are one request.
pub const ONE_REQUEST: Duration = Duration::from_millis(200);

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
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
    /// the process.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn listen(self, mut on: impl FnMut(Asked) + Send + 'static) -> io::Result<()> {
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let mut first: Option<Instant> = None;
                loop {
                    match self.wait() {
                        libc::SIGUSR1 => on(Asked::Stats),
                        signal => match first {
                            Some(at) if at.elapsed() < ONE_REQUEST => {}
                            Some(_) => at_once(signal),
                            None if ENDS_AT_ONCE.load(Ordering::SeqCst) => at_once(signal),
                            None => {
                                first = Some(Instant::now());
                                IS_END_ASKED.store(true, Ordering::SeqCst);
                                on(Asked::End(signal));
                            }
                        },
                    }
                }
            })
            .map(drop)
    }

    fn wait(&self) -> libc::c_int {
        loop {
            let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
            let len = size_of::<libc::signalfd_siginfo>();
            // SAFETY: the buffer has room for the one record asked for.
            let read = unsafe { libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), len) };
            if read == len as isize {
                // SAFETY: a full record was read, so it is initialised.
                return unsafe { info.assume_init() }.ssi_signo as libc::c_int;
            }
            // Interrupted by the vCPU's signal, which is nobody's to send here; there is no other error.
        }
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
