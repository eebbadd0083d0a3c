//! Combining: the unmaps of many cores meet in one batch and one wait.
//!
//! Whoever unmaps while nobody leads becomes the **leader**: it takes what others have posted, submits one batch, and
//! gathers what is posted while the hardware works. When the batch is complete it leaves the seat, tells the cores of the
//! batch, and wakes one of those it has gathered and not served: whoever takes the seat first, that core or any that comes
//! along, serves them all. A core that unmaps often is back before the woken one: then their requests
//! share a batch although nobody waited for that.
//!
//! As pseudo-code:
//! ```text
//! if take(seat)            { return lead(own request) }
//! if post(own request)     { return lead(all posted) }          // the seat was left meanwhile: post takes it
//! loop { if answered { return } if told "your turn" and take(seat) { return lead(all posted) } }
//! lead: batch += posted; ticket = submit(merge(batch)); while not poll(ticket) { next += posted }
//!       post(next) and leave(seat), in one step; answer(batch); tell one of next that it is its turn
//! ```
//! **Guarantee**: nobody returns before an invalidation is complete that covers his range and was submitted after
//! he posted it, hence after he cleared the entries. Orderings: a post is a Release read-modify-write, the leader's
//! taking of it an Acquire one (the clearing comes before the submission), and leaving the seat passes on what the leader
//! knew; an answer is a Release store, the waiter's look an Acquire load (what the hardware did comes before the return).
//! The loom models check this, and that three mutants are caught. An error of the [`Invalidator`] reaches everybody
//! whose request was in the batch.
//!
//! | departure from the plain version | why |
//! |---|---|
//! | the seat and all posts are bits of one line, a word for 62 cores | a leader finds them without looking at each core's line |
//! | requests and answers have lines of their own; an answer carries the batch's number | nothing is reset; who waits spins on his own line |
//! | the seat is left before the answers are stored | the next read-modify-write of the leader need not wait for their lines |
//! | what comes to [`whole_domain_from`](Invalidator::whole_domain_from) requests becomes a domain command unread | their lines stay where they are |
//! | short waits make no pause ([`Spin`]) | a pause is as long as a line's transfer |
//!
//! Cost: alone, two read-modify-writes of one line. With others, three line transfers for each request (the post, and the
//! answer there and back), and the leader's few for each batch.
//!
//! Left out: sleeping; keeping the hardware busy between batches (the seat changes hands while it is idle, as
//! a lock would); fairness beyond this: a leader serves all that had posted when it submitted. Cores from the 373rd on
//! invalidate for themselves.

mod merge;
#[cfg(test)]
#[cfg(loom)]
mod model;
mod seat;

use alloc::boxed::Box;

use iova::IovaRange;
use lines::{CachePadded, Ordering, Spin};

use self::merge::Merged;
use self::seat::{CORES_MAX, Cores, News, Node, Seat, Told, WORDS};
use super::{Command, InvalidateError, Invalidator};

/// After so many looks at its own line, who waits looks at the seat as well. Being told is enough; this only forgives a
/// word that was overwritten by an older one.
const LOOKS: u32 = 1 << 12;

/// What the models must catch.
#[cfg(any(loom, shuttle))]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mutant {
    /// Nothing is planted.
    None,
    /// The cores of a batch are told before the hardware is done.
    EarlyAnswer,
    /// A post orders nothing. Only loom sees this.
    RelaxedPost,
    /// Who posted during the wait is told that the running batch held him.
    LateJoin,
}

/// Where the unmaps of a domain's cores meet.
pub struct Combiner {
    seat: CachePadded<Seat>,
    nodes: Box<[Node]>,
    gather_spins: u32,
    #[cfg(any(loom, shuttle))]
    mutant: Mutant,
}

impl Combiner {
    /// For `cores` cores; no gather delay.
    pub fn new(cores: usize) -> Self {
        Self::with_gather(cores, 0)
    }

