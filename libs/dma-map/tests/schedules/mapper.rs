//! Cores that map and unmap under every policy, a thread that ticks, and a device that forgets
//! nothing by itself.
//!
//! Mapped pages are reached, and lead to the right memory: so no IOVA is allocated again, and no
//! idle mapping torn down, while a cache holds it or a core uses it. Pages that a strict policy has
//! unmapped are not reached. Then the cores go quiet, ticks alone close all open windows, and no
//! unmapped page is reached; in the end all is back at zero. While cores run no time is measured: a
//! thread that shuttle stops in the middle of an invalidation keeps a window open as long as it
//! likes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use address::PhysAddr;
use dma_map::mapper::{Optimistic, Reuse, Teardown, Window};
use dma_map::testing::{DeviceFault, ModelCore, ModelDomain, ModelMemory, TICK, is_strict};
use dma_map::{DeviceLimits, Direction, DmaMapError, Mapping, Policy, Segment};
use iova::{Access, Aperture, CHUNK_PAGES, ChunkAllocator, IovaAllocator, IovaPfn, TreeAllocator};
use random_schedules::{any, fail, has_failed, holds, thread};

/// Operations of a core.
const STEPS: usize = 8;
/// The age and the residency of policies that have one, in ticks.
const AGE: u64 = 1;

/// The model's record of a page of IOVA.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Page {
    /// Page of memory to which it leads, or led last.
    phys: u64,
    /// Number of cores that have it mapped: several where mappings are shared.
    users: u32,
    /// Unmaps of it that have not returned. The first of them may be the last to be done.
    leaving: u32,
    /// Grows when it is mapped anew.
    version: u32,
    /// The unmaps of all its users have returned.
    is_gone: bool,
}

/// It uses nothing of shuttle's, so each access to it is one step.
#[derive(Default)]
struct ModelState {
    pages: BTreeMap<u64, Page>,
    /// By page of memory: maps that were begun, and those that are over. One in between may have
    /// found a mapping that is gone for all other cores.
    maps: BTreeMap<u64, (u32, u32)>,
    /// The core that takes one unmaps it.
    handed_over: Vec<Mapping>,
}

struct World<A: IovaAllocator> {
    domain: ModelDomain<A>,
    known: Mutex<ModelState>,
    is_strict: bool,
    is_sharing: bool,
}

impl<A: IovaAllocator> World<A> {
    fn known(&self) -> MutexGuard<'_, ModelState> {
        self.known.lock().expect("nobody panics with it")
    }

    fn begin_map(&self, phys: u64, count: u64) {
        let mut known = self.known();
        for page in phys..phys + count {
            known.maps.entry(page).or_default().0 += 1;
        }
    }

    fn end_map(&self, phys: u64, count: u64) {
        let mut known = self.known();
        for page in phys..phys + count {
            known.maps.entry(page).or_default().1 += 1;
        }
    }

    fn mapped(&self, mapping: &Mapping, phys: u64) {
        let mut known = self.known();
        for (i, page) in pages(mapping).enumerate() {
            let phys = phys + i as u64;
            let fresh = Page {
                phys,
                users: 0,
                leaving: 0,
                version: 0,
                is_gone: true,
            };
            let page = known.pages.entry(page).or_insert(fresh);
            if page.users > 0 && !(self.is_sharing && page.phys == phys) {
                fail(format!("{mapping:?} overlaps {page:?}"));
            }
            page.users += 1;
            page.version += u32::from(page.users == 1);
            page.phys = phys;
            page.is_gone = false;
        }
    }

    fn unmap(&self, core: &mut ModelCore<A>, mapping: Mapping) {
        let numbers = pages(&mapping);
        for number in pages(&mapping) {
            let mut known = self.known();
            let page = known.pages.get_mut(&number).expect("it was mapped");
            page.users -= 1;
            page.leaving += 1;
        }
        if let Err(error) = core.unmap(mapping) {
            fail(error);
        }
        for number in numbers {
            let mut known = self.known();
            let page = known.pages.get_mut(&number).expect("it stays");
            page.leaving -= 1;
            page.is_gone = page.users == 0 && page.leaving == 0;
        }
    }

    /// The device tries a page that is or was mapped. What it is judged by stayed the same
    /// meanwhile.
    fn access(&self, number: u64, may_be_stale: bool) {
        let look = || {
            let known = self.known();
            let page = known.pages.get(&number).copied()?;
            Some((page, known.maps.get(&page.phys).copied()?))
        };
        let Some((before, maps_before)) = look() else {
            return;
        };
        let got = self
            .domain
            .device
            .access(IovaPfn::new(number).start(), Access::Read);
        let Some((after, maps_after)) = look() else {
            return;
        };
        if let Err(DeviceFault::FreedTable { .. }) = got {
            return fail("the device walked a freed table");
        }
        if after.version != before.version {
            return;
        }
        let leads = got == Ok(PhysAddr::new(before.phys << 12));
        if after.users > 0 && before.users > 0 && !leads {
            fail(format!(
                "page {number:#x}, which is {before:?}, led to {got:?}"
            ));
        }
        let is_found_again = maps_before.0 != maps_before.1 || maps_before != maps_after;
        // Elsewhere: to what is being mapped there just now.
        if before.is_gone && leads && !may_be_stale && !is_found_again {
            fail(format!(
                "page {number:#x} was reached after its unmap: {got:?}"
            ));
        }
    }

    fn access_any(&self) {
        let known = self.known();
        let count = known.pages.len() as u64;
        let page = (count > 0).then(|| known.pages.keys().nth(any(count) as usize).copied());
        drop(known);
        if let Some(page) = page.flatten() {
            self.access(page, !self.is_strict);
        }
    }

    fn tick(&self) {
        if let Err(error) = self.domain.tick() {
            fail(error);
        }
    }
}

