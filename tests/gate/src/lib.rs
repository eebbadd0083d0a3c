//! A gate in front of a fake device: operations wait in the order of their submission until the
//! test releases them.
//!
//! It depends on no device, so that the unit tests of `vio` and the fake disks of other crates'
//! tests can both use it. The device owns the [`Gate`]; the test has its [`GateControl`], on any
//! thread. A [doorbell](Gate::doorbell) wakes a device that sleeps.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};

/// State that the test sets.
#[derive(Debug, Default)]
struct State {
    /// Number of operations that may pass.
    credit: usize,
    /// All operations may pass.
    open: bool,
    uncancellable: bool,
    /// Number of operations that are held now.
    held: usize,
}

struct Shared {
    state: Mutex<State>,
    doorbell: Mutex<UnixStream>,
}

/// The test's end of a [`Gate`]; usable from any thread.
#[derive(Clone)]
pub struct GateControl(Arc<Shared>);

impl GateControl {
    /// Lets `count` operations pass: those that are held first, then new ones.
    pub fn release(&self, count: usize) {
        self.state().credit += count;
        self.ring();
    }

    /// Opens the gate for all operations (`true`), or closes it (`false`). Unused credit is
    /// dropped.
    pub fn set_open(&self, open: bool) {
        let mut state = self.state();
        state.open = open;
        state.credit = 0;
        drop(state);
        self.ring();
    }

    /// Sets whether held operations refuse to be cancelled.
    pub fn set_uncancellable(&self, uncancellable: bool) {
        self.state().uncancellable = uncancellable;
    }

    /// Returns the number of operations that are held now.
    pub fn held(&self) -> usize {
        self.state().held
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().expect("nothing panics with the state")
    }

    fn ring(&self) {
        let mut socket = self.0.doorbell.lock();
        let socket = socket.as_mut().expect("nothing panics with the socket");
        // If the socket is full, it is readable already. If it is closed, there is no device to
        // wake.
        let _ = socket.write(&[1]);
    }
}

/// The device's end of a gate for operations of type `T`; closed at first.
pub struct Gate<T> {
    control: GateControl,
    doorbell: UnixStream,
    held: VecDeque<T>,
}

/// Outcome of [`Gate::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancel {
    /// The gate does not hold the operation: it has passed.
    NotHeld,
    /// The operation is removed from the gate, and has not passed.
    Cancelled,
    /// The operation stays in the gate, as the test has chosen.
    Refused,
}

impl<T> Gate<T> {
    /// Creates a closed gate.
    ///
    /// # Errors
    /// The host has no pair of sockets.
    pub fn new() -> std::io::Result<(Self, GateControl)> {
        let (doorbell, writer) = UnixStream::pair()?;
        doorbell.set_nonblocking(true)?;
        writer.set_nonblocking(true)?;
        let control = GateControl(Arc::new(Shared {
            state: Mutex::new(State::default()),
            doorbell: Mutex::new(writer),
        }));
        let gate = Self {
            control: control.clone(),
            doorbell,
            held: VecDeque::new(),
        };
        Ok((gate, control))
    }

    /// Adds `operation` behind those that wait.
    pub fn hold(&mut self, operation: T) {
        self.held.push_back(operation);
        self.control.state().held = self.held.len();
    }

    /// Takes the next operation that may pass.
    pub fn pass(&mut self) -> Option<T> {
        let mut state = self.control.state();
        if !state.open && state.credit == 0 {
            return None;
        }
        let next = self.held.pop_front()?;
        state.held = self.held.len();
        if !state.open {
            state.credit -= 1;
        }
        Some(next)
    }

    /// Returns whether [`pass`](Self::pass) would return an operation.
    pub fn may_pass(&self) -> bool {
        let state = self.control.state();
        (state.open || state.credit != 0) && !self.held.is_empty()
    }

    /// Cancels the first held operation for which `is_it` returns true.
    pub fn cancel(&mut self, is_it: impl FnMut(&T) -> bool) -> Cancel {
        let Some(at) = self.held.iter().position(is_it) else {
            return Cancel::NotHeld;
        };
        let mut state = self.control.state();
        if state.uncancellable {
            return Cancel::Refused;
        }
        self.held.remove(at);
        state.held = self.held.len();
        Cancel::Cancelled
    }

    /// Returns a descriptor that is readable once the test has released operations.
    pub fn doorbell(&self) -> RawFd {
        self.doorbell.as_raw_fd()
    }

