//! One part of a request after the other.

use std::io;

use super::backend::{Op, Outcome, Transfer};
use super::finish::status_of;
use super::request::{STATUS_IOERR, STATUS_OK};
use super::slot::{Cancel, PrepareOutcome, WaitingFor};
use super::{BlkClass, BlkQueue, Queue};
use crate::body::{Context, Environment, Step};
use crate::device::Activity;
use crate::log_rate_limit::LogRateLimit;
use crate::poll_budget::cost;
use crate::ring::RingStop;

impl BlkClass {
    /// Starts the part that is prepared in `slot`. It may be over at once.
    pub(super) fn start_part<E: Environment>(
        &mut self,
        queue: &mut BlkQueue,
        slot: u32,
        cx: &mut Context<'_, E>,
    ) {
        let Self { slab, io, .. } = self;
        let own = &mut slab[slot as usize];
        let op = own.part_op();
        let outcome = match (io.transfer(), op) {
            (Transfer::Direct, _) if !own.is_bounced() => io.run_now(op, &own.pieces),
            // Copied by preparing it.
            (Transfer::Memory, Op::Read { .. } | Op::Write { .. }) => Some(Outcome::Done),
            // Its data are to be moved by queueing.
            (Transfer::Direct | Transfer::Bounce | Transfer::Memory | Transfer::Nothing, _) => None,
        };
        match outcome {
            Some(outcome) => self.end_part(Some(queue), slot, outcome, cx),
            None => {
                own.in_flight = true;
                self.in_flight += 1;
                self.submit(slot);
            }
        }
    }

    /// Ends what runs in `slot`. `queue`: its own, if that was not removed in the meantime.
    pub(super) fn end_part<E: Environment>(
        &mut self,
        queue: Option<&mut BlkQueue>,
        slot: u32,
        outcome: Outcome,
        cx: &mut Context<'_, E>,
    ) {
        if let Outcome::Failed(errno) = outcome {
            self.say_that_it_failed(slot, errno, cx.visit.now_ns());
        }
        let own = &mut self.slab[slot as usize];
        own.release(cx.dma);
        // Also of one that was cancelled: it has succeeded if that came too late.
        own.status = status_of(outcome);
        let mut goes_on = own.status == STATUS_OK && !own.is_last_part();
        if goes_on && own.cancel != Cancel::No {
            own.status = STATUS_IOERR;
            goes_on = false;
        }
        match queue {
            Some(queue) if goes_on => queue.continuing.push_back(slot),
            Some(queue) => queue.ended.push_back(slot),
            // No driver to notify.
            None => self.forget_slot(slot),
        }
    }

    /// An administrator has to know which file it is, and where. Not of what was cancelled.
    fn say_that_it_failed(&self, slot: u32, errno: i32, now_ns: u64) {
        let own = &self.slab[slot as usize];
        if own.cancel != Cancel::No || errno == libc::ECANCELED {
            return;
        }
        let (op, error) = (own.part_op(), io::Error::from_raw_os_error(errno));
        self.say(now_ns, || format!("{op:?} failed: {error}"));
    }

    /// One line about its storage, as far as there is a budget.
    pub(super) fn say(&self, now_ns: u64, what: impl FnOnce() -> String) {
        let Some(suppressed) = self.lines.admits_at(now_ns) else {
            return;
        };
        let file = self.io.path().unwrap_or_default();
        let more = LogRateLimit::left_out(suppressed);
        tracing::warn!(image = %file.display(), "{}{more}", what());
    }

    /// Goes on with the requests of `queue` that stand between two parts, while the visit lasts.
    pub(super) fn go_on_with_parts<E: Environment>(
        &mut self,
        queue: &mut Queue,
        cx: &mut Context<'_, E>,
    ) -> Step {
        let mut activity = self.finish_parts(queue, cx)?;
        if queue.own.lacks_leases(cx.dma) {
            return Ok(activity);
        }
        queue.own.waiting_for = None;
        while !cx.is_over()
            && let Some(&slot) = queue.own.continuing.front()
        {
            match self.next_part(queue, slot, cx)? {
                None => activity = Activity::Busy,
                Some(waiting_for) => {
                    queue.own.wait_for(waiting_for, cx);
                    break;
                }
            }
        }
        Ok(activity)
    }

    /// Of all of them, also of those behind one that waits for room: the buffers that they have are
    /// room for it.
    fn finish_parts<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        let Self { slab, io, .. } = self;
        let mut activity = Activity::Idle;
        for &slot in &queue.own.continuing {
            let own = &mut slab[slot as usize];
            if own.part() == 0 {
                continue;
            }
            if cx.is_over() {
                break;
            }
            let bytes = u64::from(own.part());
            if let Err(stop) = own.finish_part(slot, cx.dma, &mut **io) {
                return Err(queue.park(stop));
            }
            cx.visit
                .charge(cost::REQUEST / 4 + bytes / cost::BYTES_PER_NS);
            activity = Activity::Busy;
        }
        Ok(activity)
    }

    /// Starts the next part of the first of them, or ends it if it has failed. Returns the resource
    /// that it waits for, if it does.
    fn next_part<E: Environment>(
        &mut self,
        queue: &mut Queue,
        slot: u32,
        cx: &mut Context<'_, E>,
    ) -> Result<Option<WaitingFor>, RingStop> {
        let Self {
            slab, io, config, ..
        } = self;
        let own = &mut slab[slot as usize];
        let mut ready = own.status == STATUS_OK;
        if ready {
            match own.prepare_part(slot, cx.dma, &mut **io, config.logical_block) {
                Ok(PrepareOutcome::Yes) => {}
                Ok(PrepareOutcome::NoRoom(waiting_for)) => return Ok(Some(waiting_for)),
                Ok(PrepareOutcome::Refused) => {
                    own.refuse();
                    ready = false;
                }
                Err(stop) => return Err(queue.park(stop)),
            }
        }
        queue.own.continuing.pop_front();
        cx.visit
            .charge(cost::REQUEST + u64::from(own.part()) / cost::BYTES_PER_NS);
        match ready {
            true => self.start_part(&mut queue.own, slot, cx),
            false => queue.own.ended.push_back(slot),
        }
        Ok(None)
    }
}
