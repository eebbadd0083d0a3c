//! How pages come in: wanted by a processor or a device, read ahead, or rescued.

use super::command::{Command, Errno, Protection, Ticket, Trouble};
use super::entry::{Block, Mark, Page, Place, Slot, State};
use super::{BATCH, Book, CLUSTER, FOR_PROCESSORS, READ_AHEAD, Waiter, Wanter, ZEROES};

/// Whether what lies beside a page in the store is read with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// It is: the page is wanted to be read.
    Always,
    /// If processors go through the store in order. For a fault that looks like a store: what is stored to is seldom read next, but
    /// one that a thread of the kernel resolves for a processor always looks so.
    InOrder,
    /// It is not: pages are being overwritten, in the order in which they lie there.
    Never,
}

impl Book {
    /// The page is in memory already: what was loaded before the guest began, which may be more than the limit.
    pub fn adopt(&mut self, page: Page) {
        debug_assert_eq!(self.entry(page).state, State::Absent);
        self.present += 1;
        self.settle(page, Protection::Writable);
    }

    /// A processor waits for the page; what else is to be read if it is in the store.
    pub fn fault(&mut self, page: Page, ahead: Ahead) {
        match self.entry(page).state {
            State::Resident => self.commands.push(Command::Wake(page)),
            State::Absent if self.entry(page).place() == Place::Nowhere => {
                self.bring(page, false, Wanter::Processor);
                self.zero_around(page);
            }
            _ => {
                let follows = self.follows_in_store(page);
                self.bring(page, false, Wanter::Processor);
                if ahead == Ahead::Always || ahead == Ahead::InOrder && follows {
                    self.read_ahead_slots(page);
                }
                self.read_ahead_blocks(page);
            }
        }
        self.balance();
    }

    /// Whether the page lies in the store shortly behind the one that was last wanted from there.
    fn follows_in_store(&mut self, page: Page) -> bool {
        let Place::Slot(slot) = self.entry(page).place() else {
            return false;
        };
        let last = self.last_wanted.replace(slot);
        last.is_some_and(|last| (1..=CLUSTER).contains(&slot.0.wrapping_sub(last.0)))
    }

    /// A processor waits for the page, and what it is about to do overwrites all of it: it comes as zeroes.
    pub fn fault_overwriting(&mut self, page: Page) {
        match self.entry(page).state {
            State::Resident => self.commands.push(Command::Wake(page)),
            _ => self.bring(page, true, Wanter::Processor),
        }
        self.balance();
    }

    /// A device waits for these pages; of each, whether it is about to overwrite all of it.
    pub fn wanted(&mut self, ticket: Ticket, pages: &[(Page, bool)]) {
        let mut waits = 0;
        for &(page, overwrites) in pages {
            self.bring(page, overwrites, Wanter::Device);
            // What a disk fills is there for a device.
            if !matches!(self.entry(page).state, State::Resident | State::Filling) {
                self.waiters
                    .entry(page)
                    .or_default()
                    .push(Waiter::Ticket(ticket));
                waits += 1;
            }
        }
        match waits {
            0 => self.commands.push(Command::Done(ticket)),
            _ => {
                self.tickets.insert(ticket, waits);
            }
        }
        self.balance();
    }

    /// Has the page made resident, now or when there is room and it has been read. Of a page that overwrites, nothing is read.
    pub(super) fn bring(&mut self, page: Page, overwrites: bool, wanter: Wanter) {
        match self.entry(page).state {
            State::Resident | State::Filling | State::Fetching => {}
            State::Soft | State::Saving => self.rescue(page, None),
            State::Absent if !self.has_room(wanter) => match wanter {
                Wanter::Processor => self.starved.push_front((page, wanter)),
                Wanter::Device => self.starved.push_back((page, wanter)),
            },
            State::Absent
                if overwrites
                    && wanter == Wanter::Device
                    && self.reads_all
                    && self.entry(page).place() != Place::Nowhere =>
            {
                self.counts.stale += 1;
                self.fetch(page);
            }
            State::Absent if overwrites || self.entry(page).place() == Place::Nowhere => {
                self.enter_as_zeroes(page);
                self.settle(page, Protection::Writable);
            }
            State::Absent => self.fetch(page),
        }
    }

    /// Room for one more page.
    pub(super) fn has_room(&self, wanter: Wanter) -> bool {
        let beyond = match wanter {
            Wanter::Processor => BATCH,
            Wanter::Device => BATCH - FOR_PROCESSORS,
        };
        self.present < self.limit + beyond
    }

    /// Gives an absent page memory, whatever its content was.
    pub(super) fn enter_as_zeroes(&mut self, page: Page) {
        match self.entry(page).place() {
            Place::Nowhere => self.counts.zeroed += 1,
            _ => self.counts.not_fetched += 1,
        }
        self.leave_place(page);
        self.present += 1;
        self.commands.push(Command::Zero(page));
    }

    pub(super) fn fetch(&mut self, page: Page) {
        let place = self.entry(page).place();
        self.present += 1;
        self.entry_mut(page).state = State::Fetching;
        self.commands.push(Command::Fetch(page, place));
    }

    /// Brings the pages beside one that holds zeroes too if they do as well, while there is plenty of memory: a guest that begins
    /// touches all of it, and each fault costs it more than the pages.
    fn zero_around(&mut self, page: Page) {
        let first = page.0 / ZEROES * ZEROES;
        let end = (first + ZEROES).min(self.entries.len() as u32);
        for page in (first..end).map(Page) {
            let entry = self.entry(page);
            if (entry.state, entry.place()) == (State::Absent, Place::Nowhere)
                && self.present < self.limit / 4 * 3
            {
                self.bring(page, false, Wanter::Processor);
            }
        }
    }

