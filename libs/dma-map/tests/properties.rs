//! Every policy over every kind of allocator: random operations by three cores, hostile ones among
//! them, against a map of all mappings.
//!
//! Hostile are: unmaps twice, of a part, of too much, of nothing, of no bytes, past the end of the
//! space, above the device's mask, and of another domain's mapping; maps of no bytes, past the end
//! of memory, of nothing; and maps until nothing is left. Each is refused with an error that fits,
//! what is mapped stays mapped, and in the end all is back at zero. (Invalidations that fail:
//! `mapper/tests/errors.rs`.)
//!
//! More than a million operations all together, asserted; `iova`'s own tests make four million
//! more, and `bench/dma-soak` goes on from there.
#![cfg(not(any(loom, shuttle)))]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use address::{Iova, PAGE_SIZE, PhysAddr};
use dma_map::mapper::Reuse;
use dma_map::testing::{ModelCore, ModelDomain, POLICIES, TICK, is_strict};
use dma_map::{
    Clock, DeviceLimits, Direction, DmaMapError, DmaUnmapError, Mapping, Policy, Segment,
};
use iova::{Access, AllocError, Aperture, ChunkAllocator, IovaAllocator, IovaPfn, TreeAllocator};

const CORES: usize = 3;
/// Pages of the space, and of what a device with a mask reaches: 4 MiB.
const SPACE: u64 = 2048;
const MASKED: u64 = 1024;
const MASK_BITS: u32 = 22;
/// Pages of memory that all cores map, from this one on.
const MEMORY: u64 = 64;
/// Memory of which each page is mapped once, far above.
const FAR: u64 = 0x10_0000;
const TABLES: usize = 64;

/// The generator of the benches: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 20
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

#[derive(Debug)]
struct Live {
    mapping: Mapping,
    phys: PhysAddr,
    direction: Direction,
}

/// The naive model's record of a page of IOVA.
#[derive(Clone, Copy)]
struct PageRecord {
    phys: u64,
    access: Access,
    users: u32,
}

struct Run<A: IovaAllocator> {
    world: ModelDomain<A>,
    /// Another domain, whose mappings are passed to these cores.
    other: ModelDomain<TreeAllocator>,
    cores: Vec<ModelCore<A>>,
    random: Random,
    live: Vec<Live>,
    known: BTreeMap<u64, PageRecord>,
    /// Pages unmapped, and the time.
    gone: BTreeMap<u64, u64>,
    /// The last unmaps: where, and how many bytes.
    ended: Vec<(Iova, u64)>,
    /// Last page that a mapping may have.
    last: u64,
    /// Pages that one core gave to a far mapping.
    far: u64,
    is_strict: bool,
    /// Whether an unmap that is refused was looked at for milliseconds: another user might have had
    /// the pin.
    is_patient: bool,
    age: u64,
}

impl<A: IovaAllocator> Run<A> {
    fn new(kind: &Kind<A>, policy: Policy, seed: u64) -> Self {
        let (bits, last) = match seed % 2 {
            0 => (MASK_BITS, MASKED - 1),
            _ => (64, SPACE - 1),
        };
        let limits = DeviceLimits::of_bits(bits);
        let world = ModelDomain::new((kind.make)(space()), policy, limits, TABLES);
        let age = world
            .mapper
            .contract()
            .max_age_ns
            .expect("every policy has one");
        Self {
            cores: (0..CORES).map(|core| world.core(core)).collect(),
            other: ModelDomain::new(
                TreeAllocator::new(space(), 1).expect("a core"),
                policy,
                DeviceLimits::default(),
                8,
            ),
            world,
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            live: Vec::new(),
            known: BTreeMap::new(),
            gone: BTreeMap::new(),
            ended: Vec::new(),
            last,
            far: FAR,
            is_strict: is_strict(&policy),
            is_patient: policy.reuse == Reuse::Shared,
            age,
        }
    }

    fn core(&mut self) -> usize {
        self.random.below(CORES as u64) as usize
    }

    fn direction(&mut self) -> Direction {
        [
            Direction::ToDevice,
            Direction::FromDevice,
            Direction::Bidirectional,
        ][self.random.below(3) as usize]
    }

    fn map(&mut self) {
        let page = MEMORY + self.random.below(48);
        let phys = PhysAddr::new(page << 12 | self.random.below(4096));
        let most = if self.random.below(4) == 0 {
            16_384
        } else {
            2048
        };
        let len = 1 + self.random.below(most);
        match self.map_segment(Segment::new(phys, len)) {
            Ok(()) => {}
            // Other cores keep what is left until they run.
            Err(DmaMapError::Alloc(AllocError::Exhausted { .. })) => self.unmap(),
            Err(error) => panic!("{error}: {error:?}"),
        }
    }

