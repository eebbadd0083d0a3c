//! A piece of memory that a device may access without asking for each buffer.

use crate::addr::{Hva, Iova};

/// Where a device's addresses lie in this process, without a translation of each: see
/// [`Dma::direct_run`](crate::Dma::direct_run).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectRun {
    /// First address.
    pub iova: Iova,
    /// Length in bytes, at least 1.
    pub len: u64,
    /// Where it lies.
    pub hva: Hva,
}
