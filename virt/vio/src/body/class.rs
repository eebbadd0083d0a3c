//! Class of a virtio device: the part that its section of the specification describes, and no more.
//! All else is the body's, which devices share.
//!
//! [`Device`](crate::Device) owns what every device has, and calls a [`DeviceClass`] in this order
//! in each visit:
//!
//! ```text
//! for each queue: [publish] ─▶ go_on          publish: answers are staged
//! for each queue: may_take ─▶ serve, serve, …          ─▶ finish, finish, …
//! complete                                             ─▶ what is staged is published
//! for each queue: publish
//! ```
//!
//! `[publish]` happens for a queue of which something is left from an earlier visit. So `finish` is
//! called up to twice a visit for a queue, before its `go_on` and at the end. It is also called
//! outside a visit, by [`stop_queue`](crate::Device::stop_queue), for the queue that stops, also of
//! a device that needs a reset. `complete` is called once a visit, whatever the service is.
//!
//! A queue whose ring is parked when its turn comes has none of `go_on`, `serve` and `finish`
//! called: an error that is a [`RingStop`] has parked the ring, and the step is repeated from its
//! beginning when the ring goes on. The queue that comes first is [`FIRST`](DeviceClass::FIRST),
//! but for visits behind one that ended before its work did: there it is another one each time.
//!
//! A class takes chains ([`ServedQueue::take`]), reads and writes buffers through the view of
//! memory of its [`Context`], and gives tokens back ([`ServedQueue::stage`], or
//! [`ServedQueue::answer`], after which the body stages). It has no access to interrupts, the
//! service, and of a ring to publishing and arming. The length of each answer is checked against
//! the room of its chain.

use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::path::PathBuf;

use guest_mem::{Access, Dma, KeepAlive, Ticket};

use super::served::ServedQueue;
use crate::device::{Activity, CancelReason, DeviceStats, Interrupt, NetworkRequest};
use crate::poll_budget::PollBudget;
use crate::ring::{Chain, Lookahead, RingStop, Violation};
use crate::saved::SavedState;

/// Types of the resources that a visit lends a device. Further resources of some owners can be
/// added here without a change of a class.
pub trait Environment {
    /// The device's view of guest memory.
    type Dma: Dma;
    /// Sink of its interrupts.
    type Interrupt: Interrupt;
}

/// The environment made of a view of memory and of interrupts.
pub(super) struct OwnerEnvironment<D, I>(PhantomData<(D, I)>);

impl<D: Dma, I: Interrupt> Environment for OwnerEnvironment<D, I> {
    type Dma = D;
    type Interrupt = I;
}

/// Resources for one visit: guest memory, interrupts, the budget, and counters.
pub struct Context<'a, E: Environment> {
    /// The device's view of guest memory.
    pub dma: &'a mut E::Dma,
    pub(super) irq: &'a mut E::Interrupt,
    /// Budget of the visit; each piece of work is charged to it.
    pub visit: &'a mut PollBudget,
    /// Whether other devices on the core wait for the visit's end.
    pub(super) others: Option<&'a dyn Fn() -> bool>,
    /// The device's counters; those of rings, doorbells and interrupts are counted by the body.
    pub stats: &'a mut DeviceStats,
    /// Reason for a reset that a hook has reported and the body has not collected.
    pub(super) violation: Option<Violation>,
    /// A hook has changed the configuration space, and the body has not collected that.
    pub(super) is_config_changed: bool,
}

impl<'a, E: Environment> Context<'a, E> {
    pub(super) fn new(
        dma: &'a mut E::Dma,
        irq: &'a mut E::Interrupt,
        visit: &'a mut PollBudget,
        stats: &'a mut DeviceStats,
    ) -> Self {
        Self {
            dma,
            irq,
            visit,
            others: None,
            stats,
            violation: None,
            is_config_changed: false,
        }
    }

    /// Returns the same, in a visit that ends when `others` wait.
    pub(super) fn beside(mut self, others: &'a dyn Fn() -> bool) -> Self {
        self.visit.asks_others();
        self.others = Some(others);
        self
    }

    /// Whether other devices on the core may come to wait for the visit's end: work that is begun
    /// should be short.
    #[inline]
    pub fn has_others(&self) -> bool {
        self.others.is_some()
    }

