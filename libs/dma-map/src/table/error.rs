//! Errors of tables and other back ends. Every error leaves the mappings as they were, except where
//! it says otherwise.

use core::convert::Infallible;

use address::{Iova, PhysAddr};
use iova::IovaRange;
use thiserror::Error;

/// Reason why a table cannot be made.
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

/// Reason why a range was not mapped. `E` is the back end's own error
/// ([`IoMap::Error`](super::IoMap::Error)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MapError<E = Infallible> {
    /// The range reaches past the addresses that the table translates.
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
    /// The memory reaches past the addresses that an entry can hold.
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
    /// The range needs more table pages than one call adds: it is to be mapped in parts. None was
    /// taken.
    #[error("{tables} table pages are needed, of which one call adds {max} at most")]
    TooManyTables {
        /// Table pages that the range needs beyond those there are.
        tables: u64,
        /// Most that one call adds.
        max: u64,
    },
    /// The back end has no room for another mapping, and would have if others went: a limit on
    /// their number or on pinned memory. A mapper gives back its idle mappings, and tries once
    /// more.
    #[error("the back end is full")]
    Full(#[source] E),
    /// The back end refused.
    #[error("the back end refused")]
    Backend(#[source] E),
}

/// Reason why a range was not unmapped. `E` as in [`MapError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UnmapError<E = Infallible> {
    /// The range reaches past the addresses that the table translates.
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
    /// The back end refused.
    #[error("the back end refused")]
    Backend(#[source] E),
}
