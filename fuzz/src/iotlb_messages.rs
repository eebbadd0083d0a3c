//! Random translations of another program's IOMMU: updates, invalidations, answers to misses,
//! between the requests and rings of [`export_session`](crate::export_session), whose harness and
//! invariants are used. Besides, the number of misses open at a time stays within its bound for all
//! requests of the guest and all answers of the front end.

use std::sync::atomic::Ordering;

use crate::export_session::{MISSES, run_translated, translated_seeds};

/// Misses that front ends have been sent, ever. Inputs that lead to none test nothing.
pub fn misses() -> u64 {
    MISSES.load(Ordering::Relaxed)
}

/// The body.
///
/// # Panics
/// If anything of a front end is left, if the export panics, or asks for too much.
pub fn run(data: &[u8]) {
    run_translated(data);
}

/// Devices of each kind behind an IOMMU, and what may happen to their translations.
pub fn seeds() -> Vec<Vec<u8>> {
    translated_seeds()
}
