//! Queues between the owner and the link thread that maintain the back end's IOTLB.
//!
//! ```text
//! link thread ── questions: a miss, where the rings stand ──▶ owner, which alone translates
//! link thread ◀── commands: an entry, a refusal, an invalidation ── owner
//! link thread ── released holds ──▶ owner
//! ```
//! **One order.** All commands are in one queue, which the owner fills and the link thread empties
//! into one socket. An entry that was read from the tables before an invalidation is therefore sent
//! before it, and one that is sent after the invalidation was read after it.
//!
//! **Sessions.** A connection's IOTLB begins empty and ends with it. Questions and commands belong
//! to a session; when it has ended they are void, and their holds are released.
//!
//! **Bounds.** At most [`MISSES`] misses are asked at a time. Invalidations that follow each other
//! join, and a guest's wait needs one hold of those that have joined; so there are never more of
//! them than entries between them, and one.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use guest_mem::Gpa;
use vhost_user::wire::{IotlbAccess, IotlbRange};

use crate::memory::{Indices, RingPlace};

/// Misses that the owner is asked about at a time. What comes beyond it waits in the channel's
/// socket.
pub(crate) const MISSES: usize = 64;
/// Ranges of one invalidation; more become all there is.
const RANGES: usize = 16;

/// All IOVAs that entries are made for, which are below 2^63: a back end that adds size to address
/// finds no overflow (DPDK drops such an invalidation).
pub(crate) const EVERYTHING: IotlbRange = IotlbRange {
    first: 0,
    last: (1 << 63) - 1,
};

/// Mapping, as it is sent to the back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub range: IotlbRange,
    /// Guest address of the first byte.
    pub gpa: Gpa,
    /// Access that the guest's tables allow.
    pub access: IotlbAccess,
}

/// An invalidation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Invalidation {
    /// At least one.
    pub ranges: Vec<IotlbRange>,
    /// To be released once the back end has forgotten all of them.
    pub hold: Option<u64>,
}

/// Command of the owner to the link thread.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// A mapping, because of that miss or unasked.
    Update {
        miss: Option<u64>,
        entry: Entry,
    },
    /// That miss has no mapping.
    Refuse {
        miss: u64,
    },
    Invalidate(Invalidation),
    /// The answer to [`Question::Rings`], behind entries for their pages; `None`: they cannot be
    /// read.
    Rings {
        number: u64,
        indices: Option<Vec<Indices>>,
    },
}

/// Question of the link thread to the owner.
#[derive(Clone, Debug)]
pub(crate) enum Question {
    /// Translation of an IOVA.
    Miss {
        number: u64,
        iova: u64,
        access: IotlbAccess,
    },
    /// Positions of these rings.
    Rings { number: u64, rings: Vec<RingPlace> },
}

/// Outcome of queueing an invalidation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InvalidateOutcome {
    /// There is no such session any more, nor its entries.
    Gone,
    /// It has joined the invalidation before it, whose hold covers both.
    Joined,
    /// Its own hold is released when the back end has answered.
    Held,
}

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct Exchange(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// The session that is; 0: none.
    session: u64,
    questions: VecDeque<Question>,
    commands: VecDeque<Command>,
    released: VecDeque<u64>,
}

impl Exchange {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // The owner's side.

    /// The next question, and the session that asks.
    pub fn take_question(&self) -> Option<(u64, Question)> {
        let mut inner = self.inner();
        let session = inner.session;
        inner
            .questions
            .pop_front()
            .map(|question| (session, question))
    }

    /// Whether `session` still is.
    pub fn is_current(&self, session: u64) -> bool {
        self.inner().session == session
    }

    /// Queues a command other than an invalidation for `session`, and returns whether that is still
    /// the current session.
    pub fn tell(&self, session: u64, command: Command) -> bool {
        let mut inner = self.inner();
        let is_current = inner.session == session;
        if is_current {
            inner.commands.push_back(command);
        }
        is_current
    }

    /// Queues an invalidation for `session`, behind all earlier commands.
    pub fn invalidate(
        &self,
        session: u64,
        range: IotlbRange,
        hold: Option<u64>,
    ) -> InvalidateOutcome {
        let mut inner = self.inner();
        if session == 0 || inner.session != session {
            return InvalidateOutcome::Gone;
        }
        // Only the last command: an entry in between may be one that this invalidation revokes.
        if let Some(Command::Invalidate(last)) = inner.commands.back_mut() {
            last.add(range);
            return match (last.hold, hold) {
                (None, Some(_)) => {
                    last.hold = hold;
                    InvalidateOutcome::Held
                }
                _ => InvalidateOutcome::Joined,
            };
        }
        let ranges = vec![range];
        inner
            .commands
            .push_back(Command::Invalidate(Invalidation { ranges, hold }));
        InvalidateOutcome::Held
    }

    /// A hold that has ended.
    pub fn take_released(&self) -> Option<u64> {
        self.inner().released.pop_front()
    }

    // The link thread's side.

    /// A session begins.
    pub fn begin(&self, session: u64) {
        let mut inner = self.inner();
        assert!(inner.session == 0 && session != 0, "one at a time");
        inner.session = session;
    }

