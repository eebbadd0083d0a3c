//! Writes to eventfds that another process may make wait, and a watchdog that ends them.
//!
//! A plain `write(2)` is the quickest signal there is, and waits as long as the other holder of the
//! eventfd keeps its counter full and the open file a blocking one. So a writer does it only while
//! the process's watchdog is awake. The watchdog is a thread that checks each writer every
//! [`LOOK_NS`], and interrupts a write that it finds asleep by a signal whose handler does nothing:
//! the write ends with EINTR.
//!
//! **The bound.** A write is held from its beginning to the next check: 6 ms at most, and the time
//! that the watchdog waits for a processor. A peer that drains its counter before the check is
//! found as well: checks come at random times, 2 to 6 ms apart, so for any pattern of the peer, its
//! writes have been held for 4 ms in total, on average, when a check finds one. In both cases the
//! write returns [`Written::Held`], and the writer writes to that peer no more (see
//! [`WritePermit`](super::WritePermit)).
//!
//! **Only a held write is interrupted.** A write that does not wait never sleeps. So a thread is
//! held if it is in a write, the kernel reports it as asleep (`/proc/self/task/TID/stat`), and it
//! is still in the same write. One that is not asleep was executing a write, or was preempted in
//! it. No signal disturbs other system calls of a sidecore, except in one case: the peer drains its
//! counter between that check and the signal, and the writer gets the signal in its next system
//! call, once for each peer. A signal that comes before the thread is asleep in the write ends
//! nothing, and none is sent then; the next check sends one.
//!
//! **It sleeps** when writes are few: a check costs about as much as [`WORTH`] writes save, so it
//! parks after [`QUIET_LOOKS`] checks with fewer, and is woken after [`WAKE_AFTER`] writes that
//! were not done. An idle process has no checks. The [`handshake`](super::handshake) ensures that
//! no write begins while it sleeps.
//!
//! A write costs two stores and two loads more than the system call. A second process-wide resource
//! is SIGURG, which is ignored by default, so a late one does no harm. If the program has a handler
//! of its own for it, there is no watchdog.
//!
//! UNSAFETY: system calls without a wrapper in std. None keeps a pointer; the handler is empty.
#![expect(unsafe_code, reason = "system calls; see the head comment")]

use std::{
    cell::{Cell, OnceCell},
    fs,
    hash::BuildHasher,
    io, mem,
    os::fd::{AsRawFd, BorrowedFd},
    process, ptr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{Ordering::SeqCst, fence},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use lines::Fences;

use super::handshake::{Record, State};
use crate::sync::CachePadded;

/// Least and longest time between two checks, in nanoseconds.
const LOOK_NS: (u64, u64) = (2_000_000, 6_000_000);
/// Time in nanoseconds after which a check is late. A late check may follow a pause of the whole
/// process, whose other threads have not run yet, so it is ignored. The next one is not, however
/// late.
const LATE_NS: u64 = 20_000_000;
/// Writes between two checks that are worth a check: it takes some 5 µs, and a write saves half a
/// microsecond.
const WORTH: u64 = 10;
/// Number of checks with fewer writes after which the watchdog parks.
const QUIET_LOOKS: u32 = 16;
/// Writes of a thread that were not done because the watchdog slept, after which it is woken.
const WAKE_AFTER: u32 = 64;
/// Signal that ends a write that waits.
const SIGNAL: libc::c_int = libc::SIGURG;

/// Outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// The eventfd is signalled; it may have been before.
    Done,
    /// The other holder of the eventfd made the write wait. The eventfd is signalled: by this write
    /// or by its full counter.
    Held,
    /// Not done: the watchdog sleeps, or there is none.
    Unwatched,
}

/// Condition for waking a watchdog that sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    /// If this thread would have written often.
    IfFrequent,
    /// Before this write, which is then done.
    Now,
}

/// A thread that writes, in the watchdog's list.
#[derive(Debug)]
struct WatchedThread {
    tid: libc::pid_t,
    record: Arc<CachePadded<Record>>,
    /// Its `count` at the last check.
    seen: u64,
}

/// Watchdog of a process, and its list of writers.
#[derive(Debug)]
struct Watchdog {
    state: CachePadded<State>,
    /// Locked by the watchdog for a check, and by threads that begin or end. A thread is removed
    /// before it ends, so that no thread that reuses its number is signalled.
    watched: Mutex<Vec<WatchedThread>>,
    thread: OnceLock<Thread>,
}

