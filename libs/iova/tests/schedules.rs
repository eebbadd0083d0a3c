//! Allocators under random schedules of four to eight threads (`lines::schedules` says how and what that cannot
//! see). Through the public interface alone. Run with
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle cargo test -p iova --release --test schedules
//! ```
//!
//! Threads allocate, hand ranges to each other, free their own and others', pin, park, and retire chunks. A map, which they
//! share and look at between two steps, knows what is out: nothing overlaps, nothing is refused, nothing is lost.
#![cfg(shuttle)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use iova::planted::{Mistake, plant};
use iova::*;
use lines::schedules::{any, fail, finds, has_failed, holds, thread};

/// Steps of one thread.
const STEPS: usize = 12;
/// Pages of a range that several cores try to pin and free: nothing else has this size.
const CONTESTED: u64 = 2;
/// Pages of a range that its owner frees while strangers pin it: nothing else has this size.
const WATCHED: u64 = 64;

/// What the threads know. Nothing in here is shuttle's: whatever is done with it is one step.
#[derive(Default)]
struct Known {
    /// By first page: the last page of what is out, retired chunks among it.
    out: BTreeMap<u64, u64>,
    /// Whoever takes one frees it.
    handed_over: Vec<IovaRange>,
    contested: Vec<IovaRange>,
    pinned: Vec<IovaRange>,
    watched: Vec<IovaRange>,
    /// Watched ranges that strangers have pinned, and retired chunks.
    held: Vec<IovaRange>,
    away: Vec<IovaRange>,
}

impl Known {
    fn take(&mut self, range: IovaRange) {
        let (first, last) = (range.first().raw(), range.last().raw());
        if let Some((_, other)) = self.out.range(..=last).next_back()
            && *other >= first
        {
            fail(format!("{range} overlaps what is out"));
        }
        self.out.insert(first, last);
    }

    fn give(&mut self, range: IovaRange) {
        let was = self.out.remove(&range.first().raw());
        if was != Some(range.last().raw()) {
            fail(format!("{range} was not out"));
        }
    }

    fn check_leaf_tables(&self) {
        let overlaps = |chunk: &IovaRange| self.held.iter().any(|held| held.overlaps(*chunk));
        if self.away.iter().any(overlaps) {
            fail("a chunk was retired under a pin");
        }
    }
}

type Shared = Arc<Mutex<Known>>;

fn known(shared: &Shared) -> MutexGuard<'_, Known> {
    shared.lock().expect("nobody panics with it")
}

struct Thread<C> {
    core: C,
    shared: Shared,
    own: Vec<IovaRange>,
    watched: Vec<IovaRange>,
    mix: Mix,
}

fn pick<T>(from: &mut Vec<T>) -> Option<T> {
    let len = from.len() as u64;
    (len > 0).then(|| from.swap_remove(any(len) as usize))
}

fn look<T: Copy>(from: &[T]) -> Option<T> {
    let len = from.len() as u64;
    (len > 0).then(|| from[any(len) as usize])
}

