//! One part of a request after the other.

use std::io;

use guest_mem::Dma;

use super::Blk;
use super::backend::{Op, Outcome, Transfer};
use super::finish::status_of;
use super::request::{STATUS_IOERR, STATUS_OK};
use super::slot::{Cancel, Ready, WaitingFor};
use crate::ring::RingStop;
use crate::visit::{Visit, cost};

impl Blk {
    /// Starts the part that is prepared in `slot`, of queue `at` (a position). It may be over at once.
    pub(super) fn start_part<D: Dma>(&mut self, at: usize, slot: u32, dma: &mut D) {
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
            Some(outcome) => self.end_part(Some(at), slot, outcome, dma),
            None => {
                own.in_flight = true;
                self.in_flight += 1;
                self.submit(slot);
            }
        }
    }

    /// What runs in `slot` has ended. `at`: the position of its queue, if that was not given up in the meantime.
    pub(super) fn end_part<D: Dma>(
        &mut self,
        at: Option<usize>,
        slot: u32,
        outcome: Outcome,
        dma: &mut D,
    ) {
        if let Outcome::Failed(errno) = outcome {
            self.say_that_it_failed(slot, errno);
        }
        let own = &mut self.slab[slot as usize];
        own.release(dma);
        // Also of one that was cancelled: it has succeeded if that came too late.
        own.status = status_of(outcome);
        let mut goes_on = own.status == STATUS_OK && !own.is_last_part();
        if goes_on && own.cancel != Cancel::No {
            own.status = STATUS_IOERR;
            goes_on = false;
        }
        match at.map(|at| &mut self.queues[at]) {
            Some(queue) if goes_on => queue.continuing.push_back(slot),
            Some(queue) => queue.ended.push_back(slot),
            // No driver to notify.
            None => self.forget(slot),
        }
    }

    /// An administrator has to know which file it is, and where. Not of what was cancelled.
    fn say_that_it_failed(&self, slot: u32, errno: i32) {
        let own = &self.slab[slot as usize];
        if own.cancel != Cancel::No || errno == libc::ECANCELED {
            return;
        }
        let (op, error) = (own.part_op(), io::Error::from_raw_os_error(errno));
        self.say(|| format!("{op:?} failed: {error}"));
    }

    /// One line about its storage, as far as there is a budget.
    pub(super) fn say(&self, what: impl FnOnce() -> String) {
        let Some(unsaid) = self.lines.admits_at(self.now_ns) else {
            return;
        };
        let file = self.io.path().unwrap_or_default();
        let more = match unsaid {
            0 => String::new(),
            unsaid => format!(" ({unsaid} more before it were not reported)"),
        };
        tracing::warn!(image = %file.display(), "{}{more}", what());
    }

    /// Goes on with the requests of queue `at` (a position) that stand between two parts, while the visit lasts; whether that did
    /// anything.
    pub(super) fn go_on<D: Dma>(&mut self, at: usize, dma: &mut D, visit: &mut Visit) -> bool {
        let queue = &self.queues[at];
        if queue.continuing.is_empty() || queue.ring.parked().is_some() {
            return false;
        }
        let mut busy = match self.finish_parts(at, dma, visit) {
            Ok(any) => any,
            Err(stop) => {
                self.note(stop);
                return true;
            }
        };
        if self.queues[at].lacks_leases(dma) {
            return busy;
        }
        self.queues[at].waiting_for = None;
        while !visit.is_over()
            && let Some(&slot) = self.queues[at].continuing.front()
        {
            match self.next_part(at, slot, dma, visit) {
                Ok(None) => busy = true,
                Ok(Some(waiting_for)) => {
                    self.queues[at].waiting_for = Some(waiting_for);
                    if let WaitingFor::Leases(count) = waiting_for {
                        visit.charge(count as u64 * cost::LEASE);
                    }
                    self.stats.backpressure += 1;
                    break;
                }
                Err(stop) => {
                    self.note(stop);
                    break;
                }
            }
        }
        busy
    }

    /// Of all of them, also of those behind one that waits for room: the buffers that they have are room for it.
    fn finish_parts<D: Dma>(
        &mut self,
        at: usize,
        dma: &mut D,
        visit: &mut Visit,
    ) -> Result<bool, RingStop> {
        let Self {
            queues, slab, io, ..
        } = self;
        let queue = &mut queues[at];
        let mut busy = false;
        for &slot in &queue.continuing {
            let own = &mut slab[slot as usize];
            if own.part() == 0 {
                continue;
            }
            if visit.is_over() {
                break;
            }
            let bytes = u64::from(own.part());
            if let Err(stop) = own.finish_part(slot, dma, &mut **io) {
                return Err(queue.ring.park(stop.into()));
            }
            visit.charge(cost::REQUEST / 4 + bytes / cost::BYTES_PER_NS);
            busy = true;
        }
        Ok(busy)
    }

    /// Starts the next part of the first of them, or ends it if it has failed; what it waits for, if it does.
    fn next_part<D: Dma>(
        &mut self,
        at: usize,
        slot: u32,
        dma: &mut D,
        visit: &mut Visit,
    ) -> Result<Option<WaitingFor>, RingStop> {
        let Self {
            queues,
            slab,
            io,
            config,
            ..
        } = self;
        let queue = &mut queues[at];
        let own = &mut slab[slot as usize];
        let mut ready = own.status == STATUS_OK;
        if ready {
            match own.prepare_part(slot, dma, &mut **io, config.logical_block) {
                Ok(Ready::Yes) => {}
                Ok(Ready::NoRoom(waiting_for)) => return Ok(Some(waiting_for)),
                Ok(Ready::Refused) => {
                    own.refuse();
                    ready = false;
                }
                Err(stop) => return Err(queue.ring.park(stop.into())),
            }
        }
        queue.continuing.pop_front();
        visit.charge(cost::REQUEST + u64::from(own.part()) / cost::BYTES_PER_NS);
        match ready {
            true => self.start_part(at, slot, dma),
            false => queue.ended.push_back(slot),
        }
        Ok(None)
    }
}
