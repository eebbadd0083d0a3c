//! Outstanding misses: translations that were requested and have not arrived.
//!
//! ```text
//!            next_miss        answered(granted)      settle
//! unsent ───────────▶ sent ───────────────▶ granted ───────▶ refused
//!    │                 │ └─ answered(refused) ────────────────▶ │
//!    └── an update or a revocation of its address ──▶ ended ◀───┘ its ticket has ended
//! ```
//! Answers arrive in the order in which the misses were sent, so a miss that an update has ended
//! stays in the queue until its answer arrives. A refusal is kept for the accesses that waited for
//! it ([`Misses::is_refused`]); the owner drops it once they have seen it.
//!
//! Bounds: [`MAX_MISSES`] unanswered misses, [`MAX_REFUSALS`] refusals. An access that finds no
//! room waits for the newest miss that others wait for, and then tries again.

use std::collections::VecDeque;

use super::{IovaRange, MAX_MISSES, Miss, Rights};
use crate::access::{DmaFault, Perm, Stop, Ticket};
use crate::addr::{Iova, PAGE_SIZE};

/// Most refusals that are kept: more than the misses that can end between the end of a ticket and
/// the repeated access that waited for it.
const MAX_REFUSALS: usize = 4 * MAX_MISSES;

/// Bit that distinguishes tickets of a device TLB from those of memory.
const TICKET_BIT: u64 = 1 << 63;

#[derive(Clone, Copy, Debug)]
struct PendingMiss {
    miss: Miss,
    ticket: Ticket,
    /// Time at which it was sent, in ns.
    since_ns: u64,
    /// Its ticket has ended; only the answer is missing.
    is_ended: bool,
    /// It was abandoned: its answer is still the first to arrive, and has no time limit any more.
    is_given_up: bool,
}

impl PendingMiss {
    fn page(&self) -> u64 {
        page(self.miss.iova)
    }
}

fn page(iova: Iova) -> u64 {
    iova.raw() / PAGE_SIZE
}

/// All outstanding misses of one device TLB, and the refusals.
#[derive(Debug, Default)]
pub(super) struct Misses {
    /// Not answered, oldest first.
    queue: VecDeque<PendingMiss>,
    /// Number of misses at the front of the queue that were sent.
    sent: usize,
    /// Answered as granted; the update has not arrived.
    granted: Vec<PendingMiss>,
    /// Page and access, oldest first.
    refused: VecDeque<(u64, Perm)>,
    ended: Vec<Ticket>,
    tickets: u64,
    /// Everything is refused.
    is_closed: bool,
}

impl Misses {
    /// Returns the result of an access to an address without a translation: a ticket, or a fault.
    pub(super) fn ask(&mut self, iova: Iova, perm: Perm) -> Stop {
        let is_same = |asked: &&PendingMiss| {
            !asked.is_ended && asked.page() == page(iova) && asked.miss.perm == perm
        };
        if self.is_closed || self.is_refused(iova, perm) {
            return DmaFault::Blocked { iova }.into();
        }
        let mut all = self.queue.iter().chain(&self.granted);
        if let Some(asked) = all.find(is_same) {
            return Stop::Pending(asked.ticket);
        }
        if self.queue.len() + self.granted.len() >= MAX_MISSES {
            let mut waited_for = self.granted.iter().chain(&self.queue).rev();
            return match waited_for.find(|asked| !asked.is_ended) {
                Some(asked) => Stop::Pending(asked.ticket),
                // Updates have arrived for all, but not the answers.
                None => DmaFault::Blocked { iova }.into(),
            };
        }
        self.tickets += 1;
        let ticket = Ticket(TICKET_BIT | self.tickets);
        self.queue.push_back(PendingMiss {
            miss: Miss { iova, perm },
            ticket,
            since_ns: 0,
            is_ended: false,
            is_given_up: false,
        });
        Stop::Pending(ticket)
    }

    fn is_refused(&self, iova: Iova, perm: Perm) -> bool {
        self.refused.contains(&(page(iova), perm))
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.sent < self.queue.len()
    }

    pub(super) fn next(&mut self, now_ns: u64) -> Option<Miss> {
        let asked = self.queue.get_mut(self.sent)?;
        self.sent += 1;
        asked.since_ns = now_ns;
        Some(asked.miss)
    }

