//! Runs of mapping policies. A device model, whose IOTLB drops no entry by itself, must reach the
//! memory of live mappings and no other.

use std::sync::Arc;

use address::{Iova, PhysAddr};
use dma_map::testing::{ModelCore, ModelDomain, ModelMemory, POLICIES, TICK, is_strict};
use dma_map::{DeviceLimits, Direction, DmaMapError, Mapping, Policy, Segment};
use dma_peers::MagazineAllocator;
use iova::testing::Random;
use iova::*;

use crate::hand::{Hands, Worker, at_once, in_turns};
use crate::{CORES, Run};

/// Pages of the IOVA space.
const PAGES: u64 = 1 << 16;
/// Greatest number of table pages: a leaf table per chunk, those of the levels above, and those in
/// quarantine.
const TABLES: usize = 512;
/// Greatest number of mappings that one core holds.
const HELD: usize = 300;
/// Memory pages that one core alone maps, and pages that all cores map.
const OWN: u64 = 512;
const COMMON: u64 = 32;

/// State shared by the cores of a run.
struct Shared<A: IovaAllocator> {
    domain: ModelDomain<A>,
    hands: Hands<Live>,
    /// The policy is strict: the device must not reach a page after its unmap.
    is_strict: bool,
    /// The allocator retires empty chunks, and their tables are then released.
    gives_back: bool,
}

/// A mapping, and the memory to which it leads.
struct Live {
    mapping: Mapping,
    phys: PhysAddr,
    access: Access,
    /// Index of the page, if it is a single page that only this core maps.
    own: Option<usize>,
}

struct Core<'a, A: IovaAllocator> {
    shared: &'a Shared<A>,
    core: ModelCore<A>,
    id: usize,
    random: Random,
    held: Vec<Live>,
    /// Number of live mappings of each of this core's own pages.
    uses: Vec<u32>,
    list: Vec<dma_map::DeviceSegment>,
}

