//! Doorbells of a function: places in its BAR that the hypervisor watches, so that ringing needs no exit to user space.

use std::os::fd::RawFd;

/// The doorbells of one function, numbered as its queues. Called by the function's owner.
pub trait Doorbells: Send {
    /// Follows the BAR: doorbell 0 is at this guest-physical address, or decoding is off. A doorbell that cannot be watched
    /// still works, as an exit to user space.
    fn place(&mut self, first: Option<u64>);

    /// Gives `add` the descriptors that become readable when a doorbell rings that is ours to hear.
    fn fds(&self, add: &mut dyn FnMut(RawFd));

    /// Takes what has rung and tells `ring` which.
    fn drain(&mut self, ring: &mut dyn FnMut(u16));

    /// How often they have rung: an exit each.
    fn rung(&self) -> u64;
}
