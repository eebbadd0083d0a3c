//! Pages that the guest does without: what they hold is nobody's, and their memory is wanted back.
//!
//! What is in memory for processors and devices leaves as any page does: the owner lets go of it, and it is unmapped. Then it is
//! neither examined nor written, but gone: it holds zeroes from then on. What has left already is forgotten where it is. A page of a
//! disk's request, one that is coming, and one that the owner is being asked for anyway stay what they are: to give them up is
//! an offer. Who offers is told when each page has been seen to, in the order of the offers, and not before: what is stored to a
//! page behind that answer stays.

use std::collections::VecDeque;

use super::command::{Command, Ticket};
use super::entry::{Mark, Page, Place, State};
use super::{BATCH, Book};

/// Offers that are not answered.
#[derive(Debug, Default)]
pub(super) struct Discards {
    /// Resident pages that the owner has not been asked for, in the order of the offers.
    pages: VecDeque<Page>,
    /// The offers in their order, and of each how many pages have not been seen to.
    offers: VecDeque<(Ticket, usize)>,
    /// What the owner is being asked for are the pages that follow.
    is_asking: bool,
}

impl Book {
    /// The guest does without these pages until it reaches them again; [`Command::Done`] when that has been seen to.
    pub fn discard(&mut self, ticket: Ticket, pages: &[Page]) {
        let mut left = 0;
        for &page in pages {
            let entry = self.entry(page);
            if entry.has(Mark::Discarded) || self.busy.contains_key(&page) {
                continue;
            }
            match entry.state {
                State::Absent if entry.place() == Place::Nowhere => {}
                State::Absent => {
                    self.counts.discarded += 1;
                    self.leave_place(page);
                }
                State::Soft => {
                    // One that is about to be examined is not there.
                    if entry.has(Mark::Queued) {
                        self.soft.remove(&mut self.entries, page);
                    }
                    self.soft_pages -= 1;
                    self.discard_memory(page);
                }
                // It is being looked at: it goes when it has been written.
                State::Saving => self.entry_mut(page).set(Mark::Discarded, true),
                State::Resident if !self.is_asked_for(page) => {
                    self.resident.remove(&mut self.entries, page);
                    self.entry_mut(page).set(Mark::Discarded, true);
                    self.discards.pages.push_back(page);
                    left += 1;
                }
                State::Resident | State::Fetching | State::Filling => {}
            }
        }
        self.discards.offers.push_back((ticket, left));
        self.see_to_discards(0);
        self.balance();
    }

    /// Whether the owner has just answered for pages of offers: how many.
    pub(super) fn answered_discards(&mut self, count: usize) -> usize {
        match std::mem::take(&mut self.discards.is_asking) {
            true => count,
            false => 0,
        }
    }

    /// Nobody carries out anything more: the offers that are left, each of which is to be told so.
    pub fn give_up_discards(&mut self) -> Vec<Ticket> {
        let offers = self.discards.offers.drain(..);
        offers.map(|(ticket, _)| ticket).collect()
    }

    /// A page that nobody reaches is gone.
    pub(super) fn discard_memory(&mut self, page: Page) {
        self.counts.discarded += 1;
        self.entry_mut(page).set(Mark::Discarded, false);
        self.leave_place(page);
        self.drop_memory(page);
    }

    /// So many more pages have been seen to; asks for the next ones.
    pub(super) fn see_to_discards(&mut self, mut count: usize) {
        let mut asked = Vec::new();
        while self.asking.is_none()
            && asked.len() < BATCH
            && let Some(&page) = self.discards.pages.front()
        {
            if !self.busy.contains_key(&page) {
                asked.push(page);
            } else if asked.is_empty() {
                self.entry_mut(page).set(Mark::Discarded, false);
                self.resident.push_back(&mut self.entries, page);
                count += 1;
            } else {
                // It is not seen to before those.
                break;
            }
            self.discards.pages.pop_front();
        }
        if !asked.is_empty() {
            self.discards.is_asking = true;
            self.commands.push(Command::Ask(asked.clone()));
            self.asking = Some(asked);
        }
        while let Some((ticket, left)) = self.discards.offers.front_mut() {
            let seen_to = count.min(*left);
            *left -= seen_to;
            count -= seen_to;
            if *left > 0 {
                break;
            }
            self.commands.push(Command::Done(*ticket));
            self.discards.offers.pop_front();
        }
    }
}
