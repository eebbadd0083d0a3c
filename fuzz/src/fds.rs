//! This process's descriptors: none may be left behind.

/// How many are open.
fn count() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Runs `body` and looks whether it has left a descriptor open, or closed one that is not its own.
///
/// # Panics
/// If so.
pub(crate) fn leaves_none(body: impl FnOnce()) {
    let before = count();
    body();
    assert_eq!(
        count(),
        before,
        "descriptors open after the run and before it"
    );
}
