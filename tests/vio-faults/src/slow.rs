//! A disk that is as slow as a test wants.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};

use vio::blk::{BlockIo, Completion, Op, Outcome, Piece};
use vio::pass_down;

/// What the test decides.
#[derive(Debug, Default)]
struct Gate {
    /// Submissions that may pass.
    credit: usize,
    /// Everything passes.
    open: bool,
    uncancellable: bool,
    /// Submissions held back now.
    held: usize,
}

struct Shared {
    gate: Mutex<Gate>,
    doorbell: Mutex<UnixStream>,
}

/// The test's end of a [`SlowDisk`]; usable from any thread.
#[derive(Clone)]
pub struct SlowControl(Arc<Shared>);

impl SlowControl {
    /// Lets `count` operations, held or to come, reach the disk.
    pub fn release(&self, count: usize) {
        self.gate().credit += count;
        self.ring();
    }

    /// Holds nothing back any more (`true`), or again (`false`).
    pub fn set_open(&self, open: bool) {
        let mut gate = self.gate();
        gate.open = open;
        gate.credit = 0;
        drop(gate);
        self.ring();
    }

    /// Whether held operations refuse to be cancelled.
    pub fn set_uncancellable(&self, uncancellable: bool) {
        self.gate().uncancellable = uncancellable;
    }

    /// Operations held back now.
    pub fn held(&self) -> usize {
        self.gate().held
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.0.gate.lock().expect("nobody panics holding the gate")
    }

    fn ring(&self) {
        let mut socket = self
            .0
            .doorbell
            .lock()
            .expect("nobody panics holding the socket");
        // A full socket is readable already, and a closed one has no disk to wake.
        let _ = socket.write(&[1]);
    }
}

/// A disk whose operations start when a test says so: they reach the disk below, and touch memory, then.
pub struct SlowDisk {
    below: Box<dyn BlockIo>,
    control: SlowControl,
    doorbell: UnixStream,
    held: VecDeque<(u32, Op, Vec<Piece>)>,
    done: Vec<Completion>,
}

impl SlowDisk {
    /// `below`, with everything held back at first.
    pub fn new(below: Box<dyn BlockIo>) -> std::io::Result<(Self, SlowControl)> {
        let (doorbell, writer) = UnixStream::pair()?;
        doorbell.set_nonblocking(true)?;
        writer.set_nonblocking(true)?;
        let control = SlowControl(Arc::new(Shared {
            gate: Mutex::new(Gate::default()),
            doorbell: Mutex::new(writer),
        }));
        let disk = Self {
            below,
            control: control.clone(),
            doorbell,
            held: VecDeque::new(),
            done: Vec::new(),
        };
        Ok((disk, control))
    }

    fn admit(&mut self) {
        loop {
            let mut gate = self.control.gate();
            let may = gate.open || gate.credit != 0;
            let next = if may { self.held.pop_front() } else { None };
            gate.held = self.held.len();
            let Some((slot, op, pieces)) = next else {
                return;
            };
            if !gate.open {
                gate.credit -= 1;
            }
            drop(gate);
            self.below.submit(slot, op, &pieces);
        }
    }
}

impl BlockIo for SlowDisk {
    pass_down!();

    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]) {
        self.held.push_back((slot, op, pieces.to_vec()));
        self.control.gate().held = self.held.len();
    }

    fn flush(&mut self) {
        self.admit();
        self.below.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        let mut bytes = [0; 64];
        while matches!(self.doorbell.read(&mut bytes), Ok(read) if read != 0) {}
        self.admit();
        self.below.flush();
        done.append(&mut self.done);
        self.below.poll(done);
    }

    fn has_completions(&mut self) -> bool {
        let gate = self.control.gate();
        let admissible = (gate.open || gate.credit != 0) && !self.held.is_empty();
        drop(gate);
        admissible || !self.done.is_empty() || self.below.has_completions()
    }

    fn cancel(&mut self, slot: u32) {
        let Some(at) = self.held.iter().position(|(held, ..)| *held == slot) else {
            return self.below.cancel(slot);
        };
        let outcome = if self.control.gate().uncancellable {
            Outcome::NotCancellable
        } else {
            self.held.remove(at);
            Outcome::Failed(libc::ECANCELED)
        };
        self.control.gate().held = self.held.len();
        self.done.push(Completion { slot, outcome });
    }

    fn arm(&mut self) {
        self.below.arm();
    }

    fn disarm(&mut self) {
        self.below.disarm();
    }

    fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        fds.push(self.doorbell.as_raw_fd());
        self.below.wake_fds(fds);
    }
}
