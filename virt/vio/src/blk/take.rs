//! The front half of a visit: chains are taken from the rings, and done at once or started.

use guest_mem::{Access, Dma, Intent, Stop};

use super::backend::{BlockIo, Op, Outcome, Transfer};
use super::finish::status_of;
use super::request::{self, Action, HEADER_LEN, Parsed, STATUS_IOERR, STATUS_OK};
use super::slot::{Ready, Reply, WaitingFor};
use super::{Blk, BlkQueue, MAX_TRANSFER};
use crate::ring::following::wait_for_all;
use crate::ring::{Chain, RingStop, Violation};
use crate::visit::{Visit, cost};

/// What came of an attempt to take one chain.
enum Taken {
    /// Nothing is there.
    Nothing,
    /// Something is there, and may not begin before the rate limit allows.
    Throttled,
    /// Something is there, and no slot, buffer or lease for it now.
    NoRoom(WaitingFor),
    /// It was taken.
    One,
}

impl Blk {
    /// Takes chains from queue `at` (a position) while the visit lasts; whether it took any.
    pub(super) fn take<D: Dma>(&mut self, at: usize, dma: &mut D, visit: &mut Visit) -> bool {
        let queue = &mut self.queues[at];
        if !queue.takes {
            return false;
        }
        if queue.ring.parked().is_some() {
            self.look_ahead(at, dma, visit);
            return false;
        }
        if queue.lacks_leases(dma) || !queue.continuing.is_empty() {
            return false;
        }
        queue.waiting_for = None;
        // Without EVENT_IDX the driver is notified once that its doorbells are not needed.
        if let Err(stop) = queue.ring.disarm(dma) {
            self.note(stop);
            return false;
        }
        let mut busy = false;
        while !visit.is_over() {
            match self.take_one(at, dma, visit) {
                Ok(Taken::One) => busy = true,
                Ok(Taken::Nothing) => return busy,
                Ok(Taken::Throttled) => {
                    self.stats.throttled += 1;
                    return busy;
                }
                Ok(Taken::NoRoom(waiting_for)) => {
                    self.queues[at].waiting_for = Some(waiting_for);
                    if let WaitingFor::Leases(count) = waiting_for {
                        visit.charge(count as u64 * cost::LEASE);
                    }
                    self.stats.backpressure += 1;
                    return busy;
                }
                Err(stop) => {
                    if let RingStop::Access(Stop::Pending(_)) = stop {
                        self.queues[at].following.begin();
                        self.look_ahead(at, dma, visit);
                    }
                    self.note(stop);
                    return busy;
                }
            }
        }
        // Stopped by the budget: there may be more.
        true
    }

    /// While queue `at` waits: asks for what the requests behind the one that waits will want.
    fn look_ahead<D: Dma>(&mut self, at: usize, dma: &mut D, visit: &mut Visit) {
        let BlkQueue {
            following, ring, ..
        } = &mut self.queues[at];
        if following.has_work() {
            let (limits, transfer) = (&self.limits, self.io.transfer());
            following.look(ring, dma, &mut self.chain, visit, |dma, chain| {
                request::ask_ahead(dma, chain, limits, transfer)
            });
        }
    }

    /// Takes one chain. After an error the chain is still in the ring and the queue parked.
    fn take_one<D: Dma>(
        &mut self,
        at: usize,
        dma: &mut D,
        visit: &mut Visit,
    ) -> Result<Taken, RingStop> {
        let ring = &mut self.queues[at].ring;
        if !ring.peek(dma, &mut self.chain)? {
            return Ok(Taken::Nothing);
        }
        if !self.throttle.is_open(visit.now_ns()) {
            return Ok(Taken::Throttled);
        }
        let parsed = match request::parse(dma, &self.chain, &self.limits) {
            Ok(Some(parsed)) => parsed,
            Ok(None) => return Err(ring.park(Violation::Truncated.into())),
            Err(stop) => {
                let stop = wait_for_all(dma, stop, request::wanted(&self.chain));
                return Err(ring.park(stop.into()));
            }
        };
        // Room for what cannot be shown at once.
        let Some(slot) = self.free_slot() else {
            return Ok(Taken::NoRoom(WaitingFor::Slot));
        };
        let taken = match (parsed.action, self.io.transfer()) {
            (Action::Run(op), Transfer::Memory) if bytes_of(op) <= MAX_TRANSFER => {
                self.take_done(at, slot, op, parsed, dma)
            }
            (Action::Run(op), Transfer::Nothing) => self.take_done(at, slot, op, parsed, dma),
            _ => self.take_into(at, slot, parsed, dma),
        }?;
        if matches!(taken, Taken::One) {
            self.queues[at].following.advance();
            let (bytes, control) = match parsed.action {
                Action::Run(op @ (Op::Read { .. } | Op::Write { .. })) => (bytes_of(op), 0),
                Action::Run(_) => (0, cost::CONTROL),
                Action::GetId(_) | Action::Status(_) => (0, 0),
            };
            let long = self.chain.descriptors().saturating_sub(4);
            visit.take_request(
                cost::REQUEST
                    // Those behind the first part are charged when their turn comes.
                    + u64::from(bytes.min(MAX_TRANSFER)) / cost::BYTES_PER_NS
                    + control
                    + long as u64 * cost::DESCRIPTOR,
            );
            let ranged = match parsed.action {
                Action::Run(Op::Discard { len, .. } | Op::WriteZeroes { len, .. }) => len,
                _ => 0,
            };
            self.throttle
                .charge(visit.now_ns(), ranged + u64::from(bytes));
            self.stats.requests += 1;
        }
        Ok(taken)
    }

