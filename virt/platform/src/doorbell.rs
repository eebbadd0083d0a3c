//! Doorbells of a function: places in its BAR that the hypervisor watches, so that ringing needs no
//! exit to user space.
//!
//! Two sides. Who polls the function hears them ([`Doorbells`]). Where they are follows the BAR
//! ([`PlaceDoorbells`]), on the thread of the vCPU that moved it: a hypervisor may take
//! milliseconds over each, for which nobody who polls has time.

use std::os::fd::RawFd;

/// The doorbells of one function, numbered as its queues. Called by the function's owner.
pub trait Doorbells: Send {
    /// Gives `add` the descriptors that become readable when a doorbell rings that is ours to hear.
    fn fds(&self, add: &mut dyn FnMut(RawFd));

    /// Takes what has rung and tells `ring` which.
    fn drain(&mut self, ring: &mut dyn FnMut(u16));

    /// How often they have rung: an exit each.
    fn rung(&self) -> u64;
}

/// Where the doorbells of one function are. Called by whoever decodes its BARs: one call at a time,
/// in the order of the changes.
pub trait PlaceDoorbells: Send + Sync {
    /// Doorbell 0 is at this guest-physical address, or decoding is off. On return nothing is
    /// watched where they were. It may block for as long as the hypervisor needs. A doorbell that
    /// cannot be watched still works, as an exit to user space.
    fn place(&self, first: Option<u64>);
}
