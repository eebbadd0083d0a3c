//! Pages that the guest has discarded: their content is not needed, and their memory is to be
//! freed.
//!
//! A page in memory that vCPUs and devices access leaves as any page does: the owner releases it,
//! and it is unmapped. Then it is neither examined nor written, but dropped: it holds zeroes from
//! then on. A page that has left already is dropped from its slot or block. A page of a disk's
//! request, one that is being read, and one that the owner is already asked for are left as they
//! are: a discard is a hint. Each discard is answered once all of its pages have been processed, in
//! the order of the discards. A store after that answer is kept.
//!
//! ```text
//!  discard ──▶ pages wait ── 32 at a time ──▶ the owner is asked ── answered ──▶ finished
//!     └── nothing to ask for ──▶ waits for discards before it ── finished ──▶ Done
//! ```

use std::collections::VecDeque;

use super::command::{Command, Ticket};
use super::pages::{Backing, Page, State};
use super::question::Cause;
use super::{BATCH, Residency};

/// Discards that are not answered.
#[derive(Debug, Default)]
pub(super) struct Discards {
    /// Resident pages that the owner has not been asked for, in the order of the discards.
    pages: VecDeque<Page>,
    /// The discards in their order, and the number of pages of each that have not been processed.
    offers: VecDeque<(Ticket, usize)>,
}

impl Discards {
    /// Adds a discard behind the others, and its pages that the owner is to be asked for.
    fn offer(&mut self, ticket: Ticket, pages: &[Page]) {
        self.pages.extend(pages);
        self.offers.push_back((ticket, pages.len()));
    }

    /// Returns the first page that the owner is to be asked for.
    fn first(&self) -> Option<Page> {
        self.pages.front().copied()
    }

    fn remove_first(&mut self) {
        self.pages.pop_front();
    }

    /// Counts up to `count` processed pages for the first discard, and subtracts them from `count`.
    /// Returns the discard if none of its pages is left.
    fn finish_first(&mut self, count: &mut usize) -> Option<Ticket> {
        let (_, left) = self.offers.front_mut()?;
        let seen_to = (*count).min(*left);
        *left -= seen_to;
        *count -= seen_to;
        if *left > 0 {
            return None;
        }
        self.offers.pop_front().map(|(ticket, _)| ticket)
    }

    /// Removes all discards, and returns their tickets.
    fn give_up(&mut self) -> Vec<Ticket> {
        self.offers.drain(..).map(|(ticket, _)| ticket).collect()
    }
}

impl Residency {
    /// Discards these pages until the guest accesses them again; [`Command::Done`] once they have
    /// been processed.
    pub fn discard(&mut self, ticket: Ticket, pages: &[Page]) {
        let mut asked_for = Vec::new();
        for &page in pages {
            if self.pages.is_discarded(page) || self.requests.has(page) {
                continue;
            }
            match self.pages.state(page) {
                State::Absent if self.pages.backing(page) == Backing::Nowhere => {}
                State::Absent => {
                    self.counts.discarded += 1;
                    self.pages.leave_backing(page);
                }
                State::Unmapped => self.drop_discarded(page),
                // It is being written: it is dropped once that has ended.
                State::Saving => self.pages.discard_when_saved(page),
                State::Resident if !self.question.has(page) => {
                    self.pages.discard_when_released(page);
                    asked_for.push(page);
                }
                State::Resident | State::Fetching | State::Filling => {}
            }
        }
        self.discards.offer(ticket, &asked_for);
        self.see_to_discards(0);
        self.balance();
    }

    /// Returns the discards that are left, each of which is to be answered: no command is carried
    /// out any more.
    pub fn give_up_discards(&mut self) -> Vec<Ticket> {
        self.discards.give_up()
    }

    /// Drops a discarded page, which no vCPU and no device reaches.
    pub(super) fn drop_discarded(&mut self, page: Page) {
        self.counts.discarded += 1;
        self.pages.drop_discarded(page);
        self.commands.push(Command::Punch(page));
    }

    /// Records that `count` more pages have been processed, and asks the owner for the next ones.
    pub(super) fn see_to_discards(&mut self, mut count: usize) {
        let mut asked = Vec::new();
        while !self.question.is_open()
            && asked.len() < BATCH
            && let Some(page) = self.discards.first()
        {
            if !self.requests.has(page) {
                asked.push(page);
            } else if asked.is_empty() {
                self.pages.keep(page);
                count += 1;
            } else {
                // It is processed only after those that were asked for.
                break;
            }
            self.discards.remove_first();
        }
        if !asked.is_empty() {
            self.ask_for(asked, Cause::Discard);
        }
        while let Some(ticket) = self.discards.finish_first(&mut count) {
            self.commands.push(Command::Done(ticket));
        }
    }
}
