//! Descriptors of eventfds for a party of its own: the process behind a socket, or VFIO.
//!
//! UNSAFETY: a descriptor is borrowed from its owner, whose crate does not lend it as such.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use vmm_sys_util::eventfd::EventFd;

/// Duplicates each of them.
///
/// # Errors
/// The host has no more descriptors.
pub fn clones<'a>(fds: impl IntoIterator<Item = &'a EventFd>) -> io::Result<Vec<OwnedFd>> {
    fds.into_iter()
        .map(|fd| {
            // SAFETY: the descriptor belongs to `fd`, which outlives this call.
            unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }.try_clone_to_owned()
        })
        .collect()
}
