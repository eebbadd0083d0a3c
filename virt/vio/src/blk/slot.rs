//! One request from its chain to its used element, where it does not end at once.

use std::mem;

use guest_mem::{Access, Dma, DmaFault, Full, Intent, Iova, LeaseId, LeaseStop, Stop, Wanted};

use super::backend::{BlockIo, Op, Piece, Transfer};
use super::request::{self, HEADER_LEN, ID_LEN, STATUS_IOERR, STATUS_OK};
use super::{MAX_PIECES, MAX_TRANSFER};
use crate::DeviceStats;
use crate::ring::{Chain, Segment, Token, read_row, slice, wait_for_all, write_row};

/// Outcome of preparing a transfer.
pub(super) enum PrepareOutcome {
    /// Submit it.
    Yes,
    /// Not now.
    NoRoom(WaitingFor),
    /// The guest's own buffer faulted, or a block of it is cut into more pieces than a transfer may
    /// have.
    Refused,
}

/// Resource that a request waits for, which had no room for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitingFor {
    /// A slot or a buffer that other requests have.
    Slot,
    /// So many leases at least.
    Leases(usize),
}

/// Kind of reply that finishes a slot's request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Reply {
    /// Nothing but the status.
    #[default]
    Status,
    /// Data that wait in the back end's private buffer.
    Bounced,
    /// Data that the back end has put into guest memory.
    Direct,
    /// The serial number.
    Id,
    /// Everything is there, the status too; only the used element is missing.
    Done,
}

/// Whether a request in flight has been asked to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Cancel {
    /// No.
    #[default]
    No,
    /// If it can.
    Asked,
    /// It has overrun the drain limit: if it cannot, the device needs a reset.
    Overdue,
}

/// One request, from its chain to its used element. Vectors keep their capacity from request to
/// request.
#[derive(Debug, Default)]
pub(super) struct Request {
    /// The number of its queue.
    pub(super) queue: u16,
    /// Its place in the ring.
    pub(super) token: Option<Token>,
    pub(super) reply: Reply,
    pub(super) status: u8,
    pub(super) status_at: Iova,
    /// Operation that it asks the back end for, as a whole.
    op: Op,
    /// Data bytes: those the device writes for a reading request.
    pub(super) len: u32,
    /// Of them, those of the parts that are over.
    done: u32,
    /// And those of the part that is prepared, runs or has ended; 0 between two parts.
    part: u32,
    pub(super) is_write: bool,
    pub(super) data: Vec<Segment>,
    pub(super) leases: Vec<LeaseId>,
    pub(super) pieces: Vec<Piece>,
    pub(super) in_flight: bool,
    pub(super) cancel: Cancel,
}

impl Request {
    /// Forgets the request before.
    pub(super) fn begin(&mut self, queue: u16, parsed: &request::Parsed) {
        assert!(
            self.leases.is_empty(),
            "a slot is free only when its leases are released"
        );
        self.data.clear();
        self.pieces.clear();
        *self = Self {
            queue,
            status: STATUS_OK,
            status_at: parsed.status_at,
            data: mem::take(&mut self.data),
            leases: mem::take(&mut self.leases),
            pieces: mem::take(&mut self.pieces),
            ..Self::default()
        };
    }

