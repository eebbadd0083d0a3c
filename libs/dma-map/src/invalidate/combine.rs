//! Combining: the unmaps of many cores meet in one batch and one wait.
//!
//! Each core has a request line. It posts its range there and then either finds it completed or becomes the
//! **leader**, which whoever gets the seat is. The leader gathers every posted request, merges adjacent ranges,
//! submits one batch, and while the hardware works gathers the next one, which it submits before it tells the cores
//! of the first that they are done: the hardware never waits for a hand-over. After a bounded number of batches it
//! leaves; a core still waiting takes the seat, so nothing depends on the leader's return.
//!
//! As pseudo-code:
//! ```text
//! post(range); while not done { if seat is free { lead() } }
//! lead: next = gather()
//!       repeat { batch = next; ticket = submit(merge(batch)); complete(previous)
//!                while not poll(ticket) { next += gather() } }  until next is empty, or rounds are used up
//! ```
//! **Guarantee**: nobody returns before an invalidation is complete that covers his range and was submitted after
//! he posted it, hence after he cleared the entries. Orderings: a post is a Release store, the leader's look an
//! Acquire load (the clearing comes before the submission); a completion is a Release store, the waiter's look an
//! Acquire load (what the hardware did comes before the return). The loom model below checks this, and that a
//! leader who completes before the wait is caught.
//!
//! Departures from the plain version: the next batch is gathered during the wait and submitted before the previous one
//! is marked (2 cores, 500 ns serial hardware: the hardware idles only between a pair of batches); a batch of
//! [`whole_domain_from`](super::Invalidator::whole_domain_from) ranges or more becomes one domain command.
//!
//! Cost: alone, one store, one lock, one scan; with others, two line transfers per request.
//! Left out: fairness among leaders beyond the bound on rounds; sleeping.

use alloc::{boxed::Box, vec::Vec};

use iova::{IovaPfn, IovaRange};
use lines::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, CachePadded, Lock, Ordering};

use super::{Command, InvalidateError, Invalidator};

const IDLE: u32 = 0;
const POSTED: u32 = 1;
const DONE: u32 = 2;
const TIMED_OUT: u32 = 3;
const STOPPED: u32 = 4;

/// Batches a leader carries out at most before it leaves the seat.
const ROUNDS: u32 = 4;

/// One core's request. Written by the core while `IDLE` or done, by the leader while `POSTED`; the state says which.
#[derive(Default)]
struct Line {
    state: AtomicU32,
    first: AtomicU64,
    pages: AtomicU64,
    /// Facts of an error.
    detail: AtomicU64,
}

impl Line {
    fn post(&self, range: IovaRange) {
        self.first.store(range.first().raw(), Ordering::Relaxed);
        self.pages.store(range.pages(), Ordering::Relaxed);
        // Release: the leader that sees it sees the range, and the cleared entries.
        self.state.store(POSTED, Ordering::Release);
    }

    #[inline]
    fn posted(&self) -> Option<IovaRange> {
        if self.state.load(Ordering::Acquire) != POSTED {
            return None;
        }
        IovaRange::new(
            IovaPfn::new(self.first.load(Ordering::Relaxed)),
            self.pages.load(Ordering::Relaxed),
        )
    }

    fn complete(&self, result: Result<(), InvalidateError>) {
        let state = match result {
            Ok(()) => DONE,
            Err(InvalidateError::TimedOut { waited_ns }) => {
                self.detail.store(waited_ns, Ordering::Relaxed);
                TIMED_OUT
            }
            Err(InvalidateError::Stopped { status }) => {
                self.detail.store(status, Ordering::Relaxed);
                STOPPED
            }
        };
        // Release: the waiter that sees it sees that the hardware is done.
        self.state.store(state, Ordering::Release);
    }

    fn take(&self) -> Option<Result<(), InvalidateError>> {
        let result = match self.state.load(Ordering::Acquire) {
            DONE => Ok(()),
            TIMED_OUT => Err(InvalidateError::TimedOut {
                waited_ns: self.detail.load(Ordering::Relaxed),
            }),
            STOPPED => Err(InvalidateError::Stopped {
                status: self.detail.load(Ordering::Relaxed),
            }),
            _ => return None,
        };
        self.state.store(IDLE, Ordering::Relaxed);
        Some(result)
    }
}

type Requests = Vec<(usize, IovaRange)>;

/// What belongs to whoever leads. Its vectors keep their memory.
#[derive(Default)]
struct Leader {
    /// Lines that are in one of the lists, so that a look does not find them twice.
    is_taken: Vec<bool>,
    /// Gathered, not submitted.
    next: Requests,
    /// Submitted, not completed.
    batch: Requests,
    commands: Vec<Command>,
}

/// Where the unmaps of a domain's cores meet.
pub struct Combiner {
    lines: Box<[CachePadded<Line>]>,
    /// Lines from here on were never used.
    used: AtomicUsize,
    /// A hint beside the seat: who waits reads it instead of pulling at the lock.
    is_led: CachePadded<AtomicBool>,
    seat: CachePadded<Lock<Leader>>,
    rounds: u32,
    gather_spins: u32,
    /// The mutant that the loom model must catch.
    #[cfg(loom)]
    completes_before_the_wait: bool,
}

