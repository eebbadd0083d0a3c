//! A run of guest memory, for the length of one call: bytes that are copied straight from or to
//! where they are, in one guest or between two.
//!
//! [`Dma::host`](crate::Dma::host) returns the address of a range; [`VolatileSlice::new`] checks
//! that address against the memory that a [`KeepAlive`] keeps mapped, and borrows from that.
//! Protection is the translation's, which is valid until the call into the device returns, or for
//! as long as a lease is held; memory safety is this module's.
//!
//! Cost: one indirect call and two comparisons to make one, a bounds check for each copy.
//!
//! UNSAFETY: dereferences pointers into mappings. [`Window`](crate::Window) would do the same at
//! the price of two reference counts, of one cache line for each guest, for every buffer of a
//! frame.

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::addr::{Hva, Iova};
use crate::direct_run::DirectRun;
use crate::keep;
use crate::phys::KeepAlive;
use crate::word;

/// A [`DirectRun`] that stays mapped for `'a`: many slices of it cost one check of the
/// [`KeepAlive`].
#[derive(Clone, Copy, Debug)]
pub struct MappedRun<'a> {
    iova: Iova,
    /// `len` bytes from `pointer` on are mapped, readable and writable, for `'a`.
    len: u64,
    pointer: NonNull<u8>,
    keep: PhantomData<&'a KeepAlive>,
}

impl<'a> MappedRun<'a> {
    /// No address at all.
    pub const EMPTY: Self = Self {
        iova: Iova::new(0),
        len: 0,
        pointer: NonNull::dangling(),
        keep: PhantomData,
    };

    /// `run`, if `keep` keeps all of it mapped.
    #[inline]
    pub fn new(keep: &'a KeepAlive, run: DirectRun) -> Option<Self> {
        let DirectRun { iova, len, hva } = run;
        let pointer = keep::pointer_of(keep, hva, len)?;
        Some(Self {
            iova,
            len,
            pointer,
            keep: PhantomData,
        })
    }

    /// Returns the `len` bytes at `iova`, if all of them are in the run.
    #[inline(always)]
    pub fn slice(&self, iova: Iova, len: u32) -> Option<VolatileSlice<'a>> {
        // An address before it wraps to an offset beyond any length.
        let inside = iova.raw().wrapping_sub(self.iova.raw());
        if inside > self.len || u64::from(len) > self.len - inside {
            return None;
        }
        // SAFETY: at most `self.len` behind `pointer`: inside the same mapping, or at its end.
        let pointer = unsafe { self.pointer.add(inside as usize) };
        Some(VolatileSlice {
            pointer,
            len,
            keep: PhantomData,
        })
    }
}

