//! Page-out: pages are requested from the owner, released, examined, dropped or saved.

use super::command::{Command, Errno, PageExamination, PauseReason};
use super::pages::{Backing, Page, Slot, State};
use super::question::Cause;
use super::{BATCH, Residency, SAVES};

impl Residency {
    /// Asks the owner for pages, none of which is queued.
    pub(super) fn ask_for(&mut self, pages: Vec<Page>, cause: Cause) {
        self.commands.push(Command::Ask(pages.clone()));
        self.question.ask(pages, cause);
    }

    /// Handles the owner's answer: `gone` are the pages that it has released, of those that it was
    /// asked for; `written` are those among them that devices stored to since they were shown, or
    /// since the beginning of a disk's request that they belong to, ended or not. The first page is
    /// the lowest bit.
    pub fn answered(&mut self, gone: u32, written: u32) {
        let (asked, cause) = self.question.answered();
        let discards_seen_to = match cause {
            Cause::Reclaim => 0,
            Cause::Discard => asked.len(),
        };
        let mut discarded = Vec::new();
        for (nth, page) in asked.into_iter().enumerate() {
            let is_gone = gone >> nth & 1 != 0;
            self.counts.refused += u64::from(!is_gone);
            let is_busy = self.requests.has(page);
            if !is_gone || is_busy {
                // For a page that a request has begun with meanwhile, devices' earlier stores do
                // not matter.
                if is_gone {
                    self.commands.push(Command::Show(page));
                }
                self.pages.keep(page);
                self.is_there(page);
                continue;
            }
            self.commands.push(Command::Unmap(page));
            if self.pages.is_discarded(page) {
                discarded.push(page);
                continue;
            }
            if written >> nth & 1 != 0 {
                self.pages.leave_backing(page);
            }
            self.pages.unmap(page);
        }
        for page in discarded {
            self.drop_discarded(page);
        }
        self.see_to_discards(discards_seen_to);
        self.balance();
    }

    /// Handles the result of a page's examination.
    pub fn examined(&mut self, page: Page, seen: PageExamination) {
        if !self.pages.examined(page, seen.crc) {
            return;
        }
        let backing = self.pages.backing(page);
        let equals_block = seen.is_clean && matches!(backing, Backing::Block(_));
        if seen.is_zero {
            self.counts.dropped_as_zeroes += 1;
            self.pages.leave_backing(page);
            self.evict(page);
        } else if equals_block && !self.policy.saves_block_backed() {
            self.counts.dropped_to_disk += 1;
            self.evict(page);
        } else {
            let is_surplus = seen.is_clean && self.pages.is_surplus(page);
            let Some(slot) = self.pages.save(page) else {
                self.failures.save_failed();
                self.commands.push(Command::Stop(PauseReason::StoreFull));
                return;
            };
            self.commands.push(Command::Save(page, slot));
            self.counts.silent_writes += u64::from(is_surplus || equals_block);
            if let Backing::Block(block) = backing
                && equals_block
            {
                let breaks = self.silent_writes.breaks_order(block, slot);
                self.counts.order_breaks += u64::from(breaks);
            }
        }
        self.balance();
    }

    fn evict(&mut self, page: Page) {
        self.pages.evict(page);
        self.commands.push(Command::Punch(page));
    }

    /// Handles the end of the write of the page to the slot.
    pub(super) fn saved(&mut self, page: Page, slot: Slot, outcome: Result<(), Errno>) {
        if !self.pages.is_saving_to(page, slot) {
            // The page came back meanwhile.
            self.pages.give_back(slot);
        } else if self.pages.is_discarded(page) {
            self.drop_discarded(page);
        } else if let Err(errno) = outcome {
            self.pages.save_failed(page);
            self.failures.save_failed();
            let reason = PauseReason::CannotSave(slot, errno);
            self.commands.push(Command::Stop(reason));
        } else {
            self.counts.saved += 1;
            self.evict(page);
        }
    }

    /// Examines unmapped pages as far as there are too many in memory, unless the store has failed.
    pub(super) fn examine(&mut self) {
        self.reclaim.update(self.claimed());
        if self.failures.is_store_failed() || !self.reclaim.is_reclaiming() {
            return;
        }
        let under_way = self.pages.count(State::Saving) + self.pages.examining();
        let excess = self.reclaim.excess(self.claimed());
        for _ in under_way..SAVES.min(excess) {
            let Some(page) = self.pages.next_soft() else {
                break;
            };
            self.commands.push(Command::Examine(page));
        }
    }

    /// Returns whether [`trim`](Self::trim) may do something.
    pub fn wants_to_trim(&self) -> bool {
        let is_quiet = self.pages.count(State::Saving) == 0
            && !self.reclaim.is_reclaiming()
            && !self.failures.is_store_failed();
        is_quiet && self.pages.slots().may_trim()
    }

    /// Trims a run of free slots, if there is one in the next 8 MiB of the store; does nothing
    /// while pages leave. The pager calls it at a pace of its own, when the store is idle: a file
    /// system blocks readers and writers meanwhile.
    pub fn trim(&mut self) {
        if self.wants_to_trim()
            && let Some((first, count)) = self.pages.slots_mut().trim()
        {
            self.commands.push(Command::Trim(first, count));
        }
    }

    /// Handles the end of a trim of `count` slots. If it failed, no slot is trimmed from then on.
    pub(super) fn trimmed(&mut self, first: Slot, count: u32, outcome: Result<(), Errno>) {
        let slots = self.pages.slots_mut();
        slots.trimmed(first, count);
        if outcome.is_err() {
            slots.set_trims(false);
        }
        if self.failures.is_store_failed() {
            // It may have been full without these.
            self.retry();
        }
    }

    /// Retries all failed operations, after the cause has been removed.
    pub fn retry(&mut self) {
        for page in self.failures.take() {
            let backing = self.pages.backing(page);
            self.commands.push(Command::Fetch(page, backing));
        }
        self.balance();
    }

    /// Returns the number of pages in memory, and of those that wait for room.
    fn claimed(&self) -> usize {
        self.pages.present() + self.room_queue.len()
    }

    /// Returns the number of pages that should be leaving or unmapped, beyond those that are.
    fn lacks(&self) -> usize {
        let leaving = self.pages.count(State::Unmapped) + self.pages.count(State::Saving);
        self.reclaim.lacks(self.claimed(), leaving)
    }

    /// Returns whether [`ask`](Self::ask) may do something.
    pub fn wants_to_ask(&self) -> bool {
        let lacks = self.lacks();
        // A batch at a time, except for the last pages.
        let is_batch =
            lacks >= self.reclaim.least_asked() || self.pages.count(State::Unmapped) == 0;
        lacks > 0 && is_batch && !self.question.is_open() && self.pages.queued() > 0
    }

    /// Asks the owner for pages if there are too many. The pager calls it at a pace of its own:
    /// pages that devices use are refused, and would be asked for repeatedly.
    pub fn ask(&mut self) {
        if !self.wants_to_ask() {
            return;
        }
        let wanted = self.lacks().min(BATCH);
        let mut pages = Vec::new();
        for _ in 0..self.pages.queued() {
            if pages.len() == wanted {
                break;
            }
            let Some(page) = self.pages.next_resident() else {
                break;
            };
            match self.requests.has(page) {
                true => self.pages.keep(page),
                false => pages.push(page),
            }
        }
        if !pages.is_empty() {
            self.ask_for(pages, Cause::Reclaim);
        }
    }
}
