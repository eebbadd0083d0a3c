//! A mapper on such hardware, its unmapped mappings, and the reach of its device.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use address::PhysAddr;
use dma_map::invalidate::InvalidateError;
use dma_map::mapper::Reuse;
use dma_map::table::{IoPageTable, LeafSizes, PageTable, TableConfig, VtdSecondLevel};
use dma_map::testing::is_strict;
use dma_map::testing::{ModelDevice, ModelMemory};
use dma_map::{
    DeviceLimits, Direction, DmaMapError, DmaMapper, DmaUnmapError, Domain, MapperCore, Mapping,
    Policy, Segment,
};
use iova::{Access, CoreId, IovaAllocator, IovaPfn};

use crate::hardware::{Failing, Hardware, Stopping, Time};
use crate::turns::{any, at_once};

type Table = Stopping<IoPageTable<VtdSecondLevel, Arc<ModelMemory>>>;
pub type Mapper<A> = DmaMapper<A, Table, Arc<Hardware>, Arc<Time>>;
pub type Core<A> = MapperCore<A, Table, Arc<Hardware>, Arc<Time>>;

/// Table pages.
const TABLES: usize = 80;
/// Pages of memory that are mapped again and again where mappings are reused.
const MEMORY: u64 = 24;
/// Most mappings that a core holds.
const HELD: usize = 24;

/// A mapping by its first page of IOVA and of memory.
type MappingKey = (u64, u64);

/// The model's record of a mapping.
#[derive(Clone, Copy, Debug, Default)]
struct MappingRecord {
    pages: u64,
    /// Number of cores that have it mapped.
    users: u32,
    /// Unmaps of it that have not returned.
    leaving: u32,
    /// Time at which its last unmap returned.
    gone_at: u64,
    /// The handle by which it was unmapped; none where another handle had it mapped as well before
    /// that unmap had returned.
    by: Option<u64>,
    /// Maps and unmaps of it that have begun.
    changes: u64,
}

/// A mapping that is held.
pub struct Live {
    mapping: Result<Mapping, (address::Iova, u64)>,
    place: MappingKey,
}

#[derive(Default)]
struct State {
    known: BTreeMap<MappingKey, MappingRecord>,
    /// Mappings that no core has and that no barrier has covered yet.
    gone: Vec<MappingKey>,
    /// By page of memory: maps that have not returned.
    mapping: BTreeMap<u64, u32>,
    /// Mappings that wait for the core that unmaps them.
    handed_over: Vec<Live>,
    /// Memory that was not mapped yet.
    fresh: u64,
    /// Grows with everything that happens.
    now: u64,
    /// The number of the next handle.
    handles: u64,
    barriers: u64,
}

pub struct World<A: IovaAllocator> {
    pub mapper: Mapper<A>,
    pub hardware: Arc<Hardware>,
    pub time: Arc<Time>,
    pub device: ModelDevice<VtdSecondLevel>,
    state: RefCell<State>,
    left: Cell<u64>,
    done: Cell<u64>,
}

/// A core, and what it holds.
pub struct Worker<A: IovaAllocator> {
    world: Rc<World<A>>,
    id: usize,
    /// None only while it is dropped and claimed.
    core: Option<Core<A>>,
    handle: u64,
    held: Vec<Live>,
}

impl<A: IovaAllocator> World<A> {
    /// With so many operations to do.
    pub fn new(allocator: A, policy: Policy, seed: u64, operations: u64) -> Rc<Self> {
        let memory = Arc::new(ModelMemory::new(TABLES));
        let hardware = Arc::new(Hardware::new(seed));
        let time = Arc::new(Time::default());
        let config = TableConfig {
            levels: 3,
            leaves: LeafSizes::FOUR_K,
        };
        let table = IoPageTable::new(Arc::clone(&memory), config).expect("memory for a root");
        let root = table.root();
        let domain = Domain {
            allocator,
            table: Stopping(table),
            invalidator: Arc::clone(&hardware),
            clock: Arc::clone(&time),
        };
        // SAFETY: the pages of a `ModelMemory` live as long as it, freed or not, and are reached by
        // index only: a table that is walked after it was freed is a wrong answer here, never
        // undefined behaviour.
        let mapper = unsafe { DmaMapper::new_reclaiming(domain, policy, DeviceLimits::default()) };
        Rc::new(Self {
            mapper: mapper.expect("a policy within its bounds"),
            device: ModelDevice::new(memory, Arc::clone(&hardware.iotlb), root, 3),
            hardware,
            time,
            state: RefCell::default(),
            left: Cell::new(operations),
            done: Cell::new(0),
        })
    }

