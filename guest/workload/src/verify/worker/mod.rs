//! One thread: its pages, its blocks, their expected content, and the operations on them.
//!
//! Each operation changes pages or blocks, changes the model alike, and mostly compares at once.
//! The content that it does not compare is compared by later operations, and at the end. Every
//! comparison of a page, a block, or part of one is a verified operation.

mod child;
mod device;
mod memory;

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::content::{Base, Content, Found, Place, Record, Wrong};
use super::kinds::{Counts, Kind, Phase};
use super::shared::{IoPath, Shared};
use crate::BLOCK;
use crate::device::Buffer;
use crate::memory::{Huge, Means, Memory, PAGE};
use crate::pattern::Random;

/// Smallest number of pages, and of blocks, of a thread: more than any operation takes.
pub(super) const LEAST: usize = 64;

/// Number of pages, and of blocks, that are chosen more often than others and so have a longer
/// past.
const HOT: usize = 48;

/// Largest number of blocks that the thread reads and writes by its buffer, without a page.
const BUFFER: usize = 32;

/// Pages and blocks of a thread, numbered over all threads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub thread: u32,
    pub first_page: u32,
    pub pages: usize,
    pub first_block: u32,
    pub blocks: usize,
}

pub(super) struct Worker<'a> {
    shared: &'a Shared,
    part: Part,
    random: Random,
    memory: Memory,
    /// Record of each page and each block of the part.
    pages: Vec<Record>,
    blocks: Vec<Record>,
    /// Number of pages that hold zeros.
    empty: usize,
    /// Buffer in which the wanted content of a page is computed, and the content that it has now.
    wanted: Buffer,
    wanted_of: Content,
    /// Buffer for blocks that have no page, a page longer, so that they need not begin at a page.
    buffer: Buffer,
    phase: Phase,
    /// First of the next pages and blocks in order.
    next_page: usize,
    next_block: usize,
    kind: Kind,
    /// Number of the operation, from 1.
    operation: u32,
    /// Serial number of the last patch; those of different threads are far apart.
    patch: u32,
    verified: u64,
    counts: Counts,
}

type Done = Result<usize, String>;

