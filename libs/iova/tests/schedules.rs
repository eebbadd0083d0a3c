//! Chunks under random schedules. Run with
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle cargo test -p iova --release --test schedules
//! ```
#![cfg(shuttle)]

use std::sync::Arc;

use iova::*;
use random_schedules::{any, fail, holds, thread};

use iova::testing::any::schedules::{Mix, Shared, WATCHED, known, meet};

/// What chunks are there for.
#[derive(Clone, Copy, PartialEq)]
enum Chunks {
    /// More than anybody needs.
    Plenty,
    /// Fewer than cores.
    Scarce,
}

fn chunks(supply: Chunks, retires: bool) -> impl Fn() + Send + Sync + 'static {
    move || {
        let cores = 4 + any(5);
        let chunks = match supply {
            Chunks::Plenty => 4 * cores,
            Chunks::Scarce => 2,
        };
        let last = IovaPfn::new(chunks * CHUNK_PAGES - 1);
        let aperture = Aperture::new(IovaPfn::new(0), last, &[]).expect("pages");
        let config = ChunkConfig {
            zone_chunks: chunks as usize,
            retires,
            ..ChunkConfig::default()
        };
        let space = ChunkAllocator::with_config(aperture, cores as usize, config).expect("cores");
        let mix = Mix {
            sizes: 5,
            // An owner's pin is no read-modify-write: a stranger's at the same moment is seen too late.
            other_pins: 1,
            parks: supply == Chunks::Scarce,
            watches: supply == Chunks::Plenty,
            retires,
        };
        meet(&space, mix, chunks * CHUNK_PAGES);
    }
}

/// Strangers give back all that an owner has handed out while it allocates. Nobody parks, so that only the marks tell it.
fn given_back() {
    // Two of a word, whose mark is one.
    const GIVEN: usize = (2 * CHUNK_PAGES / WATCHED) as usize;
    let strangers = 3 + any(5) as usize;
    let last = IovaPfn::new(4 * CHUNK_PAGES - 1);
    let aperture = Aperture::new(IovaPfn::new(0), last, &[]).expect("pages");
    let space = ChunkAllocator::new(aperture, strangers + 1).expect("cores");
    let request = Request::pages(WATCHED / 2);
    let mut owner = space.claim(CoreId(0)).expect("free");
    let mut out: Vec<_> = (0..GIVEN)
        .map(|_| owner.alloc(request).expect("free"))
        .collect();
    let threads: Vec<_> = (1..=strangers)
        .map(|core| {
            let mut stranger = space.claim(CoreId(core)).expect("free");
            let given = out.split_off(out.len() - out.len() / (strangers + 2 - core));
            thread::spawn(move || {
                for range in given {
                    if any(2) == 0 {
                        stranger.free(range).expect("it is ours to free");
                    } else {
                        let pinned = stranger.pin(range).expect("it is ours to free");
                        stranger.free_pinned(pinned);
                    }
                }
                // Kept: a handle that is dropped parks.
                stranger
            })
        })
        .collect();
    // It looks for what came back before it takes one more chunk. There are more than it asks for: a core that finds
    // nothing gives everything up, and others take it.
    for _ in 0..any(40) {
        out.push(owner.alloc(request).expect("more than this"));
    }
    let handles: Vec<_> = threads
        .into_iter()
        .map(|thread| thread.join().expect("a model ends at a panic"))
        .collect();
    // What it has no notice of it does not find before it gives up its chunks, and takes others instead.
    let chunks = space.stats().chunks;
    for _ in out.len() as u64..chunks * GIVEN as u64 {
        out.push(owner.alloc(request).expect("more than this"));
    }
    let taken = space.stats().chunks - chunks;
    if taken > 0 {
        fail(format!(
            "{taken} chunks were taken although ranges came back: marks are lost"
        ));
    }
    drop(handles);
}

