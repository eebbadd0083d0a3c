//! A DMA mapper: any sequence of maps, unmaps, wrong unmaps, ticks and parks, under any policy,
//! with a device that forgets nothing by itself.
//!
//! The first byte chooses the policy, the second the allocator and how much table memory there is;
//! then operations of a few bytes each, by two cores in turn. The model is a list of live mappings:
//! the device reaches each as its direction allows, an unmap of anything else is refused, nothing
//! is reached once its promise has run out, and in the end nothing is out, stale or allocated.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use address::{Iova, PhysAddr};
use dma_map::mapper::{Optimistic, Reuse, Teardown, Window};
use dma_map::testing::{ModelCore, ModelDomain, ModelMemory, TICK};
use dma_map::{
    Clock, DeviceLimits, Direction, DmaMapError, DmaUnmapError, Mapping, Policy, Segment,
};
use dma_peers::MagazineAllocator;
use iova::{Access, Aperture, ChunkAllocator, IovaAllocator, IovaPfn, TreeAllocator};

use crate::{Input, Script};

/// Pages of the space: it is exhausted now and then.
const PAGES: u64 = 2048;
/// Operations of one input, at most.
const STEPS: usize = 400;
const CORES: usize = 2;

fn policy(number: u8) -> Policy {
    let window = Window {
        entries: 4,
        age: Duration::from_millis(3),
    };
    let idle = Optimistic {
        quota: 4,
        residency: Duration::from_millis(3),
    };
    let teardown = [
        Teardown::Strict,
        Teardown::COMBINING,
        Teardown::Async(window),
        Teardown::Deferred(window),
    ][usize::from(number % 4)];
    let reuse = [Reuse::Never, Reuse::Shared, Reuse::Optimistic(idle)][usize::from(number / 4 % 3)];
    Policy {
        is_off: false,
        reuse,
        teardown,
    }
}

struct Live {
    mapping: Mapping,
    phys: PhysAddr,
    access: Access,
}

struct World<A: IovaAllocator> {
    domain: ModelDomain<A>,
    cores: Vec<ModelCore<A>>,
    live: Vec<Live>,
    /// Pages unmapped by their last user, and when.
    gone: BTreeMap<u64, u64>,
    is_sharing: bool,
    /// An invalidation failed: promises are those of the hardware, then.
    has_failed: bool,
    age: u64,
}

impl<A: IovaAllocator> World<A> {
    fn new(allocator: A, policy: Policy, memory: &Arc<ModelMemory>) -> Self {
        let domain = ModelDomain::in_memory(allocator, policy, DeviceLimits::default(), memory);
        let contract = domain.mapper.contract();
        Self {
            cores: (0..CORES).map(|core| domain.core(core)).collect(),
            age: contract.max_age_ns.expect("every policy has one"),
            domain,
            live: Vec::new(),
            gone: BTreeMap::new(),
            is_sharing: policy.reuse == Reuse::Shared,
            has_failed: false,
        }
    }

    fn map(&mut self, core: usize, input: &mut Input<'_>) {
        let direction = [
            Direction::ToDevice,
            Direction::FromDevice,
            Direction::Bidirectional,
        ][usize::from(input.u8() % 3)];
        let page = 64 + u64::from(input.u8() % 16);
        let phys = PhysAddr::new(page << 12 | u64::from(input.u16() & 0xfff));
        let len = u64::from(input.u16());
        let segment = Segment::new(phys, len);
        let mapping = match self.cores[core].map(&[segment], direction) {
            Ok(mapping) => mapping,
            Err(DmaMapError::Empty { .. }) if len == 0 => return,
            Err(DmaMapError::Alloc(_) | DmaMapError::Table(_)) => return,
            Err(DmaMapError::Invalidation(_)) if self.has_failed => return,
            Err(error) => panic!("{error}: {error:?}"),
        };
        assert_eq!((mapping.len(), len > 0), (len, true));
        for page in pages(&mapping) {
            self.gone.remove(&page);
        }
        let live = Live {
            mapping,
            phys,
            access: direction.access(),
        };
        self.reach(&live);
        self.live.push(live);
    }