    /// A request that is done before it is taken, without a lease or a slot. Doing it again, where a later
    /// step pends, does the same.
    fn take_done<D: Dma>(
        &mut self,
        at: usize,
        slot: u32,
        op: Op,
        parsed: Parsed,
        dma: &mut D,
    ) -> Result<Taken, RingStop> {
        let Self {
            queues, chain, io, ..
        } = self;
        let ring = &mut queues[at].ring;
        let status = match run_now(&mut **io, op, chain, dma) {
            Ok(status) => status,
            Err(stop) => {
                let len = match op {
                    Op::Read { len, .. } => len,
                    _ => 0,
                };
                let data = chain.writable().wanted(0, len, Intent::Write);
                let all = data.chain(request::wanted(chain));
                return Err(ring.park(wait_for_all(dma, stop, all).into()));
            }
        };
        match dma.write(parsed.status_at, &[status]) {
            Ok(()) => {}
            Err(stop @ Stop::Pending(_)) => return Err(ring.park(stop.into())),
            // The status byte itself: the driver would take whatever stands there for our answer.
            Err(Stop::Fault(_)) => return Err(ring.park(Violation::Status.into())),
        }
        let len = match op {
            Op::Read { len, .. } if status == STATUS_OK => len,
            _ => 0,
        };
        let token = ring.advance(chain);
        if ring.is_faulted() {
            // The journal refused it. It has run, and its end is not reported: the ring never goes
            // on.
            return Err(Violation::Journal.into());
        }
        let staged = ring.stage(dma, token, len + 1);
        match op {
            _ if status != STATUS_OK => self.stats.errors += 1,
            Op::Read { len, .. } => self.stats.read_bytes += u64::from(len),
            Op::Write { len, .. } => self.stats.written_bytes += u64::from(len),
            _ => {}
        }
        if let Err(stop) = staged {
            // Taken, done, and not to be shown now: it waits like one that ended later.
            let queue = &mut self.queues[at];
            let own = &mut self.slab[slot as usize];
            own.begin(queue.ring.index(), &parsed);
            own.token = Some(token);
            own.reply = Reply::Done;
            own.status = status;
            own.len = len;
            self.free.pop();
            queue.ended.push_back(slot);
            queue.following.advance();
            self.stats.requests += 1;
            return Err(stop);
        }
        Ok(Taken::One)
    }

    /// A request that takes a slot. It may be over at once all the same.
    fn take_into<D: Dma>(
        &mut self,
        at: usize,
        slot: u32,
        parsed: Parsed,
        dma: &mut D,
    ) -> Result<Taken, RingStop> {
        let Self {
            queues,
            chain,
            slab,
            io,
            config,
            ..
        } = self;
        let ring = &mut queues[at].ring;
        let own = &mut slab[slot as usize];
        own.begin(ring.index(), &parsed);
        let mut runs = false;
        match parsed.action {
            Action::Status(status) => own.status = status,
            Action::GetId(len) => own.answer_id(chain, len),
            Action::Run(op) => {
                match own.prepare(slot, op, dma, chain, &mut **io, config.logical_block) {
                    Ok(Ready::Yes) => runs = true,
                    Ok(Ready::NoRoom(waiting_for)) => return Ok(Taken::NoRoom(waiting_for)),
                    Ok(Ready::Refused) => own.refuse(),
                    Err(stop) => return Err(ring.park(stop.into())),
                }
            }
        }
        own.token = Some(ring.advance(chain));
        if ring.is_faulted() {
            // The journal refused it: what is not recorded must not run. The ring never goes on.
            own.release(dma);
            io.unreserve(slot);
            return Err(Violation::Journal.into());
        }
        self.free.pop();
        match runs {
            true => self.start_part(at, slot, dma),
            false => queues[at].ended.push_back(slot),
        }
        Ok(Taken::One)
    }

    /// A slot that no request has, not taken from the list yet; the slab grows as far as the back
    /// end's depth.
    fn free_slot(&mut self) -> Option<u32> {
        if let Some(&slot) = self.free.last() {
            return Some(slot);
        }
        let slot = self.slab.len() as u32;
        if slot >= self.io.depth() {
            return None;
        }
        self.slab.push(super::slot::Request::new());
        self.free.push(slot);
        Some(slot)
    }

    /// A stop has parked a queue; a violation also ends the device until its reset.
    pub(super) fn note(&mut self, stop: RingStop) {
        if let RingStop::Violation(violation) = stop {
            self.fail(violation);
        }
    }
}

/// Bytes that it moves.
fn bytes_of(op: Op) -> u32 {
    match op {
        Op::Read { len, .. } | Op::Write { len, .. } => len,
        Op::Flush | Op::Discard { .. } | Op::WriteZeroes { .. } => 0,
    }
}

/// Does an operation of a back end that needs no pieces; answers the status.
#[inline]
fn run_now<D: Dma>(io: &mut dyn BlockIo, op: Op, chain: &Chain, dma: &mut D) -> Access<u8> {
    let moved = match (io.transfer(), op) {
        (Transfer::Memory, Op::Read { offset, len }) => {
            let bytes = &io.contents()[offset as usize..][..len as usize];
            chain.writable().write(dma, 0, bytes)
        }
        (Transfer::Memory, Op::Write { offset, len, .. }) => {
            let bytes = &mut io.contents()[offset as usize..][..len as usize];
            chain.readable().read(dma, HEADER_LEN, bytes)
        }
        _ => {
            return Ok(status_of(
                io.run_now(op, &[])
                    .unwrap_or(Outcome::Failed(libc::EOPNOTSUPP)),
            ));
        }
    };
    match moved {
        Ok(()) => Ok(STATUS_OK),
        Err(Stop::Fault(_)) => Ok(STATUS_IOERR),
        Err(pending) => Err(pending),
    }
}