    fn state(&self) -> RefMut<'_, State> {
        self.state.borrow_mut()
    }

    fn now(&self) -> u64 {
        let mut state = self.state();
        state.now += 1;
        state.now
    }

    /// Operations done so far.
    pub fn done(&self) -> u64 {
        self.done.get()
    }

    /// Barriers that returned `Ok` and were checked.
    pub fn barriers(&self) -> u64 {
        self.state().barriers
    }

    /// Whether there is another to do.
    pub fn begin(&self) -> bool {
        let left = self.left.get();
        if left > 0 {
            self.left.set(left - 1);
            self.done.set(self.done.get() + 1);
        }
        left > 0
    }

    /// Returns whether the device reaches the memory of a mapping that it had.
    fn is_reached(&self, (iova, phys): MappingKey, pages: u64) -> bool {
        (0..pages).any(|page| {
            let at = IovaPfn::new(iova + page).start();
            // No core stops while it has the model's lock.
            let got = at_once(|| self.device.access(at, Access::Read));
            got.expect("nobody is waited for") == Ok(PhysAddr::new((phys + page) << 12))
        })
    }

    /// Returns the mappings that are reached although no core has them or may be mapping them
    /// again.
    fn reached(&self) -> Vec<MappingKey> {
        let mut state = self.state();
        let State {
            known,
            gone,
            mapping,
            ..
        } = &mut *state;
        gone.retain(|place| known[place].users == 0);
        gone.sort_unstable();
        gone.dedup();
        let is_settled = |place: &&MappingKey| {
            known[*place].leaving == 0 && mapping.get(&place.1).is_none_or(|count| *count == 0)
        };
        let reached = gone.iter().filter(is_settled);
        let reached = reached.filter(|place| self.is_reached(**place, known[*place].pages));
        reached.copied().collect()
    }

    /// A barrier that began at `since` has returned `Ok`: nothing that `is_covered` and was gone by
    /// then is reached.
    fn check(&self, what: &str, since: u64, is_covered: impl Fn(Option<u64>) -> bool) {
        for place in self.reached() {
            let known = self.state().known[&place];
            assert!(
                known.gone_at >= since || !is_covered(known.by),
                "{what}, begun at {since}, returned Ok, and the device reaches {place:x?}: \
                 {known:?}, failures so far: {}",
                self.hardware.failures(),
            );
        }
        let mut state = self.state();
        state.barriers += 1;
        let State {
            known,
            gone,
            mapping,
            ..
        } = &mut *state;
        // Mappings that were not reached then will not be, unless they are mapped again.
        gone.retain(|place| {
            let known = &known[place];
            let may_be_mapped = mapping.get(&place.1).is_some_and(|count| *count > 0);
            known.gone_at >= since || !is_covered(known.by) || known.leaving > 0 || may_be_mapped
        });
    }

    /// Nothing that the device reaches is missing from the count.
    pub fn check_risk(&self) {
        let Some(risk) = at_once(|| self.mapper.risk()) else {
            // Another core was stopped holding a lock that the report needs.
            return;
        };
        let reached = self.reached();
        assert!(
            reached.len() as u64 <= risk.stale_now,
            "{} are reported, and the device reaches {reached:x?}",
            risk.stale_now
        );
        let bound = risk.contract.max_stale.unwrap_or(u64::MAX);
        assert!(
            self.hardware.failures() > 0 || risk.stale_max <= bound,
            "{risk:?}"
        );
    }

    pub fn flush(&self) -> Result<(), InvalidateError> {
        let since = self.now();
        self.mapper.flush()?;
        self.check("flush", since, |_| true);
        Ok(())
    }

    pub fn tick(&self) -> Result<(), InvalidateError> {
        self.time.0.pass(any(4_000_000));
        self.mapper.tick(dma_map::Clock::now(&self.time.0))
    }
}

impl<A: IovaAllocator> Worker<A> {
    pub fn new(world: &Rc<World<A>>, id: usize) -> Self {
        let mut worker = Self {
            world: Rc::clone(world),
            id,
            core: None,
            handle: 0,
            held: Vec::new(),
        };
        worker.claim();
        worker
    }

    fn claim(&mut self) {
        let core = self.world.mapper.core(CoreId(self.id));
        self.core = Some(core.expect("nobody else has it"));
        let mut state = self.world.state();
        state.handles += 1;
        self.handle = state.handles;
    }

    fn core(&mut self) -> &mut Core<A> {
        self.core.as_mut().expect("between two operations")
    }

