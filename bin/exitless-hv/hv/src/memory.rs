//! Physical memory: the hypervisor's own pages, and the guest's, of which none is the hypervisor's.

use bare::multiboot::Range;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Memory that the hypervisor keeps for itself, with the modules that its loader put behind it: 64
/// MiB.
pub const OWN: core::ops::Range<u64> = 0x3000_0000..0x3400_0000;
/// Beyond this nothing is mapped, neither here (`boot.s`) nor for the guest.
pub const MAPPED: u64 = 512 << 30;

/// The last page of the hypervisor's own, in which nothing is but a pattern: a write of the guest's
/// or of its device's that reaches this memory is seen there.
pub struct Canary;

impl Canary {
    const PLACE: *mut u64 = (OWN.end - PAGE) as *mut u64;

    fn words() -> impl Iterator<Item = (*mut u64, u64)> {
        (0..PAGE as usize / 8).map(|index| {
            let word = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(index as u64 + 1);
            (Self::PLACE.wrapping_add(index), word)
        })
    }

    /// Writes it.
    ///
    /// # Safety
    /// No module of the loader's reaches that far.
    pub unsafe fn plant() {
        // SAFETY: the hypervisor's own memory, mapped; the caller's: nothing is there.
        Self::words().for_each(|(at, word)| unsafe { at.write_volatile(word) });
    }

    /// Returns whether it is as it was.
    pub fn is_whole() -> bool {
        // SAFETY: as above.
        Self::words().all(|(at, word)| unsafe { at.read_volatile() } == word)
    }
}

/// A page.
#[repr(C, align(4096))]
#[derive(Clone, Copy)]
pub struct Page(pub [u8; 4096]);

impl Page {
    /// Of zeroes.
    pub const ZERO: Self = Self([0; 4096]);

    /// Returns its physical address.
    pub fn address(&self) -> u64 {
        core::ptr::from_ref(self) as u64
    }
}

const RANGES: usize = 32;

/// The guest's memory: what the loader's map calls memory, without the hypervisor's.
pub struct Guest {
    ranges: [(u64, u64); RANGES],
    len: usize,
}

impl Guest {
    /// Reads the loader's map.
    pub fn new(map: impl Iterator<Item = Range>) -> Self {
        let mut guest = Self {
            ranges: [(0, 0); RANGES],
            len: 0,
        };
        for range in map.filter(|range| range.kind == 1) {
            let end = range.start.saturating_add(range.len).min(MAPPED);
            guest.add(range.start, end.min(OWN.start));
            guest.add(range.start.max(OWN.end), end);
        }
        guest
    }

    fn add(&mut self, start: u64, end: u64) {
        if start < end && self.len < RANGES {
            self.ranges[self.len] = (start, end);
            self.len += 1;
        }
    }

    /// Returns the ranges, first and last byte + 1.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.ranges[..self.len].iter().copied()
    }

    /// Returns whether `len` bytes from `address` on are the guest's.
    pub fn contains(&self, address: u64, len: u64) -> bool {
        let end = address.checked_add(len);
        end.is_some_and(|end| {
            self.ranges()
                .any(|(first, last)| first <= address && end <= last)
        })
    }

    /// Reads eight bytes, if they are the guest's.
    pub fn read(&self, address: u64) -> Option<u64> {
        if !self.contains(address, 8) {
            return None;
        }
        // SAFETY: it is memory, mapped, and the guest's: nothing of ours is there, and the guest
        // does not run now. A device that writes there meanwhile makes it any value, which is what
        // a guest's memory holds.
        Some(unsafe { (address as *const u64).read_unaligned() })
    }

    /// Reads a byte, likewise.
    pub fn read8(&self, address: u64) -> Option<u8> {
        if !self.contains(address, 1) {
            return None;
        }
        // SAFETY: as in `read`.
        Some(unsafe { (address as *const u8).read_volatile() })
    }

    /// Copies `bytes` there, if all of it is the guest's.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Option<()> {
        if !self.contains(address, bytes.len() as u64) {
            return None;
        }
        // SAFETY: as in `read`; `bytes` is ours, so the two do not overlap.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Some(())
    }
}

/// Returns the bytes that a loader, or firmware, left in memory.
///
/// # Safety
/// They are there, and nothing writes them while the slice lives.
pub unsafe fn bytes<'a>(address: u64, len: u64) -> &'a [u8] {
    // SAFETY: the caller's.
    unsafe { core::slice::from_raw_parts(address as *const u8, len as usize) }
}

/// Returns the bytes that a loader left in memory, to be written.
///
/// # Safety
/// They are there, and nothing else reads or writes them while the slice lives.
pub unsafe fn bytes_mut<'a>(address: u64, len: usize) -> &'a mut [u8] {
    // SAFETY: the caller's.
    unsafe { core::slice::from_raw_parts_mut(address as *mut u8, len) }
}

/// Copies bytes between the guest's memory and the hypervisor's. Not by the compiler's means:
/// another processor may write there meanwhile, and the copy is any mixture then.
///
/// # Safety
/// Both are mapped memory, of which one is the hypervisor's own, and they do not overlap.
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's; the direction flag is clear, as everywhere.
    unsafe {
        core::arch::asm!(
            "rep movsq",
            "mov rcx, {rest}",
            "rep movsb",
            rest = in(reg) len % 8,
            inout("rcx") len / 8 => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Reads a register in memory, 32 bits.
///
/// # Safety
/// One is there, and reading it does no harm.
pub unsafe fn read32(address: u64) -> u32 {
    // SAFETY: the caller's.
    unsafe { (address as *const u32).read_volatile() }
}

/// Writes one.
///
/// # Safety
/// One is there, and what the write brings about is wanted.
pub unsafe fn write32(address: u64, value: u32) {
    // SAFETY: the caller's.
    unsafe { (address as *mut u32).write_volatile(value) }
}