impl Combiner {
    /// For `cores` cores; no gather delay.
    pub fn new(cores: usize) -> Self {
        Self::with_gather(cores, 0)
    }

    /// As [`new`](Self::new); a leader that finds only its own request looks up to `gather_spins` times for another
    /// before it submits. A longer look merges more and costs a lone core that much.
    pub fn with_gather(cores: usize, gather_spins: u32) -> Self {
        Self {
            lines: (0..cores).map(|_| CachePadded::default()).collect(),
            used: AtomicUsize::new(0),
            is_led: CachePadded::new(AtomicBool::new(false)),
            seat: CachePadded::new(Lock::new(Leader {
                is_taken: alloc::vec![false; cores],
                ..Leader::default()
            })),
            rounds: ROUNDS,
            gather_spins,
            #[cfg(loom)]
            completes_before_the_wait: false,
        }
    }

    /// Says that `core` will call: its line is looked at from now on.
    pub fn join(&self, core: usize) {
        self.used.fetch_max(core + 1, Ordering::Relaxed);
    }

    /// Returns when an invalidation of `range` that was submitted after the call is complete.
    /// `core` has [joined](Self::join), and no other thread calls for it at the same time.
    ///
    /// # Errors
    /// What the [`Invalidator`] said of the batch that held the range.
    ///
    /// # Panics
    /// There is no such core.
    pub fn flush<I: Invalidator>(
        &self,
        invalidator: &I,
        core: usize,
        range: IovaRange,
    ) -> Result<(), InvalidateError> {
        let line = &self.lines[core];
        line.post(range);
        loop {
            // Relaxed: a hint. Whoever believes it too long only waits for a completion that may never come from
            // this leader, and looks again.
            if !self.is_led.load(Ordering::Relaxed)
                && let Some(mut leader) = self.seat.try_lock()
            {
                if line.posted().is_some() {
                    self.is_led.store(true, Ordering::Relaxed);
                    self.lead(&mut leader, invalidator);
                    self.is_led.store(false, Ordering::Relaxed);
                }
                drop(leader);
            }
            if let Some(result) = line.take() {
                return result;
            }
            lines::spin_loop();
        }
    }

    /// Adds what is posted and not yet taken to the next batch.
    #[inline]
    fn gather(&self, leader: &mut Leader) {
        let used = self.used.load(Ordering::Relaxed).min(self.lines.len());
        for (core, line) in self.lines[..used].iter().enumerate() {
            if !leader.is_taken[core]
                && let Some(range) = line.posted()
            {
                leader.is_taken[core] = true;
                leader.next.push((core, range));
            }
        }
    }

    /// Carries out batches until nobody waits, or the rounds are used up.
    fn lead<I: Invalidator>(&self, leader: &mut Leader, invalidator: &I) {
        self.gather(leader);
        for _ in 0..self.gather_spins {
            if leader.next.len() > 1 {
                break;
            }
            lines::spin_loop();
            self.gather(leader);
        }
        let mut before = Ok(());
        for _ in 0..self.rounds {
            if leader.next.is_empty() {
                break;
            }
            merge(
                &mut leader.next,
                &mut leader.commands,
                invalidator.whole_domain_from(),
            );
            let submitted = invalidator.submit(&leader.commands);
            self.complete(leader, before);
            core::mem::swap(&mut leader.batch, &mut leader.next);
            #[cfg(loom)]
            if self.completes_before_the_wait {
                self.complete(leader, Ok(()));
            }
            before = submitted.and_then(|ticket| {
                while !invalidator.poll(ticket)? {
                    self.gather(leader);
                    lines::spin_loop();
                }
                Ok(())
            });
        }
        self.complete(leader, before);
        // Looked at and not submitted: still posted, and found again by the next leader.
        for (core, _) in leader.next.drain(..) {
            leader.is_taken[core] = false;
        }
    }

    /// Tells the cores of the submitted batch.
    fn complete(&self, leader: &mut Leader, result: Result<(), InvalidateError>) {
        for (core, _) in leader.batch.drain(..) {
            self.lines[core].complete(result);
            leader.is_taken[core] = false;
        }
    }
}

