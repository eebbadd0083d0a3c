//! One chunk: 512 IOVA pages in eight words of 64, each word one size class; and blocks of chunks.
//!
//! Who writes what, by cache line:
//!
//! | line | written by | says |
//! |---|---|---|
//! | `allocated` | owner | pages at which an allocated range starts |
//! | `pinned` | owner | of those, the ones the owner has pinned |
//! | `held` | owner | pages of ranges that are allocated or that the owner keeps ready |
//! | `tag`, `orders`, `open` | owner, at a change of class or owner; strangers set `PENDING` | whose it is, what each word holds |
//! | `claimed` | strangers, by read-modify-write | ranges that a stranger has pinned |
//! | `freed` | strangers, by read-modify-write | ranges that strangers gave back and the owner has not seen yet |
//!
//! The owner's loads and stores of its own lines are relaxed: what it says reaches a stranger with the range itself,
//! by whatever handed the range over.

use alloc::boxed::Box;

use crate::{FreeError, IovaRange};
use lines::{AtomicU8, AtomicU64, Ordering};

/// Words of a chunk. The models of `loom` take two, so that they end.
#[cfg(not(loom))]
pub(super) const WORDS: usize = 8;
#[cfg(loom)]
pub(super) const WORDS: usize = 2;

/// Pages of a word.
pub(super) const WORD_PAGES: u64 = 64;
/// Chunks of a block: what the directory allocates at a time (32 MiB of IOVA, 6 KiB of bookkeeping).
pub(super) const BLOCK_CHUNKS: usize = 16;
/// Pages of a block, as a power of two.
pub(super) const BLOCK_SHIFT: u32 = 13;
/// Largest size class inside a chunk: 256 pages. 512 pages and more are runs of whole chunks.
pub(super) const MAX_ORDER: usize = 8;
/// Every word of a chunk, as bits of [`Chunk::open`].
pub(super) const ALL_WORDS: u8 = ((1_u16 << WORDS) - 1) as u8;

/// What [`Chunk::orders`] says of a word of no class: no range has `2^FREE` pages.
pub(super) const FREE: u8 = 63;
/// A word that belongs to a range of class 7 or 8 which starts in an earlier word.
pub(super) const TAIL: u8 = 62;
/// The first word of a run of whole chunks, whose length [`Chunk::run`] has.
pub(super) const RUN: u8 = 61;

/// In [`Chunk::tag`]: strangers have pinned ranges or given them back since the owner last looked.
pub(super) const PENDING: u64 = 1 << 63;
/// Owner of a chunk that nobody has: free, or an orphan.
pub(super) const NOBODY: u64 = 0;
/// Owner of a chunk out of circulation, or part of a run.
pub(super) const AWAY: u64 = 1 << 62;

/// Bits at which ranges of a class may start in a word.
pub(super) const FULL: [u64; MAX_ORDER + 1] = [
    !0,
    0x5555_5555_5555_5555,
    0x1111_1111_1111_1111,
    0x0101_0101_0101_0101,
    0x0001_0001_0001_0001,
    0x0000_0001_0000_0001,
    1,
    1,
    1,
];

/// How many words a range of this class takes at least.
pub(super) const fn words_of(order: usize) -> usize {
    if order <= 6 { 1 } else { 1 << (order - 6) }
}

#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Chunk {
    pub(super) allocated: Line,
    pub(super) pinned: Line,
    pub(super) meta: Meta,
    pub(super) held: Line,
    pub(super) claimed: Line,
    pub(super) freed: Line,
}

/// Eight words on a cache line of their own.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Line([AtomicU64; WORDS]);

#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Meta {
    /// Who owns the chunk ([`NOBODY`], a core's number plus one, [`AWAY`]), and [`PENDING`].
    pub(super) tag: AtomicU64,
    /// Class of each word.
    pub(super) orders: [AtomicU8; WORDS],
    /// Words of no class, a bit each. Owner only.
    pub(super) open: AtomicU8,
    /// Chunks of the run that starts here; 0 where none does.
    pub(super) run: AtomicU64,
}

