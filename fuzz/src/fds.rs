//! This process's descriptors: none may be left behind.

use std::thread;
use std::time::{Duration, Instant};

/// Time within which a thread must have closed a descriptor.
const PATIENCE: Duration = Duration::from_secs(5);

/// Number of open descriptors.
fn count() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Runs `body` and looks whether it has left a descriptor open, or closed one that is not its own.
///
/// # Panics
/// If so.
pub(crate) fn leaves_none(body: impl FnOnce()) {
    // What all threads share, made at the first signal and kept.
    sidecore::never_waits();
    let before = count();
    body();
    // An export leaves its connections to threads that close them.
    let start = Instant::now();
    while count() != before && start.elapsed() < PATIENCE {
        thread::yield_now();
    }
    assert_eq!(
        count(),
        before,
        "descriptors open after the run and before it"
    );
}
