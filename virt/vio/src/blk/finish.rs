//! The back half of a visit: what has ended is collected and shown to the driver.

use guest_mem::{Dma, Stop};

use super::backend::{Completion, Outcome};
use super::request::{STATUS_IOERR, STATUS_OK, STATUS_UNSUPP};
use super::slot::Cancel;
use super::{Blk, BlkQueue};
use crate::device::Interrupt;
use crate::ring::following::wait_for_all;
use crate::ring::{RingStop, Violation};

impl Blk {
    /// Collects what has ended; whether anything has.
    pub(super) fn harvest<D: Dma>(&mut self, dma: &mut D) -> bool {
        if self.in_flight == 0 {
            return false;
        }
        let mut completions = std::mem::take(&mut self.completions);
        self.io.poll(&mut completions);
        self.stalled.take_cancelled(&self.slab, &mut completions);
        let busy = !completions.is_empty();
        for Completion { slot, outcome } in completions.drain(..) {
            let own = &mut self.slab[slot as usize];
            assert!(
                own.in_flight,
                "the back end completed a slot that is not in flight"
            );
            match outcome {
                Outcome::NotCancellable => {
                    // It keeps its leases: its buffers may still be written.
                    if own.cancel == Cancel::Overdue {
                        self.fail(Violation::NotCancellable);
                    }
                    continue;
                }
                Outcome::NotBegun(errno) => {
                    self.stall(slot, errno);
                    continue;
                }
                Outcome::Done | Outcome::Failed(_) => {}
            }
            own.in_flight = false;
            self.in_flight -= 1;
            let number = own.queue;
            self.end_part(self.position(number), slot, outcome, dma);
        }
        self.completions = completions;
        busy
    }

    /// Shows the driver what has ended of queue `at` (a position), by one store; whether it showed any.
    pub(super) fn finish<D: Dma>(
        &mut self,
        at: usize,
        dma: &mut D,
        irq: &mut impl Interrupt,
    ) -> bool {
        let queue = &self.queues[at];
        if queue.ended.is_empty() && queue.ring.staged() == 0 {
            return false;
        }
        let mut left = queue.ring.size();
        let mut busy = false;
        while left != 0 && self.queues[at].ring.parked().is_none() {
            let Some(&slot) = self.queues[at].ended.front() else {
                break;
            };
            match self.finish_one(at, slot, dma) {
                Ok(()) => busy = true,
                Err(stop) => {
                    self.note(stop);
                    break;
                }
            }
            left -= 1;
        }
        // Not while parked by a fault of the ring itself, which would only be recorded again.
        if self.queues[at].ring.staged() != 0 && !self.queues[at].ring.is_faulted() {
            busy |= self.publish(at, dma, irq);
        }
        busy
    }

    fn publish<D: Dma>(&mut self, at: usize, dma: &mut D, irq: &mut impl Interrupt) -> bool {
        let ring = &mut self.queues[at].ring;
        match ring.publish(dma) {
            Ok(wanted) => {
                if wanted {
                    self.stats.interrupts += 1;
                    irq.queue(ring.index());
                }
                true
            }
            Err(stop) => {
                self.note(stop);
                false
            }
        }
    }

    /// Moves bounced data, writes the status byte and stages the used element. After an error the
    /// request is where it was and the queue parked.
    fn finish_one<D: Dma>(&mut self, at: usize, slot: u32, dma: &mut D) -> Result<(), RingStop> {
        let queue = &mut self.queues[at];
        let own = &mut self.slab[slot as usize];
        let written = match own.answer(slot, dma, &mut *self.io, &self.config.serial) {
            Ok(written) => written,
            Err(stop @ Stop::Pending(_)) => {
                let stop = wait_for_all(dma, stop, own.unanswered());
                self.ask_for_ended(at, dma);
                return Err(self.queues[at].ring.park(stop.into()));
            }
            // The status byte itself: the driver would take whatever stands there for our answer.
            Err(Stop::Fault(_)) => return Err(queue.ring.park(Violation::Status.into())),
        };
        let token = own.token.expect("set when the chain was taken");
        queue.ring.stage(dma, token, written)?;
        own.count(&mut self.stats);
        queue.ended.pop_front();
        queue.asked = queue.asked.saturating_sub(1);
        self.forget(slot);
        Ok(())
    }

    /// While the first request of queue `at` that has ended waits to be answered: asks for what answering the others will
    /// want, each once. There are as many as the back end is deep.
    #[cold]
    fn ask_for_ended<D: Dma>(&mut self, at: usize, dma: &mut D) {
        let BlkQueue { ended, asked, .. } = &mut self.queues[at];
        for &slot in ended.range((*asked).max(1).min(ended.len())..) {
            // Nobody waits for these.
            let _ = dma.gather(self.slab[slot as usize].unanswered());
        }
        *asked = ended.len();
    }

    /// Gives a slot back.
    pub(super) fn forget(&mut self, slot: u32) {
        self.io.unreserve(slot);
        self.free.push(slot);
    }
}

/// The status byte of an outcome that ended a request.
pub(super) fn status_of(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Done => STATUS_OK,
        Outcome::Failed(libc::EOPNOTSUPP) => STATUS_UNSUPP,
        Outcome::Failed(_) | Outcome::NotBegun(_) | Outcome::NotCancellable => STATUS_IOERR,
    }
}
