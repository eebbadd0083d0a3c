//! What can go wrong. Every error leaves the mappings as they were, except where it says otherwise.

use address::{Iova, PhysAddr};
use iova::{Access, IovaRange};
use thiserror::Error;

/// A table that cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The format has no tables of so many levels.
    #[error("levels: {levels}, while {format} has {min} to {max}")]
    Levels {
        /// Levels asked for.
        levels: u32,
        /// The format.
        format: &'static str,
        /// Fewest levels of the format.
        min: u32,
        /// Most levels of the format.
        max: u32,
    },
    /// There is no memory for the root table.
    #[error("no memory for the root table")]
    OutOfTables,
}

/// Why a range was not mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MapError {
    /// The range reaches past what the table translates.
    #[error("iova: {range} reaches past the {width} bits of the table")]
    IovaTooWide {
        /// The range given.
        range: IovaRange,
        /// Bits of an IOVA that the table translates.
        width: u32,
    },
    /// The memory does not begin at a page.
    #[error("phys: {phys:#x} is not aligned to a page")]
    PhysMisaligned {
        /// The address given.
        phys: PhysAddr,
    },
    /// The memory reaches past what an entry can hold.
    #[error("phys: {pages} pages from {phys:#x} reach past the {width} bits of an entry")]
    PhysTooWide {
        /// The address given.
        phys: PhysAddr,
        /// Pages of the range.
        pages: u64,
        /// Bits of a physical address in an entry.
        width: u32,
    },
    /// A page of the range is mapped.
    #[error("already mapped at {iova:#x}, by a leaf of {leaf_pages} pages")]
    AlreadyMapped {
        /// First page of the range that is mapped.
        iova: Iova,
        /// Size of the leaf that maps it, in pages of 4 KiB.
        leaf_pages: u64,
    },
    /// There is no memory for the table pages that the range needs.
    #[error("no memory for {tables} table pages")]
    OutOfTables {
        /// Table pages that the range needs beyond those there are.
        tables: u64,
    },
    /// Counted only: the page is mapped to other memory, with another permission, or not counted.
    #[error("mapped at {iova:#x} to {phys:#x} with {access:?}, {count} times by counted mappings")]
    Differs {
        /// The page.
        iova: Iova,
        /// Where it is mapped to.
        phys: PhysAddr,
        /// What the device may do there.
        access: Access,
        /// How often it is mapped; 0 for a mapping that is not counted.
        count: u32,
        /// As in [`Self::CountOverflow`].
        undone: u64,
    },
    /// Counted only: the page is mapped as often as its entry can count. The caller uses another IOVA.
    #[error("mapped {max} times at {iova:#x}, which is all that its entry can count")]
    CountOverflow {
        /// The page.
        iova: Iova,
        /// Most mappings of a page in this format; 0 where it cannot count.
        max: u32,
        /// Pages from the start of the range that were mapped for a moment and unmapped again, because
        /// another core changed a page after it was checked; 0 otherwise. The caller invalidates
        /// them as after an unmap.
        undone: u64,
    },
}

/// Why a range was not unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UnmapError {
    /// The range reaches past what the table translates.
    #[error("iova: {range} reaches past the {width} bits of the table")]
    IovaTooWide {
        /// The range given.
        range: IovaRange,
        /// Bits of an IOVA that the table translates.
        width: u32,
    },
    /// A page of the range is not mapped.
    #[error("not mapped at {iova:#x}")]
    NotMapped {
        /// First page of the range that is not mapped.
        iova: Iova,
    },
    /// The range begins or ends inside a leaf of more than a page.
    #[error("{iova:#x} lies inside a leaf of {leaf_pages} pages, which the range does not cover")]
    InsideHugeLeaf {
        /// First page of the range that lies in the leaf.
        iova: Iova,
        /// Size of the leaf, in pages of 4 KiB.
        leaf_pages: u64,
    },
    /// The page's mapping is counted and the call is not, or the other way round.
    #[error("{iova:#x} is mapped {count} times by counted mappings")]
    Counted {
        /// The page.
        iova: Iova,
        /// How often it is mapped; 0 for a mapping that is not counted.
        count: u32,
    },
}