    /// Makes the doorbell unreadable until the test acts again.
    pub fn clear_doorbell(&mut self) {
        let mut bytes = [0; 64];
        while matches!(self.doorbell.read(&mut bytes), Ok(read) if read != 0) {}
    }
}

/// Defines the type `SlowDisk`, a disk behind a [`Gate`], for the crate `vio` under the name that
/// the caller passes. A macro, since in unit tests of `vio` the types of that crate differ from
/// those that this crate could depend on.
#[macro_export]
macro_rules! slow_disk {
    ($vio:tt) => {
        /// An operation that waits: its slot, the operation, and its pieces of memory.
        type Held = (u32, $vio::blk::Op, Vec<$vio::blk::Piece>);

        /// A disk whose operations start when the test releases them. Only then do they reach the
        /// disk below, and access memory.
        pub struct SlowDisk {
            below: Box<dyn $vio::blk::BlockIo>,
            gate: $crate::Gate<Held>,
            done: Vec<$vio::blk::Completion>,
        }

        impl SlowDisk {
            /// Creates a disk in front of `below`, with the gate closed.
            pub fn new(
                below: Box<dyn $vio::blk::BlockIo>,
            ) -> std::io::Result<(Self, $crate::GateControl)> {
                let (gate, control) = $crate::Gate::new()?;
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

        impl $vio::blk::BlockIo for SlowDisk {
            $vio::pass_down!();

            fn submit(&mut self, slot: u32, op: $vio::blk::Op, pieces: &[$vio::blk::Piece]) {
                self.gate.hold((slot, op, pieces.to_vec()));
            }

            fn flush(&mut self) {
                self.admit();
                self.below.flush();
            }

            fn poll(&mut self, done: &mut Vec<$vio::blk::Completion>) {
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
                    $crate::Cancel::NotHeld => return self.below.cancel(slot),
                    $crate::Cancel::Refused => $vio::blk::Outcome::NotCancellable,
                    $crate::Cancel::Cancelled => $vio::blk::Outcome::Failed(libc::ECANCELED),
                };
                self.done.push($vio::blk::Completion { slot, outcome });
            }

            fn arm(&mut self) {
                self.below.arm();
            }

            fn disarm(&mut self) {
                self.below.disarm();
            }

            fn wake_fds(&self, fds: &mut Vec<std::os::fd::RawFd>) {
                fds.push(self.gate.doorbell());
                self.below.wake_fds(fds);
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate_with(operations: &[u32]) -> (Gate<u32>, GateControl) {
        let (mut gate, control) = Gate::new().expect("a pair of sockets");
        operations.iter().for_each(|&number| gate.hold(number));
        (gate, control)
    }

    #[test]
    fn operations_pass_in_their_order_as_far_as_the_credit_goes() {
        let (mut gate, control) = gate_with(&[1, 2, 3]);
        assert_eq!(
            (gate.pass(), gate.may_pass(), control.held()),
            (None, false, 3)
        );
        control.release(2);
        assert!(gate.may_pass());
        assert_eq!(
            [gate.pass(), gate.pass(), gate.pass()],
            [Some(1), Some(2), None]
        );
        assert_eq!(control.held(), 1);
        control.set_open(true);
        assert_eq!([gate.pass(), gate.pass()], [Some(3), None]);
        // Credit that was not used is dropped.
        control.release(5);
        control.set_open(false);
        gate.hold(4);
        assert_eq!(gate.pass(), None);
    }

    #[test]
    fn only_a_held_operation_is_cancelled_and_only_if_it_may_be() {
        let (mut gate, control) = gate_with(&[1, 2]);
        control.set_uncancellable(true);
        assert_eq!(gate.cancel(|&number| number == 2), Cancel::Refused);
        assert_eq!(control.held(), 2);
        control.set_uncancellable(false);
        assert_eq!(gate.cancel(|&number| number == 2), Cancel::Cancelled);
        assert_eq!(gate.cancel(|&number| number == 2), Cancel::NotHeld);
        assert_eq!(control.held(), 1);
    }

    #[test]
    fn the_doorbell_is_readable_from_a_release_until_it_is_cleared() {
        let (mut gate, control) = gate_with(&[]);
        let is_rung = |gate: &Gate<u32>| {
            gate.doorbell
                .try_clone()
                .expect("one more")
                .read(&mut [0])
                .is_ok()
        };
        assert!(!is_rung(&gate));
        control.release(1);
        assert!(is_rung(&gate));
        control.set_open(true);
        gate.clear_doorbell();
        assert!(!is_rung(&gate));
    }
}