    fn map_segment(&mut self, segment: Segment) -> Result<(), DmaMapError> {
        let (core, direction) = (self.core(), self.direction());
        let mapping = match self.random.below(8) {
            0 => self.cores[core].map_coherent(&[segment], direction),
            _ => self.cores[core].map(&[segment], direction),
        }?;
        let phys = segment.phys;
        assert_eq!(mapping.iova().raw() % PAGE_SIZE, phys.raw() % PAGE_SIZE);
        assert!(mapping.range().last().raw() <= self.last, "above the mask");
        for (i, iova) in pages(&mapping).enumerate() {
            let fresh = PageRecord {
                phys: (phys.raw() >> 12) + i as u64,
                access: direction.access(),
                users: 0,
            };
            let known = self.known.entry(iova).or_insert(fresh);
            assert_eq!(
                (known.phys, known.access),
                (fresh.phys, fresh.access),
                "overlap"
            );
            known.users += 1;
            self.gone.remove(&iova);
        }
        self.live.push(Live {
            mapping,
            phys,
            direction,
        });
        Ok(())
    }

    /// Until nothing is left: what is mapped stays so, and something can be mapped again.
    fn exhaust(&mut self) {
        let core = self.core();
        // What the others keep is theirs to return.
        self.cores
            .iter_mut()
            .for_each(|core| core.park().expect("the hardware answers"));
        let error = loop {
            // 16 pages, of which no two mappings share one.
            let segment = Segment::new(PhysAddr::new(self.far << 12), 16 * PAGE_SIZE);
            self.far += 16;
            assert!(self.far < FAR + 16 * SPACE * SPACE, "there is no end");
            match self.map_segment(segment) {
                Ok(()) => {}
                Err(error) => break error,
            }
        };
        let DmaMapError::Alloc(AllocError::Exhausted { last, .. }) = error else {
            panic!("{error}: {error:?}");
        };
        assert!(last.raw() <= self.last);
        for live in &self.live {
            let got = self
                .world
                .device
                .access(live.mapping.iova(), live.direction.access());
            assert_eq!(got, Ok(live.phys));
        }
        while self.live.len() > 8 {
            self.unmap();
        }
        self.cores[core].park().expect("the hardware answers");
    }

    fn unmap(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let index = self.random.below(self.live.len() as u64) as usize;
        let Live { mapping, .. } = self.live.swap_remove(index);
        let (iova, len, range) = (mapping.iova(), mapping.len(), mapping.range());
        let numbers = pages(&mapping);
        if self.random.below(2) == 0 {
            let _ = self.world.device.access(iova, Access::Read);
        }
        let core = self.core();
        if self.random.below(4) == 0 {
            drop(mapping);
            self.cores[core].unmap_at(iova, len).expect("mapped so");
        } else {
            self.cores[core].unmap(mapping).expect("mapped so");
        }
        self.ended(iova, len, numbers);
        self.reach(range.first().raw());
    }

    /// Up to a hundred at once, in any order.
    fn unmap_many(&mut self) {
        let (mut mappings, mut places) = (Vec::new(), Vec::new());
        for _ in 0..self.random.below(100).min(self.live.len() as u64) {
            let index = self.random.below(self.live.len() as u64) as usize;
            let Live { mapping, .. } = self.live.swap_remove(index);
            if self.random.below(2) == 0 {
                let _ = self.world.device.access(mapping.iova(), Access::Read);
            }
            places.push((mapping.iova(), mapping.len(), pages(&mapping)));
            mappings.push(mapping);
        }
        let core = self.core();
        let ended = self.cores[core].unmap_many(&mut mappings);
        ended.expect("mapped so");
        assert!(mappings.is_empty());
        let first: Vec<u64> = places.iter().map(|(iova, ..)| iova.raw() >> 12).collect();
        for (iova, len, numbers) in places {
            self.ended(iova, len, numbers);
        }
        for page in first {
            self.reach(page);
        }
    }

    /// A mapping has been unmapped.
    fn ended(&mut self, iova: Iova, len: u64, numbers: impl Iterator<Item = u64>) {
        self.ended.push((iova, len));
        if self.ended.len() > 16 {
            self.ended.swap_remove(0);
        }
        let now = self.world.clock.now();
        for page in numbers {
            let known = self.known.get_mut(&page).expect("it was mapped");
            known.users -= 1;
            if known.users == 0 {
                self.known.remove(&page);
                self.gone.insert(page, now);
            }
        }
    }

