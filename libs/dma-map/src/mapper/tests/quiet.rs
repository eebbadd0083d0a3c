//! One core stops for ever, and the promised bounds hold.

use std::sync::mpsc;

use alloc::vec::Vec;
use iova::Access;

use ::lines::{AtomicU64, Ordering};

use super::allocations::calls;
use super::*;
use crate::ManualClock;
use crate::invalidate::{Command, Ticket};
use crate::table::{HostMemory, IoPageTable, LeafSizes, TableConfig, VtdSecondLevel};

/// Mappings that a core which never runs again has left in the device's reach are gone after the
/// age and one tick.
fn quiet_core(policy: Policy) {
    let world = world(policy);
    let mut quiet = world.core(0);
    let mut busy = world.core(1);
    let mut left = Vec::new();
    for i in 0..5 {
        let mapping = quiet.map(&[page(i)], Direction::ToDevice).unwrap();
        world.device.access(mapping.iova(), Access::Read).unwrap();
        left.push(mapping.iova());
        quiet.unmap(mapping).unwrap();
    }
    let reached = |world: &World| {
        left.iter()
            .filter(|i| world.device.access(**i, Access::Read).is_ok())
            .count()
    };
    let age = world.mapper.contract().max_age_ns.unwrap();
    while world.clock.now() < age - TICK {
        world.tick();
        // The other core's work keeps the clock's owner busy, not the quiet one's window.
        let mapping = busy.map(&[page(77)], Direction::ToDevice).unwrap();
        busy.unmap(mapping).unwrap();
    }
    world.tick();
    world.tick();
    assert_eq!(reached(&world), 0, "{policy:?}");
    let risk = world.mapper.risk();
    risk.check(TICK).unwrap();
    // The quiet core's IOVAs are its own until it runs; then they come back.
    let live = world.mapper.allocator_stats().live_ranges;
    assert!(live >= 5, "{live} ranges");
    quiet.park().unwrap();
    busy.park().unwrap();
    assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
    let risk = world.mapper.risk();
    risk.check(TICK).unwrap();
    assert!(risk.stale_times.max_ns > 0);
}

#[test]
fn deferred_windows_close_without_their_owner() {
    quiet_core(Policy::DEFERRED);
}

#[test]
fn optimistic_windows_close_without_their_owner() {
    quiet_core(Policy::optimistic(256));
    quiet_core(Policy::DEFERRED.with_reuse(Reuse::Optimistic(Optimistic::of(16))));
}

#[test]
fn without_a_tick_the_window_stays_open_and_is_reported() {
    let world = world(Policy::DEFERRED);
    let mut core = world.core(0);
    let mapping = core.map(&[page(1)], Direction::ToDevice).unwrap();
    let iova = mapping.iova();
    world.device.access(iova, Access::Read).unwrap();
    core.unmap(mapping).unwrap();
    world.clock.pass(1_000_000_000);
    assert!(world.device.access(iova, Access::Read).is_ok());
    assert_eq!(world.mapper.risk().stale_now, 1);
    world.mapper.tick(world.clock.now()).unwrap();
    assert!(world.device.access(iova, Access::Read).is_err());
    core.park().unwrap();
    assert_eq!(world.mapper.risk().stale_times.max_ns, 1_000_000_000);
    assert!(
        world.mapper.risk().check(TICK).is_err(),
        "the promise was broken, and says so"
    );
}

#[test]
fn an_exhausted_core_gets_what_others_keep_when_they_run() {
    let world = World::of(space(64, 2), Policy::DEFERRED, DeviceLimits::default());
    let mut keeper = world.core(0);
    let mut hungry = world.core(1);
    let all: Vec<_> = (0..64)
        .map(|i| keeper.map(&[page(i)], Direction::ToDevice).unwrap())
        .collect();
    for mapping in all {
        keeper.unmap(mapping).unwrap();
    }
    let refused = hungry.map(&[page(1)], Direction::ToDevice);
    assert!(matches!(refused, Err(DmaMapError::Alloc(_))));
    // The flush that the failure forced covers the keeper's queue; its next operation gives it
    // back.
    assert!(keeper.unmap_at(address::Iova::new(1 << 40), 1).is_err());
    let mapping = hungry.map(&[page(1)], Direction::ToDevice);
    hungry.unmap(mapping.unwrap()).unwrap();
}

/// A timer interrupt may have interrupted a holder of any of the locks.
#[test]
fn whether_a_tick_is_due_is_asked_with_every_lock_held() {
    let policy = Policy::DEFERRED.with_reuse(Reuse::Optimistic(Optimistic::of(16)));
    let world = world(policy);
    let mut core = world.core(0);
    let mapping = core.map(&[page(1)], Direction::ToDevice).unwrap();
    core.unmap(mapping).unwrap();
    let shared = &*world.mapper.0;
    let line = &shared.lines[0];
    let held = (
        (shared.flush.lock(), shared.abandoned.lock()),
        (line.leaving.lock(), line.expirer.lock()),
        (line.reuse.lock(), line.left.lock()),
    );
    std::thread::scope(|scope| {
        let (told, answer) = mpsc::channel();
        let mapper = &world.mapper;
        scope.spawn(move || {
            let mut is_due = None;
            let allocated = calls(|| is_due = Some(mapper.is_due(0)));
            told.send((is_due, allocated)).unwrap();
        });
        // A right answer does not wait.
        let early = answer.recv_timeout(Duration::from_secs(10));
        drop(held);
        assert_eq!(
            early,
            Ok((Some(true), 0)),
            "what cannot be looked at may be due"
        );
    });
    let allocated = calls(|| assert!(!world.mapper.is_due(0), "free, and not due"));
    assert_eq!(allocated, 0);
    core.park().unwrap();
}