/// The fewest commands that cover the requests, which it sorts.
fn merge(requests: &mut Requests, commands: &mut Vec<Command>, whole_domain_from: usize) {
    commands.clear();
    requests.sort_unstable_by_key(|(_, range)| range.first());
    for &(_, range) in requests.iter() {
        if let Some(Command::Pages(last)) = commands.last_mut()
            && range.first().raw() <= last.last().raw().saturating_add(1)
        {
            let end = last.last().max(range.last());
            let pages = end.raw() - last.first().raw() + 1;
            *last = IovaRange::new(last.first(), pages).expect("spans two ranges of the space");
        } else {
            commands.push(Command::Pages(range));
        }
    }
    if commands.len() >= whole_domain_from.max(1) {
        commands.clear();
        commands.push(Command::Domain);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn range(first: u64, pages: u64) -> IovaRange {
        IovaRange::new(IovaPfn::new(first), pages).unwrap()
    }

    #[test]
    fn adjacent_and_overlapping_ranges_share_a_command() {
        let mut requests = [(9, 1), (4, 2), (6, 1), (5, 3), (12, 1)]
            .map(|(first, pages)| (0, range(first, pages)))
            .to_vec();
        let mut commands = Vec::new();
        merge(&mut requests, &mut commands, 9);
        let expected = [(4, 4), (9, 1), (12, 1)].map(|(f, p)| Command::Pages(range(f, p)));
        assert_eq!(commands, expected);
        merge(&mut requests, &mut commands, 3);
        assert_eq!(commands, [Command::Domain]);
    }

    #[test]
    fn an_error_reaches_everyone_of_the_batch_and_the_next_request_works() {
        struct Dead(AtomicBool);
        impl Invalidator for Dead {
            fn submit(&self, _: &[Command]) -> Result<super::super::Ticket, InvalidateError> {
                Ok(super::super::Ticket(0))
            }
            fn poll(&self, _: super::super::Ticket) -> Result<bool, InvalidateError> {
                if self.0.load(Ordering::Relaxed) {
                    return Err(InvalidateError::Stopped { status: 0x40 });
                }
                Ok(true)
            }
        }
        let combiner = Combiner::new(2);
        combiner.join(1);
        let dead = Dead(AtomicBool::new(true));
        let error = Err(InvalidateError::Stopped { status: 0x40 });
        assert_eq!(combiner.flush(&dead, 1, range(1, 1)), error);
        dead.0.store(false, Ordering::Relaxed);
        assert_eq!(combiner.flush(&dead, 1, range(1, 1)), Ok(()));
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test -p dma-map --lib --release model`
#[cfg(test)]
#[cfg(loom)]
mod model {
    use super::super::Ticket;
    use super::*;
    use alloc::sync::Arc;

    /// Hardware that remembers page *i* until it is told to forget it while the entry is clear.
    struct Hardware {
        entry: Vec<AtomicBool>,
        cached: Vec<AtomicBool>,
        polls: AtomicU32,
    }

    impl Invalidator for Hardware {
        fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
            let mut pages = 0;
            for command in commands {
                let Command::Pages(range) = command else {
                    unreachable!("fewer than 32 ranges")
                };
                for page in range.first().raw()..=range.last().raw() {
                    pages |= 1 << page;
                }
            }
            Ok(Ticket(pages))
        }

        fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
            if self.polls.fetch_add(1, Ordering::Relaxed) % 2 == 0 {
                return Ok(false);
            }
            for page in 0..self.entry.len() {
                // A page whose entry the walk still finds is remembered again at once.
                if ticket.0 >> page & 1 == 1 && !self.entry[page].load(Ordering::Relaxed) {
                    self.cached[page].store(false, Ordering::Relaxed);
                }
            }
            Ok(true)
        }
    }

    fn explore(threads: usize, mutant: bool) {
        let mut builder = loom::model::Builder::new();
        // Waiters spin, which costs branches; more preemptions cost minutes.
        builder.preemption_bound = Some(if threads > 2 { 1 } else { 2 });
        builder.max_branches = 100_000;
        builder.check(move || {
            let mut combiner = Combiner::new(threads);
            combiner.completes_before_the_wait = mutant;
            combiner.join(threads - 1);
            let shared = Arc::new((
                combiner,
                Hardware {
                    entry: (0..threads).map(|_| AtomicBool::new(true)).collect(),
                    cached: (0..threads).map(|_| AtomicBool::new(true)).collect(),
                    polls: AtomicU32::new(0),
                },
            ));
            let unmap = |shared: &(Combiner, Hardware), core: usize| {
                let (combiner, hardware) = shared;
                hardware.entry[core].store(false, Ordering::Relaxed);
                let range = IovaRange::new(IovaPfn::new(core as u64), 1).unwrap();
                combiner.flush(hardware, core, range).unwrap();
                assert!(
                    !hardware.cached[core].load(Ordering::Relaxed),
                    "an unmap returned before its own invalidation"
                );
            };
            let others: Vec<_> = (1..threads)
                .map(|core| {
                    let shared = Arc::clone(&shared);
                    loom::thread::spawn(move || unmap(&shared, core))
                })
                .collect();
            unmap(&shared, 0);
            for other in others {
                other.join().unwrap();
            }
        });
    }

    #[test]
    fn model_nobody_returns_before_his_own_invalidation() {
        explore(2, false);
    }

    #[test]
    fn model_three_cores() {
        explore(3, false);
    }

    #[test]
    #[should_panic(expected = "before its own invalidation")]
    fn model_catches_a_completion_before_the_wait() {
        explore(2, true);
    }
}
