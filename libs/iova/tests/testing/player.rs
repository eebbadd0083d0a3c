//! The operations of phases, and what must come of each.

use alloc::vec::Vec;

use super::out::How;
use super::{Out, Phase, Random, Shared, World};
use crate::wanted::order_of;
use crate::{
    AllocError, CoreAllocator, CoreId, FreeError, FreeManyError, IovaAllocator, IovaPfn, IovaRange,
    Pinned, Request, RetiredChunk,
};

/// Ranges that were freed last: freeing them again is refused.
const FREED: usize = 64;
/// Most ranges pinned, and most chunks retired, at a time.
const MOST_PINNED: usize = 24;
const MOST_RETIRED: usize = 4;
/// A phase is over after so many refusals.
const ENOUGH: u32 = 16;
/// With more ranges out, one refusal in 16 is looked into: that takes as long as there are ranges.
const MANY: u64 = 100;
/// The free pages of spaces up to this size are counted by taking them all, now and then.
const COUNTABLE: u64 = 8192;

/// Makes operations on a space, by all of its cores in turn or by one, and checks every answer.
///
/// Its methods panic where an answer is wrong.
pub struct Player<'a, A: IovaAllocator> {
    space: &'a A,
    world: &'a World,
    /// Pages of the space.
    usable: u64,
    /// With others, who work at the same time.
    shared: Option<&'a Shared>,
    cores: Vec<A::Core>,
    out: Out,
    /// With the core that pinned it, the only one that may unpin it.
    pinned: Vec<(CoreId, Pinned)>,
    /// With the core that retired it.
    retired: Vec<(CoreId, RetiredChunk)>,
    /// A ring of [`FREED`].
    freed: Vec<IovaRange>,
    frees: usize,
    random: Random,
    operations: u64,
    /// In this phase.
    refusals: u32,
}

impl<'a, A: IovaAllocator> Player<'a, A> {
    /// One that plays all cores of a space, in an order that the seed gives.
    ///
    /// # Panics
    /// If a core has its handle already.
    pub fn of_all_cores(space: &'a A, world: &'a World, seed: u64) -> Self {
        let cores = (0..world.cores).map(|core| space.claim(CoreId(core)).expect("free"));
        Self::with_cores(space, world, cores.collect(), None, seed)
    }

    /// One that is a core among others: their players run at the same time, on threads of their
    /// own.
    ///
    /// # Panics
    /// If the core has its handle already.
    pub fn of_one_core(
        space: &'a A,
        world: &'a World,
        shared: &'a Shared,
        core: CoreId,
        seed: u64,
    ) -> Self {
        let handle = space.claim(core).expect("free");
        let seed = seed ^ (core.0 as u64 + 1) << 48;
        Self::with_cores(space, world, Vec::from([handle]), Some(shared), seed)
    }

    fn with_cores(
        space: &'a A,
        world: &'a World,
        cores: Vec<A::Core>,
        shared: Option<&'a Shared>,
        seed: u64,
    ) -> Self {
        Self {
            space,
            world,
            usable: world.aperture.usable().iter().map(|r| r.pages()).sum(),
            shared,
            cores,
            out: Out::default(),
            pinned: Vec::new(),
            retired: Vec::new(),
            freed: Vec::with_capacity(FREED),
            frees: 0,
            random: Random::new(seed),
            operations: 0,
            refusals: 0,
        }
    }

    /// Ranges that are out.
    pub fn out(&self) -> &Out {
        &self.out
    }

    /// Operations so far.
    pub fn operations(&self) -> u64 {
        self.operations
    }

    /// Phases of random kinds until `operations` more are made.
    pub fn play(&mut self, operations: u64) {
        let end = self.operations + operations;
        while self.operations < end {
            let mut phase = Phase::random(&mut self.random, self.world);
            phase.steps = phase.steps.min((end - self.operations) as u32);
            self.run(&phase);
        }
    }

    /// One phase, whose operations are chosen by a seed of its own.
    pub fn run_seeded(&mut self, phase: &Phase, seed: u64) {
        self.random = Random::new(seed);
        self.run(phase);
    }

