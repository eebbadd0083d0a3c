//! Open addressing from keys to places: linear probing, at most half full, deletion by shifting back.
//!
//! An entry is one word: 32 bits of the key's hash (which also say where the entry wants to be, so that shifting
//! needs no key) and the place plus one; 0 is free. A key is there once. The hash is not secret: a
//! driver that chooses its pages so that they collide slows itself, by at most one probe for each place.

use alloc::boxed::Box;
use alloc::vec;

use super::Key;

/// The odd number nearest to 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// 32 well-mixed bits of a key.
#[inline]
pub(super) fn hash(key: Key) -> u32 {
    let word = key.word();
    ((word ^ word >> 29).wrapping_mul(GOLDEN) >> 32) as u32
}

pub(super) struct Index {
    entries: Box<[u64]>,
    /// Shifts a hash to its home.
    shift: u32,
}

impl Index {
    /// For at most `places` entries.
    pub(super) fn new(places: usize) -> Self {
        let len = (places * 2).next_power_of_two().max(8);
        assert!(len <= 1 << 31, "at most 2^30 places");
        Self {
            entries: vec![0; len].into_boxed_slice(),
            shift: u32::BITS - len.ilog2(),
        }
    }

    #[inline]
    fn mask(&self) -> usize {
        self.entries.len() - 1
    }

    #[inline]
    fn home(&self, hash: u32) -> usize {
        (hash >> self.shift) as usize
    }

    /// The entry of `hash` whose place `is_it` accepts: where it is, and the place. Where there is none, where it would be.
    #[inline(always)]
    pub(super) fn find(
        &self,
        hash: u32,
        mut is_it: impl FnMut(u32) -> bool,
    ) -> Result<(usize, u32), usize> {
        let mut at = self.home(hash);
        loop {
            let entry = self.entries[at & self.mask()];
            if entry == 0 {
                return Err(at & self.mask());
            }
            let place = entry as u32 - 1;
            if (entry >> 32) as u32 == hash && is_it(place) {
                return Ok((at & self.mask(), place));
            }
            at += 1;
        }
    }

    /// Puts an entry where [`find`](Self::find) found it or would have found it; there are no more than the places it was
    /// made for.
    #[inline(always)]
    pub(super) fn put(&mut self, at: usize, hash: u32, place: u32) {
        self.entries[at] = u64::from(hash) << 32 | u64::from(place + 1);
    }

    /// The place of the entry at `at`.
    #[inline(always)]
    pub(super) fn place(&self, at: usize) -> u32 {
        self.entries[at] as u32 - 1
    }

    /// The entry at `at` has another place from now on.
    #[inline(always)]
    pub(super) fn set_place(&mut self, at: usize, place: u32) {
        let hash = self.entries[at] >> 32;
        self.entries[at] = hash << 32 | u64::from(place + 1);
    }

    /// Removes the entry that [`find`](Self::find) found at `hole`, and closes the gap.
    #[inline]
    pub(super) fn remove(&mut self, mut hole: usize) {
        let mask = self.mask();
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let entry = self.entries[at];
            if entry == 0 {
                break;
            }
            let home = self.home((entry >> 32) as u32);
            let is_reachable_from_hole =
                at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask;
            if is_reachable_from_hole {
                self.entries[hole] = entry;
                hole = at;
            }
        }
        self.entries[hole] = 0;
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.entries)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
