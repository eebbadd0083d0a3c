//! The guest's memory as the front end sees it: one sealed memory file, shared with the back end.
//!
//! UNSAFETY: the only module of this crate with `unsafe`. It maps the file and makes every access
//! an atomic one inside bounds that are checked here, because the back end writes the same bytes.
//! System calls and instructions without a safe wrapper in the crates at hand live here too: the
//! time-stamp counter, another process's clock, SCHED_IDLE.
//!
//! Offsets are bytes from the start of the mapping. An access outside of it, or one that is not
//! aligned, panics: offsets come from our own layout, never from the back end.
#![expect(unsafe_code, reason = "mapped memory, shared with another process")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};

/// A mapped memory file.
#[derive(Debug)]
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    file: OwnedFd,
}

// SAFETY: the mapping belongs to the process, not to a thread, and every access is atomic.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`.
unsafe impl Sync for Memory {}

macro_rules! words {
    ($($load:ident, $store:ident, $atomic:ty, $word:ty;)*) => {
        $(
            /// One load.
            #[inline]
            pub fn $load(&self, offset: usize, ordering: Ordering) -> $word {
                let at = self.at::<$atomic>(offset);
                // SAFETY: `at` checked bounds and alignment, and the mapping lives as long as
                // `self`.
                unsafe { &*at }.load(ordering)
            }

            /// One store.
            #[inline]
            pub fn $store(&self, offset: usize, value: $word, ordering: Ordering) {
                let at = self.at::<$atomic>(offset);
                // SAFETY: as for the load; the mapping is writable.
                unsafe { &*at }.store(value, ordering);
            }
        )*
    };
}

impl Memory {
    /// Creates a zeroed memory file of `len` bytes, present in memory, sealed so that its size
    /// cannot change.
    ///
    /// # Errors
    /// The system refused the file, its size, the seals or the mapping.
    pub fn create(len: usize) -> io::Result<Self> {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file, 0, len)
    }

    /// Maps `len` bytes of a file, at least eight, from `offset`, a multiple of the page size.
    ///
    /// # Errors
    /// The file is shorter than that, or cannot be mapped.
    pub fn map(file: OwnedFd, offset: u64, len: usize) -> io::Result<Self> {
        let size = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
        let end = offset.checked_add(len as u64);
        // The bounds check of an access subtracts its size, eight bytes at most, from the length.
        if len < size_of::<u64>() || end.is_none_or(|end| end > size) {
            return Err(io::Error::other(format!(
                "a file of {size} bytes has no {len} bytes, at least eight, at {offset}"
            )));
        }
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        // SAFETY: no address is asked for, so that nothing of ours is replaced; the file is open.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                file.as_raw_fd(),
                offset,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).expect("mmap gives no null page");
        Ok(Self { base, len, file })
    }

    /// Bytes mapped.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Never: an empty file cannot be mapped.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The file, for the message that shares it.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    #[inline]
    fn at<T>(&self, offset: usize) -> *const T {
        assert!(
            offset <= self.len - size_of::<T>() && offset.is_multiple_of(align_of::<T>()),
            "offset outside the mapping or not aligned"
        );
        // SAFETY: inside the mapping, by the assertion: `map` refuses lengths that its subtraction
        // would underflow.
        unsafe { self.base.as_ptr().add(offset).cast_const().cast() }
    }

    words! {
        load_u8, store_u8, AtomicU8, u8;
        load_u16, store_u16, AtomicU16, u16;
        load_u32, store_u32, AtomicU32, u32;
        load_u64, store_u64, AtomicU64, u64;
    }

    /// Brings a cache line closer, for a load that comes soon.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let at = self.at::<u8>(offset);
            // SAFETY: a prefetch reads nothing; the address is inside the mapping all the same.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = offset;
    }

    /// Brings a cache line closer, for a store that comes soon.
    #[inline]
    pub fn prefetch_to_write(&self, offset: usize) {
        let at = self.at::<u8>(offset);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch reads and writes nothing, and does nothing on a processor without it;
        // the address is inside the mapping all the same.
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags));
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    /// Copies out of the mapping; tears where the back end writes at the same time.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let (mut at, mut rest) = (offset, into);
        while rest.len() >= 8 && at.is_multiple_of(8) {
            let (word, tail) = rest.split_at_mut(8);
            word.copy_from_slice(&self.load_u64(at, Ordering::Relaxed).to_ne_bytes());
            (at, rest) = (at + 8, tail);
        }
        for byte in rest {
            *byte = self.load_u8(at, Ordering::Relaxed);
            at += 1;
        }
    }

    /// Copies into the mapping.
    pub fn write(&self, offset: usize, from: &[u8]) {
        let (mut at, mut rest) = (offset, from);
        while rest.len() >= 8 && at.is_multiple_of(8) {
            let (word, tail) = rest.split_at(8);
            let word = word.try_into().expect("eight bytes were split off");
            self.store_u64(at, u64::from_ne_bytes(word), Ordering::Relaxed);
            (at, rest) = (at + 8, tail);
        }
        for byte in rest {
            self.store_u8(at, *byte, Ordering::Relaxed);
            at += 1;
        }
    }

    /// Zeroes a part of the mapping.
    pub fn zero(&self, offset: usize, len: usize) {
        const ZEROES: [u8; 4096] = [0; 4096];
        let mut at = offset;
        while at < offset + len {
            let piece = (offset + len - at).min(ZEROES.len());
            self.write(at, &ZEROES[..piece]);
            at += piece;
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, of this length, and the last reference to it ends here.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The processor time of a process, or `None` where it is gone.
pub(crate) fn process_clock(pid: u32) -> Option<Duration> {
    let pid = libc::pid_t::try_from(pid).ok().filter(|pid| *pid > 0)?;
    let mut clock = 0;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: takes an integer and a place for another.
    let found = unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) } == 0;
    // SAFETY: the structure lives across the call; a clock whose process ended is refused.
    let is_read = found && unsafe { libc::clock_gettime(clock, &raw mut time) } == 0;
    is_read.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Moves the calling thread to SCHED_IDLE: it runs when no other thread wants the processor.
///
/// # Errors
/// The kernel refused.
pub(crate) fn run_only_when_idle() -> io::Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure lives across the call, and 0 is the calling thread.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &param) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_has_room_for_its_widest_access() {
        for len in [0, 1, 7] {
            assert!(Memory::create(len).is_err(), "{len} bytes");
        }
        let least = Memory::create(8).unwrap();
        least.store_u64(0, 5, Ordering::Relaxed);
        assert_eq!(least.load_u64(0, Ordering::Relaxed), 5);
        let outside = || least.load_u16(8, Ordering::Relaxed);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(outside)).is_err());
    }
}
