//! The body of every virtio device: queues that come and go, visits, waits, publishing.
//!
//! A [`Device`] is its class ([`DeviceClass`]) and this. `device.rs` has a diagram of its owner's
//! calls, `class.rs` of the calls of a visit into the class. Here is, once for all classes: the set
//! of queues and their order; parking of a queue and its end; lookahead behind a chain that waits;
//! the budget; publishing and its interrupt; arming; counters; the common part of the saved state.
//!
//! `activation` has the state from activation to reset, with a diagram: the [service](Service) and
//! the permissions that follow from it, a violation and notifying the driver of it. `visit` has the
//! parts of a visit, `served` a queue. Nothing here allocates or is called through a table, for a
//! request or a visit.

mod activation;
mod class;
mod served;
mod visit;

use std::os::fd::RawFd;
use std::path::PathBuf;

use guest_mem::{Dma, KeepAlive, Pages, Ticket};

use crate::device::{
    Activity, CancelReason, DeviceStats, Interrupt, NetworkRequest, QueueDevice, Service,
    StoppedQueue,
};
use crate::poll_budget::PollBudget;
use crate::queue_config::{ActivateError, QueueConfig, check_features};
use crate::ring::{Chain, Ring, RingStats, RingStop, Violation};
use crate::saved::{SAVED_VERSION, SavedDevice, SavedState};
use activation::ActivationState;
use class::OwnerEnvironment;
pub use class::{Context, DeviceClass, Environment, Step};
pub use served::ServedQueue;

/// A virtio device of class `C`, owned and visited by one thread.
pub struct Device<C: DeviceClass> {
    core: Core<C>,
    stats: DeviceStats,
}

/// All of a device but the counters, which a visit lends to the class.
struct Core<C: DeviceClass> {
    class: C,
    activation: ActivationState,
    queues: Vec<ServedQueue<C::Queue>>,
    /// Position of the queue that the next visit serves first: the visit may be over before the
    /// others.
    first: usize,
    /// Position of [`DeviceClass::FIRST`], with which a visit begins unless the one before left
    /// something.
    home: usize,
    /// Time of the last visit, in nanoseconds.
    now_ns: u64,
    /// Scratch of looking ahead.
    chain: Chain,
    /// Counters of the rings of former activations.
    rings: RingStats,
}

impl<C: DeviceClass> Core<C> {
    /// Records the violation, if `stop` is one: it ends the device until its reset.
    fn record_violation(&mut self, stop: RingStop) {
        if let RingStop::Violation(violation) = stop {
            self.activation.fail(violation);
        }
    }

    fn position(&self, index: u16) -> Option<usize> {
        self.queues.iter().position(|queue| queue.index() == index)
    }

    /// Queue `at`, a position, is gone.
    fn remove(&mut self, at: usize) {
        let queue = self.queues.remove(at);
        (self.first, self.home) = (0, 0);
        self.rings.add(&queue.ring.stats());
        self.class.forget(queue.index(), queue.own);
    }
}

/// Methods for owners that serve its rings one by one, for another process.
impl<C: DeviceClass> Device<C> {
    /// Makes a device of this class.
    pub fn of(class: C) -> Self {
        let core = Core {
            class,
            activation: ActivationState::default(),
            queues: Vec::new(),
            first: 0,
            home: 0,
            now_ns: 0,
            chain: Chain::new(),
            rings: RingStats::default(),
        };
        let stats = DeviceStats::default();
        Self { core, stats }
    }

    /// Returns the class.
    pub fn class(&self) -> &C {
        &self.core.class
    }

    /// Returns the class, for requests that its owner makes and no driver does.
    pub fn class_mut(&mut self) -> &mut C {
        &mut self.core.class
    }

    /// Returns the class alone, of a device that has not begun.
    ///
    /// # Panics
    /// If there is a driver, whose rings would be lost.
    pub fn into_class(self) -> C {
        assert!(!self.is_live(), "the class of a device that has begun");
        self.core.class
    }

    /// Whether there is a driver.
    pub fn is_live(&self) -> bool {
        self.core.activation.is_live()
    }

    /// Notes a change of the configuration space: the next visit notifies the driver, if there is
    /// one.
    pub fn config_changed(&mut self) {
        self.core.activation.config_changed();
    }

