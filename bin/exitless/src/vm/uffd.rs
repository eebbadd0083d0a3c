//! Write protection of one register page by userfaultfd, so that a sidecore that sleeps is woken by a
//! guest's plain store (`userfaultfd(2)`, `UFFDIO_WRITEPROTECT`; shared memory needs Linux 5.19).
//!
//! The protection covers one *mapping*: [`SlotMapping`], made for KVM's memory slot alone. The sidecore reads
//! and writes the registers through a mapping of its own and never meets the protection.
//!
//! A store meets it in kernel mode (KVM resolves the guest's fault), so the descriptor must be one that
//! may serve kernel faults: root, `CAP_SYS_PTRACE`, or access to `/dev/userfaultfd`.
//!
//! UNSAFETY: system calls on a descriptor this module owns and on an address range its caller lends;
//! no memory is read or written here but the argument structures.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use guest_mem::Hva;

const UFFD_API: u64 = 0xaa;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const REGISTER_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const USERFAULTFD_IOC_NEW: u64 = 0xaa00;
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_WRITEPROTECT: u64 = 0xc018_aa06;
/// Bytes of one `struct uffd_msg`.
const MSG_SIZE: usize = 32;
const PAGE: u64 = 4096;

#[repr(C)]
struct ApiArg {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct RegisterArg {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct WriteProtectArg {
    start: u64,
    len: u64,
    mode: u64,
}

/// A second mapping of a register page, for KVM's memory slot.
#[derive(Debug)]
pub struct SlotMapping {
    hva: Hva,
}

impl SlotMapping {
    /// Maps the first 4 KiB of `memfd`, shared and writable.
    pub fn new(memfd: BorrowedFd<'_>) -> io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE as usize,
                prot,
                libc::MAP_SHARED,
                memfd.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            hva: Hva::new(start.addr() as u64),
        })
    }

    /// Where the page is mapped: `userspace_addr` of the memory slot.
    pub fn hva(&self) -> Hva {
        self.hva
    }
}

impl Drop for SlotMapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which no pointer or reference was made in this process; a KVM slot
        // that still names it finds nothing there and faults the guest.
        unsafe { libc::munmap(self.hva.raw() as *mut libc::c_void, PAGE as usize) };
    }
}

/// A page whose write protection can be switched on and off, and a descriptor that is readable while a
/// store waits at it.
#[derive(Debug)]
pub struct WriteGate {
    fd: OwnedFd,
    mapping: SlotMapping,
    protected: bool,
}

impl WriteGate {
    /// Watches `mapping`, not yet protected.
    ///
    /// # Errors
    /// The mapping back, and the kernel's reason with what to do: no permission for kernel-mode faults, or
    /// no such feature.
    pub fn new(mapping: SlotMapping) -> Result<Self, (SlotMapping, io::Error)> {
        match watch(&mapping) {
            Ok(fd) => Ok(Self {
                fd,
                mapping,
                protected: false,
            }),
            Err(error) => Err((mapping, error)),
        }
    }

    /// Readable while a store waits at the protected page.
    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// From its return on, a store to the page waits and makes the descriptor readable. A store that came
    /// before is in memory: read every register again before sleeping.
    pub fn protect(&mut self) -> io::Result<()> {
        self.write_protect(WRITEPROTECT_MODE_WP)?;
        self.protected = true;
        Ok(())
    }

    /// Lets waiting and later stores through; answers how many had been waiting.
    pub fn unprotect(&mut self) -> io::Result<u64> {
        if !self.protected {
            return Ok(0);
        }
        let waiting = self.drain();
        self.write_protect(0)?;
        self.protected = false;
        // One that arrived between the drain and the unprotect has been woken too; its message is stale.
        Ok(waiting + self.drain())
    }

    fn write_protect(&self, mode: u64) -> io::Result<()> {
        let mut arg = WriteProtectArg {
            start: self.mapping.hva().raw(),
            len: PAGE,
            mode,
        };
        loop {
            match ioctl(&self.fd, UFFDIO_WRITEPROTECT, &mut arg) {
                // The address space is changing under us (a mapping elsewhere); the kernel asks to try again.
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => {}
                other => return other,
            }
        }
    }

    /// Reads the waiting messages: at most one a vCPU, so that the loop is bounded by their number.
    fn drain(&self) -> u64 {
        let mut count = 0;
        let mut msg = [0_u8; MSG_SIZE];
        // SAFETY: reads at most MSG_SIZE bytes into an array of that size, from a descriptor we own.
        while unsafe { libc::read(self.fd(), msg.as_mut_ptr().cast(), MSG_SIZE) }
            == MSG_SIZE as isize
        {
            count += 1;
        }
        count
    }
}

/// A descriptor on which faults at the write-protected `mapping` arrive.
fn watch(mapping: &SlotMapping) -> io::Result<OwnedFd> {
    let fd = open()?;
    let mut api = ApiArg {
        api: UFFD_API,
        features: FEATURE_PAGEFAULT_FLAG_WP | FEATURE_WP_HUGETLBFS_SHMEM,
        ioctls: 0,
    };
    ioctl(&fd, UFFDIO_API, &mut api).map_err(|e| {
        context(
            e,
            "this kernel's userfaultfd cannot write-protect shared memory (Linux 5.19)",
        )
    })?;
    let mut register = RegisterArg {
        start: mapping.hva().raw(),
        len: PAGE,
        mode: REGISTER_MODE_WP,
        ioctls: 0,
    };
    ioctl(&fd, UFFDIO_REGISTER, &mut register)
        .map_err(|e| context(e, "registering the register page with userfaultfd"))?;
    Ok(fd)
}

fn context(error: io::Error, what: &str) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

fn open() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the system call takes one integer and answers a descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if fd >= 0 {
        // SAFETY: a descriptor the kernel has just given to us alone.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
    }
    let refused = io::Error::last_os_error();
    let device = File::open("/dev/userfaultfd").map_err(|_| {
        context(
            refused,
            "userfaultfd for kernel faults needs root, CAP_SYS_PTRACE or /dev/userfaultfd",
        )
    })?;
    // SAFETY: this request takes its flags by value and answers a descriptor or -1.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, flags) };
    if fd < 0 {
        return Err(context(io::Error::last_os_error(), "/dev/userfaultfd"));
    }
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn ioctl<T>(fd: &OwnedFd, request: u64, arg: &mut T) -> io::Result<()> {
    // SAFETY: every request of this module is called with the structure that its number encodes (size and
    // direction), which outlives the call.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request as _, std::ptr::from_mut(arg)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
