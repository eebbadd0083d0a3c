//! Tests that phases find the mistakes they are for: `tests/mutants/iova/keeps-first`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::vec::Vec;

use super::*;
use crate::*;

const SEEDS: u64 = 20;
const OPERATIONS: u64 = 100_000;

/// After how many operations a player meets a wrong answer, if it does.
fn found_after<A: IovaAllocator>(space: A, world: &World, seed: u64) -> Option<u64> {
    let mut player = Player::of_all_cores(&space, world, seed);
    let result = catch_unwind(AssertUnwindSafe(|| player.play(OPERATIONS)));
    let operations = player.operations();
    // Handles that are dropped would meet the fault again.
    core::mem::forget(player);
    core::mem::forget(space);
    result.err().map(|_| operations)
}

/// A wrong tree, in which searches go to the wrong leaf, is to be found with every seed. It takes a
/// tree of several nodes, and a lowest gap of one of them that goes, or comes.
#[test]
fn phases_find_nothing_wrong_with_a_tree() {
    let world = World::small(2);
    let found: Vec<_> = (0..SEEDS)
        .filter_map(|seed| {
            let space = TreeAllocator::new(world.aperture.clone(), world.cores);
            found_after(space.expect("two cores"), &world, seed)
        })
        .collect();
    let seeds = found.len();
    assert!(
        found.is_empty(),
        "found with {seeds} of {SEEDS} seeds, after so many operations: {found:?}"
    );
}
