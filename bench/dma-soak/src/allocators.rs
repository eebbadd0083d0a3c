//! Runs of allocators: every page that is out is a bit, which nobody may set twice.

use std::sync::atomic::{AtomicU64, Ordering};

use iova::*;

use crate::hand::{Hands, Worker, at_once, in_turns};
use crate::random::Random;
use crate::{CORES, Run};

/// Pages of the space; page 0 is not in it.
const PAGES: u64 = 1 << 16;
/// Most ranges that one core holds.
const HELD: usize = 400;

/// A bit per page.
struct Bitmap(Vec<AtomicU64>);

impl Bitmap {
    /// Flips the bits of a range, all of which must have been `expected`.
    fn flip(&self, range: IovaRange, expected: bool) {
        let (mut page, end) = (range.first().raw(), range.last().raw() + 1);
        while page < end {
            let count = (64 - page % 64).min(end - page);
            let mask = (u64::MAX >> (64 - count)) << (page % 64);
            let was = self.0[(page / 64) as usize].fetch_xor(mask, Ordering::AcqRel) & mask;
            let want = if expected { mask } else { 0 };
            assert_eq!(was, want, "pages at {page:#x} of {range}");
            page += count;
        }
    }
}

/// What the cores of a run share.
struct Shared {
    bitmap: Bitmap,
    hands: Hands<IovaRange>,
}

struct Core<'a, C> {
    shared: &'a Shared,
    core: C,
    random: Random,
    held: Vec<IovaRange>,
    retired: Vec<RetiredChunk>,
}

impl<C: CoreAllocator> Core<'_, C> {
    fn alloc(&mut self) {
        let bound = match self.random.below(16) {
            0 => 512,
            1..5 => 32,
            _ => 1,
        };
        let mut request = Request::pages(1 + self.random.below(bound));
        if self.random.one_in(16) {
            request = request.at_most(IovaPfn::new(PAGES / 2));
        }
        // Others may hold everything: then this was an attempt.
        if let Ok(range) = self.core.alloc(request) {
            self.shared.bitmap.flip(range, false);
            self.held.push(range);
        }
    }

    /// One of ours.
    fn pick(&mut self) -> Option<IovaRange> {
        let held = self.held.len();
        (held > 0).then(|| self.held.swap_remove(self.random.index(held)))
    }

    fn free(&mut self, range: IovaRange, is_alone: bool) {
        self.shared.bitmap.flip(range, true);
        self.core.free(range).expect("it is out");
        // With others about, it may be out again.
        if is_alone && self.random.one_in(8) {
            let again = self.core.free(range);
            assert_eq!(again, Err(FreeError::NotAllocated { range }));
        }
    }

    fn pin(&mut self, range: IovaRange) {
        let pinned = self.core.pin(range).expect("it is ours");
        assert!(self.core.free(range).is_err(), "it is pinned");
        if self.random.one_in(2) {
            self.core.unpin(pinned);
            self.held.push(range);
        } else {
            self.shared.bitmap.flip(range, true);
            self.core.free_pinned(pinned);
        }
    }

    /// What is ours, by another length, or nobody's.
    fn attack(&mut self, range: IovaRange) {
        let pages = match self.random.below(3) {
            0 => range.pages() + 1 + self.random.below(3),
            1 => range.pages() * 2,
            _ => PAGES * 2,
        };
        let wrong = IovaRange::new(range.first(), pages).expect("far below the end");
        assert!(self.core.free(wrong).is_err() && self.core.pin(wrong).is_err());
        self.held.push(range);
    }

    /// Takes an empty chunk out of circulation, or brings one back.
    fn retire(&mut self) {
        if self.retired.len() < 4
            && let Some(chunk) = self.core.retire()
        {
            // Nothing of it is out.
            self.shared.bitmap.flip(chunk.range(), false);
            self.retired.push(chunk);
        } else if let Some(chunk) = self.retired.pop() {
            self.shared.bitmap.flip(chunk.range(), true);
            self.core.recycle(chunk);
        }
    }

    fn give_back(&mut self) {
        while let Some(chunk) = self.retired.pop() {
            self.shared.bitmap.flip(chunk.range(), true);
            self.core.recycle(chunk);
        }
        let id = self.core.core().0;
        while let Some(range) = self.held.pop().or_else(|| self.shared.hands.take(id)) {
            self.free(range, false);
        }
        self.core.park();
    }
}

