//! Stops that broke a barrier once, or would have: each core runs exactly to the step that the test
//! names.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use address::PhysAddr;
use dma_map::invalidate::InvalidateError;
use dma_map::mapper::{Optimistic, Reuse, Teardown, Window};
use dma_map::{Direction, Mapping, Policy, Segment};
use iova::{Access, Aperture, CoreId, IovaPfn, TreeAllocator};

use crate::hardware::Failing;
use crate::turns::{Cores, SwitchPoint};
use crate::world::{Core, World};

const MS: u64 = 1_000_000;

type Trees = World<TreeAllocator>;
type Answer = Rc<RefCell<Option<Result<(), InvalidateError>>>>;

fn world(policy: Policy) -> Rc<Trees> {
    let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(4095), &[]).expect("pages");
    let space = TreeAllocator::new(aperture, 3).expect("cores");
    World::new(space, policy, 1, 0)
}

fn core(world: &Trees, id: usize) -> Core<TreeAllocator> {
    world.mapper.core(CoreId(id)).expect("nobody else has it")
}

/// Maps a page, and lets the device use it.
fn map(world: &Trees, core: &mut Core<TreeAllocator>, page: u64) -> Mapping {
    let segment = Segment::new(PhysAddr::new(page << 12), 4096);
    let mapping = core
        .map(&[segment], Direction::ToDevice)
        .expect("there is room");
    assert!(reaches(world, mapping.iova(), page));
    mapping
}

fn reaches(world: &Trees, iova: address::Iova, page: u64) -> bool {
    world.device.access(iova, Access::Read) == Ok(PhysAddr::new(page << 12))
}

/// Adds a core that asks, and what it is answered.
fn ask(
    cores: &mut Cores,
    question: impl FnOnce() -> Result<(), InvalidateError> + 'static,
) -> (usize, Answer) {
    let answer = Answer::default();
    let told = Rc::clone(&answer);
    let asking = cores.add(move || {
        told.replace(Some(question()));
    });
    (asking, answer)
}

/// Runs the barrier `asking` as far as it comes while `holder` is stopped: it must not be `Ok`
/// while `is_reached`. Then both go on, and it is.
fn holds(
    cores: &mut Cores,
    holder: usize,
    (asking, answer): (usize, Answer),
    is_reached: impl Fn() -> bool,
) {
    assert!(is_reached(), "or there is nothing to wait for");
    if cores.run(asking) {
        assert!(
            *answer.borrow() != Some(Ok(())) || !is_reached(),
            "the barrier returned Ok, and the device still reaches what was unmapped before"
        );
    }
    cores.run(holder);
    cores.run(asking);
    assert_eq!(*answer.borrow(), Some(Ok(())));
    assert!(!is_reached());
}

/// m1 is unmapped at 0 ms, m2 at 7 ms (at 8 ms the owner itself would let m1 go), and a tick at 10
/// ms takes m1 and is stopped in `submit`.
#[test]
fn flush_waits_for_a_tick_that_is_stopped_in_the_hardware() {
    let world = world(Policy::optimistic(256));
    let mut owner = core(&world, 0);
    let maps = [1, 2].map(|page| map(&world, &mut owner, page));
    let iovas = [maps[0].iova(), maps[1].iova()];
    for (mapping, then) in maps.into_iter().zip([7, 3]) {
        owner.unmap(mapping).expect("kept");
        world.time.0.pass(then * MS);
    }
    let mut cores = Cores::new(1, 1);
    let (ticking, _) = ask(&mut cores, {
        let world = Rc::clone(&world);
        move || world.mapper.tick(10 * MS)
    });
    assert!(cores.run_to(ticking, SwitchPoint::Submit, 1));
    let flushing = ask(&mut cores, {
        let world = Rc::clone(&world);
        move || world.mapper.flush()
    });
    holds(&mut cores, ticking, flushing, || {
        reaches(&world, iovas[0], 1) || reaches(&world, iovas[1], 2)
    });
}

/// The tick that has taken a mapping is stopped before it has cleared it, or after, or in the
/// hardware.
fn stop_a_tick(question: fn(&mut Option<Core<TreeAllocator>>) -> Result<(), InvalidateError>) {
    for place in [
        SwitchPoint::Unmap,
        SwitchPoint::Unmapped,
        SwitchPoint::Submit,
        SwitchPoint::Poll,
    ] {
        let world = world(Policy::optimistic(256));
        let mut owner = core(&world, 0);
        let mapping = map(&world, &mut owner, 1);
        let iova = mapping.iova();
        owner.unmap(mapping).expect("kept");
        let mut cores = Cores::new(1, 1);
        let (ticking, _) = ask(&mut cores, {
            let world = Rc::clone(&world);
            move || world.mapper.tick(10 * MS)
        });
        world.time.0.pass(10 * MS);
        assert!(cores.run_to(ticking, place, 1));
        let mut owner = Some(owner);
        let asking = ask(&mut cores, move || question(&mut owner));
        holds(&mut cores, ticking, asking, || reaches(&world, iova, 1));
    }
}

#[test]
fn park_waits_for_a_tick_that_has_taken_its_mapping() {
    stop_a_tick(|owner| owner.as_mut().expect("once").park());
}

#[test]
fn a_drop_waits_for_a_tick_that_has_taken_its_mapping() {
    stop_a_tick(|owner| {
        drop(owner.take());
        Ok(())
    });
}

