//! Errors of allocators. Every error leaves the allocator as it was.

use core::fmt;

use thiserror::Error;

use crate::{CoreId, IovaPfn, IovaRange};

/// Reason why no range was allocated.
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
        "no {pages} free pages at or below page {last:#x}; {asked} other cores were asked to give \
         back what they cache",
        last = last.raw()
    )]
    Exhausted {
        /// Pages asked for.
        pages: u64,
        /// Highest page that the request or the aperture allowed.
        last: IovaPfn,
        /// Cores that may hold free ranges only they can return (those in their free lists, and
        /// those of their chunks that others freed under a pin); they do at their next operation or
        /// when they park. This core itself is one of them where it has not searched everywhere
        /// yet:
        /// it does at latest at the attempt whose number is that of the chunks in use. With 0
        /// another attempt is useless until something is freed (but see
        /// [`Request::aligned`](crate::Request::aligned)).
        asked: usize,
    },
}

/// Reason why a range was not freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FreeError {
    /// Some page lies outside the aperture, or in a reserved region: no range of this allocator.
    #[error("{range} lies outside the space of this allocator")]
    Outside {
        /// The range given.
        range: IovaRange,
    },
    /// Nothing that starts there is allocated: never was, freed before, or being freed by another
    /// core.
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

/// Reason why a core's handle was not given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ClaimError {
    /// The core has its handle already.
    #[error("the handle of {core} is in use")]
    InUse {
        /// The core asked for.
        core: CoreId,
    },
    /// More cores than the allocator was made for.
    #[error("{core} does not exist: the allocator was made for {cores} core{}", plural(*cores))]
    NoSuchCore {
        /// The core asked for.
        core: CoreId,
        /// Number of cores.
        cores: usize,
    },
    /// Every core's handle is in use.
    #[error("{cores} of {cores} handle{} in use", if *cores == 1 { " is" } else { "s are" })]
    NoneLeft {
        /// Number of cores.
        cores: usize,
    },
}

/// Reason why an allocator cannot be made over this space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ApertureError {
    /// No space has so many bits with at least a page in it besides page 0: there are 13 to 64.
    #[error("an address space of {bits} bits: there must be 13 to 64")]
    Bits {
        /// Bits asked for.
        bits: u32,
    },
    /// The first page lies above the last, or nothing but reserved pages is between them.
    #[error("{}", NoPage(*first, *last))]
    Empty {
        /// First page of the aperture.
        first: IovaPfn,
        /// Last page of the aperture.
        last: IovaPfn,
    },
    /// An allocator needs at least one core and at most [`MAX_CORES`](crate::MAX_CORES).
    #[error("{cores} core{}: there must be 1 to {}", plural(*cores), crate::MAX_CORES)]
    Cores {
        /// Cores asked for.
        cores: usize,
    },
}

/// Refusal of one range of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("range {index} of the list")]
pub struct FreeManyError {
    /// Its index in the list: the ranges before it are freed, those after it are as they were.
    pub index: usize,
    /// The reason.
    #[source]
    pub source: FreeError,
}

/// Refusal of a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{claimed} cores still have their handles")]
pub struct ResetError {
    /// Handles in use.
    pub claimed: usize,
}

/// Plural ending of a noun after a number.
fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Message for a space without a page.
struct NoPage(IovaPfn, IovaPfn);

impl fmt::Display for NoPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (self.0.raw(), self.1.raw());
        match first > last {
            true => write!(
                f,
                "the first page, {first:#x}, lies above the last, {last:#x}"
            ),
            false => write!(f, "all pages from {first:#x} to {last:#x} are reserved"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_counts_one_as_one() {
        let core = CoreId(1);
        for (error, says) in [
            (ClaimError::NoSuchCore { core, cores: 1 }, "made for 1 core"),
            (
                ClaimError::NoSuchCore { core, cores: 2 },
                "made for 2 cores",
            ),
            (ClaimError::NoneLeft { cores: 1 }, "1 of 1 handle is in use"),
            (
                ClaimError::NoneLeft { cores: 3 },
                "3 of 3 handles are in use",
            ),
        ] {
            assert!(error.to_string().ends_with(says), "{error}");
        }
        let cores = ApertureError::Cores { cores: 0 };
        assert!(cores.to_string().starts_with("0 cores: "), "{cores}");
    }

    #[test]
    fn a_space_without_a_page_says_whether_its_ends_or_its_reservations_are_wrong() {
        let pfn = IovaPfn::new;
        let empty = |first, last| ApertureError::Empty {
            first: pfn(first),
            last: pfn(last),
        };
        let crossed = empty(1, 0).to_string();
        assert_eq!(crossed, "the first page, 0x1, lies above the last, 0x0");
        let reserved = empty(1, 0x20).to_string();
        assert_eq!(reserved, "all pages from 0x1 to 0x20 are reserved");
    }
}
