//! The allocation workloads, on any implementation of the traits of `iova`.

use std::collections::VecDeque;

use anyhow::Result;
use iova::{CoreAllocator, CoreId, IovaAllocator, IovaRange, Request};
use line_probe as probe;
use seeded::Random;

use crate::{PerOp, below};

/// Ranges that each core holds.
pub const WINDOW: usize = 256;

/// Operations of each core before counting begins, beside the filling of its window, and while it
/// counts.
const WARM: usize = 512;
const OPS: usize = 1024;

/// Number of pages of a range.
#[derive(Debug, Clone, Copy)]
pub enum Size {
    /// One.
    One,
    /// 1 to 32.
    UpTo32,
}

impl Size {
    fn request(self, random: u64) -> Request {
        Request::pages(match self {
            Self::One => 1,
            Self::UpTo32 => 1 + ((random >> 20) & 31),
        })
    }
}

/// The handles of all cores.
pub fn claim<A: IovaAllocator>(allocator: &A, cores: usize) -> Result<Vec<A::Core>> {
    let claim = |core| Ok(allocator.claim(CoreId(core))?);
    (0..cores).map(claim).collect()
}

/// Runs `turn` for random cores: `warm` operations of each on average, then `counted` while it
/// counts. A turn is half an operation, its end or its new beginning, so that other cores come
/// between the two.
///
/// # Errors
/// The first of `turn`.
pub fn random_turns(
    cores: usize,
    (warm, counted): (usize, usize),
    mut turn: impl FnMut(usize) -> Result<()>,
) -> Result<PerOp> {
    let mut random = Random::of_core(cores);
    probe::start();
    for at in 0..2 * (warm + counted) * cores {
        if at == 2 * warm * cores {
            probe::clear();
        }
        let core = below(&mut random, cores);
        probe::set_core(core);
        turn(core)?;
    }
    let counts = probe::stop().unwrap_or_default();
    Ok(PerOp::of(counts, (counted * cores) as u64))
}

/// `a1` and `c1`: each core replaces a random range of its window.
///
/// # Errors
/// The allocator's.
pub fn windows<A: IovaAllocator>(allocator: A, cores: usize, size: Size) -> Result<PerOp> {
    let mut handles = claim(&allocator, cores)?;
    let mut randoms: Vec<_> = (0..cores).map(Random::of_core).collect();
    let mut held: Vec<Vec<IovaRange>> = Vec::new();
    for (handle, random) in handles.iter_mut().zip(&mut randoms) {
        let fill = (0..WINDOW).map(|_| handle.alloc(size.request(random.bits())));
        held.push(fill.collect::<Result<_, _>>()?);
    }
    random_turns(cores, (WARM, OPS), |core| {
        let (handle, held) = (&mut handles[core], &mut held[core]);
        let random = randoms[core].bits();
        if held.len() == WINDOW {
            handle.free(held.swap_remove((random >> 32) as usize % WINDOW))?;
        } else {
            held.push(handle.alloc(size.request(random))?);
        }
        Ok(())
    })
}

/// `b32`: the cores of a pair allocate and free batches of 32; at most 8 batches wait. The ring
/// between them is not counted.
///
/// # Errors
/// The allocator's.
pub fn passed_on<A: IovaAllocator>(allocator: A, cores: usize) -> Result<PerOp> {
    const BATCH: usize = 32;
    let mut handles = claim(&allocator, cores)?;
    let mut rings = vec![VecDeque::new(); cores / 2];
    let mut made = 0_u64;
    let mut total = 0_u64;
    let (warm, counted) = (64, 128);
    let per_turn = random_turns(cores, (warm, counted), |core| {
        let ring: &mut VecDeque<IovaRange> = &mut rings[core / 2];
        total += 1;
        // A pair whose ring is full or empty makes no operation in this turn.
        if core % 2 == 0 && ring.len() < 8 * BATCH {
            for _ in 0..BATCH {
                ring.push_back(handles[core].alloc(Request::pages(1))?);
            }
        } else if core % 2 == 1 && !ring.is_empty() {
            for range in ring.drain(..BATCH) {
                handles[core].free(range)?;
            }
            made += u64::from(total > (2 * warm * cores) as u64) * BATCH as u64;
        }
        Ok(())
    })?;
    let scale = (counted * cores) as f64 / made as f64;
    Ok(PerOp {
        transfers: per_turn.transfers * scale,
        fetches: per_turn.fetches * scale,
        locks: per_turn.locks * scale,
    })
}

#[cfg(test)]
mod tests {
    use iova::TreeAllocator;

    use super::*;
    use crate::aperture;

    #[test]
    fn an_allocator_under_one_lock_moves_its_lock_with_nearly_each_core() {
        let tree = || TreeAllocator::new(aperture().unwrap(), 8).unwrap();
        let counted = windows(tree(), 8, Size::One).unwrap();
        assert_eq!(counted.locks, 2.0);
        // 7 of 8 turns follow another core's.
        assert!(counted.transfers > 0.8, "{counted:?}");
        assert_eq!(counted, windows(tree(), 8, Size::One).unwrap());
        let alone = TreeAllocator::new(aperture().unwrap(), 1).unwrap();
        assert_eq!(windows(alone, 1, Size::UpTo32).unwrap().transfers, 0.0);
        let passed = passed_on(tree(), 8).unwrap();
        assert_eq!(passed.locks.round(), 2.0);
    }
}