    /// Ends the session, and with it all holds of invalidations that were not sent. Returns whether
    /// there was a session.
    pub fn end(&self) -> bool {
        let mut inner = self.inner();
        let Inner {
            session,
            questions,
            commands,
            released,
        } = &mut *inner;
        questions.clear();
        let holds = commands.drain(..).filter_map(|command| match command {
            Command::Invalidate(Invalidation { hold, .. }) => hold,
            _ => None,
        });
        released.extend(holds);
        std::mem::take(session) != 0
    }

    /// Queues a question for the owner. The caller wakes the owner.
    pub fn ask(&self, question: Question) {
        self.inner().questions.push_back(question);
    }

    /// The next command.
    pub fn take_command(&self) -> Option<Command> {
        self.inner().commands.pop_front()
    }

    /// The back end has forgotten what this hold was for. The owner is to be woken.
    pub fn release(&self, hold: u64) {
        self.inner().released.push_back(hold);
    }
}

impl Invalidation {
    fn add(&mut self, range: IotlbRange) {
        let is_all = self.ranges == [EVERYTHING];
        if is_all || range == EVERYTHING || self.ranges.len() == RANGES {
            self.ranges.clear();
            self.ranges.push(EVERYTHING);
            return;
        }
        match self.ranges.last_mut() {
            Some(last) if last.last.checked_add(1) == Some(range.first) => last.last = range.last,
            _ => self.ranges.push(range),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(number: u64) -> IotlbRange {
        IotlbRange {
            first: number << 12,
            last: (number << 12) + 0xfff,
        }
    }

    fn entry(number: u64) -> Command {
        let entry = Entry {
            range: page(number),
            gpa: Gpa::new(0),
            access: IotlbAccess::Read,
        };
        Command::Update { miss: None, entry }
    }

    fn commands(exchange: &Exchange) -> Vec<Command> {
        std::iter::from_fn(|| exchange.take_command()).collect()
    }

    #[test]
    fn invalidations_join_while_nothing_comes_between_them() {
        let exchange = Exchange::default();
        exchange.begin(1);
        assert_eq!(
            exchange.invalidate(1, page(4), Some(10)),
            InvalidateOutcome::Held
        );
        assert_eq!(
            exchange.invalidate(1, page(5), Some(11)),
            InvalidateOutcome::Joined
        );
        assert_eq!(
            exchange.invalidate(1, page(9), Some(11)),
            InvalidateOutcome::Joined
        );
        assert!(exchange.tell(1, entry(4)));
        let told = exchange.invalidate(1, page(4), Some(12));
        assert_eq!(
            told,
            InvalidateOutcome::Held,
            "an entry is told between them"
        );
        let joined = IotlbRange {
            first: 0x4000,
            last: 0x5fff,
        };
        let expected = [
            Command::Invalidate(Invalidation {
                ranges: vec![joined, page(9)],
                hold: Some(10),
            }),
            entry(4),
            Command::Invalidate(Invalidation {
                ranges: vec![page(4)],
                hold: Some(12),
            }),
        ];
        assert_eq!(commands(&exchange), expected);
    }

    #[test]
    fn any_number_of_invalidations_is_one_of_everything() {
        let exchange = Exchange::default();
        exchange.begin(1);
        for number in 0..100_000 {
            let told = exchange.invalidate(1, page(2 * number), Some(number));
            assert_eq!(told == InvalidateOutcome::Held, number == 0);
        }
        let expected = Invalidation {
            ranges: vec![EVERYTHING],
            hold: Some(0),
        };
        assert_eq!(commands(&exchange), [Command::Invalidate(expected)]);
    }

    #[test]
    fn an_invalidation_that_nobody_waits_for_takes_the_hold_of_one_that_joins() {
        let exchange = Exchange::default();
        exchange.begin(1);
        assert_eq!(
            exchange.invalidate(1, EVERYTHING, None),
            InvalidateOutcome::Held
        );
        assert_eq!(
            exchange.invalidate(1, page(1), Some(3)),
            InvalidateOutcome::Held
        );
        exchange.end();
        assert_eq!(exchange.take_released(), Some(3));
        assert_eq!(exchange.take_released(), None);
    }

    #[test]
    fn a_session_that_has_ended_is_told_nothing_and_holds_nothing() {
        let exchange = Exchange::default();
        exchange.begin(1);
        assert_eq!(
            exchange.invalidate(1, page(1), Some(1)),
            InvalidateOutcome::Held
        );
        assert!(exchange.end());
        assert!(!exchange.end());
        assert_eq!(exchange.take_released(), Some(1));
        for session in [0, 1] {
            assert_eq!(
                exchange.invalidate(session, page(1), Some(2)),
                InvalidateOutcome::Gone
            );
        }
        exchange.begin(2);
        assert!(!exchange.tell(1, entry(1)), "it is of another session");
        assert_eq!(
            exchange.invalidate(1, page(1), Some(2)),
            InvalidateOutcome::Gone
        );
        assert_eq!(commands(&exchange), []);
    }
}
