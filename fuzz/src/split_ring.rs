//! Fuzz target of a split ring with a hostile driver. The input's format and the checked properties
//! are those of both layouts: see `ring`.

/// Runs the target on one input.
///
/// # Panics
/// If the ring breaks one of its guarantees.
pub fn run(data: &[u8]) {
    crate::ring::run(data, false);
}

/// Returns the seeds of the corpus: valid traffic.
pub fn seeds() -> Vec<Vec<u8>> {
    crate::ring::seeds(false)
}