    fn reach(&self, live: &Live) {
        let got = self.domain.device.access(live.mapping.iova(), live.access);
        assert_eq!(got, Ok(live.phys));
        let all = self
            .domain
            .device
            .access(live.mapping.iova(), Access::ReadWrite);
        assert_eq!(all.is_ok(), live.access == Access::ReadWrite);
    }

    fn unmap(&mut self, core: usize, index: usize, by_address: bool) {
        let live = self.live.swap_remove(index);
        let (iova, len) = (live.mapping.iova(), live.mapping.len());
        let pages: Vec<_> = pages(&live.mapping).collect();
        let done = match by_address {
            true => self.cores[core].unmap_at(iova, len),
            false => self.cores[core].unmap(live.mapping),
        };
        match done {
            Ok(()) => {}
            Err(DmaUnmapError::NotInvalidated { .. }) if self.has_failed => {}
            // It lives; the handle is gone, the address is not.
            Err(DmaUnmapError::NoRoom { .. }) if self.has_failed => {
                self.domain.iotlb.die_for(0);
                let again = self.cores[core].unmap_at(iova, len);
                again.unwrap_or_else(|error| panic!("{error}: {error:?}"));
            }
            Err(error) => panic!("{error}: {error:?}"),
        }
        let now = self.domain.clock.now();
        for page in pages {
            if !self.live.iter().any(|live| {
                live.mapping.range().first().raw() <= page
                    && page <= live.mapping.range().last().raw()
            }) {
                self.gone.insert(page, now);
            }
        }
    }

    /// Attempts an unmap that must be refused.
    fn attack(&mut self, core: usize, input: &mut Input<'_>) {
        let page = u64::from(input.u16()) % (PAGES + 8);
        let len = u64::from(input.u16());
        let iova = Iova::new(page << 12);
        let last = page + len.max(1).div_ceil(4096) - 1;
        let is_mapped = self.live.iter().any(|live| {
            let range = live.mapping.range();
            (range.first().raw(), range.last().raw()) == (page, last)
        });
        if len > 0 && is_mapped {
            return;
        }
        // Where mappings are shared, a wrong address is waited for some milliseconds: not often.
        if self.is_sharing && len > 0 && !page.is_multiple_of(16) {
            return;
        }
        assert!(
            self.cores[core].unmap_at(iova, len).is_err(),
            "{len:#x} bytes at {iova:#x}"
        );
    }

    fn tick(&mut self) {
        let ticked = self.domain.tick();
        assert!(ticked.is_ok() || self.has_failed);
    }

