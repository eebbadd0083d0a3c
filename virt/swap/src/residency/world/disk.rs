//! Disk requests, from the moment at which the owner reports one until it ends.
//!
//! As a device does, the owner leases the pages to which it has addresses from then on: those that
//! are shown. The book allows more: it brings in the others, whose leases begin when the request is
//! submitted, as all leases of some requests of whole pages do. A request may be cancelled before
//! it is submitted.

use super::*;

/// Owner's state of a disk's request.
#[derive(Clone, Debug)]
pub(super) struct DiskOp {
    kind: Kind,
    /// Blocks and pages as reported.
    pub span: Span,
    /// Memory that the disk reads or writes: a write of parts reports none of it.
    pages: Vec<Page>,
    /// Leased pages of `pages`, with repetitions.
    leased: Vec<Page>,
    has_gone: bool,
    /// Positions of the pages that are not done, or of the blocks of a request without pages.
    left: Vec<usize>,
    fails: bool,
}

impl DiskOp {
    pub fn is_read(&self) -> bool {
        matches!(self.kind, Kind::Read | Kind::ReadParts)
    }

    /// Returns the pages that are not leased.
    fn unleased(&self) -> Vec<Page> {
        let mut pages = self.pages.clone();
        for page in &self.leased {
            let at = pages.iter().position(|other| other == page);
            pages.swap_remove(at.expect("leased pages are its own"));
        }
        pages
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// Whole blocks, each into a whole page.
    Read,
    /// Parts of blocks, into parts of pages.
    ReadParts,
    /// Whole blocks, each from a whole page.
    Write,
    /// Parts of blocks, from parts of pages.
    WriteParts,
    Discard,
}

impl World {
    /// Begins a request that reads, in a quarter of the cases one of parts of blocks.
    pub(super) fn begin_read(&mut self) {
        match self.random.chance(0.25) {
            true => self.begin(Kind::ReadParts),
            false => self.begin(Kind::Read),
        }
    }

    /// Begins a request that writes, in a quarter of the cases one of parts of blocks.
    pub(super) fn begin_write(&mut self) {
        match self.random.chance(0.25) {
            true => self.begin(Kind::WriteParts),
            false => self.begin(Kind::Write),
        }
    }

    pub(super) fn begin(&mut self, kind: Kind) {
        if self.ops.len() >= 4 {
            return;
        }
        let count = 1 + self.random.below(4) as u32;
        let first = self.random.below(u64::from(BLOCKS - count)) as u32;
        let start = self.page().0.min(PAGES - count);
        let scattered = self.random.chance(0.3);
        let mut pages: Vec<Page> = (start..start + count).map(Page).collect();
        if scattered {
            for page in &mut pages {
                *page = self.page();
            }
        }
        let is_of_parts = matches!(kind, Kind::ReadParts | Kind::WriteParts);
        if kind == Kind::Discard {
            pages.clear();
        } else if is_of_parts {
            // The rest of these pages must keep its content: the device has their addresses first.
            let is_shown = |page: &Page| self.frames[page.0 as usize].is_shown;
            if !pages.iter().all(is_shown) {
                return self.ask_for(pages.into_iter().map(|page| (page, false)).collect());
            }
        }
        let reported = match kind {
            Kind::WriteParts => Vec::new(),
            _ => pages.clone(),
        };
        let leases_now = is_of_parts || self.random.chance(0.7);
        let mut leased = Vec::new();
        for page in &pages {
            let frame = self.frame(*page);
            if frame.is_shown && leases_now {
                frame.leases += 1;
                leased.push(*page);
            }
            if kind == Kind::Read {
                self.lend(*page);
            }
        }
        for page in &reported {
            self.frame(*page).is_written = false;
        }
        // Whole pages are reported as parts while disks have requests that were not reported.
        let is_whole = !is_of_parts && self.random.chance(0.9);
        let left = match pages.len() {
            0 => count as usize,
            pages => pages,
        };
        let op = DiskOp {
            kind,
            span: Span {
                first: Block {
                    disk: 0,
                    number: first,
                },
                count,
                pages: reported,
                is_whole,
            },
            pages,
            leased,
            has_gone: false,
            left: (0..left).collect(),
            fails: self.random.chance(0.05),
        };
        self.next_op += 1;
        self.ops.insert(self.next_op, op);
        self.owner_events
            .push_back(OwnerEvent::Begin(Op(self.next_op)));
    }

