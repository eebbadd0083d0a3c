//! Drives any allocator with random operations from several cores, hostile ones among them, beside a map of what is
//! out. Everything is chosen from a seed, which a failure prints.

use std::collections::BTreeMap;

use iova::{
    AllocError, Aperture, CoreAllocator, CoreId, FreeError, IovaAllocator, IovaPfn, IovaRange,
    Pinned, Request,
};

use crate::random::Random;

pub fn range(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).expect("fits")
}

impl Random {
    fn one_of(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }
}

/// Operations in a small world, and in a roomy one.
pub const SMALL_STEPS: usize = 12_000;
pub const ROOMY_STEPS: usize = 30_000;

/// Where and how much.
#[derive(Clone)]
pub struct World {
    pub aperture: Aperture,
    pub cores: usize,
    /// Sizes are 1 to that many pages, small ones more often.
    pub max_pages: u64,
    /// Beyond that many live ranges more is freed than allocated.
    pub target: usize,
    pub steps: usize,
    /// How often a block of an empty space may have to be halved before it can be had.
    pub cuts: usize,
}

impl World {
    /// For an allocator that hands its space out in parts, with no block across a border.
    pub fn in_parts(self, cuts: usize) -> Self {
        Self { cuts, ..self }
    }

    /// A few hundred pages around holes: nearly always exhausted.
    pub fn tiny(cores: usize) -> Self {
        let reserved = [range(100, 28), range(300, 1), range(690, 100)];
        Self {
            aperture: Aperture::new(IovaPfn::new(1), IovaPfn::new(700), &reserved).expect("pages"),
            cores,
            max_pages: 40,
            target: 60,
            steps: SMALL_STEPS,
            cuts: 0,
        }
    }

    /// 2 MiB and more at a time from 64 MiB.
    pub fn tight(cores: usize) -> Self {
        let reserved = [range(0x1000, 5)];
        Self {
            aperture: Aperture::new(IovaPfn::new(3), IovaPfn::new(0x4000), &reserved)
                .expect("pages"),
            cores,
            max_pages: 4096,
            target: 30,
            steps: SMALL_STEPS,
            cuts: 0,
        }
    }

    /// A 36-bit space with the interrupt window, and some hundred ranges out.
    pub fn roomy(cores: usize) -> Self {
        Self {
            aperture: Aperture::of_bits(36).expect("valid"),
            cores,
            max_pages: 4096,
            target: 700,
            steps: ROOMY_STEPS,
            cuts: 0,
        }
    }
}

/// What is out.
#[derive(Default)]
struct Model {
    /// By first page: pages, and whether pinned.
    out: BTreeMap<u64, (u64, bool)>,
    /// With the core that pinned it, the only one that may let go.
    pinned: Vec<(CoreId, Pinned)>,
    freed: Vec<IovaRange>,
}

impl Model {
    fn overlaps(&self, range: IovaRange) -> bool {
        let below = self.out.range(..=range.last().raw()).next_back();
        below.is_some_and(|(&first, &(pages, _))| first + pages > range.first().raw())
    }

    /// Whether an aligned block of `2^order` pages at or below `last` is free.
    fn has_block(&self, aperture: &Aperture, order: u8, last: u64) -> bool {
        let pages = 1u64 << order;
        aperture.usable().iter().any(|usable| {
            let end = usable.last().raw().min(last) + 1;
            let Some(mut start) = end.checked_sub(pages).map(|start| start >> order << order)
            else {
                return false;
            };
            while start >= usable.first().raw() {
                let block = range(start, pages);
                if !self.overlaps(block) {
                    return true;
                }
                // Down past what is in the way.
                let (&blocker, _) = self
                    .out
                    .range(..=block.last().raw())
                    .next_back()
                    .expect("there");
                let Some(next) = blocker.min(start).checked_sub(pages.min(blocker)) else {
                    return false;
                };
                let next = next >> order << order;
                if next >= start {
                    return false;
                }
                start = next;
            }
            false
        })
    }

