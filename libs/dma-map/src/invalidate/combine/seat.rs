//! Who leads, who waits, and what they tell each other: the words that combining cores share.

use iova::{IovaPfn, IovaRange};
use lines::{AtomicU64, CachePadded, Ordering};

use super::super::InvalidateError;

/// Cores of one word.
const WORD_CORES: usize = 62;
/// Words of cores: with the two others they fill one line.
pub(super) const WORDS: usize = 6;
/// Most cores that a seat has bits for.
pub(super) const CORES_MAX: usize = WORDS * WORD_CORES;
/// In the first word: somebody leads.
const LED: u64 = 1 << 63;

/// Cores, a bit each, of the first `W` words. One word stays in a register, which six do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cores<const W: usize>([u64; W]);

impl<const W: usize> Cores<W> {
    pub(super) const NONE: Self = Self([0; W]);

    pub(super) fn add(&mut self, core: usize) {
        self.0[core / WORD_CORES] |= 1 << (core % WORD_CORES);
    }

    pub(super) fn has(&self, core: usize) -> bool {
        self.0[core / WORD_CORES] >> (core % WORD_CORES) & 1 == 1
    }

    pub(super) fn remove(&mut self, core: usize) {
        self.0[core / WORD_CORES] &= !(1 << (core % WORD_CORES));
    }

    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Takes the lowest out.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<usize> {
        let at = self.0.iter().position(|word| *word != 0)?;
        let bit = self.0[at].trailing_zeros() as usize;
        self.0[at] &= self.0[at] - 1;
        Some(at * WORD_CORES + bit)
    }
}

/// One line: the requests that nobody has taken yet, and whether somebody leads, in words that a single
/// read-modify-write changes together. What only the leader uses lies beside them, for the line is his anyway.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct Seat {
    posted: [AtomicU64; WORDS],
    /// Batches submitted. Leader only, like the next.
    batches: AtomicU64,
    /// Requests of the last batch.
    size: AtomicU64,
}

impl Seat {
    /// Takes the seat if it is free. What this finds is known to [`post`](Self::post) or [`gather`](Self::gather) next.
    ///
    /// A read-modify-write from the start, no look before: a look would fetch the line a first time, for reading.
    #[inline]
    pub(super) fn take(&self, order: Ordering) -> bool {
        // Acquire of `order`: what the last leader knew comes before what we submit.
        self.posted[0].fetch_or(LED, order) & LED == 0
    }

    /// Takes the seat if it looks free. Acquire: whoever told us to look had left it before.
    #[inline]
    pub(super) fn take_if_free(&self) -> bool {
        self.posted[0].load(Ordering::Acquire) & LED == 0 && self.take(Ordering::AcqRel)
    }

    /// Leaves a request for whoever leads; gives true where nobody does, and the seat with it.
    #[inline]
    pub(super) fn post(&self, core: usize, order: Ordering) -> bool {
        let (word, bit) = (core / WORD_CORES, 1 << (core % WORD_CORES));
        if word == 0 {
            // Release of `order`: the leader that takes the bit sees the range, and the cleared entries.
            return self.posted[0].fetch_or(bit | LED, order) & LED == 0;
        }
        self.posted[word].fetch_or(bit, order);
        // If a leader leaves without having seen the bit, this comes after in the order of the first word, finds the
        // seat free, and takes it. If it comes before, the leaver's look at the other words, which follows, sees the bit.
        self.take(order)
    }

    /// Leader: moves what was posted so far to `next`.
    #[inline]
    pub(super) fn gather<const W: usize>(&self, next: &mut Cores<W>) {
        for (at, (word, next)) in self.posted.iter().zip(&mut next.0).enumerate() {
            let empty = if at == 0 { LED } else { 0 };
            // Relaxed: a hint, and a hit in our cache until somebody posts. Loom is to try the exchange at any moment.
            if cfg!(loom) || word.load(Ordering::Relaxed) != empty {
                // Acquire: pairs with the post. Taken whole, which also brings the line back before we leave.
                *next |= word.swap(empty, Ordering::AcqRel) & !LED;
            }
        }
    }

    /// Leader: lets others lead, and puts back what was gathered and not submitted. Gives one who waits, if any does;
    /// he has to be told.
    #[inline]
    pub(super) fn leave<const W: usize>(&self, left: &Cores<W>) -> Option<usize> {
        for (word, left) in self.posted.iter().zip(&left.0).skip(1) {
            if *left != 0 {
                word.fetch_or(*left, Ordering::AcqRel);
            }
        }
        // Our bit is set there and those of `left` are clear, for who has posted waits: the sum clears the one and sets
        // the others, in a single instruction.
        let found = self.posted[0].fetch_add(left.0[0].wrapping_sub(LED), Ordering::AcqRel);
        let mut waiting = Cores::<W>::NONE;
        waiting.0[0] = (found | left.0[0]) & !LED;
        for (word, waiting) in self.posted.iter().zip(&mut waiting.0).skip(1) {
            *waiting = word.load(Ordering::Acquire);
        }
        waiting.pop()
    }

