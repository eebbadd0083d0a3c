//! Requests of the guest's disks, which make blocks back pages, and change blocks.
//!
//! The owner reports a request before it is submitted, and again when it has ended. With the first
//! report it clears its record of devices' stores to the request's pages, so that a store reported
//! later came after it. From then on no block backs these pages, whether the request is submitted
//! or not: it may be cancelled while it waits. Until the end the request's pages do not leave
//! memory.

use super::Residency;
use super::command::{Command, Op, Protection};
use super::pages::{Block, Page, State};
use super::policy::FaultOrigin;
use super::requests::{Direction, Span};

impl Residency {
    /// Begins a disk's read. Pages that are not in memory come as zeroes. The request may have been
    /// cancelled by now: an owner that cancels requests has the pages shown, and keeps them, before
    /// it reports one.
    pub fn begin_read(&mut self, op: Op, span: &Span) {
        self.begin(op, Direction::Read, span);
        let mut waits = 0;
        for &page in &span.pages {
            match self.pages.state(page) {
                State::Fetching => waits += usize::from(self.waiters.add_op(op, page)),
                // Another request fills it; neither is evidence.
                State::Filling => {}
                State::Absent if !self.has_room(FaultOrigin::Device) => {
                    self.room_queue.push(page, FaultOrigin::Device);
                    waits += usize::from(self.waiters.add_op(op, page));
                }
                State::Absent => {
                    self.enter_as_zeroes(page);
                    self.pages.fill(page);
                    self.commands.push(Command::Show(page));
                }
                State::Unmapped | State::Saving => self.rescue(page, Some(Protection::Protected)),
                State::Resident if self.question.has(page) => {
                    waits += usize::from(self.waiters.add_op(op, page));
                }
                State::Resident => self.protect(page),
            }
        }
        self.goes_when_all_are_there(op, waits);
        self.balance();
    }

    /// Ends a disk's read.
    pub fn end_read(&mut self, op: Op, is_good: bool) {
        let Some(request) = self.requests.end(op) else {
            return;
        };
        let is_evidence = is_good && request.is_evidence;
        for (nth, page) in (0..).zip(request.span.pages) {
            if self.pages.state(page) == State::Filling {
                self.settle(page, Protection::Protected);
            }
            // A page that the request still waits for has no data of it.
            if is_evidence && self.pages.state(page) == State::Resident {
                self.equals(page, request.span.first.ahead(nth));
            }
        }
        self.balance();
    }

    /// Begins a disk's change of blocks: to the content of its pages, or, without pages, to content
    /// that no page has (discard, zeroes, parts of blocks). Pages that are backed by these blocks
    /// and are not in memory are read first.
    pub fn begin_write(&mut self, op: Op, span: &Span) {
        debug_assert!(span.pages.is_empty() || span.pages.len() == span.count as usize);
        self.begin(op, Direction::Write, span);
        let mut waits = 0;
        for page in self.pages.backed_by_any(span.first, span.count) {
            match self.pages.state(page) {
                State::Resident | State::Unmapped => self.pages.leave_backing(page),
                State::Absent | State::Fetching => {
                    self.pages.mark_leaves_block(page);
                    self.bring(page, false, FaultOrigin::Device);
                    waits += usize::from(self.waiters.add_op(op, page));
                }
                // No block backs these.
                State::Saving | State::Filling => {}
            }
        }
        for &page in &span.pages {
            self.bring(page, false, FaultOrigin::Device);
            match self.pages.state(page) {
                State::Resident if !self.question.has(page) => self.protect(page),
                // Another request fills it; neither is evidence.
                State::Filling => {}
                _ => waits += usize::from(self.waiters.add_op(op, page)),
            }
        }
        self.goes_when_all_are_there(op, waits);
        self.balance();
    }

    /// Ends a disk's write. If it is not good, the content of its blocks is unknown.
    pub fn end_write(&mut self, op: Op, is_good: bool) {
        let Some(request) = self.requests.end(op) else {
            return;
        };
        let is_evidence = is_good && request.is_evidence;
        for (nth, page) in (0..).zip(request.span.pages) {
            // A page that the request still waits for, since it was cancelled, has not been
            // written.
            if is_evidence && self.pages.state(page) == State::Resident {
                self.equals(page, request.span.first.ahead(nth));
            }
        }
        self.balance();
    }

    /// Begins a request of either direction when the owner reports it.
    fn begin(&mut self, op: Op, direction: Direction, span: &Span) {
        for page in &span.pages {
            self.void_evidence(*page);
        }
        self.requests.begin(op, direction, span);
    }

    /// Records that a request has made a resident page and a block equal, if the block has a
    /// number.
    fn equals(&mut self, page: Page, block: Option<Block>) {
        if let Some(block) = block {
            self.pages.leave_backing(page);
            self.pages.back_by_block(page, block);
        }
    }

    /// Forgets the block that a page in memory equals: it may not equal it any more, and no later
    /// report shows that. The place of a page that is not in memory, or is being read, has its
    /// content, and no device has stored to it since it left.
    fn void_evidence(&mut self, page: Page) {
        let is_in_memory = matches!(self.pages.state(page), State::Resident | State::Unmapped);
        if is_in_memory {
            self.pages.leave_backing(page);
        }
    }

    /// Protects the page, so that stores to it are detected, and unlinks it from its block, even
    /// one that it was fetched from since the request began.
    fn protect(&mut self, page: Page) {
        self.void_evidence(page);
        self.commands.push(Command::Protect(page));
    }

    fn goes_when_all_are_there(&mut self, op: Op, waits: usize) {
        if self.requests.wait(op, waits) {
            self.commands.push(Command::Go(op));
        }
    }

    /// Records that a page that the request waited for is resident.
    pub(super) fn op_has_one(&mut self, op: Op, page: Page) {
        let Some(arrival) = self.requests.arrived(op, page) else {
            return;
        };
        if arrival.is_moved {
            self.protect(page);
        }
        if arrival.is_last {
            self.commands.push(Command::Go(op));
        }
    }
}
