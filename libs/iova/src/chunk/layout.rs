//! One chunk: 512 IOVA pages in eight words of 64, each word one size class; and blocks of chunks.
//!
//! Who writes what, by cache line:
//!
//! | line | written by | says |
//! |---|---|---|
//! | `out`, `pinned`, `held`, `pages`, `class` of a word | owner | where a range starts that may be freed; that the owner has pinned; that is one of these or kept ready; the size of its ranges |
//! | `claimed`, `freed` | strangers, by read-modify-write | ranges that a stranger has pinned; that strangers gave back and the owner has not seen yet |
//! | `tag` and the rest of a chunk | owner; strangers set `PENDING` | whose the chunk is, which words have no class |
//!
//! Each word has lines of its own, because an owner that hands out one word while a stranger gives back another must not
//! wait for him.
//!
//! The owner's loads and stores of its own lines are relaxed: what it says reaches a stranger with the range itself,
//! by whatever handed the range over.

use alloc::sync::Arc;

use crate::IovaRange;
use lines::{AtomicU8, AtomicU64, Ordering};

/// Words of a chunk. The models of `loom` take two, so that they end.
#[cfg(not(loom))]
pub(super) const WORDS: usize = 8;
#[cfg(loom)]
pub(super) const WORDS: usize = 2;

/// Pages of a word.
pub(super) const WORD_PAGES: u64 = 64;
/// Pages of a block, as a power of two.
pub(super) const BLOCK_SHIFT: u32 = if cfg!(loom) { 10 } else { 13 };
/// Chunks of a block: what the directory allocates at a time (32 MiB of IOVA, 18 KiB of bookkeeping).
pub(super) const BLOCK_CHUNKS: usize = 1 << (BLOCK_SHIFT - 9);
/// Largest size class inside a chunk: 256 pages. 512 pages and more are runs of whole chunks.
pub(super) const MAX_ORDER: usize = 8;
/// Every word of a chunk, as bits of [`Chunk::open`].
pub(super) const ALL_WORDS: u8 = ((1_u16 << WORDS) - 1) as u8;

/// What [`Chunk::class`] says of a word of no class.
pub(super) const FREE: u8 = 63;
/// A word that belongs to a range of class 7 or 8 which starts in an earlier word.
pub(super) const TAIL: u8 = 62;
/// The first word of a run of whole chunks, whose length [`Chunk::run`] has.
pub(super) const RUN: u8 = 61;

/// In [`Chunk::tag`]: strangers have given back everything that was out in some word.
pub(super) const RIPE: u64 = 1 << 61;
/// In [`Chunk::tag`]: strangers have pinned ranges or given them back since the owner last looked.
pub(super) const PENDING: u64 = 1 << 63;
/// Owner of a chunk that nobody has: free, or an orphan.
pub(super) const NOBODY: u64 = 0;
/// Owner of a chunk out of circulation, or part of a run.
pub(super) const AWAY: u64 = 1 << 62;
/// The part of [`Chunk::tag`] that is not the owner.
pub(super) const MARKS: u64 = PENDING | RIPE;

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

/// Classes of one zone: the orders, and some numbers nobody uses.
pub(super) const CLASSES_PER_LANE: usize = 16;
/// Classes of all zones, and the marks above.
pub(super) const CLASSES: usize = 64;

/// The class of ranges of an order in a zone.
#[inline]
pub(super) const fn class_of(lane: usize, order: usize) -> u8 {
    (lane * CLASSES_PER_LANE + order) as u8
}

/// How many words a range of this class takes at least.
pub(super) const fn words_of(order: usize) -> usize {
    if order <= 6 { 1 } else { 1 << (order - 6) }
}

#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Chunk {
    meta: Meta,
    claims: Claims,
    words: [Word; WORDS],
}

#[derive(Debug)]
#[repr(align(64))]
struct Claims {
    words: [AtomicU64; WORDS],
    touch: Touch,
}

