//! Words that combining cores share: the posts of the open generation, its ranges, and the outcomes
//! of the last ones.

use core::task::Poll;

use iova::{IovaPfn, IovaRange};
use lines::{AtomicU64, CachePadded, Ordering};

use super::super::Ticket;

/// Above these bits the word of the posts counts generations.
const STATE_BITS: u32 = 16;
/// The hardware is idle, and the first core of the generation waits for others.
const WAITS: u64 = 1 << (STATE_BITS - 1);
/// Most cores that may meet. As a mask: the number of posts.
pub(super) const CORES_MAX: usize = WAITS as usize - 1;
/// Most ranges of one generation that are kept. The first six lie on the line of the posts.
pub(super) const RANGES: usize = 30;
/// Low bits of a range's word: its pages, or 0 where it holds none. In that case the bits above are
/// the first generation that may write it.
const PAGES_BITS: u32 = 12;
const PAGES: u64 = (1 << PAGES_BITS) - 1;
/// Generations whose outcome is kept.
const REPORTS: usize = 2;
/// The first generation: those before it are complete, and none of them is 0.
const FIRST: u64 = REPORTS as u64;

/// Words that cores post to. A post needs only the first of these lines, as long as few cores meet.
#[repr(C, align(64))]
struct OpenBatch {
    /// The open generation, [`WAITS`], and the number of posts in it.
    open: AtomicU64,
    /// The last generation whose ranges were taken. Written by the core that closed it.
    taken: AtomicU64,
    ranges: [AtomicU64; RANGES],
}

/// Outcome of a generation. A line each, written by the core that closed it, read by the cores in
/// it and by the one that closes the next.
#[derive(Default)]
struct Report {
    /// The generation, and in the lowest bit whether `ticket` covers it; 0 while it is written.
    stamp: AtomicU64,
    ticket: AtomicU64,
}

/// The open generation and the last ones.
pub(super) struct Generations {
    open_batch: CachePadded<OpenBatch>,
    reports: [CachePadded<Report>; REPORTS],
}

/// A core's place in a generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchTicket {
    pub(super) generation: u64,
    /// Number of posts before this one.
    pub(super) place: usize,
    /// Whether the first core, alone so far, waits for another.
    pub(super) is_awaited: bool,
}

impl Generations {
    pub(super) fn new() -> Self {
        let reports: [CachePadded<Report>; REPORTS] = Default::default();
        for (generation, report) in reports.iter().enumerate() {
            report
                .stamp
                .store((generation as u64) << 1, Ordering::Relaxed);
        }
        Self {
            open_batch: CachePadded::new(OpenBatch {
                open: AtomicU64::new(FIRST << STATE_BITS),
                taken: AtomicU64::new(FIRST - 1),
                ranges: Default::default(),
            }),
            reports,
        }
    }

    /// Returns whether a core waits in the open generation.
    #[inline]
    pub(super) fn has_posts(&self) -> bool {
        self.open_batch.open.load(Ordering::Relaxed) & CORES_MAX as u64 != 0
    }

    /// The open generation.
    pub(super) fn open(&self) -> u64 {
        self.open_batch.open.load(Ordering::Relaxed) >> STATE_BITS
    }

    /// Enters the open generation.
    #[inline]
    pub(super) fn join(&self) -> BatchTicket {
        // Release: pairs with `close`; the cleared entries come before the submission.
        let found = self.open_batch.open.fetch_add(1, Ordering::AcqRel);
        BatchTicket {
            generation: found >> STATE_BITS,
            place: found as usize & CORES_MAX,
            is_awaited: found & WAITS != 0,
        }
    }

    /// Called by the first core: waits for others from now on. Returns the number of posts so far.
    #[inline]
    pub(super) fn await_others(&self) -> usize {
        // Relaxed: nothing is taken yet. If the generation is not ours any more, its first closes
        // it all the same.
        self.open_batch.open.fetch_or(WAITS, Ordering::Relaxed) as usize & CORES_MAX
    }

