//! Page-out: pages are asked for, released, examined, dropped or saved.

use super::command::{Command, Errno, Seen, Trouble};
use super::entry::{Block, Mark, Page, Place, Slot, State};
use super::{BATCH, Book};

impl Book {
    /// Whether the owner is being asked for it, and so may have released it.
    pub(super) fn is_asked_for(&self, page: Page) -> bool {
        self.asking.iter().flatten().any(|asked| *asked == page)
    }

    /// The owner's answer: which of the pages that it was asked for it has released, and which of
    /// those devices stored to since they were shown, or since a request of a disk began that they
    /// belong to, be it over by now. The first page is the lowest bit.
    pub fn answered(&mut self, gone: u32, written: u32) {
        let asked = self.asking.take().unwrap_or_default();
        let seen_to = self.answered_discards(asked.len());
        let mut discarded = Vec::new();
        for (nth, page) in asked.into_iter().enumerate() {
            debug_assert_eq!(self.entry(page).state, State::Resident);
            let is_gone = gone >> nth & 1 != 0;
            self.counts.refused += u64::from(!is_gone);
            let is_busy = self.busy.contains_key(&page);
            if !is_gone || is_busy {
                // Of one that a request began with meanwhile it does not matter what devices stored before.
                if is_gone {
                    self.commands.push(Command::Show(page));
                }
                self.entry_mut(page).set(Mark::Discarded, false);
                self.resident.push_back(&mut self.entries, page);
                self.is_there(page);
                continue;
            }
            if self.entry(page).has(Mark::Discarded) {
                self.commands.push(Command::Unmap(page));
                discarded.push(page);
                continue;
            }
            if written >> nth & 1 != 0 {
                self.leave_place(page);
            }
            self.commands.push(Command::Unmap(page));
            self.entry_mut(page).state = State::Soft;
            self.soft_pages += 1;
            self.soft.push_back(&mut self.entries, page);
        }
        for page in discarded {
            self.discard_memory(page);
        }
        self.see_to_discards(seen_to);
        self.balance();
    }

    /// What an examined page was found to be.
    pub fn examined(&mut self, page: Page, seen: Seen) {
        self.examining -= 1;
        // One that came back meanwhile may be changing.
        if self.entry(page).state != State::Soft {
            return;
        }
        self.entry_mut(page).set_crc(seen.crc);
        if seen.is_zero {
            self.counts.dropped_as_zeroes += 1;
            self.leave_place(page);
            self.soft_pages -= 1;
            self.drop_memory(page);
        } else if seen.is_clean
            && !self.saves_all
            && matches!(self.entry(page).place(), Place::Block(_))
        {
            self.counts.dropped_to_disk += 1;
            self.soft_pages -= 1;
            self.drop_memory(page);
        } else {
            let held = seen.is_clean.then(|| self.entry(page).place());
            let is_silent = seen.is_clean && self.entry(page).has(Mark::Surplus);
            self.leave_place(page);
            let Some(slot) = self.slots.take(page) else {
                self.again_soft(page);
                self.commands.push(Command::Stop(Trouble::StoreFull));
                return;
            };
            let entry = self.entry_mut(page);
            entry.set_place(Place::Slot(slot));
            entry.state = State::Saving;
            self.soft_pages -= 1;
            self.saving += 1;
            self.commands.push(Command::Save(page, slot));
            self.counts.silent_writes += u64::from(is_silent);
            if let Some(Place::Block(block)) = held {
                self.count_silent_write(block, slot);
            }
        }
        self.balance();
    }

    /// The block holds what is written to the slot.
    fn count_silent_write(&mut self, block: Block, slot: Slot) {
        self.counts.silent_writes += 1;
        let follows = self.last_silent.is_some_and(|(last, at)| {
            last.ahead(1) == Some(block) && at.0.checked_add(1) == Some(slot.0)
        });
        self.counts.order_breaks += u64::from(!follows);
        self.last_silent = Some((block, slot));
    }

    /// A soft page that could not be saved is the first to be tried again, and nothing is until then.
    pub(super) fn again_soft(&mut self, page: Page) {
        self.is_store_in_trouble = true;
        self.soft.push_front(&mut self.entries, page);
    }

    pub(super) fn drop_memory(&mut self, page: Page) {
        self.entry_mut(page).state = State::Absent;
        self.present -= 1;
        self.commands.push(Command::Punch(page));
    }

