//! Tests of the running kernel's behaviour on shared memory under userfaultfd.
//!
//! A pager drops a page without writing it to its store if the kernel reports that no vCPU has
//! stored to it. A kernel that lacks a feature, or reports wrongly, would cost a guest its data.
//! Neither version numbers nor lists of features are enough: distributions backport features, and
//! containers forbid some.
//! [`Facts::probe`] creates a memory file of a few pages and treats them as a pager does
//! ([`GuestMapping`]), in a millisecond or so; it leaves nothing behind.
//!
//! * [`Facts`]: results, each with a remedy where a feature is lacking.
//! * `clean`: whether `PAGEMAP_SCAN` lists the pages that were not stored to, and no others.
//! * `scan`: the answer of `PAGEMAP_SCAN` to a query for the pages that were stored to. For
//!   information only.
//!
//! **The probe never waits.** Its descriptor serves faults of user mode only, and the kernel itself
//! stores to the pages (pread(2) into them): a store that meets an absent page, or a protection
//! that would need an answer, fails.
//!
//! Not tested: whether faults of KVM arrive, since that takes a guest ([`Facts::kernel_faults`]
//! tests whether they *may*), and huge pages of all sizes (a file that is written through write(2)
//! gets those of 2 MiB or none).
//!
//! UNSAFETY: one system call that writes into a mapping made for the trial, and one on a descriptor
//! we own.

mod clean;
mod scan;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use guest_mem::{HugePages, Hva, PAGE_SIZE, SlotMapping};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};

pub use self::scan::PagemapScan;
use crate::{Features, GuestMapping, Protection, Source, Stores, Uffd};

/// A feature that a pager needs and the kernel lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    /// Name of the feature.
    pub what: String,
    /// Instruction to the user for providing it.
    pub remedy: &'static str,
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.remedy)
    }
}

/// Result of one test: present, or lacking.
pub type Fact = Result<(), Lack>;

/// Results of the tests. `None` means that a test could not be made, because a feature tested
/// before it is lacking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// This process can serve faults of the kernel, which include those of a guest.
    pub kernel_faults: Fact,
    /// It can serve faults at absent pages of a memory file, and at pages that are in the file but
    /// not mapped.
    pub shared_memory: Option<Fact>,
    /// A store to a write-protected page of shared memory can be recorded by the kernel
    /// (`UFFD_FEATURE_WP_ASYNC`) instead of waiting for an answer.
    pub traced_stores: Option<Fact>,
    /// Pages that were not stored to can be told from others, mapped or not.
    pub clean_evidence: Option<Fact>,
    /// A page added to a memory file takes the memory of one page, not of a huge page.
    pub single_pages: Fact,
    /// Answer of `PAGEMAP_SCAN`, in a query for stored pages, about a page that was stored to and
    /// unmapped. For information.
    pub pagemap_scan: Option<PagemapScan>,
}

const LINUX_6_7: &str = "boot Linux 6.7 or newer, which has it";
const OTHER_KERNEL: &str = "boot another kernel (Debian's 6.12 and Linux 6.18 pass); a container's \
     seccomp filter must let it pass, \
                            too";
const WAY_IN: &str = "start it as root or with CAP_SYS_PTRACE, or give this user access to \
     /dev/userfaultfd; \
                      a container's seccomp filter must let userfaultfd(2) pass";
/// Shell command after which Linux uses huge pages for shared memory only where madvise(2) requests
/// them. This suits guests with and without a pager.
pub const NO_HUGE_PAGES: &str = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";

impl Facts {
    /// Runs the tests.
    pub fn probe() -> Self {
        let kernel_faults = kernel_faults();
        let shared_memory = match Uffd::open(Source::User, Features(0)) {
            // It would fail for the same reason as above.
            Err(_) if kernel_faults.is_err() => None,
            _ => Some(shared_memory()),
        };
        let traced_stores = match shared_memory {
            Some(Ok(())) => Some(traced_stores()),
            _ => None,
        };
        let mut clean_evidence = None;
        let mut pagemap_scan = None;
        if traced_stores == Some(Ok(())) {
            let trial = Trial::new(Stores::Traced);
            clean_evidence = Some(match &trial {
                Ok(trial) => clean::check(trial).map_err(|what| lack(what, OTHER_KERNEL)),
                Err(lack) => Err(lack.clone()),
            });
            pagemap_scan = trial.ok().and_then(|trial| scan::ask(&trial).ok());
        }
        Self {
            kernel_faults,
            shared_memory,
            traced_stores,
            clean_evidence,
            single_pages: single_pages(),
            pagemap_scan,
        }
    }

