//! Combining: unmaps of many cores share one batch and one wait, where that is cheaper than a batch
//! for each.
//!
//! A core that finds the hardware idle submits for itself, and one that finds it busy waits and
//! then submits, as under `strict`. After some such waits in a row it **calls**: it posts in the
//! open **generation**. The first core of a generation waits until the batch before is complete,
//! and if no other core has posted, a little longer. Then it, or a core that posts meanwhile,
//! closes the generation, which opens the next, and submits one batch for all. The closing core
//! reports the ticket, and each core of the generation waits for the hardware. Cores that met post
//! again for a while; after that, or where no other core posted, each submits for itself again.
//!
//! As pseudo-code:
//! ```text
//! if alone so far          { submit(own) if idle, else wait until idle, until another core posts,
//!                            or until it is time to call }
//! (generation, place) = join(); put(range)
//! if place = 0             { wait until batch generation - 1 is complete; await others a little }
//! if place = 0 or awaited  { count = close(generation) }            // unless another core has
//! closed:  ticket = submit(merge(ranges)); report(generation, ticket); wait(ticket)
//! others:  wait for report(generation); wait(ticket)                // "alone": flush(own)
//! ```
//! [`Invalidator::meets_from`] says **when it is cheaper**. Where no more cores exist than that,
//! and for cores from the 32,768th on, a request costs what it costs under `strict`. Where fewer
//! have posted when a generation is closed, each invalidates for itself.
//!
//! **Guarantee**: no core returns before an invalidation is complete that covers its range and was
//! submitted after the call, hence after it cleared the entries. Orderings: a post is a Release
//! read-modify-write and closing an Acquire one of the same word, so the clearing comes before the
//! submission; a report is a Release store, and its readers use an Acquire load;
//! [`poll`](Invalidator::poll) acquires what the hardware did. A range that has not arrived when
//! its generation is closed makes the batch a domain command, and can no longer be put: its word
//! belongs to a later generation then. If a submission fails, each core tries for itself and has
//! its own error.
//!
//! **No wait for another core is without a bound.** A core that is stopped for so long that the
//! report is overwritten invalidates for itself, and any core of a generation may close it for a
//! first core that is stopped. Where the core that has closed a generation is stopped before it
//! reports, the others invalidate each for itself, and go on so until it reports; their posts stay
//! in the open generation, which one of them closes then. The models check all this.
//!
//! # Measurements
//! Two cores of an EPYC whose lines take 100 or 375 ns there and back, by run, commands of 500 ns,
//! a domain as dear as a page: 1.54 to 1.59 times the throughput of a lock around the wait
//! (`make bench-dma`). Where two do not pay (pages of 500 ns, a domain of 1 us), as much as
//! `strict`. More than two cores were not measured, nor was a real unit.
//!
//! | departure from the plain version | reason |
//! |---|---|
//! | each core decides by itself whether to submit alone; no word is shared for it | a lone core must not pay for others |
//! | a core joins others only after waits that were not short | where hardware is idle half of the time, joining costs 16 % and brings nothing |
//! | a core that posts while the first awaits it closes the generation | the first would see the post a line's transfer later, and submit another later |
//! | tickets are reported at submission | the report travels while the hardware works; all return at once |
//! | two reports in turn | the next generation's posts do not disturb the readers; a core finds the line it read last time |
//! | the first six ranges lie on the line of the posts | one transfer brings both |
//!
//! Cost in line transfers for each request: the post, and the report; from the seventh of a
//! generation on its range. For each batch: closing, reporting, reading the report before, and what
//! the hardware's queue needs. Counted by `bench/dma-lines` with all cores busy (`dstr_busy`): 1.8
//! for two cores, 3.1 to 4.0 for four to 32, 2.9 for 64, 2.5 for 128. Above 3: with four cores two
//! meet at a time, and a batch's five lines count half each; from 16 on, the ranges beyond the
//! sixth.
//!
//! Left out: sleeping; ranges of 16 MiB and more (they make a domain command); order among the
//! cores that submit alone, which is the hardware's; merging of adjacent ranges where their number
//! alone would not pay.

