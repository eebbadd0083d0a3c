//! Mistakes that tests plant to prove that they would find them, as `iova::planted`: under `--cfg shuttle` alone.

use std::cell::Cell;

/// A mistake in the steps of an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// A full magazine for which its depot has no room is dropped with all its ranges, as Linux 6.7 did.
    DropsOverflow,
}

std::thread_local! {
    // Of the real thread on which a test runs all of its model's.
    static PLANTED: Cell<Option<Mistake>> = const { Cell::new(None) };
}

/// From here on this mistake is made by all allocators that are used on this thread; none with `None`.
pub fn plant(mistake: Option<Mistake>) {
    PLANTED.set(mistake);
}

pub(crate) fn has(mistake: Mistake) -> bool {
    PLANTED.get() == Some(mistake)
}