    /// Returns the lacking features, the most fundamental first. If there are none, a pager can
    /// work on this host.
    pub fn lacks(&self) -> impl Iterator<Item = &Lack> {
        let Self {
            kernel_faults,
            shared_memory,
            traced_stores,
            clean_evidence,
            single_pages,
            pagemap_scan: _,
        } = self;
        [
            Some(kernel_faults),
            shared_memory.as_ref(),
            traced_stores.as_ref(),
            clean_evidence.as_ref(),
            Some(single_pages),
        ]
        .into_iter()
        .flatten()
        .filter_map(|fact| fact.as_ref().err())
    }
}

fn lack(what: impl Into<String>, remedy: &'static str) -> Lack {
    Lack {
        what: what.into(),
        remedy,
    }
}

fn kernel_faults() -> Fact {
    let opened = Uffd::open(Source::Kernel, Features(0));
    opened.map(drop).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => lack(
            "this user may not serve faults of the kernel by userfaultfd, as a guest's are",
            WAY_IN,
        ),
        io::ErrorKind::Unsupported => lack(
            "this kernel has no userfaultfd",
            "boot Linux 6.7 or newer with CONFIG_USERFAULTFD",
        ),
        _ => lack(format!("no userfaultfd: {error}"), WAY_IN),
    })
}

/// Tests whether a descriptor with these features can be opened.
fn features(features: Features, what: &str) -> Fact {
    let opened = Uffd::open(Source::User, features);
    opened.map(drop).map_err(|error| match error.kind() {
        // The kernel's answer for a feature that it does not know.
        io::ErrorKind::InvalidInput => lack(format!("this kernel has no {what}"), LINUX_6_7),
        _ => lack(format!("{what}: {error}"), WAY_IN),
    })
}

fn shared_memory() -> Fact {
    features(
        Features::MISSING_SHARED | Features::MINOR_SHARED,
        "faults at absent pages of shared memory by userfaultfd",
    )?;
    Trial::new(Stores::Unseen).map(drop)
}

fn traced_stores() -> Fact {
    let write_protect = Features::WRITE_PROTECT | Features::WRITE_PROTECT_SHARED;
    features(
        write_protect,
        "write protection of shared memory by userfaultfd (UFFD_FEATURE_WP_HUGETLBFS_SHMEM)",
    )?;
    features(
        write_protect | Features::WRITE_PROTECT_ASYNC,
        "asynchronous write protection by userfaultfd (UFFD_FEATURE_WP_ASYNC)",
    )?;
    Trial::new(Stores::Traced).map(drop)
}

/// Tests whether one page written to a file of some MiB takes no more than its own memory.
fn single_pages() -> Fact {
    const LEN: u64 = 4 << 20;
    let taken = || -> io::Result<u64> {
        let file = memory_file(LEN)?;
        pwrite(&file, &[1], 0)?;
        // Counted in units of 512 bytes, and never negative.
        Ok(fstat(&file)?.st_blocks.unsigned_abs() * 512)
    };
    match taken() {
        Ok(..=PAGE_SIZE) => Ok(()),
        Ok(bytes) => Err(lack(
            format!(
                "transparent huge pages: one page of shared memory takes {} KiB",
                bytes >> 10
            ),
            NO_HUGE_PAGES,
        )),
        Err(error) => Err(lack(
            format!("no memory file: {error}"),
            "give it memory, and file descriptors (ulimit -n)",
        )),
    }
}

fn memory_file(len: u64) -> io::Result<OwnedFd> {
    let file = memfd_create("probe", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, len)?;
    Ok(file)
}

