//! IOVA allocators: any sequence of phases (`iova::testing`), beside a map of what is out.
//!
//! The first byte chooses the allocator, the second the space and how many cores work in turn; then
//! phases of ten bytes each: share of allocations, largest size, limit, what is freed, how many
//! operations, and the seed by which these are chosen. So a mutation changes the history of a
//! space, not one operation among thousands. In the end everything is freed, and all of the space
//! is had again.
use dma_peers::{
    EiovaRAllocator, IdentityAllocator, LinearAllocator, MagazineAllocator, MagazineConfig,
    SlabAllocator, SlabConfig,
};
use iova::testing::{Grain, Limit, Phase, Player, Victim, World};
use iova::*;

use crate::{Input, Script};

/// Operations of one input, about.
const OPERATIONS: u64 = 20_000;

fn phase(input: &mut Input<'_>, world: &World) -> Phase {
    let (share, largest, limit, victim) = (input.u8(), input.u8(), input.u8(), input.u8());
    let steps = input.u8();
    let (first, last) = (world.aperture.first().raw(), world.aperture.last().raw());
    let part = u64::from(input.u8());
    Phase {
        steps: 1 + 4 * u32::from(steps),
        share: share % 101,
        until: 0,
        // Small ones mostly.
        largest: match largest {
            0..=223 => 1 + u64::from(largest % 8),
            _ => world.largest,
        },
        limit: match limit % 8 {
            0..4 => Limit::Upto(IovaPfn::new(first + (last - first) / 256 * part)),
            4 => Limit::Random,
            5 => Limit::Half,
            6 => Limit::Below4G,
            _ => Limit::Whole,
        },
        victim: Victim::ALL[usize::from(victim) % Victim::ALL.len()],
    }
}

fn play<A: IovaAllocator>(
    make: impl Fn(Aperture, usize) -> Result<A, ApertureError>,
    world: &World,
    mut input: Input<'_>,
) {
    let space = make(world.aperture.clone(), world.cores).expect("few cores and such a space");
    let mut player = Player::of_all_cores(&space, world, 0);
    while !input.is_empty() && player.operations() < OPERATIONS {
        let phase = phase(&mut input, world);
        player.run_seeded(&phase, u64::from(input.u32()));
    }
    player.finish();
}

/// The body.
///
/// # Panics
/// If an allocator does anything that the model does not.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (allocator, space) = (input.u8(), input.u8());
    let cores = 1 + usize::from(space >> 6);
    let world = match space % 4 {
        0 => World::small(cores),
        1 => World::tiny(cores),
        2 => World::tight(cores),
        _ => World::roomy(cores),
    };
    let chunks = |cuts| world.clone().in_parts(cuts, Grain::CHUNK);
    match allocator % 9 {
        0 => play(TreeAllocator::new, &world, input),
        1 => play(MagazineAllocator::new, &world, input),
        2 => {
            let config = MagazineConfig { size: 3, depot: 1 };
            let make = |a, cores| MagazineAllocator::with_config(a, cores, config);
            play(make, &world, input);
        }
        3 => play(ChunkAllocator::retiring, &chunks(3), input),
        4 => {
            // One chunk below each limit: the tree has nearly everything.
            let config = ChunkConfig {
                zone_chunks: 1,
                ..ChunkConfig::default()
            };
            let make = |a, cores| ChunkAllocator::with_config(a, cores, config);
            play(make, &chunks(26), input);
        }
        5 => {
            let config = SlabConfig {
                arena_pages: u64::MAX,
                list: 8,
            };
            let make = |a, cores| SlabAllocator::with_config(a, cores, config);
            play(make, &world, input);
        }
        6 => play(
            |a, cores| IdentityAllocator::new(a, cores, 46),
            &world,
            input,
        ),
        7 => play(LinearAllocator::new, &world, input),
        _ => play(EiovaRAllocator::new, &world, input),
    }
}

/// For every allocator: a space that fills, falls to pieces, is filled again below a limit, and
/// falls to pieces there.
pub fn seeds() -> Vec<Vec<u8>> {
    const ANY: u8 = 0;
    const LOWEST_OF_EIGHT: u8 = 1;
    const STRETCH: u8 = 4;
    const UPTO: u8 = 0;
    const WHOLE: u8 = 7;
    (0..18u8)
        .map(|number| {
            let mut script = Script::new();
            let cores = (number % 3) << 6;
            script.u8(number % 9).u8(cores | ((number / 9) * 3));
            for turn in 0..6u8 {
                for (share, limit, victim, part) in [
                    (80, WHOLE, ANY, 0),
                    (20, WHOLE, ANY, 0),
                    (80, UPTO, LOWEST_OF_EIGHT, 20 + 40 * turn),
                    (
                        45,
                        UPTO,
                        [ANY, STRETCH][usize::from(turn % 2)],
                        20 + 40 * turn,
                    ),
                ] {
                    script
                        .u8(share)
                        .u8(turn)
                        .u8(limit)
                        .u8(victim)
                        .u8(200)
                        .u8(part);
                    script.u32(u32::from(number) << 8 | u32::from(turn));
                }
            }
            script.end()
        })
        .collect()
}
