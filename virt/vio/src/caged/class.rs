//! The hooks of a caged device, which the body of devices calls.

use std::os::fd::RawFd;

use guest_mem::{Dma, KeepAlive, Stop};
use worker_area::{Misbehaviour, Verdict};

use super::request::State;
use super::{CagedClass, CagedQueue, WorkerEvent};
use crate::blk::SavedBlk;
use crate::body::{Context, DeviceClass, Environment, ServedQueue, Step};
use crate::device::{Activity, CancelReason, read_space};
use crate::log_rate_limit::LogRateLimit;
use crate::poll_budget::cost;
use crate::ring::{RingStop, Violation};

type Queue = ServedQueue<CagedQueue>;

impl CagedClass {
    /// Takes one chain: whether there was one that could be taken. After an error it is still in
    /// the ring and the queue parked.
    fn take_one<E: Environment>(
        &mut self,
        queue: &mut Queue,
        cx: &mut Context<'_, E>,
    ) -> Result<bool, RingStop> {
        let Self {
            area: Some(area),
            chain,
            requests,
            free,
            keep,
            out,
            ..
        } = self
        else {
            return Ok(false);
        };
        if !queue.peek(cx.dma, chain)? {
            return Ok(false);
        }
        let shape = area.shape();
        if chain.readable().len() < shape.head() || chain.writable().len() < shape.foot() {
            return Err(queue.park(Violation::Truncated));
        }
        let Some(&slot) = free.last() else {
            queue.own.waits_for_slot = true;
            cx.stats.backpressure += 1;
            return Ok(false);
        };
        let own = &mut requests[slot as usize];
        own.begin(queue.index(), chain, area);
        match own.fill(slot, area, cx.dma, keep.as_ref()) {
            Ok(()) => {}
            Err(Stop::Fault(_)) => own.state = State::Refused,
            Err(stop) => {
                let wanted = own.wanted(area);
                let stop = queue.wait_for(cx.dma, stop, wanted);
                own.state = State::Free;
                return Err(stop);
            }
        }
        own.token = match queue.take(chain) {
            Ok(token) => Some(token),
            Err(stop) => {
                // A request that is not recorded must not run.
                own.state = State::Free;
                return Err(stop);
            }
        };
        free.pop();
        let long = chain.descriptors().saturating_sub(4) as u64;
        let bytes = own.window_bytes(area) / cost::BYTES_PER_NS;
        cx.visit
            .take_request(cost::REQUEST + bytes + long * cost::DESCRIPTOR);
        cx.stats.requests += 1;
        match own.state {
            State::Refused => queue.own.ended.push_back(slot),
            _ => {
                own.submit(slot, area);
                *out += 1;
            }
        }
        Ok(true)
    }

    /// Goes on with one request that stands between two windows, or is to be begun again; whether
    /// it went on.
    fn continue_one<E: Environment>(
        &mut self,
        queue: &mut Queue,
        slot: u32,
        cx: &mut Context<'_, E>,
    ) -> Result<bool, RingStop> {
        let Some(area) = &mut self.area else {
            return Ok(false);
        };
        let own = &mut self.requests[slot as usize];
        let keep = self.keep.as_ref();
        if let State::Answered(answer) = own.state {
            if let Err(stop) = own.copy_back(slot, area, answer, cx.dma, keep) {
                return Err(queue.wait_for(cx.dma, stop, own.wanted(area)));
            }
            if own.state != State::Refused {
                own.advance(area, answer.written);
            }
        }
        if own.state == State::ToSubmit {
            match own.fill(slot, area, cx.dma, keep) {
                Ok(()) => {}
                Err(Stop::Fault(_)) => own.state = State::Refused,
                Err(stop) => return Err(queue.wait_for(cx.dma, stop, own.wanted(area))),
            }
        }
        queue.own.continuing.pop_front();
        cx.visit
            .charge(cost::REQUEST + own.window_bytes(area) / cost::BYTES_PER_NS);
        match own.state {
            State::Refused => queue.own.ended.push_back(slot),
            _ => {
                own.submit(slot, area);
                self.out += 1;
            }
        }
        Ok(true)
    }

