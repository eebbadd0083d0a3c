//! A cached pointer into guest memory, valid for one generation of translations. A device reads and
//! writes its rings through it.
//!
//! Translating an address for every read of an index would cost ten times the read itself. A device
//! therefore keeps a [`Window`] for each part of a ring, checks [`Window::is_current`] once per
//! batch, and calls [`Dma::refresh`](crate::Dma::refresh) if it is not. Between two checks, an
//! access to memory costs a bounds check.
//!
//! Memory safety does not depend on that protocol: a window keeps its memory mapped, and a stale
//! one still points to RAM of the same guest. DMA protection does depend on it.
//!
//! UNSAFETY: dereferences the cached pointer. An access through `Mapping` would repeat a check
//! already made and add a dependent load to every read of an index.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::access::{Access, DmaFault, Perm};
use crate::addr::{Gpa, Hva, Iova};
use crate::keep;
use crate::mapping::Mapping;
use crate::pages::Pages;
use crate::phys::PhysMem;
use crate::watch::WatchWord;
use crate::word::{self, Word};

/// A cached translation of a few bytes inside one mapping, checked by generation.
///
/// Offsets are bytes from the window's start. **All accessors panic** on errors that only a bug of
/// the device model can cause: an offset outside the window, a misaligned word, a store through a
/// [`Perm::Read`] window or a load through a [`Perm::Write`] one, any access after a failed
/// [`refresh`](crate::Dma::refresh). A guest-chosen alignment is checked where the guest sets the
/// address (queue enable), or by [`Window::is_aligned`].
///
/// Words are little-endian. Loads acquire and stores release unless the name has `relaxed`; the
/// other side is the guest's driver, which publishes with its write barrier before an index and
/// reads behind its read barrier after one.
#[derive(Clone, Debug)]
pub struct Window {
    iova: Iova,
    /// Requested length in bytes. The two fields below are equal to it or 0, so that one comparison
    /// checks bounds, permission and whether the last refresh succeeded.
    len: u32,
    readable: u32,
    writable: u32,
    perm: Perm,
    /// Translation of `iova`; `pointer` is its host address, inside `memory`, with at least `len`
    /// bytes behind it.
    gpa: Gpa,
    pointer: NonNull<u8>,
    generation: u64,
    memory: Arc<Mapping>,
}

// SAFETY: the pointer points into memory that `memory` owns and that any thread may access
// (`Mapping` is `Sync`); nothing else in a window is tied to a thread.
unsafe impl Send for Window {}
// SAFETY: shared accessors only make atomic or opaque accesses, which may run concurrently.
unsafe impl Sync for Window {}

macro_rules! word_accessors {
    ($int:ident, $load:ident, $load_relaxed:ident, $store:ident, $store_relaxed:ident) => {
        #[doc = concat!("One [`", stringify!($int), "`] load with acquire ordering: what the \
             guest")]
        /// wrote before it published this value is visible to later loads.
        #[inline]
        pub fn $load(&self, offset: u32) -> $int {
            self.load(offset, Ordering::Acquire)
        }

        #[doc = concat!("One [`", stringify!($int), "`] load that orders nothing: for fields \
             behind")]
        /// an index already loaded with acquire.
        #[inline]
        pub fn $load_relaxed(&self, offset: u32) -> $int {
            self.load(offset, Ordering::Relaxed)
        }

        #[doc = concat!("One [`", stringify!($int), "`] store with release ordering: a guest that")]
        /// sees the value sees everything written to its memory before.
        #[inline]
        pub fn $store(&self, offset: u32, value: $int) {
            self.store(offset, value, Ordering::Release)
        }

        #[doc = concat!("One [`", stringify!($int), "`] store that orders nothing: for fields \
             that")]
        /// an index stored later with release will publish.
        #[inline]
        pub fn $store_relaxed(&self, offset: u32, value: $int) {
            self.store(offset, value, Ordering::Relaxed)
        }
    };
}

impl Window {
    /// Creates a window on `len` bytes, at least 1, at `hva`, to which `gpa` translated. `mem` must
    /// be memory made by this crate; for any other the result is [`DmaFault::NotRam`].
    pub(crate) fn new<M: PhysMem>(mem: &M, place: WindowTarget) -> Access<Self> {
        let WindowTarget {
            iova,
            gpa,
            hva,
            len,
            perm,
            generation,
        } = place;
        let not_ram = DmaFault::NotRam { gpa };
        let found = keep::mapping_of(&mem.keep_alive(), hva, u64::from(len));
        let (memory, pointer) = found.ok_or(not_ram)?;
        let mut window = Self {
            iova,
            len,
            readable: 0,
            writable: 0,
            perm,
            gpa,
            pointer,
            generation,
            memory,
        };
        window.open();
        Ok(window)
    }