fn pages(mapping: &Mapping) -> impl Iterator<Item = u64> + use<> {
    mapping.range().first().raw()..=mapping.range().last().raw()
}

/// One core's part, after which it is quiet.
fn work<A: IovaAllocator>(world: &World<A>, core: &mut ModelCore<A>, id: u64) {
    let mut own = Vec::new();
    for step in 0..STEPS as u64 {
        match any(8) {
            0..4 => {
                let phys = match world.domain.mapper.policy().reuse {
                    // Each is another, so that an access that leads to an old one is detected.
                    Reuse::Never => 0x1000 + id * 0x100 + step * 0x10,
                    Reuse::Shared if any(2) == 0 => 0x100 + any(2),
                    // One of two, so that it is found again.
                    _ => 0x1000 + id * 0x100 + any(2) * 0x10,
                };
                let len = if any(4) == 0 { 2 * 4096 } else { 4096 };
                let segment = Segment::new(PhysAddr::new(phys << 12), len);
                world.begin_map(phys, len / 4096);
                let mapped = core.map(&[segment], Direction::ToDevice);
                match mapped {
                    Ok(mapping) => {
                        world.mapped(&mapping, phys);
                        if any(4) > 0 {
                            world.access(mapping.range().first().raw(), false);
                        }
                        own.push(mapping);
                    }
                    Err(DmaMapError::Alloc(_)) => {}
                    Err(error) => fail(error),
                }
                world.end_map(phys, len / 4096);
            }
            4..6 => {
                if let Some(mapping) = own.pop() {
                    world.unmap(core, mapping);
                }
            }
            6 => {
                let mapping = world.known().handed_over.pop();
                if let Some(mapping) = mapping {
                    world.unmap(core, mapping);
                }
            }
            _ if any(4) == 0 => {
                if let Err(error) = core.park() {
                    fail(error);
                }
            }
            _ => world.known().handed_over.extend(own.pop()),
        }
        if has_failed() {
            return;
        }
    }
    world.known().handed_over.append(&mut own);
}

fn meet<A: IovaAllocator + 'static>(allocator: A, policy: Policy)
where
    A::Core: 'static,
{
    let cores = allocator.cores();
    let memory = Arc::new(ModelMemory::new(24));
    let world = Arc::new(World {
        domain: ModelDomain::in_memory(allocator, policy, DeviceLimits::default(), &memory),
        is_strict: is_strict(&policy),
        is_sharing: policy.reuse == Reuse::Shared,
        known: Mutex::default(),
    });
    let workers: Vec<_> = (0..cores)
        .map(|id| {
            let world = Arc::clone(&world);
            let mut core = world.domain.core(id);
            thread::spawn(move || {
                work(&world, &mut core, id as u64);
                core
            })
        })
        .collect();
    let ticker = thread::spawn({
        let world = Arc::clone(&world);
        move || {
            for _ in 0..2 + any(8) {
                world.tick();
            }
        }
    });
    let device = thread::spawn({
        let world = Arc::clone(&world);
        move || {
            for _ in 0..16 {
                world.access_any();
                random_schedules::point();
                if has_failed() {
                    return;
                }
            }
        }
    });
    let quiet: Vec<_> = workers
        .into_iter()
        .map(|worker| worker.join().expect("a model ends at a panic"))
        .collect();
    ticker.join().expect("a model ends at a panic");
    device.join().expect("a model ends at a panic");
    if !has_failed() {
        end(&world, quiet);
    }
    if has_failed() {
        return;
    }
    let stats = world.domain.mapper.allocator_stats();
    let tables = world.domain.mapper.table_stats();
    if (stats.live_ranges, stats.live_pages, tables.retired) != (0, 0, 0) {
        fail(format!("left over: {stats:?}, {tables:?}"));
    }
    drop(world);
    if memory.used() != 0 {
        fail(format!("{} table pages are left over", memory.used()));
    }
}

