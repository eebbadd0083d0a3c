//! One poll of a block device: take, start, harvest, finish. See the head of the parent module.

use guest_mem::{Access, Dma, DmaFault, Perm, Stop};

use super::backend::{BlockIo, Completion, Op, Outcome, Piece, Transfer};
use super::request::{Action, HEADER_LEN, ID_LEN, STATUS_IOERR, STATUS_OK, STATUS_UNSUPP};
use super::{BATCH, Blk, MAX_PIECES, Reply, Request, misbehave, request};
use crate::device::{Activity, Interrupt};
use crate::ring::{Chain, RingStop, Violation};

/// What came of preparing a transfer.
enum Ready {
    /// Submit it.
    Yes,
    /// No buffer or lease free now.
    NoRoom,
    /// The guest's own buffer faulted, or is cut into more pieces than a request may have.
    Refused,
}

impl Blk {
    pub(super) fn poll_once<D: Dma>(&mut self, dma: &mut D, irq: &mut impl Interrupt) -> Activity {
        let mut busy = false;
        let count = self.queues.len();
        if self.may_run() {
            for turn in 0..count {
                busy |= self.take((self.first + turn) % count, dma);
            }
        }
        self.io.flush();
        busy |= self.harvest(dma);
        if self.may_run() {
            for turn in 0..count {
                busy |= self.finish((self.first + turn) % count, dma, irq);
            }
            // A queue that starves because the others come first comes first next time.
            self.first = if count == 0 {
                0
            } else {
                (self.first + 1) % count
            };
        }
        if self.announce {
            self.announce = false;
            irq.config();
            busy = true;
        }
        if busy { Activity::Busy } else { Activity::Idle }
    }

    /// Takes a batch of chains from queue `at`; whether it took any.
    fn take<D: Dma>(&mut self, at: usize, dma: &mut D) -> bool {
        let queue = &mut self.queues[at];
        queue.starved = false;
        if queue.ring.parked().is_some() {
            return false;
        }
        // Without EVENT_IDX the driver is told once that nobody needs its doorbells.
        let available = queue
            .ring
            .disarm(dma)
            .and_then(|()| queue.ring.available(dma));
        let mut left = match available {
            Ok(count) => count.min(BATCH),
            Err(stop) => {
                self.note(stop);
                return false;
            }
        };
        let mut busy = false;
        while left != 0 {
            match self.take_one(at, dma) {
                Ok(true) => busy = true,
                Ok(false) => {
                    self.queues[at].starved = true;
                    self.stats.backpressure += 1;
                    break;
                }
                Err(stop) => {
                    self.note(stop);
                    break;
                }
            }
            left -= 1;
        }
        busy
    }

    /// A stop has parked a queue; a violation also ends the device until its reset.
    fn note(&mut self, stop: RingStop) {
        if matches!(stop, RingStop::Violation(_)) {
            self.fail();
        }
    }

    /// Takes one chain. `Ok(false)`: no room for it now. After an error the chain is still in the ring
    /// and the queue parked.
    fn take_one<D: Dma>(&mut self, at: usize, dma: &mut D) -> Result<bool, RingStop> {
        let Some(&slot) = self.free.last() else {
            return Ok(false);
        };
        let Self {
            queues,
            chain,
            slab,
            io,
            limits,
            ..
        } = self;
        let ring = &mut queues[at].ring;
        ring.peek(dma, 0, chain)?;
        let parsed = match request::parse(dma, chain, limits) {
            Ok(Some(parsed)) => parsed,
            Ok(None) => return Err(ring.park(Violation::Truncated.into())),
            Err(stop) => return Err(ring.park(stop.into())),
        };
        let own = &mut slab[slot as usize];
        own.begin(at, chain, &parsed);
        let mut run = None;
        match parsed.action {
            Action::Status(status) => own.status = status,
            Action::GetId(len) => {
                own.reply = Reply::Id;
                own.len = len;
                own.data.extend(chain.writable().slice(0, len));
            }
            Action::Run(op) => match own.prepare(slot, op, dma, chain, &mut **io) {
                Ok(Ready::Yes) => run = Some(op),
                Ok(Ready::NoRoom) if self.in_flight != 0 => return Ok(false),
                // Alone, and still no room: somebody else's leases fill the table.
                Ok(Ready::NoRoom | Ready::Refused) => own.refuse(),
                Err(stop) => return Err(ring.park(stop.into())),
            },
        }
        own.rogue = self
            .config
            .misbehave
            .target(parsed.sector, own.is_write, own.data.first());
        ring.advance(1);
        self.free.pop();
        self.stats.requests += 1;
        match run {
            Some(op) => {
                own.in_flight = true;
                self.in_flight += 1;
                io.submit(slot, op, &own.pieces);
            }
            None => queues[at].ended.push_back(slot),
        }
        Ok(true)
    }

