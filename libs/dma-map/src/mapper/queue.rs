//! What a core has unmapped and not given back: in the order of unmapping, with room for a fixed number.
//!
//! A ring of pins in memory that is allocated once. Entries are two words and their numbers only grow, so that adding one is
//! a store of each and nothing is looked up. Beside it, so that an entry need not have them: the times, one for each run
//! of entries that have the same (the clock is a coarse one), and tickets, where a policy waits for each entry by itself.

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use iova::Pinned;

use crate::invalidate::Ticket;

/// Entries with one time.
#[derive(Clone, Copy)]
struct Run {
    /// Number of the first; the last is the one before the next run's.
    first: u64,
    since_ns: u64,
}

/// A core's queue.
pub(super) struct Queue {
    /// A power of two of places; entry number `n` is in place `n` modulo their number.
    pins: Box<[Option<Pinned>]>,
    room: u64,
    /// Number of the first entry: how many were taken out, ever.
    first: u64,
    /// Number of the next entry: how many went in, ever.
    next: u64,
    /// When the first entry went in, in nanoseconds, or earlier; means nothing where there is none.
    oldest_ns: u64,
    /// The time of the last run; means nothing where there is none.
    newest_ns: u64,
    /// Times, oldest first; empty if and only if there are no entries. Has room for one of each entry.
    runs: VecDeque<Run>,
    /// What covers an entry, besides flushes, by place. None where no entry has any.
    tickets: Box<[Option<Ticket>]>,
}

impl Queue {
    /// Room for `room` entries, of which the first is number `first`, with tickets or without.
    pub(super) fn new(room: usize, first: u64, has_tickets: bool) -> Self {
        let places = room.max(1).next_power_of_two();
        Self {
            pins: (0..places).map(|_| None).collect(),
            room: room as u64,
            first,
            next: first,
            oldest_ns: 0,
            newest_ns: 0,
            runs: VecDeque::with_capacity(places),
            tickets: (0..places).filter(|_| has_tickets).map(|_| None).collect(),
        }
    }

    #[inline(always)]
    fn place(&self, number: u64) -> usize {
        number as usize & (self.pins.len() - 1)
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.first == self.next
    }

    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        self.next - self.first >= self.room
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

    /// When the first entry went in, in nanoseconds, or earlier; means nothing where there is none.
    #[inline(always)]
    pub(super) fn oldest_ns(&self) -> u64 {
        self.oldest_ns
    }

    /// Adds what was unmapped at `since_ns` or later; the caller has seen that there is room. Gives whether it is the first. Where
    /// entries have tickets, [`set_ticket`](Self::set_ticket) follows.
    #[inline(always)]
    pub(super) fn push(&mut self, pinned: Pinned, since_ns: u64) -> bool {
        debug_assert!(!self.is_full(), "a queue never grows");
        let is_first = self.is_empty();
        if is_first || since_ns != self.newest_ns {
            self.begin_run(since_ns);
        }
        let place = self.place(self.next);
        self.pins[place] = Some(pinned);
        self.next += 1;
        is_first
    }

    #[cold]
    #[inline(never)]
    fn begin_run(&mut self, since_ns: u64) {
        if self.is_empty() {
            self.oldest_ns = since_ns;
        }
        self.newest_ns = since_ns;
        self.runs.push_back(Run {
            first: self.next,
            since_ns,
        });
    }

    /// `ticket` covers the last entry.
    pub(super) fn set_ticket(&mut self, ticket: Option<Ticket>) {
        let place = self.place(self.next.wrapping_sub(1));
        if let Some(last) = self.tickets.get_mut(place) {
            *last = ticket;
        }
    }

    /// What covers the first, besides flushes.
    pub(super) fn ticket(&self) -> Option<Ticket> {
        if self.is_empty() {
            return None;
        }
        *self.tickets.get(self.place(self.first))?
    }

    /// The ticket of the first did not complete, and will not.
    pub(super) fn void_ticket(&mut self) {
        let place = self.place(self.first);
        if let Some(ticket) = self.tickets.get_mut(place) {
            *ticket = None;
        }
    }

    /// Takes the first out, with its time.
    pub(super) fn pop(&mut self) -> Option<(Pinned, u64)> {
        let since_ns = self.oldest_ns;
        let mut popped = None;
        self.pop_run(self.first + 1, |pinned| popped = Some(pinned))?;
        Some((popped?, since_ns))
    }

    /// Takes out those of the first run that are among the first `covered` ever. Gives how many, and their time; `None` where
    /// there are none.
    #[inline]
    pub(super) fn pop_run(
        &mut self,
        covered: u64,
        mut each: impl FnMut(Pinned),
    ) -> Option<(u64, u64)> {
        let since_ns = self.runs.front()?.since_ns;
        let end = self.runs.get(1).map_or(self.next, |run| run.first);
        let first = self.first;
        let end_of_these = end.min(covered);
        if first >= end_of_these {
            return None;
        }
        let mask = self.pins.len() - 1;
        for number in first..end_of_these {
            let pinned = self.pins[number as usize & mask].take();
            each(pinned.expect("an entry has its pin until it is taken out"));
        }
        self.first = end_of_these;
        if end_of_these == end {
            self.runs.pop_front();
            if let Some(run) = self.runs.front() {
                self.oldest_ns = run.since_ns;
            }
        }
        Some((end_of_these - first, since_ns))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
