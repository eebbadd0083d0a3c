//! A disk that panics at its first operation, on the thread that polls it.

use std::os::fd::RawFd;

use vio::blk::{BlockIo, Completion, Op, Piece};
use vio::pass_down;

/// A disk that panics, to represent any bug in code that a sidecore runs.
pub struct PanicDisk {
    below: Box<dyn BlockIo>,
}

impl PanicDisk {
    /// Creates the disk in front of `below`, which is never accessed.
    pub fn new(below: Box<dyn BlockIo>) -> Self {
        Self { below }
    }
}

impl BlockIo for PanicDisk {
    pass_down!();

    fn submit(&mut self, _slot: u32, op: Op, _pieces: &[Piece]) {
        panic!("a disk that is to panic was asked for {op:?}");
    }

    fn flush(&mut self) {}

    fn poll(&mut self, _done: &mut Vec<Completion>) {}

    fn has_completions(&mut self) -> bool {
        false
    }

    fn cancel(&mut self, _slot: u32) {}

    fn arm(&mut self) {}

    fn disarm(&mut self) {}

    fn wake_fds(&self, _fds: &mut Vec<RawFd>) {}
}
