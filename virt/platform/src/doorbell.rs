//! Doorbells of a function: places in its BAR that the hypervisor watches, so that ringing needs no
//! exit to user space.
//!
//! There are two interfaces. The function's owner, which polls it, receives the rings
//! ([`Doorbells`]). The location of the doorbells follows the BAR ([`PlaceDoorbells`]), on the
//! thread of the vCPU that moved it: a hypervisor may take milliseconds for each, too long for a
//! thread that polls.

use std::os::fd::RawFd;

/// The doorbells of one function, numbered as its queues. Called by the function's owner.
pub trait Doorbells: Send {
    /// Passes to `add` the descriptors that become readable when one of these doorbells rings.
    fn fds(&self, add: &mut dyn FnMut(RawFd));

    /// Takes the pending rings, and calls `ring` with the number of each doorbell that rang.
    fn drain(&mut self, ring: &mut dyn FnMut(u16));

    /// Returns the number of rings so far, each of which was an exit.
    fn rung(&self) -> u64;
}

/// Placement of the doorbells of one function. Called by the decoder of its BARs: one call at a
/// time, in the order of the changes.
pub trait PlaceDoorbells: Send + Sync {
    /// Places doorbell 0 at this guest-physical address, or nowhere if decoding is off. On return
    /// the doorbells' former addresses are not watched any more. It may block for as long as the
    /// hypervisor needs. A doorbell that cannot be watched still works, as an exit to user space.
    fn place(&self, first: Option<u64>);
}
