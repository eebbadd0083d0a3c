//! Signals, taken by a thread that waits for nothing else.
//!
//! They are blocked in every thread and taken by this one, which touches no guest's memory, no disk
//! and no terminal output: it takes a signal whatever the rest of the process waits for. The
//! effects of the signals that end, one after another:
//!
//! | | SIGINT, SIGTERM, SIGHUP | SIGQUIT |
//! |---|---|---|
//! | first, where there is a grace | [`SignalRequest::Press`]: a guest is asked to power off | [`SignalRequest::End`] |
//! | next, or the grace is over; first, where there is none | [`SignalRequest::End`]: an end in order | [`SignalRequest::End`] |
//! | during the end | the process ends where it is ([`leave`]), with a status of its own | the same |
//!
//! After [`next_ends_at_once`] any signal does the last: the user has been notified what the end
//! waits for.
//!
//! A sender may send twice at one go (timeout(1) signals its child and then the group that the
//! child is in), so what comes within [`ONE_REQUEST`] of a signal that changed something is the
//! same request.
//!
//! SIGHUP counts unless it was ignored when the process started (nohup).
//!
//! UNSAFETY: `sigaction`, `pthread_sigmask`, `signalfd`, and `poll` and `read` on descriptors held
//! here.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

mod requests;

use requests::{Requests, Step};

use super::{STATUS_AT_ONCE, leave};
use crate::messages::say;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

/// Signals that end in order.
const ORDERLY: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// Signals within this time are one request.
pub const ONE_REQUEST: Duration = Duration::from_millis(200);

/// Request of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalRequest {
    /// Ask the guest to power off; the signal's number.
    Press(i32),
    /// End in order; the signal's number.
    End(i32),
    /// SIGUSR1: write the counters.
    Stats,
}

/// The first signal that has asked for the end; 0: none.
static END_ASKED_BY: AtomicI32 = AtomicI32::new(0);

/// Returns the first signal that has asked for the end, if one has. For waits that begin before the
/// reports of [`listen`](Signals::listen) are taken. A signal that was blocked before this program
/// began, and is pending since, counts as well.
pub fn end_asked_by() -> Option<i32> {
    match END_ASKED_BY.load(Ordering::SeqCst) {
        0 => pending(),
        signal => Some(signal),
    }
}

/// Returns whether a signal has asked for the end.
pub fn is_end_asked() -> bool {
    end_asked_by().is_some()
}

/// Returns a signal that ends, blocked and not taken.
fn pending() -> Option<i32> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigpending initialises the set when it answers 0; the numbers are valid.
    unsafe {
        if libc::sigpending(set.as_mut_ptr()) != 0 {
            return None;
        }
        let set = set.assume_init();
        let mut signals = ORDERLY.into_iter();
        signals.find(|&signal| libc::sigismember(&raw const set, signal) == 1)
    }
}

/// The next signal that ends does so at once, be it the first.
static ENDS_AT_ONCE: AtomicBool = AtomicBool::new(false);

/// Has the first signal that ends do so at once, from now on. SeqCst, as everything here: once in a
/// process's life.
pub fn next_ends_at_once() {
    ENDS_AT_ONCE.store(true, Ordering::SeqCst);
}

/// Returns a descriptor that becomes readable when one of the set is pending.
fn signalfd(set: &libc::sigset_t) -> io::Result<OwnedFd> {
    // SAFETY: a valid set; -1 asks for a new descriptor.
    let fd = unsafe { libc::signalfd(-1, set, libc::SFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: signalfd has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Checks that the host has descriptors for signals.
///
/// # Errors
/// Its answer.
pub fn try_signalfd() -> io::Result<()> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set.
    let set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    };
    signalfd(&set).map(drop)
}

/// The signals, blocked.
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks the signals that end, and `more`, for this thread and every thread it starts from now
    /// on: call it before any other thread exists, or a signal may still end the process at once.
    ///
    /// # Errors
    /// The system refuses.
    pub fn block(more: &[libc::c_int]) -> io::Result<Self> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the set, sigaddset changes it; both get valid pointers
        // and numbers.
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
        signalfd(&set).map(Self)
    }

    /// Starts the thread. It calls `on`, which must not wait, for each signal but the one that ends
    /// at once, and lives as long as the process unless it is [stopped](Listener::stop). The first
    /// signal presses if `grace` is more than nothing, and that is how long it gives.
    ///
    /// # Errors
    /// No thread can be started, or the host has no more descriptors.
    pub fn listen(
        self,
        grace: Duration,
        mut on: impl FnMut(SignalRequest) + Send + 'static,
    ) -> io::Result<Listener> {
        let mut requests = Requests::new(grace);
        let stop = Arc::new(EventFd::new(EFD_CLOEXEC)?);
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                loop {
                    let step = match self.wait(&stopped, requests.deadline()) {
                        WakeReason::Stop => return,
                        WakeReason::Signal(libc::SIGUSR1) => Step::Do(SignalRequest::Stats),
                        WakeReason::Signal(signal) => {
                            let at_once = ENDS_AT_ONCE.load(Ordering::SeqCst);
                            requests.signal(signal, Instant::now(), at_once)
                        }
                        WakeReason::Nothing => requests.time_out(Instant::now()),
                    };
                    match step {
                        Step::Nothing => {}
                        Step::AtOnce(signal) => at_once(signal),
                        Step::Do(asked) => {
                            if let SignalRequest::Press(signal) | SignalRequest::End(signal) = asked
                            {
                                // The first one stays.
                                let _ = END_ASKED_BY.compare_exchange(
                                    0,
                                    signal,
                                    Ordering::SeqCst,
                                    Ordering::SeqCst,
                                );
                            }
                            on(asked);
                        }
                    }
                }
            })?;
        Ok(Listener { stop, thread })
    }

    /// Returns the next signal, unless the end of listening or the deadline comes first.
    fn wait(&self, stop: &EventFd, deadline: Option<Instant>) -> WakeReason {
        let timeout = deadline.map_or(-1, |deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            // Rounded up: not a moment early. A long one is waited for in parts.
            i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
        });
        let mut polled = [stop.as_raw_fd(), self.0.as_raw_fd()].map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: an array of two descriptors that are open, which outlives the call.
        if unsafe { libc::poll(polled.as_mut_ptr(), 2, timeout) } <= 0 {
            return WakeReason::Nothing;
        }
        // First: a signal that has come as well is for the next listener.
        if polled[0].revents != 0 {
            return WakeReason::Stop;
        }
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let len = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the buffer has room for the one record asked for.
        let read = unsafe { libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), len) };
        if read != len as isize {
            // Interrupted by the vCPU's signal, which nothing sends here; there is no other error.
            return WakeReason::Nothing;
        }
        // SAFETY: a full record was read, so it is initialised.
        WakeReason::Signal(unsafe { info.assume_init() }.ssi_signo as libc::c_int)
    }
}

/// Reason for which the thread wakes.
enum WakeReason {
    Signal(libc::c_int),
    Stop,
    /// The deadline, or `None` where it is unknown.
    Nothing,
}

/// The thread that listens. Dropped, it goes on.
pub struct Listener {
    stop: Arc<EventFd>,
    thread: JoinHandle<()>,
}

impl Listener {
    /// Takes no signal from now on: those that were taken have been reported, and those that come
    /// stay blocked and pending, also for a program that this process executes.
    pub fn stop(self) {
        // Fails only when the counter is full, and then it is readable.
        let _ = self.stop.write(1);
        // A panic has been printed by its hook, and takes no more signals either.
        let _ = self.thread.join();
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
