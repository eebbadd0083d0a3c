//! The back half of a visit: operations that have ended are collected and answered.

use guest_mem::{Dma, Stop};

use super::backend::{Completion, Outcome};
use super::request::{STATUS_IOERR, STATUS_OK, STATUS_UNSUPP};
use super::slot::Cancel;
use super::{BlkClass, BlkQueue, Queue};
use crate::body::{Context, Environment};
use crate::device::Activity;
use crate::ring::{RingStop, Violation};

impl BlkClass {
    /// Collects operations that have ended.
    pub(super) fn reap_completions<E: Environment>(
        &mut self,
        queues: &mut [Queue],
        cx: &mut Context<'_, E>,
    ) -> Activity {
        let mut completions = std::mem::take(&mut self.completions);
        self.io.poll(&mut completions);
        self.stalled.take_cancelled(&self.slab, &mut completions);
        let activity = match completions.is_empty() {
            true => Activity::Idle,
            false => Activity::Busy,
        };
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
                        cx.fail(Violation::NotCancellable);
                    }
                    continue;
                }
                Outcome::NotBegun(errno) => {
                    self.stall(slot, errno, cx.visit.now_ns());
                    continue;
                }
                Outcome::Done | Outcome::Failed(_) => {}
            }
            own.in_flight = false;
            self.in_flight -= 1;
            let number = own.queue;
            let queue = queues.iter_mut().find(|queue| queue.index() == number);
            self.end_part(queue.map(|queue| &mut queue.own), slot, outcome, cx);
        }
        self.completions = completions;
        activity
    }

    /// Moves bounced data, writes the status byte and stages the used element. After an error the
    /// request is where it was and the queue parked.
    pub(super) fn finish_one<E: Environment>(
        &mut self,
        queue: &mut Queue,
        slot: u32,
        cx: &mut Context<'_, E>,
    ) -> Result<(), RingStop> {
        let own = &mut self.slab[slot as usize];
        let written = match own.answer(slot, cx.dma, &mut *self.io, &self.config.serial) {
            Ok(written) => written,
            Err(stop @ Stop::Pending(_)) => {
                let stop = queue.wait_for(cx.dma, stop, own.unanswered());
                self.ask_for_ended(&mut queue.own, cx.dma);
                return Err(stop);
            }
            // The status byte itself: the driver would take whatever stands there for our answer.
            Err(Stop::Fault(_)) => return Err(queue.park(Violation::Status)),
        };
        let token = own.token.expect("set when the chain was taken");
        queue.stage(cx.dma, token, written)?;
        own.count(cx.stats);
        queue.own.ended.pop_front();
        queue.own.asked = queue.own.asked.saturating_sub(1);
        self.forget_slot(slot);
        Ok(())
    }

    /// While the first request of a queue that has ended waits to be answered: asks for what
    /// answering the others will want, each once. There are as many as the back end is deep.
    #[cold]
    fn ask_for_ended<D: Dma>(&mut self, queue: &mut BlkQueue, dma: &mut D) {
        let BlkQueue { ended, asked, .. } = queue;
        for &slot in ended.range((*asked).max(1).min(ended.len())..) {
            // The ticket of these is ignored: their memory is only asked for.
            let _ = dma.gather(self.slab[slot as usize].unanswered());
        }
        *asked = ended.len();
    }

    /// Gives a slot back.
    pub(super) fn forget_slot(&mut self, slot: u32) {
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