mod generations;
#[cfg(test)]
#[cfg(loom)]
#[path = "combine/tests/model.rs"]
mod model;

use alloc::boxed::Box;
use core::task::Poll;

use iova::IovaRange;
use lines::{AtomicU32, AtomicU64, CachePadded, Ordering, Spin};

use self::generations::{BatchTicket, CORES_MAX, Generations, RANGES};
use super::{Command, InvalidateError, Invalidator, Ticket};

/// Polls after which a waiting core closes the generation itself: the core that should may have
/// been stopped.
const LOOKS: u32 = if cfg!(any(loom, shuttle)) { 3 } else { 1 << 12 };
/// Polls after which a core that waits for a batch to be submitted invalidates for itself: the core
/// that has closed the generation may have been stopped.
const PATIENCE: u32 = 2 * LOOKS;
/// Polls after which hardware that seems busy is given the batch all the same; its answer shows
/// whether it is dead.
const BUSY_LOOKS: u32 = 4 * LOOKS;
/// Polls for others by a core that finds the hardware idle, where a batch with others would be
/// cheaper: as long as another core that has just had its answer needs to come back, about half a
/// microsecond. With half as many, two cores met in some builds and not in others.
pub const GATHER_LOOKS: u32 = 512;
/// Number of waits for busy hardware in a row, none of them short, after which a core joins others,
/// and calls them.
const CONTENDED: u32 = if cfg!(any(loom, shuttle)) { 0 } else { 4 };
/// Most such waits before a core whose call no other core joined calls again.
const CONTENDED_MAX: u32 = 256;
/// Number of generations that a core joins before it tries again to submit alone.
const JOINS: u32 = 256;
/// A wait is short if it is less than this fraction of the time of the core's own batch.
const SHORT: u32 = 4;

/// Join policy of one core: its estimate of contention. Read and written by that core alone.
#[derive(Default)]
struct JoinPolicy {
    /// Number of generations that it still joins.
    joins_left: AtomicU32,
    /// Waits for busy hardware in a row, none of them short.
    contended: AtomicU32,
    /// Number of such waits after which it calls; [`CONTENDED`] at least.
    calls_at: AtomicU32,
    /// Polls for its own batch, when it last submitted alone.
    own: AtomicU32,
    /// The generation that it left unfinished, with its post in it, if that is still the open one.
    /// 0 for none.
    left: AtomicU64,
}

impl JoinPolicy {
    #[inline]
    fn joins(&self) -> bool {
        self.joins_left.load(Ordering::Relaxed) > 0
    }

    /// Number of polls of busy hardware after which it joins others.
    #[inline]
    fn joins_after(&self) -> u32 {
        match self.contended.load(Ordering::Relaxed) >= CONTENDED {
            true => 0,
            false => 2 * self.own.load(Ordering::Relaxed).min(BUSY_LOOKS),
        }
    }

    fn calls_at(&self) -> u32 {
        self.calls_at.load(Ordering::Relaxed).max(CONTENDED)
    }

    /// Records a batch submitted alone: the polls of busy hardware, and the polls for the core's
    /// own batch.
    #[inline]
    fn waited(&self, looks: u32, own: u32) {
        let before = self.contended.load(Ordering::Relaxed);
        let contended = match looks > 0 && looks.saturating_mul(SHORT) >= own {
            true => before.saturating_add(1),
            false => 0,
        };
        if contended != before {
            self.contended.store(contended, Ordering::Relaxed);
        }
        self.own.store(own, Ordering::Relaxed);
    }

    /// Records a post: whether other cores had posted.
    fn joined(&self, others: bool) {
        let (joins_left, contended, calls_at) = match self.joins_left.load(Ordering::Relaxed) {
            _ if !others => (0, 0, (2 * self.calls_at()).min(CONTENDED_MAX)),
            // One wait that is not short brings it back.
            0 => (JOINS, CONTENDED.saturating_sub(1), 0),
            left => (left - 1, CONTENDED.saturating_sub(1), 0),
        };
        self.joins_left.store(joins_left, Ordering::Relaxed);
        self.contended.store(contended, Ordering::Relaxed);
        self.calls_at.store(calls_at, Ordering::Relaxed);
    }
}

