//! Combining: the unmaps of many cores meet in one batch and one wait, where that is cheaper than a batch for each.
//!
//! A core that finds the hardware idle submits for itself, and one that finds it busy waits and then does, as under
//! `strict`. After some such waits in a row it **calls**: it posts in the open **generation**. Whoever is first there waits
//! until the batch before is complete, and where nobody has come a little longer; then he, or who comes meanwhile, closes
//! the generation, which opens the next, and submits one batch for all. It reports the ticket, and everybody waits for
//! the hardware himself. Those who meet keep to it for a while; then, and where nobody came, they go alone again.
//!
//! As pseudo-code:
//! ```text
//! if alone so far          { submit(own) if idle, else wait until idle or somebody calls or it is time to call }
//! (generation, place) = post; put(range)
//! if place = 0             { wait until batch generation - 1 is complete; await others a little }
//! if place = 0 or awaited  { count = close(generation) }            // or somebody else has
//! closed:  ticket = submit(merge(ranges)); report(generation, ticket); wait(ticket)
//! others:  wait for report(generation); wait(ticket)                // "alone": flush(own)
//! ```
//! **When it is cheaper**, the [`Invalidator`] says ([`meets_from`](Invalidator::meets_from)). Where no more cores exist than
//! that, and for cores from the 32,768th on, a request costs what it costs under `strict`. Where fewer have come when a
//! generation is closed, each invalidates for himself.
//!
//! **Guarantee**: nobody returns before an invalidation is complete that covers his range and was submitted after
//! the call, hence after he cleared the entries. Orderings: a post is a Release read-modify-write and closing an Acquire one of
//! the same word, so the clearing comes before the submission; a report is a Release store, a look at it an Acquire load;
//! [`poll`](Invalidator::poll) acquires what the hardware did. A range that has not come when its generation is closed makes
//! the batch a domain command, and can no longer be left: its word belongs to a later generation then. Who is stopped
//! for so long that the report is overwritten invalidates for itself, and anybody may close for a first that is stopped. **No wait
//! for another core is without a bound**: where who has closed a generation is stopped before it reports, the others invalidate
//! each for itself, and go on so until it does; their posts stay in the open generation, which one of them closes then.
//! The loom models check this, and that the planted mutants are caught. If a submission fails, everybody tries for himself
//! and has his own error.
//!
//! # What was measured
//! Two cores of a Xeon whose lines take 215 ns there and back, commands of 500 ns, a domain as dear as a page: 0.79 and 0.80
//! of `strict`'s time in two runs, where the version with a handed-over seat took 0.82 and 0.86; of a lock around the wait
//! 0.65 and 0.59. Where two do not pay (pages of 500 ns, a domain of 1 us), as long as `strict`. This counts the wait for
//! others, up to 256 looks, as `strict` where there is none ([`with_gather`](Combiner::with_gather)): then two cores
//! seldom meet. More than two cores were not measured, nor was a real unit.
//!
//! | departure from the plain version | why |
//! |---|---|
//! | going alone is a habit of the core, no word is shared for it | a lone core must not pay for others |
//! | a core meets only after waits that were not short | where hardware is idle half of the time, coming together costs and brings nothing: 16 % |
//! | who comes when the first awaits him closes | the first would hear of him a line's transfer later, and submit another later |
//! | tickets are reported at submission | the report travels while the hardware works; all return at once |
//! | two reports in turn | the next generation's posts do not disturb those who read; a core finds what it read last time |
//! | the first six ranges lie on the line of the posts | one transfer brings both |
//!
//! Cost in line transfers for each request: the post, and the report; from the seventh of a generation on its range. For each
//! batch: closing, reporting, the look at the report before, and what the hardware's queue needs. Counted by `bench/dma-lines`
//! with everybody busy: 1.8 for two cores, 3.1 to 4.0 for four to 32, 2.5 for 128. What is above 3: with four cores two meet at
//! a time, and a batch's five lines count half each; from 16 on, the ranges beyond the sixth.
//!
//! Left out: sleeping; ranges of 16 MiB and more (they make a domain command); order among those who go alone, which is the
//! hardware's; merging of adjacent ranges where their number alone would not pay.

mod merge;
#[cfg(test)]
#[cfg(loom)]
#[path = "combine/tests/model.rs"]
mod model;
mod seat;

use alloc::boxed::Box;

use iova::IovaRange;
use lines::{AtomicU32, AtomicU64, CachePadded, Ordering, Spin};

