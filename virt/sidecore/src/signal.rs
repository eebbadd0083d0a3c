//! Signalling and emptying eventfds that another process holds too, without ever waiting.
//!
//! `write(2)` to an eventfd whose counter is full waits unless the *open file* has O_NONBLOCK, and
//! the open file is shared: the peer that sent us the descriptor can fill the counter and clear the
//! flag at any moment, also between a check of both and the write. It could block a sidecore, and
//! all guests on it, for as long as it likes. There is no RWF_NOWAIT for writing eventfds (they
//! have no `write_iter`), poll(2) and fcntl(2) before the write only make the window small, and
//! io_uring looks at the same flag.
//!
//! The kernel's own signal (`eventfd_signal`) never waits. It comes with the completion of an
//! operation of Linux AIO that names the descriptor (`IOCB_FLAG_RESFD`). So each thread has an AIO
//! context, and signals by submitting a poll of something that is ready: it completes inside
//! `io_submit(2)`. A full counter stays full. It takes about half a microsecond longer than a write
//! (950 ns against 360 to 550 ns, measured in a loop on a 6.18 guest kernel).
//!
//! A peer that is signalled often gets a quicker way, see [`peer`]: the write, under a [`watchdog`]
//! that ends it where it waits.
//!
//! Where AIO is not to be had (CONFIG_AIO off, a seccomp filter of one of its calls,
//! `fs.aio-max-nr` used up) only the write is left, also under the watchdog: each is held for
//! milliseconds at most. [`never_waits`] reports that. Only where there is neither
//! ([`writes_are_watched`]) can a peer block the caller as described above. A context is tried
//! before it is used, since a signal that was refused would be lost.
//!
//! Reading never waits: eventfds support RWF_NOWAIT for it (Linux 5.8). Where `preadv2` is refused,
//! a poll goes before the read, and another reader can come in between. [`never_waits`] reports
//! whether the host has both.
//!
//! UNSAFETY: system calls without a wrapper in std. The kernel reads one `iocb` during `io_submit`
//! and copies what it needs; it writes events into an array of ours during `io_getevents`, and a
//! count into one of eight bytes during `preadv2`; all are references of ours, valid for the call.
#![expect(unsafe_code, reason = "system calls; see the head comment")]

use std::{
    cell::OnceCell,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
    sync::{Mutex, OnceLock, PoisonError},
};

use crate::sys::EventFd;

mod handshake;
mod peer;
mod watchdog;

pub use peer::{PeerEventFd, WritePermit};

use watchdog::{Wake, Written};

/// Completions that may wait to be taken, at least.
const DEPTH: libc::c_long = 64;
/// Signals between two emptyings of the completions.
const REAP_EVERY: u32 = 32;

const IOCB_CMD_POLL: u16 = 5;
const IOCB_FLAG_RESFD: u32 = 1;

/// `struct iocb` (linux/aio_abi.h), little-endian.
#[repr(C)]
#[derive(Debug)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buf: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}
const _: () = assert!(size_of::<Iocb>() == 64);

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct IoEvent([u64; 4]);

/// AIO context; one thread at a time uses it.
#[derive(Debug)]
struct Signaller {
    context: libc::c_ulong,
    ready: &'static EventFd,
    since_reap: std::cell::Cell<u32>,
}

impl Signaller {
    fn new() -> io::Result<Self> {
        let ready = match READY.get() {
            Some(ready) => ready,
            None => {
                let ready = EventFd::new()?;
                READY.get_or_init(|| ready)
            }
        };
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes one word into `context`, which is ours and 0, as it has to be.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, DEPTH, &raw mut context) };
        if made != 0 {
            return Err(io::Error::last_os_error());
        }
        let this = Self {
            context,
            ready,
            since_reap: Default::default(),
        };
        this.try_once()?;
        Ok(this)
    }

    /// Signals an eventfd of its own and takes the completion. A context that fails stays with the
    /// kernel, like all of them.
    fn try_once(&self) -> io::Result<()> {
        let own = EventFd::new()?;
        self.signal(own.as_raw_fd())?;
        match self.reap() {
            1 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn signal(&self, fd: RawFd) -> io::Result<()> {
        let mut iocb = Iocb {
            data: 0,
            key: 0,
            rw_flags: 0,
            opcode: IOCB_CMD_POLL,
            priority: 0,
            fd: self.ready.as_raw_fd() as u32,
            buf: libc::POLLOUT as u64,
            bytes: 0,
            offset: 0,
            reserved: 0,
            flags: IOCB_FLAG_RESFD,
            result_fd: fd as u32,
        };
        if self.since_reap.get() >= REAP_EVERY {
            self.reap();
        }
        self.since_reap.set(self.since_reap.get() + 1);
        let list = [&raw mut iocb];
        // SAFETY: one pointer to one structure, both on this stack; the kernel writes `key` into it
        // and keeps neither.
        let submitted =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1_usize, list.as_ptr()) };
        if submitted == 1 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Takes and drops the completions; returns their number, or -1.
    fn reap(&self) -> libc::c_long {
        let mut events = [IoEvent::default(); DEPTH as usize];
        let no_wait: libc::timespec = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the kernel writes at most as many events as the array has.
        let taken = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0_usize,
                events.len(),
                events.as_mut_ptr(),
                ptr::from_ref(&no_wait),
            )
        };
        self.since_reap.set(0);
        taken
    }
}