impl<'a> Worker<'a> {
    /// # Errors
    /// The system cannot provide the memory.
    pub fn new(shared: &'a Shared, part: Part) -> Result<Self, String> {
        let memory = Memory::new(part.pages, Huge::Never)
            .map_err(|error| format!("no address space for {} pages: {error}", part.pages))?;
        Ok(Self {
            shared,
            part,
            random: Random::new(shared.seed ^ u64::from(part.thread) << 32),
            memory,
            pages: vec![Record::new(Content::ZERO); part.pages],
            blocks: vec![Record::new(Content::UNKNOWN); part.blocks],
            empty: part.pages,
            wanted: Buffer::new(PAGE),
            wanted_of: Content::ZERO,
            buffer: Buffer::new((BUFFER + 1) * BLOCK),
            phase: Phase::Fill,
            next_page: 0,
            next_block: 0,
            kind: Kind::Fill,
            operation: 0,
            patch: part.thread << 27,
            verified: 0,
            counts: Counts::default(),
        })
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Does each kind of operation once, in the order of the phases, and fills every page, without
    /// regard to the time.
    pub fn begin(&mut self) -> Result<(), String> {
        for phase in Phase::ALL {
            self.phase = phase;
            for (kind, _) in phase.kinds() {
                self.operate(*kind)?;
            }
        }
        self.phase = Phase::Fill;
        while self.empty > 0 && !self.shared.is_stopped() {
            self.operate(Kind::Fill)?;
        }
        Ok(())
    }

    /// Executes one phase, or less if `is_over` returns true before its end.
    pub fn work(&mut self, phase: Phase, is_over: &dyn Fn() -> bool) -> Result<(), String> {
        self.phase = phase;
        for _ in 0..phase.length() {
            if is_over() {
                break;
            }
            let kind = self.choose();
            self.operate(kind)?;
        }
        Ok(())
    }

    /// Chooses the next operation of this phase.
    fn choose(&mut self) -> Kind {
        let kinds = self.phase.kinds();
        let mut left = self
            .random
            .below(kinds.iter().map(|(_, often)| often).sum());
        for (kind, often) in kinds {
            match left.checked_sub(*often) {
                Some(rest) => left = rest,
                None => return *kind,
            }
        }
        unreachable!("it was below the sum")
    }

    /// Does one operation. One that the device cannot do is not counted.
    pub fn operate(&mut self, kind: Kind) -> Result<(), String> {
        if self.shared.is_stopped() {
            return Ok(());
        }
        self.operation = self.operation.wrapping_add(1);
        self.kind = kind;
        let pages = match kind {
            Kind::Fill => self.fill(),
            Kind::Check => self.check(),
            Kind::Patch => self.patch(),
            Kind::Straddle => self.straddle(),
            Kind::Zero => self.zero(),
            Kind::Set => self.set(),
            Kind::Copy => self.copy(),
            Kind::GiveBack => self.give_back(),
            Kind::Remap => self.remap(),
            Kind::Fork => self.fork(),
            Kind::WriteCached => self.write(IoPath::Cached),
            Kind::WriteDirect => self.write(IoPath::Direct),
            Kind::ReadCached => self.read(IoPath::Cached),
            Kind::ReadDirect => self.read(IoPath::Direct),
            Kind::ReadTwice => self.read_twice(),
            Kind::ReadPart => self.read_part(),
            Kind::WritePart => self.write_part(),
            Kind::ReadMany => self.read_many(),
            Kind::WriteTwice => self.write_twice(),
            Kind::Relay => self.relay(),
            Kind::Replace => self.replace(),
            Kind::Sync => self.shared.sync().map(|()| 1),
            Kind::Discard => self.discard(),
            Kind::ZeroOut => self.zero_out(),
            Kind::Forget => self.forget(),
            Kind::DropCaches => self.drop_caches(),
        }?;
        if pages > 0 {
            self.counts.add(kind, pages);
        }
        self.publish();
        Ok(())
    }

    /// Compares all pages and blocks.
    pub fn check_all(&mut self) -> Result<(), String> {
        self.operation = self.operation.wrapping_add(1);
        self.kind = Kind::Check;
        for page in 0..self.part.pages {
            if self.shared.is_stopped() {
                return Ok(());
            }
            self.check_page(page)?;
            self.publish();
        }
        let blocks = 0..self.part.blocks;
        self.forget_blocks(blocks.clone())?;
        for way in [IoPath::Cached, IoPath::Direct] {
            for start in blocks.clone().step_by(BUFFER) {
                if self.shared.is_stopped() {
                    return Ok(());
                }
                self.check_blocks(start..(start + BUFFER).min(blocks.end), way)?;
                self.publish();
            }
        }
        Ok(())
    }

    /// Adds the comparisons since the last call to the sum of all threads.
    fn publish(&mut self) {
        // Relaxed: the number is for a progress report, and for the end, after the threads are
        // joined.
        let verified = std::mem::take(&mut self.verified);
        self.shared
            .operations
            .fetch_add(verified, Ordering::Relaxed);
    }

    // ---- choices ----

    fn one_in(&mut self, n: u64) -> bool {
        self.random.below(n) == 0
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.random.below(limit as u64)).expect("below a usize")
    }

    fn way(&mut self) -> IoPath {
        if self.one_in(2) {
            IoPath::Cached
        } else {
            IoPath::Direct
        }
    }

    fn means(&mut self) -> Means {
        Means::ALL[self.below(Means::ALL.len())]
    }

    /// Chooses one to `max` pages of one chunk: the next in order while memory is filled, else any.
    fn some_pages(&mut self, max: usize) -> Range<usize> {
        let start = match self.phase {
            Phase::Fill => self.next_page,
            _ => self.any_page(),
        };
        let len = 1 + self.below(max);
        let end = (start + len).min(self.memory.end_of_chunk(start));
        self.next_page = end % self.part.pages;
        start..end
    }

    fn any_page(&mut self) -> usize {
        let among = if self.one_in(4) { HOT } else { self.part.pages };
        self.below(among)
    }

    /// Chooses one to `max` blocks, at most [`LEAST`]: the next in order while memory is filled,
    /// else any.
    fn some_blocks(&mut self, max: usize) -> Range<usize> {
        let len = 1 + self.below(max);
        let start = match self.phase {
            Phase::Fill => self.next_block,
            _ => self.any_block(),
        };
        let end = (start + len).min(self.part.blocks);
        self.next_block = end % self.part.blocks;
        start..end
    }

    fn any_block(&mut self) -> usize {
        let among = if self.one_in(2) {
            HOT
        } else {
            self.part.blocks
        };
        self.below(among)
    }

    // ---- the model ----

    fn page_place(&self, page: usize) -> Place {
        Place::page(self.part.first_page + u32::try_from(page).expect("a page of the part"))
    }