    /// Leader: another batch, of `size` requests. Gives its number, from 1.
    #[inline]
    pub(super) fn begin(&self, size: usize) -> u64 {
        let number = self.batches.load(Ordering::Relaxed) + 1;
        self.batches.store(number, Ordering::Relaxed);
        self.size.store(size as u64, Ordering::Relaxed);
        number
    }

    /// Leader: the size of the last batch.
    #[inline]
    pub(super) fn last_size(&self) -> usize {
        self.size.load(Ordering::Relaxed) as usize
    }
}

/// Whether one word does for so many cores.
pub(super) fn is_one_word(cores: usize) -> bool {
    cores <= WORD_CORES
}

/// Written by the core before it posts, read by a leader who wants to know the range.
#[derive(Default)]
struct Request {
    first: AtomicU64,
    pages: AtomicU64,
}

/// Written by leaders, read by the core.
#[derive(Default)]
struct Reply {
    /// The number of the batch that held the request, and how it ended in the two lowest bits. A number comes once:
    /// nobody sets it back.
    answer: AtomicU64,
    /// Changes when a leader has left and this core waits. Those who have left may write at the same time, which is why
    /// it is no part of `answer`; each writes a number of its own.
    turn: AtomicU64,
    /// Facts of an error. Written before `answer`.
    detail: AtomicU64,
    /// Where loom looks for orders to try: of its own accord loom 0.7 tries a store of one thread before a load of another
    /// only if nobody loaded in between; two read-modify-writes it always tries in both orders.
    #[cfg(loom)]
    touch: AtomicU64,
}

impl Reply {
    #[inline(always)]
    fn touch(&self) {
        #[cfg(loom)]
        self.touch.fetch_add(1, Ordering::Relaxed);
    }
}

const DONE: u64 = 1;
const TIMED_OUT: u64 = 2;
const STOPPED: u64 = 3;

/// The lines of one core. Where the leader need not know the range, the request's stays in the core's cache.
#[derive(Default)]
pub(super) struct Node {
    request: CachePadded<Request>,
    reply: CachePadded<Reply>,
}

/// What a core had been told before it posted.
#[derive(Clone, Copy)]
pub(super) struct Told {
    answer: u64,
    turn: u64,
}

/// What a core that waits is told.
pub(super) enum News {
    Nothing,
    /// Nobody leads any more.
    Turn,
    Answer(Result<(), InvalidateError>),
}

impl Node {
    /// Owner: what is wanted next. [`Seat::post`] publishes it.
    #[inline]
    pub(super) fn request(&self, range: IovaRange) -> Told {
        self.request
            .first
            .store(range.first().raw(), Ordering::Relaxed);
        self.request.pages.store(range.pages(), Ordering::Relaxed);
        Told {
            answer: self.reply.answer.load(Ordering::Relaxed),
            turn: self.reply.turn.load(Ordering::Relaxed),
        }
    }

    /// Leader: what was wanted. `None` never comes, for it was a range.
    pub(super) fn range(&self) -> Option<IovaRange> {
        IovaRange::new(
            IovaPfn::new(self.request.first.load(Ordering::Relaxed)),
            self.request.pages.load(Ordering::Relaxed),
        )
    }

    /// Whoever led batch `number`, which held the request.
    #[inline]
    pub(super) fn answer(&self, number: u64, result: Result<(), InvalidateError>) {
        let kind = match result {
            Ok(()) => DONE,
            Err(InvalidateError::TimedOut { waited_ns }) => {
                self.reply.detail.store(waited_ns, Ordering::Relaxed);
                TIMED_OUT
            }
            Err(InvalidateError::Stopped { status }) => {
                self.reply.detail.store(status, Ordering::Relaxed);
                STOPPED
            }
        };
        self.reply.touch();
        // Release: the core that sees it sees that the hardware is done.
        self.reply
            .answer
            .store(number << 2 | kind, Ordering::Release);
    }

    /// Whoever led batch `number` and has left: the core may lead.
    #[inline]
    pub(super) fn your_turn(&self, number: u64) {
        self.reply.touch();
        // Release: the core that sees it sees that the seat was left.
        self.reply.turn.store(number, Ordering::Release);
    }

    /// Owner: what is new.
    #[inline]
    pub(super) fn news(&self, told: &mut Told) -> News {
        self.reply.touch();
        let answer = self.reply.answer.load(Ordering::Acquire);
        if answer != told.answer {
            let detail = || self.reply.detail.load(Ordering::Relaxed);
            return News::Answer(match answer & 3 {
                TIMED_OUT => Err(InvalidateError::TimedOut {
                    waited_ns: detail(),
                }),
                STOPPED => Err(InvalidateError::Stopped { status: detail() }),
                _ => Ok(()),
            });
        }
        let turn = self.reply.turn.load(Ordering::Acquire);
        if turn != told.turn {
            told.turn = turn;
            return News::Turn;
        }
        News::Nothing
    }
}