/// Eventfd polled by the submitted operations: always writable, never read.
static READY: OnceLock<EventFd> = OnceLock::new();

/// Contexts of threads that have ended, for the next ones. None is destroyed before the process
/// ends: `io_destroy(2)` waits for two RCU grace periods, usually 30 ms, and has been seen to wait
/// for 20 s.
static SPARE: Mutex<Vec<Signaller>> = Mutex::new(Vec::new());

/// A thread's context, if there is one for it.
#[derive(Debug)]
struct Own(Option<Signaller>);

impl Own {
    fn get() -> Self {
        // In a statement of its own: the lock is released before a context is created.
        let spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Own(spare.or_else(|| Signaller::new().ok()))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        spare.extend(self.0.take());
    }
}

thread_local! {
    static SIGNALLER: OnceCell<Own> = const { OnceCell::new() };
}

/// Returns whether [`signal_eventfd`] and [`drain_eventfd`] never wait on this thread: whether the
/// kernel gave it an AIO context, and reads eventfds without waiting.
pub fn never_waits() -> bool {
    SIGNALLER.with(|own| own.get_or_init(Own::get).0.is_some()) && reads_without_waiting()
}

/// Returns whether reading an eventfd without O_NONBLOCK and without a signal fails with EAGAIN.
fn reads_without_waiting() -> bool {
    // SAFETY: no pointers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if fd < 0 {
        return false;
    }
    // SAFETY: a new descriptor, which is owned here alone.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    read_without_waiting(fd.as_fd()).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

/// Returns whether the process's watchdog ends writes that a peer makes wait. The first call starts
/// the watchdog's thread, on the CPUs that the caller may use: call it before threads are pinned.
pub fn writes_are_watched() -> bool {
    watchdog::is_there()
}

/// Adds one to an eventfd; one that is full stays full. Never waits, whatever mode the descriptor
/// is in and whatever other process has it; see the head of this module for the one exception.
///
/// # Errors
/// It is no eventfd.
pub fn signal_eventfd(fd: BorrowedFd<'_>) -> io::Result<()> {
    SIGNALLER.with(|own| match &own.get_or_init(Own::get).0 {
        Some(signaller) => signaller.signal(fd.as_raw_fd()),
        None => write_watched(fd),
    })
}

#[cold]
fn write_watched(fd: BorrowedFd<'_>) -> io::Result<()> {
    match watchdog::write(fd, Wake::Now)? {
        Written::Done | Written::Held => Ok(()),
        Written::Unwatched => watchdog::write_one(fd),
    }
}

/// Empties an eventfd; returns whether it had been signalled. Never waits, whatever mode the
/// descriptor is in and whatever other process has it; see the head of this module for the one
/// exception.
pub fn drain_eventfd(fd: BorrowedFd<'_>) -> bool {
    match read_without_waiting(fd) {
        Ok(is_signalled) => is_signalled,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
        Err(_) => read_if_readable(fd),
    }
}

/// Reads an eventfd without RWF_NOWAIT, which this host refuses.
#[cold]
fn read_if_readable(fd: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one structure of ours, and no waiting.
    let is_readable = unsafe { libc::poll(&raw mut poll, 1, 0) } == 1;
    let mut count = [0_u8; 8];
    // SAFETY: eight bytes of ours are written.
    is_readable && unsafe { libc::read(fd.as_raw_fd(), count.as_mut_ptr().cast(), 8) } == 8
}

/// Reads an eventfd; returns whether that gave a count.
fn read_without_waiting(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut count = [0_u8; 8];
    let place = libc::iovec {
        iov_base: count.as_mut_ptr().cast(),
        iov_len: count.len(),
    };
    // An offset of -1: the file has no position.
    // SAFETY: one place of eight bytes of ours, to which the kernel writes during the call.
    let read = unsafe { libc::preadv2(fd.as_raw_fd(), &raw const place, 1, -1, libc::RWF_NOWAIT) };
    match read {
        -1 => Err(io::Error::last_os_error()),
        read => Ok(read == 8),
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