    /// Submits a request, unless it was cancelled: the book may not know that yet.
    pub(super) fn go(&mut self, number: u64) -> Checked {
        let Some(op) = self.ops.get_mut(&number) else {
            return match self.cancelled.contains_key(&number) {
                true => Ok(()),
                false => Err("a request goes that is over".into()),
            };
        };
        if op.has_gone {
            return Err("a request goes twice".into());
        }
        op.has_gone = true;
        let late = op.unleased();
        op.leased.extend(&late);
        for page in op.pages.clone() {
            let frame = self.frame(page);
            if !frame.is_shown {
                return Err(format!("goes without memory: {page:?} {frame:?}"));
            }
        }
        for page in late {
            self.frame(page).leases += 1;
        }
        Ok(())
    }

    /// Returns the numbers of the requests that have been submitted, or have not.
    fn ops_that(&self, have_gone: bool) -> Vec<u64> {
        let ops = self.ops.iter().filter(|(_, op)| op.has_gone == have_gone);
        ops.map(|(number, _)| *number).collect()
    }

    /// Cancels requests that have not been submitted: one, as when its memory is unmapped, or all,
    /// as when a queue is reset.
    pub(super) fn cancel(&mut self) {
        let mut waiting = self.ops_that(false);
        if waiting.is_empty() {
            return;
        }
        if self.random.chance(0.7) {
            let at = self.random.below(waiting.len() as u64) as usize;
            waiting = vec![waiting[at]];
        }
        for number in waiting {
            let op = self.ops.remove(&number).expect("listed");
            self.release(&op, false);
            self.owner_events
                .push_back(OwnerEvent::End(Op(number), false));
            self.cancelled.insert(number, op);
            self.cancels += 1;
        }
    }

    /// Ends the leases of the request's pages.
    fn release(&mut self, op: &DiskOp, is_good: bool) {
        for page in &op.leased {
            let frame = self.frame(*page);
            frame.leases -= 1;
            if op.kind == Kind::Read {
                frame.is_back(is_good);
            }
        }
    }

    /// Prepares for the report that a request has ended. Until now the book could clear the pages
    /// that were not leased when it was cancelled.
    pub(super) fn forget_cancelled(&mut self, op: Op) {
        if let Some(op) = self.cancelled.remove(&op.0)
            && op.kind == Kind::Read
        {
            for page in op.unleased() {
                self.frame(page).is_back(false);
            }
        }
    }

    /// Reads or writes one block of a submitted request, or ends the request.
    pub(super) fn go_on(&mut self) -> Checked {
        let gone = self.ops_that(true);
        if gone.is_empty() {
            return Ok(());
        }
        let number = gone[self.random.below(gone.len() as u64) as usize];
        let mut op = self.ops.remove(&number).expect("listed");
        let failed_now = op.fails && self.random.chance(0.3);
        if op.left.is_empty() || failed_now {
            self.release(&op, !op.fails);
            if op.fails && !op.is_read() {
                // It is unknown what was written.
                for nth in &op.left {
                    if self.random.chance(0.5) {
                        self.image[op.span.first.number as usize + nth] = self.next_content + 1;
                        self.next_content += 1;
                    }
                }
            }
            self.owner_events
                .push_back(OwnerEvent::End(Op(number), !op.fails));
            return Ok(());
        }
        let at = self.random.below(op.left.len() as u64) as usize;
        let nth = op.left.swap_remove(at);
        let moved = self.move_one(&op, nth);
        self.ops.insert(number, op);
        moved
    }

    /// Reads or writes the block at position `nth` of a request.
    fn move_one(&mut self, op: &DiskOp, nth: usize) -> Checked {
        let block = op.span.first.number as usize + nth;
        match op.kind {
            Kind::Read | Kind::ReadParts => {
                let page = op.pages[nth];
                // After a part, the page's content is no block's.
                let content = match op.kind {
                    Kind::Read => self.image[block],
                    _ => self.fresh(),
                };
                let frame = self.frame(page);
                if frame.content.is_none() || !frame.is_shown {
                    return Err(format!("a disk reads where there is no memory: {page:?}"));
                }
                frame.content = Some(content);
                if op.kind == Kind::ReadParts {
                    frame.now_holds(content);
                }
            }
            Kind::Write => {
                self.find(op.pages[nth], "a disk")?;
                self.image[block] = self.frame(op.pages[nth]).content.unwrap_or_default();
            }
            Kind::WriteParts => {
                self.find(op.pages[nth], "a disk")?;
                self.image[block] = self.fresh();
            }
            Kind::Discard => self.image[block] = 0,
        }
        Ok(())
    }
}