    /// Whether nothing new may be begun: the budget is spent, or other devices on the core wait.
    #[inline]
    pub fn is_over(&mut self) -> bool {
        self.visit.is_ask_due() && self.ask()
    }

    /// Whether the visit is over, now that it is time to ask others.
    #[cold]
    fn ask(&mut self) -> bool {
        if !self.visit.is_over() {
            match self.others {
                Some(others) if others() => self.visit.end(),
                _ => self.visit.asks_others(),
            }
        }
        self.visit.is_over()
    }

    /// Notes a change of the configuration space, of which the driver is to be notified.
    pub fn config_changed(&mut self) {
        self.is_config_changed = true;
    }

    /// Makes the device need a reset, for a reason that is no stop of one queue.
    pub fn fail(&mut self, violation: Violation) {
        self.violation.get_or_insert(violation);
    }

    /// Returns the same resources, with memory seen through the view that `wrap` makes of this
    /// one's.
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
        inner.others = self.others;
        let result = use_it(&mut inner);
        let (violation, is_config_changed) = (inner.violation, inner.is_config_changed);
        self.violation = self.violation.or(violation);
        self.is_config_changed |= is_config_changed;
        result
    }
}

/// Outcome of one step of a class. A stop has parked the queue.
pub type Step = Result<Activity, RingStop>;

/// A class of virtio devices. All calls come from the device's thread, and none waits; the module's
/// head has their order.
pub trait DeviceClass: Sized {
    /// Device type number (virtio 1.2 §5).
    const TYPE: u16;
    /// Number of the queue that a visit serves first, unless the one before has left something.
    const FIRST: u16 = 0;
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

    /// Returns the state of queue `index`, which starts; `None`: a driver that accepted `features`
    /// has no such queue.
    fn queue(&self, index: u16, features: u64) -> Option<Self::Queue>;

    /// Returns the number of chains behind one that waits for absent memory that are read
    /// meanwhile.
    fn lookahead(&self, _index: u16) -> usize {
        0
    }

    /// Begins an activation: the driver has accepted `features`; `keep` keeps guest memory mapped
    /// for as long as asynchronous I/O may use it. Returns whether the driver is to be notified of
    /// the configuration at once.
    fn begin(&mut self, _features: u64, _keep: KeepAlive) -> bool {
        false
    }

    /// Returns to the state before [`begin`](Self::begin). Every queue was
    /// [forgotten](Self::forget) before.
    fn reset(&mut self);

    /// Drops a queue and the chains taken from it, none of which is in flight.
    fn forget(&mut self, _index: u16, _queue: Self::Queue) {}

    /// Sets whether chains are taken from queue `index` from now on, until it is
    /// [forgotten](Self::forget).
    fn set_enabled(&mut self, _index: u16, _is_enabled: bool) {}

    /// Saves its state; nothing is in flight, and everything was published.
    fn save(&self) -> Self::Saved;

    /// Continues chains that were taken and wait.
    fn go_on<E: Environment>(
        &mut self,
        _queue: &mut ServedQueue<Self::Queue>,
        _cx: &mut Context<'_, E>,
    ) -> Step {
        Ok(Activity::Idle)
    }

    /// Whether chains may be taken from `queue`, if there are any.
    fn may_take<D: Dma>(&self, _queue: &ServedQueue<Self::Queue>, _dma: &D) -> bool {
        true
    }

    /// Takes one unit of work: a request, or all chains of a frame. `Busy`: there may be more.
    fn serve<E: Environment>(
        &mut self,
        queue: &mut ServedQueue<Self::Queue>,
        cx: &mut Context<'_, E>,
    ) -> Step;

    /// Asks for all memory that `chain`, which is behind one that waits, is known to need.
    fn ask_ahead<D: Dma>(&self, _dma: &mut D, _chain: &Chain) -> Access<()> {
        Ok(())
    }

    /// Collects completions, of all queues. Called whatever the service is.
    fn complete<E: Environment>(
        &mut self,
        _queues: &mut [ServedQueue<Self::Queue>],
        _cx: &mut Context<'_, E>,
    ) -> Activity {
        Activity::Idle
    }

