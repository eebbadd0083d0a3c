//! The [`Poller`] trait: interface of everything that a sidecore runs.

use std::{error::Error, io};

use crate::{clock::Nanos, poll_context::PollContext, wakes::Wakes};

/// Result of a [`Poller::poll`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// It did something, or has more to do at once: the core must not go idle.
    Busy,
    /// Nothing to do now, but work in flight (a disk's answer, a stop under way) that no [`Probe`]
    /// sees: poll again at every sweep. The core may sleep.
    Waiting,
    /// Nothing to do until the probe fires, a message or a descriptor comes, or the deadline has
    /// passed.
    Idle,
}

/// Error of arming: a poller's sources cannot be made to notify. The sidecore stays awake instead
/// of sleeping.
#[derive(Debug, thiserror::Error)]
#[error("cannot arm the notification of a wake source")]
pub struct ArmError(#[source] Box<dyn Error + Send + Sync>);

impl ArmError {
    /// Wraps the reason: an `io::Error`, or a plain text.
    pub fn new(reason: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        ArmError(reason.into())
    }
}

/// Check whether an idle poller has got work, in about a nanosecond: a plain load of a shared word
/// and a comparison with the value that the poller last saw there. The probes of all idle pollers
/// are in one array that each sweep scans.
pub trait Probe: Send {
    /// Returns whether a poll might find work. It may be wrongly true, but not wrongly false.
    fn fires(&self) -> bool;
}

/// Probe of a poller that is polled at every sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AlwaysPoll;

impl Probe for AlwaysPoll {
    fn fires(&self) -> bool {
        true
    }
}

/// Reason for which a poller is to leave its core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetachReason {
    /// It moves to another core. Until it may leave it should work as before, or nearly so: that
    /// may take long, and be aborted.
    Move,
    /// It is removed. Until it may leave it should take nothing new, so that it will be able to.
    End,
}