impl Line {
    fn new() -> Self {
        Self(core::array::from_fn(|_| AtomicU64::new(0)))
    }

    #[inline]
    pub(super) fn word(&self, word: usize) -> &AtomicU64 {
        #[cfg(not(loom))]
        return &self.0[word % WORDS];
        #[cfg(loom)]
        &self.0[word]
    }

    /// A relaxed load.
    #[inline]
    pub(super) fn get(&self, word: usize) -> u64 {
        self.word(word).load(Ordering::Relaxed)
    }

    /// A relaxed store, of a line that only the caller writes.
    #[inline]
    pub(super) fn set(&self, word: usize, value: u64) {
        self.word(word).store(value, Ordering::Relaxed);
    }
}

impl Chunk {
    fn new() -> Self {
        Self {
            allocated: Line::new(),
            pinned: Line::new(),
            meta: Meta {
                tag: AtomicU64::new(NOBODY),
                orders: core::array::from_fn(|_| AtomicU8::new(FREE)),
                open: AtomicU8::new(ALL_WORDS),
                run: AtomicU64::new(0),
            },
            held: Line::new(),
            claimed: Line::new(),
            freed: Line::new(),
        }
    }

    #[inline]
    pub(super) fn order(&self, word: usize) -> u8 {
        #[cfg(not(loom))]
        let order = &self.meta.orders[word % WORDS];
        #[cfg(loom)]
        let order = &self.meta.orders[word];
        order.load(Ordering::Relaxed)
    }

    pub(super) fn set_order(&self, word: usize, order: u8) {
        self.meta.orders[word].store(order, Ordering::Relaxed);
    }

    pub(super) fn open(&self) -> u8 {
        self.meta.open.load(Ordering::Relaxed)
    }

