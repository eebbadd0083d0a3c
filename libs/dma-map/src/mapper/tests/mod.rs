//! A world with a device that forgets nothing: it reaches exactly the pages that a policy leaves
//! reachable.

mod allocations;
mod errors;
mod exhausted;
mod io_map;
mod limits;
mod lookup;
mod many;
mod protection;
mod quiet;
mod reclaim;
mod threads;

use core::ops::Deref;
use core::time::Duration;

use address::PhysAddr;
use iova::{Aperture, ChunkAllocator, IovaAllocator, IovaPfn, IovaRange, TreeAllocator};

use super::*;
pub(super) use crate::testing::{ModelCore as Core, TICK, is_strict};
use crate::testing::{ModelDomain, POLICIES};

/// A domain of models, in which nothing fails.
pub(super) struct World<A: IovaAllocator = TreeAllocator>(ModelDomain<A>);

impl<A: IovaAllocator> Deref for World<A> {
    type Target = ModelDomain<A>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<A: IovaAllocator> World<A> {
    pub(super) fn of(allocator: A, policy: Policy, limits: DeviceLimits) -> Self {
        Self(ModelDomain::new(allocator, policy, limits, 512))
    }

    /// A millisecond passes.
    pub(super) fn tick(&self) {
        self.0.tick().unwrap();
    }
}

/// A space of `pages` pages for `cores` cores.
pub(super) fn space(pages: u64, cores: usize) -> TreeAllocator {
    let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(pages), &[]).unwrap();
    TreeAllocator::new(aperture, cores).unwrap()
}

/// The same, of chunks that are given back.
pub(super) fn chunks(pages: u64, cores: usize) -> ChunkAllocator {
    let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(pages), &[]).unwrap();
    ChunkAllocator::retiring(aperture, cores).unwrap()
}

pub(super) fn world(policy: Policy) -> World {
    World::of(space(1 << 16, 3), policy, DeviceLimits::default())
}

pub(super) fn policies() -> impl Iterator<Item = Policy> {
    POLICIES.into_iter().map(|(_, policy)| policy)
}

/// A page of memory.
pub(super) fn page(number: u64) -> Segment {
    Segment::new(PhysAddr::new(number << 12), 4096)
}
