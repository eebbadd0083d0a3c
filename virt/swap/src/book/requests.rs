//! Requests of the guest's disks: what a page stands for comes from them, and what a block holds changes by them.
//!
//! The owner tells of a request before it goes down, and again when it is over; it forgets at the first of these which of its
//! pages devices have stored to, so that what it reports later came after. From then until the end the request's pages do not
//! leave memory.

use super::entry::{Block, Mark, Page, State};
use super::{Book, Command, Protection, Waiter, mutant};

/// A request of a disk, by a number that is its own while it is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Op(pub u64);

/// A request that is under way.
#[derive(Debug)]
pub(super) struct Request {
    is_write: bool,
    first: Block,
    count: u32,
    /// One for each block, or none of a write that has no data of the guest's.
    pages: Vec<Page>,
    /// Pages that it waits for.
    waits: usize,
    /// Another one meanwhile changes the same blocks or pages: nobody knows who was first.
    is_void: bool,
}

impl Request {
    #[cfg(test)]
    pub fn is_write(&self) -> bool {
        self.is_write
    }

    fn meets(&self, first: Block, count: u32) -> bool {
        let (a, b) = (u64::from(self.first.number), u64::from(first.number));
        self.first.disk == first.disk && a < b + u64::from(count) && b < a + u64::from(self.count)
    }
}

impl Book {
    /// A disk is about to read `pages.len()` blocks from `first` on into these pages, whole.
    pub fn begin_read(&mut self, op: Op, first: Block, pages: &[Page]) {
        let count = pages.len() as u32;
        self.begin(op, false, first, count, pages);
        let mut waits = 0;
        for &page in pages {
            match self.entry(page).state {
                State::Fetching => waits += usize::from(self.wait_for(op, page)),
                // Another request fills it; both are void.
                State::Filling => {}
                State::Absent if !self.has_room() => {
                    self.starved.push_back(page);
                    waits += usize::from(self.wait_for(op, page));
                }
                State::Absent => {
                    self.enter_as_zeroes(page);
                    self.entry_mut(page).state = State::Filling;
                    self.commands.push(Command::Show(page));
                }
                State::Soft | State::Saving => {
                    self.rescue(page, Some(Protection::Protected));
                    self.leave_place(page);
                }
                State::Resident if self.is_asked_for(page) => {
                    waits += usize::from(self.wait_for(op, page));
                }
                State::Resident => self.protect(page),
            }
        }
        self.goes_when_all_are_there(op, waits);
        self.balance();
    }

    /// A request that reads is over.
    pub fn end_read(&mut self, op: Op, is_good: bool) {
        let Some(request) = self.end(op) else {
            return;
        };
        let stands = is_good && !request.is_void;
        for (nth, page) in (0..).zip(request.pages) {
            if self.entry(page).state == State::Filling {
                self.settle(page, Protection::Protected);
            }
            // One that it still waits for has nothing of it.
            let is_there = self.entry(page).state == State::Resident;
            if let Some(block) = request.first.ahead(nth)
                && stands
                && is_there
            {
                self.leave_place(page);
                self.stand_for(page, block);
            }
        }
        self.balance();
    }

    /// A disk is about to change `count` blocks from `first` on: with what these pages hold, or, if there are none, to
    /// something that no page holds (discard, zeroes, parts of blocks). Pages that are not in memory are brought in first.
    pub fn begin_write(&mut self, op: Op, first: Block, count: u32, pages: &[Page]) {
        debug_assert!(pages.is_empty() || pages.len() == count as usize);
        self.begin(op, true, first, count, pages);
        let mut waits = 0;
        for block in (0..count).filter_map(|nth| first.ahead(nth)) {
            let most = if mutant!(self, OnePageABlock) {
                1
            } else {
                usize::MAX
            };
            let pages: Vec<Page> = self.blocks.pages(&self.entries, block).take(most).collect();
            for page in pages {
                match self.entry(page).state {
                    State::Resident | State::Soft => self.leave_place(page),
                    State::Absent | State::Fetching => {
                        self.entry_mut(page).set(Mark::LeavesBlock, true);
                        self.bring(page, false);
                        waits += usize::from(self.wait_for(op, page));
                    }
                    // These stand for nothing.
                    State::Saving | State::Filling => {}
                }
            }
        }
        for &page in pages {
            self.bring(page, false);
            match self.entry(page).state {
                State::Resident if !self.is_asked_for(page) => self.protect(page),
                // Another request fills it; both are void.
                State::Filling => {}
                _ => waits += usize::from(self.wait_for(op, page)),
            }
        }
        self.goes_when_all_are_there(op, waits);
        self.balance();
    }

