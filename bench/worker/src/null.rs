//! A back end that does nothing, to measure the code between a driver and a back end.
//!
//! [`vio::blk::NullDisk`] moves no data. This back end has the data moved as a real one has: in
//! place under leases, or by a copy through a private buffer.

use std::os::fd::RawFd;

use guest_mem::KeepAlive;
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece, Transfer};

/// Number of requests in flight.
const DEPTH: u32 = 256;

/// A disk without contents: reads leave the buffer unchanged, writes are dropped.
pub struct Null {
    capacity: u64,
    transfer: Transfer,
    /// Private buffer of each slot, reused from request to request.
    buffers: Vec<Vec<u8>>,
    done: Vec<Completion>,
}

impl Null {
    /// Creates a disk of `capacity` bytes, a multiple of 512. `transfer` is [`Transfer::Direct`] or
    /// [`Transfer::Bounce`].
    pub fn new(capacity: u64, transfer: Transfer) -> Self {
        Self {
            capacity,
            transfer,
            buffers: (0..DEPTH).map(|_| Vec::new()).collect(),
            done: Vec::new(),
        }
    }
}

impl BlockIo for Null {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn depth(&self) -> u32 {
        DEPTH
    }

    fn transfer(&self) -> Transfer {
        self.transfer
    }

    fn run_now(&mut self, _op: Op, _pieces: &[Piece]) -> Option<Outcome> {
        (self.transfer == Transfer::Direct).then_some(Outcome::Done)
    }

    fn attach(&mut self, _keep: KeepAlive) {}

    fn detach(&mut self) {}

    fn reserve(&mut self, slot: u32, len: u32) -> bool {
        let buffer = &mut self.buffers[slot as usize];
        if buffer.len() < len as usize {
            buffer.resize(len as usize, 0);
        }
        true
    }

    fn buffer(&mut self, slot: u32, offset: u32) -> &mut [u8] {
        &mut self.buffers[slot as usize][offset as usize..]
    }

    fn unreserve(&mut self, _slot: u32) {}

    fn submit(&mut self, slot: u32, _op: Op, _pieces: &[Piece]) {
        let outcome = Outcome::Done;
        self.done.push(Completion { slot, outcome });
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
    }

    fn has_completions(&mut self) -> bool {
        !self.done.is_empty()
    }

    fn cancel(&mut self, _slot: u32) {}

    fn arm(&mut self) {}

    fn disarm(&mut self) {}

    fn wake_fds(&self, _fds: &mut Vec<RawFd>) {}
}