    /// Points the window to the current translation of its address.
    pub(crate) fn repoint<M: PhysMem>(&mut self, mem: &M, gpa: Gpa, hva: Hva) -> Access<()> {
        let len = u64::from(self.len);
        let pointer = match self.memory.pointer(hva, len) {
            Some(pointer) => pointer,
            None => {
                let not_ram = DmaFault::NotRam { gpa };
                let found = keep::mapping_of(&mem.keep_alive(), hva, len);
                let (memory, pointer) = found.ok_or(not_ram)?;
                self.memory = memory;
                pointer
            }
        };
        self.gpa = gpa;
        self.pointer = pointer;
        Ok(())
    }

    /// Allows the accesses that the permission includes.
    pub(crate) fn open(&mut self) {
        self.close();
        match self.perm {
            Perm::Read => self.readable = self.len,
            Perm::Write => self.writable = self.len,
        }
    }

    /// Refuses all accesses until the window is [refreshed](crate::Dma::refresh). For
    /// implementations of that method that have to wait.
    pub fn close(&mut self) {
        self.readable = 0;
        self.writable = 0;
    }

    pub(crate) fn is_open(&self) -> bool {
        self.readable | self.writable != 0
    }

    pub(crate) fn set_generation(&mut self, generation: u64) {
        self.generation = generation;
    }

    /// Returns the start of the window, an address of the device.
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Length in bytes, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a window is never empty")]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Returns a bit for each of `pages` that the window points to; 0 after a failed refresh.
    pub fn in_use(&self, pages: &Pages) -> u32 {
        if self.is_open() {
            pages.touched(self.gpa, self.len.into())
        } else {
            0
        }
    }

