//! Chunks under random schedules. Run with
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle \
//!     cargo test -p iova --release --test schedules
//! ```
#![cfg(shuttle)]

use std::sync::Arc;

use iova::*;
use random_schedules::{any, fail, holds, thread};

use iova::testing::any::schedules::{Mix, Shared, WATCHED, known, meet};

/// Supply of chunks.
#[derive(Clone, Copy, PartialEq)]
enum Chunks {
    /// More than the cores need.
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
            // An owner's pin is no read-modify-write: a remote core's at the same moment is seen
            // too late.
            other_pins: 1,
            parks: supply == Chunks::Scarce,
            watches: supply == Chunks::Plenty,
            retires,
        };
        meet(&space, mix, chunks * CHUNK_PAGES);
    }
}

/// Remote cores free all that an owner has allocated while it allocates. No core parks, so that
/// only the marks report the frees.
fn given_back() {
    // Two of a word, whose mark is one.
    const GIVEN: usize = (2 * CHUNK_PAGES / WATCHED) as usize;
    let remotes = 3 + any(5) as usize;
    let last = IovaPfn::new(4 * CHUNK_PAGES - 1);
    let aperture = Aperture::new(IovaPfn::new(0), last, &[]).expect("pages");
    let space = ChunkAllocator::new(aperture, remotes + 1).expect("cores");
    let request = Request::pages(WATCHED / 2);
    let mut owner = space.claim(CoreId(0)).expect("free");
    let mut out: Vec<_> = (0..GIVEN)
        .map(|_| owner.alloc(request).expect("free"))
        .collect();
    let threads: Vec<_> = (1..=remotes)
        .map(|core| {
            let mut remote = space.claim(CoreId(core)).expect("free");
            let given = out.split_off(out.len() - out.len() / (remotes + 2 - core));
            thread::spawn(move || {
                for range in given {
                    if any(2) == 0 {
                        remote.free(range).expect("it is ours to free");
                    } else {
                        let pinned = remote.pin(range).expect("it is ours to free");
                        remote.free_pinned(pinned);
                    }
                }
                // Kept: a handle that is dropped parks.
                remote
            })
        })
        .collect();
    // It collects remote frees before it takes one more chunk. There are more than it needs: a core
    // that finds nothing gives all its chunks up, and others take them.
    for _ in 0..any(40) {
        out.push(owner.alloc(request).expect("more than this"));
    }
    let handles: Vec<_> = threads
        .into_iter()
        .map(|thread| thread.join().expect("a model ends at a panic"))
        .collect();
    // What it has no notice of it does not find before it gives up its chunks, and takes others
    // instead.
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

/// Remote cores pin what its owner frees, and the owner retires the chunk: one of them comes too
/// late.
fn pins_and_retires() {
    let remotes = 3 + any(5) as usize;
    let last = IovaPfn::new(2 * CHUNK_PAGES - 1);
    let aperture = Aperture::new(IovaPfn::new(0), last, &[]).expect("pages");
    let space = ChunkAllocator::retiring(aperture, remotes + 1).expect("cores");
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
    let threads: Vec<_> = (1..=remotes)
        .map(|core| {
            let mut remote = space.claim(CoreId(core)).expect("free");
            let (shared, contested) = (Arc::clone(&shared), contested.clone());
            thread::spawn(move || {
                let range = contested[core % contested.len()];
                for _ in 0..2 {
                    let Ok(pinned) = remote.pin(range) else {
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
                    remote.unpin(pinned);
                }
            })
        })
        .collect();
    // The mistake of a driver: it unmaps what other cores are unmapping. Where the free is refused,
    // it tries again.
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

/// An owner frees, by mistake, what another core has pinned or freed, while a third finds no room
/// and collects for the owner.
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
        // Once another core owns it, any core that knows of it may free it.
        if owner.free(another).is_ok() && space.owner(another.first()) == Some(CoreId(0)) {
            fail("what another core has freed was freed again");
        }
    }
    let (third, _) = searching.join().expect("a model ends at a panic");
    second.free_pinned(pinned);
    drop((owner, third));
}

/// An owner and another core free one range at the same moment, by mistake, while a third finds no
/// room and collects for the owner. Afterwards nothing is in two places: what the owner keeps ready
/// is of no other core, and all comes back once.
fn frees_at_once_while_others_collect() {
    let role = [
        RemoteFreer::Contender,
        RemoteFreer::Another,
        RemoteFreer::None,
    ][any(3) as usize];
    let pages = [1, 32, 64, 128][any(4) as usize];
    frees_at_once(pages, role, [any(3) == 0, any(3) == 0], any(2) == 0);
}

/// The designated remote freer of the chunk.
#[derive(Clone, Copy)]
enum RemoteFreer {
    /// The core that frees at once with the owner.
    Contender,
    Another,
    None,
}

/// The same with a range of so many pages, which the owner and the other core free under a pin or
/// not; the owner allocates another afterwards or not.
fn frees_at_once(pages: u64, role: RemoteFreer, are_pinned: [bool; 2], allocates: bool) {
    const LARGE: Request = Request::pages(256).without_drain();
    let last = IovaPfn::new(CHUNK_PAGES - 1);
    let aperture = Aperture::new(IovaPfn::new(0), last, &[]).expect("pages");
    let retires = any(4) == 0;
    let config = ChunkConfig {
        retires,
        ..ChunkConfig::default()
    };
    let space = ChunkAllocator::with_config(aperture, 4, config).expect("cores");
    let [mut owner, mut second, mut third, mut fourth] =
        [0, 1, 2, 3].map(|core| space.claim(CoreId(core)).expect("free"));
    let request = Request::pages(pages).without_drain();
    let mut out: Vec<_> = (0..(64 / pages).max(1))
        .map(|_| owner.alloc(request).expect("free"))
        .collect();
    let contested = out.swap_remove(any(out.len() as u64) as usize);
    for range in out {
        match role {
            RemoteFreer::Contender => second.free(range).expect("allocated"),
            RemoteFreer::Another => fourth.free(range).expect("allocated"),
            RemoteFreer::None => {
                let pinned = fourth.pin(range).expect("allocated");
                fourth.free_pinned(pinned);
            }
        }
    }
    let searching = thread::spawn(move || {
        // Of another size, so that a late free of `contested` is recognised.
        let got: Vec<_> = (0..1 + any(2))
            .map_while(|_| third.alloc(LARGE).ok())
            .collect();
        (third, got)
    });
    let freeing = thread::spawn(move || {
        free_once(&mut second, contested, are_pinned[1]);
        second
    });
    free_once(&mut owner, contested, are_pinned[0]);
    // What it has then may be taken from it, as its range was freed twice.
    let kept = allocates.then(|| owner.alloc(request).ok()).flatten();
    let (mut third, mut got) = searching.join().expect("a model ends at a panic");
    let second = freeing.join().expect("a model ends at a panic");
    got.extend((0..2).map_while(|_| third.alloc(LARGE).ok()));
    for listed in owner.free_lists() {
        if got.iter().any(|range| range.overlaps(listed)) {
            fail(format!("{listed} is kept ready, and another core has it"));
            // Not dropped: a handle that parks would panic.
            return core::mem::forget((owner, second, third, fourth));
        }
    }
    // Of this size, these are what was allocated.
    got.into_iter()
        .for_each(|range| third.free(range).expect("allocated"));
    drop((second, fourth, third));
    if let Some(range) = kept {
        let _ = owner.free(range);
    }
    owner.park();
    let stats = space.stats();
    if stats.live_pages != 0 {
        fail(format!("something is lost or doubled: {stats:?}"));
    }
    if let Some(chunk) = owner.retire() {
        owner.recycle(chunk);
    }
    match owner.alloc(Request::pages(CHUNK_PAGES)) {
        Ok(range) => owner.free(range).expect("allocated"),
        Err(error) => fail(format!("something is lost: {error}")),
    }
}

/// Frees a range, which another core may have freed.
fn free_once(core: &mut ChunkCore, range: IovaRange, is_pinned: bool) {
    if !is_pinned {
        let _ = core.free(range);
    } else if let Ok(pinned) = core.pin(range) {
        core.free_pinned(pinned);
    }
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
fn a_range_freed_twice_at_once_is_kept_in_one_place() {
    holds(6_000, frees_at_once_while_others_collect);
}

#[test]
fn a_word_freed_twice_at_once_is_kept_in_one_place() {
    holds(6_000, || {
        frees_at_once(64, RemoteFreer::None, [false; 2], false)
    });
}

#[test]
fn no_chunk_is_retired_under_a_pin() {
    holds(6_000, pins_and_retires);
}
