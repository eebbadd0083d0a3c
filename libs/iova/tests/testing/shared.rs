//! State between players on threads: a bit for every page, and ranges on their way to another core.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use lines::Lock;

use super::World;
use crate::IovaRange;

/// Most ranges that wait for one core.
const WAITING: usize = 256;

/// Shared by all players of a space that run at once.
pub struct Shared {
    /// Number of the first bit's page.
    first: u64,
    /// A bit per page that is out.
    bits: Vec<AtomicU64>,
    /// By core: ranges that it is to free.
    inboxes: Vec<Lock<Vec<IovaRange>>>,
}

impl Shared {
    /// Nothing is out. Takes an eighth of a byte for every page of the aperture.
    pub fn new(world: &World) -> Self {
        let (first, last) = (world.aperture.first().raw(), world.aperture.last().raw());
        Self {
            first,
            bits: (0..(last - first) / 64 + 1)
                .map(|_| AtomicU64::new(0))
                .collect(),
            inboxes: (0..world.cores).map(|_| Lock::new(Vec::new())).collect(),
        }
    }

    /// Flips the bits of a range.
    ///
    /// # Panics
    /// If one of them was not `expected`.
    pub fn flip(&self, range: IovaRange, expected: bool) {
        let (mut page, end) = (
            range.first().raw() - self.first,
            range.last().raw() + 1 - self.first,
        );
        while page < end {
            let count = (64 - page % 64).min(end - page);
            let mask = (u64::MAX >> (64 - count)) << (page % 64);
            // Acquire and release: a player that finds a bit as another left it comes after that
            // one, whatever the allocator does.
            let was = self.bits[(page / 64) as usize].fetch_xor(mask, Ordering::AcqRel) & mask;
            let want = if expected { mask } else { 0 };
            let at = page + self.first;
            assert_eq!(
                was, want,
                "pages at {at:#x} of {range} are out already, or not out"
            );
            page += count;
        }
    }

    /// Whether nothing is out.
    pub fn is_empty(&self) -> bool {
        let mut bits = self.bits.iter();
        bits.all(|word| word.load(Ordering::Acquire) == 0)
    }

    /// Leaves a range to the core after `core`, or gives it back if too many wait there.
    pub(super) fn pass(&self, core: usize, range: IovaRange) -> Option<IovaRange> {
        let mut inbox = self.inboxes[(core + 1) % self.inboxes.len()].lock();
        if inbox.len() >= WAITING {
            return Some(range);
        }
        inbox.push(range);
        None
    }

    /// Takes a range that was left to `core`.
    pub(super) fn take(&self, core: usize) -> Option<IovaRange> {
        self.inboxes[core].lock().pop()
    }
}