impl Watchdog {
    /// Returns the process's watchdog, if it can have one.
    fn get() -> Option<&'static Arc<Self>> {
        static WATCHDOG: OnceLock<Option<Arc<Watchdog>>> = OnceLock::new();
        WATCHDOG.get_or_init(|| Self::start().ok()).as_ref()
    }

    /// Creates a watchdog that sleeps, and has no thread.
    fn new(fences: Fences) -> Self {
        Self {
            state: CachePadded(State::asleep(fences)),
            watched: Mutex::new(Vec::new()),
            thread: OnceLock::new(),
        }
    }

    fn start() -> io::Result<Arc<Self>> {
        let fences = Fences::by_kernel().ok_or(io::ErrorKind::Unsupported)?;
        // Check that the signal may be sent at all.
        send(this_thread(), 0)?;
        install_handler()?;
        let watchdog = Arc::new(Self::new(fences));
        let own = Arc::clone(&watchdog);
        let thread = thread::Builder::new()
            .name("write-watchdog".to_owned())
            .spawn(move || own.run())?;
        let _ = watchdog.thread.set(thread.thread().clone());
        Ok(watchdog)
    }

    fn watched(&self) -> MutexGuard<'_, Vec<WatchedThread>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let random = std::hash::RandomState::new();
        let (mut number, mut is_late) = (0_u64, false);
        loop {
            while !self.state.0.is_awake() {
                thread::park();
            }
            let mut quiet = 0;
            while quiet < QUIET_LOOKS || !self.sleep() {
                number += 1;
                let (least, most) = LOOK_NS;
                let wait_ns = least + random.hash_one(number) % (most - least);
                let start = Instant::now();
                thread::sleep(Duration::from_nanos(wait_ns));
                is_late = !is_late && start.elapsed() > Duration::from_nanos(wait_ns + LATE_NS);
                quiet = match self.look(is_late) < WORTH {
                    true => quiet + 1,
                    false => 0,
                };
            }
        }
    }

    fn sleep(&self) -> bool {
        let watched = self.watched();
        let records = watched.iter().map(|watched| &watched.record.0);
        let state = &self.state.0;
        state.sleep(records, || state.fences().heavy().is_ok())
    }

    /// Wakes it if it sleeps.
    #[cold]
    fn wake(&self) {
        if self.state.0.wake()
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Ends the writes that are held, unless the check is late. Returns the number of writes since
    /// the last check.
    fn look(&self, is_late: bool) -> u64 {
        let mut writes = 0;
        for WatchedThread { tid, record, seen } in self.watched().iter_mut() {
            let record = &record.0;
            let count = record.count();
            writes += count.wrapping_sub(*seen) / 2;
            *seen = count;
            if is_late || count % 2 == 0 {
                continue;
            }
            match is_asleep(*tid) {
                Some(false) => continue,
                Some(true) => {
                    // Still in that write, so it was asleep in it. This load does not return a
                    // value older than the sleep: the kernel makes a thread's stores visible before
                    // it shows the thread as asleep.
                    fence(SeqCst);
                    if record.count() != count {
                        continue;
                    }
                    // Before the signal, which is lost if the peer lets the write end now.
                    record.mark_held(count);
                }
                // No descriptor is free for the check, which the peer may have caused. EINTR then
                // shows a held write; a thread that was only preempted in a write takes the signal
                // there.
                None => {}
            }
            let _ = send(*tid, SIGNAL);
        }
        writes
    }
}

/// Returns whether a thread of this process sleeps where signals reach it; `None`: the kernel does
/// not say.
fn is_asleep(tid: libc::pid_t) -> Option<bool> {
    let stat = fs::read_to_string(format!("/proc/self/task/{tid}/stat")).ok()?;
    // "TID (name) S …", and a name may have parentheses.
    let (_, fields) = stat.rsplit_once(") ")?;
    Some(fields.starts_with('S'))
}

fn this_thread() -> libc::pid_t {
    // SAFETY: no arguments.
    unsafe { libc::syscall(libc::SYS_gettid) as libc::pid_t }
}