    /// A request that writes is over. If it is not good, nobody knows what its blocks hold.
    pub fn end_write(&mut self, op: Op, is_good: bool) {
        let Some(request) = self.end(op) else {
            return;
        };
        if is_good && !request.is_void {
            for (nth, page) in (0..).zip(request.pages) {
                // One that it still waits for, since it was given up, it has not written.
                let is_there = self.entry(page).state == State::Resident;
                if let Some(block) = request.first.ahead(nth)
                    && is_there
                {
                    self.leave_place(page);
                    self.stand_for(page, block);
                }
            }
        }
        self.balance();
    }

    fn begin(&mut self, op: Op, is_write: bool, first: Block, count: u32, pages: &[Page]) {
        let mut is_void = false;
        for other in self.requests.values_mut() {
            if (is_write || other.is_write)
                && other.meets(first, count)
                && !mutant!(self, OverlapIgnored)
            {
                // A write is not made void by a read.
                other.is_void |= is_write;
                is_void |= other.is_write;
            }
        }
        for page in pages {
            let others = self.busy.entry(*page).or_default();
            for other in others.iter().filter(|other| **other != op) {
                is_void = true;
                if let Some(other) = self.requests.get_mut(other) {
                    other.is_void = true;
                }
            }
            // Twice the same page: what it holds in the end is one of two blocks.
            is_void |= !is_write && others.contains(&op);
            others.push(op);
        }
        let request = Request {
            is_write,
            first,
            count,
            pages: pages.to_vec(),
            waits: 0,
            is_void,
        };
        self.requests.insert(op, request);
    }

    fn end(&mut self, op: Op) -> Option<Request> {
        let request = self.requests.remove(&op)?;
        for page in &request.pages {
            if let Some(ops) = self.busy.get_mut(page) {
                ops.retain(|other| *other != op);
                if ops.is_empty() {
                    self.busy.remove(page);
                }
            }
        }
        Some(request)
    }

    /// From now on stores to the page show, and it stands for nothing: what it was known to equal, it may not any more, and
    /// nobody can tell from now on.
    fn protect(&mut self, page: Page) {
        if !mutant!(self, EvidenceKeptByARequest) {
            self.leave_place(page);
        }
        self.commands.push(Command::Protect(page));
    }

    /// True if it had not waited for it before.
    fn wait_for(&mut self, op: Op, page: Page) -> bool {
        let waiters = self.waiters.entry(page).or_default();
        let is_new = !waiters.contains(&Waiter::Op(op));
        if is_new {
            waiters.push(Waiter::Op(op));
        }
        is_new
    }

    fn goes_when_all_are_there(&mut self, op: Op, waits: usize) {
        if waits == 0 || mutant!(self, WriteBeforeFetch) {
            self.commands.push(Command::Go(op));
        }
        if let Some(request) = self.requests.get_mut(&op) {
            request.waits = waits;
        }
    }

    /// A page that the request waited for is resident.
    pub(super) fn op_has_one(&mut self, op: Op, page: Page) {
        let Some(request) = self.requests.get_mut(&op) else {
            return;
        };
        request.waits -= 1;
        let is_over = request.waits == 0;
        // Others were waited for since they stood for a block.
        if request.pages.contains(&page) {
            self.protect(page);
        }
        if is_over && !mutant!(self, WriteBeforeFetch) {
            self.commands.push(Command::Go(op));
        }
    }
}
