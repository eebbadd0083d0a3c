//! The life of a block device, and what its owner calls.

use std::os::fd::RawFd;
use std::path::PathBuf;

use guest_mem::{Dma, KeepAlive, Ticket};

use super::backend::Transfer;
use super::slot::{Cancel, Request, WaitingFor};
use super::{Blk, BlkQueue};
use crate::device::{
    Activity, CancelReason, DeviceStats, Interrupt, QueueDevice, Service, StoppedQueue,
    check_features,
};
use crate::queue_config::ActivateError;
use crate::ring::{Ring, RingStop, Violation};
use crate::saved::{SAVED_VERSION, SavedDevice};
use crate::visit::Visit;

impl Blk {
    /// The position of the queue whose turn is the `turn`-th, of at least one; `turn` is at most their number, and `first`
    /// below it.
    fn turn(&self, turn: usize) -> usize {
        let at = self.first + turn;
        let count = self.queues.len();
        if at >= count { at - count } else { at }
    }

    pub(super) fn position(&self, index: u16) -> Option<usize> {
        self.queues
            .iter()
            .position(|queue| queue.ring.index() == index)
    }

    /// Cancels the requests in flight that `whose` picks; how many.
    fn cancel_as(&mut self, how: Cancel, whose: impl Fn(&Request) -> bool) -> u32 {
        let mut count = 0;
        for (slot, request) in (0..).zip(&mut self.slab) {
            if request.in_flight && request.cancel == Cancel::No && whose(request) {
                request.cancel = how;
                self.stats.cancelled += 1;
                count += 1;
                if !self.stalled.cancel(slot) {
                    self.io.cancel(slot);
                }
            }
        }
        self.io.flush();
        count
    }

    /// Cancels the requests that an unmap waits for.
    #[cold]
    fn cancel_overdue<D: Dma>(&mut self, dma: &D) {
        self.cancel_as(Cancel::Overdue, |request| {
            request.leases.iter().any(|&lease| dma.is_stale(lease))
        });
    }
}

impl QueueDevice for Blk {
    fn device_type(&self) -> u16 {
        2
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        crate::device::read_space(&self.space, offset, out);
    }

    fn begin(&mut self, features: u64, keep: KeepAlive) -> Result<(), ActivateError> {
        if self.in_flight != 0 {
            return Err(ActivateError::NotQuiesced {
                in_flight: self.in_flight,
            });
        }
        check_features(self.features, features)?;
        self.reset();
        self.limits.features = features;
        self.io.attach(keep);
        Ok(())
    }

    fn add_queue(&mut self, ring: Ring) -> Result<(), ActivateError> {
        let index = ring.index();
        if usize::from(index) >= self.queue_sizes.len() || self.position(index).is_some() {
            return Err(ActivateError::QueueIndex { index });
        }
        // Most devices have one: no room for three more.
        self.queues.reserve_exact(1);
        self.queues.push(BlkQueue::new(ring));
        Ok(())
    }

    fn pause_queue(&mut self, index: u16, is_paused: bool) {
        if let Some(at) = self.position(index) {
            self.queues[at].takes = !is_paused;
        }
    }

