//! Pages that each block backs: chains through the pages' own entries, in buckets by a hash of the
//! block.

use super::entry::{Backing, Block, Entry, Page};

const END: u32 = u32::MAX;

/// Most pages that one block backs; further ones are treated as not backed. A guest may read one
/// block into all of its memory, and then write it.
pub const SHARERS: usize = 8;

/// Heads of the chains: 2 bytes a page at most.
#[derive(Debug)]
pub struct Blocks {
    heads: Box<[u32]>,
    /// Number of pages in all chains.
    linked: usize,
}

impl Blocks {
    pub(super) fn new(pages: usize) -> Self {
        let buckets = (pages / 4).next_power_of_two();
        Self {
            heads: vec![END; buckets].into(),
            linked: 0,
        }
    }

    /// Returns the bytes that are allocated.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.heads)
    }

    /// Returns the number of pages that are backed by blocks.
    pub fn linked(&self) -> usize {
        self.linked
    }

    /// Returns whether no page is backed by a block.
    pub fn is_empty(&self) -> bool {
        self.linked == 0
    }

    fn bucket(&self, block: Block) -> usize {
        // Runs of blocks fill the buckets one by one; disks lie apart.
        let mixed = block.number.wrapping_add(u32::from(block.disk) << 24);
        let mixed = mixed ^ mixed >> self.heads.len().trailing_zeros().min(31);
        mixed as usize & (self.heads.len() - 1)
    }

    /// Returns the pages that are backed by `block`, at most [`SHARERS`].
    pub(super) fn pages(&self, entries: &[Entry], block: Block) -> impl Iterator<Item = Page> {
        let mut at = self.heads[self.bucket(block)];
        std::iter::from_fn(move || {
            while at != END {
                let page = Page(at);
                let entry = &entries[at as usize];
                at = entry.chain();
                if entry.backing() == Backing::Block(block) {
                    return Some(page);
                }
            }
            None
        })
    }

    /// Makes `block` back `page`, whose content is nowhere else; returns false if it backs
    /// [`SHARERS`] pages already.
    pub(super) fn link(&mut self, entries: &mut [Entry], page: Page, block: Block) -> bool {
        if self.pages(entries, block).count() >= SHARERS {
            return false;
        }
        let bucket = self.bucket(block);
        let entry = &mut entries[page.0 as usize];
        debug_assert_eq!(entry.backing(), Backing::Nowhere);
        entry.set_chain(std::mem::replace(&mut self.heads[bucket], page.0));
        entry.set_backing(Backing::Block(block));
        self.linked += 1;
        true
    }

    /// Makes `page`, which is backed by `block`, not backed any more.
    pub(super) fn unlink(&mut self, entries: &mut [Entry], page: Page, block: Block) {
        let next = entries[page.0 as usize].set_chain(END);
        let head = &mut self.heads[self.bucket(block)];
        if *head == page.0 {
            *head = next;
        } else {
            let mut at = *head as usize;
            while entries[at].chain() != page.0 {
                at = entries[at].chain() as usize;
            }
            entries[at].set_chain(next);
        }
        entries[page.0 as usize].set_backing(Backing::Nowhere);
        self.linked -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use seeded::Random;

    /// Compares the chains with a set of pairs, with blocks that share buckets.
    #[test]
    fn chains_hold_what_a_set_holds() {
        const PAGES: u32 = 64;
        let mut random = Random::new(7);
        let mut entries = vec![Entry::NEW; PAGES as usize];
        let mut blocks = Blocks::new(PAGES as usize);
        let mut model: BTreeSet<(Block, Page)> = BTreeSet::new();
        for _ in 0..100_000 {
            let page = Page(random.below(u64::from(PAGES)) as u32);
            let number = random.below(4) as u32 * 16 + random.below(3) as u32;
            let disk = random.below(2) as u8;
            let block = Block { disk, number };
            let stands_for = model.iter().find(|(_, p)| *p == page).copied();
            match stands_for {
                Some((block, page)) => {
                    blocks.unlink(&mut entries, page, block);
                    model.remove(&(block, page));
                }
                None => {
                    let others = model.iter().filter(|(b, _)| *b == block).count();
                    let linked = blocks.link(&mut entries, page, block);
                    assert_eq!(linked, others < SHARERS);
                    if linked {
                        model.insert((block, page));
                    }
                }
            }
            let mut found: Vec<Page> = blocks.pages(&entries, block).collect();
            found.sort();
            let wanted = model.iter().filter(|(b, _)| *b == block);
            let wanted: Vec<Page> = wanted.map(|(_, page)| *page).collect();
            assert_eq!(found, wanted);
            assert_eq!(blocks.is_empty(), model.is_empty());
            assert_eq!(blocks.linked(), model.len());
        }
    }
}