    /// Returns the host address of its start: `len` bytes from there on are mapped.
    #[inline(always)]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.pointer
    }

    /// Bytes from the start on that may be read: all, or none.
    #[inline(always)]
    pub(crate) fn readable(&self) -> u32 {
        self.readable
    }

    /// Bytes from the start on that may be written: all, or none.
    #[inline(always)]
    pub(crate) fn writable(&self) -> u32 {
        self.writable
    }

    /// Access that the device may make through the window.
    pub fn perm(&self) -> Perm {
        self.perm
    }

    /// Whether offset 0 is a multiple of `align`, a power of two up to 4096.
    pub fn is_aligned(&self, align: u64) -> bool {
        debug_assert!(align <= crate::PAGE_SIZE);
        self.iova.is_aligned(align)
    }

    /// Whether the pointer is valid: nothing that could have changed its translation has happened
    /// since it was obtained. If not, [`Dma::refresh`](crate::Dma::refresh) the window before the
    /// next access. `generation` is the device's [now](crate::Dma::generation).
    #[inline]
    pub fn is_current(&self, generation: u64) -> bool {
        self.is_open() && self.generation == generation
    }

    word_accessors!(
        u16,
        load_u16,
        load_u16_relaxed,
        store_u16,
        store_u16_relaxed
    );
    word_accessors!(
        u32,
        load_u32,
        load_u32_relaxed,
        store_u32,
        store_u32_relaxed
    );
    word_accessors!(
        u64,
        load_u64,
        load_u64_relaxed,
        store_u64,
        store_u64_relaxed
    );

    /// Copies bytes out of the window. They may tear against a writing guest, and nothing is
    /// ordered.
    #[inline]
    pub fn read_bytes(&self, offset: u32, buf: &mut [u8]) {
        let pointer = self.checked(offset, buf.len(), self.readable);
        // SAFETY: `checked` has found the range inside the window, whose memory `self` keeps
        // mapped; no references into a `Mapping` exist.
        unsafe { word::copy_out(pointer, buf) }
    }

    /// Copies bytes into the window. They may tear against a reading guest, and nothing is ordered:
    /// publish them by a store with release ordering.
    #[inline]
    pub fn write_bytes(&self, offset: u32, buf: &[u8]) {
        let pointer = self.checked(offset, buf.len(), self.writable);
        // SAFETY: as in `read_bytes`; mappings are writable.
        unsafe { word::copy_in(buf, pointer) }
    }

    /// Two [`u64`] loads, of the 16 bytes at `offset`, a multiple of 8, that order nothing: an
    /// entry of a ring behind an index already loaded with acquire. One check for both.
    #[inline(always)]
    pub fn load_pair_relaxed(&self, offset: u32) -> (u64, u64) {
        let pointer = self.checked(offset, 16, self.readable);
        if !pointer.addr().is_multiple_of(8) {
            self.refuse(offset, 16, self.readable);
        }
        // SAFETY: 16 bytes in bounds by `checked`, aligned by the line above, kept mapped by
        // `self`, no references.
        unsafe {
            (
                Word::load(pointer, Ordering::Relaxed),
                Word::load(pointer.add(8), Ordering::Relaxed),
            )
        }
    }

    /// Two [`u32`] stores, of the 8 bytes at `offset`, a multiple of 4, that order nothing: an
    /// entry of a ring that an index stored later with release will publish. One check for both.
    #[inline(always)]
    pub fn store_u32_pair_relaxed(&self, offset: u32, low: u32, high: u32) {
        let pointer = self.checked(offset, 8, self.writable);
        if !pointer.addr().is_multiple_of(4) {
            self.refuse(offset, 8, self.writable);
        }
        // SAFETY: as in `load_pair_relaxed`; mappings are writable.
        unsafe {
            Word::store(pointer, low, Ordering::Relaxed);
            Word::store(pointer.add(4), high, Ordering::Relaxed);
        }
    }

    /// Hints that the bytes at `offset` will be read soon; outside the window it does nothing.
    #[inline(always)]
    pub fn prefetch(&self, offset: u32) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if offset < self.len {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: needs SSE, which every x86-64 has; a prefetch accesses no memory that the
            // program can observe, and the address lies inside the window besides.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(self.pointer.as_ptr().add(offset as usize).cast())
            }
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = offset;
    }

    /// Returns a watch on the 16-bit word at `offset`, which needs neither this window nor its
    /// device. The word must be readable and aligned, as for [`load_u16`](Self::load_u16). Not for
    /// memory that a pager may evict: the pager does not know of these loads, and one may happen
    /// when the page is absent.
    pub fn watch_u16(&self, offset: u32) -> WatchWord {
        let pointer = self.checked_word::<u16>(offset, self.readable);
        let pointer = NonNull::new(pointer).expect("inside memory");
        WatchWord::new(pointer, self.memory.clone())
    }

    /// Returns whether `watch` reads the word at `offset` of the window's current memory. If so, it
    /// need not be made again.
    #[inline]
    pub fn is_watched_by(&self, watch: &WatchWord, offset: u32) -> bool {
        if u64::from(offset) + 2 > u64::from(self.readable) {
            return false;
        }
        // SAFETY: inside the `len` bytes behind `pointer`, `readable` being at most `len`.
        watch.is_at(unsafe { self.pointer.add(offset as usize) })
    }

    #[inline]
    fn load<T: Word>(&self, offset: u32, ordering: Ordering) -> T {
        let pointer = self.checked_word::<T>(offset, self.readable);
        // SAFETY: in bounds and aligned by `checked_word`, kept mapped by `self`, no references.
        unsafe { T::load(pointer, ordering) }
    }

    #[inline]
    fn store<T: Word>(&self, offset: u32, value: T, ordering: Ordering) {
        let pointer = self.checked_word::<T>(offset, self.writable);
        // SAFETY: as in `load`; mappings are writable.
        unsafe { T::store(pointer, value, ordering) }
    }

    /// Returns the pointer to `len` bytes at `offset`; `limit` is `self.readable` or
    /// `self.writable`.
    #[inline]
    fn checked(&self, offset: u32, len: usize, limit: u32) -> *mut u8 {
        // In 64 bits the sum cannot wrap: `offset` has 32, and a slice's length 63.
        if offset as u64 + len as u64 > u64::from(limit) {
            self.refuse(offset, len, limit);
        }
        // SAFETY: `offset + len <= limit <= self.len`, and `self.len` bytes behind `pointer` lie in
        // one allocation.
        unsafe { self.pointer.as_ptr().add(offset as usize) }
    }

    #[inline]
    fn checked_word<T: Word>(&self, offset: u32, limit: u32) -> *mut u8 {
        let pointer = self.checked(offset, size_of::<T>(), limit);
        if !pointer.addr().is_multiple_of(size_of::<T>()) {
            self.refuse(offset, size_of::<T>(), limit);
        }
        pointer
    }

    #[cold]
    fn refuse(&self, offset: u32, len: usize, limit: u32) -> ! {
        if !self.is_open() {
            panic!("access through a window whose last refresh failed");
        }
        if limit == 0 {
            panic!("access against the permission {:?} of a window", self.perm);
        }
        panic!(
            "{len} bytes at offset {offset} of a window of {} bytes at {:?}: outside or misaligned",
            self.len, self.iova
        );
    }
}

/// Parameters of a new [`Window`].
pub(crate) struct WindowTarget {
    pub(crate) iova: Iova,
    pub(crate) gpa: Gpa,
    pub(crate) hva: Hva,
    /// Bytes, at least 1.
    pub(crate) len: u32,
    pub(crate) perm: Perm,
    pub(crate) generation: u64,
}
