//! The part of a virtio device that its section of the specification describes, and no more; all
//! else is the body's, which devices share.
//!
//! [`Device`](crate::Device) owns what every device has, and calls a [`DeviceClass`] in this order,
//! once a visit:
//!
//! ```text
//! for each queue: go_on ─▶ for each queue: may_take, serve, serve, … ─▶ complete
//!                          ─▶ for each queue: finish, finish, … ─▶ publish
//! ```
//!
//! A queue whose ring is parked when its turn comes has neither `serve` nor `finish` called:
//! whatever answers a [`RingStop`] has parked the ring, and is repeated from its beginning when the
//! ring goes on. The queue that comes first is another one in each visit.
//!
//! A class never raises an interrupt, publishes, arms a ring or looks at the service: it takes
//! chains ([`ServedQueue::take`]), reads and writes buffers through the view of memory of its
//! [`Context`], and gives tokens back ([`ServedQueue::stage`]). What a class answers is checked
//! against what its chain has room for.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::path::PathBuf;

use guest_mem::{Access, Dma, KeepAlive, Stop, Ticket, Wanted};

use crate::device::{Activity, CancelReason, DeviceStats, Interrupt};
use crate::ring::following::Following;
use crate::ring::{Ahead, Chain, Ring, RingStop, Token, Violation, wait_for_all};
use crate::saved::SavedState;
use crate::visit::Visit;

/// Types of what a visit lends a device. Further resources of some owners join here, without
/// touching a class.
pub trait Environment {
    /// The device's view of guest memory.
    type Dma: Dma;
    /// Where its interrupts go.
    type Interrupt: Interrupt;
}

/// The environment made of a view of memory and of interrupts.
pub(crate) struct Lent<D, I>(PhantomData<(D, I)>);

impl<D: Dma, I: Interrupt> Environment for Lent<D, I> {
    type Dma = D;
    type Interrupt = I;
}

/// Resources for one visit: guest memory, interrupts, the budget, and counters.
pub struct Context<'a, E: Environment> {
    /// The device's view of guest memory.
    pub dma: &'a mut E::Dma,
    pub(crate) irq: &'a mut E::Interrupt,
    /// Budget of the visit; each piece of work is charged to it.
    pub visit: &'a mut Visit,
    /// The device's counters; those of rings, doorbells and interrupts are counted by the body.
    pub stats: &'a mut DeviceStats,
    pub(crate) violation: Option<Violation>,
}

impl<'a, E: Environment> Context<'a, E> {
    pub(crate) fn new(
        dma: &'a mut E::Dma,
        irq: &'a mut E::Interrupt,
        visit: &'a mut Visit,
        stats: &'a mut DeviceStats,
    ) -> Self {
        Self {
            dma,
            irq,
            visit,
            stats,
            violation: None,
        }
    }

    /// The device needs a reset, for a reason that is no stop of one queue.
    pub fn fail(&mut self, violation: Violation) {
        self.violation.get_or_insert(violation);
    }

    /// The same resources, with memory seen through the view that `wrap` makes of this one's.
    pub fn with_view<'b, F, R>(
        &'b mut self,
        wrap: impl FnOnce(&'b mut E::Dma) -> F::Dma,
        use_it: impl FnOnce(&mut Context<'_, F>) -> R,
    ) -> R
    where
        F: Environment<Interrupt = E::Interrupt>,
    {
        let mut view = wrap(self.dma);
        let mut inner = Context::<F>::new(&mut view, self.irq, self.visit, self.stats);
        let result = use_it(&mut inner);
        self.violation = self.violation.or(inner.violation);
        result
    }
}

/// One queue of a device that has begun: its ring, and what its class keeps of it.
pub struct ServedQueue<Q> {
    /// The ring.
    pub ring: Ring,
    /// State of the class.
    pub own: Q,
    /// Chains are taken from it.
    pub(crate) is_enabled: bool,
    /// Whether its ring was not parked when the last visit came to it.
    pub(crate) runs: bool,
    /// Answered and not staged yet, with the bytes written: several, where one stands for all or
    /// none.
    ended: VecDeque<(Token, u32)>,
    /// Chains behind one that waits.
    pub(crate) following: Following,
}

impl<Q> ServedQueue<Q> {
    pub(crate) fn new(ring: Ring, own: Q, lookahead: usize) -> Self {
        Self {
            ring,
            own,
            is_enabled: true,
            runs: false,
            ended: VecDeque::new(),
            following: Following::new(lookahead),
        }
    }

