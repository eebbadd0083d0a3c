//! A piece of memory that a device may access without asking for each buffer.

use crate::addr::{Hva, Iova};

/// Run of a device's addresses that is contiguous in this process, so that its addresses need no
/// translation each: see [`Dma::direct_run`](crate::Dma::direct_run).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectRun {
    /// First address.
    pub iova: Iova,
    /// Length in bytes, at least 1.
    pub len: u64,
    /// Its address in this process.
    pub hva: Hva,
}
