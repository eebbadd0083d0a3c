//! Page I/O: the pager's reads and writes of the store and the disks' images, a request for each
//! run of adjacent pages.

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::os::fd::RawFd;

use guest_mem::{KeepAlive, PAGE_SIZE};
use vio::blk::{self, BlockIo, Completion, Outcome, Piece};

use crate::ram::SwappedRam;
use crate::report::Traffic;
use crate::residency::{BATCH, Backing, Errno, Page, Slot};

/// Most pages of one request.
const RUN: usize = BATCH;

/// Operation on a page, or on free slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageOp {
    /// Read its content.
    Fetch(Page, Backing),
    /// Write it to its slot.
    Save(Page, Slot),
    /// Discard so many free slots from this one on.
    Trim(Slot, u32),
}

impl PageOp {
    fn page(self) -> Option<Page> {
        match self {
            Self::Fetch(page, _) | Self::Save(page, _) => Some(page),
            Self::Trim(..) => None,
        }
    }

    /// Returns the target of the operation, and the block there.
    fn target(self) -> (Target, u32) {
        match self {
            Self::Save(_, slot) => (Target::StoreWrite, slot.0),
            Self::Trim(slot, count) => (Target::StoreTrim(count), slot.0),
            Self::Fetch(_, Backing::Slot(slot)) => (Target::StoreRead, slot.0),
            Self::Fetch(_, Backing::Block(block)) => (Target::Image(block.disk), block.number),
            Self::Fetch(_, Backing::Nowhere) => unreachable!("zeroes are not fetched"),
        }
    }
}

/// File and direction of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    StoreRead,
    StoreWrite,
    /// So many slots. A trim is not joined with another: there is one at a time.
    StoreTrim(u32),
    Image(u8),
}

/// Run of pages, ascending in the file.
struct Run {
    target: Target,
    /// First block of the file.
    first: u32,
    ops: Vec<PageOp>,
}

/// A file that has pages' content.
struct BackingFile {
    io: Box<dyn BlockIo>,
    free: Vec<u32>,
    running: HashMap<u32, Run>,
    /// Runs for which there was no free request slot.
    queued: VecDeque<Run>,
}

impl BackingFile {
    fn new(mut io: Box<dyn BlockIo>, keep: KeepAlive) -> Self {
        io.attach(keep);
        Self {
            free: (0..io.depth()).rev().collect(),
            io,
            running: HashMap::new(),
            queued: VecDeque::new(),
        }
    }

    fn submit(&mut self, run: Run, ram: &SwappedRam) {
        let Some(slot) = self.free.pop() else {
            return self.queued.push_back(run);
        };
        let mut pieces: Vec<Piece> = Vec::new();
        for op in &run.ops {
            let Some(page) = op.page() else {
                continue;
            };
            let hva = ram.hva(page);
            match pieces.last_mut() {
                Some(last) if last.hva.checked_add(u64::from(last.len)) == Some(hva) => {
                    last.len += PAGE_SIZE as u32;
                }
                _ => pieces.push(Piece {
                    hva,
                    len: PAGE_SIZE as u32,
                }),
            }
        }
        let offset = u64::from(run.first) * PAGE_SIZE;
        let len = (run.ops.len() * PAGE_SIZE as usize) as u32;
        let op = match run.target {
            Target::StoreWrite => blk::Op::Write {
                offset,
                len,
                durable: false,
            },
            Target::StoreTrim(count) => blk::Op::Discard {
                offset,
                len: u64::from(count) * PAGE_SIZE,
            },
            Target::StoreRead | Target::Image(_) => blk::Op::Read { offset, len },
        };
        self.running.insert(slot, run);
        self.io.submit(slot, op, &pieces);
    }
}

/// Store and images. All calls come from the pager's thread.
pub(crate) struct PageIo {
    store: BackingFile,
    images: Vec<BackingFile>,
    /// Operations to start next, not sorted yet.
    waiting: Vec<PageOp>,
    completions: Vec<Completion>,
    traffic: Traffic,
}

