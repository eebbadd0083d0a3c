//! Going to sleep without losing a wake-up.
//!
//! ```text
//! park:   state = ARMING
//!         arm every poller                 (one that cannot be armed: no sleep, keep polling)
//!         fence(SeqCst)                    ONE for all sources; pairs with the fence of every
//!                                          notifier between publishing and reading "does it want
//!                                          to be told?": a driver's mb() between avail.idx and
//!                                          avail_event, a sender's fence in gate.rs
//!         every poller: has work?  mailbox?  stop?      (every source AFTER the fence)
//!         state = ARMING → ASLEEP          (fails if a sender got in between)
//!         wait on all descriptors, until the earliest deadline
//! wake:   state = AWAKE, disarm every poller; the caller then polls everything and does not trust
//!         which descriptor fired
//! ```
//! Why one fence is enough: each source's "tell me" is stored before it and each source is read
//! after it; so for each source either this side reads what was published, or the notifier reads
//! "tell me" and makes a descriptor readable, which ends the wait whenever it happens. A page that
//! is armed by write protection needs no fence of the writer: its store either took effect before
//! the protection, and is read, or faults.
//!
//! Called by the loop in [`run`](crate::run) only. Left out: how long to wait before it (that is
//! [`idle`](crate::idle)).

use std::io;

use crate::{
    gate::{Bell, Gate, Steps},
    poller::{ArmError, Poller},
    sync::{Ordering, fence},
};

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// A sender rang the bell.
    Mailbox,
    /// A descriptor of a poller.
    Fd,
    /// A poller's deadline.
    Deadline,
    /// A signal.
    Interrupted,
}

/// How a [`park`] ended.
#[derive(Debug)]
pub(crate) enum Parked {
    /// The last look found something, or a sender called the sleep off.
    WorkFound,
    /// A poller could not be armed: sleeping would not be safe.
    NotArmed(ArmError),
    Slept(Wake),
}

/// The blocking call.
pub(crate) trait Waiter {
    /// Blocks until the bell has rung, a descriptor of a poller is readable, or the earliest
    /// deadline has come.
    ///
    /// # Errors
    /// When it cannot wait on one of them; the sidecore then counts as not armed.
    fn wait<P: Poller>(&mut self, pollers: &[P]) -> io::Result<Wake>;
}

/// One sleep of a sidecore that has emptied its mailbox of the first `seen` messages; see the head of this module.
pub(crate) fn park<S: Steps, P: Poller, B: Bell>(
    pollers: &mut [P],
    gate: &Gate<B>,
    seen: u64,
    waiter: &mut impl Waiter,
) -> Parked {
    let early_work = !S::RECHECK_AFTER_ARM && has_work::<S, P, B>(pollers, gate, seen);
    gate.begin_arming();
    for armed in 0..pollers.len() {
        if let Err(error) = pollers[armed].arm() {
            gate.awake();
            pollers[..armed].iter_mut().for_each(P::disarm);
            return Parked::NotArmed(error);
        }
    }
    if S::FENCE {
        fence(Ordering::SeqCst);
    }
    let work = early_work || (S::RECHECK_AFTER_ARM && has_work::<S, P, B>(pollers, gate, seen));
    let outcome = if !work && gate.try_sleep() {
        match waiter.wait(pollers) {
            Ok(wake) => Parked::Slept(wake),
            Err(error) => Parked::NotArmed(ArmError::new(error)),
        }
    } else {
        Parked::WorkFound
    };
    gate.awake();
    pollers.iter_mut().for_each(P::disarm);
    outcome
}

fn has_work<S: Steps, P: Poller, B: Bell>(pollers: &mut [P], gate: &Gate<B>, seen: u64) -> bool {
    let checked = if S::RECHECK_LAST_POLLER {
        pollers.len()
    } else {
        pollers.len() - 1
    };
    (S::RECHECK_MAILBOX && (gate.sent() != seen || gate.is_stopping()))
        || pollers[..checked].iter_mut().any(P::has_work)
}

#[cfg(all(test, loom))]
mod model;