/// Meeting point for the unmaps of a domain's cores.
pub struct Combiner {
    generations: Generations,
    policies: Box<[CachePadded<JoinPolicy>]>,
    gather_looks: u32,
}

impl Combiner {
    /// For `cores` cores. One that has called others and is alone when the hardware is idle polls
    /// up to `gather_looks` times for them ([`GATHER_LOOKS`]; with 0 as `strict`, and then two
    /// cores seldom meet).
    pub fn new(cores: usize, gather_looks: u32) -> Self {
        Self {
            generations: Generations::new(),
            policies: (0..cores.min(CORES_MAX))
                .map(|_| CachePadded::default())
                .collect(),
            gather_looks,
        }
    }

    /// Returns when an invalidation of `range` that was submitted after the call is complete.
    /// No other thread calls for the same `core` at the same time.
    ///
    /// # Errors
    /// The error of the [`Invalidator`] for the batch that held the range.
    #[inline]
    pub fn flush<I: Invalidator>(
        &self,
        invalidator: &I,
        core: usize,
        range: IovaRange,
    ) -> Result<(), InvalidateError> {
        let own = [Command::Pages(range)];
        let enough = invalidator.meets_from();
        let policy = match self.policies.get(core) {
            Some(policy) if enough <= self.policies.len() => policy,
            // So many cores never meet.
            _ => return invalidator.flush(&own),
        };
        if !policy.joins()
            && let Some((ticket, looks)) = self.go_alone(invalidator, policy, &own)?
        {
            policy.waited(looks, wait(invalidator, ticket)?);
            return Ok(());
        }
        self.join_batch(invalidator, enough, policy, range)
    }

    /// Submits as soon as the hardware is idle. Returns the ticket and the number of polls; `None`
    /// if the core is to join others instead.
    #[inline]
    fn go_alone<I: Invalidator>(
        &self,
        invalidator: &I,
        policy: &JoinPolicy,
        own: &[Command],
    ) -> Result<Option<(Ticket, u32)>, InvalidateError> {
        let joins_after = policy.joins_after();
        let mut spin = Spin::default();
        let mut looks = 0;
        loop {
            if looks >= joins_after && self.generations.has_posts() {
                return Ok(None);
            }
            let submitted = match looks {
                BUSY_LOOKS => Some(invalidator.submit(own)?),
                _ => invalidator.try_submit(own)?,
            };
            if let Some(ticket) = submitted {
                return Ok(Some((ticket, looks)));
            }
            if looks == 0 && policy.contended.load(Ordering::Relaxed) >= policy.calls_at() {
                return Ok(None);
            }
            looks = spin.wait();
        }
    }

    /// Posts, and ensures that the generation is closed, by this core or another.
    fn join_batch<I: Invalidator>(
        &self,
        invalidator: &I,
        enough: usize,
        policy: &JoinPolicy,
        range: IovaRange,
    ) -> Result<(), InvalidateError> {
        let own = [Command::Pages(range)];
        let all = &self.generations;
        let left = policy.left.load(Ordering::Relaxed);
        // Where none was left, `open` is not read: that would cost each request a line's transfer.
        if left != 0 && left == all.open() {
            // A second post of one core could make more of them than there is room for. Any other
            // core that was left in there finds that it is alone.
            let batch_ticket = BatchTicket {
                generation: left,
                place: 0,
                is_awaited: false,
            };
            if all.is_reported(left - 1)
                && let Some(count) = all.close(batch_ticket)
            {
                all.take(left, count);
                all.report(left, None);
            }
            return invalidator.flush(&own);
        }
        if left != 0 {
            policy.left.store(0, Ordering::Relaxed);
        }
        let batch_ticket = all.join();
        let is_next = || all.is_reported(batch_ticket.generation - 1);
        // Beyond this place a domain command is cheaper anyway, and the range is not needed.
        if batch_ticket.place + 1 < invalidator.whole_domain_from() {
            all.put(batch_ticket, range);
        }
        let closes = match batch_ticket.place {
            0 => self.stand_first(invalidator, enough, batch_ticket.generation),
            // The first would see only a line's transfer from now that enough have posted.
            place => batch_ticket.is_awaited && place + 1 == enough && is_next(),
        };
        let mut closed = closes.then(|| all.close(batch_ticket)).flatten();
        let mut spin = Spin::default();
        loop {
            if let Some(count) = closed {
                policy.joined(count >= enough);
                return self.lead(invalidator, enough, batch_ticket, count, range);
            }
            if let Poll::Ready(ticket) = all.outcome(batch_ticket.generation) {
                policy.joined(ticket.is_some());
                return match ticket {
                    Some(ticket) => wait(invalidator, ticket).map(drop),
                    None => invalidator.flush(&own),
                };
            }
            let looks = spin.wait();
            if looks % LOOKS == 0 && is_next() {
                closed = all.close(batch_ticket);
            }
            if looks >= PATIENCE && closed.is_none() {
                policy
                    .left
                    .store(batch_ticket.generation, Ordering::Relaxed);
                policy.joined(false);
                return invalidator.flush(&own);
            }
        }
    }