impl PageIo {
    /// Creates it for the store and the images of the disks, by their numbers.
    pub fn new(store: Box<dyn BlockIo>, images: Vec<Box<dyn BlockIo>>, keep: &KeepAlive) -> Self {
        let images = images.into_iter();
        Self {
            store: BackingFile::new(store, keep.clone()),
            images: images
                .map(|io| BackingFile::new(io, keep.clone()))
                .collect(),
            waiting: Vec::new(),
            completions: Vec::new(),
            traffic: Traffic::default(),
        }
    }

    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Adds an operation for the next [`start`](Self::start).
    pub fn push(&mut self, op: PageOp) {
        self.waiting.push(op);
    }

    /// Returns whether an operation is waiting or under way.
    pub fn is_busy(&self) -> bool {
        let is_busy = |backing: &BackingFile| !backing.running.is_empty();
        !self.waiting.is_empty() || is_busy(&self.store) || self.images.iter().any(is_busy)
    }

    /// Starts the waiting operations; adjacent ones are joined.
    pub fn start(&mut self, ram: &SwappedRam) {
        if self.waiting.is_empty() {
            return;
        }
        let mut ops = mem::take(&mut self.waiting);
        ops.sort_by_key(|op| op.target());
        let follows = |a: &PageOp, b: &PageOp| {
            let ((target, a), (other, b)) = (a.target(), b.target());
            target == other && a.checked_add(1) == Some(b)
        };
        for side_by_side in ops.chunk_by(follows) {
            for run in side_by_side.chunks(RUN) {
                let (target, first) = run[0].target();
                let (backing, carried) = match target {
                    Target::StoreRead => (&mut self.store, &mut self.traffic.store_reads),
                    Target::StoreWrite => (&mut self.store, &mut self.traffic.store_writes),
                    Target::StoreTrim(_) => (&mut self.store, &mut self.traffic.store_trims),
                    Target::Image(disk) => (
                        &mut self.images[usize::from(disk)],
                        &mut self.traffic.image_reads,
                    ),
                };
                carried.add(match target {
                    Target::StoreTrim(count) => count as usize,
                    _ => run.len(),
                });
                let run = Run {
                    target,
                    first,
                    ops: run.to_vec(),
                };
                backing.submit(run, ram);
            }
        }
        ops.clear();
        self.waiting = ops;
        self.flush();
    }

    fn backings(&mut self) -> impl Iterator<Item = &mut BackingFile> {
        std::iter::once(&mut self.store).chain(&mut self.images)
    }

    fn flush(&mut self) {
        for backing in self
            .backings()
            .filter(|backing| !backing.running.is_empty())
        {
            backing.io.flush();
        }
    }

    /// Returns the operations that have ended, each with its result.
    pub fn poll(&mut self, ram: &SwappedRam) -> Vec<(PageOp, Result<(), Errno>)> {
        let mut ended = Vec::new();
        let mut completions = mem::take(&mut self.completions);
        for backing in self
            .backings()
            .filter(|backing| !backing.running.is_empty())
        {
            backing.io.poll(&mut completions);
            for completion in completions.drain(..) {
                let outcome = match completion.outcome {
                    Outcome::Done => Ok(()),
                    // A resource that the host lacks pauses the guest, as an error does, and the
                    // operation is retried.
                    Outcome::Failed(errno) | Outcome::NotBegun(errno) => Err(Errno(errno)),
                    // The request continues.
                    Outcome::NotCancellable => continue,
                };
                if let Some(run) = backing.running.remove(&completion.slot) {
                    backing.free.push(completion.slot);
                    ended.extend(run.ops.into_iter().map(|op| (op, outcome)));
                }
                if let Some(run) = backing.queued.pop_front() {
                    backing.submit(run, ram);
                    backing.io.flush();
                }
            }
        }
        self.completions = completions;
        ended
    }

    /// Enables wake-ups by [`wake_fds`](Self::wake_fds).
    pub fn arm(&mut self) {
        self.backings().for_each(|backing| backing.io.arm());
    }

    /// Returns whether an operation has ended, after [`arm`](Self::arm).
    pub fn has_ended(&mut self) -> bool {
        let mut busy = self
            .backings()
            .filter(|backing| !backing.running.is_empty());
        busy.any(|backing| backing.io.has_completions())
    }

    /// Reverts [`arm`](Self::arm).
    pub fn disarm(&mut self) {
        self.backings().for_each(|backing| backing.io.disarm());
    }

    /// Appends the descriptors that become readable, once armed, when an operation has ended.
    pub fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        let all = std::iter::once(&self.store).chain(&self.images);
        all.for_each(|backing| backing.io.wake_fds(fds));
    }
}
