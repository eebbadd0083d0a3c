//! Results for a component that follows the mappings of a requester, to repeat them elsewhere: in
//! an IOMMU of the host, for an assigned device ([`Iommu::attachment`](crate::Iommu::attachment),
//! [`Iommu::next_mapping`](crate::Iommu::next_mapping)).

use crate::addr::{Gpa, Iova};
use crate::lease::Budget;

/// Attachment of a requester: the way that its accesses take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Attachment {
    /// Translation is off: addresses are guest-physical.
    Off,
    /// No context, or a malformed one: each access faults.
    Absent,
    /// A context without tables: addresses are guest-physical.
    PassThrough,
    /// Tables of this domain.
    Domain(u32),
}

/// A mapping, or the part of one that lies in the range asked for.
///
/// It is at most one leaf of the tables. Two mappings that continue each other are two results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Found {
    /// First address.
    pub iova: Iova,
    /// Address to which that translates.
    pub gpa: Gpa,
    /// Bytes, at least 1.
    pub len: u64,
    /// The device may read.
    pub can_read: bool,
    /// The device may write. One of the two is set.
    pub can_write: bool,
}

/// Result of one search for a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Next {
    /// The first mapping. Nothing was mapped between the start of the search and its first address.
    Found(Found),
    /// Nothing is mapped up to the end of the range.
    None,
    /// Nothing is mapped up to, not including, this address. Continue from here: the budget is
    /// spent, or a table that is needed next is absent (the next search then returns
    /// [`Stop::Pending`](crate::Stop::Pending)).
    Budget(Iova),
}

impl Budget {
    /// Cost of the read of one table entry, in ns: a sixth of a walk, rounded up.
    pub const ENTRY: u64 = 5;
}
