//! Access to memory that a guest, or the kernel on its behalf, changes at the same time: single
//! loads and stores of 1, 2, 4 and 8 bytes, and copies.
//!
//! UNSAFETY: dereferences raw pointers into shared memory; the callers
//! ([`Mapping`](crate::mapping::Mapping) and [`Window`](crate::Window)) own the bounds. Safe
//! references cannot be used: a `&[u8]` promises that the bytes do not change, and the guest makes
//! no promise.
//!
//! The copies are not `ptr::copy_nonoverlapping`: that is a plain access, and a plain access to
//! memory that another agent writes at the same time is a data race, undefined in Rust's model,
//! even where every machine would only tear. So they are, on x86-64, instructions inside `asm!`,
//! which the compiler must treat like a foreign function that may do the same with atomics;
//! elsewhere relaxed atomic loads or stores. Both keep the promise of the trait: bytes may tear
//! against a writing guest, and nothing worse. Overlapping atomics of different sizes are outside
//! the model only when they race *within the program*; here one thread owns a VM's devices, and the
//! racing side is the guest, which the model does not see. (Miri's weak-memory emulation stops at
//! such overlaps even without a race: run it with `-Zmiri-disable-weak-memory-emulation`.)
//!
//! On x86-64 a copy is made of the fewest accesses of up to 16 bytes, the last of which overlaps
//! the one before (a byte of the source may be read twice; the later value stays). From
//! [`STRING_COPY_MIN`] bytes on it is one `rep movsq`: its start-up, 20 ns, then costs less than
//! the wider accesses of `memcpy` would gain.
//!
//! Cost of a copy beside `memcpy`, translation included (`examples/foreign_cost.rs`; best of 9, 2.5
//! GHz Xeon, virtual): 16 bytes 6 ns against 4, 256 bytes 13 against 6, 1024 bytes 27 against 17,
//! 4096 bytes 59 against 54, and out of cache, 16 KiB, 650 against 700.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A 1-, 2-, 4- or 8-byte little-endian word of shared memory.
pub(crate) trait Word: Copy {
    /// One load.
    ///
    /// # Safety
    /// `ptr` is aligned to the word's size and points to that many bytes of memory that is mapped
    /// for the duration of the call, and into which no references exist in this process.
    unsafe fn load(ptr: *mut u8, ordering: Ordering) -> Self;

    /// One store.
    ///
    /// # Safety
    /// As [`load`](Word::load), and the memory is writable.
    unsafe fn store(ptr: *mut u8, value: Self, ordering: Ordering);

    /// Stores `new` if the word is `current`; returns its old value. Acquire-release when it
    /// succeeds, acquire when it does not.
    ///
    /// # Safety
    /// As [`store`](Word::store).
    unsafe fn compare_exchange(ptr: *mut u8, current: Self, new: Self) -> Result<Self, Self>;
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

            #[inline(always)]
            unsafe fn compare_exchange(
                ptr: *mut u8,
                current: Self,
                new: Self,
            ) -> Result<Self, Self> {
                // SAFETY: as in `store`.
                let atomic = unsafe { <$atomic>::from_ptr(ptr.cast()) };
                let (current, new) = (current.to_le(), new.to_le());
                atomic
                    .compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
                    .map(<$int>::from_le)
                    .map_err(<$int>::from_le)
            }
        }
    };
}
word!(u8, AtomicU8);
word!(u16, AtomicU16);
word!(u32, AtomicU32);
word!(u64, AtomicU64);

/// Copies `dst.len()` bytes out of shared memory. Orders nothing: a caller that needs the bytes to
/// be no older than an index it loaded loads that index with acquire.
///
/// # Safety
/// `[src, src + dst.len())` is mapped for the duration of the call, and no references into it exist
/// in this process.
#[inline]
pub(crate) unsafe fn copy_out(src: *mut u8, dst: &mut [u8]) {
    // SAFETY: the caller vouches for `src`, and `dst` owns its bytes, which cannot overlap: no
    // references into shared memory exist.
    unsafe { copy::out_of_shared(src, dst.as_mut_ptr(), dst.len()) }
}

/// Copies `src` into shared memory. Orders nothing: the caller publishes the bytes by a release
/// store afterwards.
///
/// # Safety
/// `[dst, dst + src.len())` is mapped writable for the duration of the call, and no references into
/// it exist in this process.
#[inline]
pub(crate) unsafe fn copy_in(src: &[u8], dst: *mut u8) {
    // SAFETY: as in `copy_out`, with the roles of the two sides exchanged.
    unsafe { copy::into_shared(src.as_ptr(), dst, src.len()) }
}

