//! Allocators in phases, beside a naive model: for tests of this crate, the soak and the fuzz
//! target (feature `testing`).
//!
//! Operations that are chosen alike from beginning to end keep a space in one state, and its tree
//! of gaps in one shape. Some faults need a history: a space that fills, falls to pieces, is
//! cleared from one end and falls to pieces again there. So operations come in *phases*
//! ([`Phase`]). Each has its own share of allocations, largest size, limit and choice of what to
//! free, and they follow each other in an order that a seed (or a fuzzer's input) gives.
//!
//! A [`Player`] makes the operations, by one core or by all cores of a space in turn, hostile ones
//! among them, and panics at the first answer that is wrong. What it checks:
//!
//! * what is given is free, inside the aperture and out of its reserved regions, aligned, and at or
//!   below the limit;
//! * what is refused could not be given: no aligned block is free, once every core has parked;
//! * the pages and ranges that the allocator counts as out are those that are out, and the free
//!   pages can all be had;
//! * a free, pin or unpin of anything that is not out exactly so is refused, with the right error.
//!
//! The model is a `BTreeMap` of what is out ([`Out`]). Threads have a player and a model each; what
//! lies between them is checked by [`Shared`], a bit for every page.
//!
//! ```
//! use iova::testing::{Player, World};
//! use iova::TreeAllocator;
//!
//! let world = World::small(2);
//! let space = TreeAllocator::new(world.aperture.clone(), world.cores)?;
//! let mut player = Player::of_all_cores(&space, &world, 1);
//! player.play(5_000);
//! player.finish();
//! # Ok::<(), iova::ApertureError>(())
//! ```
//!
//! [`any`] has whole tests of this kind, for any allocator.
//!
//! Left out: several spaces.

pub mod any;
mod out;
mod phase;
mod player;
mod random;
mod shared;
#[cfg(all(test, not(any(loom, shuttle))))]
mod tests;
mod world;

pub use out::Out;
pub use phase::{Limit, Phase, Victim};
pub use player::Player;
pub use random::Random;
pub use shared::Shared;
pub use world::{Grain, World};
