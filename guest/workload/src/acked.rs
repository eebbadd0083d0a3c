//! Acknowledged writes of a disk, logged on a second disk. After the guest was cut off at any
//! point, a check of the first disk against this log finds every acknowledged write that is
//! missing.
//!
//! Each of [`WRITERS`] writers owns [`OWNED`] blocks of the disk and has one write at a time under
//! way. Before each write it stores a [`Record`], one block of the log: the write that is about to
//! be made, and the generation of each block that has been acknowledged so far. A block of the disk
//! therefore holds the content of its last acknowledged write; only the block of the write under
//! way may hold that write's content instead. Generations grow, so the check detects a write that
//! was lost, was torn, or was repeated after a later one.
//!
//! A writer has two slots in the log and uses them in turn: wherever the guest is cut off, one of
//! them is whole.
//!
//! | bytes | of a record |
//! |---|---|
//! | 0..8 | `EXITLESA` |
//! | 8..16 | writer, little-endian |
//! | 16..24 | number of the record |
//! | 24..32 | seed of the run |
//! | 32..36, 36..40 | the write under way: which of its blocks, which generation |
//! | 40..296 | generation of each block: 0 where nothing was acknowledged |
//! | 4088..4096 | checksum of the rest |

use crate::pattern::Checksum;
use crate::{BLOCK, block};

/// Writers of a disk.
pub const WRITERS: u64 = 4;
/// Blocks of each.
pub const OWNED: usize = 64;
/// Blocks of the disk in use.
pub const BLOCKS: u64 = WRITERS * OWNED as u64;
/// Blocks of the log.
pub const LOG_BLOCKS: u64 = WRITERS * 2;

const MAGIC: &[u8; 8] = b"EXITLESA";
const GENERATIONS_AT: usize = 40;
const SUM_AT: usize = BLOCK - 8;

/// A write that is under way, or is next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Next {
    /// Index among the writer's blocks, below [`OWNED`].
    pub index: usize,
    /// Generation of the content that is written.
    pub generation: u32,
}

/// State of one writer: the generation acknowledged for each of its blocks, and its next write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    writer: u64,
    number: u64,
    generations: [u32; OWNED],
    next: Next,
}

impl Record {
    /// Creates the record of a writer that has not written anything.
    #[must_use]
    pub fn new(writer: u64) -> Self {
        let next = Next {
            index: 0,
            generation: 1,
        };
        Self {
            writer,
            number: 0,
            generations: [0; OWNED],
            next,
        }
    }

    /// Returns the write under way.
    #[must_use]
    pub fn next(&self) -> Next {
        self.next
    }

    /// Returns whether a write of this block was ever acknowledged.
    #[must_use]
    pub fn is_written(&self, index: usize) -> bool {
        self.generations[index] > 0
    }

    /// Returns the number on the disk of this block of the writer.
    #[must_use]
    pub fn block(&self, index: usize) -> u64 {
        index as u64 * WRITERS + self.writer
    }

    /// Notes that the write under way has been acknowledged; the next is of the block `index`.
    pub fn acknowledge(&mut self, index: usize) {
        self.generations[self.next.index] = self.next.generation;
        self.give_up(index);
    }

    /// Notes that the write under way is abandoned; the next is of the block `index`.
    pub fn give_up(&mut self, index: usize) {
        assert!(index < OWNED, "a block of the writer's");
        self.number += 1;
        self.next = Next {
            index,
            generation: self.next.generation + 1,
        };
    }

    /// Returns the block of the log that the record goes to.
    #[must_use]
    pub fn place(&self) -> u64 {
        self.writer * 2 + self.number % 2
    }