/// Copies `len` bytes of shared memory to shared memory. Orders nothing. Where the two overlap, the
/// bytes there are any mixture.
///
/// # Safety
/// Both ranges are mapped for the duration of the call, the second writable, and no references into
/// them exist in this process.
#[inline]
pub(crate) unsafe fn copy_between(src: *mut u8, dst: *mut u8, len: usize) {
    // SAFETY: instructions outside the compiler's sight, to which overlap is no matter of
    // soundness.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        copy::copy(src, dst, len);
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        let mut buf = [0; 512];
        for at in (0..len).step_by(buf.len()) {
            let part = &mut buf[..(len - at).min(512)];
            // SAFETY: `at` and the part behind it lie inside both ranges.
            unsafe {
                copy_out(src.add(at), part);
                copy_in(part, dst.add(at));
            }
        }
    }
}

/// Hints the processor that the line of `at` will be written soon, so that it is taken from other
/// processors once, and not to be read first. Accesses no memory that the program can observe; does
/// nothing on processors without it.
#[inline(always)]
pub(crate) fn prefetch_to_write(at: *mut u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch reads and writes nothing and cannot fault; processors that lack it decode
    // it as no operation.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
use instructions as copy;
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
use portable as copy;

/// Outside the compiler's sight, the two directions are one. In all functions: both ranges are
/// mapped, the second writable, and they do not overlap.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod instructions {
    use std::arch::asm;

    /// Copies of at least this many bytes use the string instruction.
    const STRING_COPY_MIN: usize = 1536;

    pub(super) use copy as out_of_shared;
    pub(super) use copy as into_shared;

    /// # Safety
    /// As the module says, for `len` bytes.
    #[inline]
    pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
        // SAFETY: each callee is given a length inside its bounds.
        unsafe {
            match len {
                16..=32 => ends_16(src, dst, len),
                // Small frames: with the length known to be there, no call.
                33..=64 => {
                    ends_16(src, dst, 32);
                    ends_16(src.add(len - 32), dst.add(len - 32), 32);
                }
                8..16 => ends_8(src, dst, len),
                0..8 => short(src, dst, len),
                _ => long(src, dst, len),
            }
        }
    }

    /// # Safety
    /// As the module says, for `len` bytes, 0 to 7.
    #[inline]
    unsafe fn short(src: *const u8, dst: *mut u8, len: usize) {
        // SAFETY: the first and the last 4 bytes of at least 4; or byte after byte.
        unsafe {
            if len >= 4 {
                asm!(
                    "mov {a:e}, dword ptr [{src}]",
                    "mov {b:e}, dword ptr [{src} + {len} - 4]",
                    "mov dword ptr [{dst}], {a:e}",
                    "mov dword ptr [{dst} + {len} - 4], {b:e}",
                    src = in(reg) src,
                    dst = in(reg) dst,
                    len = in(reg) len,
                    a = out(reg) _,
                    b = out(reg) _,
                    options(nostack, preserves_flags)
                );
                return;
            }
            for at in 0..len {
                asm!(
                    "mov {a}, byte ptr [{src} + {at}]",
                    "mov byte ptr [{dst} + {at}], {a}",
                    src = in(reg) src,
                    dst = in(reg) dst,
                    at = in(reg) at,
                    a = out(reg_byte) _,
                    options(nostack, preserves_flags)
                );
            }
        }
    }

    /// # Safety
    /// As the module says, for `len` bytes, 8 to 16.
    #[inline]
    unsafe fn ends_8(src: *const u8, dst: *mut u8, len: usize) {
        // SAFETY: the first and the last 8 of at least 8 bytes.
        unsafe {
            asm!(
                "mov {a}, qword ptr [{src}]",
                "mov {b}, qword ptr [{src} + {len} - 8]",
                "mov qword ptr [{dst}], {a}",
                "mov qword ptr [{dst} + {len} - 8], {b}",
                src = in(reg) src,
                dst = in(reg) dst,
                len = in(reg) len,
                a = out(reg) _,
                b = out(reg) _,
                options(nostack, preserves_flags)
            );
        }
    }

    /// # Safety
    /// As the module says, for `len` bytes, 16 to 32.
    #[inline]
    unsafe fn ends_16(src: *const u8, dst: *mut u8, len: usize) {
        // SAFETY: the first and the last 16 of at least 16 bytes.
        unsafe {
            asm!(
                "movdqu {a}, xmmword ptr [{src}]",
                "movdqu {b}, xmmword ptr [{src} + {len} - 16]",
                "movdqu xmmword ptr [{dst}], {a}",
                "movdqu xmmword ptr [{dst} + {len} - 16], {b}",
                src = in(reg) src,
                dst = in(reg) dst,
                len = in(reg) len,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                options(nostack, preserves_flags)
            );
        }
    }

    /// # Safety
    /// As the module says, for `len` bytes, more than 64.
    unsafe fn long(mut src: *const u8, mut dst: *mut u8, mut len: usize) {
        // SAFETY: blocks advance while more than one is left, so that they stay inside the range;
        // the rest, at most 64 bytes and, unless it was that short from the start, preceded by
        // 64 that have been copied, is covered by its last 32 or 64 bytes, which start inside.
        unsafe {
            if len >= STRING_COPY_MIN {
                // Whole words to an aligned place; the words reach to within 7 bytes of the end,
                // and the last 64 bytes are copied below.
                block(src, dst);
                let head = 64 - (dst.addr() & 63);
                string(src.add(head), dst.add(head), (len - head) / 8);
                block(src.add(len - 64), dst.add(len - 64));
                return;
            }
            while len > 64 {
                block(src, dst);
                src = src.add(64);
                dst = dst.add(64);
                len -= 64;
            }
            block(src.sub(64 - len), dst.sub(64 - len));
        }
    }

    /// # Safety
    /// As the module says, for 64 bytes.
    #[inline(always)]
    unsafe fn block(src: *const u8, dst: *mut u8) {
        // SAFETY: touches exactly the two ranges of the caller's promise.
        unsafe {
            asm!(
                "movdqu {a}, xmmword ptr [{src}]",
                "movdqu {b}, xmmword ptr [{src} + 16]",
                "movdqu {c}, xmmword ptr [{src} + 32]",
                "movdqu {d}, xmmword ptr [{src} + 48]",
                "movdqu xmmword ptr [{dst}], {a}",
                "movdqu xmmword ptr [{dst} + 16], {b}",
                "movdqu xmmword ptr [{dst} + 32], {c}",
                "movdqu xmmword ptr [{dst} + 48], {d}",
                src = in(reg) src,
                dst = in(reg) dst,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack, preserves_flags)
            );
        }
    }

    /// # Safety
    /// As the module says, for `8 * words` bytes.
    #[inline(always)]
    unsafe fn string(src: *const u8, dst: *mut u8, words: usize) {
        // SAFETY: touches exactly the two ranges of the caller's promise, no stack and no flags;
        // the direction flag is clear on entry to every `asm!` block.
        unsafe {
            asm!(
                "rep movsq",
                inout("rcx") words => _,
                inout("rsi") src => _,
                inout("rdi") dst => _,
                options(nostack, preserves_flags)
            );
        }
    }
}