/// The answer in a kernel's interrupt agrees with the work of its thread.
#[test]
fn a_tick_that_is_not_due_finds_nothing_and_one_that_is_finds_something() {
    let (mut idle, mut busy) = (0, 0);
    for policy in policies() {
        let world = world(policy);
        let mut core = world.core(0);
        for round in 0..30 {
            if round % 15 == 2 {
                let mapping = core.map(&[page(round)], Direction::ToDevice).unwrap();
                core.unmap(mapping).unwrap();
            }
            world.clock.pass(TICK);
            let is_due = world.mapper.is_due(world.clock.now());
            let commands = world.iotlb.commands();
            world.mapper.tick(world.clock.now()).unwrap();
            let found = world.iotlb.commands() > commands;
            assert_eq!(is_due, found, "{policy:?}, round {round}");
            assert!(!(found && is_strict(&policy)), "{policy:?}");
            *if found { &mut busy } else { &mut idle } += 1;
        }
        core.park().unwrap();
    }
    assert!(busy > 10 && idle > busy, "{busy} ticks of {}", busy + idle);
}

/// A tick that coincides with `risk`, or another reader of the abandoned work, makes no unnecessary
/// invalidation.
#[test]
fn tick_during_read_of_abandoned_work_flushes_nothing() {
    let world = world(Policy::STRICT);
    let (begins, begun) = mpsc::channel();
    std::thread::scope(|scope| {
        let abandoned = world.mapper.0.abandoned.lock();
        scope.spawn(|| {
            begins.send(()).unwrap();
            world.mapper.tick(0).unwrap();
        });
        begun.recv().unwrap();
        // Until the tick has met the lock: if it has not by then, the test shows nothing.
        std::thread::sleep(Duration::from_millis(50));
        drop(abandoned);
    });
    assert_eq!(world.iotlb.commands(), 0);
}

/// Mappings that a failed invalidation has left cleared, and those of a dropped core, are due until
/// they are out of reach.
#[test]
fn mapping_with_failed_invalidation_is_due() {
    for policy in [Policy::DEFERRED, Policy::optimistic(16)] {
        let world = world(policy);
        let mut core = world.core(0);
        let mapping = core.map(&[page(1)], Direction::ToDevice).unwrap();
        core.unmap(mapping).unwrap();
        world.clock.pass(1_000_000_000);
        let now = world.clock.now();
        world.iotlb.die_for(1);
        assert!(world.mapper.tick(now).is_err());
        assert!(world.mapper.is_due(now), "{policy:?}");
        world.iotlb.die_for(1);
        drop(core);
        world.clock.pass(1_000_000_000);
        assert!(world.mapper.is_due(world.clock.now()), "{policy:?}");
        world.mapper.tick(world.clock.now()).unwrap();
        assert!(!world.mapper.is_due(world.clock.now()), "{policy:?}");
        assert_eq!(world.mapper.risk().stale_now, 0);
    }
}

/// Hardware that always has one batch under way: what was submitted is complete when the next one
/// is.
#[derive(Default)]
struct Lagging {
    submitted: AtomicU64,
    domain_flushes: AtomicU64,
}

impl Invalidator for Lagging {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        let domains = commands
            .iter()
            .filter(|command| **command == Command::Domain);
        self.domain_flushes
            .fetch_add(domains.count() as u64, Ordering::Relaxed);
        Ok(Ticket(self.submitted.fetch_add(1, Ordering::Relaxed)))
    }

    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        Ok(ticket.0 + 1 < self.submitted.load(Ordering::Relaxed))
    }

    /// The batch of the caller counts as complete.
    fn wait(&self, _: Ticket) -> Result<(), InvalidateError> {
        Ok(())
    }
}

/// The oldest waiting mapping is one tick old, however long the core has been running.
#[test]
fn a_tick_does_not_flush_for_a_core_whose_own_invalidations_complete() {
    let config = TableConfig {
        levels: 3,
        leaves: LeafSizes::FOUR_K,
    };
    let domain = Domain {
        allocator: space(1 << 12, 1),
        table: IoPageTable::<VtdSecondLevel, _>::new(HostMemory::new(), config).unwrap(),
        invalidator: Lagging::default(),
        clock: ManualClock::new(),
    };
    let mapper = DmaMapper::new(domain, Policy::ASYNC, DeviceLimits::default()).unwrap();
    let mut core = mapper.core(CoreId(0)).unwrap();
    for tick in 1..100 {
        let mapping = core.map(&[page(tick)], Direction::ToDevice).unwrap();
        core.unmap(mapping).unwrap();
        assert!(!mapper.is_due(tick * TICK), "tick {tick}");
        mapper.tick(tick * TICK).unwrap();
    }
    assert_eq!(
        mapper.invalidator().domain_flushes.load(Ordering::Relaxed),
        0
    );
    // The core stops: what waits is flushed once, in time.
    mapper.tick(120 * TICK).unwrap();
    assert_eq!(
        mapper.invalidator().domain_flushes.load(Ordering::Relaxed),
        1
    );
}
