//! Pages that the guest has discarded: what they hold is not needed, and their memory is wanted
//! back.
//!
//! A page in memory that vCPUs and devices reach leaves as any page does: the owner releases it,
//! and it is unmapped. Then it is neither examined nor written, but dropped: it holds zeroes from
//! then on. What has left already is forgotten where it is. A page of a disk's request, one that
//! is coming, and one that the owner is being asked for anyway stay what they are: a discard is
//! an offer. Each is answered when all of its pages have been seen to, in the order of the
//! offers, and not before: what is stored to a page behind that answer stays.
//!
//! ```text
//!  discard ──▶ pages wait ── 32 at a time ──▶ the owner is asked ── answered ──▶ finished
//!     └── nothing to ask for ──▶ offer waits for those before it ── finished ──▶ Done
//! ```

use std::collections::VecDeque;

use super::command::{Command, Ticket};
use super::pages::{Page, Place, State};
use super::question::Cause;
use super::{BATCH, Book};

/// Offers that are not answered.
#[derive(Debug, Default)]
pub(super) struct Discards {
    /// Resident pages that the owner has not been asked for, in the order of the offers.
    pages: VecDeque<Page>,
    /// The offers in their order, and of each how many pages have not been seen to.
    offers: VecDeque<(Ticket, usize)>,
}

impl Discards {
    /// Adds an offer behind the others, and its pages that the owner is to be asked for.
    fn offer(&mut self, ticket: Ticket, pages: &[Page]) {
        self.pages.extend(pages);
        self.offers.push_back((ticket, pages.len()));
    }

    /// The first page that the owner is to be asked for.
    fn first(&self) -> Option<Page> {
        self.pages.front().copied()
    }

    fn remove_first(&mut self) {
        self.pages.pop_front();
    }

    /// Of so many pages that have been seen to, takes those of the first offer. Returns it if no
    /// more are left of it.
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

    /// Removes all offers, whose tickets are returned.
    fn give_up(&mut self) -> Vec<Ticket> {
        self.offers.drain(..).map(|(ticket, _)| ticket).collect()
    }
}

impl Book {
    /// The guest has discarded these pages, until it reaches them again; [`Command::Done`] when
    /// that has been seen to.
    pub fn discard(&mut self, ticket: Ticket, pages: &[Page]) {
        let mut asked_for = Vec::new();
        for &page in pages {
            if self.pages.is_discarded(page) || self.requests.has(page) {
                continue;
            }
            match self.pages.state(page) {
                State::Absent if self.pages.place(page) == Place::Nowhere => {}
                State::Absent => {
                    self.counts.discarded += 1;
                    self.pages.leave_place(page);
                }
                State::Soft => self.drop_discarded(page),
                // It is being read: it goes when it has been written.
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

    /// No command is carried out any more: returns the offers that are left, each of which is to
    /// be answered.
    pub fn give_up_discards(&mut self) -> Vec<Ticket> {
        self.discards.give_up()
    }

    /// A discarded page that no vCPU and no device reaches is gone.
    pub(super) fn drop_discarded(&mut self, page: Page) {
        self.counts.discarded += 1;
        self.pages.drop_discarded(page);
        self.commands.push(Command::Punch(page));
    }

    /// So many more pages have been seen to; asks for the next ones.
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
                // It is not seen to before those.
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