/// Sends a signal to a thread of this process.
fn send(tid: libc::pid_t, signal: libc::c_int) -> io::Result<()> {
    // SAFETY: numbers only.
    match unsafe { libc::syscall(libc::SYS_tgkill, process::id(), tid, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn do_nothing(_: libc::c_int) {}

/// Installs a handler for [`SIGNAL`] that makes it end system calls.
fn install_handler() -> io::Result<()> {
    // SAFETY: zero bits are a `sigaction` with an empty mask and no flags, so no SA_RESTART. Both
    // pointers are to locals. The handler is an empty function of the type for handlers without
    // SA_SIGINFO.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        if libc::sigaction(SIGNAL, ptr::null(), &raw mut action) != 0 {
            return Err(io::Error::last_os_error());
        }
        let own = do_nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        if ![libc::SIG_DFL, libc::SIG_IGN, own].contains(&action.sa_sigaction) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        action = mem::zeroed();
        action.sa_sigaction = own;
        if libc::sigaction(SIGNAL, &raw const action, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Unblocks [`SIGNAL`] in this thread.
fn unblock_signal() -> io::Result<()> {
    let mut set = mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` fills the set, which is a local; the others take it filled.
    let error = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), SIGNAL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), ptr::null_mut())
    };
    match error {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Writer of this thread.
#[derive(Debug)]
struct Writer {
    watchdog: Arc<Watchdog>,
    record: Arc<CachePadded<Record>>,
    /// Number of writes not done since this thread last woke the watchdog.
    unwatched: Cell<u32>,
}

impl Writer {
    /// Registers this thread with the watchdog.
    fn register(watchdog: Arc<Watchdog>) -> io::Result<Self> {
        unblock_signal()?;
        let record = Arc::new(CachePadded(Record::new()));
        watchdog.watched().push(WatchedThread {
            tid: this_thread(),
            record: Arc::clone(&record),
            seen: 0,
        });
        Ok(Self {
            watchdog,
            record,
            unwatched: Cell::new(0),
        })
    }

    #[inline]
    fn write(&self, fd: BorrowedFd<'_>, wake: Wake) -> io::Result<Written> {
        let record = &self.record.0;
        if !record.begin(&self.watchdog.state.0) {
            match wake {
                Wake::IfFrequent => {
                    record.end();
                    self.wake_if_frequent();
                    return Ok(Written::Unwatched);
                }
                // It has been in a write since `begin`, so the watchdog does not fall asleep again.
                Wake::Now => self.watchdog.wake(),
            }
        }
        let written = write_one(fd);
        match (record.end(), written) {
            (true, _) => Ok(Written::Held),
            (false, Ok(())) => Ok(Written::Done),
            // Only a write that waits is interrupted.
            (false, Err(error)) if error.kind() == io::ErrorKind::Interrupted => Ok(Written::Held),
            (false, Err(error)) => Err(error),
        }
    }

    #[cold]
    fn wake_if_frequent(&self) {
        self.unwatched.set(self.unwatched.get() + 1);
        if self.unwatched.get() >= WAKE_AFTER {
            self.unwatched.set(0);
            self.watchdog.wake();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let is_own = |watched: &WatchedThread| Arc::ptr_eq(&watched.record, &self.record);
        self.watchdog.watched().retain(|watched| !is_own(watched));
    }
}

std::thread_local! {
    static WRITER: OnceCell<Option<Writer>> = const { OnceCell::new() };
}

/// Returns whether writes are watched in this process. The first call starts the watchdog's thread,
/// on the CPUs that its caller may use.
pub(super) fn is_there() -> bool {
    Watchdog::get().is_some()
}

/// Adds one to an eventfd by a plain write, if that is watched. A write to a full eventfd that does
/// not wait counts as done.
#[inline]
pub(super) fn write(fd: BorrowedFd<'_>, wake: Wake) -> io::Result<Written> {
    let register = || Writer::register(Arc::clone(Watchdog::get()?)).ok();
    let write = |writer: &OnceCell<_>| match writer.get_or_init(register) {
        Some(writer) => writer.write(fd, wake),
        None => Ok(Written::Unwatched),
    };
    // A thread that ends has removed its record.
    WRITER.try_with(write).unwrap_or(Ok(Written::Unwatched))
}

/// Adds one to an eventfd by a write, which waits while the counter is full and the open file is
/// blocking.
#[inline]
pub(super) fn write_one(fd: BorrowedFd<'_>) -> io::Result<()> {
    let one = 1_u64.to_ne_bytes();
    // SAFETY: eight bytes of ours are read.
    let written = unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), size_of_val(&one)) };
    match written {
        8 => Ok(()),
        _ => match io::Error::last_os_error() {
            full if full.kind() == io::ErrorKind::WouldBlock => Ok(()),
            error => Err(error),
        },
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