    /// Gets the first part of the request's data ready to be moved, in whole blocks of so many
    /// bytes where it is not the last one. On anything but `PrepareOutcome::Yes` no lease or buffer
    /// is kept.
    pub(super) fn prepare<D: Dma>(
        &mut self,
        slot: u32,
        op: Op,
        dma: &mut D,
        chain: &Chain,
        io: &mut dyn BlockIo,
        block: u32,
    ) -> Access<PrepareOutcome> {
        self.op = op;
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
            Op::Flush | Op::Discard { .. } | Op::WriteZeroes { .. } => {
                return Ok(PrepareOutcome::Yes);
            }
        }
        self.prepare_part(slot, dma, io, block)
    }

    /// [`prepare`](Self::prepare) of the part that comes next, of which there is one.
    pub(super) fn prepare_part<D: Dma>(
        &mut self,
        slot: u32,
        dma: &mut D,
        io: &mut dyn BlockIo,
        block: u32,
    ) -> Access<PrepareOutcome> {
        self.part = (self.len - self.done).min(MAX_TRANSFER);
        self.pieces.clear();
        let mut transfer = io.transfer();
        let mut leased = Ok(());
        if transfer == Transfer::Direct {
            leased = self.lease_part(dma, block);
            if leased.is_ok() && !io.takes(self.part_op(), &self.pieces) {
                self.release(dma);
                self.pieces.clear();
                transfer = Transfer::Bounce;
            }
        }
        let (reply, ready) = match transfer {
            Transfer::Direct => (Reply::Direct, leased),
            Transfer::Nothing => (Reply::Direct, Ok(())),
            Transfer::Memory => (
                Reply::Direct,
                self.copy(dma, io.contents()).map_err(Into::into),
            ),
            Transfer::Bounce if !io.reserve(slot, self.part) => {
                self.part = 0;
                return Ok(PrepareOutcome::NoRoom(WaitingFor::Slot));
            }
            Transfer::Bounce if self.is_write => (
                Reply::Status,
                self.bounce_in(slot, dma, io).map_err(Into::into),
            ),
            Transfer::Bounce => (Reply::Bounced, Ok(())),
        };
        self.reply = if self.is_write { Reply::Status } else { reply };
        let Err(stop) = ready else {
            return Ok(PrepareOutcome::Yes);
        };
        let wanted = self.leases.len() + 1;
        self.release(dma);
        io.unreserve(slot);
        let answer = match stop {
            // More than there are for this device if all others were free.
            LeaseStop::Full(Full { most }) if wanted > most => Ok(PrepareOutcome::Refused),
            LeaseStop::Full(_) => Ok(PrepareOutcome::NoRoom(WaitingFor::Leases(wanted))),
            LeaseStop::Access(Stop::Fault(_)) => Ok(PrepareOutcome::Refused),
            LeaseStop::Access(pending) => {
                Err(wait_for_all(dma, pending, self.wanted(self.intent())))
            }
        };
        self.part = 0;
        answer
    }

    /// Returns the operation that the back end is asked for now: the part that is prepared.
    pub(super) fn part_op(&self) -> Op {
        let (done, len) = (u64::from(self.done), self.part);
        match self.op {
            Op::Read { offset, .. } => Op::Read {
                offset: offset + done,
                len,
            },
            Op::Write {
                offset, durable, ..
            } => Op::Write {
                offset: offset + done,
                len,
                durable,
            },
            op => op,
        }
    }

    /// Bytes of the part that is prepared, runs or has ended.
    pub(super) fn part(&self) -> u32 {
        self.part
    }

    /// Whether the part's data move through a private buffer though others of the disk do not.
    pub(super) fn is_bounced(&self) -> bool {
        self.part != 0 && self.pieces.is_empty()
    }

    /// Whether nothing comes behind that part.
    pub(super) fn is_last_part(&self) -> bool {
        self.done + self.part == self.len
    }

    /// Moves the data of a part that has ended where they are not there yet, and gives its buffer
    /// back. A fault of the data becomes an error status. Does nothing between two parts.
    pub(super) fn finish_part<D: Dma>(
        &mut self,
        slot: u32,
        dma: &mut D,
        io: &mut dyn BlockIo,
    ) -> Access<()> {
        if self.part == 0 {
            return Ok(());
        }
        if self.reply == Reply::Bounced {
            match self.bounce_out(slot, dma, io) {
                Ok(()) => {}
                Err(Stop::Fault(_)) => self.status = STATUS_IOERR,
                Err(pending) => return Err(wait_for_all(dma, pending, self.unanswered())),
            }
        }
        io.unreserve(slot);
        self.done += self.part;
        self.part = 0;
        Ok(())
    }

    /// Returns the segments of the data of the part.
    fn segments(&self) -> impl Iterator<Item = Segment> + use<'_> {
        slice(&self.data, self.done, self.part)
    }

    /// All that the part will access: its data, for `intent`, and the request's status byte.
    fn wanted(&self, intent: Intent) -> impl Iterator<Item = Wanted> {
        let data = self.segments();
        let data = data.map(move |segment| (segment.iova, segment.len, intent));
        data.chain([(self.status_at, 1, Intent::Write)])
    }

    /// All that is still to be written to answer it.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = Wanted> {
        let has_data = self.status == STATUS_OK && matches!(self.reply, Reply::Bounced | Reply::Id);
        let skip = if has_data { 0 } else { self.segments().count() };
        self.wanted(Intent::Write).skip(skip)
    }

    /// Returns the intent with which the request's data are accessed.
    fn intent(&self) -> Intent {
        match self.is_write {
            true => Intent::Read,
            false => Intent::Overwrite,
        }
    }

    /// Leases as much of the part as one transfer may have pieces, and shortens it to that.
    fn lease_part<D: Dma>(&mut self, dma: &mut D, block: u32) -> Result<(), LeaseStop> {
        let intent = self.intent();
        let mut leased = 0;
        'part: for segment in slice(&self.data, self.done, self.part) {
            let mut done = 0;
            while done < segment.len {
                if self.leases.len() == MAX_PIECES {
                    break 'part;
                }
                let at = segment
                    .iova
                    .checked_add(u64::from(done))
                    .ok_or(DmaFault::BadRange)?;
                let lease = match dma.lease(at, segment.len - done, intent) {
                    // As many as this device can ever have.
                    Err(LeaseStop::Full(Full { most }))
                        if self.leases.len() >= most && leased >= block =>
                    {
                        break 'part;
                    }
                    lease => lease?,
                };
                done += lease.len;
                leased += lease.len;
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
        if leased < self.part {
            self.part = leased - leased % block;
            self.cut_pieces(leased - self.part);
        }
        if self.part == 0 {
            return Err(DmaFault::BadRange.into());
        }
        Ok(())
    }

    /// Takes so many bytes from the end of the pieces.
    fn cut_pieces(&mut self, mut bytes: u32) {
        while let Some(last) = self.pieces.last_mut()
            && bytes != 0
        {
            let cut = bytes.min(last.len);
            last.len -= cut;
            bytes -= cut;
            if last.len == 0 {
                self.pieces.pop();
            }
        }
    }

    /// Moves the part between the guest and the disk's contents.
    fn copy<D: Dma>(&self, dma: &mut D, contents: &mut [u8]) -> Access<()> {
        let (Op::Read { offset, .. } | Op::Write { offset, .. }) = self.op else {
            return Ok(());
        };
        let at = (offset + u64::from(self.done)) as usize;
        let row = &mut contents[at..][..self.part as usize];
        match self.is_write {
            true => read_row(dma, self.segments(), row),
            false => write_row(dma, self.segments(), row),
        }
    }

    /// Fills the private buffer from the guest.
    fn bounce_in<D: Dma>(&self, slot: u32, dma: &mut D, io: &mut dyn BlockIo) -> Access<()> {
        for_each_piece(slot, self.segments(), io, |iova, part| dma.read(iova, part))
    }

    /// Empties the private buffer into the guest.
    fn bounce_out<D: Dma>(&self, slot: u32, dma: &mut D, io: &mut dyn BlockIo) -> Access<()> {
        for_each_piece(slot, self.segments(), io, |iova, part| {
            dma.write(iova, part)
        })
    }

    /// The answer is this much of the serial number, into the chain's data.
    pub(super) fn answer_id(&mut self, chain: &Chain, len: u32) {
        self.reply = Reply::Id;
        self.len = len;
        self.part = len;
        self.data.extend(chain.writable().slice(0, len));
    }

    /// Releases every lease: nothing touches the request's memory any more.
    pub(super) fn release<D: Dma>(&mut self, dma: &mut D) {
        for id in self.leases.drain(..) {
            dma.release(id);
        }
    }

    /// Makes this request fail without having run.
    pub(super) fn refuse(&mut self) {
        self.reply = Reply::Status;
        self.status = STATUS_IOERR;
    }

    /// Writes data (where they are not there yet) and status. Returns the number of bytes that the
    /// device wrote in all. A fault is one of the status byte: a fault of the data becomes an error
    /// status.
    pub(super) fn answer<D: Dma>(
        &mut self,
        slot: u32,
        dma: &mut D,
        io: &mut dyn BlockIo,
        serial: &[u8; ID_LEN],
    ) -> Access<u32> {
        let data = match self.reply {
            _ if self.status != STATUS_OK => Ok(()),
            Reply::Status | Reply::Direct | Reply::Done => Ok(()),
            Reply::Bounced => self.bounce_out(slot, dma, io),
            Reply::Id => write_row(dma, self.segments(), &serial[..self.len as usize]),
        };
        match data {
            Ok(()) => {}
            Err(Stop::Fault(_)) => self.status = STATUS_IOERR,
            Err(pending) => return Err(pending),
        }
        dma.write(self.status_at, &[self.status])?;
        // After an error nothing is promised of the data (§2.7.8.2: len is a lower bound of what
        // was written).
        let data = match self.reply {
            Reply::Status => 0,
            _ if self.status != STATUS_OK => 0,
            _ => self.len,
        };
        Ok(data + 1)
    }

    /// Counts the request as over.
    pub(super) fn count(&self, stats: &mut DeviceStats) {
        // One that waited only to be published was counted when it was done.
        if self.reply == Reply::Done {
            return;
        }
        let bytes = u64::from(self.len);
        if self.status != STATUS_OK {
            stats.errors += 1;
        } else if self.is_write {
            stats.written_bytes += bytes;
        } else {
            stats.read_bytes += bytes;
        }
    }
}

/// Gives `each` the pieces of guest segments and private buffer that correspond.
fn for_each_piece(
    slot: u32,
    data: impl Iterator<Item = Segment>,
    io: &mut dyn BlockIo,
    mut each: impl FnMut(Iova, &mut [u8]) -> Access<()>,
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