    /// As [`new`](Self::new); a leader with fewer requests than the last batch had looks up to `gather_spins` times for
    /// the missing ones before it submits. A longer look merges more and costs a core whose companions stay
    /// away that much, once.
    pub fn with_gather(cores: usize, gather_spins: u32) -> Self {
        let cores = cores.min(CORES_MAX);
        Self {
            seat: CachePadded::default(),
            nodes: (0..cores).map(|_| Node::default()).collect(),
            gather_spins,
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
        let Some(node) = self.nodes.get(core) else {
            return invalidator.flush(&[Command::Pages(range)]);
        };
        let told = node.request(range);
        if seat::is_one_word(self.nodes.len()) {
            self.meet::<1, I>(invalidator, core, told)
        } else {
            self.meet::<WORDS, I>(invalidator, core, told)
        }
    }

    /// Leads if nobody does, and waits for the answer otherwise.
    #[inline]
    fn meet<const W: usize, I: Invalidator>(
        &self,
        invalidator: &I,
        core: usize,
        told: Told,
    ) -> Result<(), InvalidateError> {
        if self.seat.take(self.order()) {
            let mut batch = Cores::<W>::NONE;
            batch.add(core);
            self.seat.gather(&mut batch);
            return self.lead(invalidator, core, batch);
        }
        self.join::<W, I>(invalidator, core, told)
    }

    /// Posts, and waits for the answer or for the seat.
    fn join<const W: usize, I: Invalidator>(
        &self,
        invalidator: &I,
        core: usize,
        mut told: Told,
    ) -> Result<(), InvalidateError> {
        let node = &self.nodes[core];
        let mut leads = self.seat.post(core, self.order());
        let mut spin = Spin::default();
        loop {
            if leads {
                let mut batch = Cores::<W>::NONE;
                self.seat.gather(&mut batch);
                if batch.has(core) {
                    return self.lead(invalidator, core, batch);
                }
                // Our batch is complete, and its leader has left and is about to tell us.
                self.leave(&batch, None);
            }
            leads = match node.news(&mut told) {
                News::Answer(result) => return result,
                News::Turn => self.seat.take_if_free(),
                News::Nothing => spin.wait() % LOOKS == 0 && self.seat.take_if_free(),
            };
        }
    }

    /// Of taking the seat and of posting.
    #[inline]
    fn order(&self) -> Ordering {
        #[cfg(any(loom, shuttle))]
        if self.mutant == Mutant::RelaxedPost {
            return Ordering::Relaxed;
        }
        Ordering::AcqRel
    }

    /// Carries out one batch, in which `core` is, and leaves the seat.
    fn lead<const W: usize, I: Invalidator>(
        &self,
        invalidator: &I,
        core: usize,
        mut batch: Cores<W>,
    ) -> Result<(), InvalidateError> {
        let mut spin = Spin::default();
        if self.gather_spins > 0 {
            let expected = self.seat.last_size();
            while batch.count() < expected && spin.wait() <= self.gather_spins {
                self.seat.gather(&mut batch);
            }
        }
        let number = self.seat.begin(batch.count());
        let submitted = self.submit(invalidator, core, &batch);
        batch.remove(core);
        let mut next = Cores::<W>::NONE;
        #[cfg(any(loom, shuttle))]
        if self.mutant == Mutant::EarlyAnswer {
            self.answer(core::mem::replace(&mut batch, Cores::NONE), number, Ok(()));
        }
        let result = submitted.and_then(|ticket| {
            while !invalidator.poll(ticket)? {
                self.seat.gather(&mut next);
                spin.wait();
            }
            Ok(())
        });
        #[cfg(any(loom, shuttle))]
        if self.mutant == Mutant::LateJoin {
            self.answer(core::mem::replace(&mut next, Cores::NONE), number, result);
        }
        self.leave(&next, Some(number));
        self.answer(batch, number, result);
        result
    }

    /// Hands a batch to the hardware.
    #[inline]
    fn submit<const W: usize, I: Invalidator>(
        &self,
        invalidator: &I,
        core: usize,
        batch: &Cores<W>,
    ) -> Result<super::Ticket, InvalidateError> {
        let count = batch.count();
        if count >= invalidator.whole_domain_from().max(1) {
            return invalidator.submit(&[Command::Domain]);
        }
        if count == 1 {
            let range = self.nodes[core].range();
            return invalidator.submit(&[range.map_or(Command::Domain, Command::Pages)]);
        }
        let mut rest = *batch;
        let ranges = core::iter::from_fn(|| rest.pop().map(|core| self.nodes[core].range()));
        invalidator.submit(Merged::of(ranges).commands())
    }

    /// Lets others lead, one of whom is told.
    #[inline]
    fn leave<const W: usize>(&self, left: &Cores<W>, number: Option<u64>) {
        let number = number.unwrap_or_else(|| self.seat.begin(self.seat.last_size()));
        if let Some(waiting) = self.seat.leave(left) {
            self.nodes[waiting].your_turn(number);
        }
    }

    #[inline]
    fn answer<const W: usize>(
        &self,
        mut batch: Cores<W>,
        number: u64,
        result: Result<(), InvalidateError>,
    ) {
        while let Some(core) = batch.pop() {
            self.nodes[core].answer(number, result);
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use iova::IovaPfn;
    use lines::AtomicBool;

    use super::super::Ticket;
    use super::*;

    fn range(first: u64, pages: u64) -> IovaRange {
        IovaRange::new(IovaPfn::new(first), pages).unwrap()
    }

    #[test]
    fn an_error_reaches_its_caller_and_the_next_request_works() {
        struct Dead(AtomicBool);
        impl Invalidator for Dead {
            fn submit(&self, _: &[Command]) -> Result<Ticket, InvalidateError> {
                Ok(Ticket(0))
            }
            fn poll(&self, _: Ticket) -> Result<bool, InvalidateError> {
                if self.0.load(Ordering::Relaxed) {
                    return Err(InvalidateError::Stopped { status: 0x40 });
                }
                Ok(true)
            }
        }
        let combiner = Combiner::new(2);
        let dead = Dead(AtomicBool::new(true));
        let error = Err(InvalidateError::Stopped { status: 0x40 });
        assert_eq!(combiner.flush(&dead, 1, range(1, 1)), error);
        dead.0.store(false, Ordering::Relaxed);
        assert_eq!(combiner.flush(&dead, 1, range(1, 1)), Ok(()));
    }
}
