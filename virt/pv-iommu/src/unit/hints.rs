//! Hints of MAP requests at accesses to come, by which memory is present when devices reach it.
//! Answers do not wait for them.
//!
//! * *gather*: pages that a device may *read* are requested at once ([`PhysMem::gather`]), where
//!   memory may be absent. The device that reaches one of them finds it present, or waits for a
//!   page-in that has begun already. Pages that a device may only write are not requested: most are
//!   about to be overwritten as a whole, which the device states in its own request; reading their
//!   old content would be wasted.
//! * *populate*: see [`populate`](crate::populate).
//!
//! **Bounds.** At most [`PAGES`] pages are requested in one call of the unit, and at most
//! [`TICKETS`] such requests are under way; a MAP beyond that is executed without a hint, and
//! counted. Memory keeps a page that came in for a ticket until it is accessed, for seconds if need
//! be. Here the next poll accesses it, so that a guest which maps and never uses holds nothing.
//! From then on it is a page like any other, among the most recent.

use std::sync::Arc;

use guest_mem::{Gpa, Intent, PAGE_SIZE, PhysMem, Stop, Ticket};

use crate::mappings::Mapping;
use crate::populate::PopulateWindows;

/// Most pages that one call requests, 256 KiB.
pub const PAGES: u64 = 64;
/// Most requests under way: 4 MiB with [`PAGES`] each.
pub const TICKETS: usize = 16;

/// Actions on a MAP in addition to the mapping. None, by default.
#[derive(Debug, Default)]
pub struct Hints {
    gathers: bool,
    windows: Option<Arc<PopulateWindows>>,
    /// Pieces to be requested by this call, [`PAGES`] pages at most.
    pieces: Vec<(Gpa, u64, Intent)>,
    /// Pages of `pieces`.
    pages: u64,
    /// Not answered yet, [`TICKETS`] at most.
    under_way: Vec<Question>,
    /// Answered since the last poll.
    came: Vec<Question>,
    counts: HintCounts,
}

/// Pages that were requested.
#[derive(Debug)]
struct Question {
    ticket: Ticket,
    pieces: Vec<(Gpa, u64, Intent)>,
}

/// Counters of hints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HintCounts {
    /// Requests that found absent pages.
    pub gathered: u64,
    /// MAPs of which at least one page was not requested, because of the bounds.
    pub unasked: u64,
    /// Windows populated.
    pub populated: u64,
    /// Pages that the guest has given back and that stay in memory, since their window was being
    /// populated.
    pub kept: u64,
}

impl Hints {
    /// Creates hints that request pages that may be absent, if `gathers`, and have `windows`
    /// populated.
    pub fn new(gathers: bool, windows: Option<Arc<PopulateWindows>>) -> Self {
        Self {
            gathers,
            windows,
            ..Self::default()
        }
    }

    /// Counters.
    pub fn counts(&self) -> HintCounts {
        let windows = self.windows.as_ref();
        HintCounts {
            populated: windows.map_or(0, |windows| windows.populated()),
            kept: windows.map_or(0, |windows| windows.kept()),
            ..self.counts
        }
    }

    /// Takes the hint of a mapping that was just made. Its physical range has been checked not to
    /// wrap.
    pub(super) fn take(&mut self, mapping: &Mapping) {
        let gpa = Gpa::new(mapping.phys);
        let len = mapping.last - mapping.first + 1;
        if let Some(windows) = &self.windows {
            windows.ask(gpa, len);
        }
        if !self.gathers || !mapping.can_read {
            return;
        }
        let left = match self.under_way.len() < TICKETS {
            true => PAGES - self.pages,
            false => 0,
        };
        let pages = len.div_ceil(PAGE_SIZE);
        let taken = pages.min(left);
        if taken < pages {
            self.counts.unasked += 1;
        }
        if taken > 0 {
            self.pages += taken;
            let len = len.min(taken * PAGE_SIZE);
            self.pieces.push((gpa, len, Intent::Read));
        }
    }

    /// Releases the pages that have come in, and requests those hinted at since the last call.
    /// Returns the number of pages requested.
    pub(super) fn ask(&mut self, mem: &impl PhysMem) -> u64 {
        for (gpa, len, intent) in self.came.drain(..).flat_map(|question| question.pieces) {
            // A piece that is not RAM, or could not be brought in, faults at the device's access.
            let _ = mem.host(gpa, len, intent);
        }
        if self.pieces.is_empty() {
            return 0;
        }
        match mem.gather(&self.pieces) {
            Err(Stop::Pending(ticket)) => {
                self.counts.gathered += 1;
                let pieces = std::mem::take(&mut self.pieces);
                self.under_way.push(Question { ticket, pieces });
            }
            // All pages are present, as for most MAPs.
            _ => self.pieces.clear(),
        }
        std::mem::take(&mut self.pages)
    }

    /// Records the end of a ticket, which may be of a request by another part of the machine.
    pub(super) fn answered(&mut self, ticket: Ticket) {
        let own = |question: &Question| question.ticket == ticket;
        if let Some(at) = self.under_way.iter().position(own) {
            self.came.push(self.under_way.swap_remove(at));
        }
    }

    /// Returns whether a poll has pages to release.
    pub(super) fn has_come(&self) -> bool {
        !self.came.is_empty()
    }
}
