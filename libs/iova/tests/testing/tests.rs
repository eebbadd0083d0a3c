//! That phases find what they are for.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::vec::Vec;

use super::*;
use crate::planted::{Mistake, plant};
use crate::*;

const SEEDS: u64 = 20;
const OPERATIONS: u64 = 1_000_000;

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

/// Searches go to the wrong leaf, and the same pages are given out twice. It takes a tree of several nodes, and a lowest gap of one
/// of them that goes, or comes.
#[test]
fn phases_find_a_node_that_does_not_say_where_it_begins_with_every_seed() {
    let world = World::small(2);
    plant(Some(Mistake::KeepsFirst));
    let found: Vec<_> = (0..SEEDS)
        .map(|seed| {
            let space = TreeAllocator::new(world.aperture.clone(), world.cores);
            found_after(space.expect("two cores"), &world, seed)
        })
        .collect();
    plant(None);
    println!("found after so many operations: {found:?}");
    assert!(found.iter().all(Option::is_some), "{found:?}");
}