/// A memory file, and a mapping of it like a guest's.
struct Trial {
    // Declared, and so dropped, before the mapping, which must outlast its registration.
    guest: GuestMapping,
    mapping: Arc<SlotMapping>,
    file: OwnedFd,
    pagemap: File,
}

impl Trial {
    /// First and last mapped page, by their numbers in the file.
    const FIRST: u64 = 1;
    const LAST: u64 = 4;
    /// Source of the stores: a page of the file that is not mapped.
    const SOURCE: u64 = 0;

    fn new(stores: Stores) -> Result<Self, Lack> {
        let pagemap = File::open("/proc/self/pagemap").map_err(|error| {
            lack(
                format!("/proc/self/pagemap cannot be read: {error}"),
                "mount /proc, of a kernel with CONFIG_PROC_PAGE_MONITOR",
            )
        })?;
        let made = || -> io::Result<Self> {
            let offset = Self::FIRST * PAGE_SIZE;
            let len = (Self::LAST + 1 - Self::FIRST) * PAGE_SIZE;
            let file = memory_file(offset + len)?;
            let mapping = SlotMapping::new(file.as_fd(), offset, len, HugePages::Never)?;
            let mapping = Arc::new(mapping);
            let guest = GuestMapping::new([(offset, mapping.clone())], Source::User, stores)?;
            Ok(Self {
                guest,
                mapping,
                file,
                pagemap,
            })
        };
        made().map_err(|error| {
            lack(
                format!("a memory file's pages cannot be registered with userfaultfd: {error}"),
                OTHER_KERNEL,
            )
        })
    }

    /// Returns the address of a mapped page.
    fn address(&self, page: u64) -> Hva {
        assert!((Self::FIRST..=Self::LAST).contains(&page));
        Hva::new(self.mapping.hva().raw() + (page - Self::FIRST) * PAGE_SIZE)
    }
}

const _: () = assert!(Trial::SOURCE < Trial::FIRST);

impl clean::Pages for Trial {
    fn fill(&self, page: u64, value: u64) -> io::Result<()> {
        pwrite(&self.file, &value.to_ne_bytes(), page * PAGE_SIZE)?;
        Ok(())
    }

    fn value(&self, page: u64) -> io::Result<u64> {
        let mut bytes = [0; 8];
        pread(&self.file, &mut bytes, page * PAGE_SIZE)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn store(&self, page: u64, value: u64) -> io::Result<()> {
        self.fill(Self::SOURCE, value)?;
        let to = std::ptr::with_exposed_provenance_mut::<u8>(self.address(page).raw() as usize);
        let (from, offset) = (self.file.as_raw_fd(), Self::SOURCE * PAGE_SIZE);
        // SAFETY: the eight bytes begin a page of `mapping` (`address` checks it), which lives as
        // long as `self` and is writable; no code makes references into a `SlotMapping`. An absent
        // page makes the call fail: the descriptor is `Source::User`.
        let read = unsafe { libc::pread(from, to.cast(), 8, offset as libc::off_t) };
        match read {
            8 => Ok(()),
            0.. => Err(io::ErrorKind::WriteZero.into()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn map(&self, page: u64, protection: Protection) -> io::Result<()> {
        self.guest.map(page, 1, protection)
    }

    fn zero(&self, page: u64) -> io::Result<bool> {
        Ok(self.guest.zero(page, 1)? == 1)
    }

    fn protect(&self, page: u64) -> io::Result<()> {
        self.guest.protect(page)
    }

    fn unmap(&self, page: u64) -> io::Result<()> {
        self.guest.unmap(page, 1)
    }

    fn punch(&self, page: u64) -> io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, hole, page * PAGE_SIZE, PAGE_SIZE)?)
    }

    fn is_protected(&self, page: u64) -> io::Result<bool> {
        self.guest.is_protected(page)
    }

    fn has_fault(&self) -> io::Result<bool> {
        Ok(self.guest.next_fault()?.is_some())
    }
}

#[cfg(test)]
mod tests;
