//! An eventfd that is signalled often: by a ring of its own.
//!
//! An io_uring signals the eventfd registered with it whenever a completion is posted, by the kernel's own signal as well; so it
//! never waits either. Posting one by a message to the ring (IORING_REGISTER_SEND_MSG_RING, Linux 6.13) takes half as long as what
//! AIO does, and an operation that does nothing two thirds: 395 and 480 ns beside 760, and 250 for a write that may wait. It
//! matters beyond the processor time: a guest's processor that is still on its way to halt when the call arrives does not halt.
//! (Another process can hold a write; and a ring of all eventfds would need two system calls more for each change between them.)
//!
//! A ring is a descriptor, 16 KiB of the kernel's memory and 40 µs to make, so an eventfd is signalled [`RARE`] times in the other
//! way first. Idle disks have none, nor one that is set up and taken down again and again.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    ptr,
};

use io_uring::{IoUring, opcode};

use super::signal_eventfd;

/// Signals of an eventfd before it gets a ring.
const RARE: u32 = 1024;

const IORING_REGISTER_SEND_MSG_RING: libc::c_uint = 31;
const IORING_OP_MSG_RING: u8 = 40;

/// An eventfd that another process holds too, with the quickest way of signalling it that never waits.
#[derive(Debug)]
pub struct FrequentSignal<F> {
    fd: F,
    way: Way,
}

/// How it is signalled.
#[derive(Debug)]
enum Way {
    /// As any other, so many times yet.
    Rare(u32),
    /// As any other: there is no ring to be had.
    Always,
    /// By messages to its ring.
    Message(Box<Bell>),
    /// By operations of its ring that do nothing.
    Operation(Box<Bell>),
}

impl<F: AsFd> FrequentSignal<F> {
    /// Signals `fd`.
    pub const fn new(fd: F) -> Self {
        Self {
            fd,
            way: Way::Rare(RARE),
        }
    }

    /// Adds one to the eventfd, as [`signal_eventfd`] does.
    ///
    /// # Errors
    /// It is no eventfd.
    #[inline]
    pub fn signal(&mut self) -> io::Result<()> {
        let done = match &mut self.way {
            Way::Message(bell) => bell.message(),
            Way::Operation(bell) => bell.operation(),
            Way::Rare(_) | Way::Always => Err(io::ErrorKind::Unsupported.into()),
        };
        match done {
            Ok(()) => Ok(()),
            Err(_) => self.signal_otherwise(),
        }
    }

    #[cold]
    fn signal_otherwise(&mut self) -> io::Result<()> {
        self.way = match std::mem::replace(&mut self.way, Way::Always) {
            Way::Rare(0) => match Bell::new(&self.fd) {
                Ok(bell) => Way::Message(Box::new(bell)),
                Err(_) => Way::Always,
            },
            Way::Rare(left) => Way::Rare(left - 1),
            // The kernel is older.
            Way::Message(bell) => Way::Operation(bell),
            Way::Operation(_) | Way::Always => Way::Always,
        };
        signal_eventfd(self.fd.as_fd())
    }
}

/// A ring whose completions signal an eventfd.
struct Bell {
    ring: IoUring,
    /// What is posted to it.
    message: [u8; 64],
}

impl std::fmt::Debug for Bell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bell").finish_non_exhaustive()
    }
}

impl Bell {
    fn new(fd: &impl AsFd) -> io::Result<Self> {
        let ring = IoUring::new(1)?;
        let eventfd = fd.as_fd().as_raw_fd();
        ring.submitter().register_eventfd(eventfd)?;
        // `struct io_uring_sqe` (linux/io_uring.h): the operation, and at offset 4 the descriptor of the ring it goes to.
        let mut message = [0; 64];
        message[0] = IORING_OP_MSG_RING;
        message[4..8].copy_from_slice(&ring.as_raw_fd().to_ne_bytes());
        Ok(Self { ring, message })
    }

    /// Posts a completion by a message.
    #[inline]
    fn message(&mut self) -> io::Result<()> {
        // SAFETY: the kernel reads 64 bytes of ours during the call; the message names no memory.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_io_uring_register,
                -1,
                IORING_REGISTER_SEND_MSG_RING,
                ptr::from_ref(&self.message),
                1,
            )
        };
        self.forget();
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Posts a completion by an operation that does nothing.
    fn operation(&mut self) -> io::Result<()> {
        let nop = opcode::Nop::new().build();
        // SAFETY: it points to nothing. A queue that is full holds one that has not been submitted, which does as well.
        let _ = unsafe { self.ring.submission().push(&nop) };
        let submitted = self.ring.submit()?;
        self.forget();
        match submitted {
            1 => Ok(()),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Makes room for the next completion.
    fn forget(&mut self) {
        self.ring.completion().for_each(drop);
    }
}

#[cfg(test)]
impl<F> FrequentSignal<F> {
    /// One in each way that this kernel has, named.
    pub(super) fn each(make: impl Fn() -> F) -> Vec<(&'static str, Self)>
    where
        F: AsFd,
    {
        let mut all = vec![("rare", Self::new(make()))];
        for (name, way) in [
            ("message", Way::Message as fn(Box<Bell>) -> Way),
            ("operation", Way::Operation),
        ] {
            let fd = make();
            match Bell::new(&fd) {
                Ok(bell) => all.push((
                    name,
                    Self {
                        way: way(Box::new(bell)),
                        fd,
                    },
                )),
                Err(error) => eprintln!("skipped: no io_uring here: {error}"),
            }
        }
        all
    }

    /// The eventfd.
    pub(super) fn fd(&self) -> std::os::fd::BorrowedFd<'_>
    where
        F: AsFd,
    {
        self.fd.as_fd()
    }

    /// The word of the way it is signalled in now.
    pub(super) fn way(&self) -> &'static str {
        match self.way {
            Way::Rare(_) => "rare",
            Way::Always => "always",
            Way::Message(_) => "message",
            Way::Operation(_) => "operation",
        }
    }
}
