//! The userfaultfd descriptor.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use guest_mem::Hva;

use crate::abi::{self, Features, Modes, Request};

/// Accesses whose faults a descriptor serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// This process's own accesses and the kernel's: KVM's and system calls' on behalf of a guest.
    /// Permitted to root, with `CAP_SYS_PTRACE`, and to users that may open `/dev/userfaultfd`.
    Kernel,
    /// This process's own loads and stores. Permitted to any process; a system call that meets such
    /// a page fails.
    User,
}

/// Protection of a page against stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// A store is permitted.
    Writable = 0,
    /// A store is a fault.
    WriteProtected = 1,
}

/// Reason for which an access waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The page is absent.
    Missing,
    /// A store, and the page is write-protected.
    WriteProtected,
    /// The file has the page, the mapping has not.
    Minor,
}

/// An access that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Address of the accessed page, not of the byte.
    pub address: Hva,
    /// Reason for which it waits.
    pub kind: FaultKind,
    /// Whether it is a store, as far as the kernel knows.
    pub is_write: bool,
}

/// A userfaultfd. Ranges are of whole pages. Registered ranges are not served any more once it is
/// dropped.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

impl Uffd {
    /// Opens a userfaultfd, which never blocks.
    ///
    /// # Errors
    /// The kernel's reason with what to do: no permission for kernel-mode faults, or no such
    /// feature.
    pub fn open(source: Source, features: Features) -> io::Result<Self> {
        let uffd = Self(open(source)?);
        let Features(bits) = features;
        uffd.request(abi::HANDSHAKE, &mut [abi::API, bits, 0])
            .map_err(|e| {
                context(
                    e,
                    &format!("this kernel's userfaultfd lacks one of {bits:#x}"),
                )
            })?;
        Ok(uffd)
    }

    /// Makes faults of `modes` in the range messages of this descriptor.
    ///
    /// # Safety
    /// The range is a mapping of the caller's, which stays until the descriptor is dropped. There
    /// are no references into it now or later: an absent page may come to hold anything, and any
    /// access may wait.
    ///
    /// # Errors
    /// The kernel's: not a mapping of a kind that it serves, or registered elsewhere.
    pub unsafe fn register(&self, start: Hva, len: u64, modes: Modes) -> io::Result<()> {
        self.request(abi::REGISTER, &mut [start.raw(), len, modes.0, 0])
    }

    /// Protects registered pages, or permits stores and wakes those that wait.
    ///
    /// # Errors
    /// The kernel's: `ENOENT` for a range that is not registered so.
    pub fn write_protect(&self, start: Hva, len: u64, protection: Protection) -> io::Result<()> {
        let mut words = [start.raw(), len, protection as u64];
        loop {
            match self.request(abi::WRITEPROTECT, &mut words) {
                // The address space is changing under us; the kernel asks to try again.
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => {}
                other => return other,
            }
        }
    }

    /// Fills absent registered pages from `bytes` and wakes the accesses that wait for them.
    /// Returns the number of bytes filled: the caller must repeat the call for the rest.
    ///
    /// # Errors
    /// The kernel's: `AlreadyExists` if the first page is not absent; accesses that wait for it
    /// must then be woken by [`wake`](Self::wake).
    pub fn copy(&self, start: Hva, bytes: &[u8], protection: Protection) -> io::Result<u64> {
        let (from, len) = (bytes.as_ptr().addr() as u64, bytes.len() as u64);
        let mode = fill_mode(protection);
        self.fill(abi::COPY, [start.raw(), from, len, mode, 0])
    }

    /// Fills with zeroes, otherwise as [`copy`](Self::copy).
    ///
    /// # Errors
    /// As those of [`copy`](Self::copy).
    pub fn zero(&self, start: Hva, len: u64) -> io::Result<u64> {
        self.fill(abi::ZEROPAGE, [start.raw(), len, 0, 0])
    }