    /// Makes calls that must be refused, and change nothing.
    fn attack(&mut self) {
        let core = self.core();
        let kind = self.random.below(9);
        // Sixty-five thousand searches each: some are enough.
        if self.is_patient && ![0, 1, 5, 6].contains(&kind) && self.random.below(16) > 0 {
            return;
        }
        let (iova, len) = match kind {
            0 => (Iova::new(self.random.next() << 12), 0),
            1 => (Iova::new(u64::MAX - 100), 4096),
            2 => {
                let page = 1 + self.random.below(SPACE + 64);
                if self.known.contains_key(&page) {
                    return;
                }
                (Iova::new(page << 12), 1 + self.random.below(9000))
            }
            // Once more.
            3 => {
                let index = self.random.below(self.ended.len().max(1) as u64) as usize;
                let Some(&(iova, len)) = self.ended.get(index) else {
                    return;
                };
                if self.known.contains_key(&IovaPfn::of(iova).raw()) {
                    return;
                }
                (iova, len)
            }
            // Outside of the space, and of what the mask allows.
            4 => (
                Iova::new((self.last + 1 + self.random.below(64)) << 12),
                4096,
            ),
            5 => return self.attack_another_domain(core),
            6 => return self.attack_with_memory(core),
            _ => match self.part_of_something(kind == 7) {
                Some(part) => part,
                None => return,
            },
        };
        match self.cores[core].unmap_at(iova, len) {
            Err(DmaUnmapError::NoRange { .. }) => assert!(kind < 2, "{iova:?} {len:#x}"),
            Err(DmaUnmapError::NotAllocated(_) | DmaUnmapError::Partial { .. }) => {
                assert!(kind > 1)
            }
            // It ends within what the allocator rounded up.
            Err(DmaUnmapError::Table(_)) => assert_eq!(kind, 8),
            other => panic!("{iova:?}, {len:#x} bytes: {other:?}"),
        }
    }

    /// Too little, or too much, of something that is mapped.
    fn part_of_something(&mut self, less: bool) -> Option<(Iova, u64)> {
        let index = self.random.below(self.live.len().max(1) as u64) as usize;
        let range = self.live.get(index)?.mapping.range();
        let bytes = range.pages() * PAGE_SIZE;
        let len = match less {
            true => bytes - PAGE_SIZE,
            false => bytes + PAGE_SIZE * (1 + self.random.below(3)),
        };
        (len > 0).then_some((range.start(), len))
    }

    /// A mapping that another mapper made, at an address at which there may be one of ours.
    fn attack_another_domain(&mut self, core: usize) {
        let mut other = self.other.core(0);
        let page = Segment::new(PhysAddr::new(MEMORY << 12), 4096);
        let mapping = other
            .map(&[page], Direction::ToDevice)
            .expect("an empty space");
        let (iova, len) = (mapping.iova(), mapping.len());
        let refused = self.cores[core].unmap(mapping);
        assert_eq!(refused, Err(DmaUnmapError::OtherDomain { iova }));
        let got = self.other.device.access(iova, Access::Read);
        assert_eq!(got, Ok(page.phys), "it lives");
        other.unmap_at(iova, len).expect("it lives");
        other.park().expect("the hardware answers");
    }

    /// Memory that is none.
    fn attack_with_memory(&mut self, core: usize) {
        let direction = self.direction();
        let phys = PhysAddr::new(u64::MAX - self.random.below(4096));
        let page = Segment::new(PhysAddr::new(MEMORY << 12), 4096);
        let refused = match self.random.below(3) {
            0 => self.cores[core].map(&[], direction),
            1 => self.cores[core].map(&[page, Segment::new(phys, 0)], direction),
            _ => self.cores[core].map(&[page, Segment::new(phys, 8192)], direction),
        };
        let is_right = matches!(
            refused,
            Err(DmaMapError::NoSegments
                | DmaMapError::Empty { index: 1, .. }
                | DmaMapError::Wraps { index: 1, .. })
        );
        assert!(is_right, "{refused:?}");
    }