    /// Returns the time at which the oldest unanswered miss was sent, in ns.
    pub(super) fn oldest_ns(&self) -> Option<u64> {
        let mut sent = self.queue.iter().take(self.sent);
        let asked = sent.find(|asked| !asked.is_given_up)?;
        Some(asked.since_ns)
    }

    /// Records the answer to the oldest miss sent; returns false if there is none.
    pub(super) fn answered(&mut self, is_granted: bool) -> bool {
        let Some(asked) = (self.sent != 0).then(|| self.queue.pop_front()).flatten() else {
            return false;
        };
        self.sent -= 1;
        match (asked.is_ended, is_granted) {
            (true, _) => {}
            (false, true) => self.granted.push(asked),
            (false, false) => self.refuse(asked.miss, asked.ticket),
        }
        true
    }

    pub(super) fn must_settle(&self) -> bool {
        !self.granted.is_empty()
    }

    /// Refuses the misses that were granted and have no update. To be called when every update sent
    /// before the answers received so far has been taken.
    pub(super) fn settle(&mut self) {
        for asked in std::mem::take(&mut self.granted) {
            self.refuse(asked.miss, asked.ticket);
        }
    }

    fn refuse(&mut self, miss: Miss, ticket: Ticket) {
        self.ended.push(ticket);
        let refusal = (page(miss.iova), miss.perm);
        if self.refused.contains(&refusal) {
            return;
        }
        if self.refused.len() == MAX_REFUSALS {
            self.refused.pop_front();
        }
        self.refused.push_back(refusal);
    }

    /// Returns the access requested by the oldest sent miss inside `range`.
    pub(super) fn asked_in(&self, range: IovaRange) -> Option<Perm> {
        let sent = self.granted.iter().chain(self.queue.iter().take(self.sent));
        let mut waiting = sent.filter(|asked| !asked.is_ended);
        let asked = waiting.find(|asked| range.contains(asked.miss.iova))?;
        Some(asked.miss.perm)
    }

    /// Records an update of `range` with these rights, which ends all misses inside `range`.
    pub(super) fn updated(&mut self, range: IovaRange, rights: Rights) {
        let covers = |asked: &PendingMiss| !asked.is_ended && range.contains(asked.miss.iova);
        let pages = page(range.first())..=page(range.last());
        self.refused
            .retain(|&(page, perm)| !(pages.contains(&page) && rights.allows(perm)));
        let mut ended: Vec<(Miss, Ticket)> = Vec::new();
        self.granted.retain(|asked| {
            let is_over = covers(asked);
            if is_over {
                ended.push((asked.miss, asked.ticket));
            }
            !is_over
        });
        let mut at = 0;
        while at < self.queue.len() {
            let asked = &mut self.queue[at];
            if covers(asked) {
                ended.push((asked.miss, asked.ticket));
                asked.is_ended = true;
                if at >= self.sent {
                    self.queue.remove(at);
                    continue;
                }
            }
            at += 1;
        }
        for (miss, ticket) in ended {
            match rights.allows(miss.perm) {
                true => self.ended.push(ticket),
                false => self.refuse(miss, ticket),
            }
        }
    }

    /// Refusals inside `range` no longer hold.
    pub(super) fn invalidated(&mut self, range: IovaRange) {
        let pages = page(range.first())..=page(range.last());
        self.refused.retain(|(page, _)| !pages.contains(page));
    }

    pub(super) fn forget_refusals(&mut self) {
        self.refused.clear();
    }

    /// Refuses everything, now and from now on.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
        for asked in &mut self.queue {
            asked.is_given_up = true;
            if !std::mem::replace(&mut asked.is_ended, true) {
                self.ended.push(asked.ticket);
            }
        }
        self.queue.truncate(self.sent);
        self.settle();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub(super) fn open(&mut self) {
        self.is_closed = false;
        self.refused.clear();
    }

    /// Marks all unanswered misses as unsent: the answers to those sent will not arrive.
    pub(super) fn ask_again(&mut self) {
        self.queue.retain(|asked| !asked.is_ended);
        self.sent = 0;
        for asked in self.granted.drain(..).rev() {
            self.queue.push_front(asked);
        }
    }

    pub(super) fn take_ended(&mut self) -> Vec<Ticket> {
        std::mem::take(&mut self.ended)
    }

    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }
}