use self::merge::{RANGES_MAX, merge};
use self::seat::{Board, CORES_MAX, News, Post, RANGES, Seat, unpack};
use super::{Command, InvalidateError, Invalidator, Ticket};

/// After so many looks whoever waits closes the generation itself: the machine may have stopped who should.
const LOOKS: u32 = if cfg!(any(loom, shuttle)) { 3 } else { 1 << 12 };
/// After so many looks whoever waits for a batch to be submitted invalidates for itself: the machine may have stopped who has
/// closed the generation.
const PATIENCE: u32 = 2 * LOOKS;
/// After so many looks hardware that seems busy is given the batch all the same, and says whether it is dead.
const BUSY_LOOKS: u32 = 4 * LOOKS;
/// Looks for others by a core that finds the hardware idle, and a batch with others would be cheaper: about half a
/// microsecond.
pub const GATHER_LOOKS: u32 = 256;
/// After so many waits for busy hardware in a row, none of them short, a core joins others, and calls them.
const PRESSED: u32 = if cfg!(any(loom, shuttle)) { 0 } else { 4 };
/// After at most so many of them a core that called in vain calls again.
const PRESSED_MAX: u32 = 256;
/// How often a core meets others before it sees what it is like without.
const MEETINGS: u32 = 256;
/// A wait is short that is less than this part of what the core's own batch takes.
const SHORT: u32 = 4;

/// What the models must catch.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(any(loom, shuttle)), expect(dead_code, reason = "the models'"))]
pub enum Mutant {
    /// Nothing is planted.
    None,
    /// Who hears that his batch was submitted returns.
    EarlyAnswer,
    /// A post orders nothing. Only loom sees this.
    RelaxedPost,
    /// A core takes the batch before its own for its own.
    LateJoin,
    /// Who waits for a batch does so for ever.
    NeverLeaves,
}

/// What a core has found out about the others, which alone reads and writes this.
#[derive(Default)]
struct Habit {
    /// How often it still meets them.
    meetings: AtomicU32,
    /// Waits for busy hardware in a row, none of them short.
    pressed: AtomicU32,
    /// After so many of these it calls; [`PRESSED`] at least.
    calls_at: AtomicU32,
    /// Looks at its own batch, last time alone.
    own: AtomicU32,
    /// The generation that it left unfinished, if it is still the open one: its post is in there.
    left: AtomicU64,
}

impl Habit {
    #[inline]
    fn meets(&self) -> bool {
        self.meetings.load(Ordering::Relaxed) > 0
    }

    /// After how many looks at busy hardware it joins others.
    #[inline]
    fn joins_after(&self) -> u32 {
        match self.pressed.load(Ordering::Relaxed) >= PRESSED {
            true => 0,
            false => 2 * self.own.load(Ordering::Relaxed).min(BUSY_LOOKS),
        }
    }

    fn calls(&self) -> bool {
        let calls_at = self.calls_at.load(Ordering::Relaxed);
        self.pressed.load(Ordering::Relaxed) >= calls_at.max(PRESSED)
    }

    /// Alone: so many looks at busy hardware, and so many at the core's own batch.
    #[inline]
    fn waited(&self, looks: u32, own: u32) {
        let before = self.pressed.load(Ordering::Relaxed);
        let pressed = match looks > 0 && looks.saturating_mul(SHORT) >= own {
            true => before.saturating_add(1),
            false => 0,
        };
        if pressed != before {
            self.pressed.store(pressed, Ordering::Relaxed);
        }
        self.own.store(own, Ordering::Relaxed);
    }

    fn met(&self) {
        let left = match self.meetings.load(Ordering::Relaxed) {
            0 => MEETINGS,
            left => left - 1,
        };
        self.meetings.store(left, Ordering::Relaxed);
        // One wait that is not short brings it back.
        self.pressed
            .store(PRESSED.saturating_sub(1), Ordering::Relaxed);
        self.calls_at.store(0, Ordering::Relaxed);
    }

    fn met_nobody(&self) {
        let calls_at = self.calls_at.load(Ordering::Relaxed).max(PRESSED);
        self.meetings.store(0, Ordering::Relaxed);
        self.pressed.store(0, Ordering::Relaxed);
        self.calls_at
            .store((2 * calls_at).min(PRESSED_MAX), Ordering::Relaxed);
    }
}