    fn stop_queue<D: Dma>(
        &mut self,
        index: u16,
        dma: &mut D,
        irq: &mut impl Interrupt,
    ) -> Option<StoppedQueue> {
        let at = self.position(index)?;
        self.queues[at].takes = false;
        if self.may_touch() {
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
        for slot in queue.ended.into_iter().chain(queue.continuing) {
            self.forget(slot);
        }
        Some(StoppedQueue {
            position: queue.ring.position(),
            unshown,
        })
    }

    fn set_service(&mut self, service: Service) {
        self.service = service;
    }

    fn set_memory(&mut self, keep: KeepAlive) {
        self.io.attach(keep);
    }

    fn rebind(&mut self) {
        self.io.rebind();
    }

    /// One that cannot be cancelled goes on, and but for [`CancelReason::Unmap`] nothing follows from that but the wait for its
    /// end.
    fn cancel(&mut self, reason: CancelReason) -> u32 {
        match reason {
            CancelReason::Unmap => {
                self.is_overdue = true;
                0
            }
            CancelReason::Reset | CancelReason::End => {
                self.abandoned = true;
                self.cancel_as(Cancel::Asked, |_| true)
            }
        }
    }

    fn visit<D: Dma>(
        &mut self,
        dma: &mut D,
        irq: &mut impl Interrupt,
        visit: &mut Visit,
    ) -> Activity {
        let mut busy = false;
        self.now_ns = visit.now_ns();
        let count = self.queues.len();
        if self.may_run() {
            for queue in &mut self.queues {
                queue.ring.retry(self.now_ns);
            }
            for turn in 0..count {
                busy |= self.go_on(self.turn(turn), dma, visit);
            }
        }
        if self.may_take() {
            for turn in 0..count {
                busy |= self.take(self.turn(turn), dma, visit);
            }
        }
        if std::mem::take(&mut self.is_overdue) {
            self.cancel_overdue(dma);
        }
        if self.in_flight != 0 {
            self.retry_stalled();
            self.io.flush();
            busy |= self.harvest(dma);
            self.go_on_with_stalled();
        }
        if self.may_run() {
            for turn in 0..count {
                busy |= self.finish(self.turn(turn), dma, irq);
            }
            // A queue that starves because the others come first comes first next time.
            self.first = if count == 0 { 0 } else { self.turn(1) };
        }
        if self.announce {
            self.announce = false;
            irq.config();
            busy = true;
        }
        if busy { Activity::Busy } else { Activity::Idle }
    }

    fn kick(&mut self, queue: u16) {
        self.stats.kicks += 1;
        if let Some(own) = self.queues.iter_mut().find(|own| own.ring.index() == queue) {
            own.ring.kick();
        }
    }

    fn ticket_done(&mut self, ticket: Ticket) {
        for queue in &mut self.queues {
            queue.ring.ticket_done(ticket);
            queue.following.ticket_done(ticket);
        }
    }

    fn arm<D: Dma>(&mut self, dma: &mut D) {
        // Also when no chain is taken: what is in flight must be harvested.
        self.io.arm();
        if self.may_take() {
            for queue in self
                .queues
                .iter_mut()
                .filter(|queue| queue.ring.parked().is_none())
            {
                // A stop has parked the queue; what ends that wakes us.
                let _ = queue.ring.arm(dma);
            }
        }
    }

    fn has_work<D: Dma>(&mut self, dma: &mut D) -> bool {
        let has_ended = self.io.has_completions() || self.stalled.has_cancelled();
        if self.announce || self.is_overdue || has_ended {
            return true;
        }
        if !self.may_run() {
            return false;
        }
        let is_taking = self.service == Service::Full;
        // A slot that is taken comes back when its request ends or its parked queue goes on, and both wake us.
        let starving = self.free.len() < self.slab.len();
        let mut violated = None;
        let work = self.queues.iter_mut().any(|queue| {
            if queue.ring.parked().is_some() {
                return is_taking && queue.takes && queue.following.has_work();
            }
            if !queue.ended.is_empty() || queue.ring.staged() != 0 {
                return true;
            }
            let waits_for_slot = queue.waiting_for == Some(WaitingFor::Slot) && starving;
            if waits_for_slot || queue.lacks_leases(dma) {
                return false;
            }
            if !queue.continuing.is_empty() {
                return true;
            }
            if !is_taking || !queue.takes {
                return false;
            }
            match queue.ring.has_available(dma) {
                Ok(available) => available && self.throttle.is_open(self.now_ns),
                Err(RingStop::Violation(violation)) => {
                    violated = Some(violation);
                    true
                }
                Err(RingStop::Access(_)) => queue.ring.is_faulted(),
            }
        });
        if let Some(violation) = violated {
            self.fail(violation);
        }
        work
    }

    fn disarm<D: Dma>(&mut self, dma: &mut D) {
        self.io.disarm();
        if self.may_take() {
            for queue in self
                .queues
                .iter_mut()
                .filter(|queue| queue.ring.parked().is_none())
            {
                let _ = queue.ring.disarm(dma);
            }
        }
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        let mut fds = Vec::new();
        self.io.wake_fds(&mut fds);
        fds
    }

    fn has_more<D: Dma>(&mut self, index: u16, dma: &mut D) -> bool {
        let Some(at) = self.position(index) else {
            return false;
        };
        let queue = &mut self.queues[at];
        if self.service != Service::Full || !queue.takes {
            return false;
        }
        if queue.ring.parked().is_some() {
            return queue.following.has_work();
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
        let limit = (!self.throttle.is_open(self.now_ns)).then(|| self.throttle.opens_at_ns());
        let rings = self.queues.iter().filter(|_| self.may_run());
        let retries = rings.filter_map(|queue| queue.ring.retry_at_ns());
        retries.chain(limit).chain(self.stalled.retry_at_ns()).min()
    }

    fn ring(&mut self, index: u16) -> Option<&mut Ring> {
        let at = self.position(index)?;
        Some(&mut self.queues[at].ring)
    }

    fn for_each_ring(&mut self, mut each: impl FnMut(&mut Ring)) {
        self.queues.iter_mut().for_each(|own| each(&mut own.ring));
    }

    fn in_flight(&self) -> u32 {
        self.in_flight
    }

    fn touches_memory(&self) -> bool {
        // Of a stopped device: what is bounced reaches guest memory in a visit, and visits show nothing until it is served again.
        self.in_flight != 0 && self.io.transfer() == Transfer::Direct
    }

    fn reset(&mut self) {
        assert_eq!(
            self.in_flight, 0,
            "reset of a block device that has not been quiesced"
        );
        for queue in self.queues.drain(..) {
            let stats = queue.ring.stats();
            self.rings.add(&stats);
            for slot in queue.ended.into_iter().chain(queue.continuing) {
                self.io.unreserve(slot);
            }
        }
        self.free.clear();
        self.free.extend((0..self.slab.len() as u32).rev());
        self.violation = None;
        self.first = 0;
        self.limits.features = 0;
        self.is_overdue = false;
        self.service = Service::Full;
        self.abandoned = false;
        self.announce = false;
        self.io.detach();
    }

    fn violation(&self) -> Option<Violation> {
        self.violation
    }

    fn path(&self) -> Option<PathBuf> {
        self.io.path()
    }

    fn save(&self) -> Option<SavedDevice> {
        let Self {
            config: _,
            features: _,
            queue_sizes: _,
            space: _,
            limits,
            io: _,
            queues,
            first: _,
            slab: _,
            free: _,
            throttle: _,
            now_ns: _,
            chain: _,
            completions: _,
            in_flight,
            stalled: _,
            is_overdue: _,
            service,
            abandoned: _,
            violation,
            announce: _,
            stats: _,
            lines: _,
            rings: _,
        } = self;
        let taken = |queue: &BlkQueue| !queue.ended.is_empty() || !queue.continuing.is_empty();
        let taken = queues.iter().any(taken);
        if *in_flight != 0 || taken || !(*service == Service::Stopped || queues.is_empty()) {
            return None;
        }
        Some(SavedDevice {
            version: SAVED_VERSION,
            device_type: self.device_type(),
            features: limits.features,
            needs_reset: violation.is_some(),
            queues: queues
                .iter()
                .map(|queue| queue.ring.save())
                .collect::<Option<_>>()?,
            held_frame: Vec::new(),
            balloon_actual: 0,
        })
    }

    fn stats(&self) -> DeviceStats {
        let mut rings = self.rings;
        for queue in &self.queues {
            rings.add(&queue.ring.stats());
        }
        DeviceStats {
            in_flight: u64::from(self.in_flight),
            ..self.stats.with_rings(&rings)
        }
    }
}
