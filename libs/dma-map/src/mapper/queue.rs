//! Queue of the mappings that a core has unmapped and not yet given back: in the order of
//! unmapping, with a fixed number of places.

use alloc::collections::VecDeque;

use iova::Pinned;

use crate::invalidate::Ticket;

/// A core's queue. Numbers of its entries only grow.
pub(super) struct Queue {
    /// Each with the time at which it went in, in nanoseconds. Its memory is allocated once.
    /// Options, so that `take` can move them out where they lie; none is empty but then, and after
    /// a panic of what it calls.
    entries: VecDeque<Option<(Pinned, u64)>>,
    /// Ticket of the invalidation that covers each entry, besides flushes. None where a policy
    /// waits for flushes only.
    tickets: VecDeque<Option<Ticket>>,
    room: usize,
    /// Number of the first entry: the count of all entries taken out.
    first: u64,
}

impl Queue {
    /// Room for `room` entries, of which the first is number `first`, with tickets or without.
    pub(super) fn new(room: usize, first: u64, has_tickets: bool) -> Self {
        Self {
            entries: VecDeque::with_capacity(room),
            tickets: VecDeque::with_capacity(if has_tickets { room } else { 0 }),
            room,
            first,
        }
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        self.entries.len() >= self.room
    }

    /// Free places.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.room - self.entries.len()
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Number of entries taken out so far.
    #[inline]
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// Number of entries pushed so far.
    #[inline(always)]
    pub(super) fn next(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// Time at which the first entry was pushed, in nanoseconds.
    #[inline(always)]
    pub(super) fn oldest_ns(&self) -> Option<u64> {
        let (_, since_ns) = self.entries.front()?.as_ref()?;
        Some(*since_ns)
    }

    /// Adds a mapping unmapped at `since_ns` or later. The caller has checked that there is room.
    /// Where entries have tickets, [`cover`](Self::cover) follows.
    #[inline(always)]
    pub(super) fn push(&mut self, pinned: Pinned, since_ns: u64) {
        debug_assert!(!self.is_full(), "a queue never grows");
        self.entries.push_back(Some((pinned, since_ns)));
    }

    /// Sets the ticket that covers the last entry, besides flushes.
    pub(super) fn cover(&mut self, ticket: Option<Ticket>) {
        self.tickets.push_back(ticket);
    }

    /// Returns the ticket that covers the first entry, besides flushes.
    pub(super) fn ticket(&self) -> Option<Ticket> {
        *self.tickets.front()?
    }

    /// Clears the ticket of the first entry: it did not complete, and will not.
    pub(super) fn void_ticket(&mut self) {
        if let Some(ticket) = self.tickets.front_mut() {
            *ticket = None;
        }
    }

    /// Takes out the entries among the first `covered` ever pushed. `fold` receives each with its
    /// time, and its own result for the one before.
    #[inline]
    pub(super) fn take<S>(
        &mut self,
        covered: u64,
        init: S,
        mut fold: impl FnMut(S, Pinned, u64) -> S,
    ) -> S {
        let count = covered.saturating_sub(self.first);
        let count = count.min(self.entries.len() as u64) as usize;
        let covered = self.entries.range_mut(..count);
        // Not a `drain`, whose steps go through memory.
        let last = covered.fold(init, |before, entry| match entry.take() {
            Some((pinned, since_ns)) => fold(before, pinned, since_ns),
            None => before,
        });
        // Together, and after the last: a panic of `fold` leaves numbers, entries and tickets as
        // they were.
        self.entries.drain(..count);
        self.tickets.drain(..self.tickets.len().min(count));
        self.first += count as u64;
        last
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
