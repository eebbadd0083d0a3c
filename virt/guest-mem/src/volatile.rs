//! A run of guest memory, for the length of one call: bytes that are copied straight from or to where
//! they are, in one guest or between two.
//!
//! [`Dma::host`](crate::Dma::host) answers where a range is; [`VolatileSlice::new`] checks that address
//! against what a [`KeepAlive`] keeps mapped, and borrows from that. Protection is the translation's,
//! which holds until the call into the device returns, or for as long as a lease is held; memory safety
//! is this module's.
//!
//! Cost: one indirect call and two comparisons to make one, a bounds check for each copy.
//!
//! UNSAFETY: dereferences pointers into mappings. [`Window`](crate::Window) would do the same at the price
//! of two reference counts, of one cache line for each guest, for every buffer of a frame.

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::addr::Hva;
use crate::keep;
use crate::phys::KeepAlive;
use crate::word;

/// A run of guest memory that stays mapped for `'a`. Its bytes change at any time: they are copied, never
/// borrowed.
#[derive(Clone, Copy, Debug)]
pub struct VolatileSlice<'a> {
    /// `len` bytes from here on are mapped, readable and writable, for `'a`.
    pointer: NonNull<u8>,
    len: u32,
    keep: PhantomData<&'a KeepAlive>,
}

impl<'a> VolatileSlice<'a> {
    /// No byte at all.
    pub const EMPTY: Self = Self {
        pointer: NonNull::dangling(),
        len: 0,
        keep: PhantomData,
    };

    /// The `len` bytes at `hva`, if `keep` keeps all of them mapped.
    #[inline]
    pub fn new(keep: &'a KeepAlive, hva: Hva, len: u32) -> Option<Self> {
        let pointer = keep::pointer_of(keep, hva, u64::from(len))?;
        Some(Self {
            pointer,
            len,
            keep: PhantomData,
        })
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether it has no byte.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it starts, in this process: for the kernel, or to make it again from the same
    /// [`KeepAlive`] once the call is over and a lease is held.
    #[inline]
    pub fn hva(&self) -> Hva {
        Hva::new(self.pointer.as_ptr() as u64)
    }

    /// Bytes `offset` to `offset + len` of it.
    ///
    /// # Panics
    /// If they do not lie inside.
    #[inline]
    #[must_use]
    pub fn slice(&self, offset: u32, len: u32) -> Self {
        self.check(offset, len as usize);
        // SAFETY: `offset` is at most `self.len`, as checked, so inside the same mapping or at its end.
        let pointer = unsafe { self.pointer.add(offset as usize) };
        Self {
            pointer,
            len,
            keep: PhantomData,
        }
    }

    /// Copies out from byte `offset` on; bytes may tear against a writing guest.
    ///
    /// # Panics
    /// If they do not lie inside.
    #[inline]
    pub fn read(&self, offset: u32, buf: &mut [u8]) {
        self.check(offset, buf.len());
        // SAFETY: in bounds by `check`, mapped for `'a`; nothing makes references into a mapping.
        unsafe { word::copy_out(self.pointer.as_ptr().add(offset as usize), buf) }
    }

    /// Copies in from byte `offset` on; bytes may tear against a reading guest.
    ///
    /// # Panics
    /// If they do not lie inside.
    #[inline]
    pub fn write(&self, offset: u32, buf: &[u8]) {
        self.check(offset, buf.len());
        // SAFETY: as in `read`; mappings are writable.
        unsafe { word::copy_in(buf, self.pointer.as_ptr().add(offset as usize)) }
    }

    /// Copies all of it to byte `offset` of `to`, which may be another guest's. Bytes may tear against
    /// either guest, and where the two overlap.
    ///
    /// # Panics
    /// If they do not lie inside `to`.
    #[inline]
    pub fn copy_to(&self, to: &VolatileSlice<'_>, offset: u32) {
        to.check(offset, self.len as usize);
        // SAFETY: both in bounds, and mapped by their `KeepAlive`s; mappings are writable.
        unsafe {
            let to = to.pointer.as_ptr().add(offset as usize);
            word::copy_between(self.pointer.as_ptr(), to, self.len as usize);
        }
    }

    /// Hints that its first bytes will be read or written soon.
    #[inline(always)]
    pub fn prefetch(&self) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: needs SSE, which every x86-64 has; a prefetch accesses no memory that the program
            // can observe.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.pointer.as_ptr().cast()) }
        }
    }

    #[inline]
    fn check(&self, offset: u32, len: usize) {
        // In 64 bits the sum cannot wrap: `offset` has 32, and a slice's length 63.
        assert!(
            u64::from(offset) + len as u64 <= u64::from(self.len),
            "outside a slice of guest memory"
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::{Gpa, GuestRam, Intent, PhysMem, VolatileSlice};

    fn ram() -> GuestRam {
        GuestRam::in_heap(&[(Gpa::new(0), 1 << 16)]).expect("memory")
    }

    #[test]
    fn bytes_move_between_two_guests_and_this_process() {
        let (one, two) = (ram(), ram());
        let (keep_one, keep_two) = (one.keep_alive(), two.keep_alive());
        let at = |ram: &GuestRam, gpa| ram.host(Gpa::new(gpa), 300, Intent::Write).expect("RAM");
        let from = VolatileSlice::new(&keep_one, at(&one, 0x1003), 300).expect("kept");
        let to = VolatileSlice::new(&keep_two, at(&two, 0x20f1), 300).expect("kept");
        let bytes: Vec<u8> = (0..300).map(|at| at as u8).collect();
        from.write(0, &bytes);
        for len in 0..=299u32 {
            from.slice(1, len).copy_to(&to, 1);
        }
        let mut seen = vec![0; 299];
        to.read(1, &mut seen);
        assert_eq!(seen, bytes[1..]);
        let mut guest = [0; 4];
        two.read(Gpa::new(0x20f1), &mut guest).expect("RAM");
        assert_eq!(guest, [0, 1, 2, 3]);
        assert_eq!(from.slice(4, 0).len(), 0);
        assert_eq!(from.hva(), at(&one, 0x1003));
    }

    #[test]
    fn what_is_not_kept_is_no_slice() {
        let (one, two) = (ram(), ram());
        let hva = one.host(Gpa::new(0), 1, Intent::Read).expect("RAM");
        assert!(VolatileSlice::new(&two.keep_alive(), hva, 1).is_none());
        assert!(VolatileSlice::new(&one.keep_alive(), hva, 1 << 16).is_some());
        assert!(VolatileSlice::new(&one.keep_alive(), hva, (1 << 16) + 1).is_none());
    }

    #[test]
    #[should_panic(expected = "outside a slice")]
    fn a_copy_past_its_end_is_refused() {
        let one = ram();
        let keep = one.keep_alive();
        let hva = one.host(Gpa::new(0), 8, Intent::Read).expect("RAM");
        let slice = VolatileSlice::new(&keep, hva, 8).expect("kept");
        slice.copy_to(&slice, 1);
    }
}
