//! The hooks of a block device, which the body of devices calls.

use std::os::fd::RawFd;
use std::path::PathBuf;

use guest_mem::{Access, Dma, KeepAlive};

use super::backend::Transfer;
use super::slot::{Cancel, Request, WaitingFor};
use super::take::TakeOutcome;
use super::{BlkClass, BlkQueue, MAX_AHEAD, Queue, SavedBlk, request};
use crate::body::{Context, DeviceClass, Environment, Step};
use crate::device::{Activity, CancelReason, read_space};
use crate::ring::{Chain, RingStop};

impl BlkClass {
    /// Cancels the requests in flight that `whose` picks. Returns their number.
    fn cancel_as(&mut self, how: Cancel, whose: impl Fn(&Request) -> bool) -> u32 {
        let mut count = 0;
        for (slot, request) in (0..).zip(&mut self.slab) {
            if request.in_flight && request.cancel == Cancel::No && whose(request) {
                request.cancel = how;
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
    fn cancel_overdue<E: Environment>(&mut self, cx: &mut Context<'_, E>) {
        let count = self.cancel_as(Cancel::Overdue, |request| {
            request.leases.iter().any(|&lease| cx.dma.is_stale(lease))
        });
        cx.stats.cancelled += u64::from(count);
    }

    /// Whether the queue waits for a slot, and some are taken: those come back when their requests
    /// end or their parked queue goes on, and both wake the device.
    fn waits_for_slot(&self, queue: &BlkQueue) -> bool {
        queue.waiting_for == Some(WaitingFor::Slot) && self.free.len() < self.slab.len()
    }
}

impl DeviceClass for BlkClass {
    const TYPE: u16 = 2;
    type Queue = BlkQueue;
    type Saved = SavedBlk;

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        read_space(&self.space, offset, out);
    }

    fn queue(&self, index: u16, _features: u64) -> Option<BlkQueue> {
        (usize::from(index) < self.queue_sizes.len()).then(BlkQueue::default)
    }

    fn lookahead(&self, _index: u16) -> usize {
        MAX_AHEAD
    }

    fn begin(&mut self, features: u64, keep: KeepAlive) -> bool {
        self.limits.features = features;
        self.io.attach(keep);
        false
    }

    fn reset(&mut self) {
        self.free.clear();
        self.free.extend((0..self.slab.len() as u32).rev());
        self.limits.features = 0;
        self.is_overdue = false;
        self.io.detach();
    }

    fn forget(&mut self, _index: u16, queue: BlkQueue) {
        for slot in queue.ended.into_iter().chain(queue.continuing) {
            self.forget_slot(slot);
        }
    }

    fn save(&self) -> SavedBlk {
        SavedBlk {}
    }

    fn go_on<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        if queue.own.continuing.is_empty() {
            return Ok(Activity::Idle);
        }
        self.go_on_with_parts(queue, cx)
    }

    fn may_take<D: Dma>(&self, queue: &Queue, dma: &D) -> bool {
        !queue.own.lacks_leases(dma) && queue.own.continuing.is_empty()
    }

    fn serve<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        queue.own.waiting_for = None;
        match self.take_one(queue, cx)? {
            TakeOutcome::One => return Ok(Activity::Busy),
            TakeOutcome::Nothing => {}
            TakeOutcome::Throttled => cx.stats.throttled += 1,
            TakeOutcome::NoRoom(waiting_for) => queue.own.wait_for(waiting_for, cx),
        }
        Ok(Activity::Idle)
    }

    fn ask_ahead<D: Dma>(&self, dma: &mut D, chain: &Chain) -> Access<()> {
        request::ask_ahead(dma, chain, &self.limits, self.io.transfer())
    }

    fn complete<E: Environment>(
        &mut self,
        queues: &mut [Queue],
        cx: &mut Context<'_, E>,
    ) -> Activity {
        if std::mem::take(&mut self.is_overdue) {
            self.cancel_overdue(cx);
        }
        if self.in_flight == 0 {
            return Activity::Idle;
        }
        self.retry_stalled(cx.visit.now_ns());
        self.io.flush();
        let activity = self.reap_completions(queues, cx);
        self.go_on_with_stalled(cx.visit.now_ns());
        activity
    }

    fn finish<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        let Some(&slot) = queue.own.ended.front() else {
            return Ok(Activity::Idle);
        };
        self.finish_one(queue, slot, cx)?;
        Ok(Activity::Busy)
    }

    fn has_completions(&mut self) -> bool {
        self.is_overdue || self.io.has_completions() || self.stalled.has_cancelled()
    }

    fn has_taken<D: Dma>(&self, queue: &Queue, dma: &D) -> bool {
        let own = &queue.own;
        let waits = self.waits_for_slot(own) || own.lacks_leases(dma);
        !own.ended.is_empty() || (!own.continuing.is_empty() && !waits)
    }

    fn has_work<D: Dma>(
        &mut self,
        queue: &mut Queue,
        dma: &mut D,
        now_ns: u64,
    ) -> Result<bool, RingStop> {
        let may = !self.waits_for_slot(&queue.own);
        Ok(may && queue.has_available(dma)? && self.throttle.is_open(now_ns))
    }

    /// Also when no chain is taken: completions must be reaped.
    fn arm(&mut self) {
        self.io.arm();
    }

    fn disarm(&mut self) {
        self.io.disarm();
    }

    fn wake_fds(&self, _is_open: impl Fn(u16) -> bool, fds: &mut Vec<RawFd>) {
        self.io.wake_fds(fds);
    }

    fn deadline(&self, now_ns: u64) -> Option<u64> {
        let limit = (!self.throttle.is_open(now_ns)).then(|| self.throttle.opens_at_ns());
        limit.into_iter().chain(self.stalled.retry_at_ns()).min()
    }

    fn is_in_flight(&self, queue: &Queue) -> bool {
        let mut slab = self.slab.iter();
        slab.any(|own| own.in_flight && own.queue == queue.index())
    }

    fn in_flight(&self, _queues: &[Queue]) -> u32 {
        self.in_flight
    }

    /// Of a stopped device: bounced data reach guest memory in a visit, and visits publish
    /// nothing until it is served again.
    fn touches_memory(&self) -> bool {
        self.io.transfer() == Transfer::Direct
    }

    /// One that cannot be cancelled goes on, and but for [`CancelReason::Unmap`] nothing follows
    /// from that but the wait for its end.
    fn cancel(&mut self, reason: CancelReason) -> u32 {
        match reason {
            CancelReason::Unmap => {
                self.is_overdue = true;
                0
            }
            CancelReason::Reset | CancelReason::End => self.cancel_as(Cancel::Asked, |_| true),
        }
    }

    fn set_memory(&mut self, keep: KeepAlive) {
        self.io.attach(keep);
    }

    fn rebind(&mut self) {
        self.io.rebind();
    }

    fn path(&self) -> Option<PathBuf> {
        self.io.path()
    }
}