/// Something polled by a sidecore: the owner of a VM's IOMMU and devices, a vhost-user server, …
///
/// Every method runs on the sidecore's thread. None of them may block or make an unbounded system
/// call, since all pollers of the core wait for it. Slow work belongs to another thread, whose
/// answer comes back as a message.
///
/// **Awake**, the runtime calls `message` for messages that have arrived, `ready` for descriptors
/// that are readable (checked every 100 µs), and `poll` on the active pollers. A poller is active
/// if its last poll was not `Idle`, its probe fires, it got a message or a `ready`, or its deadline
/// has passed. Active pollers share time by deficit round robin, by what they
/// [charge](PollContext::charge), or by the time of their turns if that was more and another poller
/// had work. A poller that becomes active again is served before those that stay active, within its
/// share.
///
/// **To sleep** it calls `arm` on all pollers that are not armed; then one sequentially consistent
/// fence (not a method: the runtime's); then `has_work` on those. If none has work it sleeps on all
/// registered descriptors and the earliest `deadline`. A poller stays armed, also while the core is
/// awake for others, until the runtime is about to call `poll`, `message`, `ready` or `detaching`:
/// `disarm` comes first.
///
/// ```
/// use sidecore::{Activity, AlwaysPoll, ArmError, Poller, PollContext, Wakes};
///
/// /// Adds up the numbers that other threads send.
/// #[derive(Default)]
/// struct Adder(u64);
///
/// impl Poller for Adder {
///     type Message = u64;
///     type Probe = AlwaysPoll;
///     fn poll(&mut self, _turn: &mut PollContext<'_>) -> Activity {
///         Activity::Idle // everything arrives through `message`
///     }
///     fn message(&mut self, number: u64, _turn: &mut PollContext<'_>) {
///         self.0 += number;
///     }
///     fn arm(&mut self, _wakes: &mut Wakes) -> Result<(), ArmError> {
///         Ok(()) // the mailbox is the runtime's to arm
///     }
///     fn has_work(&mut self) -> bool {
///         false
///     }
///     fn disarm(&mut self) {}
/// }
///
/// let core = sidecore::SidecoreBuilder::new("adder").spawn(vec![Adder::default()])?;
/// core.handle(0).send(40)?;
/// core.handle(0).send(2)?;
/// assert_eq!(core.stop()[0].0, 42);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Poller: Send {
    /// Message of other threads to the poller.
    type Message: Send;

    /// Check for work that the runtime makes without calling the poller. [`AlwaysPoll`] if there is
    /// none.
    type Probe: Probe;

    /// Attaches the poller to this core: it registers the descriptors that may wake it.
    ///
    /// When a descriptor cannot be registered. Then none of the poller's is, and it is not added
    /// (or, when it was moved here, it is polled without sleeping until another try succeeds).
    fn attached(&mut self, _wakes: &mut Wakes) -> io::Result<()> {
        Ok(())
    }

    /// Prepares the poller for a move or its end. The runtime removes the descriptors that are
    /// still registered afterwards.
    fn detaching(&mut self, _wakes: &mut Wakes) {}

    /// Returns whether it may leave now; called at each sweep once it has been asked to leave.
    fn may_detach(&mut self, detach_reason: DetachReason) -> bool {
        let _ = detach_reason;
        true
    }

    /// Cancels the request to leave: [`may_detach`](Self::may_detach) is not called any more.
    /// `poll` follows.
    fn stays(&mut self) {}

    /// Does a **bounded** batch of work from each of its sources, and charges for it. It never
    /// drains "until empty", which a guest that keeps refilling would never let end. It continues
    /// while the turn is not spent; the last piece may overdraw it. A poll that lasts longer than a
    /// microsecond asks now and then whether [others wait](PollContext::others_wait), and ends if
    /// they do.
    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity;

    /// Takes one message; those of one sender arrive in the order sent. `poll` follows in the same
    /// sweep, if the poller is not in debt.
    fn message(&mut self, message: Self::Message, turn: &mut PollContext<'_>);

    /// Empties the descriptor registered with `token`, within bounds: it is readable, or has been.
    /// It may be called without work. Work done here should be charged: if a poller often becomes
    /// ready, charges nothing and then finds nothing to poll, its descriptor is muted for a while.
    fn ready(&mut self, _token: u32, _turn: &mut PollContext<'_>) {}

    /// Asks every source to notify through a registered descriptor from now on: it writes
    /// avail_event, write-protects a register page, …
    ///
    /// # Errors
    /// When a source cannot notify. The poller has then undone its part (the runtime does not call
    /// `disarm` on it), and the sidecore keeps polling, with pauses, and tries again later.
    fn arm(&mut self, wakes: &mut Wakes) -> Result<(), ArmError>;

    /// Checks **every** source once more, with plain loads, after `arm` and the runtime's fence,
    /// and returns whether `poll` would find work. Deferred work (a used-up budget, a parked
    /// request that can continue) counts. Work that waits for a message does not.
    fn has_work(&mut self) -> bool;

    /// Reverts `arm`; may empty the descriptors that fired.
    fn disarm(&mut self);

    /// Puts the probe of all sources that have no descriptor into `slot`, after an `Idle` poll.
    /// `slot` has the probe given last time (`None` at first): updating it in place saves clones of
    /// shared memory. The probe must compare with the values that `poll` saw, not with the current
    /// ones. Leave or make it `None` to be polled at every sweep.
    fn probe(&self, slot: &mut Option<Self::Probe>) {
        *slot = None;
    }

    /// Returns the latest time at which `poll` must run again; called after each poll and after
    /// `arm`. While it has passed the core does not sleep, whatever the policy: for a poller that
    /// knows that work is about to come.
    fn deadline(&self) -> Option<Nanos> {
        None
    }

    /// Returns the approximate cost of one `arm` and `disarm`, in nanoseconds (0: negligible). The
    /// adaptive policies wait accordingly longer before they sleep.
    fn arm_cost(&self) -> u64 {
        0
    }

    /// Returns the name in statistics and in the monitor's report; read once, when the poller is
    /// added.
    fn name(&self) -> &str {
        "poller"
    }

    /// Returns its share of a core, relative to other active pollers; at least 1. Read at each
    /// poll.
    fn weight(&self) -> u32 {
        1
    }
}