/// The owner takes its oldest mappings to make room, and is stopped in the middle of that.
#[test]
fn flush_waits_for_an_owner_that_evicts() {
    for place in [
        SwitchPoint::Unmap,
        SwitchPoint::Unmapped,
        SwitchPoint::Submit,
    ] {
        let world = world(Policy::optimistic(2));
        let mut owner = core(&world, 0);
        let maps = [1, 2].map(|page| map(&world, &mut owner, page));
        let oldest = maps[0].iova();
        let mut maps = maps.into_iter();
        owner.unmap(maps.next().expect("two")).expect("kept");
        let mut cores = Cores::new(1, 1);
        let second = maps.next().expect("two");
        let (evicting, _) = ask(&mut cores, move || {
            owner.unmap(second).expect("kept");
            Ok(())
        });
        assert!(cores.run_to(evicting, place, 1));
        let flushing = ask(&mut cores, {
            let world = Rc::clone(&world);
            move || world.mapper.flush()
        });
        holds(&mut cores, evicting, flushing, || {
            reaches(&world, oldest, 1)
        });
    }
}

/// While a flush waits for a core's teardown, neither a tick nor a report of the risk waits.
#[test]
fn tick_and_report_do_not_wait_for_a_teardown() {
    let world = world(Policy::optimistic(256));
    let mut owner = core(&world, 0);
    let mapping = map(&world, &mut owner, 1);
    owner.unmap(mapping).expect("kept");
    world.time.0.pass(20 * MS);
    let mut cores = Cores::new(1, 1);
    let tick = |cores: &mut Cores| {
        let world = Rc::clone(&world);
        ask(cores, move || world.mapper.tick(20 * MS))
    };
    let (first, _) = tick(&mut cores);
    assert!(cores.run_to(first, SwitchPoint::Submit, 1));
    let (second, answer) = tick(&mut cores);
    assert!(cores.run(second), "a tick waits");
    assert_eq!(*answer.borrow(), Some(Ok(())));
    let (third, _) = ask(&mut cores, {
        let world = Rc::clone(&world);
        move || {
            assert_eq!(world.mapper.risk().stale_now, 1);
            Ok(())
        }
    });
    assert!(cores.run(third), "a report waits");
    cores.run(first);
    assert_eq!(world.mapper.risk().stale_now, 0);
}

/// The owner's own invalidation fails, and the owner never runs again.
#[test]
fn a_flush_covers_what_a_quiet_owner_could_not() {
    let world = world(Policy::STRICT.with_reuse(Reuse::Optimistic(Optimistic::of(2))));
    let mut quiet = core(&world, 0);
    let maps = [1, 2].map(|page| map(&world, &mut quiet, page));
    let iovas = [maps[0].iova(), maps[1].iova()];
    world.hardware.set_failing(Failing::All);
    for mapping in maps {
        quiet.unmap(mapping).expect("kept");
    }
    assert_eq!(world.mapper.risk().stale_now, 2);
    assert!(world.mapper.flush().is_err());
    assert_eq!(world.mapper.risk().stale_now, 2, "nothing is forgotten");
    world.hardware.set_failing(Failing::None);
    world.mapper.flush().expect("the hardware answers");
    assert!(!reaches(&world, iovas[0], 1) && !reaches(&world, iovas[1], 2));
    assert_eq!(world.mapper.risk().stale_now, 0);
    drop(quiet);
    assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
}

/// Asynchronous: A's invalidation fails, its core is dropped, and the ticket of the next owner's B
/// completes.
#[test]
fn the_next_owners_ticket_does_not_cover_what_a_dropped_core_left() {
    let world = world(Policy::ASYNC);
    let mut first = core(&world, 0);
    let mapping = map(&world, &mut first, 1);
    let a = mapping.iova();
    world.hardware.set_failing(Failing::All);
    // At the submission, or when it is asked for.
    let _ = first.unmap(mapping);
    drop(first);
    assert!(reaches(&world, a, 1));
    world.hardware.set_failing(Failing::None);
    let mut next = core(&world, 0);
    for page in 2..20 {
        let mapping = map(&world, &mut next, page);
        let _ = next.unmap(mapping);
        assert!(reaches(&world, a, 1), "A is covered by nothing yet");
        assert!(
            world.mapper.risk().stale_now >= 1,
            "A is reached, and forgotten"
        );
    }
    // A tick flushes it when its age is reached, although no core has anything to flush.
    next.park().expect("the hardware answers");
    world.time.0.pass(11 * MS);
    world.mapper.tick(11 * MS).expect("the hardware answers");
    assert!(!reaches(&world, a, 1));
    assert_eq!(world.mapper.risk().stale_now, 0);
    drop(next);
    assert_eq!(core(&world, 1).park(), Ok(()));
    assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
}

/// The same where the flush of a window failed.
#[test]
fn work_of_a_dropped_core_is_counted_until_covered() {
    let age = Duration::from_millis(10);
    let window = Window { entries: 2, age };
    for teardown in [
        Teardown::Deferred(window),
        Teardown::Async(window),
        Teardown::Strict,
    ] {
        let world = world(Policy::STRICT.with_teardown(teardown));
        for round in 1..4 {
            world.hardware.set_failing(Failing::All);
            let mut owner = core(&world, 0);
            let mapping = map(&world, &mut owner, round);
            let _ = owner.unmap(mapping);
            drop(owner);
            assert_eq!(world.mapper.risk().stale_now, round);
        }
        assert!(world.mapper.flush().is_err());
        assert_eq!(world.mapper.risk().stale_now, 3);
        world.hardware.set_failing(Failing::None);
        assert_eq!(world.mapper.flush(), Ok(()));
        assert_eq!(world.mapper.risk().stale_now, 0);
        assert_eq!(world.mapper.risk().stale_times.total(), 3);
    }
}
