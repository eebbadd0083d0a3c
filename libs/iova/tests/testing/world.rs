//! Spaces in which players play.

use crate::{Aperture, IovaPfn, IovaRange};

/// A space, and how much of it is used.
#[derive(Clone, Debug)]
pub struct World {
    /// The space.
    pub aperture: Aperture,
    /// Cores of the space.
    pub cores: usize,
    /// Most pages of a request; few are larger than a phase's
    /// [`largest`](crate::testing::Phase::largest).
    pub largest: u64,
    /// Ranges that one player has out at most.
    pub most: usize,
    /// Number of parts into which the space falls beyond those that its reserved regions make: no
    /// range crosses a border.
    pub cuts: usize,
    /// Ranges that may be refused although they are free.
    pub grain: Grain,
}

/// The unit in which an allocator keeps its space: what is free of a unit that is partly used, or
/// that a limit cuts, may be kept from a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grain {
    /// Pages of a unit that serves one size at a time, as a power of two.
    pub order: u8,
    /// Pages of a unit that is used only by requests whose limit lies above all of it.
    pub limit: u64,
}

impl Grain {
    /// A page: whatever is free is had.
    pub const PAGE: Self = Self { order: 0, limit: 1 };
    /// Of [`ChunkAllocator`](crate::ChunkAllocator): a limit that cuts a chunk may waste what lies
    /// below it there.
    pub const CHUNK: Self = Self {
        order: 0,
        limit: crate::CHUNK_PAGES,
    };
}

fn range(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).expect("a constant that fits")
}

fn aperture(first: u64, last: u64, reserved: &[IovaRange]) -> Aperture {
    Aperture::new(IovaPfn::new(first), IovaPfn::new(last), reserved).expect("a constant with pages")
}

impl World {
    /// For an allocator that hands its space out in parts, with no range across a border, and by a
    /// grain.
    pub fn in_parts(self, cuts: usize, grain: Grain) -> Self {
        Self {
            cuts,
            grain,
            ..self
        }
    }

    /// A few hundred pages around holes: nearly always exhausted.
    pub fn tiny(cores: usize) -> Self {
        let reserved = [range(100, 28), range(300, 1), range(690, 100)];
        Self {
            aperture: aperture(1, 700, &reserved),
            cores,
            largest: 40,
            most: 60,
            cuts: 0,
            grain: Grain::PAGE,
        }
    }

    /// 8,000 pages without a hole: they fall into more than a thousand pieces, and are one again,
    /// within some phases.
    pub fn small(cores: usize) -> Self {
        Self {
            aperture: aperture(1, 8000, &[]),
            cores,
            largest: 300,
            most: 8000,
            cuts: 0,
            grain: Grain::PAGE,
        }
    }

    /// 2 MiB and more at a time from 64 MiB.
    pub fn tight(cores: usize) -> Self {
        Self {
            aperture: aperture(3, 0x4000, &[range(0x1000, 5)]),
            cores,
            largest: 4096,
            most: 1500,
            cuts: 0,
            grain: Grain::PAGE,
        }
    }

    /// A 36-bit space with the interrupt window.
    pub fn roomy(cores: usize) -> Self {
        Self {
            aperture: Aperture::of_bits(36).expect("a constant that is valid"),
            cores,
            largest: 4096,
            most: 3000,
            cuts: 0,
            grain: Grain::PAGE,
        }
    }
}