    /// The first of a generation waits until the batch of the last one is complete, or, where that
    /// had none, until the hardware is idle; then a little for others if they would make a cheaper
    /// batch. Returns `false` where another core has closed it.
    fn stand_first<I: Invalidator>(&self, invalidator: &I, enough: usize, generation: u64) -> bool {
        let is_open = || self.generations.outcome(generation).is_pending();
        let mut spin = Spin::default();
        let mut looks = 0;
        loop {
            let is_idle = match self.generations.outcome(generation - 1) {
                Poll::Pending => false,
                Poll::Ready(_) if looks >= BUSY_LOOKS => true,
                // An error concerns the cores of that generation only.
                Poll::Ready(Some(ticket)) => invalidator.poll(ticket).unwrap_or(true),
                Poll::Ready(None) => invalidator.is_idle(),
            };
            if is_idle {
                break;
            }
            if looks >= BUSY_LOOKS || !is_open() {
                return false;
            }
            looks = spin.wait();
        }
        if self.gather_looks == 0 || self.generations.await_others() >= enough {
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

    /// Carries out a generation of `count`, which this core has closed. Takes its ranges before the
    /// report, which the core that closes the next generation has seen.
    fn lead<I: Invalidator>(
        &self,
        invalidator: &I,
        enough: usize,
        batch_ticket: BatchTicket,
        count: usize,
        range: IovaRange,
    ) -> Result<(), InvalidateError> {
        let mut ranges = self.generations.take(batch_ticket.generation, count);
        if let Some(own) = ranges.get_mut(batch_ticket.place) {
            *own = Some(range);
        }
        let mut commands = [Command::Domain; RANGES];
        let submitted = if count < enough {
            invalidator.submit(&[Command::Pages(range)])
        } else if count >= invalidator.whole_domain_from() || count > RANGES {
            invalidator.submit(&[Command::Domain])
        } else {
            invalidator.submit(merge(&mut ranges[..count], &mut commands))
        };
        let ticket = submitted.ok().filter(|_| count >= enough);
        self.generations.report(batch_ticket.generation, ticket);
        wait(invalidator, submitted?).map(drop)
    }
}

/// Sorts ranges and writes the fewest commands that cover them to `to`; `Domain`, with which `to`
/// begins, where one range is unknown. `to` has room for as many as there are ranges.
pub(crate) fn merge<'c>(ranges: &mut [Option<IovaRange>], to: &'c mut [Command]) -> &'c [Command] {
    ranges.sort_unstable_by_key(|range| range.map(IovaRange::first));
    let mut len = 0;
    for range in ranges {
        let Some(range) = *range else {
            return &to[..1];
        };
        if let Some(Command::Pages(last)) = to[..len].last_mut()
            && range.first().raw() <= last.last().raw().saturating_add(1)
        {
            let end = last.last().max(range.last());
            let pages = end.raw() - last.first().raw() + 1;
            *last = IovaRange::new(last.first(), pages).expect("spans two ranges of the space");
        } else {
            to[len] = Command::Pages(range);
            len += 1;
        }
    }
    &to[..len]
}

/// Waits, without pauses at first. Returns the number of polls.
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
