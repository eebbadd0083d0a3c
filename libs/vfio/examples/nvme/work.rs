//! Blocks that are written, read back and verified, many commands at a time.
//!
//! Each slot has a stripe of the namespace, as long as two copies of its largest command. It stamps
//! its buffer, has it written to both places at once (two mappings of the same memory: `shared`
//! makes one of them), reads both back into other pages, and checks every word. A buffer is mapped
//! when its command is started and unmapped when that is complete, before its content is checked.
//! Commands that are found complete together are unmapped together, with one invalidation where the
//! policy has one for each.

use dma_map::{Direction, Mapping};
use std::sync::atomic::Ordering;
use std::time::UNIX_EPOCH;
use vfio::{DmaBuffer, VfioMap};

use crate::nvme::{Completion, Controller, PAGE, READ, WRITE};
use crate::{Core, Failure, Mapper, now};

/// Pages of the largest command.
const MOST_PAGES: usize = 8;
/// Time between two ticks of a mapper, nanoseconds.
const TICK: u64 = 1_000_000;
/// Longest time for which a controller may be silent, nanoseconds.
const PATIENCE: u64 = 60_000_000_000;
/// Words of a page.
const WORDS: usize = PAGE / 8;
/// Each written twice.
const COPIES: usize = 2;

/// Amount of work done.
pub struct Done {
    pub blocks: u64,
    pub commands: u64,
    pub ns: u64,
}

/// Operation that a slot waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Idle,
    Writing,
    Reading,
}

struct Slot {
    stage: Stage,
    /// Of its commands: 1, 2, and more, for which a list is needed.
    pages: usize,
    /// The stamp it wrote last.
    stamp: u64,
    /// The data to write, then two places to read into.
    buffer: DmaBuffer,
    /// Under way: at most one for each copy.
    mappings: [Option<Mapping>; COPIES],
    /// Commands under way, or complete and not yet checked.
    waiting: usize,
}

/// The commands' memory.
pub struct Work<'a> {
    pub core: &'a mut Core,
    mapper: &'a Mapper,
    slots: Vec<Slot>,
    /// Lists of pages, one for each command: the controller reads them.
    lists: DmaBuffer,
    lists_iova: u64,
    /// The last one given. It starts with the time, so that data of an earlier run are not taken
    /// for this one's.
    stamp: u64,
    commands: u64,
    /// Mappings of commands that were found complete together; empty in between.
    ended: Vec<Mapping>,
}

