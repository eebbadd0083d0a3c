//! What a MAP says of accesses to come: hints, by which memory is there when devices reach it.
//! Answers do not wait for them.
//!
//! * *gather*: pages that a device may *read* are asked for at once ([`PhysMem::gather`]), where
//!   memory may be absent. The device that reaches one of them finds it there, or waits for a page
//!   that is under way already. Pages that a device may only write are not asked for: most are
//!   about to be overwritten as a whole, which the device says when it asks for them itself; to
//!   bring in what they held would be a read in vain.
//! * *populate*: see [`populate`](crate::populate).
//!
//! **Bounds.** At most [`PAGES`] pages are asked for in one call of the unit, and at most
//! [`TICKETS`] such questions are under way; a MAP beyond that is carried out without a hint, and
//! counted. Memory keeps what has come for a ticket until it is asked for again, for seconds if
//! need be: here that is done at the next poll, so that a guest which maps and never uses holds
//! nothing. From then on it is a page like any other, of those that came last.

use std::sync::Arc;

use guest_mem::{Gpa, Intent, PAGE_SIZE, PhysMem, Stop, Ticket};

use crate::mappings::Mapping;
use crate::populate::PopulateWindows;

/// Pages that one call asks for at most, 256 KiB.
pub const PAGES: u64 = 64;
/// Questions under way at most: 4 MiB with [`PAGES`] each.
pub const TICKETS: usize = 16;

/// What is done with a MAP beside the mapping. Nothing, by default.
#[derive(Debug, Default)]
pub struct Hints {
    gathers: bool,
    windows: Option<Arc<PopulateWindows>>,
    /// To be asked for by this call, [`PAGES`] pages at most.
    pieces: Vec<(Gpa, u64, Intent)>,
    /// Pages of `pieces`.
    pages: u64,
    /// Not answered yet, [`TICKETS`] at most.
    under_way: Vec<Question>,
    /// Answered since the last poll.
    came: Vec<Question>,
    counts: HintCounts,
}

/// Pages that were asked for.
#[derive(Debug)]
struct Question {
    ticket: Ticket,
    pieces: Vec<(Gpa, u64, Intent)>,
}

/// Counters of hints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HintCounts {
    /// Questions that found absent pages.
    pub gathered: u64,
    /// MAPs whose pages, or some of them, were not asked for: too many.
    pub unasked: u64,
    /// Windows populated.
    pub populated: u64,
    /// Pages that the guest has given back and that stay in memory, since their window was being
    /// populated.
    pub kept: u64,
}

impl Hints {
    /// Asks for pages that may be absent, if it `gathers`, and for `windows` to be populated.
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

    /// Lets go of what has come, and asks for what has been taken since the last call; how many
    /// pages that were.
    pub(super) fn ask(&mut self, mem: &impl PhysMem) -> u64 {
        for (gpa, len, intent) in self.came.drain(..).flat_map(|question| question.pieces) {
            // What is no RAM, and what could not be brought in, is said to whoever reaches it.
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
            // All are there, as of most.
            _ => self.pieces.clear(),
        }
        std::mem::take(&mut self.pages)
    }

    /// A question has been answered, perhaps somebody else's.
    pub(super) fn answered(&mut self, ticket: Ticket) {
        let own = |question: &Question| question.ticket == ticket;
        if let Some(at) = self.under_way.iter().position(own) {
            self.came.push(self.under_way.swap_remove(at));
        }
    }

    /// Whether a poll has something to let go of.
    pub(super) fn has_come(&self) -> bool {
        !self.came.is_empty()
    }
}
