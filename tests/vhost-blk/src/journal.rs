//! The client's knowledge of the disk's contents, from acknowledgements.
//!
//! One request at a time touches a block, so that each read has one right answer. A write that
//! failed leaves a block unknown: it may have happened or not. The journal can be written to a file
//! and read again, so that a later run checks what an earlier one wrote.

use std::fs;
use std::io;
use std::path::Path;

use crate::stamp::{Damage, Stamp, check_zero};

/// Content of a block, as far as was acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Anything.
    Unknown,
    /// Zeroes.
    Zero,
    /// This generation.
    Written(u32),
}

#[derive(Clone, Copy, Debug)]
struct Block {
    content: Content,
    /// The last generation given out, acknowledged or not.
    last: u32,
    is_busy: bool,
}

/// The blocks of one client.
#[derive(Debug)]
pub struct Journal {
    client: u32,
    sectors_per_block: u64,
    blocks: Vec<Block>,
}

impl Journal {
    /// A journal for `blocks` blocks of which nothing is known.
    pub fn new(client: u32, sectors_per_block: u64, blocks: usize) -> Self {
        let block = Block {
            content: Content::Unknown,
            last: 0,
            is_busy: false,
        };
        Self {
            client,
            sectors_per_block,
            blocks: vec![block; blocks],
        }
    }

    /// Blocks.
    pub const fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// A block's first sector.
    pub const fn sector(&self, block: usize) -> u64 {
        block as u64 * self.sectors_per_block
    }

    /// The block that begins at a sector.
    pub const fn block(&self, sector: u64) -> usize {
        (sector / self.sectors_per_block) as usize
    }

    /// Reserves a block for one request; `false` where another has it.
    pub fn take(&mut self, block: usize) -> bool {
        !std::mem::replace(&mut self.blocks[block].is_busy, true)
    }

    /// Gives a block back.
    pub fn release(&mut self, block: usize) {
        self.blocks[block].is_busy = false;
    }

    /// The stamp for the next write.
    pub fn next_stamp(&mut self, block: usize) -> Stamp {
        self.blocks[block].last += 1;
        self.stamp(block, self.blocks[block].last)
    }

    /// A write was acknowledged: the one with the last stamp.
    pub fn written(&mut self, block: usize) {
        self.blocks[block].content = Content::Written(self.blocks[block].last);
    }

    /// A write of zeroes was acknowledged, or something went wrong.
    pub fn set(&mut self, block: usize, content: Content) {
        self.blocks[block].content = content;
    }

    /// Returns the content of a block.
    pub fn content(&self, block: usize) -> Content {
        self.blocks[block].content
    }

    /// Compares what was read.
    ///
    /// # Errors
    /// How it differs.
    pub fn check(&self, block: usize, data: &[u8]) -> Result<(), Damage> {
        match self.blocks[block].content {
            Content::Unknown => Ok(()),
            Content::Zero => check_zero(self.sector(block), data),
            Content::Written(generation) => self.stamp(block, generation).check(data),
        }
    }

    const fn stamp(&self, block: usize, generation: u32) -> Stamp {
        Stamp {
            sector: self.sector(block),
            generation,
            client: self.client,
        }
    }

    /// Writes the journal: a head, then one line per block that is known, `block last content`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut text = format!(
            "vhost-blk {} {} {}\n",
            self.client,
            self.sectors_per_block,
            self.len()
        );
        for (index, block) in self.blocks.iter().enumerate() {
            let content = match block.content {
                _ if block.last == 0 && block.content == Content::Unknown => continue,
                // A request that never came back: it may have happened.
                _ if block.is_busy => "?".to_owned(),
                Content::Unknown => "?".to_owned(),
                Content::Zero => "0".to_owned(),
                Content::Written(generation) => generation.to_string(),
            };
            text += &format!("{index} {} {content}\n", block.last);
        }
        fs::write(path, text)
    }

    /// Reads a journal back; it must be this client's, of the same disk.
    ///
    /// # Errors
    /// The file cannot be read, or is another's.
    pub fn load(&mut self, path: &Path) -> io::Result<()> {
        let text = fs::read_to_string(path)?;
        let bad = |what: &str| io::Error::other(format!("{}: {what}", path.display()));
        let mut lines = text.lines();
        let head = format!(
            "vhost-blk {} {} {}",
            self.client,
            self.sectors_per_block,
            self.len()
        );
        if lines.next() != Some(&head) {
            return Err(bad(
                "the journal of another client, block size or number of blocks",
            ));
        }
        for line in lines {
            let words: Vec<_> = line.split(' ').collect();
            let [index, last, content] = words[..] else {
                return Err(bad(line));
            };
            let (index, last) = match (index.parse::<usize>(), last.parse()) {
                (Ok(index), Ok(last)) if index < self.len() => (index, last),
                _ => return Err(bad(line)),
            };
            let content = match content {
                "?" => Content::Unknown,
                "0" => Content::Zero,
                generation => Content::Written(generation.parse().map_err(|_| bad(line))?),
            };
            self.blocks[index] = Block {
                content,
                last,
                is_busy: false,
            };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_comes_back_from_its_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut journal = Journal::new(7, 8, 10);
        journal.next_stamp(3);
        journal.written(3);
        journal.set(4, Content::Zero);
        journal.next_stamp(5);
        journal.save(file.path()).unwrap();
        let mut again = Journal::new(7, 8, 10);
        again.load(file.path()).unwrap();
        let contents: Vec<_> = (2..6).map(|block| again.content(block)).collect();
        assert_eq!(
            contents,
            [
                Content::Unknown,
                Content::Written(1),
                Content::Zero,
                Content::Unknown
            ]
        );
        // Generation 1 of block 5 was never acknowledged, and may be on the disk: it is not given
        // out again.
        assert_eq!(again.next_stamp(5).generation, 2);
        assert!(Journal::new(8, 8, 10).load(file.path()).is_err());
    }
}
