//! The Swap Mapper's disk: a back end that reports the reads and writes of the disk below it.
//!
//! While disks report, a request is submitted in three steps: the pager receives a report; it reads
//! the pages that depend on the blocks' old content, and write-protects the request's pages; and
//! only then the request goes to the disk below. When it has ended, the pager receives another
//! report, before the guest can observe the end. The paper's *Data Consistency* needs no more, and
//! no flag of a page: completions are not reordered for the guest, and a flush is submitted at
//! once, since a request that waits has not been answered.
//!
//! Whole 4 KiB blocks whose memory is whole pages are mapped, whatever the logical block size. A
//! request with any other part maps nothing. While memory is plentiful and no block backs a page, a
//! request passes at the cost of one load.
//!
//! Thread: the owner's, as of all back ends. The pager accesses only the gate, in which it puts the
//! requests that may be submitted.

use std::collections::{HashMap, HashSet};
use std::mem;
use std::os::fd::RawFd;
use std::sync::Arc;

use guest_mem::PAGE_SIZE;
use rustix::io::Errno;
use vio::blk::{self, BlockIo, Completion, Outcome, Piece, Transfer};
use vio::pass_down;

use crate::link::{Gate, Kind, Reports};
use crate::ram::SwappedRam;
use crate::residency::{Block, Op, Page, Span};

/// A request that has been reported to the pager.
#[derive(Debug)]
struct Reported {
    op: Op,
    kind: Kind,
    /// Request to submit, until the pager opens the gate.
    waits: Option<(blk::Op, Vec<Piece>)>,
}

/// A disk whose requests are reported to the pager.
pub struct MappedDisk {
    below: Box<dyn BlockIo>,
    ram: SwappedRam,
    number: u8,
    gate: Arc<Gate>,
    /// Requests that the pager knows of, by their slots.
    reported: HashMap<u32, Reported>,
    /// Slots of the requests that wait.
    waiting: HashMap<Op, u32>,
    /// Slots of requests below that have not been reported: while any disk has one, no block comes
    /// to back a page, since the requests may overlap.
    unreported: HashSet<u32>,
    /// Completions of requests that were cancelled before they were submitted.
    early: Vec<Completion>,
    opened: Vec<Op>,
}

impl MappedDisk {
    /// Wraps `below` as disk number `number` of `ram`'s machine. It has to move data directly
    /// between the file and guest memory ([`Transfer::Direct`]).
    ///
    /// # Panics
    /// If it does not: an error of the builder.
    pub fn new(below: Box<dyn BlockIo>, ram: SwappedRam, number: u8) -> Self {
        assert_eq!(below.transfer(), Transfer::Direct, "pages are to be mapped");
        Self {
            gate: ram.gate(number),
            below,
            ram,
            number,
            reported: HashMap::new(),
            waiting: HashMap::new(),
            unreported: HashSet::new(),
            early: Vec::new(),
            opened: Vec::new(),
        }
    }

    /// Returns the blocks and pages of a request, and its direction; `None` if it has none.
    fn span(&self, op: blk::Op, pieces: &[Piece]) -> Option<(Kind, Span)> {
        let (kind, offset, len) = match op {
            blk::Op::Read { offset, len } => (Kind::Read, offset, u64::from(len)),
            blk::Op::Write { offset, len, .. } => (Kind::Write, offset, u64::from(len)),
            blk::Op::Discard { offset, len } | blk::Op::WriteZeroes { offset, len, .. } => {
                (Kind::Write, offset, len)
            }
            blk::Op::Flush => return None,
        };
        let is_aligned = |piece: &Piece| {
            piece.hva.raw().is_multiple_of(PAGE_SIZE)
                && u64::from(piece.len).is_multiple_of(PAGE_SIZE)
        };
        let moves_pages = !pieces.is_empty()
            && offset.is_multiple_of(PAGE_SIZE)
            && len.is_multiple_of(PAGE_SIZE)
            && pieces.iter().all(is_aligned);
        let first = offset / PAGE_SIZE;
        let last = (offset + (len - 1)) / PAGE_SIZE;
        // Blocks have 32 bits: those beyond 16 TiB are not mapped. The last number represents all
        // of them, so requests there are taken to overlap.
        let block = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let is_numbered = last < u64::from(u32::MAX);
        let mut pages: Vec<Page> = Vec::new();
        // A write of parts does not transfer its pages as a whole.
        if moves_pages || kind == Kind::Read {
            for piece in pieces {
                // Two pieces of parts may lie in one page, which is then listed twice.
                pages.extend(self.ram.pages_of(piece.hva, u64::from(piece.len)));
            }
        }
        if kind == Kind::Write && !is_numbered {
            pages.clear();
        }
        let span = Span {
            first: Block {
                disk: self.number,
                number: block(first),
            },
            count: block(last - first + 1),
            pages,
            is_whole: moves_pages && is_numbered,
        };
        Some((kind, span))
    }

