//! Waiters: tickets and requests of disks that wait for pages, and pages that wait for room.
//!
//! ```text
//!  page wanted ── room ─────────────────────────▶ comes ── settled ──▶ its waiters go on
//!       └─ none ─▶ RoomQueue ── room (balance) ────▲
//! ```

use std::collections::{HashMap, VecDeque};

use super::command::{Op, Ticket};
use super::pages::Page;
use super::policy::FaultOrigin;

/// Party that waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    Ticket(Ticket),
    Op(Op),
}

/// Waiters by page, and pages that each ticket still waits for.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    by_page: HashMap<Page, Vec<Waiter>>,
    tickets: HashMap<Ticket, usize>,
}

impl Waiters {
    /// Adds a ticket that waits for these pages, once for each occurrence. Returns whether it waits
    /// at all.
    pub fn add_ticket(&mut self, ticket: Ticket, pages: &[Page]) -> bool {
        for page in pages {
            let waiters = self.by_page.entry(*page).or_default();
            waiters.push(Waiter::Ticket(ticket));
        }
        if !pages.is_empty() {
            self.tickets.insert(ticket, pages.len());
        }
        !pages.is_empty()
    }

    /// Adds a request that waits for a page. Returns false if it waits for it already.
    pub fn add_op(&mut self, op: Op, page: Page) -> bool {
        let waiters = self.by_page.entry(page).or_default();
        let is_new = !waiters.contains(&Waiter::Op(op));
        if is_new {
            waiters.push(Waiter::Op(op));
        }
        is_new
    }

    /// Returns whether a ticket or a request waits for the page.
    pub fn has(&self, page: Page) -> bool {
        self.by_page.contains_key(&page)
    }

    /// Removes the waiters of the page, which is resident.
    pub fn arrived(&mut self, page: Page) -> Vec<Waiter> {
        self.by_page.remove(&page).unwrap_or_default()
    }

    /// Records that a page that the ticket waited for has arrived. Returns whether it was the last
    /// one.
    pub fn ticket_has_one(&mut self, ticket: Ticket) -> bool {
        let Some(waits) = self.tickets.get_mut(&ticket) else {
            return false;
        };
        *waits -= 1;
        let is_last = *waits == 0;
        if is_last {
            self.tickets.remove(&ticket);
        }
        is_last
    }
}

/// Pages that are wanted while there is no room: those of vCPUs first, and of these the last first.
/// Some may have come meanwhile.
#[derive(Debug, Default)]
pub(super) struct RoomQueue {
    waiting: VecDeque<(Page, FaultOrigin)>,
}

impl RoomQueue {
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn push(&mut self, page: Page, origin: FaultOrigin) {
        match origin {
            FaultOrigin::Vcpu => self.waiting.push_front((page, origin)),
            FaultOrigin::Device => self.waiting.push_back((page, origin)),
        }
    }

    /// Removes the first page, if there is room for its origin.
    pub fn pop_if(
        &mut self,
        has_room: impl FnOnce(FaultOrigin) -> bool,
    ) -> Option<(Page, FaultOrigin)> {
        let (_, origin) = self.waiting.front()?;
        has_room(*origin).then(|| self.waiting.pop_front())?
    }
}

#[cfg(test)]
mod tests {
    use super::FaultOrigin::{Device, Vcpu};
    use super::*;

    #[test]
    fn ticket_is_over_when_each_of_its_pages_has_arrived() {
        let mut waiters = Waiters::default();
        assert!(!waiters.add_ticket(Ticket(1), &[]), "it waits for nothing");
        assert!(waiters.add_ticket(Ticket(2), &[Page(3), Page(4), Page(3)]));
        assert!(waiters.add_op(Op(5), Page(3)));
        assert!(!waiters.add_op(Op(5), Page(3)), "once a page");
        let all = [
            Waiter::Ticket(Ticket(2)),
            Waiter::Ticket(Ticket(2)),
            Waiter::Op(Op(5)),
        ];
        assert!(waiters.has(Page(3)));
        assert_eq!(waiters.arrived(Page(3)), all);
        assert!(!waiters.has(Page(3)));
        let is_over = [(); 3].map(|()| waiters.ticket_has_one(Ticket(2)));
        assert_eq!(is_over, [false, false, true]);
        assert!(!waiters.ticket_has_one(Ticket(2)), "over once");
    }

    #[test]
    fn vcpus_pages_come_first_and_the_last_of_them_first_of_all() {
        let mut queue = RoomQueue::default();
        for (page, origin) in [(1, Device), (2, Vcpu), (3, Device), (4, Vcpu)] {
            queue.push(Page(page), origin);
        }
        for page in [4, 2] {
            // There is room for vCPUs alone.
            let popped = queue.pop_if(|origin| origin == Vcpu);
            assert_eq!(popped, Some((Page(page), Vcpu)));
        }
        assert_eq!(queue.pop_if(|origin| origin == Vcpu), None);
        assert_eq!(queue.len(), 2);
        assert_eq!(queue.pop_if(|_| true), Some((Page(1), Device)));
        assert_eq!(queue.pop_if(|_| true), Some((Page(3), Device)));
        assert_eq!(queue.pop_if(|_| true), None);
    }
}
