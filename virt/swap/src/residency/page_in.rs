//! Page-in: pages come for a fault, a device or a disk's request, or come back from a second
//! chance.

use super::Residency;
use super::command::{Command, Errno, PauseReason, Protection, Ticket};
use super::pages::{Backing, Page, State};
use super::policy::FaultOrigin;
use super::read_ahead::ReadAhead;
use super::waiters::Waiter;

impl Residency {
    /// Records that the page is in memory already: it was loaded before the guest began. There may
    /// be more of these than the limit.
    pub fn adopt(&mut self, page: Page) {
        debug_assert_eq!(self.pages.state(page), State::Absent);
        self.settle(page, Protection::Writable);
    }

    /// Handles a vCPU's fault at the page; `ahead` says which others are read if it is in the
    /// store.
    pub fn fault(&mut self, page: Page, ahead: ReadAhead) {
        match self.pages.state(page) {
            State::Resident => self.commands.push(Command::Wake(page)),
            State::Absent if self.pages.backing(page) == Backing::Nowhere => {
                self.bring(page, false, FaultOrigin::Vcpu);
                self.zero_around(page);
            }
            _ => {
                let follows = self.follows_in_store(page);
                self.bring(page, false, FaultOrigin::Vcpu);
                if ahead == ReadAhead::Always || ahead == ReadAhead::InOrder && follows {
                    self.read_ahead_slots(page);
                }
                self.read_ahead_blocks(page);
            }
        }
        self.balance();
    }

    /// Handles a vCPU's fault at a page of which its instruction overwrites all: the page comes as
    /// zeroes, unless the policy has it read.
    pub fn fault_overwriting(&mut self, page: Page) {
        if self.policy.reads_overwritten(FaultOrigin::Vcpu) {
            return self.fault(page, ReadAhead::Never);
        }
        match self.pages.state(page) {
            State::Resident => self.commands.push(Command::Wake(page)),
            _ => self.bring(page, true, FaultOrigin::Vcpu),
        }
        self.balance();
    }

    /// Handles a device's wait for these pages; for each, whether the device is about to overwrite
    /// all of it.
    pub fn wanted(&mut self, ticket: Ticket, pages: &[(Page, bool)]) {
        let mut waits = Vec::new();
        for &(page, overwrites) in pages {
            self.bring(page, overwrites, FaultOrigin::Device);
            // A page that a disk fills is present for a device.
            if !matches!(self.pages.state(page), State::Resident | State::Filling) {
                waits.push(page);
            }
        }
        if !self.waiters.add_ticket(ticket, &waits) {
            self.commands.push(Command::Done(ticket));
        }
        self.balance();
    }

    /// Makes the page resident, now or when there is room and it has been read. A page that is
    /// overwritten is not read, unless the policy has it read.
    pub(super) fn bring(&mut self, page: Page, overwrites: bool, origin: FaultOrigin) {
        match self.pages.state(page) {
            State::Resident | State::Filling | State::Fetching => {}
            State::Unmapped | State::Saving => self.rescue(page, None),
            State::Absent if !self.has_room(origin) => self.room_queue.push(page, origin),
            State::Absent if self.pages.backing(page) == Backing::Nowhere => {
                self.bring_zeroes(page)
            }
            State::Absent if overwrites && self.policy.reads_overwritten(origin) => {
                self.counts.stale += 1;
                self.fetch(page);
            }
            State::Absent if overwrites => self.bring_zeroes(page),
            State::Absent => self.fetch(page),
        }
    }

    fn bring_zeroes(&mut self, page: Page) {
        self.enter_as_zeroes(page);
        self.settle(page, Protection::Writable);
    }

    /// Returns whether there is room for one more page.
    pub(super) fn has_room(&self, origin: FaultOrigin) -> bool {
        self.reclaim.has_room(self.pages.present(), origin)
    }

    /// Gives an absent page memory, whatever its content was. The caller must settle it, or have it
    /// filled.
    pub(super) fn enter_as_zeroes(&mut self, page: Page) {
        match self.pages.backing(page) {
            Backing::Nowhere => self.counts.zeroed += 1,
            _ => self.counts.not_fetched += 1,
        }
        self.pages.leave_backing(page);
        self.commands.push(Command::Zero(page));
    }

    pub(super) fn fetch(&mut self, page: Page) {
        let backing = self.pages.fetch(page);
        self.commands.push(Command::Fetch(page, backing));
    }

    /// Handles the end of the read of `page`'s content: its CRC, or the error.
    pub(super) fn fetched(&mut self, page: Page, outcome: Result<u32, Errno>) {
        debug_assert_eq!(self.pages.state(page), State::Fetching);
        let backing = self.pages.backing(page);
        let reason = match outcome {
            Ok(crc) if crc == self.pages.crc(page) => None,
            Ok(_) => Some(PauseReason::Changed(backing)),
            Err(errno) => Some(PauseReason::CannotFetch(backing, errno)),
        };
        if let Some(reason) = reason {
            self.failures.fetch_failed(page);
            self.commands.push(Command::Stop(reason));
            return;
        }
        match backing {
            Backing::Block(_) if !self.pages.leaves_block(page) => {
                self.counts.fetched_from_disk += 1;
                self.settle(page, Protection::Protected);
            }
            Backing::Block(_) => {
                self.counts.fetched_before_a_write += 1;
                self.pages.leave_backing(page);
                self.settle(page, Protection::Writable);
            }
            _ => {
                self.counts.fetched_from_store += 1;
                self.pages.leave_backing(page);
                self.settle(page, Protection::Writable);
            }
        }
    }

    /// Makes a page resident again from a second chance. For a request of a disk it is protected,
    /// and no block backs it.
    pub(super) fn rescue(&mut self, page: Page, protection: Option<Protection>) {
        self.counts.rescued += 1;
        let marked = match self.pages.backing(page) {
            Backing::Block(_) => Protection::AsMarked,
            _ => Protection::Writable,
        };
        self.settle(page, protection.unwrap_or(marked));
    }

    /// Makes the page, whose content is in memory, resident, and wakes its waiters.
    pub(super) fn settle(&mut self, page: Page, protection: Protection) {
        self.commands.push(Command::Map(page, protection));
        self.commands.push(Command::Show(page));
        self.pages.settle(page);
        self.is_there(page);
    }

    /// Wakes the waiters of the page, which is resident.
    pub(super) fn is_there(&mut self, page: Page) {
        for waiter in self.waiters.arrived(page) {
            match waiter {
                Waiter::Ticket(ticket) if self.waiters.ticket_has_one(ticket) => {
                    self.commands.push(Command::Done(ticket));
                }
                Waiter::Ticket(_) => {}
                Waiter::Op(op) => self.op_has_one(op, page),
            }
        }
    }
}