    /// One phase.
    pub fn run(&mut self, phase: &Phase) {
        self.refusals = 0;
        for _ in 0..phase.steps {
            self.step(phase);
            if self.refusals > ENOUGH
                || phase.share < 40 && self.percent_out() <= u64::from(phase.until)
            {
                break;
            }
        }
        if self.shared.is_none() {
            self.check_stats();
            if self.usable <= COUNTABLE && self.random.one_in(256) {
                self.count_free_pages();
            }
        }
    }

    fn percent_out(&self) -> u64 {
        let pages = self.out.pages() * 100 / self.usable;
        pages.max(self.out.ranges() * 100 / self.world.most as u64)
    }

    fn step(&mut self, phase: &Phase) {
        self.operations += 1;
        if self.random.one_in(8) {
            return self.do_other(phase);
        }
        let is_alloc = self.random.below(100) < u64::from(phase.share);
        if is_alloc && self.out.ranges() < self.world.most as u64 {
            self.alloc(phase);
        } else {
            self.free(phase);
        }
    }

    /// Whatever is neither an allocation nor a plain free.
    fn do_other(&mut self, phase: &Phase) {
        match self.random.below(32) {
            0..8 if self.pinned.len() < MOST_PINNED => self.pin(phase),
            0..16 => self.end_pin(),
            16..28 => self.attack(),
            28..30 => self.retire_or_recycle(),
            30 if self.random.one_in(8) => self.core().park(),
            31 if self.random.one_in(8) && self.shared.is_none() => self.change_owner(),
            _ => {}
        }
    }

    fn core(&mut self) -> &mut A::Core {
        let core = self.random.index(self.cores.len());
        &mut self.cores[core]
    }

    fn park_all(&mut self) {
        self.cores.iter_mut().for_each(CoreAllocator::park);
    }

    fn alloc(&mut self, phase: &Phase) {
        let request = phase.request(&mut self.random, self.world);
        match self.core().alloc(request) {
            Ok(got) => self.granted(&request, got),
            Err(error) => self.refused(&request, &error),
        }
    }

    fn granted(&mut self, request: &Request, got: IovaRange) {
        assert!(got.pages() >= request.pages, "{request:?}: {got} is small");
        assert!(got.last() <= request.last, "{request:?}: {got} is high");
        let order = request.align_order.max(order_of(request.pages));
        let is_aligned = got.first().raw().is_multiple_of(1 << order);
        assert!(is_aligned, "{request:?}: {got} is not aligned");
        let is_usable = self.world.aperture.allows(got);
        assert!(is_usable, "{request:?}: {got} is not usable");
        assert!(!self.out.overlaps(got), "{request:?}: {got} is out already");
        if let Some(shared) = self.shared {
            shared.flip(got, false);
        }
        self.out.insert(got);
    }

    fn refused(&mut self, request: &Request, error: &AllocError) {
        let order = request.align_order.max(order_of(request.pages));
        let aperture = &self.world.aperture;
        let AllocError::Exhausted { asked, .. } = *error else {
            let is_possible = Out::default().has_block(aperture, order, u64::MAX);
            assert!(!is_possible, "{request:?}: {error}");
            return;
        };
        self.refusals += 1;
        // While other players run, it is unknown what was free a moment ago.
        if self.shared.is_some() || self.out.ranges() > MANY && !self.random.one_in(16) {
            return;
        }
        // Pages below the limit, as far as the allocator keeps to it.
        let grain = self.world.grain;
        let below = (request.last.raw() + 1) / grain.limit * grain.limit;
        // A larger block than a grain may lie across a border, where nothing is had.
        let is_whole = self.world.cuts == 0 || order <= grain.order;
        let has_block = is_whole
            && below > 0
            && self
                .out
                .has_block(aperture, order.max(grain.order), below - 1);
        self.park_all();
        let again = self.core().alloc(*request);
        assert!(
            asked > 0 || again.is_err(),
            "{request:?}: nobody was asked, yet {again:?} was cached"
        );
        match again {
            Ok(got) => self.granted(request, got),
            Err(_) => assert!(!has_block, "{request:?} would fit: {error}"),
        }
    }