    /// The slot has been written with the page, or could not be.
    pub(super) fn saved(&mut self, page: Page, slot: Slot, outcome: Result<(), Errno>) {
        let entry = self.entry(page);
        if entry.state != State::Saving || entry.place() != Place::Slot(slot) {
            // The page came back meanwhile.
            return self.slots.give_back(slot);
        }
        if entry.has(Mark::Discarded) {
            self.saving -= 1;
            return self.discard_memory(page);
        }
        if let Err(errno) = outcome {
            self.slots.give_back(slot);
            let entry = self.entry_mut(page);
            entry.set_place(Place::Nowhere);
            entry.state = State::Soft;
            self.saving -= 1;
            self.soft_pages += 1;
            self.again_soft(page);
            let trouble = Trouble::CannotSave(slot, errno);
            self.commands.push(Command::Stop(trouble));
        } else {
            self.counts.saved += 1;
            self.saving -= 1;
            self.drop_memory(page);
        }
    }

    /// Whether [`trim`](Self::trim) may do something.
    pub fn wants_to_trim(&self) -> bool {
        let is_quiet = self.saving == 0 && !self.is_reclaiming && !self.is_store_in_trouble;
        self.trims && is_quiet && self.slots.may_trim()
    }

    /// Has a run of slots trimmed that no page has, if it finds one in the next 8 MiB of the store;
    /// nothing while pages leave. The pager calls it at a pace of its own, when the store is idle:
    /// a file system blocks readers and writers meanwhile.
    pub fn trim(&mut self) {
        if self.wants_to_trim()
            && let Some((first, count)) = self.slots.trim()
        {
            self.commands.push(Command::Trim(first, count));
        }
    }

    /// What was behind so many slots is gone, or could not be given back, and none is from then on.
    pub(super) fn trimmed(&mut self, first: Slot, count: u32, outcome: Result<(), Errno>) {
        self.slots.trimmed(first, count);
        self.trims &= outcome.is_ok();
        if self.is_store_in_trouble {
            // It may have been full without these.
            self.retry();
        }
    }

    /// The cause of a trouble has been seen to: what failed is tried again.
    pub fn retry(&mut self) {
        self.is_store_in_trouble = false;
        for page in std::mem::take(&mut self.troubled) {
            let place = self.entry(page).place();
            self.commands.push(Command::Fetch(page, place));
        }
        self.balance();
    }

    /// Pages in memory, and that wait for room, beyond what leaves room for four batches of those who come next.
    pub(super) fn excess(&self) -> usize {
        let low = self.limit - (self.limit / 16).min(4 * BATCH);
        (self.present + self.starved.len()).saturating_sub(low)
    }

    /// Less than two batches are left: what is read from a disk would be cut short.
    pub(super) fn is_tight(&self) -> bool {
        let high = self.limit - (self.limit / 32).min(2 * BATCH);
        self.present + self.starved.len() >= high
    }

    /// How many pages should be on their way out, or soft, that are not: all that have to leave, and a tenth of the limit for
    /// second chances.
    fn lacks(&self) -> usize {
        match self.excess() {
            0 => 0,
            excess => (excess + self.limit / 10).saturating_sub(self.soft_pages + self.saving),
        }
    }

    /// Whether [`ask`](Self::ask) may do something.
    pub fn wants_to_ask(&self) -> bool {
        let lacks = self.lacks();
        // A batch at a time, but for the last ones.
        let is_batch = lacks >= BATCH.min(1 + self.limit / 20) || self.soft_pages == 0;
        lacks > 0 && is_batch && self.asking.is_none() && !self.resident.is_empty()
    }

    /// Asks the owner for pages if there are too many. The pager calls it at a pace of its own: pages that devices use are
    /// refused, and would be asked for again and again.
    pub fn ask(&mut self) {
        if !self.wants_to_ask() {
            return;
        }
        let wanted = self.lacks();
        let mut pages = Vec::new();
        for _ in 0..self.resident.len() {
            if pages.len() == wanted.min(BATCH) {
                break;
            }
            let Some(page) = self.resident.pop_front(&mut self.entries) else {
                break;
            };
            match self.busy.contains_key(&page) {
                true => self.resident.push_back(&mut self.entries, page),
                false => pages.push(page),
            }
        }
        if !pages.is_empty() {
            self.commands.push(Command::Ask(pages.clone()));
            self.asking = Some(pages);
        }
    }
}