    /// Takes up what has happened to the worker.
    #[cold]
    fn take_events(&mut self, queues: &mut [Queue]) {
        while let Some(event) = self.process.next_event() {
            match event {
                WorkerEvent::Ended => self.worker_ended(queues),
                WorkerEvent::Started(mut area) => {
                    let is_same = self.requests.len() == area.shape().slots() as usize;
                    assert!(is_same, "an area of another shape");
                    area.set_features(self.features);
                    self.area = Some(area);
                }
                WorkerEvent::Gone => {
                    self.worker_ended(queues);
                    self.is_gone = true;
                }
            }
        }
    }

    /// Begins again every request that the worker had, and those that it has answered and whose
    /// data are not in the guest yet.
    fn worker_ended(&mut self, queues: &mut [Queue]) {
        self.area = None;
        self.out = 0;
        for queue in queues.iter_mut() {
            queue.own.ended.clear();
            queue.own.continuing.clear();
        }
        for (slot, request) in (0..).zip(&mut self.requests) {
            if request.state == State::Free {
                continue;
            }
            let number = request.queue;
            let queue = queues.iter_mut().find(|queue| queue.index() == number);
            let queue = queue.expect("a queue is forgotten with its requests");
            if request.state == State::Refused {
                queue.own.ended.push_back(slot);
            } else {
                request.restart();
                queue.own.continuing.push_back(slot);
            }
        }
    }

    /// Takes what the worker has answered; whether it had.
    fn take_answers<E: Environment>(
        &mut self,
        queues: &mut [Queue],
        cx: &mut Context<'_, E>,
    ) -> bool {
        let mut is_busy = false;
        while let Some(area) = &mut self.area {
            let answer = match area.next_answer() {
                Ok(Some(answer)) => answer,
                Ok(None) => break,
                Err(breach) => {
                    self.breach(breach, cx);
                    return true;
                }
            };
            if !is_busy {
                is_busy = true;
                self.process.record_answer();
            }
            let own = &mut self.requests[answer.slot as usize];
            assert_eq!(own.state, State::Out, "answers are for what is out");
            own.state = State::Answered(answer);
            self.out -= 1;
            let number = own.queue;
            let queue = queues.iter_mut().find(|queue| queue.index() == number);
            let queue = queue.expect("a queue with a request that is out stays");
            match answer.verdict {
                Verdict::Over => queue.own.ended.push_back(answer.slot),
                Verdict::GoesOn => queue.own.continuing.push_back(answer.slot),
            }
        }
        is_busy
    }

    /// The worker has answered what it must not: it ends, and the device with it.
    #[cold]
    fn breach<E: Environment>(&mut self, breach: Misbehaviour, cx: &mut Context<'_, E>) {
        if let Some(suppressed) = self.lines.admits_at(cx.visit.now_ns()) {
            let more = LogRateLimit::left_out(suppressed);
            tracing::error!("a device worker broke the protocol and is ended: {breach}{more}");
        }
        // Requests stay out until it has ended: the kernel may be at work for them.
        self.area = None;
        self.is_gone = true;
        self.process.end(true);
    }
}

impl DeviceClass for CagedClass {
    const TYPE: u16 = 2;
    type Queue = CagedQueue;
    /// Contents are the back end's: either kind of device goes on where the other stood.
    type Saved = SavedBlk;

    fn features(&self) -> u64 {
        self.profile.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.profile.queue_sizes
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        read_space(&self.profile.space, offset, out);
    }

    fn queue(&self, index: u16, _features: u64) -> Option<CagedQueue> {
        (usize::from(index) < self.profile.queue_sizes.len()).then(CagedQueue::default)
    }

    fn begin(&mut self, features: u64, keep: KeepAlive) -> bool {
        self.features = features;
        if let Some(area) = &mut self.area {
            area.set_features(features);
        }
        self.keep = Some(keep);
        false
    }

    fn reset(&mut self) {
        assert_eq!(self.out, 0, "requests of a device that was not quiesced");
        self.free.clear();
        self.free.extend((0..self.requests.len() as u32).rev());
        for request in &mut self.requests {
            request.state = State::Free;
        }
        self.features = 0;
        self.keep = None;
    }

    fn forget(&mut self, _index: u16, queue: CagedQueue) {
        for slot in queue.ended.into_iter().chain(queue.continuing) {
            self.requests[slot as usize].state = State::Free;
            self.free.push(slot);
        }
    }

    fn save(&self) -> SavedBlk {
        SavedBlk {}
    }