/// Atomic words where the shared side is aligned to them, atomic bytes before and after.
#[cfg(any(test, not(all(target_arch = "x86_64", not(miri)))))]
mod portable {
    use std::ptr;
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

    /// `[0, head)`, `[head, tail)`, `[tail, len)`: the middle is whole words that start at an
    /// 8-byte boundary of `shared`, because `head` is the distance to it (or the whole length, and
    /// then there are none).
    fn parts(shared: *mut u8, len: usize) -> (usize, usize) {
        let head = shared.align_offset(8).min(len);
        (head, head + (len - head) / 8 * 8)
    }

    /// # Safety
    /// `len` bytes at `src` are shared memory, as for `Word::load`, and at `dst` the caller's own.
    pub(super) unsafe fn out_of_shared(src: *mut u8, dst: *mut u8, len: usize) {
        let (head, tail) = parts(src, len);
        // SAFETY: the three parts partition the ranges that the caller vouches for.
        unsafe {
            for at in (0..head).chain(tail..len) {
                *dst.add(at) = AtomicU8::from_ptr(src.add(at)).load(Relaxed);
            }
            for at in (head..tail).step_by(8) {
                let word = AtomicU64::from_ptr(src.add(at).cast()).load(Relaxed);
                ptr::write_unaligned(dst.add(at).cast::<u64>(), word);
            }
        }
    }

    /// # Safety
    /// `len` bytes at `src` are the caller's own, and at `dst` shared memory, as for `Word::store`.
    pub(super) unsafe fn into_shared(src: *const u8, dst: *mut u8, len: usize) {
        let (head, tail) = parts(dst, len);
        // SAFETY: as above.
        unsafe {
            for at in (0..head).chain(tail..len) {
                AtomicU8::from_ptr(dst.add(at)).store(*src.add(at), Relaxed);
            }
            for at in (head..tail).step_by(8) {
                let word = ptr::read_unaligned(src.add(at).cast::<u64>());
                AtomicU64::from_ptr(dst.add(at).cast()).store(word, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests;
