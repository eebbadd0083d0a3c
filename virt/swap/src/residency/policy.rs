//! Policy about reads and writes that the swapper can avoid. Measurements replace it, to compare
//! with a swapper that does not avoid them.
//!
//! A measurement program supplies another policy than [`AvoidAll`]; [`Counts`](super::Counts)
//! counts the avoidable operations under either. No policy can lose content: both results of each
//! function are correct for the guest.

use std::fmt;

/// Origin of a page-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultOrigin {
    /// A fault of a vCPU.
    Vcpu,
    /// An access of a device, or a disk request.
    Device,
}

/// Policy for reads and writes that can be avoided.
pub trait IoPolicy: fmt::Debug + Send {
    /// Returns whether the content of an absent page is read although `origin` is about to
    /// overwrite all of it.
    fn reads_overwritten(&self, origin: FaultOrigin) -> bool {
        let _ = origin;
        false
    }

    /// Returns whether a page that equals the block that backs it is written to the store all the
    /// same.
    fn saves_block_backed(&self) -> bool {
        false
    }
}

/// The swapper's own policy.
#[derive(Debug)]
pub struct AvoidAll;

impl IoPolicy for AvoidAll {}
