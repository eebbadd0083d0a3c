//! A disk in memory that can be looked at from outside.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

use guest_mem::KeepAlive;
use vio::blk::{BlockIo, Completion, MemDisk, Op, Outcome, Piece, Transfer};

/// What was on the disk when it was last told to disarm.
#[derive(Clone)]
pub(super) struct Shown(Arc<Mutex<Vec<u8>>>);

impl Shown {
    pub(super) fn contents(&self) -> Vec<u8> {
        self.0.lock().expect("nobody panics holding it").clone()
    }
}

/// The disk.
pub(super) struct ShownDisk {
    below: MemDisk,
    shown: Shown,
}

impl ShownDisk {
    pub(super) fn new(below: MemDisk) -> (Self, Shown) {
        let shown = Shown(Arc::new(Mutex::new(below.bytes().to_vec())));
        let disk = Self {
            below,
            shown: shown.clone(),
        };
        (disk, shown)
    }
}

impl BlockIo for ShownDisk {
    fn capacity(&self) -> u64 {
        self.below.capacity()
    }

    fn is_read_only(&self) -> bool {
        self.below.is_read_only()
    }

    fn depth(&self) -> u32 {
        self.below.depth()
    }

    fn transfer(&self) -> Transfer {
        self.below.transfer()
    }

    fn completes_in_order(&self) -> bool {
        self.below.completes_in_order()
    }

    fn run_now(&mut self, op: Op, pieces: &[Piece]) -> Option<Outcome> {
        self.below.run_now(op, pieces)
    }

    fn contents(&mut self) -> &mut [u8] {
        self.below.contents()
    }

    fn attach(&mut self, keep: KeepAlive) {
        self.below.attach(keep);
    }

    fn detach(&mut self) {
        self.below.detach();
    }

    fn reserve(&mut self, slot: u32, len: u32) -> bool {
        self.below.reserve(slot, len)
    }

    fn buffer(&mut self, slot: u32, offset: u32) -> &mut [u8] {
        self.below.buffer(slot, offset)
    }

    fn unreserve(&mut self, slot: u32) {
        self.below.unreserve(slot);
    }

    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]) {
        self.below.submit(slot, op, pieces);
    }

    fn flush(&mut self) {
        self.below.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.below.poll(done);
    }

    fn has_completions(&mut self) -> bool {
        self.below.has_completions()
    }

    fn cancel(&mut self, slot: u32) {
        self.below.cancel(slot);
    }

    fn arm(&mut self) {
        self.below.arm();
    }

    fn disarm(&mut self) {
        let mut shown = self.shown.0.lock().expect("nobody panics holding it");
        shown.copy_from_slice(self.below.bytes());
        self.below.disarm();
    }

    fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        self.below.wake_fds(fds);
    }
}
