//! Rows of entries in a [`Window`]: the tables of a ring, as a device reads or writes many entries
//! of them at a time.
//!
//! Bounds, alignment and permission are checked when a row is made; an access then costs one
//! comparison of its index. A row borrows its window, so it ends before that can be refreshed.
//!
//! UNSAFETY: dereferences pointers into the window. Its own accessors check three things at each
//! access, which is half the cost of reading a descriptor.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use crate::window::Window;
use crate::word::{self, Word};

/// `count` entries of `SIZE` bytes each.
#[derive(Clone, Copy)]
struct Row<'a, const SIZE: usize> {
    /// `count * SIZE` bytes from here on lie in the window.
    pointer: NonNull<u8>,
    count: u32,
    window: PhantomData<&'a Window>,
}

impl<'a, const SIZE: usize> Row<'a, SIZE> {
    /// Those from `offset` on, which must be at least `align`ed; `limit` of the window's bytes may
    /// be accessed.
    #[inline(always)]
    fn new(window: &'a Window, offset: u32, count: u32, align: usize, limit: u32) -> Option<Self> {
        let end = u64::from(offset) + u64::from(count) * SIZE as u64;
        if end > u64::from(limit) {
            return None;
        }
        // SAFETY: `offset` is at most `limit`, which is at most the window's length.
        let pointer = unsafe { window.start().add(offset as usize) };
        pointer.addr().get().is_multiple_of(align).then_some(Self {
            pointer,
            count,
            window: PhantomData,
        })
    }

    #[inline(always)]
    fn entry(&self, index: u16) -> Option<*mut u8> {
        let index = u32::from(index);
        // SAFETY: entry `index` of `count` lies inside the row.
        (index < self.count).then(|| unsafe { self.pointer.as_ptr().add(SIZE * index as usize) })
    }
}

// In the `unsafe` blocks below: `entry` returns `SIZE` bytes of the window, aligned as their row
// was checked to be; the window keeps them mapped, and nothing in the process makes references into
// a mapping.

/// Numbers of 16 bits that the device reads: the ring of a split queue's driver.
#[derive(Clone, Copy)]
pub struct ReadU16s<'a>(Row<'a, 2>);

impl<'a> ReadU16s<'a> {
    /// `count` of them from `offset` of `window` on; `None` if they do not lie in it, aligned and
    /// to be read.
    #[inline(always)]
    pub fn new(window: &'a Window, offset: u32, count: u32) -> Option<Self> {
        Row::new(window, offset, count, 2, window.readable()).map(Self)
    }

    /// Number `index`, by one load that orders nothing; `None` past the end.
    #[inline(always)]
    pub fn load_relaxed(&self, index: u16) -> Option<u16> {
        let entry = self.0.entry(index)?;
        // SAFETY: as said above.
        Some(unsafe { Word::load(entry, Ordering::Relaxed) })
    }
}

/// Entries of two 64-bit words that the device reads: descriptors.
#[derive(Clone, Copy)]
pub struct ReadDescriptors<'a>(Row<'a, 16>);

impl<'a> ReadDescriptors<'a> {
    /// `count` of them from the start of `window` on; `None` if they do not lie in it, aligned and
    /// to be read.
    #[inline(always)]
    pub fn new(window: &'a Window, count: u32) -> Option<Self> {
        Row::new(window, 0, count, 8, window.readable()).map(Self)
    }

    /// The words of entry `index`, by two loads that order nothing; `None` past the end.
    #[inline(always)]
    pub fn load_relaxed(&self, index: u16) -> Option<(u64, u64)> {
        let entry = self.0.entry(index)?;
        // SAFETY: as said above.
        unsafe {
            let first = Word::load(entry, Ordering::Relaxed);
            Some((first, Word::load(entry.add(8), Ordering::Relaxed)))
        }
    }

    /// The first word of entry `index`, by a load that orders nothing; `None` past the end.
    #[inline(always)]
    pub fn load_first_relaxed(&self, index: u16) -> Option<u64> {
        let entry = self.0.entry(index)?;
        // SAFETY: as said above.
        Some(unsafe { Word::load(entry, Ordering::Relaxed) })
    }

    /// Loads the second word of entry `index` with acquire ordering: the driver's stores before its
    /// store of that word are visible to later loads.
    #[inline(always)]
    pub fn load_second(&self, index: u16) -> Option<u64> {
        let entry = self.0.entry(index)?;
        // SAFETY: as said above.
        Some(unsafe { Word::load(entry.add(8), Ordering::Acquire) })
    }
}

/// Entries of two 32-bit words that the device writes: used elements.
#[derive(Clone, Copy)]
pub struct WriteUsed<'a>(Row<'a, 8>);