    /// Closes a generation of which this core's post is known and opens the next. Returns the
    /// number of posts in it; `None` where another core has closed it.
    #[inline]
    pub(super) fn close(&self, batch_ticket: BatchTicket) -> Option<usize> {
        let next = (batch_ticket.generation + 1) << STATE_BITS;
        let waits = if batch_ticket.is_awaited { WAITS } else { 0 };
        let mut known =
            batch_ticket.generation << STATE_BITS | waits | (batch_ticket.place as u64 + 1);
        loop {
            // Acquire: pairs with all posts, each of which is a read-modify-write of this word.
            let open = &self.open_batch.open;
            match open.compare_exchange(known, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(known as usize & CORES_MAX),
                Err(found) if found >> STATE_BITS == batch_ticket.generation => known = found,
                Err(_) => return None,
            }
        }
    }

    /// Leaves a range for the core that closes the generation, if it is in time.
    #[inline]
    pub(super) fn put(&self, batch_ticket: BatchTicket, range: IovaRange) {
        // Acquire: pairs with `take`; the core that takes the ranges of the generation before is
        // done with this word.
        if self.open_batch.taken.load(Ordering::Acquire) < batch_ticket.generation - 1 {
            return;
        }
        let Some(word) = self.open_batch.ranges.get(batch_ticket.place) else {
            return;
        };
        let found = word.load(Ordering::Relaxed);
        let is_ours = found & PAGES == 0 && found >> PAGES_BITS <= batch_ticket.generation;
        if range.pages() > PAGES || !is_ours {
            return;
        }
        let packed = range.first().raw() << PAGES_BITS | range.pages();
        // If the generation was closed meanwhile, the word has changed. Relaxed: no other memory
        // depends on the word.
        let _ = word.compare_exchange(found, packed, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Called by the core that closed a generation of `count`: takes the ranges that have arrived,
    /// and gives their words to the next.
    pub(super) fn take(&self, generation: u64, count: usize) -> [Option<IovaRange>; RANGES] {
        let mut ranges = [None; RANGES];
        // The core that closed this generation has seen the report on the one before.
        debug_assert_eq!(
            self.open_batch.taken.load(Ordering::Relaxed),
            generation - 1
        );
        let empty = (generation + 1) << PAGES_BITS;
        for (range, word) in ranges.iter_mut().zip(&self.open_batch.ranges).take(count) {
            let word = word.swap(empty, Ordering::Relaxed);
            *range = IovaRange::new(IovaPfn::new(word >> PAGES_BITS), word & PAGES);
        }
        // Release: the words are the next generation's from here on.
        self.open_batch.taken.store(generation, Ordering::Release);
        ranges
    }

    fn report_of(&self, generation: u64) -> &Report {
        &self.reports[generation as usize % REPORTS]
    }

    /// Whether `generation` was reported. Acquire: reports come one after the other.
    #[inline]
    pub(super) fn is_reported(&self, generation: u64) -> bool {
        self.report_of(generation).stamp.load(Ordering::Acquire) >> 1 >= generation
    }

    /// Called by the core that closed a generation, after the one before was reported: reports the
    /// ticket of its batch, or `None` if each core is to invalidate for itself.
    #[inline]
    pub(super) fn report(&self, generation: u64, ticket: Option<Ticket>) {
        let report = self.report_of(generation);
        if let Some(ticket) = ticket {
            report.stamp.store(0, Ordering::Relaxed);
            // Release: a core that reads this ticket finds no older stamp beside it.
            report.ticket.store(ticket.0, Ordering::Release);
        }
        let stamp = generation << 1 | u64::from(ticket.is_some());
        // Release: the batch was submitted before.
        report.stamp.store(stamp, Ordering::Release);
    }

    /// Returns the reported ticket; `None` also where the report is already overwritten.
    #[inline]
    pub(super) fn outcome(&self, generation: u64) -> Poll<Option<Ticket>> {
        let report = self.report_of(generation);
        // Acquire, both: the ticket is read after the stamp, and the second read of the stamp after
        // the ticket.
        let stamp = report.stamp.load(Ordering::Acquire);
        if stamp >> 1 < generation {
            return Poll::Pending;
        }
        let ticket = Ticket(report.ticket.load(Ordering::Acquire));
        let is_whole = report.stamp.load(Ordering::Relaxed) == stamp;
        Poll::Ready((is_whole && stamp == generation << 1 | 1).then_some(ticket))
    }
}
