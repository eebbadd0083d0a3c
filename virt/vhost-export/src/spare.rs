//! A descriptor kept for the moment when no other is left.
//!
//! A connection that waits in a listener's queue while the process has as many descriptors as it
//! may can be neither served nor refused: refusing is accepting and closing. The spare one is given
//! up for that, and taken again at the next opportunity. One for the process, since the limit is
//! the process's.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, TryLockError};

use rustix::event::{EventfdFlags, eventfd};

static SPARE: Mutex<Option<OwnedFd>> = Mutex::new(None);

/// Takes the spare descriptor, if it is not held and there is one to be had.
pub(crate) fn take() {
    with(|spare| {
        if spare.is_none() {
            *spare = eventfd(0, EventfdFlags::CLOEXEC).ok();
        }
    });
}

/// Closes the spare descriptor. Returns whether there is a free descriptor now, unless another
/// thread takes it first.
pub(crate) fn give_up() -> bool {
    with(|spare| spare.take().is_some()).unwrap_or(false)
}

/// Calls `then` with the spare descriptor. Does not wait: returns `None` where another core holds
/// the lock, since that core is about to give the descriptor up.
fn with<R>(then: impl FnOnce(&mut Option<OwnedFd>) -> R) -> Option<R> {
    match SPARE.try_lock() {
        Ok(mut spare) => Some(then(&mut spare)),
        Err(TryLockError::Poisoned(poisoned)) => Some(then(&mut poisoned.into_inner())),
        Err(TryLockError::WouldBlock) => None,
    }
}
