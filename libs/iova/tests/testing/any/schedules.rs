//! Any allocator under random schedules of four to eight threads, through the public interface
//! alone (`random_schedules` describes the method and its limits). Threads allocate, hand ranges to
//! each other, free their own and others', pin, park, and retire chunks. A map, which they share
//! and check between two steps, knows what is out: nothing overlaps, nothing is refused, nothing is
//! lost.

use std::collections::BTreeMap;
use std::format;
use std::prelude::v1::*;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::{CoreAllocator, CoreId, IovaAllocator, IovaPfn, IovaRange, Request};
use random_schedules::{any, fail, has_failed, thread};

/// Steps of one thread.
const STEPS: usize = 12;
/// Pages of a range that several cores try to pin and free: nothing else has this size.
const CONTESTED: u64 = 2;
/// Pages of a range that its owner frees while remote cores pin it: nothing else has this size.
pub const WATCHED: u64 = 64;

/// Model state that the threads share. It uses nothing of shuttle's, so each access to it is one
/// step.
#[derive(Default)]
pub struct ModelState {
    /// By first page: the last page of what is out, retired chunks among it.
    out: BTreeMap<u64, u64>,
    /// The thread that takes one frees it.
    handed_over: Vec<IovaRange>,
    contested: Vec<IovaRange>,
    pinned: Vec<IovaRange>,
    watched: Vec<IovaRange>,
    /// Watched ranges that remote cores have pinned.
    pub held: Vec<IovaRange>,
    /// Retired chunks.
    pub away: Vec<IovaRange>,
}

impl ModelState {
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

    /// Fails the model if a retired chunk holds a pinned range.
    pub fn check_leaf_tables(&self) {
        let overlaps = |chunk: &IovaRange| self.held.iter().any(|held| held.overlaps(*chunk));
        if self.away.iter().any(overlaps) {
            fail("a chunk was retired under a pin");
        }
    }
}

/// [`ModelState`], shared by all threads of a model.
pub type Shared = Arc<Mutex<ModelState>>;

/// Locks what the threads know.
pub fn known(shared: &Shared) -> MutexGuard<'_, ModelState> {
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
    fn known(&self) -> MutexGuard<'_, ModelState> {
        known(&self.shared)
    }

    fn alloc(&mut self, pages: u64) -> Option<IovaRange> {
        let range = self.core.alloc(Request::pages(pages)).ok()?;
        self.known().take(range);
        Some(range)
    }

    /// Frees a range that is out only once and that no other thread frees: each step succeeds.
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
        // Freed since it was looked up, and just being allocated again: a mistake of this test,
        // which is without effect.
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

    /// A remote core's pin keeps the leaf table, whatever the owner does meanwhile.
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
        random_schedules::point();
        let mut known = known_again(&self.shared);
        let at = known.held.iter().position(|held| *held == range);
        known.held.swap_remove(at.expect("it was put there"));
        drop(known);
        self.core.unpin(pinned);
    }

    /// The owner frees ranges that remote cores may pin. Where one has, the free is refused.
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
        random_schedules::point();
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
fn known_again(shared: &Shared) -> MutexGuard<'_, ModelState> {
    known(shared)
}

/// Operations of the threads.
#[derive(Clone, Copy)]
pub struct Mix {
    /// Number of the sizes.
    pub sizes: u64,
    /// Others that may have pinned what one has pinned, all at the same moment.
    pub other_pins: usize,
    /// Cores park now and then.
    pub parks: bool,
    /// Owners free what remote cores pin. Not where cores park, or are asked to: then the freeing
    /// core is no owner any more, and such a race is of two mistakes.
    pub watches: bool,
    /// Cores retire chunks.
    pub retires: bool,
}

/// Threads on a space; afterwards everything is free, in one piece of `whole` pages.
pub fn meet<A: IovaAllocator>(space: &A, mix: Mix, whole: u64)
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
