//! Barriers: a thread flushes, or a core parks, while others map, unmap, evict and tick. Mappings
//! unmapped before are not reached after; mappings that are reached are counted. (Under every
//! policy, with hardware that fails, but stopped at fewer steps: `tests/barrier`.)

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use address::PhysAddr;
use dma_map::mapper::{Optimistic, Reuse};
use dma_map::testing::{ModelCore, ModelDomain, TICK};
use dma_map::{DeviceLimits, Direction, Policy, Segment};
use iova::{Access, Aperture, IovaPfn, TreeAllocator};
use random_schedules::{any, fail, has_failed, holds, thread};

const STEPS: u64 = 5;
const IDLE: Optimistic = Optimistic {
    quota: 2,
    residency: Duration::from_nanos(2 * TICK),
};

/// A page of IOVA, which leads to one page of memory for as long as something is known of it.
#[derive(Clone, Copy, PartialEq)]
struct Page {
    phys: u64,
    /// Grows with each map and unmap that has returned.
    version: u64,
    is_gone: bool,
    /// The core that unmapped it last.
    by: u64,
}

/// It uses nothing of shuttle's, so each access to it is one step.
#[derive(Default)]
struct ModelState {
    pages: BTreeMap<u64, Page>,
    /// Memory that is just being mapped, and may be found idle.
    mapping: Vec<u64>,
}

struct World {
    domain: ModelDomain<TreeAllocator>,
    known: Mutex<ModelState>,
}

impl World {
    fn new(policy: Policy) -> Arc<Self> {
        let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(63), &[]).expect("pages");
        let space = TreeAllocator::new(aperture, 2).expect("cores");
        Arc::new(Self {
            domain: ModelDomain::new(space, policy, DeviceLimits::default(), 8),
            known: Mutex::default(),
        })
    }

    fn known(&self) -> MutexGuard<'_, ModelState> {
        self.known.lock().expect("nobody panics with it")
    }

    fn reaches(&self, iova: u64, phys: u64) -> bool {
        let at = IovaPfn::new(iova).start();
        self.domain.device.access(at, Access::Read) == Ok(PhysAddr::new(phys << 12))
    }

    /// Returns the pages that are gone now, unmapped by any core or by `by`.
    fn gone(&self, by: Option<u64>) -> Vec<(u64, Page)> {
        let known = self.known();
        let gone = known.pages.iter().filter(|(_, page)| page.is_gone);
        let gone = gone.filter(|(_, page)| by.is_none_or(|by| page.by == by));
        gone.map(|(iova, page)| (*iova, *page)).collect()
    }

    /// After a barrier: pages that were `gone` before it, and were not found again, are not
    /// reached.
    fn check(&self, what: &str, gone: Vec<(u64, Page)>) {
        for (iova, page) in gone {
            let is_still = || {
                let known = self.known();
                known.pages[&iova] == page && !known.mapping.contains(&page.phys)
            };
            if is_still() && self.reaches(iova, page.phys) && is_still() {
                fail(format!("page {iova:#x} was reached after a {what}"));
            }
        }
    }

    fn unmap_one(&self, core: &mut ModelCore<TreeAllocator>, by: u64, phys: u64) {
        let segment = Segment::new(PhysAddr::new(phys << 12), 4096);
        self.known().mapping.push(phys);
        let mapping = core
            .map(&[segment], Direction::ToDevice)
            .expect("there is room");
        let iova = mapping.range().first().raw();
        let mut known = self.known();
        let at = known.mapping.iter().position(|other| *other == phys);
        known.mapping.swap_remove(at.expect("pushed above"));
        let version = known.pages.get(&iova).map_or(0, |page| page.version) + 1;
        let page = Page {
            phys,
            version,
            is_gone: false,
            by,
        };
        known.pages.insert(iova, page);
        drop(known);
        if !self.reaches(iova, phys) {
            fail("a mapping is not reached");
        }
        if let Err(error) = core.unmap(mapping) {
            fail(error);
        }
        let page = Page {
            version: version + 1,
            is_gone: true,
            ..page
        };
        self.known().pages.insert(iova, page);
    }
}

