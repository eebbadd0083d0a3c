//! The words that combining cores share: who is in the open generation, its ranges, and what became of the last ones.

use iova::{IovaPfn, IovaRange};
use lines::{AtomicU64, CachePadded, Ordering};

use super::super::Ticket;

/// Above these bits the seat's word counts generations.
const STATE_BITS: u32 = 16;
/// The hardware is idle, and the first of the generation waits for others.
const WAITS: u64 = 1 << (STATE_BITS - 1);
/// Most cores that may meet. As a mask: how many have posted.
pub(super) const CORES_MAX: usize = WAITS as usize - 1;
/// Ranges on the seat's own line, and on others.
const NEAR: usize = 6;
const FAR: usize = 24;
/// Most ranges of one generation that are kept.
pub(super) const RANGES: usize = NEAR + FAR;
/// Low bits of a range's word: its pages, or 0 where it holds none; then the bits above are the first generation that
/// may write it.
const PAGES_BITS: u32 = 12;
const PAGES: u64 = (1 << PAGES_BITS) - 1;
/// The first generation: those before it are complete, and none of them is 0.
const FIRST: u64 = REPORTS as u64;
/// Generations whose outcome is kept.
const REPORTS: usize = 2;

/// One line. A core that posts needs no other, as long as few meet.
#[repr(align(64))]
struct Line {
    /// The open generation, [`WAITS`], and how many have posted in it.
    open: AtomicU64,
    /// The last generation whose ranges were taken. Written by whoever closed it.
    taken: AtomicU64,
    ranges: [AtomicU64; NEAR],
}

#[derive(Default)]
#[repr(align(64))]
struct Far([AtomicU64; FAR]);

/// Where cores post.
pub(super) struct Seat {
    line: CachePadded<Line>,
    far: Far,
    #[cfg(loom)]
    pub(super) is_careless: bool,
}

/// A core's place in a generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Post {
    pub(super) generation: u64,
    /// How many posted before.
    pub(super) place: usize,
    /// Whether the first, alone so far, waits for another.
    pub(super) is_awaited: bool,
}

impl Post {
    /// The first of a generation, of which nothing else is known.
    pub(super) fn some_of(generation: u64) -> Self {
        Self {
            generation,
            place: 0,
            is_awaited: false,
        }
    }
}

impl Seat {
    pub(super) fn new() -> Self {
        Self {
            line: CachePadded::new(Line {
                open: AtomicU64::new(FIRST << STATE_BITS),
                taken: AtomicU64::new(FIRST - 1),
                ranges: Default::default(),
            }),
            far: Far::default(),
            #[cfg(loom)]
            is_careless: false,
        }
    }

    /// Whether somebody waits in the open generation.
    #[inline]
    pub(super) fn has_posts(&self) -> bool {
        self.line.open.load(Ordering::Relaxed) & CORES_MAX as u64 != 0
    }

    /// The open generation.
    pub(super) fn generation(&self) -> u64 {
        self.line.open.load(Ordering::Relaxed) >> STATE_BITS
    }

    /// Enters the open generation.
    #[inline]
    pub(super) fn post(&self, order: Ordering) -> Post {
        // Release of `order`: pairs with `close`; the cleared entries come before the submission.
        let found = self.line.open.fetch_add(1, order);
        Post {
            generation: found >> STATE_BITS,
            place: found as usize & CORES_MAX,
            is_awaited: found & WAITS != 0,
        }
    }

    /// The first: waits for others from now on; how many have come before.
    #[inline]
    pub(super) fn await_others(&self) -> usize {
        // Relaxed: nothing is taken yet. If the generation is not ours any more, its first closes it all the same.
        self.line.open.fetch_or(WAITS, Ordering::Relaxed) as usize & CORES_MAX
    }

    /// Closes a generation of which this core's post is known and opens the next; how many it holds. `None` where
    /// somebody else has closed it.
    #[inline]
    pub(super) fn close(&self, post: Post) -> Option<usize> {
        let next = (post.generation + 1) << STATE_BITS;
        let waits = if post.is_awaited { WAITS } else { 0 };
        let mut known = post.generation << STATE_BITS | waits | (post.place as u64 + 1);
        loop {
            // Acquire: pairs with all posts, each of which is a read-modify-write of this word.
            let closed =
                self.line
                    .open
                    .compare_exchange(known, next, Ordering::AcqRel, Ordering::Relaxed);
            match closed {
                Ok(_) => return Some(known as usize & CORES_MAX),
                Err(found) if found >> STATE_BITS == post.generation => known = found,
                Err(_) => return None,
            }
        }
    }

