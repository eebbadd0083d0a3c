//! A 16-bit number that is stored as 32 bits.
//!
//! Compilers load a 16-bit field by a 32-bit load where alignment allows. Behind a recent 16-bit
//! store that load cannot take the stored value from the store buffer, and waits until it is in the
//! cache: a dozen cycles, at every field of the path of each request. A 32-bit store serves a load
//! of either width.

/// A number modulo 2^16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counter(u32);

impl Counter {
    #[inline(always)]
    pub(super) fn get(self) -> u16 {
        self.0 as u16
    }

    #[inline(always)]
    pub(super) fn set(&mut self, value: u16) {
        self.0 = u32::from(value);
    }

    /// Modulo 2^16.
    #[inline(always)]
    pub(super) fn add(&mut self, more: u16) {
        self.set(self.get().wrapping_add(more));
    }
}
