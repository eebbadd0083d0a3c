//! A disk that panics at its first operation, in the thread that polls it.

use std::os::fd::RawFd;

use vio::blk::{BlockIo, Completion, Op, Piece};
use vio::pass_down;

/// Stands for any mistake in what a core runs.
pub struct PanicDisk {
    below: Box<dyn BlockIo>,
}

impl PanicDisk {
    /// `below`, of which nothing is ever read or written.
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