    fn report(&mut self, slot: u32, op: blk::Op, pieces: &[Piece]) -> bool {
        let reports = self.ram.reports();
        if reports == Reports::Off {
            return false;
        }
        let Some((kind, mut span)) = self.span(op, pieces) else {
            return false;
        };
        span.is_whole &= reports == Reports::On && !self.ram.has_unreported();
        let own = self.ram.next_op(self.number);
        self.ram.began(own, kind, span);
        let reported = Reported {
            op: own,
            kind,
            waits: Some((op, pieces.to_vec())),
        };
        self.reported.insert(slot, reported);
        self.waiting.insert(own, slot);
        true
    }

    /// Submits the requests that may be submitted.
    fn pass_opened(&mut self) {
        if !self.gate.is_open() {
            return;
        }
        let mut opened = mem::take(&mut self.opened);
        self.gate.take(&mut opened);
        for op in opened.drain(..) {
            // A request that was cancelled is not known any more.
            if let Some(slot) = self.waiting.remove(&op)
                && let Some(reported) = self.reported.get_mut(&slot)
                && let Some((op, pieces)) = reported.waits.take()
            {
                self.below.submit(slot, op, &pieces);
            }
        }
        self.opened = opened;
    }
}

impl BlockIo for MappedDisk {
    pass_down!();

    fn run_now(&mut self, op: blk::Op, pieces: &[Piece]) -> Option<Outcome> {
        match self.ram.reports() {
            // It ends before the next one begins.
            Reports::Off => self.below.run_now(op, pieces),
            Reports::Draining | Reports::On if op == blk::Op::Flush => {
                self.below.run_now(op, pieces)
            }
            Reports::Draining | Reports::On => None,
        }
    }

    fn submit(&mut self, slot: u32, op: blk::Op, pieces: &[Piece]) {
        if self.report(slot, op, pieces) {
            return;
        }
        if op != blk::Op::Flush && self.unreported.insert(slot) {
            self.ram.unreported_begins();
        }
        self.below.submit(slot, op, pieces);
    }

    fn flush(&mut self) {
        self.pass_opened();
        self.below.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.early);
        let from = done.len();
        self.below.poll(done);
        for completion in &done[from..] {
            let is_good = match completion.outcome {
                Outcome::Done => true,
                Outcome::Failed(_) | Outcome::NotBegun(_) => false,
                // The request continues.
                Outcome::NotCancellable => continue,
            };
            match self.reported.remove(&completion.slot) {
                Some(Reported { op, kind, .. }) => self.ram.ended(op, kind, is_good),
                None if self.unreported.remove(&completion.slot) => self.ram.unreported_ends(),
                // A flush.
                None => {}
            }
        }
    }

    fn has_completions(&mut self) -> bool {
        self.gate.is_open() || !self.early.is_empty() || self.below.has_completions()
    }

    fn cancel(&mut self, slot: u32) {
        let waits = |reported: &&Reported| reported.waits.is_some();
        let Some(&Reported { op, kind, .. }) = self.reported.get(&slot).filter(waits) else {
            return self.below.cancel(slot);
        };
        self.reported.remove(&slot);
        self.waiting.remove(&op);
        self.ram.ended(op, kind, false);
        self.early.push(Completion {
            slot,
            outcome: Outcome::Failed(Errno::CANCELED.raw_os_error()),
        });
    }

    fn arm(&mut self) {
        self.below.arm();
    }

    fn disarm(&mut self) {
        self.below.disarm();
    }

    fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        // The pager, which opens the gate, wakes the owner by its mailbox.
        self.below.wake_fds(fds);
    }
}