/// A run of guest memory that stays mapped for `'a`. Its bytes change at any time: they are copied,
/// never borrowed.
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

    /// Returns its address in this process: for the kernel, or to make it again from the same
    /// [`KeepAlive`] after the call, while a lease is held.
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
        // SAFETY: `offset` is at most `self.len`, as checked, so inside the same mapping or at its
        // end.
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

    /// Copies 12 bytes, a header, to `offset` unless they are there already: a cache line that both
    /// sides only read stays in the caches of both. The bytes found there are only compared, and no
    /// decision depends on them.
    ///
    /// # Panics
    /// If they do not lie inside.
    #[inline]
    pub fn update(&self, offset: u32, bytes: &[u8; 12]) {
        self.check(offset, bytes.len());
        let (low, high) = bytes.split_at(8);
        // As they are read: whole words can be compared without a way through memory.
        let (mut low_there, mut high_there) = ([0; 8], [0; 4]);
        // SAFETY: 12 bytes from `offset` on are in bounds by `check`; the rest as in `read`.
        unsafe {
            let at = self.pointer.as_ptr().add(offset as usize);
            word::copy_out(at, &mut low_there);
            word::copy_out(at.add(8), &mut high_there);
        }
        if low != low_there || high != high_there {
            self.write(offset, bytes);
        }
    }

    /// Copies all of it to byte `offset` of `to`, which may be another guest's. Bytes may tear
    /// against either guest, and where the two overlap.
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
            // SAFETY: needs SSE, which every x86-64 has; a prefetch accesses no memory that the
            // program can observe.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.pointer.as_ptr().cast()) }
        }
    }

    /// Hints that the bytes at `offset` will be written soon; past the end it does nothing.
    #[inline(always)]
    pub fn prefetch_to_write(&self, offset: u32) {
        if offset < self.len {
            // SAFETY: inside the slice.
            word::prefetch_to_write(unsafe { self.pointer.as_ptr().add(offset as usize) });
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
    use crate::{DirectRun, Gpa, GuestRam, Intent, Iova, MappedRun, PhysMem, VolatileSlice};

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
    fn no_slice_of_memory_that_is_not_kept() {
        let (one, two) = (ram(), ram());
        let hva = one.host(Gpa::new(0), 1, Intent::Read).expect("RAM");
        assert!(VolatileSlice::new(&two.keep_alive(), hva, 1).is_none());
        assert!(VolatileSlice::new(&one.keep_alive(), hva, 1 << 16).is_some());
        assert!(VolatileSlice::new(&one.keep_alive(), hva, (1 << 16) + 1).is_none());
    }

    #[test]
    fn a_run_has_slices_of_what_is_kept_and_no_others() {
        let (one, two) = (ram(), ram());
        let keep = one.keep_alive();
        let run = DirectRun {
            iova: Iova::new(0x5000),
            len: 0x2000,
            hva: one
                .host(Gpa::new(0x1000), 0x2000, Intent::Read)
                .expect("RAM"),
        };
        assert!(MappedRun::new(&two.keep_alive(), run).is_none());
        let longer = DirectRun {
            len: 1 << 16,
            ..run
        };
        assert!(MappedRun::new(&keep, longer).is_none());
        let run = MappedRun::new(&keep, run).expect("kept");
        one.write(Gpa::new(0x2ffe), &[7, 8]).expect("RAM");
        let mut last = [0; 2];
        let slice = run.slice(Iova::new(0x6ffe), 2).expect("inside");
        slice.read(0, &mut last);
        assert_eq!(last, [7, 8]);
        assert!(run.slice(Iova::new(0x5000), 0x2000).is_some());
        for (iova, len) in [
            (0x5000, 0x2001),
            (0x6fff, 2),
            (0x7000, 1),
            (0x4fff, 1),
            (0x4fff, 2),
            (0, 1),
            (u64::MAX, 1),
            (0x5000, u32::MAX),
        ] {
            assert!(run.slice(Iova::new(iova), len).is_none(), "{iova:#x} {len}");
        }
        assert!(MappedRun::EMPTY.slice(Iova::new(0), 1).is_none());
    }

    #[test]
    fn an_update_leaves_what_it_was_told() {
        let one = ram();
        let keep = one.keep_alive();
        let hva = one.host(Gpa::new(0), 16, Intent::Write).expect("RAM");
        let slice = VolatileSlice::new(&keep, hva, 16).expect("kept");
        let mut bytes = *b"abcdefghijkl";
        for at in 0..=12 {
            slice.update(3, &bytes);
            slice.update(3, &bytes);
            let mut there = [0; 16];
            slice.read(0, &mut there);
            assert_eq!((&there[..3], there[15]), (&[0; 3][..], 0));
            assert_eq!(there[3..15], bytes);
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 0xff;
            }
        }
    }

    #[test]
    #[should_panic(expected = "outside a slice")]
    fn an_update_past_its_end_is_refused() {
        let one = ram();
        let keep = one.keep_alive();
        let hva = one.host(Gpa::new(0), 16, Intent::Write).expect("RAM");
        let slice = VolatileSlice::new(&keep, hva, 16).expect("kept");
        slice.update(5, &[0; 12]);
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