impl<A: IovaAllocator> Core<'_, A> {
    fn map(&mut self) {
        let direction = [
            Direction::ToDevice,
            Direction::FromDevice,
            Direction::Bidirectional,
        ][self.random.index(3)];
        let kind = self.random.below(32);
        let pages = if kind < 6 {
            1 + self.random.below(8)
        } else {
            1
        };
        let (first, own) = match self.random.one_in(3) {
            true => (0x9_0000 + self.random.below(COMMON - 8), None),
            false => {
                let page = self.random.below(OWN - 8);
                (
                    0x1_0000 + self.id as u64 * OWN + page,
                    (pages == 1).then_some(page as usize),
                )
            }
        };
        let offset = self.random.below(2048);
        let len = match pages {
            1 => 1 + self.random.below(2048),
            _ => pages * 4096 - offset,
        };
        let phys = PhysAddr::new(first << 12 | offset);
        let segment = Segment::new(phys, len);
        let (mapped, own) = match kind {
            6 => (self.core.map_coherent(&[segment], direction), own),
            7 => {
                let far = Segment::new(PhysAddr::new(0xa_0000 << 12), 4096);
                let list = [segment, far];
                let any = DeviceLimits::default();
                let mapped = self.core.map_list(&any, &list, direction, &mut self.list);
                (mapped, None)
            }
            _ => (self.core.map(&[segment], direction), own),
        };
        let mapping = match mapped {
            Ok(mapping) => mapping,
            // Other cores' caches hold the remaining ranges until these cores run.
            Err(DmaMapError::Alloc(_)) => return,
            Err(error) => panic!("{error}: {error:?}"),
        };
        if let Some(page) = own {
            self.uses[page] += 1;
        }
        let live = Live {
            mapping,
            phys,
            access: direction.access(),
            own,
        };
        if self.random.one_in(4) {
            self.reach(&live);
        }
        self.held.push(live);
    }

    /// Checks that the device reaches the mapping's memory.
    fn reach(&self, live: &Live) {
        let got = self
            .shared
            .domain
            .device
            .access(live.mapping.iova(), live.access);
        assert_eq!(got, Ok(live.phys), "{:?}", live.mapping);
    }

    fn pick(&mut self) -> Option<Live> {
        let held = self.held.len();
        (held > 0).then(|| self.held.swap_remove(self.random.index(held)))
    }

    fn unmap(&mut self, live: Live, is_mine: bool) {
        if self.random.one_in(4) {
            self.reach(&live);
        }
        let (iova, len) = (live.mapping.iova(), live.mapping.len());
        let done = match self.random.one_in(4) {
            true => self.core.unmap_at(iova, len),
            false => self.core.unmap(live.mapping),
        };
        done.unwrap_or_else(|error| panic!("{error}: {error:?}"));
        if let Some(page) = live.own.filter(|_| is_mine) {
            self.uses[page] -= 1;
            self.check_gone(page, iova, live.phys, live.access);
        }
    }

    /// Unmaps some of the held mappings in one call.
    fn unmap_many(&mut self) {
        let count = 2 + self.random.index(2 * 32);
        let mut lives: Vec<_> = (0..count).map_while(|_| self.pick()).collect();
        if self.random.one_in(4) {
            lives.iter().for_each(|live| self.reach(live));
        }
        let places = lives.iter();
        let places = places.map(|live| (live.own, live.mapping.iova(), live.phys, live.access));
        let places: Vec<_> = places.collect();
        let mut mappings: Vec<_> = lives.drain(..).map(|live| live.mapping).collect();
        let done = self.core.unmap_many(&mut mappings);
        done.unwrap_or_else(|error| panic!("{error}: {error:?}"));
        assert!(mappings.is_empty(), "{} are left", mappings.len());
        for page in places.iter().filter_map(|place| place.0) {
            self.uses[page] -= 1;
        }
        for (page, iova, phys, access) in places {
            if let Some(page) = page {
                self.check_gone(page, iova, phys, access);
            }
        }
    }

    /// Checks that the device does not reach a page of this core after its unmap.
    fn check_gone(&mut self, page: usize, iova: Iova, phys: PhysAddr, access: Access) {
        // Only this core maps this page, and has no mapping of it now: wherever the address leads,
        // it must not lead to this page.
        if self.shared.is_strict && self.uses[page] == 0 && self.random.one_in(2) {
            let got = self.shared.domain.device.access(iova, access);
            assert_ne!(got, Ok(phys), "reached after its unmap");
        }
    }

    /// Attempts to unmap more than the mapping, or nothing: this must be refused.
    fn attack(&mut self, live: &Live) {
        let range = live.mapping.range();
        let len = match self.random.one_in(3) {
            true => 0,
            false => (range.pages() + 1 + self.random.below(3)) * 4096,
        };
        let refused = self.core.unmap_at(range.start(), len);
        assert!(refused.is_err(), "{len:#x} bytes at {range}");
    }

    fn tick(&mut self) {
        self.shared.domain.tick().expect("the hardware answers");
    }

    fn park(&mut self) {
        self.core.park().expect("the hardware answers");
    }

    fn check(&self) {
        let risk = self.shared.domain.mapper.risk();
        let bound = risk.contract.max_stale.unwrap_or(u64::MAX);
        assert!(
            risk.stale_now <= bound && risk.stale_max <= bound,
            "{risk:?}"
        );
    }

    fn give_back(&mut self) {
        while let Some(live) = self.held.pop() {
            self.unmap(live, true);
        }
        while let Some(live) = self.shared.hands.take(self.id) {
            self.unmap(live, false);
        }
    }
}

impl<A: IovaAllocator> Worker for Core<'_, A> {
    fn step(&mut self) {
        match self.random.below(64) {
            0..26 if self.held.len() < HELD => self.map(),
            0..47 => {
                if let Some(live) = self.pick() {
                    self.unmap(live, true);
                }
            }
            // Rarely: each ends many, and maps are to outweigh unmaps.
            47 if self.random.one_in(64) => self.unmap_many(),
            48..52 => {
                // A mapping that is passed on is not checked after its unmap. So mappings of own
                // pages, which are checked, stay here.
                if let Some(live) = self.pick() {
                    let passed = match live.own {
                        Some(_) => Some(live),
                        None => self.shared.hands.pass(self.id, live),
                    };
                    self.held.extend(passed);
                }
            }
            52..56 => {
                if let Some(live) = self.shared.hands.take(self.id) {
                    self.unmap(live, false);
                }
            }
            56..58 => {
                if let Some(live) = self.pick() {
                    self.attack(&live);
                    self.held.push(live);
                }
            }
            58..61 => {
                if let Some(live) = self.pick() {
                    self.reach(&live);
                    self.held.push(live);
                }
            }
            61 => self.tick(),
            62 if self.random.one_in(64) => self.park(),
            _ if self.random.one_in(64) => self.check(),
            _ => {}
        }
    }
}

fn shared<A: IovaAllocator>(allocator: A, policy: Policy, memory: &Arc<ModelMemory>) -> Shared<A> {
    Shared {
        domain: ModelDomain::in_memory(allocator, policy, DeviceLimits::default(), memory),
        hands: Hands::new(CORES),
        is_strict: is_strict(&policy),
        gives_back: false,
    }
}

