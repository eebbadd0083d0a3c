//! Guest memory, as a vCPU and as the host's kernel access it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use guest_mem::{Gpa, GuestRam, HugePages, PAGE_SIZE, SlotMapping};

/// Creates memory of `pages` pages, and a mapping of it like that of a KVM memory slot.
pub fn memory(pages: usize) -> anyhow::Result<(GuestRam, SlotMapping)> {
    let size = pages as u64 * PAGE_SIZE;
    let ram = GuestRam::with_pages(&[(Gpa::new(0), size)], HugePages::Never)?;
    let mapping = ram.slot_mapping(&ram.regions()[0])?;
    Ok((ram, mapping))
}

/// Loads the first byte of a page, as a vCPU would.
#[expect(unsafe_code, reason = "there are no references into a guest's memory")]
pub fn load(mapping: &SlotMapping, page: usize) -> u8 {
    let offset = page as u64 * PAGE_SIZE;
    assert!(offset < mapping.len());
    let at = mapping.hva().raw() + offset;
    // SAFETY: inside the mapping, as just checked, which is borrowed; a byte is always aligned. The
    // load may block on a fault.
    unsafe { std::ptr::with_exposed_provenance::<u8>(at as usize).read_volatile() }
}

/// Spins, as a vCPU would, and calls `meanwhile`, until the memory file has no pages any more. Asks
/// the kernel once in 64 calls only, so that the pager, to which `meanwhile` replies, is not
/// delayed by the system call.
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

/// `PAGEMAP_SCAN` with `struct pm_scan_arg` of `linux/fs.h`: twelve words.
const SCAN: u64 = 3 << 30 | 96 << 16 | (b'f' as u64) << 8 | 16;
const WRITTEN: u64 = 1 << 1;

/// `struct page_region`: start, end, categories.
type Run = [u64; 3];

/// Calls `PAGEMAP_SCAN` for written pages. Returns the number of runs of them among `pages` pages
/// from `start` on.
#[expect(unsafe_code, reason = "a request that no safe crate has")]
pub fn scan(pagemap: &File, start: u64, pages: usize, runs: &mut [Run]) -> io::Result<usize> {
    let end = start + pages as u64 * PAGE_SIZE;
    let vector = runs.as_mut_ptr().addr() as u64;
    // The fields of the structure: size, flags, start, end, walk_end, vec, vec_len, max_pages,
    // category_inverted, category_mask, category_anyof_mask, return_mask.
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
    // SAFETY: the argument is as long as its first word says. It names a vector that is borrowed,
    // with its length. Without flags the kernel writes only to these two.
    let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), SCAN as _, words.as_mut_ptr()) };
    usize::try_from(found).map_err(|_| io::Error::last_os_error())
}