    /// Collects what has ended; whether anything has.
    pub(super) fn harvest<D: Dma>(&mut self, dma: &mut D) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        self.io.poll(&mut completions);
        let busy = !completions.is_empty();
        for Completion { slot, outcome } in completions.drain(..) {
            let own = &mut self.slab[slot as usize];
            assert!(
                own.in_flight,
                "the back end completed a slot that is not in flight"
            );
            own.status = match outcome {
                Outcome::NotCancellable => {
                    // It keeps its leases: its buffers may still be written.
                    self.fail();
                    continue;
                }
                // The guest was promised an end within the limit; what came later came too late.
                _ if own.cancelled => STATUS_IOERR,
                Outcome::Done => STATUS_OK,
                Outcome::Failed(libc::EOPNOTSUPP) => STATUS_UNSUPP,
                Outcome::Failed(_) => STATUS_IOERR,
            };
            own.in_flight = false;
            self.in_flight -= 1;
            own.release(dma);
            self.queues[own.queue].ended.push_back(slot);
        }
        self.completions = completions;
        busy
    }

    /// Shows the driver a batch of ended requests of queue `at`; whether it showed any.
    fn finish<D: Dma>(&mut self, at: usize, dma: &mut D, irq: &mut impl Interrupt) -> bool {
        let mut left = BATCH.min(self.queues[at].ring.size());
        let mut busy = false;
        // Left staged by a publish that pended.
        if self.queues[at].ring.staged() != 0 {
            busy |= self.publish(at, dma, irq);
        }
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
        let answered = own
            .attack(dma, &mut self.stats)
            .and_then(|()| own.answer(slot, dma, &mut *self.io, &self.config.serial));
        let written = match answered {
            Ok(written) => written,
            Err(stop @ Stop::Pending(_)) => return Err(queue.ring.park(stop.into())),
            // The status byte itself: the driver would take whatever stands there for our answer.
            Err(Stop::Fault(_)) => return Err(queue.ring.park(Violation::Status.into())),
        };
        queue.ring.stage(dma, own.head, written)?;
        if own.status == STATUS_OK {
            let bytes = u64::from(own.len);
            if own.is_write {
                self.stats.written_bytes += bytes;
            } else {
                self.stats.read_bytes += bytes;
            }
        } else {
            self.stats.errors += 1;
        }
        queue.ended.pop_front();
        self.io.unreserve(slot);
        self.free.push(slot);
        Ok(())
    }
}

impl Request {
    /// Forgets the request before.
    fn begin(&mut self, queue: usize, chain: &Chain, parsed: &request::Parsed) {
        let Self {
            queue: own_queue,
            head,
            reply,
            status,
            status_at,
            len,
            is_write,
            data,
            leases,
            pieces,
            rogue,
            in_flight,
            cancelled,
        } = self;
        *own_queue = queue;
        *head = chain.head();
        *reply = Reply::Status;
        *status = STATUS_OK;
        *status_at = parsed.status_at;
        *len = 0;
        *is_write = false;
        data.clear();
        assert!(
            leases.is_empty(),
            "a slot is free only when its leases are released"
        );
        pieces.clear();
        *rogue = None;
        *in_flight = false;
        *cancelled = false;
    }

    /// Gets the request's data ready to be moved. On anything but `Ready::Yes` no lease or buffer is kept.
    fn prepare<D: Dma>(
        &mut self,
        slot: u32,
        op: Op,
        dma: &mut D,
        chain: &Chain,
        io: &mut dyn BlockIo,
    ) -> Access<Ready> {
        match op {
            Op::Read { len, .. } => {
                self.len = len;
                self.data.extend(chain.writable().slice(0, len));
            }
            Op::Write { len, .. } => {
                self.len = len;
                self.is_write = true;
                self.data.extend(chain.readable().slice(HEADER_LEN, len));
            }
            Op::Flush | Op::Discard { .. } | Op::WriteZeroes { .. } => return Ok(Ready::Yes),
        }
        let ready = match io.transfer() {
            Transfer::Direct => self.lease_all(dma),
            Transfer::Bounce if !io.reserve(slot, self.len) => return Ok(Ready::NoRoom),
            Transfer::Bounce if self.is_write => self.bounce_in(slot, dma, io),
            Transfer::Bounce => Ok(()),
        };
        self.reply = match io.transfer() {
            _ if self.is_write => Reply::Status,
            Transfer::Direct => Reply::Direct,
            Transfer::Bounce => Reply::Bounced,
        };
        if ready.is_err() {
            self.release(dma);
            io.unreserve(slot);
        }
        match ready {
            Ok(()) => Ok(Ready::Yes),
            Err(Stop::Fault(DmaFault::TooManyLeases)) => Ok(Ready::NoRoom),
            Err(Stop::Fault(_)) => Ok(Ready::Refused),
            Err(pending) => Err(pending),
        }
    }