    fn random(&self, random: &mut Random) -> Option<(u64, u64, bool)> {
        let (&lowest, _) = self.out.first_key_value()?;
        let (&highest, _) = self.out.last_key_value()?;
        let at = lowest + random.below(highest - lowest + 1);
        let (&first, &(pages, is_pinned)) = self.out.range(at..).next()?;
        Some((first, pages, is_pinned))
    }
}

struct Driver<A: IovaAllocator> {
    world: World,
    space: A,
    cores: Vec<A::Core>,
    model: Model,
    random: Random,
}

/// Random operations on what `make` makes, then everything is freed and all of the space allocated.
pub fn run<A: IovaAllocator>(make: impl Fn(Aperture, usize) -> A, world: &World, seed: u64) {
    println!("seed {seed}");
    let space = make(world.aperture.clone(), world.cores);
    let cores = (0..world.cores).map(|core| space.claim(CoreId(core)).expect("free"));
    let mut driver = Driver {
        world: world.clone(),
        cores: cores.collect(),
        space,
        model: Model::default(),
        random: Random::new(seed),
    };
    for step in 0..world.steps {
        driver.step();
        if step % 1000 == 0 {
            driver.check_stats();
        }
    }
    driver.check_stats();
    driver.free_everything();
    driver.take_everything();
    driver.reset();
}

impl<A: IovaAllocator> Driver<A> {
    fn core(&mut self) -> &mut A::Core {
        let core = self.random.one_of(self.cores.len());
        &mut self.cores[core]
    }

    fn step(&mut self) {
        let is_crowded = self.model.out.len() > self.world.target;
        match self.random.below(100) {
            0..45 if !is_crowded => self.alloc(),
            0..75 => self.free(),
            75..80 => self.pin(),
            80..86 => self.end_pin(),
            86..98 => self.hostile(),
            98 => self.core().park(),
            _ => self.change_owner(),
        }
    }

    fn request(&mut self) -> (u64, u8, u64) {
        let max = self.world.max_pages;
        let bound = match self.random.below(4) {
            0 => 1,
            1 => 8,
            2 => 64,
            _ => max,
        };
        let pages = 1 + self.random.below(bound.min(max));
        let align = match self.random.below(5) {
            0 => self.random.below(11) as u8,
            _ => 0,
        };
        let top = self.world.aperture.last().raw();
        let last = match self.random.below(8) {
            0 => self.random.below(top),
            1 => 0xf_ffff,
            2 => top,
            _ => u64::MAX >> 12,
        };
        (pages, align, last)
    }

    fn alloc(&mut self) {
        let (pages, align, last) = self.request();
        let request = Request::pages(pages)
            .aligned(align)
            .at_most(IovaPfn::new(last));
        let order = align.max(pages.next_power_of_two().trailing_zeros() as u8);
        let got = self.core().alloc(request);
        match got {
            Ok(got) => self.granted(got, pages, order, last),
            Err(AllocError::Impossible { .. }) => {
                let empty = Model::default();
                let aperture = &self.world.aperture;
                assert!(!empty.has_block(aperture, order, u64::MAX), "{request:?}");
            }
            Err(AllocError::Exhausted { asked, .. }) => {
                let has_block = self.model.has_block(&self.world.aperture, order, last);
                self.cores.iter_mut().for_each(CoreAllocator::park);
                let again = self.core().alloc(request);
                if asked == 0 {
                    assert!(again.is_err(), "nobody was asked, yet {again:?} was cached");
                }
                match again {
                    Ok(got) => self.granted(got, pages, order, last),
                    Err(_) => assert!(!has_block, "{request:?} would fit"),
                }
            }
        }
    }

