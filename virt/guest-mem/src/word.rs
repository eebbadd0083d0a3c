//! Access to memory that a guest, or the kernel on its behalf, changes while we look: single loads
//! and stores of 2, 4 and 8 bytes, and copies.
//!
//! UNSAFETY: dereferences raw pointers into shared memory; the callers ([`Mapping`](crate::mapping::Mapping)
//! and [`Window`](crate::Window)) own the bounds. Safe references cannot be used: a `&[u8]` promises
//! that the bytes do not change, and the guest makes no promise.
//!
//! Why the copies are not `ptr::copy_nonoverlapping`: that is a plain access, and a plain access to
//! memory that another agent writes at the same time is a data race, undefined in Rust's model, even
//! where every machine would only tear. So small copies are relaxed atomic loads or stores, and large
//! ones, on x86-64, one `rep movsq` inside `asm!`, which the compiler must treat like a foreign
//! function that may do the same with atomics. Both give what the trait promises: bytes may tear
//! against a writing guest, and nothing worse. Overlapping atomics of different sizes are outside
//! the model only when they race *within the program*; here one thread owns a VM's devices, and the
//! racing side is the guest, which the model does not see. (Miri's weak-memory emulation stops at such
//! overlaps even without a race: run it with `-Zmiri-disable-weak-memory-emulation`.)
//!
//! Cost of a copy beside `memcpy` (best of 7, 2.5 GHz Xeon, virtual): 16 bytes 20 ns against 6, the
//! translation included; 4096 bytes 71 ns against 95.

use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Copies of at least this many bytes use the string instruction: its start-up costs about as much
/// as sixteen word accesses.
const STRING_COPY_MIN: usize = 128;

/// A 2-, 4- or 8-byte little-endian word of shared memory.
pub(crate) trait Word: Copy {
    /// One load.
    ///
    /// # Safety
    /// `ptr` is aligned to the word's size and points to that many bytes of memory that is mapped,
    /// and reached by nobody in this process through references, for the duration of the call.
    unsafe fn load(ptr: *mut u8, ordering: Ordering) -> Self;

    /// One store.
    ///
    /// # Safety
    /// As [`load`](Word::load), and the memory is writable.
    unsafe fn store(ptr: *mut u8, value: Self, ordering: Ordering);
}

macro_rules! word {
    ($int:ty, $atomic:ty) => {
        impl Word for $int {
            #[inline(always)]
            unsafe fn load(ptr: *mut u8, ordering: Ordering) -> Self {
                // SAFETY: `from_ptr` needs alignment, validity for the life of the reference and no
                // conflicting non-atomic access: the caller promises the first two, and the module
                // makes no non-atomic access to shared memory.
                let atomic = unsafe { <$atomic>::from_ptr(ptr.cast()) };
                <$int>::from_le(atomic.load(ordering))
            }

            #[inline(always)]
            unsafe fn store(ptr: *mut u8, value: Self, ordering: Ordering) {
                // SAFETY: as in `load`; writability is the caller's promise.
                let atomic = unsafe { <$atomic>::from_ptr(ptr.cast()) };
                atomic.store(value.to_le(), ordering);
            }
        }
    };
}
word!(u16, AtomicU16);
word!(u32, AtomicU32);
word!(u64, AtomicU64);

/// Copies `dst.len()` bytes out of shared memory. Orders nothing: a caller that needs the bytes to be
/// no older than an index it loaded loads that index with acquire.
///
/// # Safety
/// `[src, src + dst.len())` is mapped for the duration of the call, and reached by nobody in this
/// process through references.
#[inline]
pub(crate) unsafe fn copy_out(src: *mut u8, dst: &mut [u8]) {
    let len = dst.len();
    let out = dst.as_mut_ptr();
    let head = src.align_offset(8).min(len);
    let words = (len - head) / 8;
    let tail = head + words * 8;
    // SAFETY: the three pieces `[0, head)`, `[head, tail)`, `[tail, len)` partition the range that the
    // caller vouches for and the buffer that `dst` owns; words start at an 8-byte boundary of `src`,
    // because `head` is the distance to it (or the whole length, and then there are none). `dst`
    // cannot overlap `src`: nobody holds references into shared memory.
    unsafe {
        for at in 0..head {
            *out.add(at) = AtomicU8::from_ptr(src.add(at)).load(Ordering::Relaxed);
        }
        if len >= STRING_COPY_MIN && HAS_STRING_COPY {
            string_copy(src.add(head), out.add(head), words);
        } else {
            for at in (head..tail).step_by(8) {
                let word = AtomicU64::from_ptr(src.add(at).cast()).load(Ordering::Relaxed);
                ptr::write_unaligned(out.add(at).cast::<u64>(), word);
            }
        }
        for at in tail..len {
            *out.add(at) = AtomicU8::from_ptr(src.add(at)).load(Ordering::Relaxed);
        }
    }
}

/// Copies `src` into shared memory. Orders nothing: whoever publishes the bytes does so by a release
/// store afterwards.
///
/// # Safety
/// `[dst, dst + src.len())` is mapped writable for the duration of the call, and reached by nobody in
/// this process through references.
#[inline]
pub(crate) unsafe fn copy_in(src: &[u8], dst: *mut u8) {
    let len = src.len();
    let from = src.as_ptr();
    let head = dst.align_offset(8).min(len);
    let words = (len - head) / 8;
    let tail = head + words * 8;
    // SAFETY: as in `copy_out`, with the roles of the two sides exchanged.
    unsafe {
        for at in 0..head {
            AtomicU8::from_ptr(dst.add(at)).store(*from.add(at), Ordering::Relaxed);
        }
        if len >= STRING_COPY_MIN && HAS_STRING_COPY {
            string_copy(from.add(head), dst.add(head), words);
        } else {
            for at in (head..tail).step_by(8) {
                let word = ptr::read_unaligned(from.add(at).cast::<u64>());
                AtomicU64::from_ptr(dst.add(at).cast()).store(word, Ordering::Relaxed);
            }
        }
        for at in tail..len {
            AtomicU8::from_ptr(dst.add(at)).store(*from.add(at), Ordering::Relaxed);
        }
    }
}

/// Whether [`string_copy`] exists here. Miri has no inline assembly and takes the word loop.
const HAS_STRING_COPY: bool = cfg!(all(target_arch = "x86_64", not(miri)));

/// Copies `words` 8-byte words, outside the compiler's sight.
///
/// # Safety
/// Both ranges of `8 * words` bytes are mapped, `dst` writable; they do not overlap.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
unsafe fn string_copy(src: *const u8, dst: *mut u8, words: usize) {
    // SAFETY: touches exactly the two ranges of the caller's promise, no stack and no flags; the
    // direction flag is clear on entry to every `asm!` block.
    unsafe {
        std::arch::asm!(
            "rep movsq",
            inout("rcx") words => _,
            inout("rsi") src => _,
            inout("rdi") dst => _,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn string_copy(_src: *const u8, _dst: *mut u8, _words: usize) {
    unreachable!("HAS_STRING_COPY is false here");
}