    fn lease_all<D: Dma>(&mut self, dma: &mut D) -> Access<()> {
        let perm = if self.is_write {
            Perm::Read
        } else {
            Perm::Write
        };
        for segment in &self.data {
            let mut done = 0;
            while done < segment.len {
                if self.leases.len() == MAX_PIECES {
                    return Err(DmaFault::BadRange.into());
                }
                let at = segment
                    .iova
                    .checked_add(u64::from(done))
                    .ok_or(DmaFault::BadRange)?;
                let lease = dma.lease(at, segment.len - done, perm)?;
                done += lease.len;
                self.leases.push(lease.id);
                match self.pieces.last_mut() {
                    // Neighbours in host memory are one piece for the back end.
                    Some(last) if last.hva.checked_add(u64::from(last.len)) == Some(lease.hva) => {
                        last.len += lease.len;
                    }
                    _ => self.pieces.push(Piece {
                        hva: lease.hva,
                        len: lease.len,
                    }),
                }
            }
        }
        Ok(())
    }

    /// Fills the private buffer from the guest.
    fn bounce_in<D: Dma>(&self, slot: u32, dma: &mut D, io: &mut dyn BlockIo) -> Access<()> {
        for_each_part(slot, &self.data, io, |iova, part| dma.read(iova, part))
    }

    /// Releases every lease: nothing touches the request's memory any more.
    fn release<D: Dma>(&mut self, dma: &mut D) {
        for id in self.leases.drain(..) {
            dma.release(id);
        }
    }

    /// Makes this request fail without having run.
    fn refuse(&mut self) {
        self.reply = Reply::Status;
        self.status = STATUS_IOERR;
    }

    /// The rogue access, if one is due; once.
    fn attack<D: Dma>(&mut self, dma: &mut D, stats: &mut crate::DeviceStats) -> Access<()> {
        if let Some(iova) = self.rogue {
            if misbehave::attack(dma, iova)? {
                stats.rogue_blocked += 1;
            } else {
                stats.rogue_allowed += 1;
            }
            self.rogue = None;
        }
        Ok(())
    }

    /// Writes data (where they are not there yet) and status; answers how many bytes the device wrote in
    /// all. A fault is one of the status byte: a fault of the data becomes an error status.
    fn answer<D: Dma>(
        &mut self,
        slot: u32,
        dma: &mut D,
        io: &mut dyn BlockIo,
        serial: &[u8; ID_LEN],
    ) -> Access<u32> {
        let data = match self.reply {
            _ if self.status != STATUS_OK => Ok(()),
            Reply::Status | Reply::Direct => Ok(()),
            Reply::Bounced => {
                for_each_part(slot, &self.data, io, |iova, part| dma.write(iova, part))
            }
            Reply::Id => {
                let mut at = 0;
                self.data.iter().try_for_each(|segment| {
                    let end = at + segment.len as usize;
                    dma.write(segment.iova, &serial[at..end])?;
                    at = end;
                    Ok(())
                })
            }
        };
        match data {
            Ok(()) => {}
            Err(Stop::Fault(_)) => self.status = STATUS_IOERR,
            Err(pending) => return Err(pending),
        }
        dma.write(self.status_at, &[self.status])?;
        // After an error nothing is promised of the data (§2.7.8.2: len is a lower bound of what was written).
        let data = match self.reply {
            Reply::Status => 0,
            _ if self.status != STATUS_OK => 0,
            _ => self.len,
        };
        Ok(data + 1)
    }
}

/// Gives `each` the parts of guest segments and private buffer that correspond.
fn for_each_part(
    slot: u32,
    data: &[crate::ring::Segment],
    io: &mut dyn BlockIo,
    mut each: impl FnMut(guest_mem::Iova, &mut [u8]) -> Access<()>,
) -> Access<()> {
    let mut at = 0;
    for segment in data {
        let mut done = 0;
        while done < segment.len {
            let iova = segment
                .iova
                .checked_add(u64::from(done))
                .ok_or(DmaFault::BadRange)?;
            let buffer = io.buffer(slot, at);
            let len = buffer.len().min((segment.len - done) as usize);
            each(iova, &mut buffer[..len])?;
            done += len as u32;
            at += len as u32;
        }
    }
    Ok(())
}