    fn granted(&mut self, got: IovaRange, pages: u64, order: u8, last: u64) {
        assert!(got.pages() >= pages && got.last().raw() <= last, "{got}");
        assert_eq!(got.first().raw() % (1 << order), 0, "{got} is not aligned");
        assert!(self.world.aperture.allows(got), "{got} is not usable");
        assert!(!self.model.overlaps(got), "{got} is out already");
        self.model
            .out
            .insert(got.first().raw(), (got.pages(), false));
    }

    fn free(&mut self) {
        let Some((first, pages, is_pinned)) = self.model.random(&mut self.random) else {
            return;
        };
        let range = range(first, pages);
        let freed = self.core().free(range);
        if is_pinned {
            assert_eq!(freed, Err(FreeError::NotAllocated { range }));
            return;
        }
        assert_eq!(freed, Ok(()));
        self.model.out.remove(&first);
        self.model.freed.push(range);
    }

    fn pin(&mut self) {
        let Some((first, pages, is_pinned)) = self.model.random(&mut self.random) else {
            return;
        };
        let range = range(first, pages);
        let core = self.core();
        let id = core.core();
        match core.pin(range) {
            Ok(pinned) => {
                assert!(!is_pinned && pinned.range() == range);
                self.model.out.insert(first, (pages, true));
                self.model.pinned.push((id, pinned));
            }
            Err(error) => {
                assert!(is_pinned);
                assert_eq!(error, FreeError::NotAllocated { range });
            }
        }
    }

    fn end_pin(&mut self) {
        if self.model.pinned.is_empty() {
            return;
        }
        let at = self.random.one_of(self.model.pinned.len());
        let (id, pinned) = self.model.pinned.swap_remove(at);
        let range = pinned.range();
        if self.random.below(3) == 0 {
            let owner = self.cores.iter_mut().find(|core| core.core() == id);
            owner.expect("every core has its handle").unpin(pinned);
            let known = self.model.out.get_mut(&range.first().raw());
            known.expect("pinned").1 = false;
        } else {
            self.core().free_pinned(pinned);
            self.model.out.remove(&range.first().raw());
            self.model.freed.push(range);
        }
    }

    /// A range that must not be taken back, most of them near one that is out.
    fn hostile(&mut self) {
        if self.random.below(8) == 0 {
            let request = match self.random.below(4) {
                0 => Request::pages(0),
                1 => Request::pages(u64::MAX),
                2 => Request::pages(1 << 52),
                _ => Request::pages(1).aligned(53 + self.random.below(200) as u8),
            };
            let got = self.core().alloc(request);
            assert!(matches!(got, Err(AllocError::Impossible { .. })), "{got:?}");
            return;
        }
        let near = self.model.random(&mut self.random);
        let (first, pages, _) = near.unwrap_or((5, 1, false));
        let last = self.world.aperture.last().raw();
        let (first, pages) = match self.random.below(9) {
            0 => (first, pages + 1 + self.random.below(9)),
            1 => (first, (pages / 2).max(1)),
            2 => (first, pages * 2),
            3 => (first + pages / 2, pages.div_ceil(2)),
            4 => (first.saturating_sub(1), pages),
            5 => (
                last + 1 - self.random.below(3).min(last),
                1 + self.random.below(4),
            ),
            6 => (self.random.below(last), 1 << self.random.below(12)),
            7 => (self.random.below(last), 1 << 51),
            _ => {
                let freed = self.model.freed.len();
                if freed == 0 {
                    return;
                }
                let range = self.model.freed[self.random.one_of(freed)];
                (range.first().raw(), range.pages())
            }
        };
        let Some(range) = IovaRange::new(IovaPfn::new(first), pages) else {
            return;
        };
        let known = self.model.out.get(&first).copied();
        if known.is_some_and(|(exact, _)| exact == pages) {
            return;
        }
        let is_pin = self.random.below(2) == 0;
        let core = self.core();
        let result = match is_pin {
            true => core.pin(range).map(drop),
            false => core.free(range),
        };
        let error = result.expect_err("nothing of the kind is out");
        let expected = if !self.world.aperture.allows(range) {
            FreeError::Outside { range }
        } else if known.is_some() {
            FreeError::Mismatch { range }
        } else if !self.model.overlaps(range) {
            FreeError::NotAllocated { range }
        } else {
            let fits = [
                FreeError::Mismatch { range },
                FreeError::NotAllocated { range },
            ];
            assert!(fits.contains(&error), "{error:?}");
            return;
        };
        assert_eq!(error, expected, "known: {known:?}");
    }