    fn go_on<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        let mut activity = Activity::Idle;
        while !cx.is_over()
            && let Some(&slot) = queue.own.continuing.front()
            && self.continue_one(queue, slot, cx)?
        {
            activity = Activity::Busy;
        }
        Ok(activity)
    }

    fn may_take<D: Dma>(&self, _queue: &Queue, _dma: &D) -> bool {
        self.area.is_some()
    }

    fn serve<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        queue.own.waits_for_slot = false;
        Ok(match self.take_one(queue, cx)? {
            true => Activity::Busy,
            false => Activity::Idle,
        })
    }

    fn complete<E: Environment>(
        &mut self,
        queues: &mut [Queue],
        cx: &mut Context<'_, E>,
    ) -> Activity {
        let has_events = self.process.has_events();
        if has_events {
            self.take_events(queues);
        }
        if let Some(area) = &mut self.area
            && area.publish()
        {
            self.process.kick();
        }
        let is_busy = self.take_answers(queues, cx) || has_events;
        if self.is_gone && self.features != 0 {
            // Also of the driver that came after the worker had gone.
            cx.fail(Violation::Worker);
        }
        match is_busy {
            true => Activity::Busy,
            false => Activity::Idle,
        }
    }

    fn finish<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        let Some(&slot) = queue.own.ended.front() else {
            return Ok(Activity::Idle);
        };
        let own = &mut self.requests[slot as usize];
        if let (State::Answered(answer), Some(area)) = (own.state, &self.area) {
            let keep = self.keep.as_ref();
            if let Err(stop) = own.copy_back(slot, area, answer, cx.dma, keep) {
                return Err(queue.wait_for(cx.dma, stop, own.wanted(area)));
            }
            cx.visit
                .charge(u64::from(answer.written) / cost::BYTES_PER_NS);
        }
        let (status, written) = match own.finish(slot, self.area.as_ref(), cx.dma) {
            Ok(finished) => finished,
            Err(stop @ Stop::Pending(_)) => return Err(queue.park(stop)),
            // The status byte itself: the driver would take whatever stands there for our answer.
            Err(Stop::Fault(_)) => return Err(queue.park(Violation::Status)),
        };
        let token = own.token.expect("set when the chain was taken");
        queue.stage(cx.dma, token, written)?;
        own.count(status, written, cx.stats);
        own.state = State::Free;
        queue.own.ended.pop_front();
        self.free.push(slot);
        Ok(Activity::Busy)
    }

    fn has_completions(&mut self) -> bool {
        let has_answers = self.area.as_ref().is_some_and(|area| area.has_answers());
        has_answers || self.process.has_events()
    }

    fn has_taken<D: Dma>(&self, queue: &Queue, _dma: &D) -> bool {
        let own = &queue.own;
        !own.ended.is_empty() || (!own.continuing.is_empty() && self.area.is_some())
    }

    fn has_work<D: Dma>(
        &mut self,
        queue: &mut Queue,
        dma: &mut D,
        _now_ns: u64,
    ) -> Result<bool, RingStop> {
        // Slots come back when requests end, which wakes the device.
        let waits = queue.own.waits_for_slot && self.free.is_empty();
        Ok(!waits && queue.has_available(dma)?)
    }

    fn arm(&mut self) {
        self.process.drain();
        if let Some(area) = &self.area {
            area.arm();
        }
    }

    fn disarm(&mut self) {
        if let Some(area) = &self.area {
            area.disarm();
        }
    }

    fn wake_fds(&self, _is_open: impl Fn(u16) -> bool, fds: &mut Vec<RawFd>) {
        fds.push(self.process.wake_fd());
    }

    fn is_in_flight(&self, queue: &Queue) -> bool {
        let is_out = |own: &super::Request| own.state == State::Out && own.queue == queue.index();
        self.requests.iter().any(is_out)
    }

    fn in_flight(&self, _queues: &[Queue]) -> u32 {
        self.out
    }

    /// The worker has none of the guest's memory, and visits show nothing until the device is
    /// served again.
    fn touches_memory(&self) -> bool {
        false
    }

    /// An unmap waits for nothing here. A request cannot be taken back from the worker: a caller
    /// that can wait no longer ends all of it.
    fn cancel(&mut self, reason: CancelReason) -> u32 {
        if reason == CancelReason::Unmap || self.out == 0 {
            return 0;
        }
        let is_final = reason == CancelReason::End || self.is_gone;
        self.process.end(is_final);
        self.out
    }

    fn set_memory(&mut self, keep: KeepAlive) {
        self.keep = Some(keep);
    }
}