/// Where the unmaps of a domain's cores meet.
pub struct Combiner {
    seat: Seat,
    board: Board,
    habits: Box<[CachePadded<Habit>]>,
    gather_looks: u32,
    #[cfg(any(loom, shuttle))]
    mutant: Mutant,
}

impl Combiner {
    /// For `cores` cores.
    pub fn new(cores: usize) -> Self {
        Self::with_gather(cores, GATHER_LOOKS)
    }

    /// As [`new`](Self::new); a core that has called others and is alone when the hardware is idle looks up to
    /// `gather_looks` times for them.
    pub fn with_gather(cores: usize, gather_looks: u32) -> Self {
        Self {
            seat: Seat::new(),
            board: Board::new(),
            habits: (0..cores.min(CORES_MAX))
                .map(|_| CachePadded::default())
                .collect(),
            gather_looks,
            #[cfg(any(loom, shuttle))]
            mutant: Mutant::None,
        }
    }

    /// The same with a mistake planted, to show that the models find it.
    #[cfg(shuttle)]
    #[must_use]
    pub fn planted(mut self, mutant: Mutant) -> Self {
        self.mutant = mutant;
        self
    }

    /// Returns when an invalidation of `range` that was submitted after the call is complete.
    /// No other thread calls for the same `core` at the same time.
    ///
    /// # Errors
    /// What the [`Invalidator`] said of the batch that held the range.
    #[inline]
    pub fn flush<I: Invalidator>(
        &self,
        invalidator: &I,
        core: usize,
        range: IovaRange,
    ) -> Result<(), InvalidateError> {
        let own = [Command::Pages(range)];
        let enough = invalidator.meets_from();
        let habit = match self.habits.get(core) {
            Some(habit) if enough <= self.habits.len() => habit,
            // So many never meet.
            _ => return invalidator.flush(&own),
        };
        if !habit.meets()
            && let Some((ticket, looks)) = self.go_alone(invalidator, habit, &own)?
        {
            habit.waited(looks, wait(invalidator, ticket)?);
            return Ok(());
        }
        self.meet(invalidator, enough, habit, range)
    }

    /// Submits as soon as the hardware is idle, and says after how many looks that was; `None` if the core is to meet
    /// others instead.
    #[inline]
    fn go_alone<I: Invalidator>(
        &self,
        invalidator: &I,
        habit: &Habit,
        own: &[Command],
    ) -> Result<Option<(Ticket, u32)>, InvalidateError> {
        let joins_after = habit.joins_after();
        if joins_after == 0 && self.seat.has_posts() {
            return Ok(None);
        }
        if let Some(ticket) = invalidator.try_submit(own)? {
            return Ok(Some((ticket, 0)));
        }
        if habit.calls() {
            return Ok(None);
        }
        let mut spin = Spin::default();
        loop {
            let looks = spin.wait();
            if looks > joins_after && self.seat.has_posts() {
                return Ok(None);
            }
            if looks == BUSY_LOOKS {
                return Ok(Some((invalidator.submit(own)?, looks)));
            }
            if let Some(ticket) = invalidator.try_submit(own)? {
                return Ok(Some((ticket, looks)));
            }
        }
    }

    /// Posts, and sees to it that the generation is closed, by this core or another.
    fn meet<I: Invalidator>(
        &self,
        invalidator: &I,
        enough: usize,
        habit: &Habit,
        range: IovaRange,
    ) -> Result<(), InvalidateError> {
        let own = [Command::Pages(range)];
        let left = habit.left.load(Ordering::Relaxed);
        if left == self.seat.generation() {
            // A second post of one core could make more of them than there is room for. Whoever is left there as well hears that
            // it is alone.
            if self.board.has(left - 1)
                && let Some(count) = self.seat.close(Post::some_of(left))
            {
                self.seat.take(left, count);
                self.board.report_on(left, None);
            }
            return invalidator.flush(&own);
        }
        let post = self.seat.post(self.order());
        // Those who come when a domain command is cheaper anyway need not say.
        if post.place + 1 < invalidator.whole_domain_from() {
            self.seat.put(post, range);
        }
        let closes = match post.place {
            0 => self.stand_first(invalidator, enough, post),
            // The first would hear only a line's transfer from now that it is worth it.
            place => post.is_awaited && place + 1 == enough && self.board.has(post.generation - 1),
        };
        let mut closed = closes.then(|| self.seat.close(post)).flatten();
        let mut spin = Spin::default();
        loop {
            if let Some(count) = closed {
                match count >= enough {
                    true => habit.met(),
                    false => habit.met_nobody(),
                }
                return self.lead(invalidator, enough, post, count, range);
            }
            match self.news(post) {
                News::Ticket(ticket) => {
                    habit.met();
                    if self.plants(Mutant::EarlyAnswer) {
                        return Ok(());
                    }
                    return wait(invalidator, ticket).map(drop);
                }
                News::Alone => {
                    habit.met_nobody();
                    return invalidator.flush(&own);
                }
                News::Nothing => {}
            }
            let looks = spin.wait();
            if looks % LOOKS == 0 && self.board.has(post.generation - 1) {
                closed = self.seat.close(post);
            }
            if looks >= PATIENCE && closed.is_none() && !self.plants(Mutant::NeverLeaves) {
                habit.left.store(post.generation, Ordering::Relaxed);
                habit.met_nobody();
                return invalidator.flush(&own);
            }
        }
    }

