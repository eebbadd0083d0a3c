//! Errors of mapping and unmapping. Errors leave mappings, tables and allocators as they were,
//! except where they say otherwise.

use core::convert::Infallible;

use address::{Iova, PhysAddr};
use iova::{AllocError, Aperture, FreeError, IovaPfn, IovaRange};
use thiserror::Error;

use crate::invalidate::InvalidateError;
use crate::table;

/// Reason why memory was not mapped. `E` is the back end's own error
/// ([`IoMap::Error`](crate::IoMap::Error)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DmaMapError<E = Infallible> {
    /// There is no segment.
    #[error("the list has no segment")]
    NoSegments,
    /// A segment has no bytes.
    #[error("segment {index} at {phys:#x} is empty")]
    Empty {
        /// Its place in the list.
        index: usize,
        /// Its address.
        phys: PhysAddr,
    },
    /// A segment, or the list, is longer than the address space.
    #[error("segment {index}, {len:#x} bytes at {phys:#x}, reaches past the address space")]
    Wraps {
        /// Its place in the list.
        index: usize,
        /// Its address.
        phys: PhysAddr,
        /// Its length in bytes.
        len: u64,
    },
    /// The device cannot take so much in one element, or not without crossing its boundary.
    #[error("{len:#x} bytes in one element, the device takes {max:#x}")]
    TooLong {
        /// Bytes asked for.
        len: u64,
        /// Most bytes the device takes.
        max: u64,
    },
    /// Two segments do not meet at a page boundary, so that they have no contiguous IOVA.
    /// `map_list` takes them.
    #[error("segments {index} and {} do not meet at a page boundary", index + 1)]
    Gap {
        /// Place of the first of the two.
        index: usize,
    },
    /// No IOVA is free.
    #[error("no iova")]
    Alloc(#[source] AllocError),
    /// The table, or the kernel that has it, refused.
    #[error("no entry")]
    Table(#[source] table::MapError<E>),
    /// The memory lies above what the device can address, and nothing bounces it.
    #[error("{phys:#x} lies above {last:#x}, the last byte that the device can address")]
    Unaddressable {
        /// First byte of the memory.
        phys: PhysAddr,
        /// Last byte the device can address.
        last: u64,
    },
    /// There is no memory for the device's list.
    #[error("no memory for {elements} elements of the device's list")]
    OutOfMemory {
        /// Most elements that the list may have.
        elements: usize,
    },
    /// There is no room among the mappings that wait for an invalidation, and the invalidation
    /// failed.
    #[error("no invalidation")]
    Invalidation(#[source] InvalidateError),
}

/// Reason why a mapping was not ended, or not completely. `E` as in [`DmaMapError`].
///
/// Under a policy that shares, the caller's use has ended where this is `NotAllocated`, `Partial`
/// or `Table`: it ends before anything is pinned. If it was the last, what is mapped there is found
/// by no map any more, and ends with the next unmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DmaUnmapError<E = Infallible> {
    /// No bytes, or past the end of the space.
    #[error("{len:#x} bytes at {iova:#x} are no range")]
    NoRange {
        /// First byte given.
        iova: Iova,
        /// Bytes given.
        len: u64,
    },
    /// The mapping was made by another mapper. It is still mapped there.
    #[error("{iova:#x} belongs to another domain")]
    OtherDomain {
        /// First byte of the mapping.
        iova: Iova,
    },
    /// Nothing of that extent is mapped there: never was, is not any more, or is being unmapped by
    /// another core.
    #[error("no such mapping")]
    NotAllocated(#[source] FreeError),
    /// A part of what was mapped there was given: its pages go on to `last`.
    #[error("{range} is a part of the mapping that ends at page {last:#x}", last = last.raw())]
    Partial {
        /// Pages given.
        range: IovaRange,
        /// Last page of the mapping.
        last: IovaPfn,
    },
    /// Allocated there, but not all of it is mapped: more was given than the mapping has, within
    /// what the allocator rounded it up to.
    #[error("the table does not have it")]
    Table(#[source] table::UnmapError<E>),
    /// The mapping waits for an earlier invalidation which failed again; it lives, and
    /// [`unmap_at`](super::MapperCore::unmap_at) may try again.
    #[error("{iova:#x} is still mapped: no room among the mappings that wait for an invalidation")]
    NoRoom {
        /// First byte of the mapping.
        iova: Iova,
        /// The failed invalidation.
        #[source]
        source: InvalidateError,
    },
    /// The entries are cleared, but devices may still use cached translations: the invalidation
    /// failed. The IOVA stays out of circulation until a later one succeeds, and counts as stale
    /// until then.
    #[error("{iova:#x} is unmapped and may still be used by the device")]
    NotInvalidated {
        /// First byte of the mapping.
        iova: Iova,
        /// The failed invalidation.
        #[source]
        source: InvalidateError,
    },
}

/// Reason why not all mappings of a list were ended, or not completely. `E` as in [`DmaMapError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("mapping {index} of the list")]
pub struct UnmapManyError<E = Infallible> {
    /// Its place in the list as it was given: those before it have ended.
    pub index: usize,
    /// The reason.
    #[source]
    pub source: DmaUnmapError<E>,
}

/// Reason why a mapper was not made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DomainError {
    /// The device cannot address a single page of the allocator's space.
    #[error(
        "the device addresses up to {last:#x}, the space begins at page {first:#x}",
        first = aperture.first().raw()
    )]
    NothingAddressable {
        /// Last byte that the device addresses.
        last: u64,
        /// The allocator's space.
        aperture: Aperture,
    },
    /// The queue of unmapped mappings needs at least one place and at most 65,536.
    #[error("a queue of {entries} entries: there must be 1 to 65536")]
    Entries {
        /// Places asked for.
        entries: usize,
    },
}
