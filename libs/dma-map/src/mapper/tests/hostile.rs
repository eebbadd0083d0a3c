//! Random operations, hostile ones among them, by three cores, against a map of what is mapped.

use alloc::{collections::BTreeMap, vec::Vec};

use address::{Iova, PAGE_SIZE};
use iova::Access;

use super::*;

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

/// What the naive model knows of a page of IOVA.
#[derive(Clone, Copy)]
struct Known {
    phys: u64,
    access: Access,
    users: u32,
}

struct Run<A: IovaAllocator> {
    world: World<A>,
    cores: Vec<Core<A>>,
    random: Random,
    live: Vec<Live>,
    known: BTreeMap<u64, Known>,
    /// Pages unmapped, and when.
    gone: BTreeMap<u64, u64>,
    is_strict: bool,
    age: u64,
}

const SPACE: u64 = 2048;

impl<A: IovaAllocator> Run<A> {
    fn new(allocator: A, policy: Policy, seed: u64) -> Self {
        let world = World::of(allocator, policy, DeviceLimits::default());
        let age = world.mapper.contract().max_age_ns.unwrap();
        Self {
            cores: (0..3).map(|core| world.core(core)).collect(),
            world,
            random: Random(seed),
            live: Vec::new(),
            known: BTreeMap::new(),
            gone: BTreeMap::new(),
            is_strict: is_strict(&policy),
            age,
        }
    }

    fn core(&mut self) -> usize {
        self.random.below(3) as usize
    }

    fn map(&mut self) {
        let direction = [
            Direction::ToDevice,
            Direction::FromDevice,
            Direction::Bidirectional,
        ][self.random.below(3) as usize];
        let phys = PhysAddr::new((64 + self.random.below(48)) << 12 | self.random.below(4096));
        let most = if self.random.below(4) == 0 {
            16_384
        } else {
            2048
        };
        let len = 1 + self.random.below(most);
        let core = self.core();
        let segment = Segment::new(phys, len);
        let mapping = match self.random.below(8) {
            0 => self.cores[core].map_coherent(&[segment], direction),
            _ => self.cores[core].map(&[segment], direction),
        };
        let mapping = match mapping {
            Ok(mapping) => mapping,
            // Other cores keep what is left until they run.
            Err(DmaMapError::Alloc(_)) => return self.unmap(),
            Err(error) => panic!("{error}"),
        };
        assert_eq!(mapping.iova().raw() % PAGE_SIZE, phys.raw() % PAGE_SIZE);
        for (i, iova) in pages(mapping.range()).enumerate() {
            let fresh = Known {
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
    }

    fn unmap(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let index = self.random.below(self.live.len() as u64) as usize;
        let Live { mapping, .. } = self.live.swap_remove(index);
        let (iova, len, range) = (mapping.iova(), mapping.len(), mapping.range());
        if self.random.below(2) == 0 {
            let _ = self.world.device.access(iova, Access::Read);
        }
        let core = self.core();
        if self.random.below(4) == 0 {
            drop(mapping);
            self.cores[core].unmap_at(iova, len).unwrap();
        } else {
            self.cores[core].unmap(mapping).unwrap();
        }
        let now = self.world.clock.now();
        for page in pages(range) {
            let known = self.known.get_mut(&page).unwrap();
            known.users -= 1;
            if known.users == 0 {
                self.known.remove(&page);
                self.gone.insert(page, now);
            }
        }
        self.reach(range.first().raw());
    }

    /// What must be refused, and change nothing.
    fn attack(&mut self) {
        let core = self.core();
        let kind = self.random.below(5);
        let (iova, len) = match (kind, self.live.is_empty()) {
            (0, _) => (Iova::new(self.random.next() << 12), 0),
            (1, _) => (Iova::new(u64::MAX - 100), 4096),
            (2, _) => {
                let page = 1 + self.random.below(SPACE + 64);
                if self.known.contains_key(&page) {
                    return;
                }
                (Iova::new(page << 12), 1 + self.random.below(9000))
            }
            (_, false) => {
                // Too much, or too little, of something that is mapped.
                let index = self.random.below(self.live.len() as u64) as usize;
                let range = self.live[index].mapping.range();
                let bytes = range.pages() * PAGE_SIZE;
                match kind {
                    3 if range.pages() > 1 => (range.start(), bytes - PAGE_SIZE),
                    3 => return,
                    _ => (
                        range.start(),
                        bytes + PAGE_SIZE * (1 + self.random.below(3)),
                    ),
                }
            }
            _ => return,
        };
        let refused = self.cores[core].unmap_at(iova, len);
        assert!(refused.is_err(), "{iova:?} {len:#x} is not mapped so");
    }

    /// What the device gets at a page agrees with the model, within the window.
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
            97..99 => self.world.tick(),
            _ => {
                if self.random.below(64) == 0 {
                    let core = self.core();
                    self.cores[core].park().unwrap();
                }
            }
        }
    }

    /// Everything returns to zero.
    fn end(mut self) {
        while !self.live.is_empty() {
            self.unmap();
        }
        for core in &mut self.cores {
            core.park().unwrap();
        }
        let risk = self.world.mapper.risk();
        assert_eq!(risk.stale_now, 0);
        if self.is_strict {
            assert_eq!((risk.stale_max, risk.windows.max_ns), (0, 0));
        }
        risk.check(TICK).unwrap();
        drop(self.cores);
        assert_eq!(self.world.mapper.allocator().stats().live_ranges, 0);
        for page in 1..=SPACE {
            let iova = Iova::new(page << 12);
            assert!(self.world.device.access(iova, Access::Read).is_err());
            assert!(self.world.mapper.table().lookup(iova).is_none());
        }
    }
}

fn pages(range: IovaRange) -> impl Iterator<Item = u64> {
    range.first().raw()..=range.last().raw()
}

/// 15 policies × 5 seeds × 4,000 steps with each of the two allocators; `iova`'s property tests make millions more.
const POLICIES: u64 = 15;
const SEEDS: u64 = 5;
const STEPS: u64 = 4000;
const _: () = assert!(2 * POLICIES * SEEDS * STEPS >= 600_000);

fn agree<A: IovaAllocator>(allocator: impl Fn() -> A) {
    let (seeds, steps) = if cfg!(debug_assertions) {
        (2, 500)
    } else {
        (SEEDS, STEPS)
    };
    assert_eq!(policies().count() as u64, POLICIES);
    for policy in policies() {
        for seed in 1..=seeds {
            let mut run = Run::new(allocator(), policy, seed * 0x9e37_79b9_7f4a_7c15);
            for _ in 0..steps {
                run.step();
            }
            run.end();
        }
    }
}

#[test]
fn every_policy_agrees_with_a_naive_model() {
    agree(|| space(SPACE, 3));
}

#[test]
fn every_policy_agrees_with_a_naive_model_while_tables_are_reclaimed() {
    agree(|| chunks(SPACE, 3));
}