    fn free(&mut self, phase: &Phase) {
        if self.random.one_in(32) {
            return self.free_many(phase);
        }
        let range = match self.shared {
            None => self.out.pick(phase.victim, &mut self.random),
            // Much is allocated by one core and freed by another.
            Some(shared) => match self.random.below(8) {
                0 => return self.pass(shared, phase),
                1 => return self.free_passed(shared),
                _ => self.out.pick(phase.victim, &mut self.random),
            },
        };
        if let Some(range) = range {
            self.out.remove(range.first().raw());
            self.give_back(range);
        }
    }

    /// Frees several at once, and now and then among them, at the end, what is refused.
    fn free_many(&mut self, phase: &Phase) {
        let mut ranges = Vec::new();
        for _ in 0..1 + self.random.below(40) {
            let Some(range) = self.out.pick(phase.victim, &mut self.random) else {
                break;
            };
            self.out.remove(range.first().raw());
            ranges.push(range);
        }
        if let Some(shared) = self.shared {
            ranges.iter().for_each(|range| shared.flip(*range, true));
        }
        let mut expected = Ok(());
        // No other player may come and allocate it meanwhile.
        if self.shared.is_none()
            && self.random.one_in(4)
            && let Some(&range) = ranges.first()
        {
            let (index, source) = (ranges.len(), FreeError::NotAllocated { range });
            expected = Err(FreeManyError { index, source });
            let again = [range, *ranges.last().unwrap_or(&range)];
            ranges.extend(again);
        }
        let freed = self.core().free_many(&ranges);
        assert_eq!(freed, expected, "{ranges:?} are out");
        if expected.is_err() {
            ranges.truncate(ranges.len() - 2);
        }
        ranges.into_iter().for_each(|range| self.note_freed(range));
    }

    /// Frees what is not in our books any more.
    fn give_back(&mut self, range: IovaRange) {
        if let Some(shared) = self.shared {
            shared.flip(range, true);
        }
        let freed = self.core().free(range);
        assert_eq!(freed, Ok(()), "{range} is out");
        self.note_freed(range);
    }

    fn note_freed(&mut self, range: IovaRange) {
        if self.freed.len() < FREED {
            self.freed.push(range);
        } else {
            self.freed[self.frees % FREED] = range;
        }
        self.frees += 1;
    }

    /// A range of ours for another core to free.
    fn pass(&mut self, shared: &Shared, phase: &Phase) {
        let Some(range) = self.out.pick(phase.victim, &mut self.random) else {
            return;
        };
        self.out.remove(range.first().raw());
        let id = self.core().core().0;
        if let Some(range) = shared.pass(id, range) {
            self.out.insert(range);
        }
    }

    fn free_passed(&mut self, shared: &Shared) {
        let id = self.core().core().0;
        if let Some(range) = shared.take(id) {
            self.give_back(range);
        }
    }

    fn pin(&mut self, phase: &Phase) {
        let Some(range) = self.out.pick(phase.victim, &mut self.random) else {
            return;
        };
        let core = self.core();
        let id = core.core();
        let pinned = core.pin(range);
        let pinned = pinned.unwrap_or_else(|error| panic!("{range} is out: {error}"));
        assert_eq!(pinned.range(), range);
        self.out.remove(range.first().raw());
        self.out.insert_as(range, How::Pinned);
        self.pinned.push((id, pinned));
    }

    fn end_pin(&mut self) {
        let len = self.pinned.len();
        if len == 0 {
            return;
        }
        let at = self.random.index(len);
        let (id, pinned) = self.pinned.swap_remove(at);
        let range = self.out.remove(pinned.range().first().raw());
        assert_eq!(pinned.range(), range);
        if self.random.one_in(3) {
            let owner = self.cores.iter_mut().find(|core| core.core() == id);
            owner.expect("its handle is ours").unpin(pinned);
            self.out.insert(range);
            return;
        }
        if let Some(shared) = self.shared {
            shared.flip(range, true);
        }
        self.core().free_pinned(pinned);
        self.note_freed(range);
    }

