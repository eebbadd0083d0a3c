//! A split ring in the hands of a hostile driver. What the input says, and what must hold, is the
//! same for both layouts: see `ring`.

/// The body.
///
/// # Panics
/// If the ring breaks one of its promises.
pub fn run(data: &[u8]) {
    crate::ring::run(data, false);
}

/// Valid traffic.
pub fn seeds() -> Vec<Vec<u8>> {
    crate::ring::seeds(false)
}