    /// Queue number.
    #[inline]
    pub fn index(&self) -> u16 {
        self.ring.index()
    }

    /// Consumes `chain`, the first not consumed: its request runs from now on, and gives the token
    /// back by [`stage`](Self::stage).
    #[inline]
    pub fn take(&mut self, chain: &Chain) -> Token {
        self.following.advance();
        self.ring.advance(chain)
    }

    /// Consumes `chain`, into which `len` bytes were written: it is over, and staged by
    /// [`finish`](DeviceClass::finish) or [`stage_answers`](Self::stage_answers), whichever comes
    /// first.
    pub fn answer(&mut self, chain: &Chain, len: u32) {
        let token = self.take(chain);
        self.ended.push_back((token, len));
    }

    /// The request of `token` is over, with `len` bytes written. After an error it was not staged:
    /// give the token again.
    ///
    /// More bytes than its chain has room for are a mistake of the class: an assertion in debug
    /// builds, a device that needs a reset in others.
    #[inline]
    pub fn stage<D: Dma>(&mut self, dma: &mut D, token: Token, len: u32) -> Result<(), RingStop> {
        self.ring.stage(dma, token, len)
    }

    /// Parks the queue for `stop`, met by an access to one of the buffers in `ranges`, which are
    /// all asked for if that one is absent. Returns the stop.
    #[cold]
    pub fn wait_for<D: Dma>(
        &mut self,
        dma: &mut D,
        stop: Stop,
        ranges: impl Iterator<Item = Wanted>,
    ) -> RingStop {
        self.ring.park(wait_for_all(dma, stop, ranges).into())
    }

    /// Stages what was [answered](Self::answer).
    pub fn stage_answers<D: Dma>(&mut self, dma: &mut D) -> Result<(), RingStop> {
        while let Some(&(token, len)) = self.ended.front() {
            self.stage(dma, token, len)?;
            self.ended.pop_front();
        }
        Ok(())
    }

    /// Whether what is staged may be shown: not while a part of an answer is missing, nor while the
    /// ring itself faults, which would only be recorded again.
    pub(crate) fn may_show(&self) -> bool {
        self.ring.staged() != 0 && self.ended.is_empty() && !self.ring.is_faulted()
    }

    /// Whether something has ended that the driver has not been shown.
    pub(crate) fn has_unshown(&self) -> bool {
        self.ring.staged() != 0 || !self.ended.is_empty()
    }

    /// Whether chains may be taken, as far as the queue itself goes.
    pub(crate) fn is_open(&self) -> bool {
        self.is_enabled && self.ring.parked().is_none()
    }
}

/// Outcome of one step of a class. A stop has parked the queue.
pub type Step = Result<Activity, RingStop>;

/// A class of virtio devices. All calls come from the device's thread, and none waits; the module's
/// head says when.
pub trait DeviceClass: Sized {
    /// Device type number (virtio 1.2 §5).
    const TYPE: u16;
    /// State of each queue.
    type Queue;
    /// Saved state, besides what all devices have.
    type Saved: SavedState;

    /// Offered features.
    fn features(&self) -> u64;

    /// Maximum size of each queue.
    fn queue_sizes(&self) -> &[u16];

    /// Reads device configuration space; bytes past its end are zero.
    fn read_config(&self, offset: u64, out: &mut [u8]);

    /// Writes device configuration space; writes to read-only fields are ignored.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// As [`QueueDevice::config_generation`](crate::QueueDevice::config_generation).
    fn config_generation(&self) -> u8 {
        0
    }

    /// State of queue `index` that starts; `None`: a driver that accepted `features` has no such
    /// queue.
    fn queue(&self, index: u16, features: u64) -> Option<Self::Queue>;

    /// Number of chains behind one that waits for absent memory are looked at meanwhile.
    fn lookahead(&self, _index: u16) -> usize {
        0
    }

    /// The driver has accepted `features`; `keep` keeps guest memory mapped for as long as
    /// asynchronous I/O may use it. Whether the driver is to be notified of the configuration at
    /// once.
    fn begin(&mut self, _features: u64, _keep: KeepAlive) -> bool {
        false
    }

    /// Back to the state before [`begin`](Self::begin). Every queue was [forgotten](Self::forget)
    /// before.
    fn reset(&mut self);

    /// A queue is gone, and with it what it had taken, of which nothing is in flight.
    fn forget(&mut self, _index: u16, _queue: Self::Queue) {}

    /// Saves its state; nothing is in flight, and everything was shown.
    fn save(&self) -> Self::Saved;

