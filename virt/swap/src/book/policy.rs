//! Seam for measurements: reads and writes that the swapper avoids, and that a control does not.
//!
//! A program for measurements supplies another policy than [`AvoidAll`], to count what is
//! avoided: [`Counts`](super::Counts) says what was done, whichever policy decided it. No policy
//! can lose content: either answer of each function is right for the guest.

use std::fmt;

/// Origin of a page-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultOrigin {
    /// A fault of a vCPU.
    Vcpu,
    /// An access of a device, or a disk's request.
    Device,
}

/// Decides about reads and writes that need not be.
pub trait IoPolicy: fmt::Debug + Send {
    /// Whether the content of an absent page is read although `origin` is about to overwrite all of
    /// it.
    fn reads_overwritten(&self, origin: FaultOrigin) -> bool {
        let _ = origin;
        false
    }

    /// Whether a page that equals the block that backs it is written to the store all the same.
    fn saves_block_backed(&self) -> bool {
        false
    }
}

/// The swapper's own policy.
#[derive(Debug)]
pub struct AvoidAll;

impl IoPolicy for AvoidAll {}