    pub fn map(&mut self) -> bool {
        let reuses = self.world.mapper.policy().reuse != Reuse::Never;
        let pages = if any(8) == 0 { 2 + any(3) } else { 1 };
        let mut state = self.world.state();
        let phys = match reuses {
            true => 0x1000 + any(MEMORY) * 8,
            false => {
                state.fresh += 8;
                0x10_0000 + state.fresh
            }
        };
        *state.mapping.entry(phys).or_default() += 1;
        drop(state);
        let segment = Segment::new(PhysAddr::new(phys << 12), pages * 4096);
        let mapped = self.core().map(&[segment], Direction::ToDevice);
        let mut state = self.world.state();
        *state.mapping.entry(phys).or_default() -= 1;
        let mapping = match mapped {
            Ok(mapping) => mapping,
            // Others keep what is left until they run; or the hardware does not answer.
            Err(DmaMapError::Alloc(_) | DmaMapError::Invalidation(_) | DmaMapError::Table(_)) => {
                return false;
            }
            Err(error) => panic!("{error}: {error:?}"),
        };
        let place = (mapping.range().first().raw(), phys);
        let known = state.known.entry(place).or_default();
        known.users += 1;
        known.changes += 1;
        known.pages = pages;
        drop(state);
        if any(4) > 0 {
            assert!(
                self.world.is_reached(place, pages),
                "{mapping:?} does not lead to {phys:#x}"
            );
        }
        self.held.push(Live {
            mapping: Ok(mapping),
            place,
        });
        true
    }

    pub fn unmap(&mut self, live: Live) {
        let Live { mapping, place } = live;
        let change = self.leave(place);
        let (iova, len) = match &mapping {
            Ok(mapping) => (mapping.iova(), mapping.len()),
            Err(left) => *left,
        };
        let unmapped = match mapping {
            Ok(mapping) => self.core().unmap(mapping),
            Err((iova, len)) => self.core().unmap_at(iova, len),
        };
        match unmapped {
            Ok(()) => self.left(place, change, true),
            // Cleared, and counted until a later invalidation succeeds.
            Err(DmaUnmapError::NotInvalidated { .. }) => self.left(place, change, false),
            // It lives: again, when the hardware answers.
            Err(DmaUnmapError::NoRoom { .. }) => self.stayed(Live {
                mapping: Err((iova, len)),
                place,
            }),
            Err(error) => panic!("{error}: {error:?}"),
        }
    }

    /// Several at once.
    fn unmap_many(&mut self) {
        let (mut mappings, mut places) = (Vec::new(), Vec::new());
        for _ in 0..2 + any(HELD as u64) {
            match self.pick() {
                Some(Live {
                    mapping: Ok(mapping),
                    place,
                }) => {
                    mappings.push(mapping);
                    places.push((place, self.leave(place)));
                }
                Some(other) => self.held.push(other),
                None => break,
            }
        }
        let unmapped = self.core().unmap_many(&mut mappings);
        let ended = places.len() - mappings.len();
        // From here on those that ended are cleared, and no more is known.
        let cleared = match unmapped {
            Ok(()) => ended,
            Err(error) => match error.source {
                DmaUnmapError::NotInvalidated { .. } => error.index,
                DmaUnmapError::NoRoom { .. } => {
                    assert_eq!(error.index, ended, "the list begins with it");
                    ended
                }
                _ => panic!("{error}: {error:?}"),
            },
        };
        for (at, (place, change)) in places.drain(..ended).enumerate() {
            self.left(place, change, at < cleared);
        }
        for (mapping, (place, _)) in mappings.into_iter().zip(places) {
            self.stayed(Live {
                mapping: Ok(mapping),
                place,
            });
        }
    }

    /// An unmap begins. The number of this change; none where others have the mapping, or unmap it.
    fn leave(&mut self, place: MappingKey) -> Option<u64> {
        let mut state = self.world.state();
        let known = state.known.get_mut(&place).expect("it was mapped");
        let is_shared = known.users > 1 || known.leaving > 0;
        known.users -= 1;
        known.leaving += 1;
        known.changes += 1;
        (!is_shared).then_some(known.changes)
    }

    /// It was refused.
    fn stayed(&mut self, live: Live) {
        let mut state = self.world.state();
        state.now += 1;
        let known = state.known.get_mut(&live.place).expect("it stays");
        known.leaving -= 1;
        known.users += 1;
        drop(state);
        self.held.push(live);
    }

