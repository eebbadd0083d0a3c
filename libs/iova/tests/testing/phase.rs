//! Phases: distributions of allocations and frees.

use super::{Random, World};
use crate::{IovaPfn, Request};

/// The last page below 4 GiB.
const LAST_32_BIT: IovaPfn = IovaPfn::new(0xf_ffff);

/// Distribution from which operations are chosen for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Phase {
    /// Operations, at most: a phase that only allocates ends when nothing more is available, one
    /// that only frees when so little is out as [`until`](Self::until) says.
    pub steps: u32,
    /// Number of allocations in 100 operations that allocate or free.
    pub share: u8,
    /// Where the share is below 40: number of pages that remain out of 100 (or of ranges, out of as
    /// many as a world allows).
    pub until: u8,
    /// Most pages of nearly all requests, at least 1.
    pub largest: u64,
    /// Limit for the addresses of ranges.
    pub limit: Limit,
    /// Choice of the range to free.
    pub victim: Victim,
}

/// Limit for the addresses of a phase's ranges.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// Anywhere.
    Whole,
    /// Up to this page.
    Upto(IovaPfn),
    /// Another limit for each request.
    Random,
    /// The lower half of the aperture.
    Half,
    /// Below 4 GiB.
    Below4G,
}

/// Choice of the range that a phase frees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Victim {
    /// Any.
    Any,
    /// The lowest of eight.
    LowestOfEight,
    /// The highest.
    Highest,
    /// The one that was allocated first.
    Oldest,
    /// One after the other, up or down from a random place.
    Stretch,
}

impl Victim {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Any,
        Self::LowestOfEight,
        Self::Highest,
        Self::Oldest,
        Self::Stretch,
    ];

    /// The first in half of all phases: what others leave is best found by it.
    fn random(random: &mut Random) -> Self {
        match random.one_in(2) {
            true => Self::Any,
            false => Self::ALL[random.index(Self::ALL.len())],
        }
    }
}

impl Limit {
    /// A limit at a random page for half of all phases: what lies below is filled to the last page,
    /// what lies above stays in pieces.
    fn random(random: &mut Random, world: &World) -> Self {
        let (first, last) = (world.aperture.first().raw(), world.aperture.last().raw());
        match random.below(8) {
            0..4 => {
                // Low ones more often: a part that is small is filled and cleared soon.
                let part = (last - first) >> (2 * random.below(2));
                Self::Upto(IovaPfn::new(first + random.below(part + 1)))
            }
            4 => Self::Random,
            5 => [Self::Half, Self::Below4G][random.index(2)],
            _ => Self::Whole,
        }
    }
}

impl Phase {
    /// A phase of 50 to 650 operations, nearly all on ranges of up to 8 pages.
    pub fn random(random: &mut Random, world: &World) -> Self {
        let largest = match random.below(16) {
            0..6 => 1,
            6..15 => 1 + random.below(8),
            _ => 1 + random.below(world.largest),
        };
        Self {
            steps: 50 + random.below(600) as u32,
            share: [80, 80, 80, 50, 50, 50, 45, 45, 45, 20][random.index(10)],
            until: random.below(60) as u8,
            largest: largest.min(world.largest),
            limit: Limit::random(random, world),
            victim: Victim::random(random),
        }
    }

    /// The next allocation. One request in 256 may be as large as the world has them, one in 16 is
    /// aligned to more than its size.
    pub fn request(&self, random: &mut Random, world: &World) -> Request {
        let largest = match random.one_in(256) {
            true => world.largest,
            false => self.largest,
        };
        let align_order = match random.one_in(16) {
            true => random.below(11) as u8,
            false => 0,
        };
        let (first, last) = (world.aperture.first().raw(), world.aperture.last().raw());
        let limit = match self.limit {
            Limit::Whole => IovaPfn::MAX,
            Limit::Upto(limit) => limit,
            Limit::Random => IovaPfn::new(first + random.below(last - first + 1)),
            Limit::Half => IovaPfn::new(first + (last - first) / 2),
            Limit::Below4G => LAST_32_BIT,
        };
        Request::pages(1 + random.below(largest))
            .aligned(align_order)
            .at_most(limit)
    }
}
