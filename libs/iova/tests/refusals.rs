//! Refusals of a chunk allocator, beside a naive model of what is free: no request fails for good
//! while a range for it is in no core's possession.
//!
//! In another core's possession are the ranges that it, or a core before it, has live or in its
//! free lists, with the rest of a chunk that it owns and in which a range is. The allocator reports
//! the free lists and the owners; the model knows what is live.
//!
//! Histories have phases (fill, fragment, clear) of one size or of mixed ones. Ranges have 1 to
//! 1,024 pages, apertures up to 2^20 with odd ends. Cores fall asleep: from then on they do
//! nothing, not even answer calls, and what they had is freed by those that are awake.
#![cfg(not(any(loom, shuttle)))]

use iova::testing::Random;
use iova::{
    AllocError, Aperture, CHUNK_PAGES, ChunkAllocator, ChunkCore, CoreAllocator, CoreId,
    IovaAllocator, IovaPfn, IovaRange, Request,
};

/// A request as the model understands it.
struct Wanted {
    request: Request,
    /// Pages that a chunk gives for it, and where they may start.
    pages: u64,
    align: u64,
    last: u64,
}

struct Play {
    space: ChunkAllocator,
    cores: Vec<ChunkCore>,
    awake: Vec<usize>,
    random: Random,
    first: u64,
    last: u64,
    /// Of each page from `first` on, whether it is out.
    is_out: Vec<bool>,
    live: Vec<IovaRange>,
    refused: u64,
    attempts: u64,
}

impl Play {
    fn new(seed: u64, most: u64) -> Self {
        let mut random = Random::new(seed);
        let first = random.below(2) * random.below(700);
        let last = first + most - 1 - random.below(2) * random.below(300);
        let cores = 1 + random.index(3);
        let aperture = Aperture::new(IovaPfn::new(first), IovaPfn::new(last), &[]).expect("pages");
        let space = match random.below(4) {
            0 => ChunkAllocator::retiring(aperture, cores),
            _ => ChunkAllocator::new(aperture, cores),
        };
        let space = space.expect("cores");
        Self {
            cores: (0..cores)
                .map(|core| space.claim(CoreId(core)).expect("free"))
                .collect(),
            space,
            awake: (0..cores).collect(),
            random,
            first,
            last,
            is_out: vec![false; (last - first + 1) as usize],
            live: Vec::new(),
            refused: 0,
            attempts: 0,
        }
    }

    fn wanted(&mut self, pages: u64, is_plain: bool) -> Wanted {
        let size = pages.next_power_of_two().trailing_zeros();
        let (mut order, mut last) = (size, self.last);
        if !is_plain {
            order = order.max(self.random.below(11) as u32);
            last = self.first + self.random.below(self.last - self.first + 1);
        }
        Wanted {
            request: Request::pages(pages)
                .at_most(IovaPfn::new(last))
                .aligned(order as u8),
            pages: match order {
                0..=8 => 1 << order,
                _ => pages.next_multiple_of(CHUNK_PAGES),
            },
            align: 1 << order,
            last,
        }
    }

    /// Returns the start of a range that the core must be able to allocate.
    fn find(&self, core: usize, wanted: &Wanted) -> Option<u64> {
        let mut is_taken = self.is_out.clone();
        let at = |page: u64| (page - self.first) as usize;
        for (other, handle) in self.cores.iter().enumerate() {
            for range in handle.free_lists().into_iter().filter(|_| other != core) {
                is_taken[at(range.first().raw())..=at(range.last().raw())].fill(true);
            }
        }
        for chunk in self.first.div_ceil(CHUNK_PAGES).. {
            let start = chunk * CHUNK_PAGES;
            let end = start + CHUNK_PAGES - 1;
            if end > self.last {
                break;
            }
            let owner = self.space.owner(IovaPfn::new(start));
            let is_anothers = owner.is_some_and(|owner| owner != CoreId(core));
            let pages = at(start)..=at(end);
            // Live, or in a free list: either keeps the chunk its owner's.
            if is_anothers && is_taken[pages.clone()].contains(&true) {
                is_taken[pages].fill(true);
            }
        }
        let last = wanted.last.min(self.last);
        let starts = self.first.next_multiple_of(wanted.align)..=last;
        starts.step_by(wanted.align as usize).find(|start| {
            // Odd ends are the tree's, which has no chunks.
            start + wanted.pages - 1 <= last
                && !is_taken[at(*start)..=at(start + wanted.pages - 1)].contains(&true)
        })
    }