/// The cores are quiet.
fn end<A: IovaAllocator>(world: &World<A>, mut quiet: Vec<ModelCore<A>>) {
    for _ in 0..AGE + 1 {
        world.tick();
    }
    let risk = world.domain.mapper.risk();
    if risk.stale_now != 0 {
        fail(format!("a quiet core keeps windows open: {risk:?}"));
    }
    let numbers: Vec<_> = world.known().pages.keys().copied().collect();
    for number in numbers {
        world.access(number, false);
    }
    let handed_over = core::mem::take(&mut world.known().handed_over);
    for mapping in handed_over {
        let core = any(quiet.len() as u64) as usize;
        world.unmap(&mut quiet[core], mapping);
    }
    for _ in 0..AGE + 1 {
        world.tick();
    }
    // Twice: what one core kept for another comes back when that one runs again.
    for _ in 0..2 {
        for core in &mut quiet {
            if let Err(error) = core.park() {
                fail(error);
            }
        }
    }
    let risk = world.domain.mapper.risk();
    let bound = risk.contract.max_stale.unwrap_or(u64::MAX);
    if risk.stale_now != 0 || risk.stale_max > bound {
        fail(format!("{risk:?}"));
    }
    if world.is_strict && (risk.stale_max, risk.stale_times.max_ns) != (0, 0) {
        fail(format!("strict, and {risk:?}"));
    }
}

const WINDOW: Window = Window {
    entries: 3,
    age: Duration::from_nanos(AGE * TICK),
};
const IDLE: Optimistic = Optimistic {
    quota: 2,
    residency: Duration::from_nanos(AGE * TICK),
};
const DEFERRED: Policy = Policy::DEFERRED.with_teardown(Teardown::Deferred(WINDOW));
const OPTIMISTIC: Policy = Policy::STRICT.with_reuse(Reuse::Optimistic(IDLE));

/// A core or two more than chunks, so that these go back and forth; or a locked tree.
fn model(policies: &'static [Policy]) -> impl Fn() + Send + Sync + 'static {
    move || {
        let policy = policies[any(policies.len() as u64) as usize];
        let cores = 3 + any(3) as usize;
        match any(4) {
            0 => {
                let last = IovaPfn::new(31);
                let aperture = Aperture::new(IovaPfn::new(0), last, &[]).expect("pages");
                meet(TreeAllocator::new(aperture, cores).expect("cores"), policy);
            }
            _ => {
                let last = IovaPfn::new((cores as u64 - 1) * CHUNK_PAGES - 1);
                let aperture = Aperture::new(IovaPfn::new(0), last, &[]).expect("pages");
                meet(
                    ChunkAllocator::retiring(aperture, cores).expect("cores"),
                    policy,
                );
            }
        }
    }
}

#[test]
fn strict_policies_leave_nothing_stale() {
    const ALL: &[Policy] = &[Policy::STRICT, Policy::STRICT_COMBINING];
    holds(1_000, model(ALL));
}

#[test]
fn shared_mappings_go_with_their_last_user() {
    const ALL: &[Policy] = &[
        Policy::SHARED,
        Policy::SHARED.with_teardown(Teardown::COMBINING),
    ];
    holds(1_000, model(ALL));
}

#[test]
fn windows_close() {
    const ALL: &[Policy] = &[
        DEFERRED,
        Policy::ASYNC.with_teardown(Teardown::Async(WINDOW)),
    ];
    holds(1_000, model(ALL));
}

#[test]
fn idle_mappings_are_reused_or_torn_down() {
    const ALL: &[Policy] = &[
        OPTIMISTIC,
        OPTIMISTIC.with_teardown(Teardown::COMBINING),
        DEFERRED.with_reuse(Reuse::Optimistic(IDLE)),
    ];
    holds(1_000, model(ALL));
}
