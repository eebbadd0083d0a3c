//! The life of a balloon, and what its owner calls.

use std::os::fd::RawFd;

use guest_mem::{Dma, KeepAlive, Ticket};

use super::{Balloon, MAX_QUEUES, Queue, Role};
use crate::device::{
    Activity, CancelReason, DeviceStats, Interrupt, QueueDevice, Service, StoppedQueue,
    check_features, read_space,
};
use crate::queue_config::ActivateError;
use crate::ring::{Ring, RingStop, Violation};
use crate::saved::{SAVED_VERSION, SavedDevice};
use crate::visit::Visit;

/// Offset of `actual` in `struct virtio_balloon_config` (§5.5.4), behind `num_pages`. `free_page_hint_cmd_id` and `poison_val`
/// follow, which are zero without their features.
const ACTUAL: usize = 4;

impl QueueDevice for Balloon {
    fn device_type(&self) -> u16 {
        5
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        let mut space = [0; 8];
        space[..ACTUAL].copy_from_slice(&self.target.to_le_bytes());
        space[ACTUAL..].copy_from_slice(&self.actual.to_le_bytes());
        read_space(&space, offset, out);
    }

    /// Any bytes of `actual`.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let mut actual = self.actual.to_le_bytes();
        for (at, byte) in (0..).zip(data) {
            let own = offset
                .checked_add(at)
                .and_then(|at| at.checked_sub(ACTUAL as u64));
            let own = own.and_then(|own| actual.get_mut(usize::try_from(own).ok()?));
            if let Some(own) = own {
                *own = *byte;
            }
        }
        self.actual = u32::from_le_bytes(actual);
    }

    fn config_generation(&self) -> u8 {
        self.generation
    }

    fn begin(&mut self, features: u64, _keep: KeepAlive) -> Result<(), ActivateError> {
        let in_flight = self.in_flight();
        if in_flight != 0 {
            return Err(ActivateError::NotQuiesced { in_flight });
        }
        check_features(self.features, features)?;
        self.reset();
        self.accepted = features;
        // The driver may have looked at it long ago, when nobody was to be told of a change.
        self.announce = self.target != 0;
        Ok(())
    }

    fn add_queue(&mut self, ring: Ring) -> Result<(), ActivateError> {
        let index = ring.index();
        let role = self.role(index);
        let role = role.ok_or(ActivateError::QueueIndex { index })?;
        let slot = &mut self.queues[usize::from(index)];
        if slot.is_some() {
            return Err(ActivateError::QueueIndex { index });
        }
        *slot = Some(Queue::new(ring, role));
        Ok(())
    }

    fn pause_queue(&mut self, index: u16, is_paused: bool) {
        if let Some(queue) = self.queue(index) {
            queue.takes = !is_paused;
        }
    }

    fn stop_queue<D: Dma>(
        &mut self,
        index: u16,
        dma: &mut D,
        irq: &mut impl Interrupt,
    ) -> Option<StoppedQueue> {
        let slot = usize::from(index);
        let mut queue = self.queues.get_mut(slot)?.take()?;
        queue.takes = false;
        // Nothing is taken any more; what has ended is shown, also by a device that needs a reset.
        if self.service != Service::Stopped
            && queue.ring.parked().is_none()
            && let Err(stop) = self.publish(dma, irq, &mut queue)
        {
            self.note(stop);
        }
        let unshown = queue.ring.in_flight();
        if queue.dropping.is_some() || (unshown != 0 && !queue.ring.is_faulted()) {
            self.queues[slot] = Some(queue);
            return None;
        }
        self.rings.add(&queue.ring.stats());
        Some(StoppedQueue {
            position: queue.ring.position(),
            unshown,
        })
    }

    fn set_service(&mut self, service: Service) {
        self.service = service;
    }

    /// No access outlives a visit.
    fn set_memory(&mut self, _keep: KeepAlive) {}

    fn rebind(&mut self) {}

    /// What is being dropped is dropped.
    fn cancel(&mut self, _reason: CancelReason) -> u32 {
        0
    }

    fn reset(&mut self) {
        assert_eq!(self.in_flight(), 0, "a reset follows a drain");
        for queue in &mut self.queues {
            if let Some(queue) = queue.take() {
                self.rings.add(&queue.ring.stats());
            }
        }
        // The target is the owner's, and stays.
        self.actual = 0;
        self.accepted = 0;
        self.first = 0;
        self.statistics = None;
        self.wants_statistics = false;
        self.service = Service::Full;
        self.violation = None;
        self.announce = false;
        self.io.reset();
    }

    fn visit<D: Dma>(
        &mut self,
        dma: &mut D,
        irq: &mut impl Interrupt,
        visit: &mut Visit,
    ) -> Activity {
        let mut busy = false;
        if self.may_run() {
            self.queues()
                .for_each(|queue| queue.ring.retry(visit.now_ns()));
        }
        for turn in 0..MAX_QUEUES {
            busy |= self.serve((self.first + turn) % MAX_QUEUES, dma, irq, visit);
        }
        self.first = (self.first + 1) % MAX_QUEUES;
        if self.announce {
            self.announce = false;
            irq.config();
            busy = true;
        }
        if busy { Activity::Busy } else { Activity::Idle }
    }

    fn kick(&mut self, queue: u16) {
        self.stats.kicks += 1;
        if let Some(own) = self.queue(queue) {
            own.ring.kick();
        }
    }

    fn ticket_done(&mut self, ticket: Ticket) {
        for queue in self.queues() {
            queue.ring.ticket_done(ticket);
            queue.dropping.take_if(|own| *own == ticket);
        }
    }

    fn arm<D: Dma>(&mut self, dma: &mut D) {
        if !self.may_take() {
            return;
        }
        for queue in self.queues() {
            if queue.takes && queue.ring.parked().is_none() {
                // A stop has parked the queue; what ends that wakes us.
                let _ = queue.ring.arm(dma);
            }
        }
    }

    fn has_work<D: Dma>(&mut self, dma: &mut D) -> bool {
        if self.announce {
            return true;
        }
        if !self.may_run() {
            return false;
        }
        let is_taking = self.service == Service::Full;
        let wants_statistics = self.wants_statistics;
        let mut broken = None;
        for queue in self.queues() {
            if queue.ring.parked().is_some() {
                continue;
            }
            if queue.ring.staged() != 0 || queue.ended.is_some() {
                return true;
            }
            if !is_taking || queue.rests(wants_statistics) {
                continue;
            }
            match queue.ring.has_available(dma) {
                Ok(true) => return true,
                Err(stop @ RingStop::Violation(_)) => {
                    broken = Some(stop);
                    break;
                }
                // A visit says when it is tried again.
                Err(RingStop::Access(_)) if queue.ring.is_faulted() => return true,
                Ok(false) | Err(RingStop::Access(_)) => {}
            }
        }
        match broken {
            Some(stop) => {
                self.note(stop);
                true
            }
            None => false,
        }
    }

    fn disarm<D: Dma>(&mut self, dma: &mut D) {
        if self.may_take() {
            for queue in self.queues() {
                if queue.ring.parked().is_none() {
                    let _ = queue.ring.disarm(dma);
                }
            }
        }
    }

    /// Doorbells and tickets are the owner's; there is nothing else to wait for.
    fn wake_fds(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn has_more<D: Dma>(&mut self, index: u16, dma: &mut D) -> bool {
        if !self.may_take() {
            return false;
        }
        let wants_statistics = self.wants_statistics;
        let Some(queue) = self.queue(index) else {
            return false;
        };
        if queue.rests(wants_statistics) {
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

    fn opens_at_ns(&self) -> Option<u64> {
        let queues = self.queues.iter().flatten().filter(|_| self.may_run());
        queues.filter_map(|queue| queue.ring.retry_at_ns()).min()
    }

    fn ring(&mut self, index: u16) -> Option<&mut Ring> {
        Some(&mut self.queue(index)?.ring)
    }

    fn for_each_ring(&mut self, mut each: impl FnMut(&mut Ring)) {
        self.queues().for_each(|queue| each(&mut queue.ring));
    }

    /// Steps whose pages are being dropped.
    fn in_flight(&self) -> u32 {
        let queues = self.queues.iter().flatten();
        queues.filter(|queue| queue.dropping.is_some()).count() as u32
    }

    fn violation(&self) -> Option<Violation> {
        self.violation
    }

    fn save(&self) -> Option<SavedDevice> {
        let Self {
            features: _,
            queue_sizes: _,
            io: _,
            ram: _,
            target: _,
            actual,
            generation: _,
            accepted,
            queues,
            first: _,
            chain: _,
            batch: _,
            statistics: _,
            wants_statistics: _,
            service,
            violation,
            announce: _,
            counts: _,
            stats: _,
            rings: _,
        } = self;
        let mut queues = queues.iter().flatten();
        let is_stopped = *service == Service::Stopped || queues.clone().next().is_none();
        if !is_stopped || self.in_flight() != 0 {
            return None;
        }
        Some(SavedDevice {
            version: SAVED_VERSION,
            device_type: self.device_type(),
            features: *accepted,
            needs_reset: violation.is_some(),
            queues: queues.try_fold(Vec::new(), |mut all, queue| {
                all.push(queue.ring.save()?);
                Some(all)
            })?,
            held_frame: Vec::new(),
            balloon_actual: *actual,
        })
    }

    fn stats(&self) -> DeviceStats {
        let mut rings = self.rings;
        for queue in self.queues.iter().flatten() {
            rings.add(&queue.ring.stats());
        }
        DeviceStats {
            in_flight: u64::from(self.in_flight()),
            ..self.stats.with_rings(&rings)
        }
    }
}

/// Keeps the roles beside the places that hold them.
const _: () = assert!(Role::Report as usize == MAX_QUEUES - 1);