impl<C: CoreAllocator> Thread<C> {
    fn known(&self) -> MutexGuard<'_, Known> {
        known(&self.shared)
    }

    fn alloc(&mut self, pages: u64) -> Option<IovaRange> {
        let range = self.core.alloc(Request::pages(pages)).ok()?;
        self.known().take(range);
        Some(range)
    }

    /// What is out only once, and nobody else frees: each step succeeds.
    fn free(&mut self, range: IovaRange) {
        if any(3) > 0 {
            self.known().give(range);
            if let Err(error) = self.core.free(range) {
                fail(format!("{error}, and it is"));
            }
            return;
        }
        match self.core.pin(range) {
            Ok(pinned) => {
                self.known().give(range);
                self.core.free_pinned(pinned);
            }
            Err(error) => fail(format!("{error}, and it is")),
        }
    }

    /// Several cores end the use of the same range: the first to have the pin may free it.
    fn contend(&mut self) {
        let Some(range) = look(&self.known().contested) else {
            return;
        };
        let Ok(pinned) = self.core.pin(range) else {
            return;
        };
        let mut known = known(&self.shared);
        // Freed since we heard of it, and just being given out again: a mistake of ours, which is without effect.
        let is_out = known.out.get(&range.first().raw()) == Some(&range.last().raw());
        let others = known.pinned.iter().filter(|other| **other == range).count();
        if others > self.mix.other_pins {
            fail(format!("{range} is pinned by {} at once", others + 1));
        }
        if !is_out || others > 0 {
            drop(known);
            self.core.unpin(pinned);
            return;
        }
        known.pinned.push(range);
        drop(known);
        if self.mix.parks && any(4) == 0 {
            self.core.park();
        }
        let mut known = known_again(&self.shared);
        let at = known.pinned.iter().position(|other| *other == range);
        known.pinned.swap_remove(at.expect("it was put there"));
        if any(2) == 0 {
            drop(known);
            self.core.unpin(pinned);
            return;
        }
        known.contested.retain(|contested| *contested != range);
        known.give(range);
        drop(known);
        self.core.free_pinned(pinned);
    }

    /// A stranger's pin keeps the leaf table, whatever the owner does meanwhile.
    fn watch(&mut self) {
        let Some(range) = look(&self.known().watched) else {
            return;
        };
        if self.watched.contains(&range) {
            return;
        }
        let Ok(pinned) = self.core.pin(range) else {
            return;
        };
        let mut known = known(&self.shared);
        known.held.push(range);
        known.check_leaf_tables();
        drop(known);
        lines::schedules::point();
        let mut known = known_again(&self.shared);
        let at = known.held.iter().position(|held| *held == range);
        known.held.swap_remove(at.expect("it was put there"));
        drop(known);
        self.core.unpin(pinned);
    }

    /// The owner frees what strangers may pin. Where one has, it is refused.
    fn free_watched(&mut self) {
        let Some(range) = pick(&mut self.watched) else {
            return;
        };
        self.known().give(range);
        if self.core.free(range).is_err() {
            self.known().take(range);
            self.watched.push(range);
            return;
        }
        let mut known = self.known();
        known.watched.retain(|watched| *watched != range);
    }

    fn retire(&mut self) {
        let Some(chunk) = self.core.retire() else {
            return;
        };
        let range = chunk.range();
        let mut known = known(&self.shared);
        known.take(range);
        known.away.push(range);
        known.check_leaf_tables();
        drop(known);
        lines::schedules::point();
        let mut known = known_again(&self.shared);
        known.give(range);
        known.away.retain(|away| *away != range);
        drop(known);
        self.core.recycle(chunk);
    }

    fn step(&mut self) {
        let mix = self.mix;
        match any(16) {
            0..4 => {
                let pages = [1, 1, 4, 8, 128][any(mix.sizes) as usize];
                if let Some(range) = self.alloc(pages) {
                    self.own.push(range);
                } else if let Some(range) = pick(&mut self.own) {
                    self.free(range);
                }
            }
            4..6 => {
                if let Some(range) = self.alloc(1) {
                    self.known().handed_over.push(range);
                }
            }
            6..8 => {
                if let Some(range) = pick(&mut self.own) {
                    self.free(range);
                }
            }
            8..10 => {
                let handed_over = pick(&mut self.known().handed_over);
                if let Some(range) = handed_over {
                    self.free(range);
                }
            }
            10 => {
                if let Some(range) = self.alloc(CONTESTED) {
                    self.known().contested.push(range);
                }
            }
            11..13 => self.contend(),
            13 if mix.watches => match any(4) {
                0 => {
                    if let Some(range) = self.alloc(WATCHED) {
                        self.watched.push(range);
                        self.known().watched.push(range);
                    }
                }
                1 => self.free_watched(),
                _ => self.watch(),
            },
            14 if mix.retires => self.retire(),
            15 if mix.parks && any(2) == 0 => self.core.park(),
            _ => {}
        }
    }

    fn run(mut self) {
        for _ in 0..STEPS {
            self.step();
            if has_failed() {
                return;
            }
        }
        known(&self.shared).handed_over.append(&mut self.own);
    }
}

/// As [`known`], under a name that `let known` does not hide.
fn known_again(shared: &Shared) -> MutexGuard<'_, Known> {
    known(shared)
}

/// What threads do.
#[derive(Clone, Copy)]
struct Mix {
    /// How many of the sizes.
    sizes: u64,
    /// Others that may have pinned what one has pinned, all at the same moment.
    other_pins: usize,
    parks: bool,
    /// Owners free what strangers pin. Not where cores park, or are asked to: then whoever frees is no owner any more,
    /// and such a race is of two mistakes.
    watches: bool,
    retires: bool,
}

