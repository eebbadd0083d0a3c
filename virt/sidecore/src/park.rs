//! The sleep of a sidecore, which loses no wake-up.
//!
//! ```text
//! park:   state = ARMING
//!         arm every poller that is not armed   (one that cannot be: no sleep, keep polling)
//!         fence(SeqCst)                    ONE for all sources; pairs with the fence of every
//!                                          notifier between publishing and reading "must I
//!                                          notify?": a driver's mb() between avail.idx and
//!                                          avail_event, a sender's fence in gate.rs
//!         those: has work?  mailbox?  stop?    (every source AFTER the fence)
//!         state = ARMING → ASLEEP          (fails if a sender got in between)
//!         epoll_wait, until the earliest deadline
//! wake:   state = AWAKE; the caller then re-checks every source, whichever descriptor fired.
//!         A poller is disarmed when it is about to be called, and armed again by the next park
//! ```
//! One fence is enough. Each source's request for notification is stored before it, and each source
//! is read after it. So for each source either this side reads what was published, or the notifier
//! reads the request and makes a descriptor readable, which ends the wait whenever it happens. A
//! page that is armed by write protection needs no fence of the writer: its store either took
//! effect before the protection, and is read, or faults.
//!
//! Pollers that stayed armed need no second check. The park that armed them checked them and found
//! nothing, and everything published since then has seen the request for notification. So either
//! the descriptor is readable now, or the poller has been called (and so disarmed) since.
//!
//! Called by the loop in [`run`](crate::run) only. The time to wait before a sleep is in
//! [`idle`](crate::idle).

use std::io;

use crate::{
    clock::Nanos,
    gate::{Gate, Notifier},
    poller::{ArmError, Poller},
    pollers::Pollers,
    sync::{Ordering, fence},
};

/// Cause of the end of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// A sender.
    Mailbox,
    /// A descriptor of a poller.
    Fd,
    /// A poller's deadline.
    Deadline,
    /// A signal.
    Interrupted,
}

/// Outcome of a [`park`].
#[derive(Debug)]
pub(crate) enum Parked {
    /// The re-check found something, or a sender called the sleep off.
    WorkFound,
    /// A poller could not be armed: sleeping would not be safe.
    NotArmed(ArmError),
    Slept(Wake),
}

/// Blocking call of a sleep.
pub(crate) trait Waiter {
    /// Blocks until the notifier has been used, a registered descriptor is readable, or `deadline`
    /// has come.
    ///
    /// # Errors
    /// When it cannot wait; the sidecore then counts as not armed.
    fn wait(&mut self, deadline: Option<Nanos>) -> io::Result<Wake>;
}

/// Performs one sleep of a sidecore that has emptied its mailbox of the first `seen` messages; see
/// the head of this module.
pub(crate) fn park<P: Poller, B: Notifier>(
    pollers: &mut Pollers<P>,
    gate: &Gate<B>,
    seen: u64,
    waiter: &mut impl Waiter,
) -> Parked {
    gate.begin_arming();
    if let Err(error) = pollers.arm() {
        gate.awake();
        return Parked::NotArmed(error);
    }
    fence(Ordering::SeqCst);
    // Both are evaluated: a poller that is not checked after its arming may never be checked.
    let work = has_mail(gate, seen) | pollers.last_look();
    let outcome = if !work && gate.try_sleep() {
        match waiter.wait(pollers.earliest()) {
            Ok(wake) => Parked::Slept(wake),
            Err(error) => Parked::NotArmed(ArmError::new(error)),
        }
    } else {
        Parked::WorkFound
    };
    gate.awake();
    outcome
}

fn has_mail<B: Notifier>(gate: &Gate<B>, seen: u64) -> bool {
    gate.sent() != seen || gate.is_stopping()
}

#[cfg(all(test, loom))]
#[path = "park/tests/model.rs"]
mod model;
