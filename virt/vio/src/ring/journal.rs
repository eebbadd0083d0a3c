//! Position of a ring, and the journal that preserves its requests in flight when the process is
//! killed.
//!
//! A [`Journal`] is called in an order that its implementer (`vhost_user::inflight`) relies on:
//!
//! ```text
//! advance   begin                                     before the device can run the request
//! stage     —
//! publish   every window of the batch is made current; nothing below can stop half-way
//!           complete, for each request of the batch
//!           advance
//!           split: used.idx is stored (the driver ignores elements that lie there since stage)
//!           packed: used descriptors are stored, the first one's flags last
//!           commit
//! ```
//! So a batch is opened and closed inside one `publish`, and chains may be taken at any time.
//! Batches with one used entry for several requests (IN_ORDER) are not written while there is a
//! journal: its successor would take the skipped ones for unreturned.

use super::chain::RawDescriptor;

/// The journal cannot take a request: its region is too small, or the same head is in flight
/// already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request cannot be recorded as in flight")]
pub struct JournalError;

/// Remembers, outside this process, which chains were taken and not returned.
///
/// Called by the ring's owner. Each method's stores have been executed when it returns (against
/// SIGKILL the order of instructions is enough).
pub trait Journal: Send {
    /// A chain was taken, in the ring's order, and will be run. Answers a number that names it in
    /// [`complete`](Journal::complete).
    ///
    /// Split: `head` is the index of its first descriptor, `descs` is empty (they stay in the
    /// table). Packed: `head` is the buffer id, `descs` its ring descriptors, at least one, with
    /// the buffer id in `next`.
    fn begin(&mut self, head: u16, descs: &[RawDescriptor]) -> Result<u16, JournalError>;

    /// A request joins the batch that is about to be published.
    fn complete(&mut self, head: u16, slot: u16);

    /// The batch is closed, and the ring will be written next.
    fn advance(&mut self);

    /// The batch was published: forget it.
    fn commit(&mut self);
}

/// Start of a ring, for [`Ring::start`](super::Ring::start). Positions of packed rings are
/// {index, wrap counter}.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RingStart {
    /// As after a reset of the device: split at 0, packed at 0 with wrap counters of 1.
    Fresh,
    /// A split ring taken over.
    Split {
        /// The available entry to take next, modulo 2^16.
        next_avail: u16,
        /// The used ring's index, modulo 2^16.
        next_used: u16,
        /// Heads taken by a predecessor and not returned, to be taken again first, in this order.
        /// They are in the journal already.
        replay: Vec<u16>,
    },
    /// A packed ring taken over.
    Packed {
        /// The descriptor to take next.
        avail: (u16, bool),
        /// Position of the next used descriptor.
        used: (u16, bool),
        /// Chains taken by a predecessor and not returned: the journal's slot, and the ring
        /// descriptors as they were, with the buffer id in `next` (the last one's counts). They are
        /// checked as if just read.
        replay: Vec<(u16, Vec<RawDescriptor>)>,
    },
}

/// Position of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingPosition {
    /// Split, modulo 2^16.
    Split {
        /// The available entry to take next.
        next_avail: u16,
        /// The used entry to publish next.
        next_used: u16,
    },
    /// Packed, {index, wrap counter}.
    Packed {
        /// The descriptor to take next.
        avail: (u16, bool),
        /// Position of the next used descriptor.
        used: (u16, bool),
    },
}

impl RingPosition {
    /// Returns the positions of the next chain to take and the next used entry to write, each in a
    /// word: of a packed ring with the wrap counter in bit 15.
    pub(super) fn words(self) -> (u16, u16) {
        let word = |(idx, wrap)| idx | u16::from(wrap) << 15;
        match self {
            Self::Split {
                next_avail,
                next_used,
            } => (next_avail, next_used),
            Self::Packed { avail, used } => (word(avail), word(used)),
        }
    }
}

/// Reason why a ring cannot begin at a position. The ring is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// A position of the other layout.
    #[error("a start of the other ring layout")]
    Layout,
    /// An index outside the ring.
    #[error("position {0} outside the ring")]
    Position(u16),
    /// More chains (or descriptors) to replay than the ring holds, a head twice or outside the
    /// table, or a chain without descriptors.
    #[error("impossible chains to replay")]
    Replay,
    /// Something was taken or staged already.
    #[error("the ring is in use")]
    InUse,
}

/// Journal of tests that has room for nothing.
#[cfg(test)]
pub(crate) struct FullJournal;

#[cfg(test)]
impl Journal for FullJournal {
    fn begin(&mut self, _head: u16, _descs: &[RawDescriptor]) -> Result<u16, JournalError> {
        Err(JournalError)
    }

    fn complete(&mut self, _head: u16, _slot: u16) {}

    fn advance(&mut self) {}

    fn commit(&mut self) {}
}
