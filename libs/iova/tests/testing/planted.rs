//! Mistakes that tests plant to prove that they would find them: under `--cfg shuttle`, and in this crate's own unit tests. In
//! any other build no trace of this is left.

/// A mistake in steps, their order or their completeness, or in orderings, which loom alone sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// An owner clears the call to look after it has read what strangers freed, not before.
    ForgetsMarks,
    /// A stranger pins a range without looking again whether it is still allocated.
    TrustsItsClaim,
    /// A stranger becomes the giver of a chunk that has one.
    GivesUnasked,
    /// A giver lets go without telling the owner to look.
    LetsGoSilently,
    /// A giver looks for other strangers' marks only where the tag speaks of some.
    TrustsPending,
    /// An owner looks for claims by loads, after it has cleared the call to look.
    LoadsClaims,
    /// A stranger marks a chunk without saying so to its owner.
    MarksSilently,
    /// A core that collects for an owner does not ask what that is pinning or freeing.
    IgnoresTheOwner,
    /// A core that collects for an owner clears the call to look meanwhile.
    ClearsTheOwnersMarks,
    /// An owner looks whether a range may be pinned or freed before others can see that it is about to do so.
    ChangesUnfenced,
    /// An owner frees without saying which range.
    FreesUnsaid,
    /// A core that finds no room leaves alone what others keep.
    SparesTheIdle,
    /// A node of the tree of gaps is still said to begin where it did when it was made.
    KeepsFirst,
}

lines::plantable!(Mistake);
