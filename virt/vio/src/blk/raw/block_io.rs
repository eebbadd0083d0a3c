//! The disk as the devices' back end.

use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;

use guest_mem::{KeepAlive, keeps_mapped};

use super::pool::{CHUNK, Pool};
use super::slot::{Stage, State};
use super::{Completion, Op, Outcome, Piece, RawDisk, Transfer, path_of};
use crate::blk::backend::BlockIo;
use crate::blk::range::RangePlan;
use crate::blk::{MAX_PIECES, MAX_TRANSFER};

impl BlockIo for RawDisk {
    fn path(&self) -> Option<PathBuf> {
        path_of(&self.file)
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn is_read_only(&self) -> bool {
        self.options.read_only
    }

    fn alignment(&self) -> u32 {
        self.alignment.block
    }

    fn takes(&self, op: Op, pieces: &[Piece]) -> bool {
        match op {
            Op::Read { offset, .. } | Op::Write { offset, .. } => {
                self.alignment.takes(offset, pieces)
            }
            Op::Flush | Op::Discard { .. } | Op::WriteZeroes { .. } => true,
        }
    }

    fn discards(&self) -> bool {
        self.support.punches
    }

    fn discard_block(&self) -> u32 {
        self.support.call_block
    }

    fn depth(&self) -> u32 {
        self.options.depth
    }

    fn transfer(&self) -> Transfer {
        self.options.transfer
    }

    fn attach(&mut self, keep: KeepAlive) {
        assert_eq!(
            self.in_flight, 0,
            "guest memory changed under operations in flight"
        );
        self.keep = Some(keep);
    }

    fn detach(&mut self) {
        assert_eq!(
            self.in_flight, 0,
            "guest memory given up under operations in flight"
        );
        self.keep = None;
    }

    fn reserve(&mut self, slot: u32, len: u32) -> bool {
        assert!(len <= MAX_TRANSFER);
        self.slot(slot);
        let pool = self.pool.get_or_insert_with(Pool::new);
        let slot = &mut self.slots[slot as usize];
        assert_eq!(
            slot.state,
            State::Free,
            "a slot serves one request at a time"
        );
        let count = len.div_ceil(CHUNK) as usize;
        let Some(left) = pool.free.len().checked_sub(count) else {
            return false;
        };
        slot.chunks.extend(pool.free.drain(left..));
        slot.reserved = len;
        slot.state = State::Idle;
        true
    }

    fn buffer(&mut self, number: u32, offset: u32) -> &mut [u8] {
        assert_eq!(
            self.slots[number as usize].state,
            State::Idle,
            "the private buffer of an operation in flight"
        );
        self.private_buffer(number, offset)
    }

    fn unreserve(&mut self, slot: u32) {
        let Some(slot) = self.slots.get_mut(slot as usize) else {
            return;
        };
        assert_ne!(
            slot.state,
            State::InFlight,
            "the private buffer of an operation in flight"
        );
        slot.state = State::Free;
        slot.reserved = 0;
        match self.pool.as_mut() {
            Some(pool) => pool.free.append(&mut slot.chunks),
            None => debug_assert!(slot.chunks.is_empty()),
        }
    }

    fn run_now(&mut self, op: Op, pieces: &[Piece]) -> Option<Outcome> {
        if self.options.transfer != Transfer::Direct {
            return None;
        }
        let (offset, len) = match op {
            Op::Read { offset, len } => (offset, len),
            Op::Write {
                offset,
                len,
                durable: _,
            } => (offset, len),
            Op::Flush => return self.now.flush_is_free().then_some(Outcome::Done),
            Op::Discard { .. } | Op::WriteZeroes { .. } => return None,
        };
        if !self.keeps(pieces) {
            return None;
        }
        self.scratch.clear();
        self.scratch.extend(pieces.iter().map(iovec));
        let done = match op {
            Op::Write { .. } => self.now.write(&self.file, &self.scratch, offset, len),
            _ => self.now.read(&self.file, &self.scratch, offset, len),
        };
        done.map(|()| Outcome::Done)
    }

    fn submit(&mut self, number: u32, op: Op, pieces: &[Piece]) {
        if let Err(error) = self.engine.prepare(self.options.depth) {
            let (slot, outcome) = (number, not_begun(&error));
            return self.early.push(Completion { slot, outcome });
        }
        if op == Op::Flush
            && let Some(errno) = self.syncs.error()
        {
            return self.end_early(number, errno);
        }
        // The safety of the kernel's access depends on this check: these bytes stay mapped for as
        // long as `self.keep` is held, which is until nothing is in flight.
        if !pieces.is_empty() && !self.keeps(pieces) {
            return self.end_early(number, libc::EFAULT);
        }
        // What is no whole number of blocks goes through a private buffer, as `takes` says.
        let is_misaligned = match op {
            Op::Read { offset, len } | Op::Write { offset, len, .. } => {
                !self.alignment.fits(offset, len)
            }
            _ => false,
        };
        if is_misaligned && !pieces.is_empty() {
            return self.end_early(number, libc::EINVAL);
        }
        let plan = RangePlan::of(op, &self.support);
        let slot = self.slot(number);
        assert_ne!(
            slot.state,
            State::InFlight,
            "a slot serves one request at a time"
        );
        slot.op = op;
        slot.cancelled = false;
        slot.uses = (slot.uses + 1) & (u32::MAX >> 1);
        slot.plan = plan;
        slot.move_through(Stage::Transfer, pieces.iter().map(iovec));
        let mut total: u64 = pieces.iter().map(|piece| u64::from(piece.len)).sum();
        let slot = &mut self.slots[number as usize];
        let mut left = slot.reserved;
        for &chunk in &slot.chunks {
            let len = left.min(CHUNK);
            left -= len;
            total += u64::from(len);
            let pool = self.pool.as_ref().expect("a slot with chunks has a pool");
            let iov_base = pool.chunk(chunk).cast();
            slot.iovecs.push(libc::iovec {
                iov_base,
                iov_len: len as usize,
            });
        }
        if let Op::Read { len, .. } | Op::Write { len, .. } = op {
            assert_eq!(
                u64::from(len),
                total,
                "buffers do not add up to the transfer"
            );
            assert!(slot.iovecs.len() <= MAX_PIECES);
        }
        slot.state = State::InFlight;
        self.in_flight += 1;
        match self.share(op) {
            Some(share) => self.changes.enter(number, share),
            None => self.begin_or_end(number),
        }
        self.begin_waiting();
    }

    fn flush(&mut self) {
        self.engine.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.early);
        if self.in_flight == 0 {
            return;
        }
        self.flush();
        self.collect(done);
        if !self.refused.is_empty() {
            // A refusal says that the kernel cannot stop the operation: it runs, in the device or
            // in a thread of the kernel, or it has ended, and its own completion stands behind the
            // refusal or waits for our next entry. After one more look only those that run are
            // left.
            self.engine.enter();
            self.collect(done);
            for refused in std::mem::take(&mut self.refused) {
                let number = u32::from(refused as u16);
                let slot = &self.slots[number as usize];
                if slot.state == State::InFlight && slot.user_data(number) == refused {
                    done.push(Completion {
                        slot: number,
                        outcome: Outcome::NotCancellable,
                    });
                }
            }
        }
        // Continuations of short transfers.
        self.flush();
    }

