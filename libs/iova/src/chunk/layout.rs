//! One chunk: 512 IOVA pages in eight words of 64, each word one size class; and blocks of chunks.
//!
//! Writers and contents, by cache line:
//!
//! | line | written by | contents |
//! |---|---|---|
//! | `states`, one line per word | owner | per page: the range that starts there ([`State`]) |
//! | `held`, `taken` | owner | a bit per range of the word's class that is allocated or in a free list; the bits of `exclusive_freed` that the owner has collected |
//! | `exclusive_freed` | the chunk's designated remote freer | ranges that it freed: a bit differs from the turn of its page |
//! | `claimed`, `shared_freed` | remote cores, by read-modify-write | ranges that a remote core has pinned; ranges that remote cores other than the designated freer freed and the owner has not yet collected |
//! | `tag` and the rest of a chunk | owner; remote cores set [`MARKS`] | the chunk's owner, the size classes of its words |
//!
//! The states of each word have a line of their own, so that an owner that allocates from one word
//! does not contend with a remote core that frees in another.
//!
//! The owner's loads and stores of its own lines are relaxed. They happen before a remote core's
//! accesses to a range, because whatever handed the range to that core orders them.

use alloc::sync::Arc;

pub(super) use super::state::MAX_ORDER;
use super::state::State;
use lines::{AtomicU8, AtomicU64, Ordering};

/// Words of a chunk. The models of `loom` take two, so that they end.
#[cfg(not(loom))]
pub(super) const WORDS: usize = 8;
#[cfg(loom)]
pub(super) const WORDS: usize = 2;
/// States of a word: one per page. The models have no smaller ranges than 32 pages.
const STATES: usize = if cfg!(loom) { 2 } else { 64 };

/// Pages of a word.
pub(super) const WORD_PAGES: u64 = 64;
/// Pages of a block, as a power of two.
pub(super) const BLOCK_SHIFT: u32 = if cfg!(loom) { 10 } else { 13 };
/// Chunks of a block: what the directory allocates at a time (32 MiB of IOVA, 16 KiB of
/// bookkeeping).
pub(super) const BLOCK_CHUNKS: usize = 1 << (BLOCK_SHIFT - 9);
/// Most zones of a space; a power of two, for the fast path.
pub(super) const MAX_ZONES: usize = 4;
/// Every word of a chunk, as bits of [`Chunk::open`].
pub(super) const ALL_WORDS: u8 = ((1_u16 << WORDS) - 1) as u8;

/// Value of [`Chunk::kind`] for a word of no class.
pub(super) const FREE: u8 = 63;
/// A word that belongs to a range of class 7 or 8 which starts in an earlier word.
pub(super) const TAIL: u8 = 62;
/// The first word of a run of whole chunks, whose length [`Chunk::run`] has.
pub(super) const RUN: u8 = 61;

/// In [`Chunk::tag`]: remote cores have pinned ranges or freed them since the owner last collected;
/// a bit for each word.
pub(super) const PENDING: u64 = (ALL_WORDS as u64) << PENDING_SHIFT;
const PENDING_SHIFT: u32 = 48;
/// In [`Chunk::tag`]: the chunk has a designated remote freer, which may free ranges at any time
/// without setting [`PENDING`].
pub(super) const REMOTE_FREER: u64 = 1 << 62;
/// The bits of [`Chunk::tag`] that remote cores set.
pub(super) const MARKS: u64 = PENDING | REMOTE_FREER;
/// In [`Chunk::tag`]: the owner. Above it is the number of the chunk's zone, which never changes.
pub(super) const OWNER: u64 = (1 << LANE_SHIFT) - 1;
const LANE_SHIFT: u32 = 32;
/// Owner of a chunk that no core owns: a free or an abandoned one.
pub(super) const NO_CORE: u64 = 0;
/// Owner of a chunk out of circulation, or part of a run.
pub(super) const AWAY: u64 = 1 << 31;

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

/// Returns the bits of a range of an order that starts at the first page of a word of a class, at
/// most that order.
const fn span(order: usize, class: usize) -> u64 {
    assert!(class <= MAX_ORDER, "a range lies in a word of no class");
    if order >= 6 {
        FULL[class]
    } else {
        FULL[class] & ((1 << (1 << order)) - 1)
    }
}

