//! Queues that come and go one by one, as vhost-user starts and stops them.
//!
//! [`begin`](Blk::begin) instead of [`activate`](VirtioDevice::activate), then [`add_queue`](Blk::add_queue) for each;
//! [`pause_queue`](Blk::pause_queue) while one is disabled; [`stop_queue`](Blk::stop_queue) until it answers where the
//! ring stands. [`set_memory`](Blk::set_memory) when guest memory changes, with nothing in flight, which is waited for
//! [on hold](Blk::set_on_hold).

use guest_mem::{Dma, KeepAlive};

use super::slot::Cancel;
use super::{Blk, BlkQueue};
use crate::device::{ActivateError, Interrupt, VirtioDevice};
use crate::ring::{Ring, RingPosition, Violation};

/// A queue that has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoppedQueue {
    /// Where its ring stood.
    pub position: RingPosition,
    /// Requests that have ended and that the driver will not hear of, because its ring cannot be written.
    pub unshown: u16,
}

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
    /// where it stood is answered. `None`: visit the device, and ask again, for as long as its requests take.
    ///
    /// What has ended is shown also by a device that needs a reset. A ring that cannot be written any more (its addresses
    /// fault, or it broke the protocol) is given up once its requests no longer touch memory, and the answer counts what
    /// could not be shown.
    pub fn stop_queue<D: Dma>(
        &mut self,
        index: u16,
        dma: &mut D,
        irq: &mut impl Interrupt,
    ) -> Option<StoppedQueue> {
        let at = self.position(index)?;
        self.queues[at].takes = false;
        if !self.stopped {
            self.finish(at, dma, irq);
        }
        let queue = &self.queues[at];
        let unshown = queue.ring.in_flight();
        let runs = self
            .slab
            .iter()
            .any(|own| own.in_flight && own.queue == index);
        if runs || !(unshown == 0 || queue.ring.is_faulted()) {
            return None;
        }
        let queue = self.queues.remove(at);
        self.first = 0;
        let stats = queue.ring.stats();
        self.rings.add(&stats);
        for slot in queue.ended {
            self.forget(slot);
        }
        Some(StoppedQueue {
            position: queue.ring.position(),
            unshown,
        })
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

    /// Takes no chains from any queue, or goes on. What has been taken is finished and shown in either case.
    pub fn set_on_hold(&mut self, is_on_hold: bool) {
        self.on_hold = is_on_hold;
    }

    /// Shows the driver what has ended, and takes nothing: the last visit before the device goes elsewhere, or ends.
    pub fn show<D: Dma>(&mut self, dma: &mut D, irq: &mut impl Interrupt) {
        if !self.broken {
            for at in 0..self.queues.len() {
                self.finish(at, dma, irq);
            }
        }
    }

    /// Asks everything in flight to end, because nobody waits for it any more; how many requests. One that cannot be
    /// cancelled goes on, and nothing follows from that but the wait for its end. Until its reset the device shows nothing
    /// more: what is cancelled has not failed, and a successor runs it again.
    pub fn cancel_all(&mut self) -> u32 {
        self.stopped = true;
        self.cancel(Cancel::Asked)
    }

    pub(super) fn cancel(&mut self, how: Cancel) -> u32 {
        let mut count = 0;
        for (slot, request) in (0..).zip(&mut self.slab) {
            if request.in_flight && request.cancel == Cancel::No {
                request.cancel = how;
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
        if self.on_hold || !queue.takes || queue.ring.parked().is_some() {
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