fn work(world: &World, mut core: ModelCore<TreeAllocator>, id: u64) {
    for _ in 0..STEPS {
        // Three pages of its own: some are found again, some evict others.
        world.unmap_one(&mut core, id, 0x100 * (id + 1) + any(3));
        if has_failed() {
            return;
        }
    }
    let gone = world.gone(Some(id));
    match any(2) {
        0 => {
            core.park().expect("the hardware answers");
            world.check("park", gone);
        }
        _ => {
            drop(core);
            world.check("drop", gone);
        }
    }
}

fn model(policy: Policy) -> impl Fn() + Send + Sync + 'static {
    move || {
        let world = World::new(policy);
        let workers = (0..2).map(|id| {
            let (core, world) = (world.domain.core(id), Arc::clone(&world));
            thread::spawn(move || work(&world, core, id as u64))
        });
        let mut all: Vec<_> = workers.collect();
        all.push(thread::spawn({
            let world = Arc::clone(&world);
            move || {
                for _ in 0..3 {
                    world.domain.tick().expect("the hardware answers");
                    let _ = world.domain.mapper.risk();
                }
            }
        }));
        all.push(thread::spawn({
            let world = Arc::clone(&world);
            move || {
                for _ in 0..3 {
                    let gone = world.gone(None);
                    world.domain.mapper.flush().expect("the hardware answers");
                    world.check("flush", gone);
                    if has_failed() {
                        return;
                    }
                }
            }
        }));
        for one in all {
            one.join().expect("a model ends at a panic");
        }
    }
}

const OPTIMISTIC: Policy = Policy::STRICT.with_reuse(Reuse::Optimistic(IDLE));

#[test]
fn mappings_unmapped_before_a_barrier_are_not_reached_after_it() {
    holds(1_000, model(OPTIMISTIC));
    holds(
        300,
        model(Policy::DEFERRED.with_reuse(Reuse::Optimistic(IDLE))),
    );
    holds(300, model(Policy::ASYNC));
    holds(300, model(Policy::DEFERRED));
}

/// The hardware does not answer for the first unmap, whose core is dropped and claimed again;
/// another thread reads the risk meanwhile.
fn leave() {
    let world = World::new(Policy::ASYNC);
    let mut core = world.domain.core(0);
    let page = |number: u64| Segment::new(PhysAddr::new(number << 12), 4096);
    let mapping = core
        .map(&[page(1)], Direction::ToDevice)
        .expect("there is room");
    let iova = mapping.iova();
    world
        .domain
        .device
        .access(iova, Access::Read)
        .expect("mapped");
    // The submissions of the unmap and of the drop.
    world.domain.iotlb.die_for(2);
    let _ = core.unmap(mapping);
    let asking = thread::spawn({
        let world = Arc::clone(&world);
        move || {
            for _ in 0..6 {
                let known = world.domain.mapper.risk().stale_now;
                let is_reached = world.reaches(IovaPfn::of(iova).raw(), 1);
                if is_reached && known == 0 {
                    fail("what is reached is not counted");
                }
            }
        }
    });
    drop(core);
    let mut next = world.domain.core(0);
    for number in 2..4 {
        let mapping = next
            .map(&[page(number)], Direction::ToDevice)
            .expect("there is room");
        if let Err(error) = next.unmap(mapping) {
            fail(error);
        }
    }
    asking.join().expect("a model ends at a panic");
    drop(next);
    if world.domain.mapper.flush().is_err() || world.domain.mapper.risk().stale_now != 0 {
        fail("something is left");
    }
}

#[test]
fn work_of_a_dropped_core_is_counted() {
    holds(1_000, leave);
}