    /// Maps the page that the file already has, after a minor fault; otherwise as
    /// [`copy`](Self::copy). Protected pages need Linux 6.6.
    ///
    /// # Errors
    /// As those of [`copy`](Self::copy).
    pub fn map_present(&self, start: Hva, len: u64, protection: Protection) -> io::Result<u64> {
        let mode = fill_mode(protection);
        self.fill(abi::CONTINUE, [start.raw(), len, mode, 0])
    }

    /// Wakes the accesses that wait in the range; they are retried.
    ///
    /// # Errors
    /// The kernel's, for an invalid range.
    pub fn wake(&self, start: Hva, len: u64) -> io::Result<()> {
        self.request(abi::WAKE, &mut [start.raw(), len])
    }

    /// Takes the message of the next access that waits; `None` if there is none now.
    ///
    /// # Errors
    /// The kernel's.
    pub fn next_fault(&self) -> io::Result<Option<Fault>> {
        // One `struct uffd_msg`: byte 0 says what happened; of a fault the second word has the
        // flags, the third the address.
        let mut message = [0_u64; 4];
        let len = size_of_val(&message);
        // SAFETY: reads at most `len` bytes into an array of that size, from a descriptor we own. A
        // read that waits for nothing is not interrupted.
        let read = unsafe { libc::read(self.0.as_raw_fd(), message.as_mut_ptr().cast(), len) };
        if read != len as isize {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock => Ok(None),
                _ => Err(error),
            };
        }
        let [what, flags, address, _] = message;
        let is_fault = what.to_ne_bytes()[0] == abi::EVENT_PAGEFAULT;
        assert!(is_fault, "no feature that makes other events is asked for");
        Ok(Some(Fault {
            address: Hva::new(address),
            kind: match flags {
                _ if flags & abi::FAULT_WP != 0 => FaultKind::WriteProtected,
                _ if flags & abi::FAULT_MINOR != 0 => FaultKind::Minor,
                _ => FaultKind::Missing,
            },
            is_write: flags & abi::FAULT_WRITE != 0,
        }))
    }

    /// Makes a request whose last word returns the bytes done. It is no error if not all of them
    /// are done, for which the kernel returns `EAGAIN`.
    fn fill<const N: usize>(&self, request: Request<N>, mut words: [u64; N]) -> io::Result<u64> {
        let done = self.request(request, &mut words);
        match done {
            Err(e) if e.raw_os_error() != Some(libc::EAGAIN) => Err(e),
            // A negative value is an error: nothing is done.
            _ => Ok(u64::try_from(words[N - 1].cast_signed()).unwrap_or(0)),
        }
    }

    fn request<const N: usize>(
        &self,
        Request(number): Request<N>,
        words: &mut [u64; N],
    ) -> io::Result<()> {
        // SAFETY: the request's number says that its argument is as long as `words`, which outlive
        // the call. What it does to other memory it does to registered ranges, whose owners agreed
        // (`register`); `copy` reads what it borrows.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), number as _, words.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Readable while an access waits whose message has not been taken.
impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns the mode of copy and continue: bit 1 is protection, bit 0 suppresses the wake-up.
fn fill_mode(protection: Protection) -> u64 {
    (protection as u64) << 1
}

fn context(error: io::Error, what: &str) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

fn open(source: Source) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let mode = match source {
        Source::Kernel => 0,
        Source::User => abi::USER_MODE_ONLY,
    };
    // SAFETY: the system call takes one integer and answers a descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags | mode) };
    if fd >= 0 {
        // SAFETY: a new descriptor from the kernel, which no other value owns.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
    }
    let refused = io::Error::last_os_error();
    // Where a filter forbids the system call, the device serves both kinds.
    let device = File::open("/dev/userfaultfd").map_err(|_| match source {
        Source::User => refused,
        Source::Kernel => context(
            refused,
            "userfaultfd for kernel faults needs root, CAP_SYS_PTRACE or /dev/userfaultfd",
        ),
    })?;
    // SAFETY: this request takes its flags by value and answers a descriptor or -1.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), abi::IOC_NEW as _, flags | mode) };
    if fd < 0 {
        return Err(context(io::Error::last_os_error(), "/dev/userfaultfd"));
    }
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