#[derive(Debug)]
#[repr(C, align(128))]
struct Word {
    owners: Owners,
    strangers: Freed,
}

#[derive(Debug)]
#[repr(align(64))]
struct Owners {
    out: AtomicU64,
    pinned: AtomicU64,
    held: AtomicU64,
    /// Pages of a range of this word; 0 in a word of no class.
    pages: AtomicU64,
    /// [`class_of`] its ranges, or [`FREE`], [`TAIL`], [`RUN`].
    class: AtomicU8,
    touch: Touch,
}

#[derive(Debug)]
#[repr(align(64))]
struct Freed {
    freed: AtomicU64,
    touch: Touch,
}

/// Where loom looks for orders to try. Of its own accord loom 0.7 tries a store of one thread before a load of another only
/// if nobody loaded in between; two read-modify-writes it always tries in both orders.
#[cfg(loom)]
#[derive(Debug)]
struct Touch(AtomicU64);
#[cfg(not(loom))]
#[derive(Debug)]
struct Touch;

impl Touch {
    fn new() -> Self {
        #[cfg(loom)]
        return Self(AtomicU64::new(0));
        #[cfg(not(loom))]
        Self
    }

    #[inline(always)]
    fn touch(&self) {
        #[cfg(loom)]
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[derive(Debug)]
#[repr(align(64))]
struct Meta {
    /// Who owns the chunk ([`NOBODY`], a core's number plus one, [`AWAY`]), and [`PENDING`].
    tag: AtomicU64,
    touch: Touch,
    /// Words of no class, a bit each. Owner only.
    open: AtomicU8,
    /// Chunks of the run that starts here; 0 where none does.
    run: AtomicU64,
}

/// A relaxed load.
#[inline]
pub(super) fn get(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

/// A relaxed store, of what only the caller writes.
#[inline]
pub(super) fn set(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Relaxed);
}

impl Word {
    fn new() -> Self {
        Self {
            owners: Owners {
                out: AtomicU64::new(0),
                pinned: AtomicU64::new(0),
                held: AtomicU64::new(0),
                pages: AtomicU64::new(0),
                class: AtomicU8::new(FREE),
                touch: Touch::new(),
            },
            strangers: Freed {
                freed: AtomicU64::new(0),
                touch: Touch::new(),
            },
        }
    }
}

impl Chunk {
    pub(super) fn new() -> Self {
        Self {
            meta: Meta {
                tag: AtomicU64::new(NOBODY),
                touch: Touch::new(),
                open: AtomicU8::new(ALL_WORDS),
                run: AtomicU64::new(0),
            },
            claims: Claims {
                words: core::array::from_fn(|_| AtomicU64::new(0)),
                touch: Touch::new(),
            },
            words: core::array::from_fn(|_| Word::new()),
        }
    }

    #[inline]
    fn owners(&self, word: usize) -> &Owners {
        let owners = &self.words[word % WORDS].owners;
        owners.touch.touch();
        owners
    }

    /// Where a range starts that is allocated, and not pinned by the owner.
    #[inline]
    pub(super) fn out(&self, word: usize) -> &AtomicU64 {
        &self.owners(word).out
    }

    /// Where a range starts that is allocated, and pinned by the owner.
    #[inline]
    pub(super) fn pinned(&self, word: usize) -> &AtomicU64 {
        &self.owners(word).pinned
    }

    /// Where a range starts that is allocated, or kept ready.
    #[inline]
    pub(super) fn held(&self, word: usize) -> &AtomicU64 {
        &self.owners(word).held
    }

    /// Where a range starts that a stranger has pinned.
    #[inline]
    pub(super) fn claimed(&self, word: usize) -> &AtomicU64 {
        self.claims.touch.touch();
        &self.claims.words[word % WORDS]
    }

    /// Where a range starts that a stranger gave back.
    #[inline]
    pub(super) fn freed(&self, word: usize) -> &AtomicU64 {
        let strangers = &self.words[word % WORDS].strangers;
        strangers.touch.touch();
        &strangers.freed
    }

    /// Chunks of the run that starts here.
    pub(super) fn run(&self) -> &AtomicU64 {
        &self.meta.run
    }

    /// Where a range starts that is allocated, as far as the owner knows.
    pub(super) fn allocated(&self, word: usize) -> u64 {
        get(self.out(word)) | get(self.pinned(word))
    }

    /// Pages of a range of this word; 0 in a word of no class.
    #[inline]
    pub(super) fn pages(&self, word: usize) -> u64 {
        get(&self.owners(word).pages)
    }

    /// [`class_of`] a word's ranges, or [`FREE`], [`TAIL`], [`RUN`].
    #[inline]
    pub(super) fn class(&self, word: usize) -> u8 {
        self.owners(word).class.load(Ordering::Relaxed)
    }

    /// The order of a word's ranges; above [`MAX_ORDER`] for a word of no class.
    pub(super) fn order(&self, word: usize) -> usize {
        match self.class(word) {
            RUN.. => usize::MAX,
            class => usize::from(class) % CLASSES_PER_LANE,
        }
    }

    pub(super) fn set_class(&self, word: usize, class: u8) {
        let owners = self.owners(word);
        owners.class.store(class, Ordering::Relaxed);
        let pages = if class < RUN {
            1 << self.order(word)
        } else {
            0
        };
        set(&owners.pages, pages);
    }

    pub(super) fn open(&self) -> u8 {
        self.meta.open.load(Ordering::Relaxed)
    }

    pub(super) fn set_open(&self, open: u8) {
        self.meta.open.store(open, Ordering::Relaxed);
    }

    /// [`Meta::tag`].
    #[inline]
    pub(super) fn tag_word(&self) -> &AtomicU64 {
        self.meta.touch.touch();
        &self.meta.tag
    }

    #[inline]
    pub(super) fn tag(&self) -> u64 {
        self.tag_word().load(Ordering::Relaxed)
    }

    /// What is out in the word of `range`, if the chunk is tagged `tag` and exactly `range` is allocated there, and nobody has
    /// pinned it or given it back.
    #[inline]
    pub(super) fn own_unmarked(&self, tag: u64, range: IovaRange) -> Option<u64> {
        let page = range.first().raw();
        let (word, bit) = (word_of(page), bit_of(page));
        let now = self.tag();
        let out = get(self.out(word));
        let mut free = out;
        if now != tag {
            if now & !MARKS != tag {
                return None;
            }
            free &= !(get(self.claimed(word)) | get(self.freed(word)));
        }
        (range.pages() == self.pages(word) && free & bit != 0).then_some(out)
    }

    /// Pins a range of ours; `false` where [`Self::own_unmarked`] has none.
    #[inline]
    pub(super) fn pin_own(&self, tag: u64, range: IovaRange) -> bool {
        let page = range.first().raw();
        let (word, bit) = (word_of(page), bit_of(page));
        let Some(out) = self.own_unmarked(tag, range) else {
            return false;
        };
        set(self.out(word), out & !bit);
        set(self.pinned(word), get(self.pinned(word)) | bit);
        true
    }

    /// Lets go of what the core with `tag` pinned; `false` where it does not own the chunk, or has not pinned it.
    #[inline]
    pub(super) fn unpin_own(&self, tag: u64, page: u64) -> bool {
        let (word, bit) = (word_of(page), bit_of(page));
        let pinned = get(self.pinned(word));
        if self.tag() & !MARKS != tag || pinned & bit == 0 {
            return false;
        }
        set(self.pinned(word), pinned & !bit);
        set(self.out(word), get(self.out(word)) | bit);
        true
    }

    /// Gives `range` back to its owner, another core than the one with `tag`; `false` where the slow path must find out what is
    /// wrong or special.
    #[inline]
    pub(super) fn free_foreign(&self, tag: u64, range: IovaRange) -> bool {
        let owner = self.tag() & !MARKS;
        let is_anothers = owner != tag && owner != NOBODY && owner != AWAY;
        is_anothers && self.check_foreign(range) && self.give_back(range)
    }

    /// Whether exactly `range` is allocated and not pinned in a chunk of another core, as far as can be seen. Whether it was
    /// given back is not looked at: that line is written next, and to read it first would fetch it twice.
    #[inline]
    pub(super) fn check_foreign(&self, range: IovaRange) -> bool {
        let page = range.first().raw();
        let (word, bit) = (word_of(page), bit_of(page));
        let out = get(self.out(word)) & !get(self.claimed(word));
        range.pages() == self.pages(word) && out & bit != 0
    }

    /// Marks a range as freed, for its owner to take back; `false` where it was before.
    #[inline]
    pub(super) fn give_back(&self, range: IovaRange) -> bool {
        let page = range.first().raw();
        let (word, bit) = (word_of(page), bit_of(page));
        // Release: what we did with the range comes before its next use. Acquire: see `drain`. Only the bit itself is asked of
        // the answer: that is one instruction, not a loop of compare-and-exchange.
        if self.freed(word).fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            return false;
        }
        let is_all = get(self.freed(word)) == get(self.out(word));
        self.notify(if is_all { MARKS } else { PENDING });
        true
    }

    /// Tells the owner to look. After the mark itself: see `drain`.
    #[inline]
    pub(super) fn notify(&self, marks: u64) {
        if self.tag() & marks != marks {
            self.tag_word().fetch_or(marks, Ordering::AcqRel);
        }
    }

    /// Gives `words` words from `first` on to a class.
    pub(super) fn assign(&self, first: usize, lane: usize, order: usize) {
        let words = words_of(order);
        self.set_class(first, class_of(lane, order));
        for tail in first + 1..first + words {
            self.set_class(tail, TAIL);
        }
        self.set_open(self.open() & !word_bits(first, words));
    }

    /// Takes words back from a class in which nothing is allocated.
    pub(super) fn unassign(&self, first: usize, order: usize) {
        let words = words_of(order);
        debug_assert_eq!(
            get(self.held(first)),
            0,
            "something is allocated or kept there"
        );
        for word in first..first + words {
            self.set_class(word, FREE);
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
            set(self.out(word), 0);
            set(self.pinned(word), 0);
            set(self.held(word), 0);
            self.set_class(word, FREE);
            // Read-modify-write: the next stranger's mark reads from it, and so sees what was written before.
            self.claimed(word).swap(0, Ordering::AcqRel);
            self.freed(word).swap(0, Ordering::AcqRel);
        }
        self.set_open(ALL_WORDS);
        set(self.run(), 0);
    }
}

/// `words` bits from `first` on. Under loom a chunk may be smaller than the largest class.
fn word_bits(first: usize, words: usize) -> u8 {
    ((((1_u32 << words) - 1) << first) & 0xff) as u8
}

/// Sixteen chunks, made when the first of them is used.
#[derive(Debug)]
pub(super) struct Block {
    chunks: [Arc<Chunk>; BLOCK_CHUNKS],
}

impl Block {
    pub(super) fn new() -> Self {
        Self {
            chunks: core::array::from_fn(|_| Arc::new(Chunk::new())),
        }
    }

    /// The chunk that holds this page of the block.
    #[inline]
    pub(super) fn chunk(&self, page: u64) -> &Arc<Chunk> {
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

#[cfg(not(any(loom, shuttle)))]
const _: () = assert!(size_of::<Chunk>() == 128 * 9);

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
        chunk.assign(1, 0, 0);
        assert_eq!(chunk.find_open(7), Some(2));
        chunk.assign(2, 0, 7);
        assert_eq!((chunk.order(2), chunk.class(3)), (7, TAIL));
        assert_eq!(chunk.find_open(8), Some(4));
        assert_eq!(chunk.find_open(0), Some(0));
        chunk.unassign(2, 7);
        chunk.unassign(1, 0);
        assert!(chunk.is_empty());
    }
}