fn soak<A: IovaAllocator>(
    allocator: A,
    gives_back: bool,
    policy: Policy,
    operations: u64,
    seed: u64,
) {
    let memory = Arc::new(ModelMemory::new(TABLES));
    let mut shared = shared(allocator, policy, &memory);
    shared.gives_back = gives_back;
    soak_in(shared, operations, seed);
    assert_eq!(memory.used(), 0, "table pages");
}

fn soak_in<A: IovaAllocator>(shared: Shared<A>, operations: u64, seed: u64) {
    let mut cores: Vec<_> = (0..CORES)
        .map(|core| Core {
            shared: &shared,
            core: shared.domain.core(core),
            id: core,
            random: Random::new(seed ^ (core as u64 + 1) << 56),
            held: Vec::new(),
            uses: vec![0; OWN as usize],
            list: Vec::new(),
        })
        .collect();
    in_turns(&mut cores, operations / 2, seed);
    let held = cores.iter().map(|core| core.held.len()).sum::<usize>();
    assert!(
        operations < 100_000 || held > CORES * 50,
        "{held} mappings held"
    );
    // In this half time advances only between operations, so the age limit holds exactly. In the
    // second half it may advance while a thread is in the middle of an operation.
    cores.iter_mut().for_each(|core| core.core.publish());
    let risk = shared.domain.mapper.risk();
    risk.check(TICK)
        .unwrap_or_else(|broken| panic!("{broken}: {risk:?}"));
    at_once(&mut cores, operations - operations / 2);
    back_to_zero(&shared, &mut cores);
}

/// Unmaps everything, and checks that the resources that policies keep are released too.
fn back_to_zero<A: IovaAllocator>(shared: &Shared<A>, cores: &mut [Core<'_, A>]) {
    cores.iter_mut().for_each(Core::give_back);
    // Twice: work that one core keeps for another is done when the other runs again.
    for _ in 0..2 {
        cores.iter_mut().for_each(Core::park);
    }
    let risk = shared.domain.mapper.risk();
    assert_eq!(risk.stale_now, 0, "stale mappings");
    if shared.is_strict {
        assert_eq!(
            (risk.stale_max, risk.stale_times.max_ns),
            (0, 0),
            "stale mappings"
        );
    }
    cores[0].check();
    let stats = shared.domain.mapper.allocator_stats();
    assert_eq!((stats.live_ranges, stats.live_pages), (0, 0));
    let tables = shared.domain.mapper.table_stats();
    assert_eq!(tables.retired, 0, "retired tables");
    // An allocator that retires chunks leaves at most one leaf table per core; otherwise each leaf
    // table of the space may exist once.
    let most = match shared.gives_back {
        true => CORES,
        false => (PAGES / CHUNK_PAGES) as usize,
    };
    assert!(tables.tables[0] <= most, "{tables:?}, {stats:?}");
    for page in (1..PAGES).step_by(7) {
        let iova = Iova::new(page << 12);
        let got = shared.domain.device.access(iova, Access::Read);
        assert!(got.is_err(), "{iova:#x} is still reached");
    }
}

fn run<A: IovaAllocator>(
    policy: (&str, Policy),
    space: &str,
    make: impl Fn(Aperture) -> A + 'static,
) -> Run {
    let (name, policy) = policy;
    let gives_back = space == "chunks";
    Run {
        name: format!("dma-map {name} over {space}"),
        soak: Box::new(move |operations, seed| {
            let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(PAGES - 1), &[]);
            let space = make(aperture.expect("pages"));
            soak(space, gives_back, policy, operations, seed);
        }),
    }
}

/// Returns the runs of every policy, over chunks that are retired and over magazines.
pub fn runs() -> Vec<Run> {
    const OK: &str = "three cores and such a space are in range";
    POLICIES
        .into_iter()
        .flat_map(|policy| {
            [
                run(policy, "chunks", |a| {
                    ChunkAllocator::retiring(a, CORES).expect(OK)
                }),
                run(policy, "magazines", |a| {
                    MagazineAllocator::new(a, CORES).expect(OK)
                }),
            ]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check must detect a failure: a deferred policy is tested as if it were strict.
    #[test]
    #[should_panic(expected = "reached after its unmap")]
    fn a_stale_mapping_is_noticed() {
        let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(PAGES - 1), &[]);
        let space = MagazineAllocator::new(aperture.expect("pages"), CORES).expect("cores");
        let memory = Arc::new(ModelMemory::new(TABLES));
        let mut shared = shared(space, Policy::DEFERRED, &memory);
        shared.is_strict = true;
        soak_in(shared, 10_000, 1);
    }
}
