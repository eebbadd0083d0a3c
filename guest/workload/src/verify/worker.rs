//! One thread: its pages, its blocks, what each must hold, and what is done to them.
//!
//! Each operation does the thing, changes the model alike, and mostly compares at once; what it does not compare is
//! compared by later ones, and at the end. Every comparison of a page, a block, or part of one, is a verified operation.

use std::io::{PipeWriter, Write};
use std::ops::Range;
use std::sync::atomic::Ordering;

use super::content::{Base, Content, Found, Patch, Place, Record, Wrong};
use super::kinds::{Counts, Kind, Phase};
use super::shared::{Shared, Way};
use crate::BLOCK;
use crate::child::{Child, Ended};
use crate::device::{Buffer, Trim};
use crate::memory::{Huge, Means, Memory, PAGE};
use crate::pattern::Random;

/// Pages of a thread at least, and blocks: more than any operation takes.
pub(super) const LEAST: usize = 64;

/// Pages, and blocks, that come up more often than others, and so have more of a past.
const HOT: usize = 48;

/// Blocks that the thread reads and writes without a page of its own, at most.
const BUFFER: usize = 32;

/// Pages that a child looks at, and those of them that it overwrites.
const SHARE: usize = 48;
const SHARE_CHANGED: usize = 8;

/// What a thread is given, counted over all threads.
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
    /// Of each page and each block of the part.
    pages: Vec<Record>,
    blocks: Vec<Record>,
    /// How many pages hold zeros.
    empty: usize,
    /// Where the wanted content of a page is computed, and which it has now.
    wanted: Buffer,
    wanted_of: Content,
    /// Blocks that are no page's, and a page more, so that they need not begin at one.
    buffer: Buffer,
    phase: Phase,
    /// Where the next pages and blocks in order begin.
    next_page: usize,
    next_block: usize,
    kind: Kind,
    /// Number of the operation, from 1.
    operation: u32,
    /// The last patch's serial; threads begin far apart.
    patch: u32,
    verified: u64,
    counts: Counts,
}

type Done = Result<usize, String>;

impl<'a> Worker<'a> {
    /// # Errors
    /// The system gives no memory.
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

    /// What was done so far.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Whatever the time: each kind of operation once, in the order of the phases, and every page filled.
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

    /// Goes through one phase, or less if `is_over` by then.
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

    /// What comes next in this phase.
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

    /// One operation. What a device cannot is not counted.
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
            Kind::WriteCached => self.write(Way::Cached),
            Kind::WriteDirect => self.write(Way::Direct),
            Kind::ReadCached => self.read(Way::Cached),
            Kind::ReadDirect => self.read(Way::Direct),
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

