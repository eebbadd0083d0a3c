//! Mistakes that tests under shuttle plant to prove that they would find them. Under `--cfg shuttle` alone: in any other
//! build no trace of this is left. (Those of combining cores: [`Mutant`](crate::invalidate::Mutant).)

use std::cell::Cell;

/// A mistake in the order or the completeness of steps. (Mistakes in orderings shuttle cannot see.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// A flush notes what cores have unmapped after its invalidation, not before.
    NotesLate,
    /// An owner takes an idle mapping back by a look and a store, as if nobody could expire it in between.
    ReusesByStore,
    /// A flush passes by cores of which somebody tears down idle mappings, as a tick does.
    PassesByTheBusy,
    /// An owner takes idle mappings, to tear them down, without the lock that says so.
    TakesUnlocked,
    /// A core that is dropped gives up its numbers before what they stand for is counted among the orphans.
    SettlesFirst,
}

std::thread_local! {
    // Of the real thread on which a test runs all of its model's.
    static PLANTED: Cell<Option<Mistake>> = const { Cell::new(None) };
}

/// From here on this mistake is made by all mappers that are used on this thread; none with `None`.
pub fn plant(mistake: Option<Mistake>) {
    PLANTED.set(mistake);
}

pub(crate) fn has(mistake: Mistake) -> bool {
    PLANTED.get() == Some(mistake)
}
