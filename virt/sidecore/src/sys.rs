//! System calls: eventfd, epoll, clocks, CPU affinity.
//!
//! UNSAFETY: these have no safe form in the standard library. Each wrapper passes only pointers
//! that it derives from references of its own, valid for the length of the call, and turns the
//! return value into a `Result`.
#![expect(
    unsafe_code,
    reason = "system calls that std does not offer; see the head comment"
)]

use std::{
    fs::File,
    io::{self, Read, Write},
    mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use crate::gate::Notifier;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// A non-blocking eventfd.
#[derive(Debug)]
pub(crate) struct EventFd(File);

impl EventFd {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd = check(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })?;
        // SAFETY: `fd` was returned just now as a new descriptor, which no other value owns.
        Ok(EventFd(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Empties the counter.
    pub(crate) fn drain(&self) {
        // An error is EAGAIN: already empty.
        let _ = (&self.0).read(&mut [0; 8]);
    }

    pub(crate) fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Notifier for EventFd {
    fn notify(&self) {
        // An error is EAGAIN, a counter at its maximum: readable already, which is all we want.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }
}

/// An epoll instance: level-triggered, for readability.
#[derive(Debug)]
pub(crate) struct EpollFd(OwnedFd);

impl EpollFd {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: `fd` was returned just now as a new descriptor, which no other value owns.
        Ok(EpollFd(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Adds `fd`, whose events will carry `data`.
    pub(crate) fn add(&self, fd: RawFd, data: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, data)
    }

    /// Changes the data that the events of `fd` carry.
    pub(crate) fn change(&self, fd: RawFd, data: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, data)
    }

    pub(crate) fn remove(&self, fd: RawFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd, 0)
    }

    fn control(&self, operation: libc::c_int, fd: RawFd, data: u64) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: data,
        };
        // SAFETY: `event` is a local, valid for reading.
        check(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), operation, fd, &raw mut event) })?;
        Ok(())
    }

    /// Waits until a descriptor is readable, for `timeout_ns` at most (`None`: without limit; 0:
    /// does not wait). Returns the number of `events` that have been filled. On kernels before 5.11
    /// the time is rounded down to milliseconds.
    pub(crate) fn wait(
        &self,
        events: &mut [libc::epoll_event],
        timeout_ns: Option<u64>,
    ) -> io::Result<usize> {
        let most = libc::c_int::try_from(events.len()).unwrap_or(libc::c_int::MAX);
        if let Some(ns) = timeout_ns.filter(|&ns| ns > 0) {
            let timeout = libc::timespec {
                tv_sec: (ns / 1_000_000_000).min(i32::MAX as u64) as libc::time_t,
                tv_nsec: (ns % 1_000_000_000) as libc::c_long,
            };
            // SAFETY: `events` is a slice of at least `most` entries, borrowed for writing;
            // `timeout` is a local; a null mask is allowed, and its size is then not looked at.
            let ready = unsafe {
                libc::syscall(
                    libc::SYS_epoll_pwait2,
                    self.0.as_raw_fd(),
                    events.as_mut_ptr(),
                    most,
                    &raw const timeout,
                    ptr::null::<libc::sigset_t>(),
                    0,
                )
            };
            match check(ready as libc::c_int) {
                Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {}
                ready => return Ok(ready? as usize),
            }
        }
        let timeout_ms = timeout_ns.map_or(-1, |ns| (ns / 1_000_000).min(i32::MAX as u64) as i32);
        // SAFETY: as above.
        let ready =
            unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), most, timeout_ms) };
        Ok(check(ready)? as usize)
    }
}

/// Returns room for `N` events.
pub(crate) fn no_events<const N: usize>() -> [libc::epoll_event; N] {
    [libc::epoll_event { events: 0, u64: 0 }; N]
}

fn clock_ns(clock: libc::clockid_t) -> io::Result<u64> {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a local, valid for writing.
    check(unsafe { libc::clock_gettime(clock, &raw mut now) })?;
    Ok(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

/// Returns `CLOCK_MONOTONIC` in nanoseconds.
pub(crate) fn monotonic_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC).expect("every Linux kernel has CLOCK_MONOTONIC")
}

/// The clock that counts the CPU time of one thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadClock(libc::clockid_t);

impl ThreadClock {
    pub(crate) fn of_this_thread() -> io::Result<Self> {
        let mut clock = 0;
        // SAFETY: `pthread_self` takes nothing and names a live thread, this one; `clock` is a
        // local, valid for writing.
        let error = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
        if error == 0 {
            Ok(ThreadClock(clock))
        } else {
            Err(io::Error::from_raw_os_error(error))
        }
    }

    /// Returns the CPU time used so far, user and kernel, in nanoseconds; an error once the thread
    /// has ended.
    pub(crate) fn read(self) -> io::Result<u64> {
        clock_ns(self.0)
    }
}

/// Lets this thread run on `cpu` only.
///
/// # Errors
/// There is no such CPU, or none that this process may use.
pub fn pin_this_thread(cpu: usize) -> io::Result<()> {
    run_this_thread_where(|at| at == cpu)
}

/// Lets this thread run on any CPU but `cpu`.
///
/// # Errors
/// There is no other, or none that this process may use.
pub(crate) fn keep_this_thread_off(cpu: usize) -> io::Result<()> {
    run_this_thread_where(|at| at != cpu)
}

fn run_this_thread_where(is_allowed: impl Fn(usize) -> bool) -> io::Result<()> {
    // SAFETY: a `cpu_set_t` is a bit array; all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    for cpu in (0..libc::CPU_SETSIZE as usize).filter(|&cpu| is_allowed(cpu)) {
        // SAFETY: `cpu` is within the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: pid 0 is this thread; `set` is a local of exactly the size given.
    check(unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) })?;
    Ok(())
}