impl<C: CoreAllocator> Worker for Core<'_, C> {
    fn step(&mut self, is_alone: bool) {
        let id = self.core.core().0;
        match self.random.below(64) {
            0..28 if self.held.len() < HELD => self.alloc(),
            0..50 => {
                if let Some(range) = self.pick() {
                    self.free(range, is_alone);
                }
            }
            50..54 => {
                if let Some(range) = self.pick() {
                    let full = self.shared.hands.pass(id, range);
                    self.held.extend(full);
                }
            }
            54..58 => {
                if let Some(range) = self.shared.hands.take(id) {
                    self.free(range, is_alone);
                }
            }
            58..60 => {
                if let Some(range) = self.pick() {
                    self.pin(range);
                }
            }
            60..62 => {
                if let Some(range) = self.pick() {
                    self.attack(range);
                }
            }
            62 => self.retire(),
            _ if self.random.one_in(32) => self.core.park(),
            _ => {}
        }
    }
}

fn soak(space: &impl IovaAllocator, operations: u64, seed: u64) {
    let shared = Shared {
        bitmap: Bitmap((0..PAGES / 64).map(|_| AtomicU64::new(0)).collect()),
        hands: Hands::new(CORES),
    };
    let mut cores: Vec<_> = (0..CORES)
        .map(|core| Core {
            shared: &shared,
            core: space.claim(CoreId(core)).expect("free"),
            random: Random::new(seed, core as u64),
            held: Vec::new(),
            retired: Vec::new(),
        })
        .collect();
    in_turns(&mut cores, operations / 2, seed);
    let held = cores.iter().map(|core| core.held.len()).sum::<usize>();
    assert!(
        operations < 100_000 || held > CORES * 50,
        "{held} ranges held"
    );
    at_once(&mut cores, operations - operations / 2);
    cores.iter_mut().for_each(Core::give_back);
    assert!(
        shared
            .bitmap
            .0
            .iter()
            .all(|word| word.load(Ordering::Acquire) == 0),
        "a page is still out"
    );
    let stats = space.stats();
    assert_eq!((stats.live_ranges, stats.live_pages), (0, 0));
    // All of it can be had again, in 16 MiB blocks but for the first, where page 0 is missing, and the last, which
    // spaces of chunks may have cut.
    let core = &mut cores[0].core;
    let blocks: Vec<_> = (0..PAGES / 4096 - 2)
        .map(|_| {
            core.alloc(Request::pages(4096))
                .expect("everything is free")
        })
        .collect();
    blocks
        .into_iter()
        .for_each(|block| core.free(block).expect("ours"));
    drop(cores);
    space.reset().expect("no handle is out");
    let stats = space.stats();
    assert_eq!(
        (stats.live_pages, stats.cached_pages, stats.chunks),
        (0, 0, 0)
    );
}

fn aperture() -> Aperture {
    Aperture::new(IovaPfn::new(1), IovaPfn::new(PAGES - 1), &[]).expect("pages")
}

fn run<A: IovaAllocator>(name: &str, make: impl Fn(Aperture) -> A + 'static) -> Run {
    Run {
        name: format!("iova {name}"),
        soak: Box::new(move |operations, seed| soak(&make(aperture()), operations, seed)),
    }
}

/// Every allocator, some with small caches, whose exchanges happen all the time then.
pub fn runs() -> Vec<Run> {
    const OK: &str = "three cores and such a space are in range";
    vec![
        run("tree", |a| TreeAllocator::new(a, CORES).expect(OK)),
        run("linear", |a| LinearAllocator::new(a, CORES).expect(OK)),
        run("eiovar", |a| EiovaRAllocator::new(a, CORES).expect(OK)),
        run("magazine", |a| MagazineAllocator::new(a, CORES).expect(OK)),
        run("magazine, small", |a| {
            let config = MagazineConfig { size: 3, depot: 1 };
            MagazineAllocator::with_config(a, CORES, config).expect(OK)
        }),
        run("chunk", |a| ChunkAllocator::new(a, CORES).expect(OK)),
        run("chunk, retiring", |a| {
            ChunkAllocator::retiring(a, CORES).expect(OK)
        }),
        run("identity, all in the fallback", |a| {
            IdentityAllocator::new(a, CORES, 46).expect(OK)
        }),
        run("slab", |a| SlabAllocator::new(a, CORES).expect(OK)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The checks find what they look for.
    #[test]
    #[should_panic(expected = "pages at 0x3f of")]
    fn a_page_that_is_out_twice_is_noticed() {
        let bitmap = Bitmap((0..2).map(|_| AtomicU64::new(0)).collect());
        let range = |first, pages| IovaRange::new(IovaPfn::new(first), pages).expect("fits");
        bitmap.flip(range(60, 4), false);
        bitmap.flip(range(64, 64), false);
        bitmap.flip(range(63, 2), false);
    }
}
