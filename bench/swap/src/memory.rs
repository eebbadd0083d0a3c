//! Memory as a guest's vCPU and the host's kernel see it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use guest_mem::{Gpa, GuestRam, HugePages, PAGE_SIZE, SlotMapping};

/// Memory of so many pages, and a mapping of it like that of a memory slot.
pub fn memory(pages: usize) -> anyhow::Result<(GuestRam, SlotMapping)> {
    let size = pages as u64 * PAGE_SIZE;
    let ram = GuestRam::with_pages(&[(Gpa::new(0), size)], HugePages::Never)?;
    let mapping = ram.slot_mapping(&ram.regions()[0])?;
    Ok((ram, mapping))
}

/// Loads a page's first byte, as a processor of the guest would.
#[expect(unsafe_code, reason = "there are no references into a guest's memory")]
pub fn load(mapping: &SlotMapping, page: usize) -> u8 {
    let offset = page as u64 * PAGE_SIZE;
    assert!(offset < mapping.len());
    let at = mapping.hva().raw() + offset;
    // SAFETY: inside the mapping, as was just looked at, which is borrowed; a byte is always
    // aligned. It may wait.
    unsafe { std::ptr::with_exposed_provenance::<u8>(at as usize).read_volatile() }
}

/// Spins, as a guest's vCPU would, and calls `meanwhile`, until the file has no memory any more.
/// Asks the kernel once in 64 calls only: the pager, which `meanwhile` answers, must not wait for
/// the system call.
pub fn wait_until_empty(
    ram: &GuestRam,
    mut meanwhile: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    while rustix::fs::fstat(ram.memfd().expect("a file"))?.st_blocks != 0 {
        for _ in 0..64 {
            meanwhile()?;
            std::hint::spin_loop();
        }
    }
    Ok(())
}

/// `struct pm_scan_arg` of `linux/fs.h`: twelve words.
const SCAN: u64 = 3 << 30 | 96 << 16 | (b'f' as u64) << 8 | 16;
const WRITTEN: u64 = 1 << 1;

/// A run of pages: first byte, end, categories.
type Run = [u64; 3];

/// `PAGEMAP_SCAN` for pages that are written: how many runs of them there are in so many pages from
/// `start`.
#[expect(unsafe_code, reason = "a request that no safe crate has")]
pub fn scan(pagemap: &File, start: u64, pages: usize, runs: &mut [Run]) -> io::Result<usize> {
    let end = start + pages as u64 * PAGE_SIZE;
    let vector = runs.as_mut_ptr().addr() as u64;
    // Size, flags, start, end, end of the walk, vector, its length, most pages; inverted, all of,
    // any of, answered.
    let mut words = [
        96,
        0,
        start,
        end,
        0,
        vector,
        runs.len() as u64,
        0,
        0,
        WRITTEN,
        0,
        WRITTEN,
    ];
    // SAFETY: the argument is as long as its first word says, and names a vector that is borrowed,
    // with its length. Without flags nothing is changed but these.
    let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), SCAN as _, words.as_mut_ptr()) };
    usize::try_from(found).map_err(|_| io::Error::last_os_error())
}