    /// Compares everything there is.
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
        for way in [Way::Cached, Way::Direct] {
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

    /// Adds what was verified since the last time to the sum of all threads.
    fn publish(&mut self) {
        // Relaxed: a number for a line of progress, and for the end, after the threads are joined.
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

    fn way(&mut self) -> Way {
        if self.one_in(2) {
            Way::Cached
        } else {
            Way::Direct
        }
    }

    fn means(&mut self) -> Means {
        Means::ALL[self.below(Means::ALL.len())]
    }

    /// One to `max` pages of one chunk: the next in order where memory is filled, else any.
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

    /// One to `max` blocks, at most [`LEAST`]: the next in order where memory is filled, else any.
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

    /// The number of a block on the device.
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

    /// Content that only this page has ever had.
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
    fn check_blocks(&mut self, blocks: Range<usize>, way: Way) -> Result<(), String> {
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
        way: Way,
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

    /// What is told of a wrong place: what, where, wanted, found, and what was done to it.
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

    // ---- memory ----

    fn fill_page(&mut self, page: usize) {
        let content = self.new_of_page(page);
        content.render(self.shared.seed, self.memory.bytes_mut(page..page + 1));
        self.put_page(page, content);
    }

    /// Has the next pages in order be some that were emptied, if any are.
    fn skip_to_empty(&mut self) {
        if self.empty == 0 {
            return;
        }
        let is_empty = |page: &usize| self.pages[*page].content() == Content::ZERO;
        let mut in_order = (self.next_page..self.part.pages).chain(0..self.next_page);
        self.next_page = in_order.find(is_empty).expect("as counted");
    }

    fn fill(&mut self) -> Done {
        if self.phase == Phase::Fill {
            self.skip_to_empty();
        }
        let pages = self.some_pages(32);
        pages.clone().for_each(|page| self.fill_page(page));
        Ok(pages.len())
    }

    fn check(&mut self) -> Done {
        let start = self.any_page();
        let len = 1 + self.below(16);
        let pages = start..(start + len).min(self.part.pages);
        self.check_pages(pages.clone())?;
        Ok(pages.len())
    }

    /// A patch of some bytes on `content`; it begins and ends at a multiple of `align`, a power of two.
    fn new_patch(&mut self, content: Content, align: usize) -> Patch {
        let units = PAGE / align;
        let start = self.below(units);
        // Short ones as often as long ones.
        let most = [1, 8, 64, units][self.below(4)].min(units - start);
        let end = start + 1 + self.below(most);
        self.patch += 1;
        let patch = Patch::over(content.patch, start * align, end * align, self.patch);
        let (start, end) = (patch.start() / align, patch.end().div_ceil(align));
        Patch::over(None, start * align, end * align, self.patch)
    }

    fn patch(&mut self) -> Done {
        let page = self.any_page();
        let mut content = self.pages[page].content();
        let patch = self.new_patch(content, 1);
        content.patch = Some(patch);
        let bytes = self.memory.bytes_mut(page..page + 1);
        patch.render(self.shared.seed, &mut bytes[patch.start()..patch.end()]);
        self.put_page(page, content);
        self.check_page(page)?;
        Ok(1)
    }

    fn straddle(&mut self) -> Done {
        let pages = self.some_pages(4);
        let (first, last) = (pages.start, pages.end - 1);
        let (start, end) = (self.below(PAGE), 1 + self.below(PAGE));
        let mut len = 0;
        let mut at = 0;
        for page in pages.clone() {
            // A page alone is overwritten from `start` to its end.
            let (start, end) = match page {
                page if page == first => (start, PAGE),
                page if page == last => (0, end),
                _ => (0, PAGE),
            };
            let mut content = self.pages[page].content();
            self.patch += 1;
            let patch = Patch::over(content.patch, start, end, self.patch);
            content.patch = Some(patch);
            if page == first {
                at = patch.start();
            }
            let size = patch.end() - patch.start();
            let data = &mut self.buffer.bytes_mut()[len..len + size];
            patch.render(self.shared.seed, data);
            len += size;
            self.put_page(page, content);
        }
        let means = self.means();
        let data = &self.buffer.bytes()[..len];
        self.memory.store(pages.clone(), at, data, means);
        self.check_pages(pages.clone())?;
        Ok(pages.len())
    }

    fn zero(&mut self) -> Done {
        let pages = self.some_pages(16);
        let means = self.means();
        self.memory.set(pages.clone(), 0, means);
        self.emptied(pages)
    }

    /// Pages read as zeros from now on: all of them, or one, are looked at.
    fn emptied(&mut self, pages: Range<usize>) -> Done {
        self.put_pages(pages.clone(), Content::ZERO);
        if self.one_in(2) {
            self.check_pages(pages.clone())?;
        } else {
            let page = pages.start + self.below(pages.len());
            self.check_page(page)?;
        }
        Ok(pages.len())
    }

    fn set(&mut self) -> Done {
        let pages = self.some_pages(8);
        let place = self.page_place(pages.start);
        let stamp = self.pages[pages.start].stamp(place);
        let seed = self.shared.seed;
        let means = self.means();
        let content = if means != Means::RepBytes && self.one_in(2) {
            self.memory.set(pages.clone(), stamp.word(seed), means);
            Base::Words(stamp)
        } else {
            let byte = stamp.byte(seed);
            match means {
                Means::Library => self.memory.bytes_mut(pages.clone()).fill(byte),
                _ => self
                    .memory
                    .set(pages.clone(), u64::from_le_bytes([byte; 8]), means),
            }
            Base::Bytes(stamp)
        };
        self.put_pages(pages.clone(), Content::whole(content));
        self.sometimes_check(pages.clone())?;
        Ok(pages.len())
    }

    /// Looks at once, or leaves it to whoever comes by.
    fn sometimes_check(&mut self, pages: Range<usize>) -> Result<(), String> {
        if self.one_in(2) {
            self.check_pages(pages)?;
        }
        Ok(())
    }

    fn copy(&mut self) -> Done {
        let from = self.some_pages(8);
        let mut to = self.any_page();
        if from.start < to + from.len() && to < from.end {
            // Never onto itself: to what comes behind it, if need be at the beginning.
            to = from.end % self.part.pages;
        }
        let len = from.len().min(self.memory.end_of_chunk(to) - to);
        let (from, to) = (from.start..from.start + len, to..to + len);
        let means = self.means();
        self.memory.copy(from.clone(), to.start, means);
        for (from, to) in from.zip(to.clone()) {
            self.put_page(to, self.pages[from].content());
        }
        self.sometimes_check(to)?;
        Ok(len)
    }

    fn give_back(&mut self) -> Done {
        let pages = self.some_pages(64);
        self.memory
            .give_back(pages.clone())
            .map_err(|error| format!("MADV_DONTNEED: {error}"))?;
        self.emptied(pages)
    }

    fn remap(&mut self) -> Done {
        let mut pages = self.some_pages(128);
        if self.one_in(2) {
            self.memory.replace(pages.clone())
        } else {
            let huge = if self.one_in(2) {
                Huge::Never
            } else {
                Huge::Maybe
            };
            pages = self.memory.chunk_of(pages.start);
            self.memory.remap(pages.start, huge)
        }
        .map_err(|error| format!("mmap of {} pages: {error}", pages.len()))?;
        self.emptied(pages)
    }

    fn fork(&mut self) -> Done {
        let shared = self.shared;
        let _one = shared.children.lock().expect("who forks does not panic");
        let share: Vec<(usize, Content)> = (0..SHARE)
            .map(|_| {
                let page = self.any_page();
                (page, self.pages[page].content())
            })
            .collect();
        let started = {
            let _none = shared
                .direct_requests
                .write()
                .expect("who requests does not panic");
            Child::start(|say| self.look_as_child(&share, say))
        };
        let child = started.map_err(|error| format!("no child process: {error}"))?;
        // While the child looks at what they were.
        for (page, _) in share.iter().step_by(2) {
            self.fill_page(*page);
            self.check_page(*page)?;
        }
        match child.wait() {
            Ok((Ended::Status(0), _)) => {}
            Ok((Ended::Status(1), said)) => return Err(self.complain_of_child(&share, &said)),
            Ok((Ended::Killed(signal), _)) => {
                return Err(format!(
                    "a child was killed by signal {signal}: memory is short; take a smaller --mib"
                ));
            }
            Ok((ended, _)) => return Err(format!("a child ended with {ended:?}")),
            Err(error) => return Err(format!("no word of a child: {error}")),
        }
        self.verified += (SHARE + SHARE_CHANGED) as u64;
        for (page, _) in &share {
            self.check_page(*page)?;
        }
        Ok(SHARE)
    }

    /// In the child, which neither allocates nor locks: says the number of a wrong page, and its content.
    fn look_as_child(&mut self, share: &[(usize, Content)], say: &mut PipeWriter) -> u8 {
        let seed = self.shared.seed;
        for (number, (page, content)) in (0_u32..).zip(share) {
            self.want(*content);
            let found = self.memory.bytes(*page..page + 1);
            if found != self.wanted.bytes() {
                // Nobody to tell, if that fails.
                let _ = say
                    .write_all(&number.to_le_bytes())
                    .and_then(|()| say.write_all(found));
                return 1;
            }
        }
        for (page, _) in &share[..SHARE_CHANGED] {
            let bytes = self.memory.bytes_mut(*page..page + 1);
            child_content(*page).render(seed, bytes);
        }
        for (number, (page, _)) in (0_u32..).zip(&share[..SHARE_CHANGED]) {
            let wanted = self.wanted.bytes_mut();
            child_content(*page).render(seed, wanted);
            let found = self.memory.bytes(*page..page + 1);
            if found != wanted {
                let number = number + SHARE as u32;
                let _ = say
                    .write_all(&number.to_le_bytes())
                    .and_then(|()| say.write_all(found));
                return 1;
            }
        }
        0
    }

    /// What the parent makes of it.
    fn complain_of_child(&self, share: &[(usize, Content)], said: &[u8]) -> String {
        let seed = self.shared.seed;
        let (number, found) = match said.split_first_chunk::<4>() {
            Some((number, found)) if found.len() == PAGE => (u32::from_le_bytes(*number), found),
            _ => return "a page is wrong in a child, which could not say which".into(),
        };
        let (page, content, whose) = match (number as usize).checked_sub(SHARE) {
            Some(index) => {
                let page = share[index].0;
                (page, child_content(page), " of the child itself")
            }
            None => {
                let (page, content) = share[number as usize];
                (page, content, "")
            }
        };
        let mut wanted = vec![0; PAGE];
        content.render(seed, &mut wanted);
        let Some(wrong) = Wrong::between(&wanted, found, 0) else {
            return format!("{}: wrong in a child, and right now", self.page_place(page));
        };
        format!(
            "{}, in a child process: {wrong}; wanted {content}{whose}, found {}; its past in the parent: {}; \
             seen by fork in operation {} of thread {}, seed {seed}",
            self.page_place(page),
            Found::identify(found, seed),
            self.pages[page].past(),
            self.operation,
            self.part.thread,
        )
    }

    // ---- the device ----

    /// Writes pages to as many blocks from `block` on.
    fn store(&mut self, pages: Range<usize>, block: usize, way: Way) -> Result<(), String> {
        let at = self.number(block) * BLOCK as u64;
        self.shared
            .write(way, at, self.memory.bytes(pages.clone()))?;
        for (page, block) in pages.zip(block..) {
            self.put_block(block, self.pages[page].content());
        }
        Ok(())
    }

    /// Reads blocks into as many pages from `page` on.
    fn load(&mut self, blocks: Range<usize>, page: usize, way: Way) -> Result<(), String> {
        let at = self.number(blocks.start) * BLOCK as u64;
        let bytes = self.memory.bytes_mut(page..page + blocks.len());
        self.shared.read(way, at, bytes)?;
        for (block, page) in blocks.zip(page..) {
            self.put_page(page, self.blocks[block].content());
        }
        Ok(())
    }

    /// Writes up to [`BUFFER`] blocks anew, from memory that is no page's.
    fn renew(&mut self, blocks: Range<usize>, way: Way) -> Result<(), String> {
        let at = self.number(blocks.start) * BLOCK as u64;
        for (index, block) in blocks.clone().enumerate() {
            let content = self.new_of_block(block);
            let data = &mut self.buffer.bytes_mut()[index * BLOCK..][..BLOCK];
            content.render(self.shared.seed, data);
            self.put_block(block, content);
        }
        let data = &self.buffer.bytes()[..blocks.len() * BLOCK];
        self.shared.write(way, at, data)
    }

    /// Writes those blocks whose content nobody knows.
    fn make_known(&mut self, blocks: Range<usize>) -> Result<(), String> {
        for block in blocks {
            if !self.blocks[block].content().is_known() {
                let way = self.way();
                self.renew(block..block + 1, way)?;
            }
        }
        Ok(())
    }

    /// One to `max` pages, and as many blocks.
    fn some_of_both(&mut self, max: usize) -> (Range<usize>, Range<usize>) {
        let (pages, blocks) = (self.some_pages(max), self.some_blocks(max));
        let len = pages.len().min(blocks.len());
        // What one of them has more of is next.
        self.next_page = (pages.start + len) % self.part.pages;
        self.next_block = (blocks.start + len) % self.part.blocks;
        (
            pages.start..pages.start + len,
            blocks.start..blocks.start + len,
        )
    }

    /// Whether requests by this way can be made and counted as such.
    fn can(&self, way: Way) -> bool {
        way == Way::Cached || self.shared.has_direct()
    }

    fn write(&mut self, way: Way) -> Done {
        if !self.can(way) {
            return Ok(0);
        }
        let (pages, blocks) = self.some_of_both(16);
        // Mostly what only these blocks have ever had; else what the pages have come to hold.
        if !self.one_in(4) {
            for (page, block) in pages.clone().zip(blocks.clone()) {
                let content = self.new_of_block(block);
                content.render(self.shared.seed, self.memory.bytes_mut(page..page + 1));
                self.put_page(page, content);
            }
        }
        self.store(pages, blocks.start, way)?;
        if self.one_in(2) {
            let way = self.way();
            self.check_blocks(blocks.clone(), way)?;
        }
        Ok(blocks.len())
    }

    fn read(&mut self, way: Way) -> Done {
        if !self.can(way) {
            return Ok(0);
        }
        let (pages, blocks) = self.some_of_both(16);
        self.make_known(blocks.clone())?;
        self.load(blocks, pages.start, way)?;
        self.sometimes_check(pages.clone())?;
        Ok(pages.len())
    }

    fn read_twice(&mut self) -> Done {
        let blocks = self.some_blocks(8);
        self.make_known(blocks.clone())?;
        let ways = if self.one_in(2) {
            [Way::Cached, Way::Direct]
        } else {
            [Way::Direct, Way::Cached]
        };
        for way in ways {
            self.check_blocks(blocks.clone(), way)?;
        }
        Ok(blocks.len())
    }

    /// A way for part of a block, and the multiple at which it begins and ends.
    fn way_of_part(&mut self) -> (Way, usize) {
        match self.way() {
            Way::Direct if self.shared.has_direct() && self.shared.sector < PAGE => {
                (Way::Direct, self.shared.sector)
            }
            _ => (Way::Cached, 1),
        }
    }

    fn read_part(&mut self) -> Done {
        let block = self.any_block();
        self.make_known(block..block + 1)?;
        let (way, align) = self.way_of_part();
        // As a patch would lie, and at any place of the buffer.
        let part = self.new_patch(Content::ZERO, align);
        let part = part.start()..part.end();
        let place = self.below(PAGE / align) * align;
        let at = self.number(block) * BLOCK as u64 + part.start as u64;
        let data = &mut self.buffer.bytes_mut()[place..place + part.len()];
        self.shared.read(way, at, data)?;
        self.check_in_buffer(block, part, place, way)?;
        Ok(1)
    }

    fn write_part(&mut self) -> Done {
        let block = self.any_block();
        self.make_known(block..block + 1)?;
        let (way, align) = self.way_of_part();
        let mut content = self.blocks[block].content();
        let patch = self.new_patch(content, align);
        content.patch = Some(patch);
        let place = self.below(PAGE / align) * align;
        let at = self.number(block) * BLOCK as u64 + patch.start() as u64;
        let data = &mut self.buffer.bytes_mut()[place..place + patch.end() - patch.start()];
        patch.render(self.shared.seed, data);
        self.shared.write(way, at, data)?;
        self.put_block(block, content);
        let way = self.way();
        self.check_blocks(block..block + 1, way)?;
        Ok(1)
    }

    fn read_many(&mut self) -> Done {
        let block = self.any_block();
        self.make_known(block..block + 1)?;
        let count = 8 + self.below(LEAST - 8);
        let pages: Vec<usize> = (0..count).map(|_| self.any_page()).collect();
        for page in &pages {
            let way = self.way();
            self.load(block..block + 1, *page, way)?;
        }
        for page in pages {
            self.check_page(page)?;
        }
        Ok(count)
    }

    fn write_twice(&mut self) -> Done {
        let page = self.any_page();
        let blocks = [self.any_block(), self.any_block()];
        for block in blocks {
            let way = self.way();
            self.store(page..page + 1, block, way)?;
        }
        for block in blocks {
            let way = self.way();
            self.check_blocks(block..block + 1, way)?;
        }
        Ok(2)
    }

    fn relay(&mut self) -> Done {
        let (page, from, to) = (self.any_page(), self.any_block(), self.any_block());
        self.make_known(from..from + 1)?;
        self.load(from..from + 1, page, Way::Direct)?;
        self.store(page..page + 1, to, Way::Direct)?;
        self.check_page(page)?;
        self.check_blocks(to..to + 1, Way::Direct)?;
        Ok(2)
    }

    fn replace(&mut self) -> Done {
        let block = self.any_block();
        self.make_known(block..block + 1)?;
        let pages: [usize; 4] = std::array::from_fn(|_| self.any_page());
        for page in pages {
            self.load(block..block + 1, page, Way::Direct)?;
        }
        let way = self.way();
        self.renew(block..block + 1, way)?;
        for page in pages {
            self.check_page(page)?;
        }
        let way = self.way();
        self.check_blocks(block..block + 1, way)?;
        Ok(pages.len())
    }

    fn discard(&mut self) -> Done {
        let blocks = self.some_blocks(32);
        self.trim(blocks, Trim::Discard, Content::UNKNOWN)
    }

    fn zero_out(&mut self) -> Done {
        let blocks = self.some_blocks(BUFFER);
        let how = if self.one_in(2) {
            Trim::Zero
        } else {
            Trim::ZeroAndUnmap
        };
        let done = self.trim(blocks.clone(), how, Content::ZERO)?;
        if done > 0 && self.one_in(2) {
            let way = self.way();
            self.check_blocks(blocks, way)?;
        }
        Ok(done)
    }

    fn trim(&mut self, blocks: Range<usize>, how: Trim, after: Content) -> Done {
        let (number, count) = (self.number(blocks.start), blocks.len());
        if !self.shared.trim(number, count as u64, how)? {
            return Ok(0);
        }
        for block in blocks {
            self.put_block(block, after);
        }
        Ok(count)
    }

    fn forget_blocks(&mut self, blocks: Range<usize>) -> Result<(), String> {
        let number = self.number(blocks.start);
        self.shared.forget(number, blocks.len() as u64)
    }

    fn forget(&mut self) -> Done {
        let blocks = self.some_blocks(BUFFER);
        self.forget_blocks(blocks.clone())?;
        self.check_blocks(blocks.clone(), Way::Cached)?;
        Ok(blocks.len())
    }

    fn drop_caches(&mut self) -> Done {
        if !self.shared.drop_caches()? {
            return Ok(0);
        }
        let blocks = self.some_blocks(BUFFER);
        self.check_blocks(blocks.clone(), Way::Cached)?;
        Ok(blocks.len())
    }
}

/// What a child makes of a page that it overwrites.
fn child_content(page: usize) -> Content {
    let patch = Patch::over(None, 0, PAGE, u32::MAX - page as u32);
    let base = Base::Zero;
    Content {
        base,
        patch: Some(patch),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;

    use super::*;

    /// Two chunks of memory, so that there is an end between them.
    const PAGES: usize = 600;
    const BLOCKS: usize = 96;
    /// Blocks before those of the worker.
    const SKIP: u32 = 4;

    struct Image(PathBuf);

    impl Drop for Image {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    /// A worker with an image of its own, and the image, to change behind its back.
    fn with_worker(name: &str, test: impl FnOnce(&mut Worker<'_>, &File)) {
        let name = format!("verify-{name}-{}", std::process::id());
        let image = Image(std::env::temp_dir().join(name));
        let mut options = File::options();
        options.create_new(true).read(true).write(true);
        let file = options.open(&image.0).unwrap();
        file.set_len((u64::from(SKIP) + BLOCKS as u64) * BLOCK as u64)
            .unwrap();
        let shared = Shared::open(&image.0, 77).unwrap();
        let part = Part {
            thread: 0,
            first_page: 10_000,
            pages: PAGES,
            first_block: SKIP,
            blocks: BLOCKS,
        };
        let mut worker = Worker::new(&shared, part).unwrap();
        worker.phase = Phase::Fragment;
        worker.operation = 1;
        test(&mut worker, &file);
    }

    /// The complaint begins with `begin`, and has each of `parts`.
    #[track_caller]
    fn assert_complains(outcome: Result<(), String>, begin: &str, parts: &[&str]) {
        let text = outcome.unwrap_err();
        assert!(text.starts_with(begin), "{text}");
        for part in parts {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
    }

    #[test]
    fn each_kind_alone_keeps_to_the_model() {
        with_worker("kinds", |worker, _| {
            for kind in Kind::ALL {
                for phase in Phase::ALL {
                    worker.phase = phase;
                    for _ in 0..20 {
                        worker.operate(kind).unwrap();
                    }
                }
                worker.check_all().unwrap();
                let can = worker.counts().of(kind).operations > 0;
                // A file is not discarded, and its run drops no caches.
                let is_devices = matches!(kind, Kind::Discard | Kind::DropCaches);
                let may_lack = matches!(kind, Kind::WriteDirect | Kind::ReadDirect | Kind::ZeroOut);
                assert!(can != is_devices || may_lack, "{kind:?}");
            }
        });
    }

    #[test]
    fn a_run_stays_in_its_part() {
        with_worker("part", |worker, file| {
            let before = vec![0xa5; SKIP as usize * BLOCK];
            file.write_all_at(&before, 0).unwrap();
            worker.begin().unwrap();
            for phase in Phase::ALL {
                worker.work(phase, &|| false).unwrap();
            }
            let mut after = vec![0; before.len()];
            file.read_exact_at(&mut after, 0).unwrap();
            assert_eq!(before, after);
            let len = file.metadata().unwrap().len();
            assert_eq!(len, (u64::from(SKIP) + BLOCKS as u64) * BLOCK as u64);
        });
    }

    #[test]
    fn a_flipped_byte_of_a_block_is_found_either_way() {
        with_worker("flipped", |worker, file| {
            worker.renew(0..8, Way::Cached).unwrap();
            let at = (u64::from(SKIP) + 5) * BLOCK as u64 + 99;
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 4], at).unwrap();
            for (way, seen) in [(Way::Cached, "page cache"), (Way::Direct, "direct I/O")] {
                let wrong = format!(
                    "byte 0x63: wanted {:#04x}, found {:#04x}",
                    byte[0],
                    byte[0] ^ 4
                );
                assert_complains(
                    worker.check_blocks(0..8, way),
                    "block 9, ",
                    &[seen, &wrong, "(1 bytes differ", "right in part", "seed 77"],
                );
            }
        });
    }

    #[test]
    fn a_lost_write_and_a_misplaced_one_are_told_apart() {
        with_worker("lost", |worker, file| {
            let mut old = vec![0; 8 * BLOCK];
            worker.renew(0..8, Way::Cached).unwrap();
            file.read_exact_at(&mut old, u64::from(SKIP) * BLOCK as u64)
                .unwrap();
            worker.renew(0..8, Way::Direct).unwrap();
            let put = |to: u64, from: usize| {
                let block = &old[from * BLOCK..][..BLOCK];
                file.write_all_at(block, (u64::from(SKIP) + to) * BLOCK as u64)
                    .unwrap();
            };
            put(2, 2);
            assert_complains(
                worker.check_blocks(0..8, Way::Cached),
                "block 6, ",
                &["block 6 in generation 1 (stale: what it held 1 changes ago)"],
            );
            put(2, 3);
            assert_complains(
                worker.check_blocks(0..8, Way::Direct),
                "block 6, ",
                &[
                    "wanted block 6 in generation 2",
                    "found block 7 in generation 1 (foreign)",
                ],
            );
        });
    }

    #[test]
    fn the_last_pass_comes_by_the_last_of_all() {
        with_worker("last", |worker, file| {
            let byte = |worker: &mut Worker<'_>, value| {
                worker.memory.bytes_mut(PAGES - 1..PAGES)[PAGE - 1] = value;
            };
            worker.renew(BLOCKS - 1..BLOCKS, Way::Cached).unwrap();
            worker.check_all().unwrap();
            byte(worker, 1);
            assert_complains(worker.check_all(), "memory page 10599", &["byte 0xfff"]);
            byte(worker, 0);
            let last = (u64::from(SKIP) + BLOCKS as u64) * BLOCK as u64 - 1;
            let mut sum = [0];
            file.read_exact_at(&mut sum, last).unwrap();
            file.write_all_at(&[!sum[0]], last).unwrap();
            assert_complains(worker.check_all(), "block 99", &["byte 0xfff"]);
        });
    }

    #[test]
    fn wrong_memory_is_found_and_named() {
        with_worker("memory", |worker, _| {
            (0..4).for_each(|page| worker.fill_page(page));
            worker.check_pages(0..4).unwrap();
            worker.fill_page(2);
            // As if the page had come back as it was.
            let stale = Content::whole(Base::Sealed(super::super::content::Stamp {
                origin: Place::page(10_002),
                generation: 1,
            }));
            stale.render(77, worker.memory.bytes_mut(2..3));
            assert_complains(
                worker.check_pages(0..4),
                "memory page 10002, in memory: byte 0x10: wanted 0x02, found 0x01",
                &[
                    "stale",
                    "fill in operation 1, fill in operation 1, last seen right",
                ],
            );
            worker.memory.copy(1..2, 2, Means::Library);
            assert_complains(worker.check_page(2), "memory page 10002", &["foreign"]);
            worker.memory.give_back(2..3).unwrap();
            assert_complains(worker.check_page(2), "memory page 10002", &["found zeros"]);
            worker.memory.bytes_mut(400..401)[PAGE - 1] = 1;
            assert_complains(worker.check_page(400), "memory page 10400", &["byte 0xfff"]);
        });
    }

    #[test]
    fn a_child_that_sees_a_wrong_page_says_which() {
        with_worker("child", |worker, _| {
            (0..8).for_each(|page| worker.fill_page(page));
            let share: Vec<_> = (0..8)
                .map(|page| (page, worker.pages[page].content()))
                .collect();
            worker.memory.bytes_mut(3..4)[200] ^= 0xff;
            let child = Child::start(|say| worker.look_as_child(&share, say)).unwrap();
            let (ended, said) = child.wait().unwrap();
            assert_eq!(ended, Ended::Status(1));
            let text = worker.complain_of_child(&share, &said);
            assert!(
                text.starts_with("memory page 10003, in a child process: byte 0xc8: "),
                "{text}"
            );
            let mut own = (SHARE as u32 + 5).to_le_bytes().to_vec();
            own.resize(4 + PAGE, 0);
            let text = worker.complain_of_child(&share, &own);
            assert!(
                text.starts_with("memory page 10005, in a child") && text.contains("itself"),
                "{text}"
            );
            worker.memory.bytes_mut(3..4)[200] ^= 0xff;
            let child = Child::start(|say| worker.look_as_child(&share, say)).unwrap();
            assert_eq!(child.wait().unwrap().0, Ended::Status(0));
            worker.check_pages(0..8).unwrap();
        });
    }

    #[test]
    fn without_direct_io_all_goes_through_the_page_cache() {
        with_worker("cached", |worker, _| {
            let shared = worker.shared.without_direct();
            let mut worker = Worker::new(&shared, worker.part).unwrap();
            worker.begin().unwrap();
            worker.work(Phase::Fragment, &|| false).unwrap();
            worker.check_all().unwrap();
            assert_eq!(worker.counts().of(Kind::WriteDirect).operations, 0);
            assert!(worker.counts().of(Kind::Relay).operations > 0);
        });
    }
}