    /// Stages requests that have ended, besides the [answers](ServedQueue::answer), which the body
    /// has staged before. `Busy`: there may be more.
    fn finish<E: Environment>(
        &mut self,
        _queue: &mut ServedQueue<Self::Queue>,
        _cx: &mut Context<'_, E>,
    ) -> Step {
        Ok(Activity::Idle)
    }

    /// Whether [`complete`](Self::complete) would find something.
    fn has_completions(&mut self) -> bool {
        false
    }

    /// Whether [`go_on`](Self::go_on) or [`finish`](Self::finish) would do something besides
    /// staging answers.
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
        queue.has_available(dma)
    }

    /// Whether a chain in `queue` is work by itself; a buffer for data that have not come is not.
    fn is_due(&mut self, _queue: &ServedQueue<Self::Queue>) -> bool {
        true
    }

    /// Whether there may be work that no queue's ring shows, at any time: a core that is awake
    /// then visits the device in each sweep. Always the same.
    fn has_own_events(&self) -> bool {
        false
    }

    /// Returns the position in `queue` at which the driver is to ring for new chains.
    fn arm_at(&self, _queue: &ServedQueue<Self::Queue>) -> Lookahead {
        Lookahead::default()
    }

    /// Arms: from now on a completion makes a descriptor readable.
    fn arm(&mut self) {}

    /// Disarms: visits go on.
    fn disarm(&mut self) {}

    /// Appends descriptors that are readable while there is work. `is_open` returns whether chains
    /// may be taken from a queue.
    fn wake_fds(&self, _is_open: impl Fn(u16) -> bool, _fds: &mut Vec<RawFd>) {}

    /// Returns the time at which a visit is due although nothing has arrived, in nanoseconds;
    /// `now_ns` is the time of the last one.
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

    /// Cancels the requests in flight that `reason` concerns. Returns their number.
    fn cancel(&mut self, _reason: CancelReason) -> u32 {
        0
    }

    /// Replaces the handle that keeps guest memory mapped.
    fn set_memory(&mut self, _keep: KeepAlive) {}

    /// Another thread will visit the device from now on.
    fn rebind(&mut self) {}

    /// Carries out a request of a network device's front end. Returns false if it cannot.
    fn network_request(&mut self, _request: NetworkRequest) -> bool {
        false
    }

    /// Returns the path of the file behind the device, if there is one, for messages.
    fn path(&self) -> Option<PathBuf> {
        None
    }
}

