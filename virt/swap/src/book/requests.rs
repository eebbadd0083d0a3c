//! Requests of the guest's disks: what a page stands for comes from them, and what a block holds changes by them.
//!
//! The owner tells of a request before it goes down, and again when it is over; it forgets at the
//! first of these which of its pages devices have stored to, so that what it reports later came
//! after. So what those pages were known to equal is void from then on, whether the request goes
//! down or not: it may be cancelled while it waits. From then until the end the request's pages do
//! not leave memory.

use super::entry::{Block, Entry, Mark, Page, Place, State};
use super::{Book, Command, Op, Protection, Waiter, Wanter};

/// What a request of a disk moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// First block.
    pub first: Block,
    /// Blocks, those of which only a part is moved among them.
    pub count: u32,
    /// The memory of each block in order, or none of a write that has no data of the guest's. Of a read of parts, the pages that
    /// it touches.
    pub pages: Vec<Page>,
    /// Each page is a whole block's. Else none comes to stand for one.
    pub is_whole: bool,
}

/// A request that is under way.
#[derive(Debug)]
pub(super) struct Request {
    is_write: bool,
    span: Span,
    /// Pages that it waits for.
    waits: usize,
    /// No page comes to stand for a block: it moves parts of blocks, or another one meanwhile changes the same blocks or pages,
    /// and their order is unknown.
    is_void: bool,
}

impl Request {
    #[cfg(test)]
    pub fn is_write(&self) -> bool {
        self.is_write
    }

    fn meets(&self, other: &Span) -> bool {
        let own = &self.span;
        let (a, b) = (u64::from(own.first.number), u64::from(other.first.number));
        own.first.disk == other.first.disk
            && a < b + u64::from(other.count)
            && b < a + u64::from(own.count)
    }
}

impl Book {
    /// A disk is about to read. Pages that are not in memory come as zeroes, though the request may
    /// have been cancelled by now: an owner that cancels requests has the pages shown, and keeps
    /// them, before it tells of one.
    pub fn begin_read(&mut self, op: Op, span: &Span) {
        self.begin(op, false, span);
        let mut waits = 0;
        for &page in &span.pages {
            match self.entry(page).state {
                State::Fetching => waits += usize::from(self.wait_for(op, page)),
                // Another request fills it; both are void.
                State::Filling => {}
                State::Absent if !self.has_room(Wanter::Device) => {
                    self.starved.push_back((page, Wanter::Device));
                    waits += usize::from(self.wait_for(op, page));
                }
                State::Absent => {
                    self.enter_as_zeroes(page);
                    self.entry_mut(page).state = State::Filling;
                    self.commands.push(Command::Show(page));
                }
                State::Soft | State::Saving => self.rescue(page, Some(Protection::Protected)),
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
        for (nth, page) in (0..).zip(request.span.pages) {
            if self.entry(page).state == State::Filling {
                self.settle(page, Protection::Protected);
            }
            // One that it still waits for has nothing of it.
            let is_there = self.entry(page).state == State::Resident;
            if let Some(block) = request.span.first.ahead(nth)
                && stands
                && is_there
            {
                self.leave_place(page);
                self.stand_for(page, block);
            }
        }
        self.balance();
    }

    /// A disk is about to change blocks: to what its pages hold, or, if there are none, to something that no page holds (discard,
    /// zeroes, parts of blocks). Pages that are not in memory are brought in first.
    pub fn begin_write(&mut self, op: Op, span: &Span) {
        debug_assert!(span.pages.is_empty() || span.pages.len() == span.count as usize);
        self.begin(op, true, span);
        let mut waits = 0;
        for page in self.pages_for(span) {
            match self.entry(page).state {
                State::Resident | State::Soft => self.leave_place(page),
                State::Absent | State::Fetching => {
                    self.entry_mut(page).set(Mark::LeavesBlock, true);
                    self.bring(page, false, Wanter::Device);
                    waits += usize::from(self.wait_for(op, page));
                }
                // These stand for nothing.
                State::Saving | State::Filling => {}
            }
        }
        for &page in &span.pages {
            self.bring(page, false, Wanter::Device);
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

    /// A request that writes is over. If it is not good, the content of its blocks is unknown.
    pub fn end_write(&mut self, op: Op, is_good: bool) {
        let Some(request) = self.end(op) else {
            return;
        };
        if is_good && !request.is_void {
            for (nth, page) in (0..).zip(request.span.pages) {
                // One that it still waits for, since it was given up, it has not written.
                let is_there = self.entry(page).state == State::Resident;
                if let Some(block) = request.span.first.ahead(nth)
                    && is_there
                {
                    self.leave_place(page);
                    self.stand_for(page, block);
                }
            }
        }
        self.balance();
    }

    /// The pages that stand for one of the blocks. Takes as long as there are blocks, or pages, whichever are fewer.
    fn pages_for(&self, span: &Span) -> Vec<Page> {
        if self.blocks.is_empty() {
            return Vec::new();
        }
        let Span { first, count, .. } = *span;
        if count as usize > self.entries.len() {
            let last = first.number.saturating_add(count - 1);
            let changes = |entry: &Entry| match entry.place() {
                Place::Block(block) => {
                    block.disk == first.disk && (first.number..=last).contains(&block.number)
                }
                Place::Nowhere | Place::Slot(_) => false,
            };
            let changing = (0..).zip(&self.entries).filter(|(_, e)| changes(e));
            return changing.map(|(number, _)| Page(number)).collect();
        }
        let blocks = (0..count).filter_map(|nth| first.ahead(nth));
        let pages = |block| self.blocks.pages(&self.entries, block);
        blocks.flat_map(pages).collect()
    }

    /// Begins a request of either kind when the owner reports it.
    fn begin(&mut self, op: Op, is_write: bool, span: &Span) {
        for page in &span.pages {
            self.void_evidence(*page);
        }
        let mut is_void = !span.is_whole;
        for other in self.requests.values_mut() {
            if (is_write || other.is_write) && other.meets(span) {
                // A write is not made void by a read.
                other.is_void |= is_write;
                is_void |= other.is_write;
            }
        }
        for page in &span.pages {
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
            span: span.clone(),
            waits: 0,
            is_void,
        };
        self.requests.insert(op, request);
    }

    fn end(&mut self, op: Op) -> Option<Request> {
        let request = self.requests.remove(&op)?;
        for page in &request.span.pages {
            if let Some(ops) = self.busy.get_mut(page) {
                ops.retain(|other| *other != op);
                if ops.is_empty() {
                    self.busy.remove(page);
                }
            }
        }
        Some(request)
    }

    /// Forgets the block that a page in memory equals: it may not equal it any more, and no later
    /// report tells. The place of one that is not in memory, or is being read, is where its
    /// content is, and no device has reached it since it left.
    fn void_evidence(&mut self, page: Page) {
        let is_in_memory = matches!(self.entry(page).state, State::Resident | State::Soft);
        if is_in_memory {
            self.leave_place(page);
        }
    }

    /// From now on stores to the page show, and it stands for nothing: not for a block either that
    /// it was fetched from since the request began.
    fn protect(&mut self, page: Page) {
        self.void_evidence(page);
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
        if waits == 0 {
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
        if request.span.pages.contains(&page) {
            self.protect(page);
        }
        if is_over {
            self.commands.push(Command::Go(op));
        }
    }
}
