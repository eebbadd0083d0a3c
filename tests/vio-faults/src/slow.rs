//! A disk that is as slow as a test wants.

use std::os::fd::RawFd;

use gate::{Cancel, Gate};
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece};
use vio::pass_down;

/// The end of a [`SlowDisk`] that the test has; usable from any thread.
pub use gate::GateControl as SlowControl;

/// An operation that waits: its slot, and what it is to do.
type Held = (u32, Op, Vec<Piece>);

/// A disk whose operations start when a test says so: they reach the disk below, and touch memory,
/// then.
pub struct SlowDisk {
    below: Box<dyn BlockIo>,
    gate: Gate<Held>,
    done: Vec<Completion>,
}

impl SlowDisk {
    /// `below`, with everything held back at first.
    pub fn new(below: Box<dyn BlockIo>) -> std::io::Result<(Self, SlowControl)> {
        let (gate, control) = Gate::new()?;
        let disk = Self {
            below,
            gate,
            done: Vec::new(),
        };
        Ok((disk, control))
    }

    fn admit(&mut self) {
        while let Some((slot, op, pieces)) = self.gate.pass() {
            self.below.submit(slot, op, &pieces);
        }
    }
}

impl BlockIo for SlowDisk {
    pass_down!();

    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]) {
        self.gate.hold((slot, op, pieces.to_vec()));
    }

    fn flush(&mut self) {
        self.admit();
        self.below.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.gate.clear_doorbell();
        self.admit();
        self.below.flush();
        done.append(&mut self.done);
        self.below.poll(done);
    }

    fn has_completions(&mut self) -> bool {
        self.gate.may_pass() || !self.done.is_empty() || self.below.has_completions()
    }

    fn cancel(&mut self, slot: u32) {
        let outcome = match self.gate.cancel(|(held, ..)| *held == slot) {
            Cancel::NotHeld => return self.below.cancel(slot),
            Cancel::Refused => Outcome::NotCancellable,
            Cancel::Cancelled => Outcome::Failed(libc::ECANCELED),
        };
        self.done.push(Completion { slot, outcome });
    }

    fn arm(&mut self) {
        self.below.arm();
    }

    fn disarm(&mut self) {
        self.below.disarm();
    }

    fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        fds.push(self.gate.doorbell());
        self.below.wake_fds(fds);
    }
}
