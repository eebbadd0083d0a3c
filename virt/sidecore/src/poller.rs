//! What a sidecore runs: the [`Poller`] trait.

use std::{error::Error, io};

use crate::{clock::Nanos, turn::Turn, wakes::Wakes};

/// What a [`Poller::poll`] found.
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

/// A poller's sources cannot be made to notify; the sidecore stays awake instead of sleeping.
#[derive(Debug, thiserror::Error)]
#[error("cannot arm the notification of a wake source")]
pub struct ArmError(#[source] Box<dyn Error + Send + Sync>);

impl ArmError {
    /// Wraps the reason: an `io::Error`, or a plain text.
    pub fn new(reason: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        ArmError(reason.into())
    }
}

/// Whether an idle poller has got work, in about a nanosecond: a plain load of a shared word and a
/// comparison with what the poller last saw there. The probes of all idle pollers stand in one
/// array that each sweep scans.
pub trait Probe: Send {
    /// Might a poll find something? May err on the side of yes.
    fn fires(&self) -> bool;
}

/// The probe of a poller that wants to be polled at every sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AlwaysPoll;

impl Probe for AlwaysPoll {
    fn fires(&self) -> bool {
        true
    }
}

/// Why a poller is to leave its core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// It goes on, on another core. While it may not go it should work as before, or nearly so:
    /// that may last, and be given up.
    Move,
    /// It is taken away. While it may not go it should take nothing new, so that it will.
    End,
}

/// Something polled by a sidecore: the owner of a VM's IOMMU and devices, a vhost-user server, …
///
/// Every method runs on the sidecore's thread; none of them may block or make an unbounded system
/// call, since all pollers of the core wait behind it. Slow work belongs to
/// another thread, whose answer comes back as a message.
///
/// **Awake**, the runtime calls `message` for what has arrived, `ready` for descriptors that are
/// readable (looked at every 100 µs), and `poll` on those pollers that are active: whose last poll
/// was not `Idle`, whose probe fires, who got a message or a `ready`, or whose deadline has passed.
/// Among active pollers time is divided by what they [charge](Turn::charge), or by what their turns
/// took if that was more and another had work, by deficit round robin; one that comes back is
/// served before those that stay, within its share.
///
/// **To sleep** it calls `arm` on all pollers that are not armed; then one sequentially consistent
/// fence (not a method: the runtime's); then `has_work` on those. If nobody has work it sleeps on
/// all registered descriptors and the earliest `deadline`. A poller stays armed, also while the
/// core is awake for others, until the runtime is about to call `poll`, `message`, `ready` or
/// `detaching`: `disarm` comes first.
///
/// ```
/// use sidecore::{Activity, AlwaysPoll, ArmError, Poller, Turn, Wakes};
///
/// /// Adds up the numbers that other threads send.
/// #[derive(Default)]
/// struct Adder(u64);
///
/// impl Poller for Adder {
///     type Message = u64;
///     type Probe = AlwaysPoll;
///     fn poll(&mut self, _turn: &mut Turn<'_>) -> Activity {
///         Activity::Idle // everything arrives through `message`
///     }
///     fn message(&mut self, number: u64, _turn: &mut Turn<'_>) {
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
    /// What other threads may tell it.
    type Message: Send;

    /// How the runtime sees, without calling it, that it has work. [`AlwaysPoll`] if it cannot.
    type Probe: Probe;

    /// This core owns the poller from now on: registers the descriptors that may wake it.
    ///
    /// # Errors
    /// When a descriptor cannot be registered; then nothing of the poller is, and it is not taken
    /// on (or, when it was moved here, polled without sleeping until another try succeeds).
    fn attached(&mut self, _wakes: &mut Wakes) -> io::Result<()> {
        Ok(())
    }

    /// It is about to move or end. Whatever is still registered afterwards the runtime removes.
    fn detaching(&mut self, _wakes: &mut Wakes) {}

    /// Whether it may leave now; asked at each sweep once somebody wants that.
    fn may_detach(&mut self, departure: Departure) -> bool {
        let _ = departure;
        true
    }

    /// It is not to leave after all: nobody asks [`may_detach`](Self::may_detach) any more. `poll`
    /// follows.
    fn stays(&mut self) {}

    /// Does a **bounded** batch of work from each of its sources, charging for it; never drains
    /// "until empty", which a guest that keeps refilling would never let end. Goes on while the
    /// turn is not spent; the last piece may overdraw it. One that lasts longer than a microsecond
    /// asks now and then whether [others wait](Turn::others_wait), and ends if they do.
    fn poll(&mut self, turn: &mut Turn<'_>) -> Activity;

    /// Takes one message; those of one sender arrive in the order sent. `poll` follows in the same
    /// sweep, if the poller is not in debt.
    fn message(&mut self, message: Self::Message, turn: &mut Turn<'_>);

    /// The descriptor registered with `token` is readable, or has been: empties it, within bounds.
    /// May come for nothing. What is done here should be charged: a poller that often becomes
    /// ready, charges nothing and then finds nothing to poll gets its descriptor muted for a while.
    fn ready(&mut self, _token: u32, _turn: &mut Turn<'_>) {}

    /// Asks every source to notify through a registered descriptor from now on: writes
    /// avail_event, write-protects a register page, …
    ///
    /// # Errors
    /// When a source cannot notify. The poller has then undone its part (the runtime does not call
    /// `disarm` on it), and the sidecore keeps polling, with pauses, and tries again later.
    fn arm(&mut self, wakes: &mut Wakes) -> Result<(), ArmError>;

    /// Looks once more at **every** source, with plain loads, after `arm` and the runtime's fence:
    /// is there anything that `poll` would find? Work that was put off (a used-up budget, a parked
    /// request that can go on) counts. Work that waits for a message does not.
    fn has_work(&mut self) -> bool;

    /// Takes back what `arm` did; may empty the descriptors that fired.
    fn disarm(&mut self);

    /// After an `Idle` poll: puts the probe that stands for all sources that have no descriptor
    /// into `slot`. The probe that is there is the one given last time (`None` at first): updating
    /// it in place saves clones of shared memory. It must compare with what `poll` saw, not with
    /// what is there now. Leave or make it `None` to be polled at every sweep.
    fn probe(&self, slot: &mut Option<Self::Probe>) {
        *slot = None;
    }

    /// The latest moment at which `poll` must run again; asked after each poll and after `arm`.
    /// While it has passed the core does not sleep, whatever the policy: for a poller that knows
    /// that work is about to come.
    fn deadline(&self) -> Option<Nanos> {
        None
    }

    /// About what one `arm` and `disarm` costs, in nanoseconds (0: nothing to speak of). The
    /// adaptive policies wait accordingly longer before they sleep.
    fn arm_cost(&self) -> u64 {
        0
    }

    /// The name in statistics and in the monitor's report; read once, when the poller is added.
    fn name(&self) -> &str {
        "poller"
    }

    /// Its share of a core beside other active pollers, relative to theirs; at least 1. Read at
    /// each poll.
    fn weight(&self) -> u32 {
        1
    }
}
