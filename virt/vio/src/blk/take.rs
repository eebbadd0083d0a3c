//! The front half of a visit: chains are taken from the rings, and done at once or started.

use guest_mem::{Access, Dma, Intent, Stop};

use super::backend::{BlockIo, Op, Outcome, Transfer};
use super::finish::status_of;
use super::request::{self, Action, HEADER_LEN, Parsed, STATUS_IOERR, STATUS_OK};
use super::slot::{PrepareOutcome, Reply, Request, WaitingFor};
use super::{BlkClass, MAX_TRANSFER, Queue};
use crate::body::{Context, Environment};
use crate::poll_budget::cost;
use crate::ring::{Chain, RingStop, Violation};

/// Outcome of an attempt to take one chain.
pub(super) enum TakeOutcome {
    /// Nothing is there.
    Nothing,
    /// Something is there, and may not begin before the rate limit allows.
    Throttled,
    /// Something is there, and no slot, buffer or lease for it now.
    NoRoom(WaitingFor),
    /// It was taken.
    One,
}

impl BlkClass {
    /// Takes one chain. After an error the chain is still in the ring and the queue parked.
    pub(super) fn take_one<E: Environment>(
        &mut self,
        queue: &mut Queue,
        cx: &mut Context<'_, E>,
    ) -> Result<TakeOutcome, RingStop> {
        if !queue.peek(cx.dma, &mut self.chain)? {
            return Ok(TakeOutcome::Nothing);
        }
        if !self.throttle.is_open(cx.visit.now_ns()) {
            return Ok(TakeOutcome::Throttled);
        }
        let parsed = match request::parse(cx.dma, &self.chain, &self.limits) {
            Ok(Some(parsed)) => parsed,
            Ok(None) => return Err(queue.park(Violation::Truncated)),
            Err(stop) => return Err(queue.wait_for(cx.dma, stop, request::wanted(&self.chain))),
        };
        // Room for a request that cannot be published at once.
        let Some(slot) = self.free_slot() else {
            return Ok(TakeOutcome::NoRoom(WaitingFor::Slot));
        };
        let taken = match (parsed.action, self.io.transfer()) {
            (Action::Run(op), Transfer::Memory) if bytes_of(op) <= MAX_TRANSFER => {
                self.take_done(queue, slot, op, parsed, cx)
            }
            (Action::Run(op), Transfer::Nothing) => self.take_done(queue, slot, op, parsed, cx),
            _ => self.take_into(queue, slot, parsed, cx),
        }?;
        if matches!(taken, TakeOutcome::One) {
            let (bytes, control) = match parsed.action {
                Action::Run(op @ (Op::Read { .. } | Op::Write { .. })) => (bytes_of(op), 0),
                Action::Run(_) => (0, cost::CONTROL),
                Action::GetId(_) | Action::Status(_) => (0, 0),
            };
            let long = self.chain.descriptors().saturating_sub(4);
            cx.visit.take_request(
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
                .charge(cx.visit.now_ns(), ranged + u64::from(bytes));
            cx.stats.requests += 1;
        }
        Ok(taken)
    }

    /// A request that is done before it is taken, without a lease or a slot. Doing it again, where
    /// a later step pends, does the same.
    fn take_done<E: Environment>(
        &mut self,
        queue: &mut Queue,
        slot: u32,
        op: Op,
        parsed: Parsed,
        cx: &mut Context<'_, E>,
    ) -> Result<TakeOutcome, RingStop> {
        let Self { chain, io, .. } = self;
        let status = match run_now(&mut **io, op, chain, cx.dma) {
            Ok(status) => status,
            Err(stop) => {
                let len = match op {
                    Op::Read { len, .. } => len,
                    _ => 0,
                };
                let data = chain.writable().wanted(0, len, Intent::Write);
                let all = data.chain(request::wanted(chain));
                return Err(queue.wait_for(cx.dma, stop, all));
            }
        };
        match cx.dma.write(parsed.status_at, &[status]) {
            Ok(()) => {}
            Err(stop @ Stop::Pending(_)) => return Err(queue.park(stop)),
            // The status byte itself: the driver would take whatever stands there for our answer.
            Err(Stop::Fault(_)) => return Err(queue.park(Violation::Status)),
        }
        let len = match op {
            Op::Read { len, .. } if status == STATUS_OK => len,
            _ => 0,
        };
        // One that the journal refuses has run, and its end is not reported.
        let token = queue.take(chain)?;
        let staged = queue.stage(cx.dma, token, len + 1);
        match op {
            _ if status != STATUS_OK => cx.stats.errors += 1,
            Op::Read { len, .. } => cx.stats.read_bytes += u64::from(len),
            Op::Write { len, .. } => cx.stats.written_bytes += u64::from(len),
            _ => {}
        }
        if let Err(stop) = staged {
            // Taken, done, and not to be published now: it waits like one that ended later.
            let own = &mut self.slab[slot as usize];
            own.begin(queue.index(), &parsed);
            own.token = Some(token);
            own.reply = Reply::Done;
            own.status = status;
            own.len = len;
            self.free.pop();
            queue.own.ended.push_back(slot);
            cx.stats.requests += 1;
            return Err(stop);
        }
        Ok(TakeOutcome::One)
    }

    /// A request that takes a slot. It may be over at once all the same.
    fn take_into<E: Environment>(
        &mut self,
        queue: &mut Queue,
        slot: u32,
        parsed: Parsed,
        cx: &mut Context<'_, E>,
    ) -> Result<TakeOutcome, RingStop> {
        let Self {
            chain,
            slab,
            io,
            config,
            ..
        } = self;
        let own = &mut slab[slot as usize];
        own.begin(queue.index(), &parsed);
        let mut runs = false;
        match parsed.action {
            Action::Status(status) => own.status = status,
            Action::GetId(len) => own.answer_id(chain, len),
            Action::Run(op) => {
                match own.prepare(slot, op, cx.dma, chain, &mut **io, config.logical_block) {
                    Ok(PrepareOutcome::Yes) => runs = true,
                    Ok(PrepareOutcome::NoRoom(waiting_for)) => {
                        return Ok(TakeOutcome::NoRoom(waiting_for));
                    }
                    Ok(PrepareOutcome::Refused) => own.refuse(),
                    Err(stop) => return Err(queue.park(stop)),
                }
            }
        }
        match queue.take(chain) {
            Ok(token) => own.token = Some(token),
            Err(stop) => {
                // A request that is not recorded must not run.
                own.release(cx.dma);
                io.unreserve(slot);
                return Err(stop);
            }
        }
        self.free.pop();
        match runs {
            true => self.start_part(&mut queue.own, slot, cx),
            false => queue.own.ended.push_back(slot),
        }
        Ok(TakeOutcome::One)
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
        self.slab.push(Request::default());
        self.free.push(slot);
        Some(slot)
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