/// Strangers pin what its owner frees, and the owner retires the chunk: one of them comes too late.
fn pins_and_retires() {
    let strangers = 3 + any(5) as usize;
    let last = IovaPfn::new(2 * CHUNK_PAGES - 1);
    let aperture = Aperture::new(IovaPfn::new(0), last, &[]).expect("pages");
    let space = ChunkAllocator::retiring(aperture, strangers + 1).expect("cores");
    let request = Request::pages(WATCHED);
    let mut owner = space.claim(CoreId(0)).expect("free");
    // The last chunk stays its owner's: there is one more.
    let mut out: Vec<_> = (0..9)
        .map(|_| owner.alloc(request).expect("free"))
        .collect();
    let other = out.pop().expect("nine");
    let contested = out.split_off(out.len() - 1 - any(3) as usize);
    for range in out {
        owner.free(range).expect("allocated");
    }
    let shared = Shared::default();
    let threads: Vec<_> = (1..=strangers)
        .map(|core| {
            let mut stranger = space.claim(CoreId(core)).expect("free");
            let (shared, contested) = (Arc::clone(&shared), contested.clone());
            thread::spawn(move || {
                let range = contested[core % contested.len()];
                for _ in 0..2 {
                    let Ok(pinned) = stranger.pin(range) else {
                        continue;
                    };
                    let mut held = known(&shared);
                    held.held.push(range);
                    held.check_leaf_tables();
                    drop(held);
                    random_schedules::point();
                    let mut held = known(&shared);
                    let at = held.held.iter().position(|held| *held == range);
                    held.held.swap_remove(at.expect("it was put there"));
                    drop(held);
                    stranger.unpin(pinned);
                }
            })
        })
        .collect();
    // The mistake of a driver: it unmaps what other cores are unmapping. Where it is told so, it tries again.
    for range in contested {
        while owner.free(range).is_err() {
            lines::spin_loop();
        }
    }
    let retired = (0..3).find_map(|_| {
        owner.park();
        owner.retire()
    });
    if let Some(chunk) = &retired {
        let mut away = known(&shared);
        away.away.push(chunk.range());
        away.check_leaf_tables();
    }
    for thread in threads {
        thread.join().expect("a model ends at a panic");
    }
    // Pinned until now, at the latest.
    owner.park();
    let Some(chunk) = retired.or_else(|| owner.retire()) else {
        return fail("an empty chunk is not retired");
    };
    owner.recycle(chunk);
    owner.free(other).expect("allocated");
}

/// An owner frees, by mistake, what another core has pinned or freed, while a third finds no room and collects for the owner.
fn frees_wrongly_while_others_collect() {
    let last = IovaPfn::new(2 * CHUNK_PAGES - 1);
    let aperture = Aperture::new(IovaPfn::new(0), last, &[]).expect("pages");
    let space = ChunkAllocator::new(aperture, 3).expect("cores");
    let request = Request::pages(WATCHED).without_drain();
    let [mut owner, mut second, mut third] =
        [0, 1, 2].map(|core| space.claim(CoreId(core)).expect("free"));
    let mut out: Vec<_> = (0..16)
        .map(|_| owner.alloc(request).expect("free"))
        .collect();
    let (one, another) = (out.pop().expect("16"), out.pop().expect("16"));
    let pinned = second.pin(one).expect("allocated");
    second.free(another).expect("allocated");
    for range in out.split_off(any(12) as usize) {
        second.free(range).expect("allocated");
    }
    let searching = thread::spawn(move || {
        let got: Vec<_> = (0..1 + any(3))
            .map_while(|_| third.alloc(request).ok())
            .collect();
        (third, got)
    });
    for _ in 0..1 + any(8) {
        if owner.free(one).is_ok() {
            fail("what another core has pinned was freed");
        }
        // Once it is another's it may be freed by whoever knows of it.
        if owner.free(another).is_ok() && space.owner(another.first()) == Some(CoreId(0)) {
            fail("what another core has freed was freed again");
        }
    }
    let (third, _) = searching.join().expect("a model ends at a panic");
    second.free_pinned(pinned);
    drop((owner, third));
}

#[test]
fn cores_of_chunks_meet() {
    holds(3_000, chunks(Chunks::Plenty, false));
}

#[test]
fn cores_fight_for_the_last_chunk() {
    holds(3_000, chunks(Chunks::Scarce, false));
}

#[test]
fn chunks_come_and_go() {
    holds(3_000, chunks(Chunks::Plenty, true));
}

#[test]
fn the_last_chunks_come_and_go() {
    holds(3_000, chunks(Chunks::Scarce, true));
}

#[test]
fn an_owner_finds_what_strangers_gave_back() {
    holds(5_000, given_back);
}

#[test]
fn a_wrong_free_is_refused_while_others_collect() {
    holds(6_000, frees_wrongly_while_others_collect);
}

#[test]
fn no_chunk_is_retired_under_a_pin() {
    holds(6_000, pins_and_retires);
}