    /// Begins an activation: the driver has accepted `features`; `keep` keeps guest memory mapped
    /// for as long as asynchronous I/O may use it. There is no queue yet, and nothing is left of a
    /// former activation.
    ///
    /// # Errors
    /// Features that are not offered, or VERSION_1 missing; requests in flight. Nothing has begun.
    pub fn begin(&mut self, features: u64, keep: KeepAlive) -> Result<(), ActivateError> {
        let in_flight = self.in_flight();
        if in_flight != 0 {
            return Err(ActivateError::NotQuiesced { in_flight });
        }
        check_features(self.features(), features)?;
        self.reset();
        let is_changed = self.core.class.begin(features, keep);
        self.core.activation.begin(features, is_changed);
        Ok(())
    }

    /// Serves `ring`, made with the features of [`begin`](Self::begin), from the next visit on.
    ///
    /// # Errors
    /// A ring of that number is being served, or the device has none.
    pub fn add_queue(&mut self, ring: Ring) -> Result<(), ActivateError> {
        let core = &mut self.core;
        let index = ring.index();
        let own = core.class.queue(index, core.activation.features());
        let own = own.filter(|_| core.position(index).is_none());
        let own = own.ok_or(ActivateError::QueueIndex { index })?;
        let queue = ServedQueue::new(ring, own, core.class.lookahead(index));
        // Most devices have one or two: no room for more.
        core.queues.reserve_exact(1);
        core.queues.push(queue);
        if index == C::FIRST {
            core.home = core.queues.len() - 1;
            core.first = core.home;
        }
        core.class.set_enabled(index, true);
        Ok(())
    }

    /// Whether chains are taken from queue `index`. What has been taken is finished in either case.
    pub fn pause_queue(&mut self, index: u16, is_paused: bool) {
        if let Some(at) = self.core.position(index) {
            self.core.queues[at].is_enabled = !is_paused;
            self.core.class.set_enabled(index, !is_paused);
        }
    }

    /// Makes the device need a reset, for a reason that its owner has found. The next visit
    /// notifies the driver.
    pub fn fail(&mut self, violation: Violation) {
        self.core.activation.fail(violation);
    }

    /// Stops queue `index`: no more chains are taken. Once all chains taken are published, the
    /// queue is removed and its position returned. `None`: visit the device, and call again, for as
    /// long as its requests take.
    ///
    /// Ended requests are published also by a device that needs a reset. Where nothing can be
    /// published any more (the ring's addresses fault, it broke the protocol, or everything was
    /// [cancelled](QueueDevice::cancel) for good), the queue is removed once its requests no longer
    /// touch memory, and the answer counts those that were not published.
    pub fn stop_queue<D: Dma>(
        &mut self,
        index: u16,
        dma: &mut D,
        irq: &mut impl Interrupt,
    ) -> Option<StoppedQueue> {
        let Self { core, stats } = self;
        let at = core.position(index)?;
        core.queues[at].is_enabled = false;
        core.class.set_enabled(index, false);
        if core.activation.may_touch() && core.queues[at].ring.parked().is_none() {
            let mut visit = PollBudget::alone(core.now_ns);
            core.publish(
                at,
                &mut Context::<OwnerEnvironment<_, _>>::new(dma, irq, &mut visit, stats),
            );
        }
        let queue = &core.queues[at];
        let (position, unpublished) = (queue.ring.position(), queue.ring.in_flight());
        let is_over = unpublished == 0 || queue.ring.is_faulted() || core.activation.is_abandoned();
        (is_over && !core.class.is_in_flight(queue)).then(|| {
            core.remove(at);
            StoppedQueue {
                position,
                unpublished,
            }
        })
    }

    /// Replaces the handle that keeps guest memory mapped by `keep`, which covers the memory mapped
    /// before as far as it is still the guest's.
    ///
    /// # Panics
    /// Perhaps, if a request is in flight.
    pub fn set_memory(&mut self, keep: KeepAlive) {
        self.core.class.set_memory(keep);
    }

    /// Another thread will visit the device from now on.
    ///
    /// # Panics
    /// Perhaps, if a request is in flight.
    pub fn rebind(&mut self) {
        self.core.class.rebind();
    }

    /// Takes chains while `visit` lasts and publishes requests that have ended, as far as the
    /// [service](QueueDevice::set_service) allows. `Busy` also if the visit ended before the chains
    /// did.
    pub fn visit<D: Dma>(
        &mut self,
        dma: &mut D,
        irq: &mut impl Interrupt,
        visit: &mut PollBudget,
    ) -> Activity {
        self.visit_beside(dma, irq, visit, None)
    }

