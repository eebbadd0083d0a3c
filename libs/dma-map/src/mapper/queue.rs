//! What a core has unmapped and not given back: in the order of unmapping, with room for a fixed number.

use alloc::collections::VecDeque;

use iova::Pinned;

use crate::invalidate::Ticket;

/// One unmapped mapping, its IOVA pinned.
pub(super) struct Entry {
    pub(super) pinned: Pinned,
    /// When it was unmapped, in nanoseconds, or earlier.
    pub(super) since_ns: u64,
    /// What covers it, besides flushes; `None` where only a flush can.
    pub(super) ticket: Option<Ticket>,
}

/// A core's queue. Its memory is allocated once.
pub(super) struct Queue {
    entries: VecDeque<Entry>,
    room: usize,
    /// Number of the first entry: how many were taken out, ever.
    first: u64,
}

impl Queue {
    /// Room for `room` entries, of which the first is number `first`.
    pub(super) fn new(room: usize, first: u64) -> Self {
        Self {
            entries: VecDeque::with_capacity(room),
            room,
            first,
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.entries.len() >= self.room
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// How many were taken out, ever.
    #[inline]
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// How many went in, ever.
    #[inline]
    pub(super) fn next(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// Adds one; the caller has seen that there is room.
    #[inline]
    pub(super) fn push(&mut self, entry: Entry) {
        debug_assert!(!self.is_full(), "a queue never grows");
        self.entries.push_back(entry);
    }

    #[inline]
    pub(super) fn front(&self) -> Option<&Entry> {
        self.entries.front()
    }

    /// Takes the first out.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<Entry> {
        let entry = self.entries.pop_front()?;
        self.first += 1;
        Some(entry)
    }

    /// Takes the first out if it is among the first `covered` ever.
    #[inline]
    pub(super) fn pop_covered(&mut self, covered: u64) -> Option<Entry> {
        if self.first >= covered {
            return None;
        }
        self.pop()
    }

    /// The ticket of the first did not complete, and will not.
    pub(super) fn void_ticket(&mut self) {
        if let Some(entry) = self.entries.front_mut() {
            entry.ticket = None;
        }
    }
}
