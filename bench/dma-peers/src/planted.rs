//! Mistakes that tests plant to prove that they would find them, as `iova::planted`: under `--cfg shuttle` alone.

/// A mistake in the steps of an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// A full magazine for which its depot has no room is dropped with all its ranges, as Linux 6.7 did.
    DropsOverflow,
}

lines::plantable!(Mistake);
