//! Mappings on their way out, together.

use alloc::vec::Vec;

use iova::IovaRange;

/// A mapping that has to be torn down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expired {
    pub(super) range: IovaRange,
    pub(super) since_ns: u64,
    /// The place in the cache that it occupies until it is torn down.
    pub(super) slot: u32,
}

impl Expired {
    /// The IOVA range, all of it mapped as long as its key says and allocated.
    #[inline]
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// When it was released, on the caller's clock: what it has been stale since.
    #[inline]
    pub fn since_ns(&self) -> u64 {
        self.since_ns
    }

    /// The place in its cache.
    #[inline]
    pub(crate) fn place(&self) -> u32 {
        self.slot
    }
}

/// Up to a fixed number of mappings of one cache that have to be torn down, for one invalidation.
///
/// It belongs to the cache that filled it until [`torn_down`](super::ReuseCache::torn_down); one that is dropped
/// before keeps its mappings stale, and their places in the cache occupied, for ever.
#[derive(Debug)]
#[must_use = "its mappings stay stale until they are torn down"]
pub struct Batch {
    entries: Vec<Expired>,
    room: usize,
    /// Who filled it, where it is not empty.
    taker: Taker,
}

/// Who takes mappings out of a cache: only it can give their places back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taker {
    /// Nobody yet.
    Nobody,
    /// The cache whose memory lies at this address, by its owner.
    Owner(usize),
    /// The same, by another thread.
    Stranger(usize),
}

impl Batch {
    /// An empty batch for `room` mappings, at least 1; its memory is allocated now.
    pub fn with_room(room: usize) -> Self {
        let room = room.max(1);
        Self {
            entries: Vec::with_capacity(room),
            room,
            taker: Taker::Nobody,
        }
    }

    /// What has to be torn down, oldest first.
    #[inline]
    pub fn entries(&self) -> &[Expired] {
        &self.entries
    }

    /// Whether there is nothing to tear down.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether no further mapping fits.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.entries.len() == self.room
    }

    /// Adds one for `taker`; there is room.
    ///
    /// # Panics
    /// The batch holds another's.
    #[inline]
    pub(super) fn push(&mut self, taker: Taker, expired: Expired) {
        debug_assert!(!self.is_full());
        if self.entries.is_empty() {
            self.taker = taker;
        }
        assert!(
            self.taker == taker,
            "a batch holds the mappings of one cache, taken by its owner or by others, until they are torn down"
        );
        self.entries.push(expired);
    }

    /// What `from` has put in is to be taken out by `to`.
    ///
    /// # Panics
    /// The batch holds another's.
    pub(super) fn hand_over(&mut self, from: Taker, to: Taker) {
        assert!(
            self.entries.is_empty() || self.taker == from,
            "a batch is handed over by whom it was filled by"
        );
        self.taker = to;
    }

    /// Takes everything out, all of which `taker` has put in.
    ///
    /// # Panics
    /// The batch holds another's.
    pub(super) fn take(&mut self, taker: Taker) -> impl Iterator<Item = Expired> + '_ {
        assert!(
            self.entries.is_empty() || self.taker == taker,
            "a batch goes back to whom it was filled by"
        );
        self.entries.drain(..)
    }
}