impl<'a> WriteUsed<'a> {
    /// `count` of them from `offset` of `window` on; `None` if they do not lie in it, aligned and
    /// to be written.
    #[inline(always)]
    pub fn new(window: &'a Window, offset: u32, count: u32) -> Option<Self> {
        Row::new(window, offset, count, 4, window.writable()).map(Self)
    }

    /// Stores entry `index`, in an order of no matter; past the end nothing.
    #[inline(always)]
    pub fn store_relaxed(&self, index: u16, first: u32, second: u32) {
        if let Some(entry) = self.0.entry(index) {
            // SAFETY: as said above; mappings are writable.
            unsafe {
                Word::store(entry, first, Ordering::Relaxed);
                Word::store(entry.add(4), second, Ordering::Relaxed);
            }
        }
    }

    /// Hints that entry `index` will be written soon.
    #[inline(always)]
    pub fn prefetch(&self, index: u16) {
        if let Some(entry) = self.0.entry(index) {
            word::prefetch_to_write(entry);
        }
    }
}

/// The second words of entries of two 64-bit words, which the device writes: descriptors that it
/// has used.
#[derive(Clone, Copy)]
pub struct WriteDescriptors<'a>(Row<'a, 16>);

impl<'a> WriteDescriptors<'a> {
    /// `count` of them from the start of `window` on; `None` if they do not lie in it, aligned and
    /// to be written.
    #[inline(always)]
    pub fn new(window: &'a Window, count: u32) -> Option<Self> {
        Row::new(window, 0, count, 8, window.writable()).map(Self)
    }

    /// Stores the second word of entry `index`, in an order of no matter; past the end nothing.
    #[inline(always)]
    pub fn store_second_relaxed(&self, index: u16, word: u64) {
        if let Some(entry) = self.0.entry(index) {
            // SAFETY: as said above; mappings are writable.
            unsafe { Word::store(entry.add(8), word, Ordering::Relaxed) }
        }
    }

    /// Hints that entry `index` will be written soon.
    #[inline(always)]
    pub fn prefetch(&self, index: u16) {
        if let Some(entry) = self.0.entry(index) {
            word::prefetch_to_write(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dma, Gpa, GuestRam, Iova, NoIommu, Perm, PhysMem, SourceId, View};

    #[test]
    fn entries_are_reached_in_bounds_and_as_permitted() {
        let ram = GuestRam::in_heap(&[(Gpa::new(0), 1 << 16)]).expect("memory");
        let mut iommu = NoIommu::new(1);
        let mut view = View::new(&mut iommu, &ram, SourceId(0));
        let mut window = |at, perm| view.window(Iova::new(at), 68, perm).expect("RAM");
        let (read, write) = (window(0x1000, Perm::Read), window(0x1000, Perm::Write));

        // 4 bytes, and 8 entries of 8; 4 of 16 fit at most.
        let used = WriteUsed::new(&write, 4, 8).expect("inside");
        used.store_relaxed(7, 0x0403_0201, 0x0807_0605);
        used.store_relaxed(8, !0, !0);
        let mut bytes = [0; 16];
        ram.read(Gpa::new(0x1000 + 60), &mut bytes).expect("RAM");
        assert_eq!(bytes, *b"\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\0\0\0\0\0");
        assert!(WriteUsed::new(&write, 4, 9).is_none());
        assert!(WriteUsed::new(&write, 2, 8).is_none());
        assert!(WriteUsed::new(&read, 4, 8).is_none());

        let descriptors = WriteDescriptors::new(&write, 4).expect("inside");
        descriptors.store_second_relaxed(3, 0x1122);
        descriptors.store_second_relaxed(4, !0);
        assert!(WriteDescriptors::new(&write, 5).is_none());
        assert!(WriteDescriptors::new(&read, 4).is_none());
        let descriptors = ReadDescriptors::new(&read, 4).expect("inside");
        assert_eq!(descriptors.load_relaxed(3), Some((0, 0x1122)));
        assert_eq!(descriptors.load_second(3), Some(0x1122));
        assert_eq!(descriptors.load_relaxed(4), None);
        assert_eq!(descriptors.load_second(4), None);
        assert!(ReadDescriptors::new(&read, 5).is_none());
        assert!(ReadDescriptors::new(&write, 4).is_none());

        let numbers = ReadU16s::new(&read, 56, 6).expect("inside");
        assert_eq!(numbers.load_relaxed(0), Some(0x1122));
        assert_eq!(numbers.load_relaxed(6), None);
        assert!(ReadU16s::new(&read, 56, 7).is_none());
        assert!(ReadU16s::new(&read, 55, 1).is_none());
        assert!(ReadU16s::new(&write, 56, 6).is_none());
    }
}