    fn has_completions(&mut self) -> bool {
        !self.early.is_empty() || (self.in_flight != 0 && self.engine.has_events())
    }

    fn cancel(&mut self, slot: u32) {
        // A submission that ended early may never have had a slot.
        let Some(own) = self.slots.get_mut(slot as usize) else {
            return;
        };
        if own.state == State::InFlight && !own.cancelled {
            own.cancelled = true;
            let waits = self.syncs.give_up(slot)
                || self.changes.give_up(slot)
                || self.zero_writers.give_up(slot);
            if waits {
                // The kernel does not have it now.
                self.end_in_flight(slot, Outcome::Failed(libc::ECANCELED));
                return self.begin_waiting();
            }
            let user_data = self.slots[slot as usize].user_data(slot);
            self.engine.cancel(user_data);
        }
    }

    fn rebind(&mut self) {
        assert_eq!(
            self.in_flight, 0,
            "a ring given up under operations in flight"
        );
        self.engine.rebind();
    }

    fn arm(&mut self) {
        // With nothing in flight there is no completion to announce.
        if self.in_flight != 0 {
            self.engine.arm();
        }
    }

    fn disarm(&mut self) {
        self.engine.disarm();
    }

    fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        fds.extend(self.engine.wake_fd());
    }
}

impl RawDisk {
    /// Whether the kernel may be given these pieces: they stay mapped for as long as `self.keep` is
    /// held.
    fn keeps(&self, pieces: &[Piece]) -> bool {
        self.keep.as_ref().is_some_and(|keep| {
            pieces
                .iter()
                .all(|piece| keeps_mapped(keep, piece.hva, u64::from(piece.len)))
        })
    }
}

/// Outcome of an operation for which no ring could be had.
fn not_begun(error: &io::Error) -> Outcome {
    match error.raw_os_error().unwrap_or(libc::EIO) {
        // Descriptors, the process's or the host's, or memory: others may give theirs back.
        errno @ (libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN) => {
            Outcome::NotBegun(errno)
        }
        errno => Outcome::Failed(errno),
    }
}

fn iovec(piece: &Piece) -> libc::iovec {
    libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(piece.hva.raw() as usize),
        iov_len: piece.len as usize,
    }
}