    pub(super) fn set_open(&self, open: u8) {
        self.meta.open.store(open, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn tag(&self) -> u64 {
        self.meta.tag.load(Ordering::Relaxed)
    }

    /// What is allocated in the word of `range`, if the chunk is tagged `tag` and exactly `range` is allocated there, and
    /// nobody has pinned it or given it back.
    #[inline]
    pub(super) fn own_unmarked(&self, tag: u64, range: IovaRange) -> Option<u64> {
        let page = range.first().raw();
        let (word, bit) = (word_of(page), bit_of(page));
        let now = self.tag();
        if now & !PENDING != tag || range.pages() != 1 << self.order(word) {
            return None;
        }
        let mut marked = self.pinned.get(word);
        if now & PENDING != 0 {
            marked |= self.claimed.get(word) | self.freed.get(word);
        }
        let allocated = self.allocated.get(word);
        (allocated & !marked & bit != 0).then_some(allocated)
    }

    /// Whether another core than that with `tag` owns the chunk.
    #[inline]
    pub(super) fn is_anothers(&self, tag: u64) -> bool {
        let owner = self.tag() & !PENDING;
        owner != tag && owner != NOBODY && owner != AWAY
    }

    /// Whether exactly `range` is allocated, and neither pinned nor given back, in a chunk of another core, as far as can be
    /// seen.
    #[inline]
    pub(super) fn check_foreign(&self, range: IovaRange) -> bool {
        let page = range.first().raw();
        let (word, bit) = (word_of(page), bit_of(page));
        let marked = self.pinned.get(word) | self.claimed.get(word) | self.freed.get(word);
        range.pages() == 1 << self.order(word) && self.allocated.get(word) & !marked & bit != 0
    }

    /// Marks a range as freed, for its owner to take back.
    #[inline]
    pub(super) fn give_back(&self, range: IovaRange) -> Result<(), FreeError> {
        let page = range.first().raw();
        let (word, bit) = (word_of(page), bit_of(page));
        // Release: what we did with the range comes before its next use. Acquire: see `drain`.
        if self.freed.word(word).fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            return Err(FreeError::NotAllocated { range });
        }
        self.notify();
        Ok(())
    }

    /// Tells the owner to look. After the mark itself: see `drain`.
    #[inline]
    pub(super) fn notify(&self) {
        if self.tag() & PENDING == 0 {
            self.meta.tag.fetch_or(PENDING, Ordering::AcqRel);
        }
    }

    /// Gives `words` words from `first` on to a class.
    pub(super) fn assign(&self, first: usize, order: usize) {
        let words = words_of(order);
        self.set_order(first, order as u8);
        for tail in first + 1..first + words {
            self.set_order(tail, TAIL);
        }
        self.set_open(self.open() & !word_bits(first, words));
    }

    /// Takes words back from a class in which nothing is allocated.
    pub(super) fn unassign(&self, first: usize, order: usize) {
        let words = words_of(order);
        debug_assert_eq!(
            self.held.get(first),
            0,
            "something is allocated or kept there"
        );
        for word in first..first + words {
            self.set_order(word, FREE);
        }
        self.set_open(self.open() | word_bits(first, words));
    }

    /// The first aligned group of open words that holds a range of this class.
    pub(super) fn find_open(&self, order: usize) -> Option<usize> {
        let words = words_of(order);
        let open = self.open();
        (0..WORDS).step_by(words).find(|first| {
            let bits = word_bits(*first, words);
            open & bits == bits
        })
    }

    /// Nothing is allocated or cached in it.
    pub(super) fn is_empty(&self) -> bool {
        self.open() == ALL_WORDS
    }

    /// Makes it as new, for its next owner. Strangers who still believe in an old range may have left marks.
    pub(super) fn wipe(&self) {
        for word in 0..WORDS {
            self.allocated.set(word, 0);
            self.pinned.set(word, 0);
            self.held.set(word, 0);
            self.set_order(word, FREE);
            // Read-modify-write: the next stranger's mark reads from it, and so sees what was written before.
            self.claimed.word(word).swap(0, Ordering::AcqRel);
            self.freed.word(word).swap(0, Ordering::AcqRel);
        }
        self.set_open(ALL_WORDS);
        self.meta.run.store(0, Ordering::Relaxed);
    }
}

/// `words` bits from `first` on. Under loom a chunk may be smaller than the largest class.
fn word_bits(first: usize, words: usize) -> u8 {
    ((((1_u32 << words) - 1) << first) & 0xff) as u8
}

/// Sixteen chunks, made when the first of them is used.
#[derive(Debug)]
pub(super) struct Block {
    chunks: [Chunk; BLOCK_CHUNKS],
}

impl Block {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self {
            chunks: core::array::from_fn(|_| Chunk::new()),
        })
    }

    /// The chunk that holds this page of the block.
    #[inline]
    pub(super) fn chunk(&self, page: u64) -> &Chunk {
        &self.chunks[(page >> 9) as usize % BLOCK_CHUNKS]
    }
}

/// The word of its chunk in which a page lies.
#[inline]
pub(super) const fn word_of(page: u64) -> usize {
    (page >> 6 & 7) as usize
}

/// First page of the word in which a page lies.
#[inline]
pub(super) const fn word_base(page: u64) -> u64 {
    page & !(WORD_PAGES - 1)
}

/// The bit of a page in its word.
#[inline]
pub(super) const fn bit_of(page: u64) -> u64 {
    1 << (page & (WORD_PAGES - 1))
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Chunk>() == 384);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn starts_of_each_class_are_as_many_as_fit() {
        for (order, full) in FULL.iter().enumerate().take(7) {
            assert_eq!(full.count_ones(), 64 >> order);
            assert!((0..64).all(|bit| full >> bit & 1 == u64::from(bit % (1 << order) == 0)));
        }
    }

    #[test]
    fn large_classes_take_aligned_groups_of_words() {
        let block = Block::new();
        let chunk = block.chunk(0);
        chunk.assign(1, 0);
        assert_eq!(chunk.find_open(7), Some(2));
        chunk.assign(2, 7);
        assert_eq!((chunk.order(2), chunk.order(3)), (7, TAIL));
        assert_eq!(chunk.find_open(8), Some(4));
        assert_eq!(chunk.find_open(0), Some(0));
        chunk.unassign(2, 7);
        chunk.unassign(1, 0);
        assert!(chunk.is_empty());
    }
}