/// A word of the data. Two places have the same only if their stamps are 2^48 apart.
fn word(stamp: u64, at: usize) -> u64 {
    (stamp << 16 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Returns a command's slot, and its copy.
fn place(answer: &Completion) -> (usize, usize) {
    let id = usize::from(answer.id);
    (id / COPIES, id % COPIES)
}

impl<'a> Work<'a> {
    pub fn new(
        map: &VfioMap,
        mapper: &'a Mapper,
        core: &'a mut Core,
        controller: &Controller,
    ) -> Result<Self, Failure> {
        let (pages, most_pages) = controller.pages();
        let stripes = pages / (COPIES * MOST_PAGES) as u64;
        let count = (controller.depth() / COPIES).min(usize::try_from(stripes)?);
        ensure!(count > 0, "the namespace has {pages} pages only");
        let lists = map.allocate(count * COPIES * PAGE)?;
        let mapped = core.map_coherent(&[lists.segment(0, lists.len())], Direction::ToDevice)?;
        let mut slots = Vec::new();
        for at in 0..count {
            slots.push(Slot {
                stage: Stage::Idle,
                pages: 1 + at % MOST_PAGES.min(most_pages),
                stamp: 0,
                buffer: map.allocate((1 + COPIES) * MOST_PAGES * PAGE)?,
                mappings: [None, None],
                waiting: 0,
            });
        }
        let lists_iova = mapped.iova().raw();
        Ok(Self {
            core,
            mapper,
            slots,
            lists,
            lists_iova,
            stamp: UNIX_EPOCH.elapsed()?.as_nanos() as u64,
            commands: 0,
            ended: Vec::new(),
        })
    }

    /// Writes and verifies at least so many blocks.
    pub fn verify(&mut self, controller: &mut Controller, blocks: u64) -> Result<Done, Failure> {
        let (start, before) = (now(), self.commands);
        let (mut verified, mut planned) = (0, 0);
        let (mut ticked, mut heard) = (start, start);
        let mut answers = Vec::new();
        while verified < blocks.max(planned) {
            for at in 0..self.slots.len() {
                if self.slots[at].stage == Stage::Idle && planned < blocks {
                    planned += self.begin(controller, at)?;
                }
            }
            while let Some(answer) = controller.poll()? {
                answers.push(answer);
            }
            self.unmap_answered(&answers)?;
            for answer in answers.drain(..) {
                let tenths = verified * 10 / blocks;
                verified += self.complete(controller, answer)?;
                heard = now();
                if verified * 10 / blocks > tenths {
                    eprintln!("{verified} of {blocks} blocks verified");
                }
            }
            let now = now();
            if now - ticked >= TICK {
                self.mapper.tick(now)?;
                ticked = now;
            }
            ensure!(now - heard < PATIENCE, "the controller is silent");
        }
        let (ns, commands) = (now() - start, self.commands - before);
        Ok(Done {
            blocks: verified,
            commands,
            ns,
        })
    }

    /// Stamps a slot's data and has it written twice. Returns the number of blocks that will be
    /// verified.
    fn begin(&mut self, controller: &mut Controller, at: usize) -> Result<u64, Failure> {
        let slot = &mut self.slots[at];
        self.stamp += 1;
        (slot.stage, slot.stamp) = (Stage::Writing, self.stamp);
        let pages = slot.pages;
        for (index, place) in slot.buffer.words()[..pages * WORDS].iter().enumerate() {
            place.store(word(slot.stamp, index), Ordering::Relaxed);
        }
        for copy in 0..COPIES {
            self.start(controller, at, copy, WRITE)?;
        }
        Ok((pages * COPIES) as u64)
    }

    /// Maps what one copy's command needs, and starts it.
    fn start(
        &mut self,
        controller: &mut Controller,
        at: usize,
        copy: usize,
        opcode: u8,
    ) -> Result<(), Failure> {
        let slot = &mut self.slots[at];
        let (offset, direction) = match opcode {
            WRITE => (0, Direction::ToDevice),
            _ => ((1 + copy) * MOST_PAGES * PAGE, Direction::FromDevice),
        };
        let memory = slot.buffer.segment(offset, slot.pages * PAGE);
        let mapping = self.core.map(&[memory], direction)?;
        let page = |index: usize| mapping.iova().raw() + (index * PAGE) as u64;
        let id = at * COPIES + copy;
        // One page, two, or a list of all but the first.
        let second = match slot.pages {
            1 => 0,
            2 => page(1),
            pages => {
                let list = &self.lists.words()[id * WORDS..];
                for (place, index) in list.iter().zip(1..pages) {
                    place.store(page(index), Ordering::Relaxed);
                }
                self.lists_iova + (id * PAGE) as u64
            }
        };
        let (first, prp) = ((id * MOST_PAGES) as u64, [page(0), second]);
        slot.mappings[copy] = Some(mapping);
        slot.waiting += 1;
        controller.submit(id as u16, opcode, first, slot.pages, prp);
        self.commands += 1;
        Ok(())
    }

    /// Ends the mappings of the commands that are complete according to the controller.
    fn unmap_answered(&mut self, answers: &[Completion]) -> Result<(), Failure> {
        for answer in answers {
            let (at, copy) = place(answer);
            let slot = self.slots.get_mut(at);
            let mapping = slot.and_then(|slot| slot.mappings[copy].take());
            let mapping = mapping.ok_or_else(|| format!("{answer:?} to nothing"))?;
            self.ended.push(mapping);
        }
        Ok(self.core.unmap_many(&mut self.ended)?)
    }

    /// Handles a command that is complete and unmapped. Returns the number of blocks that were
    /// verified.
    fn complete(
        &mut self,
        controller: &mut Controller,
        answer: Completion,
    ) -> Result<u64, Failure> {
        let (at, copy) = place(&answer);
        let slot = &mut self.slots[at];
        ensure!(answer.status == 0, "a command failed: {answer:x?}");
        slot.waiting -= 1;
        let is_last = slot.waiting == 0;
        if slot.stage == Stage::Writing {
            if is_last {
                slot.stage = Stage::Reading;
                for place in &slot.buffer.words()[MOST_PAGES * WORDS..] {
                    // Overwrites what was read before.
                    place.store(u64::MAX, Ordering::Relaxed);
                }
                for copy in 0..COPIES {
                    self.start(controller, at, copy, READ)?;
                }
            }
            return Ok(0);
        }
        let words = &slot.buffer.words()[(1 + copy) * MOST_PAGES * WORDS..];
        for (index, place) in words[..slot.pages * WORDS].iter().enumerate() {
            let (found, expected) = (place.load(Ordering::Relaxed), word(slot.stamp, index));
            ensure!(
                found == expected,
                "{answer:?}, word {index}: {found:#x}, not {expected:#x}"
            );
        }
        if is_last {
            slot.stage = Stage::Idle;
        }
        Ok(slot.pages as u64)
    }
}
