//! Pages that stay in memory for a device that waits for them, until it has had time to retry its
//! access.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use sidecore::Nanos;

use super::after;
use crate::ram::SwappedRam;
use crate::residency::{Page, Ticket};

/// Time for which a page that has come for a ticket stays although no access is retried: its device
/// may have been reset.
const HELD_FOR: Duration = Duration::from_secs(2);

/// Tickets and their pages.
#[derive(Default)]
pub(super) struct Holds {
    /// Pages of tickets that are not done.
    wanted: HashMap<Ticket, Vec<Page>>,
    /// Pages of tickets that are done, and the time since when.
    done: VecDeque<(Nanos, Vec<Page>)>,
}

impl Holds {
    /// Holds these pages from now on.
    pub fn begin(&mut self, ticket: Ticket, pages: Vec<Page>, ram: &SwappedRam) {
        pages.iter().for_each(|page| ram.hold(*page));
        self.wanted.insert(ticket, pages);
    }

    /// Records that the ticket's pages are there. Returns whether any are held for it: it may be a
    /// discard's.
    pub fn done(&mut self, ticket: Ticket, now: Nanos) -> bool {
        let pages = self.wanted.remove(&ticket);
        let any = pages.is_some();
        self.done.extend(pages.map(|pages| (now, pages)));
        any
    }

    /// Releases the pages whose time is over.
    pub fn look(&mut self, now: Nanos, ram: &SwappedRam) {
        while let Some((since, pages)) = self.done.front()
            && now >= after(*since, HELD_FOR)
        {
            pages.iter().for_each(|page| ram.unhold(*page));
            self.done.pop_front();
        }
    }

    /// Returns the time of the next [`look`](Self::look).
    pub fn deadline(&self) -> Option<Nanos> {
        let (since, _) = self.done.front()?;
        Some(after(*since, HELD_FOR))
    }
}