    /// The first of a generation waits until the hardware is idle, and a little for others if they would make a cheaper
    /// batch. False where somebody else has closed it.
    fn stand_first<I: Invalidator>(&self, invalidator: &I, enough: usize, post: Post) -> bool {
        let is_open = || matches!(self.board.news(post.generation), News::Nothing);
        let mut spin = Spin::default();
        let mut looks = 0;
        while !self.board.has(post.generation - 1)
            || looks < BUSY_LOOKS && !self.is_idle(invalidator, post)
        {
            if looks >= BUSY_LOOKS || !is_open() {
                return false;
            }
            looks = spin.wait();
        }
        if self.gather_looks == 0 || self.seat.await_others() >= enough {
            return true;
        }
        let mut spin = Spin::default();
        while spin.wait() < self.gather_looks {
            if !is_open() {
                return false;
            }
        }
        true
    }

    /// Whether the batch of the last generation is complete; where it had none, whether the hardware is idle.
    #[inline]
    fn is_idle<I: Invalidator>(&self, invalidator: &I, post: Post) -> bool {
        match self.board.news(post.generation - 1) {
            News::Nothing => false,
            // An error is for those who are in it.
            News::Ticket(ticket) => invalidator.poll(ticket).unwrap_or(true),
            News::Alone => invalidator.is_idle(),
        }
    }

    #[inline]
    fn news(&self, post: Post) -> News {
        let late = u64::from(self.plants(Mutant::LateJoin));
        self.board.news(post.generation - late)
    }

    /// Of posting.
    #[inline]
    fn order(&self) -> Ordering {
        match self.plants(Mutant::RelaxedPost) {
            true => Ordering::Relaxed,
            false => Ordering::AcqRel,
        }
    }

    /// Whether this mistake is planted: never, outside the models.
    #[inline(always)]
    fn plants(&self, _mutant: Mutant) -> bool {
        #[cfg(any(loom, shuttle))]
        return self.mutant == _mutant;
        #[cfg(not(any(loom, shuttle)))]
        false
    }

    /// Carries out a generation of `count`, which this core has closed. Its ranges are taken before the report, which whoever
    /// closes the next generation has seen.
    fn lead<I: Invalidator>(
        &self,
        invalidator: &I,
        enough: usize,
        post: Post,
        count: usize,
        range: IovaRange,
    ) -> Result<(), InvalidateError> {
        let generation = post.generation;
        let own = [Command::Pages(range)];
        let is_alone = count < enough;
        let submitted = if is_alone || count >= invalidator.whole_domain_from() || count > RANGES {
            let commands = if is_alone { own } else { [Command::Domain] };
            let submitted = invalidator.submit(&commands);
            self.seat.take(generation, count);
            submitted
        } else {
            let words = self.seat.take(generation, count);
            let ranges = words[..count].iter().enumerate().map(|(place, word)| {
                if place == post.place {
                    return Some(range);
                }
                unpack(*word)
            });
            invalidator.submit(merge(ranges, &mut [Command::Domain; RANGES_MAX]))
        };
        let ticket = submitted.ok().filter(|_| !is_alone);
        self.board.report_on(generation, ticket);
        wait(invalidator, submitted?).map(drop)
    }
}

/// Waits without pauses at first; gives the looks it took.
#[inline]
fn wait<I: Invalidator>(invalidator: &I, ticket: Ticket) -> Result<u32, InvalidateError> {
    let mut spin = Spin::default();
    let mut looks = 0;
    while !invalidator.poll(ticket)? {
        looks = spin.wait();
    }
    Ok(looks)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