    /// Checks that the device's access to a page agrees with the model, within the window.
    fn reach(&mut self, page: u64) {
        let want = match self.random.below(3) {
            0 => Access::Read,
            1 => Access::Write,
            _ => Access::ReadWrite,
        };
        let got = self.world.device.access(Iova::new(page << 12), want);
        if let Some(known) = self.known.get(&page) {
            if known.access as u8 & want as u8 == want as u8 {
                assert_eq!(got, Ok(PhysAddr::new(known.phys << 12)), "page {page:#x}");
            } else {
                assert!(
                    got.is_err(),
                    "a {:?} mapping allowed {want:?}",
                    known.access
                );
            }
            return;
        }
        if got.is_ok() {
            assert!(
                !self.is_strict,
                "page {page:#x} was reached after its unmap"
            );
            let since = self.gone.get(&page).expect("reached what was never mapped");
            let age = self.world.clock.now() - since;
            assert!(
                age <= self.age + TICK,
                "page {page:#x} reached after {age} ns"
            );
            assert!(
                self.world.mapper.risk().stale_now > 0,
                "reached, and not reported"
            );
        }
    }

    fn step(&mut self) {
        match self.random.below(100) {
            0..36 => self.map(),
            36..70 => self.unmap(),
            70..80 => self.attack(),
            80..90 => {
                let page = 1 + self.random.below(SPACE);
                self.reach(page);
            }
            90..97 if !self.live.is_empty() => {
                let index = self.random.below(self.live.len() as u64) as usize;
                let live = &self.live[index];
                let iova = live.mapping.iova();
                let got = self.world.device.access(iova, live.direction.access());
                assert_eq!(got, Ok(live.phys));
            }
            97..99 => self.world.tick().expect("the hardware answers"),
            _ => match self.random.below(64) {
                2..16 => self.unmap_many(),
                0 => {
                    let core = self.core();
                    self.cores[core].park().expect("the hardware answers");
                }
                1 => self.exhaust(),
                _ => {}
            },
        }
    }

    /// Everything returns to zero.
    fn end(mut self) {
        while !self.live.is_empty() {
            self.unmap();
        }
        // Twice: what one core kept for another comes back when that one runs again.
        for core in (0..CORES).chain(0..CORES) {
            self.cores[core].park().expect("the hardware answers");
        }
        let risk = self.world.mapper.risk();
        assert_eq!(risk.stale_now, 0);
        if self.is_strict {
            assert_eq!((risk.stale_max, risk.stale_times.max_ns), (0, 0));
        }
        risk.check(TICK).expect("as promised");
        drop(self.cores);
        let stats = self.world.mapper.allocator_stats();
        assert_eq!((stats.live_ranges, stats.live_pages), (0, 0));
        assert_eq!(self.world.mapper.table_stats().retired, 0);
        assert_eq!(self.other.mapper.allocator_stats().live_ranges, 0);
        for page in 1..SPACE {
            let iova = Iova::new(page << 12);
            assert!(self.world.device.access(iova, Access::Read).is_err());
        }
    }
}

fn pages(mapping: &Mapping) -> impl Iterator<Item = u64> + use<> {
    mapping.range().first().raw()..=mapping.range().last().raw()
}

fn space() -> Aperture {
    Aperture::new(IovaPfn::new(1), IovaPfn::new(SPACE - 1), &[]).expect("pages")
}

/// A kind of allocator.
struct Kind<A> {
    name: &'static str,
    make: fn(Aperture) -> A,
}

const SEEDS: u64 = 11;
const STEPS: u64 = 4000;
const LEAST_OPERATIONS: u64 = 1_000_000;
/// A debug build does some, to see what it alone checks.
const DEBUG: (u64, u64) = (2, 500);

/// Gives how many operations there were.
fn agree<A: IovaAllocator>(kind: &Kind<A>) -> u64 {
    let (seeds, steps) = if cfg!(debug_assertions) {
        DEBUG
    } else {
        (SEEDS, STEPS)
    };
    let mut operations = 0;
    for (name, policy) in POLICIES {
        for seed in 1..=seeds {
            // Said when a check fails.
            println!("{}: {name}, seed {seed}", kind.name);
            let mut run = Run::new(kind, policy, seed);
            for _ in 0..steps {
                run.step();
                operations += 1;
            }
            run.end();
        }
    }
    operations
}

#[test]
fn every_policy_agrees_with_a_naive_model_over_every_allocator() {
    let operations = AtomicU64::new(0);
    let count = |more| operations.fetch_add(more, Ordering::Relaxed);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            count(agree(&Kind {
                name: "tree",
                make: |space| TreeAllocator::new(space, CORES).expect("cores"),
            }));
        });
        scope.spawn(|| {
            // Chunks are given back, and their tables.
            count(agree(&Kind {
                name: "chunk",
                make: |space| ChunkAllocator::retiring(space, CORES).expect("cores"),
            }));
        });
    });
    let operations = operations.into_inner();
    println!("{operations} operations");
    assert!(operations >= LEAST_OPERATIONS || cfg!(debug_assertions));
}