    /// Encodes the record into `data`.
    ///
    /// # Panics
    /// If `data` is not one [`BLOCK`].
    pub fn seal(&self, data: &mut [u8], seed: u64) {
        assert_eq!(data.len(), BLOCK, "one block");
        data.fill(0);
        data[..8].copy_from_slice(MAGIC);
        for (at, field) in [(8, self.writer), (16, self.number), (24, seed)] {
            data[at..at + 8].copy_from_slice(&field.to_le_bytes());
        }
        let index = u32::try_from(self.next.index).expect("below OWNED");
        let words = [index, self.next.generation].into_iter();
        for (word, place) in words
            .chain(self.generations)
            .zip(data[32..SUM_AT].chunks_exact_mut(4))
        {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let sum = Checksum::of(&data[..SUM_AT]);
        data[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
    }

    /// Decodes the record in a block of the log; `None` if it holds no record of this seed.
    fn read(data: &[u8], seed: u64) -> Option<Self> {
        let long = |at: usize| Some(u64::from_le_bytes(data.get(at..at + 8)?.try_into().ok()?));
        let word = |at: usize| Some(u32::from_le_bytes(data.get(at..at + 4)?.try_into().ok()?));
        if !data.starts_with(MAGIC)
            || long(24)? != seed
            || long(SUM_AT)? != Checksum::of(&data[..SUM_AT])
        {
            return None;
        }
        let mut generations = [0; OWNED];
        for (index, generation) in generations.iter_mut().enumerate() {
            *generation = word(GENERATIONS_AT + index * 4)?;
        }
        let next = Next {
            index: usize::try_from(word(32)?).ok()?,
            generation: word(36)?,
        };
        Some(Self {
            writer: long(8)?,
            number: long(16)?,
            generations,
            next,
        })
    }

    /// Returns the newest record of `writer` in the log.
    ///
    /// # Errors
    /// The log has no record of this writer.
    pub fn latest(log: &[u8], writer: u64, seed: u64) -> Result<Self, String> {
        let places = log.chunks_exact(BLOCK);
        let records = places.filter_map(|data| Self::read(data, seed));
        let own = records.filter(|record| record.writer == writer);
        own.max_by_key(|record| record.number)
            .ok_or_else(|| format!("writer {writer} has left no record"))
    }

    /// Checks that `data` is the content of this block's last acknowledged write, or zeroes if
    /// there was none.
    ///
    /// # Errors
    /// A description of the difference.
    pub fn check(&self, index: usize, data: &[u8], seed: u64) -> Result<(), String> {
        let number = self.block(index);
        match self.generations[index] {
            0 if data.iter().all(|byte| *byte == 0) => Ok(()),
            0 => Err(format!("block {number}: was never written")),
            generation => block::check(data, number, generation.into(), seed)
                .map_err(|damage| damage.to_string()),
        }
    }

    /// Returns whether `data` is the content of the write under way.
    #[must_use]
    pub fn is_next(&self, index: usize, data: &[u8], seed: u64) -> bool {
        let Next {
            index: next,
            generation,
        } = self.next;
        index == next && block::check(data, self.block(index), generation.into(), seed).is_ok()
    }

    /// Returns the number of acknowledged writes since the first record.
    fn writes(&self) -> u64 {
        u64::from(self.next.generation - 1)
    }
}

/// Checks `disk` against the log of the run `seed`. Returns the number of acknowledged writes.
///
/// # Errors
/// A description of each block that differs.
pub fn judge(disk: &[u8], log: &[u8], seed: u64) -> Result<u64, String> {
    let (mut writes, mut wrong) = (0, Vec::new());
    for writer in 0..WRITERS {
        let record = Record::latest(log, writer, seed)?;
        writes += record.writes();
        for index in 0..OWNED {
            let at = usize::try_from(record.block(index)).unwrap_or(usize::MAX) * BLOCK;
            let Some(data) = disk.get(at..at + BLOCK) else {
                return Err(format!("the disk has no block {}", record.block(index)));
            };
            if let Err(damage) = record.check(index, data, seed)
                && !record.is_next(index, data, seed)
            {
                wrong.push(damage);
            }
        }
    }
    match wrong.is_empty() {
        true => Ok(writes),
        false => Err(wrong.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u64 = 8;

    /// A disk and its log, as its writers do it.
    struct Run {
        disk: Vec<u8>,
        log: Vec<u8>,
        records: Vec<Record>,
    }

    impl Run {
        fn new() -> Self {
            let mut run = Self {
                disk: vec![0; BLOCKS as usize * BLOCK],
                log: vec![0; LOG_BLOCKS as usize * BLOCK],
                records: (0..WRITERS).map(Record::new).collect(),
            };
            (0..WRITERS as usize).for_each(|writer| run.put_down(writer));
            run
        }

        fn put_down(&mut self, writer: usize) {
            let at = self.records[writer].place() as usize * BLOCK;
            self.records[writer].seal(&mut self.log[at..at + BLOCK], SEED);
        }

        /// The write under way reaches the disk.
        fn do_write(&mut self, writer: usize) {
            let record = &self.records[writer];
            let Next { index, generation } = record.next();
            let number = record.block(index);
            let data = &mut self.disk[number as usize * BLOCK..][..BLOCK];
            block::seal(data, number, generation.into(), SEED);
        }

        fn acknowledge(&mut self, writer: usize, next: usize) {
            self.records[writer].acknowledge(next);
            self.put_down(writer);
        }

        fn judge(&self) -> Result<u64, String> {
            judge(&self.disk, &self.log, SEED)
        }
    }

    #[test]
    fn pending_write_may_be_applied_or_missing() {
        let mut run = Run::new();
        assert_eq!(run.judge(), Ok(0));
        run.do_write(1);
        assert_eq!(run.judge(), Ok(0));
        run.acknowledge(1, 5);
        assert_eq!(run.judge(), Ok(1));
        run.do_write(1);
        assert_eq!(run.judge(), Ok(1));
    }

    #[test]
    fn an_acknowledged_write_that_was_never_done_is_found() {
        let mut run = Run::new();
        run.acknowledge(2, 5);
        assert!(run.judge().is_err());
    }

    #[test]
    fn an_older_write_done_once_more_is_found() {
        let mut run = Run::new();
        run.do_write(0);
        run.acknowledge(0, 0);
        let old = run.disk[..BLOCK].to_vec();
        run.do_write(0);
        run.acknowledge(0, 3);
        assert_eq!(run.judge(), Ok(2));
        run.disk[..BLOCK].copy_from_slice(&old);
        assert!(run.judge().is_err());
    }

    #[test]
    fn a_write_that_was_given_up_and_comes_late_is_found() {
        let mut run = Run::new();
        let mut late = Run::new();
        late.do_write(3);
        run.records[3].give_up(0);
        run.put_down(3);
        assert_eq!(run.judge(), Ok(1));
        run.disk = late.disk;
        assert!(run.judge().is_err());
    }

    #[test]
    fn half_a_write_and_a_stray_one_are_found() {
        let mut run = Run::new();
        run.do_write(0);
        run.disk[100] ^= 1;
        assert!(run.judge().is_err());
        let mut run = Run::new();
        run.disk[70 * BLOCK] = 1;
        assert!(run.judge().is_err());
    }

    #[test]
    fn a_record_cut_off_leaves_the_one_before() {
        let mut run = Run::new();
        run.do_write(0);
        run.acknowledge(0, 1);
        run.do_write(0);
        // The record of the second write, torn: the first record is in force.
        let at = (run.records[0].place() + 1) as usize % 2 * BLOCK;
        let mut torn = vec![0; BLOCK];
        run.records[0].acknowledge(2);
        run.records[0].seal(&mut torn, SEED);
        run.log[at..at + 2000].copy_from_slice(&torn[..2000]);
        assert_eq!(run.judge(), Ok(1));
        run.log.fill(0);
        assert!(run.judge().is_err());
    }
}