    fn block_place(&self, block: usize) -> Place {
        Place::block(self.part.first_block + u32::try_from(block).expect("a block of the part"))
    }

    /// Returns the number of a block on the device.
    fn number(&self, block: usize) -> u64 {
        u64::from(self.part.first_block) + block as u64
    }

    fn put_page(&mut self, page: usize, content: Content) {
        self.empty -= usize::from(self.pages[page].content() == Content::ZERO);
        self.empty += usize::from(content == Content::ZERO);
        self.pages[page].put(content, self.operation, self.kind);
    }

    fn put_block(&mut self, block: usize, content: Content) {
        self.blocks[block].put(content, self.operation, self.kind);
    }

    fn put_pages(&mut self, pages: Range<usize>, content: Content) {
        for page in pages {
            self.put_page(page, content);
        }
    }

    /// Makes content that only this page has ever had.
    fn new_of_page(&mut self, page: usize) -> Content {
        let place = self.page_place(page);
        Content::whole(Base::Sealed(self.pages[page].stamp(place)))
    }

    fn new_of_block(&mut self, block: usize) -> Content {
        let place = self.block_place(block);
        Content::whole(Base::Sealed(self.blocks[block].stamp(place)))
    }

    /// Computes `content`.
    fn want(&mut self, content: Content) {
        if self.wanted_of != content {
            content.render(self.shared.seed, self.wanted.bytes_mut());
            self.wanted_of = content;
        }
    }

    // ---- comparing ----

    fn check_page(&mut self, page: usize) -> Result<(), String> {
        self.want(self.pages[page].content());
        let found = self.memory.bytes(page..page + 1);
        if let Some(wrong) = Wrong::between(self.wanted.bytes(), found, 0) {
            let found = Found::identify(found, self.shared.seed);
            let (place, record) = (self.page_place(page), &self.pages[page]);
            return Err(self.complain(place, record, "in memory", &wrong, Some(found)));
        }
        self.pages[page].saw(self.operation);
        self.verified += 1;
        Ok(())
    }

    fn check_pages(&mut self, pages: Range<usize>) -> Result<(), String> {
        pages.into_iter().try_for_each(|page| self.check_page(page))
    }

    /// Reads up to [`BUFFER`] blocks, and compares those whose content is known.
    fn check_blocks(&mut self, blocks: Range<usize>, way: IoPath) -> Result<(), String> {
        let at = self.number(blocks.start) * BLOCK as u64;
        let data = &mut self.buffer.bytes_mut()[..blocks.len() * BLOCK];
        self.shared.read(way, at, data)?;
        for (index, block) in blocks.enumerate() {
            if self.blocks[block].content().is_known() {
                self.check_in_buffer(block, 0..PAGE, index * BLOCK, way)?;
            }
        }
        Ok(())
    }

    /// Compares a part of a block, which lies in the buffer at `at`.
    fn check_in_buffer(
        &mut self,
        block: usize,
        part: Range<usize>,
        at: usize,
        way: IoPath,
    ) -> Result<(), String> {
        self.want(self.blocks[block].content());
        let found = &self.buffer.bytes()[at..at + part.len()];
        let is_whole = part.len() == PAGE;
        if let Some(wrong) = Wrong::between(&self.wanted.bytes()[part.clone()], found, part.start) {
            let found = is_whole.then(|| Found::identify(found, self.shared.seed));
            let (place, record) = (self.block_place(block), &self.blocks[block]);
            return Err(self.complain(place, record, way.name(), &wrong, found));
        }
        if is_whole {
            self.blocks[block].saw(self.operation);
        }
        self.verified += 1;
        Ok(())
    }

    /// Describes a wrong place: place, wanted and found content, and the operations on it.
    fn complain(
        &self,
        place: Place,
        record: &Record,
        seen: &str,
        wrong: &Wrong,
        found: Option<Found>,
    ) -> String {
        let (kind, operation) = (self.kind.name(), self.operation);
        let (thread, seed) = (self.part.thread, self.shared.seed);
        let wanted = record.content();
        let found = found.map_or(String::new(), |found| {
            format!(", found {found} ({})", record.relation(place, found))
        });
        format!(
            "{place}, {seen}: {wrong}; wanted {wanted}{found}; its past: {}; \
             seen by {kind} in operation {operation} of thread {thread}, seed {seed}",
            record.past()
        )
    }
}

#[cfg(test)]
mod tests;