    /// It has returned; whether without an error.
    fn left(&mut self, place: MappingKey, change: Option<u64>, is_invalidated: bool) {
        let handle = self.handle;
        let mut state = self.world.state();
        state.now += 1;
        let now = state.now;
        let known = state.known.get_mut(&place).expect("it stays");
        known.leaving -= 1;
        known.gone_at = now;
        // Others may have mapped it, at the same address, and unmapped it since it was out of
        // reach.
        known.by = (change == Some(known.changes)).then_some(handle);
        let (pages, is_gone) = (known.pages, known.users == 0 && known.leaving == 0);
        if is_gone {
            state.gone.push(place);
        }
        let is_mapping = state.mapping.get(&place.1).is_some_and(|count| *count > 0);
        drop(state);
        if is_invalidated && is_gone && !is_mapping && is_strict(&self.world.mapper.policy()) {
            assert!(
                !self.world.is_reached(place, pages),
                "{place:x?} is reached after its unmap"
            );
        }
    }

    pub fn unmap_any(&mut self) {
        if let Some(live) = self.pick() {
            self.unmap(live);
        }
    }

    fn pick(&mut self) -> Option<Live> {
        let len = self.held.len() as u64;
        (len > 0).then(|| self.held.swap_remove(any(len) as usize))
    }

    pub fn park(&mut self) -> Result<(), InvalidateError> {
        let since = self.world.now();
        self.core().park()?;
        let handle = self.handle;
        self.world.check("park", since, |by| by == Some(handle));
        Ok(())
    }

    /// Another owner has the core. Where nothing failed meanwhile, nothing that was unmapped by the
    /// last one is reached.
    pub fn drop_and_claim(&mut self) {
        let since = self.world.now();
        let failures = self.world.hardware.failures();
        self.core = None;
        let handle = self.handle;
        if self.world.hardware.failures() == failures {
            self.world.check("drop", since, |by| by == Some(handle));
        }
        self.claim();
    }

    /// One operation.
    fn step(&mut self) {
        match any(64) {
            0..30 if self.held.len() < HELD => {
                self.map();
            }
            0..46 => self.unmap_any(),
            46..50 => self.unmap_many(),
            50..54 => {
                let live = self.pick();
                self.world.state().handed_over.extend(live);
            }
            54..59 => {
                let live = self.world.state().handed_over.pop();
                if let Some(live) = live {
                    self.unmap(live);
                }
            }
            59..61 => self.world.check_risk(),
            61 => {
                let _ = self.park();
            }
            62 if any(4) == 0 => self.drop_and_claim(),
            _ => self.world.time.0.pass(any(200_000)),
        }
    }

    /// Until all is done; then everything is unmapped and given back.
    pub fn work(mut self) {
        while self.world.begin() {
            self.step();
        }
        self.world.hardware.set_failing(Failing::None);
        while let Some(live) = self.held.pop() {
            self.unmap(live);
        }
    }
}

/// A thread that is no core: ticks, flushes, and sets the failures of the hardware.
pub fn attend<A: IovaAllocator>(world: &World<A>, fails: bool) {
    while world.begin() {
        match any(16) {
            0..8 => {
                let _ = world.tick();
            }
            8..12 => {
                let _ = world.flush();
            }
            12 if fails => {
                let failing = [Failing::None, Failing::None, Failing::Some, Failing::All];
                world.hardware.set_failing(failing[any(4) as usize]);
            }
            _ => world.check_risk(),
        }
    }
}

/// Checks a world in which all work is done, and no core is in the middle of anything.
pub fn end<A: IovaAllocator>(world: &Rc<World<A>>, cores: usize) {
    world.hardware.set_failing(Failing::None);
    let mut first = Worker::new(world, 0);
    let handed_over = std::mem::take(&mut world.state().handed_over);
    for live in handed_over {
        first.unmap(live);
    }
    drop(first);
    // Mappings that one core kept for another come back when that one runs again.
    for core in (0..cores).chain(0..cores) {
        let parked = Worker::new(world, core).park();
        assert_eq!(parked, Ok(()));
    }
    assert_eq!(world.flush(), Ok(()));
    world.check_risk();
    assert_eq!(world.reached(), []);
    assert_eq!(
        world.mapper.risk().stale_now,
        0,
        "{:?}",
        world.mapper.risk()
    );
    for core in 0..cores {
        Worker::new(world, core)
            .park()
            .expect("the hardware answers");
    }
    let stats = world.mapper.allocator_stats();
    assert_eq!((stats.live_ranges, stats.live_pages), (0, 0));
}
