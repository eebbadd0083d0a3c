//! What the owner of a block device calls.

use std::os::fd::RawFd;

use guest_mem::{Dma, KeepAlive, Ticket};

use super::backend::Transfer;
use super::slot::Cancel;
use super::{Blk, BlkQueue};
use crate::device::{
    ActivateError, Activity, DeviceStats, Interrupt, QueueConfig, Quiesce, StopReason, VirtioDevice,
};
use crate::ring::{Ring, RingStop};
use crate::saved::{SAVED_VERSION, SavedDevice};
use crate::visit::Visit;

impl Blk {
    /// A visit of all queues: takes chains while `visit` lasts, shows what has ended. `Busy` also if the
    /// visit ended before the chains did.
    pub fn visit<D: Dma>(
        &mut self,
        dma: &mut D,
        irq: &mut impl Interrupt,
        visit: &mut Visit,
    ) -> Activity {
        let mut busy = false;
        self.now_ns = visit.now_ns();
        let count = self.queues.len();
        if self.may_take() {
            for turn in 0..count {
                busy |= self.take(self.turn(turn), dma, visit);
            }
        }
        if self.in_flight != 0 {
            self.io.flush();
            busy |= self.harvest(dma);
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

    /// The position of the queue whose turn is the `turn`-th, of at least one; `turn` is at most their number, and `first`
    /// below it.
    fn turn(&self, turn: usize) -> usize {
        let at = self.first + turn;
        let count = self.queues.len();
        if at >= count { at - count } else { at }
    }
}

impl VirtioDevice for Blk {
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

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(
        &mut self,
        features: u64,
        queues: &[QueueConfig],
        keep: KeepAlive,
    ) -> Result<(), ActivateError> {
        if self.in_flight != 0 {
            return Err(ActivateError::NotQuiesced {
                in_flight: self.in_flight,
            });
        }
        self.reset();
        let rings: Vec<Ring> =
            crate::device::make_queues(self.features, &self.queue_sizes, features, queues)?;
        self.queues = rings.into_iter().map(BlkQueue::new).collect();
        self.limits.features = features;
        self.io.attach(keep);
        Ok(())
    }

    fn poll<D: Dma>(&mut self, dma: &mut D, irq: &mut impl Interrupt, now_ns: u64) -> Activity {
        self.visit(dma, irq, &mut Visit::alone(now_ns))
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
        if self.announce || self.io.has_completions() {
            return true;
        }
        if !self.may_run() {
            return false;
        }
        let on_hold = self.on_hold;
        // A slot that is taken comes back when its request ends or its parked queue goes on, and both wake us.
        let starving = self.free.len() < self.slab.len();
        let mut violated = None;
        let work = self.queues.iter_mut().any(|queue| {
            if queue.ring.parked().is_some() {
                return false;
            }
            if !queue.ended.is_empty() || queue.ring.staged() != 0 {
                return true;
            }
            if on_hold || !queue.takes || (queue.starved && starving) {
                return false;
            }
            match queue.ring.has_available(dma) {
                Ok(available) => available && self.throttle.is_open(self.now_ns),
                Err(RingStop::Violation(violation)) => {
                    violated = Some(violation);
                    true
                }
                Err(RingStop::Access(_)) => false,
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

    fn quiesce<D: Dma>(&mut self, dma: &mut D) -> Quiesce {
        self.stopped = true;
        self.io.flush();
        self.harvest(dma);
        match self.in_flight {
            0 => Quiesce::Done,
            in_flight => Quiesce::Draining { in_flight },
        }
    }

    fn touches_memory(&self) -> bool {
        // Of a stopped device: what is bounced reaches guest memory in a visit, and visits show nothing until it is resumed.
        self.in_flight != 0 && self.io.transfer() == Transfer::Direct
    }

    fn resume(&mut self) {
        self.stopped = false;
    }

    fn reset(&mut self) {
        assert_eq!(
            self.in_flight, 0,
            "reset of a block device that has not been quiesced"
        );
        for queue in self.queues.drain(..) {
            let stats = queue.ring.stats();
            self.rings.add(&stats);
            for slot in queue.ended {
                self.io.unreserve(slot);
            }
        }
        self.free.clear();
        self.free.extend((0..self.slab.len() as u32).rev());
        self.violation = None;
        self.first = 0;
        self.limits.features = 0;
        self.stopped = false;
        self.on_hold = false;
        self.broken = false;
        self.announce = false;
        self.io.detach();
    }

    fn cancel_overdue(&mut self) {
        self.cancel(Cancel::Overdue);
    }

    fn stop_overdue(&mut self, reason: StopReason) {
        match reason {
            StopReason::Pause => {}
            StopReason::Reset | StopReason::End => {
                self.cancel_all();
            }
        }
    }

    fn needs_reset(&self) -> bool {
        self.broken
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
            stopped,
            on_hold: _,
            broken,
            violation: _,
            announce: _,
            stats: _,
            rings: _,
        } = self;
        let ended = queues.iter().any(|queue| !queue.ended.is_empty());
        if *in_flight != 0 || ended || !(*stopped || queues.is_empty()) {
            return None;
        }
        Some(SavedDevice {
            version: SAVED_VERSION,
            device_type: self.device_type(),
            features: limits.features,
            needs_reset: *broken,
            queues: queues
                .iter()
                .map(|queue| queue.ring.save())
                .collect::<Option<_>>()?,
            held_frame: Vec::new(),
        })
    }

    fn stats(&self) -> DeviceStats {
        let mut rings = self.rings;
        for queue in &self.queues {
            rings.add(&queue.ring.stats());
        }
        DeviceStats {
            publishes: rings.publishes,
            ring_faults: rings.faults,
            violations: rings.violations,
            pends: rings.pends,
            in_flight: u64::from(self.in_flight),
            ..self.stats
        }
    }
}