    /// The handle goes back and another thread gets it.
    fn change_owner(&mut self) {
        let at = self.random.one_of(self.cores.len());
        let core = self.cores.swap_remove(at);
        let id = core.core();
        assert!(self.space.claim(id).is_err() && self.space.register().is_err());
        drop(core);
        let is_by_number = self.random.below(2) == 0;
        let core = match is_by_number {
            true => self.space.claim(id),
            false => self.space.register(),
        };
        let core = core.expect("one handle is free");
        assert_eq!(core.core(), id);
        self.cores.push(core);
    }

    fn check_stats(&self) {
        let stats = self.space.stats();
        assert_eq!(stats.live_ranges, self.model.out.len() as u64);
        let pages: u64 = self.model.out.values().map(|&(pages, _)| pages).sum();
        assert_eq!(stats.live_pages, pages);
        assert!(stats.bytes > 0 && (stats.chunks > 0 || pages == 0));
        assert!(stats.chunks * 512 >= pages);
    }

    fn free_everything(&mut self) {
        while !self.model.pinned.is_empty() {
            self.end_pin();
        }
        for (first, (pages, _)) in std::mem::take(&mut self.model.out) {
            self.core().free(range(first, pages)).expect("it is out");
        }
        self.cores.iter_mut().for_each(CoreAllocator::park);
        self.check_stats();
    }

    /// Every page of the space, in the largest blocks there are.
    fn take_everything(&mut self) {
        let mut orders = Vec::new();
        for usable in self.world.aperture.usable() {
            let (mut next, end) = (usable.first().raw(), usable.last().raw() + 1);
            while next < end {
                let order = next.trailing_zeros().min((end - next).ilog2());
                orders.push(order as u8);
                next += 1 << order;
            }
        }
        orders.sort_unstable();
        let mut halves = 0;
        while let Some(order) = orders.pop() {
            let pages = 1 << order;
            let got = self.core().alloc(Request::pages(pages));
            let got = got.or_else(|_| {
                self.cores.iter_mut().for_each(CoreAllocator::park);
                self.core().alloc(Request::pages(pages))
            });
            match got {
                Ok(got) => self.granted(got, pages, order, u64::MAX),
                // A space that is cut into parts has no block that crosses a cut.
                Err(_) if halves < self.world.cuts && order > 0 => {
                    halves += 1;
                    orders.extend([order - 1; 2]);
                    orders.sort_unstable();
                }
                Err(error) => panic!("everything was freed: {error}"),
            }
        }
        self.cores.iter_mut().for_each(CoreAllocator::park);
        assert!(matches!(
            self.core().alloc(Request::pages(1)),
            Err(AllocError::Exhausted { asked: 0, .. })
        ));
    }

    /// A reset needs every handle back, and forgets what is out.
    fn reset(mut self) {
        let refused = self.space.reset().expect_err("handles are out");
        assert_eq!(refused.claimed, self.cores.len());
        self.cores.clear();
        self.space.reset().expect("no handle is out");
        let stats = self.space.stats();
        assert_eq!((stats.live_ranges, stats.live_pages), (0, 0));
        assert_eq!((stats.cached_pages, stats.chunks), (0, 0));
        let mut core = self.space.claim(CoreId(0)).expect("free");
        let got = core.alloc(Request::pages(1)).expect("the space is empty");
        core.free(got).expect("just allocated");
        assert!(core.free(got).is_err());
    }
}
