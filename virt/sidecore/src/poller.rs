//! What a sidecore runs: the [`Poller`] trait.

use std::{error::Error, fmt, os::fd::RawFd};

use crate::clock::Nanos;

/// What a [`Poller::poll`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// It did something, or has more to do at once: the core must not go idle.
    Busy,
    /// Nothing to do now.
    Idle,
}

/// A poller's sources cannot be made to notify; the sidecore stays awake instead of sleeping.
#[derive(Debug)]
pub struct ArmError(Box<dyn Error + Send + Sync>);

impl ArmError {
    /// Wraps the reason: an `io::Error`, or a plain text.
    pub fn new(reason: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        ArmError(reason.into())
    }
}

impl fmt::Display for ArmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cannot arm the notification of a wake source")
    }
}

impl Error for ArmError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.0)
    }
}

/// Something polled by a sidecore: the owner of a VM's IOMMU and devices, a vhost-user server, …
///
/// Every method runs on the sidecore's thread; none of them may block or make an unbounded system
/// call, since all pollers of the core wait behind it. Slow work goes to
/// [`Helpers`](crate::Helpers) and comes back as a message.
///
/// Awake, the runtime calls `message` for what has arrived and `poll` once per sweep. To sleep it
/// calls, in this order and on **all** pollers: `arm`; one sequentially consistent fence (not a
/// method: the runtime's); `has_work`. If nobody has work it sleeps on all `wake_fds` and the
/// earliest `deadline`; in either case `disarm` follows on all, then a sweep over everything.
///
/// ```
/// use sidecore::{Activity, ArmError, Nanos, Poller};
/// use std::os::fd::RawFd;
///
/// /// Adds up the numbers that other threads send.
/// #[derive(Default)]
/// struct Adder(u64);
///
/// impl Poller for Adder {
///     type Message = u64;
///     fn poll(&mut self, _now: Nanos) -> Activity {
///         Activity::Idle // everything arrives through `message`
///     }
///     fn message(&mut self, number: u64) {
///         self.0 += number;
///     }
///     fn arm(&mut self) -> Result<(), ArmError> {
///         Ok(()) // the mailbox is the runtime's to arm
///     }
///     fn has_work(&mut self) -> bool {
///         false
///     }
///     fn disarm(&mut self) {}
///     fn wake_fds(&self) -> &[RawFd] {
///         &[]
///     }
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

    /// Does a **bounded** batch of work from each of its sources; never drains "until empty", which
    /// a guest that keeps refilling would never let end. `Busy` if it did anything or stopped at
    /// its bound.
    fn poll(&mut self, now: Nanos) -> Activity;

    /// Takes one message; those of one sender arrive in the order sent.
    fn message(&mut self, message: Self::Message);

    /// Asks every source to notify through a descriptor of `wake_fds` from now on: writes
    /// avail_event, write-protects a register page, …
    ///
    /// # Errors
    /// When a source cannot notify. The poller has then undone its part (the runtime does not call
    /// `disarm` on it), and the sidecore keeps polling, with pauses, and tries again later.
    fn arm(&mut self) -> Result<(), ArmError>;

    /// Looks once more at **every** source, with plain loads, after `arm` and the runtime's fence:
    /// is there anything that `poll` would find? Work that was put off (a used-up budget, a parked
    /// request that can go on) counts. Work that waits for a message does not.
    fn has_work(&mut self) -> bool;

    /// Takes back what `arm` did, and empties the descriptors of `wake_fds` that fired.
    fn disarm(&mut self);

    /// Descriptors to sleep on, level-readable: readable from the notification until `disarm` or
    /// `poll` has emptied them. Asked at each sleep, after `arm`. A descriptor stuck at readable,
    /// hung up or in error keeps the sidecore from sleeping; take it out of the list.
    fn wake_fds(&self) -> &[RawFd];

    /// The latest moment at which `poll` must run again, if the sidecore sleeps. While that moment has passed it
    /// does not sleep, whatever the policy: for a poller that knows that work is about to come.
    fn deadline(&self) -> Option<Nanos> {
        None
    }

    /// About what one `arm` and `disarm` costs, in nanoseconds (0: nothing to speak of). The
    /// adaptive policy waits a multiple of it before it sleeps.
    fn arm_cost(&self) -> u64 {
        0
    }

    /// The name in statistics and in the monitor's report; read once, at the start.
    fn name(&self) -> &str {
        "poller"
    }
}

impl<P: Poller + ?Sized> Poller for Box<P> {
    type Message = P::Message;

    fn poll(&mut self, now: Nanos) -> Activity {
        (**self).poll(now)
    }

    fn message(&mut self, message: Self::Message) {
        (**self).message(message);
    }

    fn arm(&mut self) -> Result<(), ArmError> {
        (**self).arm()
    }

    fn has_work(&mut self) -> bool {
        (**self).has_work()
    }

    fn disarm(&mut self) {
        (**self).disarm();
    }

    fn wake_fds(&self) -> &[RawFd] {
        (**self).wake_fds()
    }

    fn deadline(&self) -> Option<Nanos> {
        (**self).deadline()
    }

    fn arm_cost(&self) -> u64 {
        (**self).arm_cost()
    }

    fn name(&self) -> &str {
        (**self).name()
    }
}
