//! Queues that come and go one by one, as vhost-user starts and stops them.
//!
//! [`begin`](Blk::begin) instead of [`activate`](VirtioDevice::activate), then [`add_queue`](Blk::add_queue) for each;
//! [`pause_queue`](Blk::pause_queue) while one is disabled; [`stop_queue`](Blk::stop_queue) until it answers where the
//! ring stands. [`set_memory`](Blk::set_memory) when guest memory changes, with nothing in flight.

use guest_mem::{Dma, KeepAlive};

use super::{Blk, BlkQueue};
use crate::device::{ActivateError, Interrupt, VirtioDevice};
use crate::ring::{Ring, RingPosition, Violation};

impl BlkQueue {
    pub(super) fn new(ring: Ring) -> Self {
        Self {
            ring,
            ended: Default::default(),
            starved: false,
            takes: true,
        }
    }
}

impl Blk {
    /// The driver has accepted `features`; guest memory is kept mapped by `keep`. There is no queue yet.
    ///
    /// # Errors
    /// Features that are not offered; requests in flight.
    pub fn begin(&mut self, features: u64, keep: KeepAlive) -> Result<(), ActivateError> {
        self.activate(features, &[], keep)
    }

    /// Serves `ring` from now on.
    ///
    /// # Errors
    /// A ring of that number is being served, or the device has none.
    pub fn add_queue(&mut self, ring: Ring) -> Result<(), ActivateError> {
        let index = ring.index();
        if usize::from(index) >= self.queue_sizes.len() || self.position(index).is_some() {
            return Err(ActivateError::QueueIndex { index });
        }
        // Most devices have one: no room for three more.
        self.queues.reserve_exact(1);
        self.queues.push(BlkQueue::new(ring));
        Ok(())
    }

    /// Whether chains are taken from queue `index`. What has been taken is finished in either case.
    pub fn pause_queue(&mut self, index: u16, is_paused: bool) {
        if let Some(at) = self.position(index) {
            self.queues[at].takes = !is_paused;
        }
    }

    /// Stops queue `index`: no more chains are taken, and once all that were are shown, the queue is gone and
    /// where it stood is answered. `None`: visit the device, and ask again. A ring that cannot be written any more
    /// (its addresses fault, the device is broken) is given up once its requests no longer touch memory.
    pub fn stop_queue<D: Dma>(
        &mut self,
        index: u16,
        dma: &mut D,
        irq: &mut impl Interrupt,
    ) -> Option<RingPosition> {
        let at = self.position(index)?;
        self.queues[at].takes = false;
        if self.may_run() {
            self.finish(at, dma, irq);
        }
        let is_lost = self.broken || self.queues[at].ring.is_faulted();
        let queue = &self.queues[at];
        let is_shown = queue.ended.is_empty() && queue.ring.in_flight() == 0;
        let runs = self
            .slab
            .iter()
            .any(|own| own.in_flight && own.queue == index);
        if runs || !(is_shown || is_lost) {
            return None;
        }
        let queue = self.queues.remove(at);
        self.first = 0;
        let stats = queue.ring.stats();
        self.rings.add(&stats);
        for slot in queue.ended {
            self.forget(slot);
        }
        Some(queue.ring.position())
    }

    /// Guest memory is kept mapped by `keep` from now on, which holds what was mapped before as far as it is still
    /// the guest's.
    ///
    /// # Panics
    /// If a request is in flight.
    pub fn set_memory(&mut self, keep: KeepAlive) {
        self.io.attach(keep);
    }

    /// Another thread will visit the device from now on.
    ///
    /// # Panics
    /// If a request is in flight.
    pub fn rebind(&mut self) {
        self.io.rebind();
    }

    /// Stops taking chains from all queues, or goes on.
    pub fn set_stopped(&mut self, is_stopped: bool) {
        self.stopped = is_stopped;
    }

    /// Shows the driver what has ended, and takes nothing: the last visit before the device goes elsewhere, or ends.
    pub fn show<D: Dma>(&mut self, dma: &mut D, irq: &mut impl Interrupt) {
        if !self.broken {
            for at in 0..self.queues.len() {
                self.finish(at, dma, irq);
            }
        }
    }

    /// As [`cancel_overdue`](VirtioDevice::cancel_overdue), for queue `index` only, or for all; how many are cancelled.
    pub fn cancel_queue(&mut self, index: Option<u16>) -> u32 {
        let mut count = 0;
        for (slot, request) in (0..).zip(&mut self.slab) {
            let is_meant = index.is_none_or(|index| request.queue == index);
            if request.in_flight && !request.cancelled && is_meant {
                request.cancelled = true;
                self.stats.cancelled += 1;
                count += 1;
                self.io.cancel(slot);
            }
        }
        self.io.flush();
        count
    }

    /// Requests that the back end has not finished.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// The rings being served.
    pub fn rings(&mut self) -> impl Iterator<Item = &mut Ring> {
        self.queues.iter_mut().map(|queue| &mut queue.ring)
    }

    /// The ring of queue `index`, if it is being served.
    pub fn ring(&mut self, index: u16) -> Option<&mut Ring> {
        let at = self.position(index)?;
        Some(&mut self.queues[at].ring)
    }

    /// Whether the next visit will find chains in queue `index`.
    pub fn has_more<D: Dma>(&mut self, index: u16, dma: &mut D) -> bool {
        let Some(at) = self.position(index) else {
            return false;
        };
        let queue = &mut self.queues[at];
        if !queue.takes || queue.ring.parked().is_some() {
            return false;
        }
        match queue.ring.has_available(dma) {
            Ok(has_available) => has_available,
            Err(stop) => {
                self.note(stop);
                false
            }
        }
    }

    /// When the queues that the rate limit holds back may go on, in nanoseconds of the visits' clock; `None` if the last
    /// visit left nothing behind because of it.
    pub fn opens_at_ns(&self) -> Option<u64> {
        (!self.throttle.is_open(self.now_ns)).then(|| self.throttle.opens_at_ns())
    }

    /// What made [`needs_reset`](VirtioDevice::needs_reset) true.
    pub fn violation(&self) -> Option<Violation> {
        self.violation
    }

    pub(super) fn position(&self, index: u16) -> Option<usize> {
        self.queues
            .iter()
            .position(|queue| queue.ring.index() == index)
    }
}