    /// Allocates, and where that is refused though there is a range asks again, as often as it is
    /// documented that one may have to.
    fn alloc(&mut self, core: usize, pages: u64, is_plain: bool) -> bool {
        let wanted = self.wanted(pages, is_plain);
        let got = self.cores[core].alloc(wanted.request);
        let range = match got {
            Ok(range) => range,
            Err(AllocError::Impossible { .. }) => return false,
            Err(refusal) => {
                self.refused += 1;
                let Some(start) = self.find(core, &wanted) else {
                    return false;
                };
                let most = self.last / CHUNK_PAGES + 2;
                let handle = &mut self.cores[core];
                let again = (1..=most).find_map(|attempt| {
                    handle
                        .alloc(wanted.request)
                        .ok()
                        .map(|range| (range, attempt))
                });
                let Some((range, attempt)) = again else {
                    panic!(
                        "core {core}, {refusal}: {} pages are free at {start:#x}",
                        wanted.pages
                    )
                };
                self.attempts = self.attempts.max(attempt);
                range
            }
        };
        assert!(range.pages() >= pages && range.last().raw() <= wanted.last);
        assert!(range.first().raw().is_multiple_of(wanted.align));
        let at = (range.first().raw() - self.first) as usize;
        let pages = &mut self.is_out[at..at + range.pages() as usize];
        assert!(!pages.contains(&true), "{range} is out already");
        pages.fill(true);
        self.live.push(range);
        true
    }

    fn free(&mut self, core: usize, range: IovaRange) {
        self.cores[core].free(range).expect("allocated");
        let at = (range.first().raw() - self.first) as usize;
        self.is_out[at..at + range.pages() as usize].fill(false);
    }

    fn any_awake(&mut self) -> usize {
        self.awake[self.random.index(self.awake.len())]
    }

    fn size(&mut self, fixed: Option<u64>) -> u64 {
        const SIZES: [u64; 16] = [
            1, 1, 1, 2, 3, 4, 8, 16, 32, 64, 100, 128, 256, 512, 600, 1024,
        ];
        match fixed {
            Some(pages) => pages,
            None if self.random.one_in(4) => 1 + self.random.below(1024),
            None => SIZES[self.random.index(SIZES.len())],
        }
    }

    fn phase(&mut self) {
        let fixed = (self.random.below(3) > 0).then(|| self.size(None));
        match self.random.below(8) {
            // Until nothing is left, or some.
            0..=2 => {
                let core = self.any_awake();
                let most = match self.random.below(2) {
                    0 => u64::MAX,
                    _ => self.random.below(1 + (self.last - self.first) / 2),
                };
                let (mut taken, mut refusals) = (0, 0);
                while taken < most && refusals < 3 {
                    let pages = self.size(fixed);
                    match self.alloc(core, pages, true) {
                        true => taken += pages,
                        false => refusals += 1,
                    }
                }
            }
            // Every other range, or some at random, by one core or by all.
            3 | 4 => {
                let (one, is_one) = (self.any_awake(), self.random.below(2) == 0);
                let ordered = self.random.below(2) == 0;
                if ordered {
                    self.live.sort_by_key(|range| range.first());
                }
                for (at, range) in std::mem::take(&mut self.live).into_iter().enumerate() {
                    let stays = match ordered {
                        true => at % 2 == 0,
                        false => self.random.below(3) == 0,
                    };
                    if stays {
                        self.live.push(range);
                        continue;
                    }
                    let core = if is_one { one } else { self.any_awake() };
                    self.free(core, range);
                }
            }
            5 => {
                let core = self.any_awake();
                for range in std::mem::take(&mut self.live) {
                    self.free(core, range);
                }
            }
            6 => {
                let core = self.any_awake();
                self.cores[core].park();
            }
            _ => {
                let all = self.cores.len();
                self.awake = (0..all).filter(|_| self.random.below(2) == 0).collect();
                if self.awake.is_empty() {
                    self.awake.push(self.random.index(all));
                }
            }
        }
        // Whatever the history was, each size, alignment and limit.
        for _ in 0..4 {
            let (core, pages) = (self.any_awake(), self.size(None));
            let is_plain = self.random.below(2) == 0;
            self.alloc(core, pages, is_plain);
        }
    }
}

fn plays(seeds: std::ops::Range<u64>, most: u64, phases: u64) {
    let (mut refused, mut attempts) = (0, 0);
    for seed in seeds {
        let mut play = Play::new(seed, most);
        (0..phases).for_each(|_| play.phase());
        refused += play.refused;
        attempts = attempts.max(play.attempts);
        let core = play.awake[0];
        for range in std::mem::take(&mut play.live) {
            play.free(core, range);
        }
        assert_eq!(play.space.stats().live_pages, 0);
    }
    assert!(refused > 0, "nothing was refused");
    println!("{refused} refusals, at most {attempts} attempts more");
}

#[test]
fn small_spaces_refuse_only_what_is_possessed() {
    plays(0..400, 1 << 11, 30);
}

#[test]
fn spaces_of_many_chunks_refuse_only_what_is_possessed() {
    plays(1000..1040, 1 << 15, 30);
}

#[test]
fn large_spaces_refuse_only_what_is_possessed() {
    plays(2000..2003, 1 << 20, 20);
}
