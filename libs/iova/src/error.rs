//! What can go wrong. Every error leaves the allocator as it was.

use thiserror::Error;

use crate::{CoreId, IovaPfn, IovaRange};

/// Why no range was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AllocError {
    /// Zero pages, or an alignment or size that no range of the space can have.
    #[error("no range of {pages} pages aligned to 2^{align_order} pages exists")]
    Impossible {
        /// Pages asked for.
        pages: u64,
        /// Alignment asked for, as a power of two of pages.
        align_order: u8,
    },
    /// Nothing that fits is free: not in this core's caches, not in those that could be drained.
    #[error(
        "no {pages} free pages at or below page {last:#x}; {asked} other cores were asked to give back what they cache",
        last = last.raw()
    )]
    Exhausted {
        /// Pages asked for.
        pages: u64,
        /// Highest page that the request or the aperture allowed.
        last: IovaPfn,
        /// Cores that may hold free ranges only they can return (those in their free lists, and those of their chunks that
        /// others freed under a pin); they do at their next operation or when they park. This core itself is one of them where it has not looked everywhere yet: it does at latest at
        /// the attempt whose number is that of the chunks in use. With 0 another attempt is useless until something is freed (but see [`Request::aligned`](crate::Request::aligned)).
        asked: usize,
    },
}

/// Why a range was not taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FreeError {
    /// Some page lies outside the aperture, or in a reserved region: no range of this allocator.
    #[error("{range} lies outside the space of this allocator")]
    Outside {
        /// The range given.
        range: IovaRange,
    },
    /// Nothing that starts there is allocated: never was, freed before, or being freed by another core.
    #[error("{range} is not allocated")]
    NotAllocated {
        /// The range given.
        range: IovaRange,
    },
    /// A range that starts or lies there is allocated, with another size.
    #[error("{range} is not what was allocated there")]
    Mismatch {
        /// The range given.
        range: IovaRange,
    },
}

/// Why a core's handle was not given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ClaimError {
    /// The core has its handle already.
    #[error("the handle of {core} is in use")]
    InUse {
        /// The core asked for.
        core: CoreId,
    },
    /// More cores than the allocator was made for.
    #[error("{core} does not exist: the allocator was made for {cores} cores")]
    NoSuchCore {
        /// The core asked for.
        core: CoreId,
        /// How many there are.
        cores: usize,
    },
    /// Every core's handle is in use.
    #[error("all {cores} handles are in use")]
    NoneLeft {
        /// How many there are.
        cores: usize,
    },
}

/// Why an allocator cannot be made over this space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ApertureError {
    /// The first page lies above the last, or nothing but reserved pages is between them.
    #[error("no page is usable between {first:#x} and {last:#x}", first = first.raw(), last = last.raw())]
    Empty {
        /// First page of the aperture.
        first: IovaPfn,
        /// Last page of the aperture.
        last: IovaPfn,
    },
    /// An allocator needs at least one core and at most [`MAX_CORES`](crate::MAX_CORES).
    #[error("{cores} cores: there must be 1 to {}", crate::MAX_CORES)]
    Cores {
        /// Cores asked for.
        cores: usize,
    },
}

/// A reset was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{claimed} cores still have their handles")]
pub struct ResetError {
    /// Handles in use.
    pub claimed: usize,
}