    fn range(&self, place: usize) -> Option<&AtomicU64> {
        match place.checked_sub(NEAR) {
            None => self.line.ranges.get(place),
            Some(far) => self.far.0.get(far),
        }
    }

    /// Leaves a range for whoever closes the generation, if it comes in time.
    #[inline]
    pub(super) fn put(&self, post: Post, range: IovaRange) {
        // Acquire: pairs with `taken`; whoever takes the ranges of the generation before is done with this word.
        if self.line.taken.load(Ordering::Acquire) < post.generation - 1 {
            return;
        }
        let Some(word) = self.range(post.place) else {
            return;
        };
        let found = word.load(Ordering::Relaxed);
        let is_ours = found & PAGES == 0 && found >> PAGES_BITS <= post.generation;
        if range.pages() > PAGES || !is_ours && !self.is_careless() {
            return;
        }
        let packed = range.first().raw() << PAGES_BITS | range.pages();
        // If the generation was closed meanwhile, the word is not what we found. Relaxed: the word is all there is to know.
        let _ = word.compare_exchange(found, packed, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Mutant: leaves a range without a look whether its generation is still open.
    #[inline]
    fn is_careless(&self) -> bool {
        #[cfg(loom)]
        return self.is_careless;
        #[cfg(not(loom))]
        false
    }

    /// Who closed a generation of `count`: takes its ranges as far as they have come, and gives their words to the next.
    pub(super) fn take(&self, generation: u64, count: usize) -> [u64; RANGES] {
        let mut ranges = [0; RANGES];
        // Whoever closed this one has seen the report on the one before.
        debug_assert_eq!(self.line.taken.load(Ordering::Relaxed), generation - 1);
        let empty = (generation + 1) << PAGES_BITS;
        for (place, range) in ranges.iter_mut().enumerate().take(count) {
            if let Some(word) = self.range(place) {
                *range = word.swap(empty, Ordering::Relaxed);
            }
        }
        // Release: the words are the next generation's from here on.
        self.line.taken.store(generation, Ordering::Release);
        ranges
    }
}

/// The range of a word that [`Seat::take`] gave.
pub(super) fn unpack(word: u64) -> Option<IovaRange> {
    IovaRange::new(IovaPfn::new(word >> PAGES_BITS), word & PAGES)
}

/// What became of a generation. A line each, written by whoever closed it, read by those in it and by who closes the next.
#[derive(Default)]
struct Report {
    /// The generation, and in the lowest bit whether `ticket` covers it; 0 while it is written.
    stamp: AtomicU64,
    ticket: AtomicU64,
}

/// What became of the last generations.
pub(super) struct Board([CachePadded<Report>; REPORTS]);

/// What a core reads there of its generation.
#[derive(Clone, Copy, Debug)]
pub(super) enum News {
    /// It was not submitted yet.
    Nothing,
    /// It was, as this.
    Ticket(Ticket),
    /// Everybody is to invalidate for himself; or we came too late to know.
    Alone,
}

impl Board {
    pub(super) fn new() -> Self {
        Self(core::array::from_fn(|at| {
            CachePadded::new(Report {
                stamp: AtomicU64::new((at as u64) << 1),
                ticket: AtomicU64::default(),
            })
        }))
    }

    fn report(&self, generation: u64) -> &Report {
        &self.0[generation as usize % REPORTS]
    }

    /// Whether `generation` was reported. Acquire: reports come one after the other.
    #[inline]
    pub(super) fn has(&self, generation: u64) -> bool {
        self.report(generation).stamp.load(Ordering::Acquire) >> 1 >= generation
    }

    /// Who closed a generation, after the one before was reported.
    #[inline]
    pub(super) fn report_on(&self, generation: u64, ticket: Option<Ticket>) {
        let report = self.report(generation);
        if let Some(ticket) = ticket {
            report.stamp.store(0, Ordering::Relaxed);
            // Release: who reads this ticket finds no older stamp beside it.
            report.ticket.store(ticket.0, Ordering::Release);
        }
        let stamp = generation << 1 | u64::from(ticket.is_some());
        // Release: the batch was submitted before.
        report.stamp.store(stamp, Ordering::Release);
    }

    #[inline]
    pub(super) fn news(&self, generation: u64) -> News {
        let report = self.report(generation);
        // Acquire, both: ticket after stamp, and the second look after the ticket.
        let stamp = report.stamp.load(Ordering::Acquire);
        if stamp >> 1 < generation {
            return News::Nothing;
        }
        let ticket = Ticket(report.ticket.load(Ordering::Acquire));
        let is_whole = report.stamp.load(Ordering::Relaxed) == stamp;
        match is_whole && stamp == generation << 1 | 1 {
            true => News::Ticket(ticket),
            false => News::Alone,
        }
    }
}