    /// As [`visit`](Self::visit), on a core with other devices: the visit ends early if `others`
    /// returns true, which it asks every few requests or frames.
    pub fn visit_beside<D: Dma>(
        &mut self,
        dma: &mut D,
        irq: &mut impl Interrupt,
        visit: &mut PollBudget,
        others: Option<&dyn Fn() -> bool>,
    ) -> Activity {
        let Self { core, stats } = self;
        let mut cx = Context::<OwnerEnvironment<_, _>>::new(dma, irq, visit, stats);
        if let Some(others) = others {
            cx = cx.beside(others);
        }
        core.visit(&mut cx)
    }

    /// Carries out a request of a network device's front end. Returns false if it cannot.
    pub fn network_request(&mut self, request: NetworkRequest) -> bool {
        self.core.class.network_request(request)
    }

    /// Whether the next visit will find something to do in queue `index`.
    pub fn has_more<D: Dma>(&mut self, index: u16, dma: &mut D) -> bool {
        let core = &mut self.core;
        let Some(at) = core.position(index).filter(|_| core.activation.may_take()) else {
            return false;
        };
        let queue = &mut core.queues[at];
        if queue.ring.parked().is_some() {
            return queue.is_enabled && queue.prefetch.has_work();
        }
        if !queue.is_enabled || !core.class.is_due(queue) {
            return false;
        }
        queue.ring.has_available(dma).unwrap_or_else(|stop| {
            core.record_violation(stop);
            false
        })
    }

    /// Returns the ring of queue `index`, if it is being served here.
    pub fn ring(&mut self, index: u16) -> Option<&mut Ring> {
        let at = self.core.position(index)?;
        Some(&mut self.core.queues[at].ring)
    }

    /// Calls `each` with every ring that is being served here.
    pub fn for_each_ring(&mut self, mut each: impl FnMut(&mut Ring)) {
        let queues = self.core.queues.iter_mut();
        queues.for_each(|queue| each(&mut queue.ring));
    }

    /// As [`for_each_ring`](Self::for_each_ring), of rings in which a chain would be work by
    /// itself.
    pub fn for_each_due_ring(&mut self, mut each: impl FnMut(&mut Ring)) {
        let Core { class, queues, .. } = &mut self.core;
        for queue in queues.iter_mut() {
            if class.is_due(queue) {
                each(&mut queue.ring);
            }
        }
    }

    /// Whether the last visit has left, or itself produced, work for another one: as
    /// [`has_work`](QueueDevice::has_work), for an owner that watches the
    /// [due rings](Self::for_each_due_ring) from then on. Chains that have come to those since the
    /// visit read them are not counted, and their words not loaded.
    pub fn has_left<D: Dma>(&mut self, dma: &mut D) -> bool {
        self.core.has_work(dma, true)
    }

    /// Whether there may be work that no ring shows: see [`DeviceClass::has_own_events`].
    pub fn has_own_events(&self) -> bool {
        self.core.class.has_own_events()
    }

    /// Reason why [`needs_reset`](QueueDevice::needs_reset) is true.
    pub fn violation(&self) -> Option<Violation> {
        self.core.activation.violation()
    }

    /// The file behind the device, if there is one, for messages. Asks the kernel, so not for every
    /// request.
    pub fn path(&self) -> Option<PathBuf> {
        self.core.class.path()
    }

    /// Saves the state that another instance needs to go on from here. `None` unless the
    /// [service](QueueDevice::set_service) is [`Stopped`](Service::Stopped) (or there is no queue),
    /// nothing is in flight, and every ended request has been published (otherwise serve on, visit,
    /// and try again).
    pub fn save(&self) -> Option<SavedDevice<C::Saved>> {
        let Core {
            class,
            activation,
            queues,
            first: _,
            home: _,
            now_ns: _,
            chain: _,
            rings: _,
        } = &self.core;
        let is_stopped = activation.is_stopped() || queues.is_empty();
        if !is_stopped || self.in_flight() != 0 {
            return None;
        }
        let queues = queues.iter().map(|queue| queue.ring.save());
        Some(SavedDevice {
            version: SAVED_VERSION,
            device_type: C::TYPE,
            class_version: C::Saved::VERSION,
            features: activation.features(),
            needs_reset: activation.violation().is_some(),
            queues: queues.collect::<Option<_>>()?,
            class: class.save(),
        })
    }
}

impl<C: DeviceClass> QueueDevice for Device<C> {
    fn device_type(&self) -> u16 {
        C::TYPE
    }

    fn features(&self) -> u64 {
        self.core.class.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        self.core.class.queue_sizes()
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        self.core.class.read_config(offset, out);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.core.class.write_config(offset, data);
    }