/// Implements the items of a class that wraps one of type `$class`, in its field `class`, and
/// changes only the [`Context`] of its hooks: all other items forward to that class. `reset` and
/// the hooks with a context (`go_on`, `serve`, `complete`, `finish`) are left to the wrapper.
#[macro_export]
macro_rules! forward_class {
    ($class:ty) => {
        const TYPE: u16 = <$class as $crate::DeviceClass>::TYPE;
        const FIRST: u16 = <$class as $crate::DeviceClass>::FIRST;
        type Queue = <$class as $crate::DeviceClass>::Queue;
        type Saved = <$class as $crate::DeviceClass>::Saved;

        fn features(&self) -> u64 {
            self.class.features()
        }

        fn queue_sizes(&self) -> &[u16] {
            self.class.queue_sizes()
        }

        fn read_config(&self, offset: u64, out: &mut [u8]) {
            self.class.read_config(offset, out);
        }

        fn write_config(&mut self, offset: u64, data: &[u8]) {
            self.class.write_config(offset, data);
        }

        fn config_generation(&self) -> u8 {
            self.class.config_generation()
        }

        fn queue(&self, index: u16, features: u64) -> Option<Self::Queue> {
            self.class.queue(index, features)
        }

        fn lookahead(&self, index: u16) -> usize {
            self.class.lookahead(index)
        }

        fn begin(&mut self, features: u64, keep: guest_mem::KeepAlive) -> bool {
            self.class.begin(features, keep)
        }

        fn forget(&mut self, index: u16, queue: Self::Queue) {
            self.class.forget(index, queue);
        }

        fn set_enabled(&mut self, index: u16, is_enabled: bool) {
            self.class.set_enabled(index, is_enabled);
        }

        fn save(&self) -> Self::Saved {
            self.class.save()
        }

        fn may_take<D: guest_mem::Dma>(
            &self,
            queue: &$crate::ServedQueue<Self::Queue>,
            dma: &D,
        ) -> bool {
            self.class.may_take(queue, dma)
        }

        fn ask_ahead<D: guest_mem::Dma>(
            &self,
            dma: &mut D,
            chain: &$crate::ring::Chain,
        ) -> guest_mem::Access<()> {
            self.class.ask_ahead(dma, chain)
        }

        fn has_completions(&mut self) -> bool {
            self.class.has_completions()
        }

        fn has_taken<D: guest_mem::Dma>(
            &self,
            queue: &$crate::ServedQueue<Self::Queue>,
            dma: &D,
        ) -> bool {
            self.class.has_taken(queue, dma)
        }

        fn has_work<D: guest_mem::Dma>(
            &mut self,
            queue: &mut $crate::ServedQueue<Self::Queue>,
            dma: &mut D,
            now_ns: u64,
        ) -> Result<bool, $crate::ring::RingStop> {
            self.class.has_work(queue, dma, now_ns)
        }

        fn is_due(&mut self, queue: &$crate::ServedQueue<Self::Queue>) -> bool {
            self.class.is_due(queue)
        }

        fn has_own_events(&self) -> bool {
            self.class.has_own_events()
        }

        fn arm_at(&self, queue: &$crate::ServedQueue<Self::Queue>) -> $crate::ring::Lookahead {
            self.class.arm_at(queue)
        }

        fn arm(&mut self) {
            self.class.arm();
        }

        fn disarm(&mut self) {
            self.class.disarm();
        }

        fn wake_fds(&self, is_open: impl Fn(u16) -> bool, fds: &mut Vec<std::os::fd::RawFd>) {
            self.class.wake_fds(is_open, fds);
        }

        fn deadline(&self, now_ns: u64) -> Option<u64> {
            self.class.deadline(now_ns)
        }

        fn is_in_flight(&self, queue: &$crate::ServedQueue<Self::Queue>) -> bool {
            self.class.is_in_flight(queue)
        }

        fn in_flight(&self, queues: &[$crate::ServedQueue<Self::Queue>]) -> u32 {
            self.class.in_flight(queues)
        }

        fn touches_memory(&self) -> bool {
            self.class.touches_memory()
        }

        fn ticket_done(
            &mut self,
            queue: &mut $crate::ServedQueue<Self::Queue>,
            ticket: guest_mem::Ticket,
        ) {
            self.class.ticket_done(queue, ticket);
        }

        fn cancel(&mut self, reason: $crate::CancelReason) -> u32 {
            self.class.cancel(reason)
        }

        fn set_memory(&mut self, keep: guest_mem::KeepAlive) {
            self.class.set_memory(keep);
        }

        fn rebind(&mut self) {
            self.class.rebind();
        }

        fn network_request(&mut self, request: $crate::NetworkRequest) -> bool {
            self.class.network_request(request)
        }

        fn path(&self) -> Option<std::path::PathBuf> {
            self.class.path()
        }
    };
}

#[cfg(test)]
mod tests {
    /// The names behind `keyword` in the block that `head` opens.
    fn names<'a>(text: &'a str, head: &str, keyword: &str) -> Vec<&'a str> {
        let start = text.find(head).expect("the block") + head.len();
        // Both end in the first column.
        let len = text[start..].find("\n}").expect("its end");
        let lines = text[start..][..len].lines().map(str::trim_start);
        let rests = lines.filter_map(|line| line.strip_prefix(keyword));
        let name = |rest: &'a str| {
            rest.split(|c: char| !c.is_alphanumeric() && c != '_')
                .next()
        };
        rests.filter_map(name).collect()
    }

    #[test]
    fn every_item_of_a_class_is_forwarded_but_for_those_of_the_wrapper() {
        let text = include_str!("class.rs");
        let (class, forwarded) = (
            "pub trait DeviceClass: Sized {",
            "macro_rules! forward_class {",
        );
        for (keyword, own) in [
            (
                "fn ",
                &["reset", "go_on", "serve", "complete", "finish"][..],
            ),
            ("const ", &[]),
            ("type ", &[]),
        ] {
            let mut all = names(text, class, keyword);
            assert!(all.len() >= 2, "{all:?}");
            all.retain(|name| !own.contains(name));
            assert_eq!(names(text, forwarded, keyword), all);
        }
    }
}