    /// Reads the pages of the following blocks too, as far as there is room without taking anything away.
    pub(super) fn read_ahead_blocks(&mut self, page: Page) {
        let entry = self.entry(page);
        let (State::Fetching, Place::Block(first)) = (entry.state, entry.place()) else {
            return;
        };
        for count in 1..READ_AHEAD {
            let Some(block) = first.ahead(count) else {
                return;
            };
            let mut pages = self.blocks.pages(&self.entries, block);
            let absent = pages.find(|page| !self.entry(*page).is_present());
            drop(pages);
            match absent {
                Some(page) if self.present < self.limit => self.fetch(page),
                _ => return,
            }
        }
    }

    /// Reads what lies beside it in the store.
    pub(super) fn read_ahead_slots(&mut self, page: Page) {
        let entry = self.entry(page);
        let (State::Fetching, Place::Slot(slot)) = (entry.state, entry.place()) else {
            return;
        };
        let first = slot.0 / CLUSTER * CLUSTER;
        for slot in first..first + CLUSTER {
            let Some(page) = self.slots.owner(Slot(slot)) else {
                continue;
            };
            let entry = self.entry(page);
            let is_there = entry.state == State::Absent && entry.place() == Place::Slot(Slot(slot));
            if is_there && self.present < self.limit {
                self.fetch(page);
            }
        }
    }

    /// The content that `page` waited for has been read, and has this CRC; or could not be.
    pub(super) fn fetched(&mut self, page: Page, outcome: Result<u32, Errno>) {
        debug_assert_eq!(self.entry(page).state, State::Fetching);
        let place = self.entry(page).place();
        let trouble = match outcome {
            Ok(crc) if crc == self.entry(page).crc() => None,
            Ok(_) => Some(Trouble::Changed(place)),
            Err(errno) => Some(Trouble::CannotFetch(place, errno)),
        };
        if let Some(trouble) = trouble {
            // It stays as it is until it is tried again: nobody can reach what it holds.
            self.troubled.push(page);
            self.commands.push(Command::Stop(trouble));
            return;
        }
        match place {
            Place::Block(_) if !self.entry(page).has(Mark::LeavesBlock) => {
                self.counts.fetched_from_disk += 1;
                self.settle(page, Protection::Protected);
            }
            Place::Block(_) => {
                self.counts.fetched_before_a_write += 1;
                self.leave_place(page);
                self.settle(page, Protection::Writable);
            }
            _ => {
                self.counts.fetched_from_store += 1;
                self.leave_place(page);
                self.settle(page, Protection::Writable);
            }
        }
    }

    /// A soft page comes back; for a request of a disk it is protected, and stands for nothing.
    pub(super) fn rescue(&mut self, page: Page, protection: Option<Protection>) {
        self.counts.rescued += 1;
        match self.entry(page).state {
            State::Soft => {
                self.soft_pages -= 1;
                // One that is about to be examined is not there.
                if self.entry(page).has(Mark::Queued) {
                    self.soft.remove(&mut self.entries, page);
                }
            }
            // Its slot is given back when it has been written.
            _ => {
                self.saving -= 1;
                let entry = self.entry_mut(page);
                entry.set_place(Place::Nowhere);
                // What is stored to it from now on stays.
                entry.set(Mark::Discarded, false);
            }
        }
        let marked = match self.entry(page).place() {
            Place::Block(_) => Protection::AsMarked,
            _ => Protection::Writable,
        };
        self.settle(page, protection.unwrap_or(marked));
    }

    /// The page, whose content is in memory, becomes resident, and who waited for it goes on.
    pub(super) fn settle(&mut self, page: Page, protection: Protection) {
        self.commands.push(Command::Map(page, protection));
        self.commands.push(Command::Show(page));
        let entry = self.entry_mut(page);
        entry.state = State::Resident;
        entry.set(Mark::LeavesBlock, false);
        self.resident.push_back(&mut self.entries, page);
        self.is_there(page);
    }

    /// Who waited for the page, which is resident, goes on.
    pub(super) fn is_there(&mut self, page: Page) {
        for waiter in self.waiters.remove(&page).unwrap_or_default() {
            match waiter {
                Waiter::Ticket(ticket) => self.ticket_has_one(ticket),
                Waiter::Op(op) => self.op_has_one(op, page),
            }
        }
    }

    pub(super) fn ticket_has_one(&mut self, ticket: Ticket) {
        let Some(waits) = self.tickets.get_mut(&ticket) else {
            return;
        };
        *waits -= 1;
        if *waits == 0 {
            self.tickets.remove(&ticket);
            self.commands.push(Command::Done(ticket));
        }
    }

    /// The page's content is no longer where its place says, or need not be.
    pub(super) fn leave_place(&mut self, page: Page) {
        match self.entry(page).place() {
            Place::Nowhere => self.entry_mut(page).set(Mark::Surplus, false),
            Place::Slot(slot) => {
                self.slots.give_back(slot);
                self.entry_mut(page).set_place(Place::Nowhere);
            }
            Place::Block(block) => self.blocks.unlink(&mut self.entries, page, block),
        }
    }

    /// Lets a page in memory stand for a block, if not too many do.
    pub(super) fn stand_for(&mut self, page: Page, block: Block) {
        let stands = self.blocks.link(&mut self.entries, page, block);
        self.entry_mut(page).set(Mark::Surplus, !stands);
    }
}
