//! Mistakes that models plant to prove that they would find them. Under `--cfg shuttle`, and `--cfg loom` in this crate's own
//! tests: in any other build no trace of this is left.

use std::boxed::Box;

use lines::Lock;

/// A mistake in the order or the completeness of steps, or in orderings, which loom alone sees.
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
    /// A table is released before its invalidation.
    ReleasesEarly,
    /// A table is released while a core walks it.
    IgnoresWalks,
    /// A core that is dropped gives up its numbers before what they stand for is counted among the orphans.
    SettlesFirst,
    /// A core that combines returns as soon as it hears that its batch was submitted.
    AnswersEarly,
    /// A core that combines takes the batch before its own for its own.
    JoinsLate,
    /// A core that waits for a batch to be submitted does so for ever.
    NeverLeaves,
    /// A core's post in a generation orders nothing.
    RelaxedPost,
    /// A core leaves its range without a look whether its generation is still open.
    PutsLate,
}

lines::plantable!(Mistake);

/// A lock that nobody else has.
pub(crate) fn nobodys<T: Default>() -> &'static Lock<T> {
    Box::leak(Box::new(Lock::new(T::default())))
}