    /// Nothing is reached past its promise.
    fn look(&self, page: u64) {
        let Some(since) = self.gone.get(&page) else {
            return;
        };
        let iova = IovaPfn::new(page).start();
        let age = self.domain.clock.now() - since;
        let is_over = age > self.age + TICK && !self.has_failed;
        let reached =
            [Access::Read, Access::Write].map(|access| self.domain.device.access(iova, access));
        if reached.iter().any(Result::is_ok) {
            assert!(
                !is_over && (self.age > 0 || self.has_failed),
                "{iova:#x} after {age} ns"
            );
            assert!(
                self.domain.mapper.risk().stale_now > 0,
                "{iova:#x}: reached, not reported"
            );
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let what = input.u8();
        let core = usize::from(what >> 7);
        let some = usize::from(input.u8());
        match what & 15 {
            0..6 => self.map(core, input),
            6..10 if !self.live.is_empty() => {
                self.unmap(core, some % self.live.len(), what & 0x40 != 0);
            }
            10 => self.attack(core, input),
            11 if !self.live.is_empty() => self.reach(&self.live[some % self.live.len()]),
            12 => self.tick(),
            13 => {
                let parked = self.cores[core].park();
                assert!(parked.is_ok() || self.has_failed);
            }
            14 if some < 16 => {
                // The hardware does not answer for a while.
                self.domain.iotlb.die_for(some as u32 % 4);
                self.has_failed |= !some.is_multiple_of(4);
            }
            _ => {
                let at = some % self.gone.len().max(1);
                if let Some(page) = self.gone.keys().nth(at).copied() {
                    self.look(page);
                }
            }
        }
    }

    /// Everything returns to zero.
    fn end(mut self) {
        self.domain.iotlb.die_for(0);
        while !self.live.is_empty() {
            self.unmap(0, 0, false);
        }
        // What a tick could not invalidate, the next tick or flush does.
        self.domain
            .mapper
            .flush()
            .expect("the hardware answers again");
        for core in &mut self.cores {
            core.park().expect("the hardware answers again");
        }
        // What one core kept for another comes back when that one runs again.
        for core in &mut self.cores {
            core.park().expect("the hardware answers again");
        }
        let risk = self.domain.mapper.risk();
        assert_eq!(risk.stale_now, 0);
        if !self.has_failed {
            risk.check(TICK)
                .unwrap_or_else(|broken| panic!("{broken}: {risk:?}"));
        }
        for page in self.gone.keys() {
            let iova = IovaPfn::new(*page).start();
            for access in [Access::Read, Access::Write] {
                let got = self.domain.device.access(iova, access);
                assert!(
                    got.is_err(),
                    "{iova:#x} is reached for {access:?}, {:?}, failed: {}",
                    self.domain.mapper.policy(),
                    self.has_failed
                );
            }
        }
        let stats = self.domain.mapper.allocator_stats();
        assert_eq!((stats.live_ranges, stats.live_pages), (0, 0));
        assert_eq!(self.domain.mapper.table_stats().retired, 0);
    }
}

fn pages(mapping: &Mapping) -> impl Iterator<Item = u64> + use<> {
    mapping.range().first().raw()..=mapping.range().last().raw()
}

fn play<A: IovaAllocator>(allocator: A, policy: Policy, tables: usize, mut input: Input<'_>) {
    let memory = Arc::new(ModelMemory::new(tables));
    let mut world = World::new(allocator, policy, &memory);
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
    }
    world.end();
    assert_eq!(memory.used(), 0, "table pages");
}

/// The body.
///
/// # Panics
/// If the mapper does anything that the model does not.
pub fn run(data: &[u8]) {
    const OK: &str = "two cores and such a space are in range";
    let mut input = Input::new(data);
    let policy = policy(input.u8());
    let how = input.u8();
    let tables = if how & 0x80 == 0 { 64 } else { 5 };
    let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(PAGES), &[]).expect(OK);
    match how % 3 {
        0 => play(
            ChunkAllocator::retiring(aperture, CORES).expect(OK),
            policy,
            tables,
            input,
        ),
        1 => play(
            MagazineAllocator::new(aperture, CORES).expect(OK),
            policy,
            tables,
            input,
        ),
        _ => play(
            TreeAllocator::new(aperture, CORES).expect(OK),
            policy,
            tables,
            input,
        ),
    }
}

/// For every policy: pages mapped and unmapped again by both cores, with everything else in
/// between.
pub fn seeds() -> Vec<Vec<u8>> {
    (0..20u8)
        .map(|number| {
            let mut script = Script::new();
            script.u8(number).u8((number % 3) | ((number & 4) << 5));
            for i in 0..24u8 {
                let core = (i % 2) << 7;
                script
                    .u8(core)
                    .u8(0)
                    .u8(i)
                    .u8(i / 2)
                    .u16(0x10)
                    .u16(0x800 * (1 + u16::from(i % 5)));
                if i % 3 != 0 {
                    script.u8((core ^ 0x80) | 6 | ((i % 4) << 6)).u8(i);
                }
                match i % 6 {
                    0 => script.u8(10).u8(0).u16(0x7f0).u16(0x1000),
                    1 => script.u8(12).u8(0),
                    2 => script.u8(15).u8(i),
                    3 if i > 20 => script.u8(14).u8(1),
                    4 => script.u8(13).u8(0),
                    _ => script.u8(11).u8(i),
                };
            }
            script.end()
        })
        .collect()
}