/// Returns the number of words that a range of this class takes at least.
pub(super) const fn words_of(order: usize) -> usize {
    if order <= 6 { 1 } else { 1 << (order - 6) }
}

#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Chunk {
    meta: Meta,
    claimed: Line,
    held: Line,
    taken: Line,
    shared_freed: Line,
    exclusive_freed: Line,
    states: States,
    /// Makes it 1024 bytes, and its place in a block a mask and a shift: 8 % of an allocation and a
    /// free.
    spare: [u8; 128],
}

#[derive(Debug)]
#[repr(C, align(64))]
struct Meta {
    /// The owner (0 for none, a core's number plus one, or [`AWAY`]), the number of the zone, and
    /// [`MARKS`].
    tag: AtomicU64,
    /// Chunks of the run that starts here; 0 where none does.
    run: AtomicU64,
    /// Words of no class, a bit each. Owner only.
    open: AtomicU8,
    /// The order of each word's ranges, or [`FREE`], [`TAIL`], [`RUN`].
    kinds: [AtomicU8; WORDS],
    touch: Touch,
}

/// A bit per page.
#[derive(Debug)]
#[repr(C, align(64))]
struct Line {
    words: [AtomicU64; WORDS],
    touch: Touch,
}

#[derive(Debug)]
#[repr(C, align(128))]
struct States {
    pages: [AtomicU8; WORDS * STATES],
    touch: [Touch; WORDS],
}

/// Points at which loom explores more orders. loom 0.7 by itself tries a store of one thread before
/// a load of another only if no load came in between; two read-modify-writes it always tries in
/// both orders.
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

impl Line {
    fn new() -> Self {
        Self {
            words: core::array::from_fn(|_| AtomicU64::new(0)),
            touch: Touch::new(),
        }
    }

    #[inline]
    fn word(&self, word: usize) -> &AtomicU64 {
        &self.words[word % WORDS]
    }

    /// The same of a line that others write, or read, too.
    #[inline]
    fn shared(&self, word: usize) -> &AtomicU64 {
        self.touch.touch();
        self.word(word)
    }
}

impl States {
    fn new() -> Self {
        Self {
            pages: core::array::from_fn(|_| AtomicU8::new(State::NONE.0)),
            touch: core::array::from_fn(|_| Touch::new()),
        }
    }
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

/// The part of [`PENDING`] that is of one word.
#[inline(always)]
pub(super) const fn pending(word: usize) -> u64 {
    1 << (PENDING_SHIFT as usize + word % WORDS)
}

/// Returns the tag of a lane's chunks that have this owner and no marks.
pub(super) const fn tag_in(lane: usize, owner: u64) -> u64 {
    (lane as u64) << LANE_SHIFT | owner
}

/// The lane that a tag names.
#[inline]
pub(super) const fn lane_of(tag: u64) -> usize {
    (tag >> LANE_SHIFT) as usize % MAX_ZONES
}

/// The owner that a tag names.
#[inline]
pub(super) const fn owner_of(tag: u64) -> u64 {
    tag & OWNER
}

impl Chunk {
    /// One of the zone with this number.
    pub(super) fn new(lane: usize) -> Self {
        Self {
            meta: Meta {
                tag: AtomicU64::new(tag_in(lane, NO_CORE)),
                run: AtomicU64::new(0),
                open: AtomicU8::new(ALL_WORDS),
                kinds: core::array::from_fn(|_| AtomicU8::new(FREE)),
                touch: Touch::new(),
            },
            claimed: Line::new(),
            held: Line::new(),
            taken: Line::new(),
            shared_freed: Line::new(),
            exclusive_freed: Line::new(),
            states: States::new(),
            spare: [0; 128],
        }
    }

    #[inline(always)]
    fn state_byte(&self, page: u64) -> &AtomicU8 {
        self.states.touch[word_of(page) % WORDS].touch();
        let at = page as usize / (WORD_PAGES as usize / STATES);
        &self.states.pages[at % (WORDS * STATES)]
    }

    /// Returns the state of a page.
    #[inline(always)]
    pub(super) fn state(&self, page: u64) -> State {
        State(self.state_byte(page).load(Ordering::Relaxed))
    }