/// Threads on a space; afterwards everything is free, in one piece of `whole` pages.
fn meet<A: IovaAllocator>(space: &A, mix: Mix, whole: u64)
where
    A::Core: 'static,
{
    let shared = Shared::default();
    let threads: Vec<_> = (0..space.cores())
        .map(|core| {
            let thread = Thread {
                core: space.claim(CoreId(core)).expect("free"),
                shared: Arc::clone(&shared),
                own: Vec::new(),
                watched: Vec::new(),
                mix,
            };
            thread::spawn(move || thread.run())
        })
        .collect();
    for thread in threads {
        thread.join().expect("a model ends at a panic");
    }
    if has_failed() {
        return;
    }
    let mut core = space.claim(CoreId(0)).expect("it came back");
    let mut known = known(&shared);
    let left: Vec<_> = known
        .out
        .iter()
        .map(|(first, last)| (*first, *last))
        .collect();
    known.out.clear();
    drop(known);
    for (first, last) in left {
        let range = IovaRange::new(IovaPfn::new(first), last - first + 1).expect("it was out");
        if let Err(error) = core.free(range) {
            fail(format!("{error}, and it is"));
        }
    }
    core.park();
    let stats = space.stats();
    if (stats.live_ranges, stats.live_pages) != (0, 0) {
        fail(format!("something is lost or doubled: {stats:?}"));
    }
    let retired: Vec<_> = core::iter::from_fn(|| core.retire()).collect();
    retired.into_iter().for_each(|chunk| core.recycle(chunk));
    match core.alloc(Request::pages(whole)) {
        Ok(range) => core.free(range).expect("allocated"),
        Err(error) => fail(format!("something is lost: {error}")),
    }
}

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
    const GIVEN: usize = (CHUNK_PAGES / WATCHED) as usize;
    let strangers = 3 + any(5) as usize;
    let last = IovaPfn::new(4 * CHUNK_PAGES - 1);
    let aperture = Aperture::new(IovaPfn::new(0), last, &[]).expect("pages");
    let space = ChunkAllocator::new(aperture, strangers + 1).expect("cores");
    let request = Request::pages(WATCHED);
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
    for _ in 0..any(20) {
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
                    lines::schedules::point();
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

/// Of allocators whose pins are a compare-and-swap.
const BYTES: Mix = Mix {
    sizes: 2,
    other_pins: 0,
    parks: true,
    watches: false,
    retires: false,
};

fn magazines() {
    let cores = 4 + any(5) as usize;
    let last = IovaPfn::new(if any(2) == 0 { 15 } else { 255 });
    let aperture = Aperture::new(IovaPfn::new(0), last, &[]).expect("pages");
    let config = MagazineConfig {
        size: 1 + any(2) as usize,
        depot: 1,
    };
    let space = MagazineAllocator::with_config(aperture, cores, config).expect("cores");
    meet(&space, BYTES, last.raw() + 1);
}

fn slabs() {
    let cores = 4 + any(5) as usize;
    let aperture = Aperture::new(IovaPfn::new(0), IovaPfn::new(63), &[]).expect("pages");
    let config = SlabConfig {
        arena_pages: 64,
        list: 2,
    };
    let space = SlabAllocator::with_config(aperture, cores, config).expect("cores");
    meet(&space, BYTES, 64);
}

/// Whether `model` shows `mistake`, as `what`.
fn shows(mistake: Mistake, what: &str, model: impl Fn() + Send + Sync + 'static) -> bool {
    plant(Some(mistake));
    let found = finds(20_000, what, model);
    plant(None);
    found
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
fn cores_exchange_magazines() {
    holds(2_000, magazines);
}

#[test]
fn cores_exchange_objects_of_slabs() {
    holds(2_000, slabs);
}

#[test]
fn an_owner_finds_what_strangers_gave_back() {
    holds(5_000, given_back);
}

#[test]
fn a_forgotten_mark_is_found() {
    assert!(shows(Mistake::ForgetsMarks, "lost", given_back));
}

#[test]
fn no_chunk_is_retired_under_a_pin() {
    holds(6_000, pins_and_retires);
}

#[test]
fn a_pin_that_is_not_looked_after_is_found() {
    let what = "retired under a pin";
    assert!(shows(Mistake::TrustsItsClaim, what, pins_and_retires));
}

#[test]
fn the_leak_of_the_depot_is_found() {
    assert!(shows(Mistake::DropsOverflow, "lost", magazines));
}