    /// Goes on with what was taken and stands still.
    fn go_on<E: Environment>(
        &mut self,
        _queue: &mut ServedQueue<Self::Queue>,
        _cx: &mut Context<'_, E>,
    ) -> Step {
        Ok(Activity::Idle)
    }

    /// Whether anything may be taken from `queue`, were there something.
    fn may_take<D: Dma>(&self, _queue: &ServedQueue<Self::Queue>, _dma: &D) -> bool {
        true
    }

    /// Takes what belongs together: a request, or all chains of a frame. `Busy`: there may be more.
    fn serve<E: Environment>(
        &mut self,
        queue: &mut ServedQueue<Self::Queue>,
        cx: &mut Context<'_, E>,
    ) -> Step;

    /// Asks for all that is known to be wanted of `chain`, which comes behind one that waits.
    fn ask_ahead<D: Dma>(&self, _dma: &mut D, _chain: &Chain) -> Access<()> {
        Ok(())
    }

    /// Collects what has ended, of all queues. Called whatever the service is.
    fn complete<E: Environment>(
        &mut self,
        _queues: &mut [ServedQueue<Self::Queue>],
        _cx: &mut Context<'_, E>,
    ) -> Activity {
        Activity::Idle
    }

    /// Stages what has ended. `Busy`: there may be more.
    fn finish<E: Environment>(
        &mut self,
        queue: &mut ServedQueue<Self::Queue>,
        cx: &mut Context<'_, E>,
    ) -> Step {
        queue.stage_answers(cx.dma)?;
        Ok(Activity::Idle)
    }

    /// Whether [`complete`](Self::complete) would find something.
    fn has_completions(&mut self) -> bool {
        false
    }

    /// Whether [`go_on`](Self::go_on) or [`finish`](Self::finish) would do something.
    fn has_taken<D: Dma>(&self, _queue: &ServedQueue<Self::Queue>, _dma: &D) -> bool {
        false
    }

    /// Whether [`serve`](Self::serve) would take something of `queue`, which [may be
    /// taken](Self::may_take), at `now_ns`.
    fn has_work<D: Dma>(
        &mut self,
        queue: &mut ServedQueue<Self::Queue>,
        dma: &mut D,
        _now_ns: u64,
    ) -> Result<bool, RingStop> {
        queue.ring.has_available(dma)
    }

    /// Whether a chain in `queue` is work by itself; buffers for what has not come are not.
    fn is_due(&mut self, _queue: &ServedQueue<Self::Queue>) -> bool {
        true
    }

    /// Where in `queue` the driver is to ring for new chains.
    fn arm_at(&self, _queue: &ServedQueue<Self::Queue>) -> Ahead {
        Ahead::default()
    }

    /// From now on what ends makes a descriptor readable.
    fn arm(&mut self) {}

    /// Visits go on.
    fn disarm(&mut self) {}

    /// Appends descriptors that are readable while there is work. `is_open` says of a queue whether
    /// chains may be taken from it.
    fn wake_fds(&self, _is_open: impl Fn(u16) -> bool, _fds: &mut Vec<RawFd>) {}

    /// When a visit is due although nothing has arrived; `now_ns` is when the last one was.
    fn deadline(&self, _now_ns: u64) -> Option<u64> {
        None
    }

    /// Whether something of `queue` is in flight.
    fn is_in_flight(&self, _queue: &ServedQueue<Self::Queue>) -> bool {
        false
    }

    /// Requests in flight.
    fn in_flight(&self, queues: &[ServedQueue<Self::Queue>]) -> u32 {
        let in_flight = queues.iter().filter(|queue| self.is_in_flight(queue));
        in_flight.count() as u32
    }

    /// Whether what is in flight may still touch guest memory.
    fn touches_memory(&self) -> bool {
        true
    }

    /// Completes `ticket`, after the ring has taken it up.
    fn ticket_done(&mut self, _queue: &mut ServedQueue<Self::Queue>, _ticket: Ticket) {}

    /// Asks what `reason` concerns of what is in flight to end; how many requests.
    fn cancel(&mut self, _reason: CancelReason) -> u32 {
        0
    }

    /// Guest memory is kept mapped by `keep` from now on.
    fn set_memory(&mut self, _keep: KeepAlive) {}

    /// Another thread visits from now on.
    fn rebind(&mut self) {}

    /// The file behind the device, if there is one, for messages.
    fn path(&self) -> Option<PathBuf> {
        None
    }
}