    /// Owner only.
    #[inline(always)]
    pub(super) fn set_state(&self, page: u64, state: State) {
        self.state_byte(page).store(state.0, Ordering::Relaxed);
    }

    /// Says that a range of the order starts at a page where there is none. Owner only.
    #[inline(always)]
    pub(super) fn hand_out(&self, page: u64, order: usize) {
        self.set_state(page, self.state(page).handed_out(order));
    }

    /// Ranges that are allocated or in a free list: a bit where a range of the word's class starts,
    /// all of the bits of a larger range. Owner only.
    #[inline]
    pub(super) fn held(&self, word: usize) -> &AtomicU64 {
        self.held.word(word)
    }

    /// The turns of the word's pages. Owner only.
    #[inline]
    pub(super) fn taken(&self, word: usize) -> &AtomicU64 {
        self.taken.word(word)
    }

    /// Starts of ranges that a remote core has pinned.
    #[inline]
    pub(super) fn claimed(&self, word: usize) -> &AtomicU64 {
        self.claimed.shared(word)
    }

    /// Starts of ranges that remote cores other than the designated freer have freed.
    #[inline]
    pub(super) fn shared_freed(&self, word: usize) -> &AtomicU64 {
        self.shared_freed.shared(word)
    }

    /// Ranges that the designated remote freer freed: bits that differ from the turns of their
    /// pages.
    #[inline]
    pub(super) fn exclusive_freed(&self, word: usize) -> &AtomicU64 {
        self.exclusive_freed.shared(word)
    }

    /// Chunks of the run that starts here.
    pub(super) fn run(&self) -> &AtomicU64 {
        &self.meta.run
    }

    /// The bits in [`Self::held`] of the range that starts at a page of a word; 0 where none does.
    pub(super) fn span_at(&self, word: usize, at: u64) -> u64 {
        let state = self.state(word as u64 * WORD_PAGES + at);
        state.order().map_or(0, |order| self.span(word, at, order))
    }

    /// The bits in [`Self::held`] of a range of an order that starts at a page of a word.
    pub(super) fn span(&self, word: usize, at: u64, order: usize) -> u64 {
        span(order, self.order(word)) << at
    }

    /// Pages that are allocated or kept ready, as far as the owner knows. Owner only.
    pub(super) fn held_pages(&self) -> u64 {
        (0..WORDS)
            .filter(|word| self.order(*word) <= MAX_ORDER)
            .map(|word| u64::from(get(self.held(word)).count_ones()) << self.order(word))
            .sum()
    }

    /// The number of its zone.
    pub(super) fn lane(&self) -> usize {
        lane_of(self.tag())
    }

    /// The order of a word's ranges, or [`FREE`], [`TAIL`], [`RUN`].
    #[inline]
    pub(super) fn kind(&self, word: usize) -> u8 {
        self.meta.kinds[word % WORDS].load(Ordering::Relaxed)
    }

    /// The order of a word's ranges; above [`MAX_ORDER`] for a word of no class.
    pub(super) fn order(&self, word: usize) -> usize {
        usize::from(self.kind(word))
    }

