//! What a core has unmapped and not given back: in the order of unmapping, with room for a fixed number.
//!
//! A ring in memory that is allocated once. Entries are four words and their places numbers that only grow, so that
//! adding one is a store of each and nothing is looked up.

use alloc::boxed::Box;

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

/// Where an entry lies: the pin is there while it does.
#[derive(Default)]
pub(super) struct Place {
    pinned: Option<Pinned>,
    pub(super) since_ns: u64,
    pub(super) ticket: Option<Ticket>,
}

/// A core's queue.
pub(super) struct Queue {
    /// A power of two of places; entry number `n` is in place `n` modulo their number.
    entries: Box<[Place]>,
    room: u64,
    /// Number of the first entry: how many were taken out, ever.
    first: u64,
    /// Number of the next entry: how many went in, ever.
    next: u64,
}

impl Queue {
    /// Room for `room` entries, of which the first is number `first`.
    pub(super) fn new(room: usize, first: u64) -> Self {
        let places = room.max(1).next_power_of_two();
        Self {
            entries: (0..places).map(|_| Place::default()).collect(),
            room: room as u64,
            first,
            next: first,
        }
    }

    #[inline(always)]
    fn place(&self, number: u64) -> usize {
        number as usize & (self.entries.len() - 1)
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.first == self.next
    }

    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        self.next - self.first >= self.room
    }

    /// Whether it takes one more, and another after that.
    #[inline(always)]
    pub(super) fn takes_two(&self) -> bool {
        self.next - self.first + 1 < self.room
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        (self.next - self.first) as usize
    }

    /// How many were taken out, ever.
    #[inline]
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// How many went in, ever.
    #[inline(always)]
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Adds one; the caller has seen that there is room.
    #[inline(always)]
    pub(super) fn push(&mut self, entry: Entry) {
        debug_assert!(!self.is_full(), "a queue never grows");
        let place = self.place(self.next);
        let place = &mut self.entries[place];
        place.pinned = Some(entry.pinned);
        place.since_ns = entry.since_ns;
        place.ticket = entry.ticket;
        self.next += 1;
    }

    #[inline(always)]
    pub(super) fn front(&self) -> Option<&Place> {
        let place = &self.entries[self.place(self.first)];
        (!self.is_empty()).then_some(place)
    }

    /// Takes the first out.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<Entry> {
        let place = self.place(self.first);
        let place = &mut self.entries[place];
        let pinned = place.pinned.take()?;
        self.first += 1;
        Some(Entry {
            pinned,
            since_ns: place.since_ns,
            ticket: place.ticket,
        })
    }

    /// Takes the first out if it is among the first `covered` ever.
    #[inline(always)]
    pub(super) fn pop_covered(&mut self, covered: u64) -> Option<Entry> {
        if self.first >= covered {
            return None;
        }
        self.pop()
    }

    /// The ticket of the first did not complete, and will not.
    pub(super) fn void_ticket(&mut self) {
        let place = self.place(self.first);
        self.entries[place].ticket = None;
    }
}