    /// A free or pin that must be refused, most of them near something that is out.
    fn attack(&mut self) {
        if self.random.one_in(16) {
            return self.ask_the_impossible();
        }
        let Some((range, how)) = self.out.any(&mut self.random) else {
            return;
        };
        if how == How::Pinned {
            self.is_refused(range, Some(FreeError::NotAllocated { range }));
            return;
        }
        let (first, pages) = (range.first().raw(), range.pages());
        // What is not ours may be another's, if there are others.
        let kinds = if self.shared.is_some() { 4 } else { 9 };
        let last = self.world.aperture.last().raw();
        let (first, pages) = match self.random.below(kinds) {
            0 => (first, pages + 1 + self.random.below(9)),
            1 => (first, pages.div_ceil(2)),
            2 => (first, pages * 2),
            3 => (first + pages / 2, pages.div_ceil(2)),
            4 => (first.saturating_sub(1), pages),
            5 => (
                last + 1 - self.random.below(3).min(last),
                1 + self.random.below(4),
            ),
            6 => (self.random.below(last), 1 << self.random.below(12)),
            7 => (self.random.below(last), 1 << 51),
            _ if self.freed.is_empty() => return,
            _ => {
                let at = self.random.index(self.freed.len());
                (self.freed[at].first().raw(), self.freed[at].pages())
            }
        };
        let Some(range) = IovaRange::new(IovaPfn::new(first), pages) else {
            return;
        };
        let known = self.out.at(first);
        let expected = match known {
            // It is right.
            Some((exact, How::Allocated)) if exact == pages => return,
            _ if !self.world.aperture.allows(range) => Some(FreeError::Outside { range }),
            Some((exact, How::Pinned)) if exact == pages => Some(FreeError::NotAllocated { range }),
            Some((_, How::Allocated | How::Pinned)) => Some(FreeError::Mismatch { range }),
            // A part of something, or of a chunk that no core owns.
            Some((_, How::Retired)) => None,
            None if self.out.overlaps(range) => None,
            None => Some(FreeError::NotAllocated { range }),
        };
        self.is_refused(range, expected);
    }

    /// Neither a free nor a pin of `range` changes anything.
    fn is_refused(&mut self, range: IovaRange, expected: Option<FreeError>) {
        let is_pin = self.random.one_in(2);
        let core = self.core();
        let result = match is_pin {
            true => core.pin(range).map(drop),
            false => core.free(range),
        };
        let error = result.expect_err("nothing of the kind is out");
        let either = [
            FreeError::Mismatch { range },
            FreeError::NotAllocated { range },
        ];
        match expected {
            Some(expected) => assert_eq!(error, expected),
            None => assert!(either.contains(&error), "{error}"),
        }
    }

    fn ask_the_impossible(&mut self) {
        let request = match self.random.below(4) {
            0 => Request::pages(0),
            1 => Request::pages(u64::MAX),
            2 => Request::pages(1 << 52),
            _ => Request::pages(1).aligned(53 + self.random.below(200) as u8),
        };
        let got = self.core().alloc(request);
        assert!(matches!(got, Err(AllocError::Impossible { .. })), "{got:?}");
    }

    /// Takes an empty chunk out of circulation, or brings one back.
    fn retire_or_recycle(&mut self) {
        if self.retired.len() < MOST_RETIRED {
            let core = self.core();
            let id = core.core();
            if let Some(chunk) = core.retire() {
                let range = chunk.range();
                assert!(self.world.aperture.allows(range), "{range} is not usable");
                assert!(!self.out.overlaps(range), "{range} is in use");
                if let Some(shared) = self.shared {
                    shared.flip(range, false);
                }
                self.out.insert_as(range, How::Retired);
                self.retired.push((id, chunk));
                return;
            }
        }
        self.recycle();
    }

    fn recycle(&mut self) {
        let Some((id, chunk)) = self.retired.pop() else {
            return;
        };
        let range = self.out.remove(chunk.range().first().raw());
        if let Some(shared) = self.shared {
            shared.flip(range, true);
        }
        let owner = self.cores.iter_mut().find(|core| core.core() == id);
        owner.expect("its handle is ours").recycle(chunk);
    }