    pub(super) fn set_kind(&self, word: usize, kind: u8) {
        self.meta.kinds[word % WORDS].store(kind, Ordering::Relaxed);
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

    /// Sets another owner. The caller owns the chunk, or has taken it from one of the zone's sets.
    /// The designated remote freer stays, and so do marks that remote cores set at the same time.
    pub(super) fn set_owner(&self, owner: u64) {
        let before = self.tag() & (OWNER | PENDING);
        self.tag_word().fetch_xor(before ^ owner, Ordering::AcqRel);
    }

    /// Gives `words` words from `first` on to a class.
    pub(super) fn assign(&self, first: usize, order: usize) {
        let words = words_of(order);
        self.set_kind(first, order as u8);
        for tail in first + 1..first + words {
            self.set_kind(tail, TAIL);
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
            self.set_kind(word, FREE);
        }
        self.set_open(self.open() | word_bits(first, words));
    }

    /// The first aligned group of open words that holds a range of this class, the first of which
    /// ends at or before page `most` of the chunk.
    pub(super) fn find_open(&self, order: usize, most: u64) -> Option<usize> {
        let words = words_of(order);
        let open = self.open();
        (0..WORDS).step_by(words).find(|first| {
            let bits = word_bits(*first, words);
            let end = *first as u64 * WORD_PAGES + (1 << order) - 1;
            open & bits == bits && end <= most
        })
    }

    /// Returns the starts of free ranges of an order in a word of a class at most that: those that
    /// end at or before page `most` of the word. Owner only.
    pub(super) fn free_starts(&self, word: usize, order: usize, most: u64) -> u64 {
        let class = self.order(word);
        let free = FULL[class] & !get(self.held(word));
        // The parts of a range of `order` are its halves, and theirs.
        let free = (class..order.min(6)).fold(free, |free, half| free & free >> (1 << half));
        match (most + 1).checked_sub(1 << order.min(6)) {
            Some(last) => free & FULL[order] & (!0 >> (WORD_PAGES - 1 - last.min(WORD_PAGES - 1))),
            None => 0,
        }
    }

    /// Makes a word serve a smaller class than before, with its allocated and cached ranges. Owner
    /// only.
    pub(super) fn split(&self, word: usize, order: usize) {
        // Each range's bit becomes those of its parts: there are no carries.
        let held = get(self.held(word)) * span(self.order(word), order);
        set(self.held(word), held);
        self.set_kind(word, order as u8);
    }

    /// Takes a free range that ends at or before page `most` out of a word of a smaller class: its
    /// first page. Owner only.
    pub(super) fn join(&self, word: usize, order: usize, most: u64) -> Option<u64> {
        let at = u64::from(self.free_starts(word, order, most).checked_ilog2()?);
        set(
            self.held(word),
            get(self.held(word)) | self.span(word, at, order),
        );
        Some(at)
    }

    /// Returns whether nothing is allocated or cached in it.
    pub(super) fn is_empty(&self) -> bool {
        self.open() == ALL_WORDS
    }

    /// Resets the chunk for its next owner. Remote cores that held stale ranges may have left
    /// marks.
    pub(super) fn wipe(&self) {
        for word in 0..WORDS {
            let base = word as u64 * WORD_PAGES;
            if self.order(word) <= MAX_ORDER {
                for page in bits(FULL[self.order(word)]).map(|at| base + at) {
                    self.set_state(page, self.state(page).none());
                }
            }
            set(self.held(word), 0);
            self.set_kind(word, FREE);
            // Read-modify-write: a remote core's next mark reads from it, and so happens after the
            // stores before it.
            self.claimed(word).swap(0, Ordering::AcqRel);
            self.shared_freed(word).swap(0, Ordering::AcqRel);
            let exclusive_freed = self.exclusive_freed(word).load(Ordering::Acquire);
            for page in bits(exclusive_freed ^ get(self.taken(word))).map(|at| base + at) {
                self.set_state(
                    page,
                    self.state(page)
                        .at_turn(exclusive_freed >> (page % WORD_PAGES)),
                );
            }
            set(self.taken(word), exclusive_freed);
        }
        self.set_open(ALL_WORDS);
        set(self.run(), 0);
    }
}

/// The numbers of the set bits, ascending.
pub(super) fn bits(mut word: u64) -> impl Iterator<Item = u64> {
    core::iter::from_fn(move || {
        let at = (word != 0).then(|| u64::from(word.trailing_zeros()));
        word &= word.wrapping_sub(1);
        at
    })
}

/// `words` bits from `first` on. Under loom a chunk may be smaller than the largest class.
fn word_bits(first: usize, words: usize) -> u8 {
    ((((1_u32 << words) - 1) << first) & 0xff) as u8
}

/// Sixteen chunks, made when the first of them is used.
pub(super) type Block = [Chunk; BLOCK_CHUNKS];

/// A block of the zone with this number; made where it stays, as it is large.
pub(super) fn new_block(lane: usize) -> Arc<Block> {
    let chunks: Arc<[Chunk]> = (0..BLOCK_CHUNKS).map(|_| Chunk::new(lane)).collect();
    chunks.try_into().expect("it has as many chunks as a block")
}

/// The chunk that holds this page of a block.
#[inline(always)]
pub(super) fn chunk_of(block: &Block, page: u64) -> &Chunk {
    &block[(page >> 9) as usize % BLOCK_CHUNKS]
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
const _: () = assert!(size_of::<Chunk>() == 1024);

#[cfg(all(test, not(loom)))]
mod tests;
