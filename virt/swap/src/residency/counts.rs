//! Counters of what has been done.

use super::pages::{Block, Slot};

/// Counters of the book, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Left memory unwritten, since a block holds the same.
    pub dropped_to_disk: u64,
    /// Left memory unwritten, since they were zeroes.
    pub dropped_as_zeroes: u64,
    /// Left memory by way of the store.
    pub saved: u64,
    /// Read from a disk, those read ahead among them.
    pub fetched_from_disk: u64,
    /// Read from the store, those read ahead among them.
    pub fetched_from_store: u64,
    /// Came as zeroes.
    pub zeroed: u64,
    /// Came back from a second chance.
    pub rescued: u64,
    /// Were about to be overwritten as a whole, and not read although they held something.
    pub not_fetched: u64,
    /// Were backed by a block that was about to change, and were read before.
    pub fetched_before_a_write: u64,
    /// Were read although a device was about to overwrite them as a whole: only by a policy that
    /// [reads them](super::IoPolicy::reads_overwritten).
    pub stale: u64,
    /// Were to be written to the store although a disk's block held the same: they were not stored
    /// to since a request of whole blocks filled or wrote them. Includes the pages of a block that
    /// backed [`SHARERS`](super::SHARERS) other pages; the block may have changed since, so their
    /// number is an upper bound. All others are counted only with a policy that
    /// [saves them](super::IoPolicy::saves_block_backed). Not counted: pages that have been in the
    /// store since, and requests that moved parts of blocks or overlapped another request.
    pub silent_writes: u64,
    /// Of silent writes whose block is known, those to a slot that does not follow the slot of the
    /// previous block: the number of runs into which the store breaks the disk's order. Only by a
    /// policy that [saves them](super::IoPolicy::saves_block_backed).
    pub order_breaks: u64,
    /// Were discarded by the guest, and are gone unwritten.
    pub discarded: u64,
    /// Were not released by the owner, since a device uses them.
    pub refused: u64,
}

/// Order of the silent writes whose block is known.
#[derive(Debug, Default)]
pub(super) struct SilentWrites {
    last: Option<(Block, Slot)>,
}

impl SilentWrites {
    /// Records a silent write. Returns whether it breaks the order: block and slot do not both
    /// follow those of the previous one.
    pub fn breaks_order(&mut self, block: Block, slot: Slot) -> bool {
        let last = self.last.replace((block, slot));
        !last.is_some_and(|(last, at)| {
            last.ahead(1) == Some(block) && at.0.checked_add(1) == Some(slot.0)
        })
    }
}