    /// A handle goes back and is claimed again, as if by another thread.
    fn change_owner(&mut self) {
        let at = self.random.index(self.cores.len());
        let core = self.cores.swap_remove(at);
        let id = core.core();
        assert!(self.space.claim(id).is_err() && self.space.register().is_err());
        drop(core);
        let is_by_number = self.random.one_in(2);
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
        assert_eq!(
            (stats.live_ranges, stats.live_pages),
            (self.out.ranges(), self.out.pages()),
            "ranges and pages out"
        );
        let is_counted = stats.chunks > 0 || self.out.pages() == 0;
        assert!(is_counted && stats.bytes > 0, "{stats:?}");
        assert!(stats.chunks * crate::CHUNK_PAGES >= self.out.pages());
    }

    /// Takes every free page, one by one: as many as are not out, but for what the allocator's
    /// grain keeps. Then they are free again.
    fn count_free_pages(&mut self) {
        while !self.retired.is_empty() {
            self.recycle();
        }
        let free = self.usable - self.out.pages();
        let mut got: Vec<IovaRange> = Vec::new();
        self.park_all();
        let request = Request::pages(1);
        while let Ok(range) = self.cores[0].alloc(request) {
            assert_eq!(range.pages(), 1);
            self.granted(&request, range);
            got.push(range);
        }
        let order = self.world.grain.order;
        if order == 0 {
            assert_eq!(got.len() as u64, free, "free pages that can be had");
        }
        let aperture = &self.world.aperture;
        let has_block = self.out.has_block(aperture, order, u64::MAX);
        assert!(
            !has_block,
            "{free} pages were free, {} could be had",
            got.len()
        );
        self.operations += got.len() as u64;
        for range in got {
            self.out.remove(range.first().raw());
            self.give_back(range);
        }
        self.check_stats();
    }

    /// Everything is freed; a player that is alone then takes all of the space, gives its handles
    /// back and resets it.
    pub fn finish(mut self) {
        self.free_everything();
        if self.shared.is_none() {
            self.check_stats();
            self.take_everything();
            self.reset();
        }
    }

    fn free_everything(&mut self) {
        while !self.pinned.is_empty() {
            self.end_pin();
        }
        while !self.retired.is_empty() {
            self.recycle();
        }
        for first in self.out.firsts() {
            let range = self.out.remove(first);
            self.give_back(range);
        }
        if let Some(shared) = self.shared {
            let id = self.core().core().0;
            while let Some(range) = shared.take(id) {
                self.give_back(range);
            }
        }
        self.park_all();
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
        let mut halved = 0;
        while let Some(order) = orders.pop() {
            let request = Request::pages(1 << order);
            let got = self.core().alloc(request).or_else(|_| {
                self.park_all();
                self.core().alloc(request)
            });
            match got {
                Ok(got) => self.granted(&request, got),
                // A space that is cut into parts has no block that crosses a cut.
                Err(_) if halved < self.world.cuts && order > 0 => {
                    halved += 1;
                    orders.extend([order - 1; 2]);
                    orders.sort_unstable();
                }
                Err(error) => panic!("everything was freed: {error}"),
            }
        }
        self.park_all();
        let more = self.core().alloc(Request::pages(1));
        assert!(
            matches!(more, Err(AllocError::Exhausted { asked: 0, .. })),
            "{more:?} when everything is out"
        );
        self.check_stats();
    }

    /// A reset needs every handle back, and forgets what is out.
    fn reset(mut self) {
        let refused = self.space.reset().expect_err("handles are out");
        assert_eq!(refused.claimed, self.cores.len());
        self.cores.clear();
        self.space.reset().expect("no handle is out");
        let stats = self.space.stats();
        assert_eq!(
            (stats.live_ranges, stats.live_pages, stats.cached_pages),
            (0, 0, 0)
        );
        assert_eq!(stats.chunks, 0);
        let mut core = self.space.claim(CoreId(0)).expect("free");
        let got = core.alloc(Request::pages(1)).expect("the space is empty");
        core.free(got).expect("just allocated");
        assert!(core.free(got).is_err());
    }
}

impl<A: IovaAllocator> core::fmt::Debug for Player<'_, A> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self {
            cores,
            out,
            operations,
            ..
        } = self;
        f.debug_struct("Player")
            .field("cores", &cores.len())
            .field("ranges", &out.ranges())
            .field("operations", operations)
            .finish_non_exhaustive()
    }
}