    fn config_generation(&self) -> u8 {
        self.core.class.config_generation()
    }

    fn activate(
        &mut self,
        features: u64,
        queues: &[QueueConfig],
        keep: KeepAlive,
    ) -> Result<(), ActivateError> {
        self.begin(features, keep)?;
        let added = queues.iter().try_for_each(|config| {
            let index = config.index;
            let max = self.queue_sizes().get(usize::from(index)).copied();
            let max = max.ok_or(ActivateError::QueueIndex { index })?;
            self.add_queue(Ring::new(config, max, features)?)
        });
        if added.is_err() {
            self.reset();
        }
        added
    }

    fn set_service(&mut self, service: Service) {
        self.core.activation.set_service(service);
    }

    fn cancel(&mut self, reason: CancelReason) -> u32 {
        if reason != CancelReason::Unmap {
            self.core.activation.abandon();
        }
        let count = self.core.class.cancel(reason);
        self.stats.cancelled += u64::from(count);
        count
    }

    fn reset(&mut self) {
        assert_eq!(
            self.in_flight(),
            0,
            "reset of a device that has not been quiesced"
        );
        let core = &mut self.core;
        while !core.queues.is_empty() {
            core.remove(core.queues.len() - 1);
        }
        core.activation.end();
        core.class.reset();
    }

    fn poll<D: Dma>(&mut self, dma: &mut D, irq: &mut impl Interrupt, now_ns: u64) -> Activity {
        self.visit(dma, irq, &mut PollBudget::alone(now_ns))
    }

    fn kick(&mut self, queue: u16) {
        self.stats.kicks += 1;
        if let Some(ring) = self.ring(queue) {
            ring.kick();
        }
    }

    fn ticket_done(&mut self, ticket: Ticket) {
        for queue in &mut self.core.queues {
            queue.ring.ticket_done(ticket);
            queue.prefetch.ticket_done(ticket);
            self.core.class.ticket_done(queue, ticket);
        }
    }

    fn arm<D: Dma>(&mut self, dma: &mut D) {
        // Also when no chain is taken: what is in flight must be collected.
        self.core.class.arm();
        if self.core.activation.may_take() {
            for queue in self.core.queues.iter_mut().filter(|queue| queue.is_open()) {
                let at = self.core.class.arm_at(queue);
                // A stop has parked the queue; what ends that wakes us.
                let _ = queue.ring.arm_ahead(dma, at);
            }
        }
    }

    fn has_work<D: Dma>(&mut self, dma: &mut D) -> bool {
        self.core.has_work(dma, false)
    }

    fn disarm<D: Dma>(&mut self, dma: &mut D) {
        self.core.class.disarm();
        if self.core.activation.may_take() {
            let queues = self.core.queues.iter_mut();
            for queue in queues.filter(|queue| queue.ring.parked().is_none()) {
                let _ = queue.ring.disarm(dma);
            }
        }
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        let core = &self.core;
        let is_open = |index| {
            let at = core.position(index).filter(|_| core.activation.may_take());
            at.is_some_and(|at| core.queues[at].is_open())
        };
        let mut fds = Vec::new();
        core.class.wake_fds(is_open, &mut fds);
        fds
    }

    fn opens_at_ns(&self) -> Option<u64> {
        let queues = self
            .core
            .queues
            .iter()
            .filter(|_| self.core.activation.may_run());
        let retries = queues.filter_map(|queue| queue.ring.retry_at_ns());
        let class = self.core.class.deadline(self.core.now_ns);
        retries.chain(class).min()
    }

    fn in_use<D: Dma>(&mut self, dma: &D, pages: &Pages) -> u32 {
        let generation = dma.generation();
        let queues = self.core.queues.iter();
        queues.fold(0, |mask, queue| mask | queue.ring.in_use(generation, pages))
    }

    fn in_flight(&self) -> u32 {
        self.core.class.in_flight(&self.core.queues)
    }

    fn touches_memory(&self) -> bool {
        self.in_flight() != 0 && self.core.class.touches_memory()
    }

    fn needs_reset(&self) -> bool {
        self.core.activation.violation().is_some()
    }

    fn stats(&self) -> DeviceStats {
        let mut rings = self.core.rings;
        for queue in &self.core.queues {
            rings.add(&queue.ring.stats());
        }
        DeviceStats {
            in_flight: u64::from(self.in_flight()),
            ..self.stats.with_rings(&rings)
        }
    }
}

#[cfg(test)]
mod tests;
