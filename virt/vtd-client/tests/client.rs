//! Driver behind a real unit: the unit stops translating the ranges that `DmaMapper` unmaps, at the
//! time that the policy prescribes.

mod driver;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use address::PhysAddr;
use dma_map::invalidate::{Command, InvalidateError, Invalidator};
use dma_map::table::TableMemory;
use dma_map::{DeviceLimits, Direction, DmaUnmapError, Policy};
use guest_mem::{Gpa, Intent, Iommu, Iova, Leases, Perm, PhysMem, RegisterPage};
use iova::{IovaPfn, IovaRange};
use vtd::front::Shared;
use vtd::spec::registers as reg;
use vtd_client::{DomainInvalidator, EnableError, InvalidationQueue, QueueConfig, Registers};

use driver::*;
use vtd_guest::{DISK, Guest, QUEUE, STATUS};

const STRICT: [Policy; 3] = [Policy::STRICT, Policy::STRICT_COMBINING, Policy::SHARED];

fn range(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).expect("in the space")
}

#[test]
fn after_a_strict_unmap_the_unit_refuses() {
    for policy in STRICT {
        let world = World::trap(policy);
        let mut core = world.core(0);
        for i in 0..300 {
            let mapping = core.map(&[page(0x800 + i)], Direction::ToDevice).unwrap();
            let iova = mapping.iova();
            assert_eq!(world.access(iova), Ok((0x800 + i) << 12));
            assert!(world.machine.access(iova, Perm::Write).is_err());
            core.unmap(mapping).unwrap();
            assert!(world.access(iova).is_err(), "{policy:?}");
        }
        assert_eq!(world.mapper.risk().stale_max, 0);
        let stats = world.machine.owner().unit.stats().clone();
        assert!(stats.iotlb_hits + stats.iotlb_misses >= 600, "{stats:?}");
        assert_eq!(stats.queue_errors, 0);
    }
}

/// The unit's IOTLB does keep translations: otherwise the test above would prove nothing about the
/// queue.
#[test]
fn deferred_mappings_translate_until_the_flush() {
    let world = World::trap(Policy::DEFERRED);
    let mut core = world.core(0);
    let mut stale = Vec::new();
    for i in 0..200 {
        let mapping = core.map(&[page(0x800 + i)], Direction::ToDevice).unwrap();
        let iova = mapping.iova();
        world.access(iova).unwrap();
        core.unmap(mapping).unwrap();
        stale.push((iova, (0x800 + i) << 12));
    }
    // The ticker does not run, so the coarse clock stands still, and no age is reached.
    assert_eq!(world.mapper.risk().stale_now, 200);
    for (iova, phys) in &stale {
        assert_eq!(world.access(*iova), Ok(*phys), "the unit's IOTLB has it");
    }
    world.mapper.flush().unwrap();
    for (iova, _) in stale {
        assert!(world.access(iova).is_err());
    }
    core.park().unwrap();
    assert_eq!(world.mapper.risk().stale_now, 0);
    assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
}

#[test]
fn asynchronous_unmaps_end_with_their_wait() {
    let world = World::trap(Policy::ASYNC);
    let mut core = world.core(0);
    for i in 0..2000 {
        let mapping = core.map(&[page(0x800 + i)], Direction::ToDevice).unwrap();
        let iova = mapping.iova();
        world.access(iova).unwrap();
        core.unmap(mapping).unwrap();
        // The owner has worked while the register was written.
        assert!(world.access(iova).is_err());
    }
    core.park().unwrap();
    assert_eq!(world.mapper.risk().stale_now, 0);
}

/// A table page that went back leads every address to `POISON`; the unit must never get there.
#[test]
fn a_reclaimed_leaf_table_is_not_walked_again() {
    for policy in [Policy::STRICT, Policy::STRICT_COMBINING, Policy::DEFERRED] {
        let world = World::trap(policy);
        let mut core = world.core(0);
        let empty = world.memory.used();
        let mut most = 0;
        for _ in 0..4 {
            let held: Vec<_> = (0..4 * 512)
                .map(|i| core.map(&[page(0x800 + i)], Direction::ToDevice).unwrap())
                .collect();
            most = most.max(world.memory.used());
            let mut seen = Vec::new();
            for mapping in held {
                let iova = mapping.iova();
                world.access(iova).unwrap();
                core.unmap(mapping).unwrap();
                seen.push(iova);
            }
            core.park().unwrap();
            core.park().unwrap();
            for iova in seen {
                assert!(world.access(iova).is_err(), "{policy:?}");
            }
        }
        // The root, one table below it, and one chunk that the core keeps.
        assert!(most >= empty + 5, "{most} table pages at most");
        assert!(world.memory.used() <= empty + 2, "{policy:?}");
    }
}

/// The poison works: a table page freed without taking it out of the tree is found.
#[test]
fn a_freed_table_that_is_still_linked_is_noticed() {
    let world = World::trap(Policy::STRICT);
    let mut core = world.core(0);
    let mapping = core.map(&[page(0x800)], Direction::ToDevice).unwrap();
    let (iova, first) = (mapping.iova(), mapping.range().first().raw());
    core.unmap(mapping).unwrap();
    let mem = &world.guest.mem;
    let middle = mem.get_u64(Gpa::new(world.mapper.root().raw())) & !0xfff;
    let entry = Gpa::new(middle + (first >> 9) * 8);
    let link = mem.get_u64(entry);
    // SAFETY: a mistake on purpose; the page is guest memory, which stays, and only the device
    // walks it.
    unsafe { world.memory.free(PhysAddr::new(link & !0xfff)) };
    assert_eq!(world.access(iova), Ok(POISON));
    mem.put_u64(entry, 0);
}

/// Two cores and a ticker against a sidecore that polls the register page; nothing exits.
#[test]
fn a_sidecore_serves_many_cores() {
    let policies = [
        Policy::STRICT,
        Policy::STRICT_COMBINING,
        Policy::DEFERRED,
        Policy::ASYNC,
    ];
    let guest = Guest::new();
    let machine = machine(&guest);
    let page_of_registers = RegisterPage::in_heap();
    let front = Shared::enter(&mut machine.owner().unit, &page_of_registers);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (stop, side) = (&stop, machine.clone());
        let registers = page_of_registers.clone();
        scope.spawn(move || sidecore(&side, &registers, front, stop));
        // The sidecore ends when a check below fails, too.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _stop = Stop(stop);
        let queue = boot(Polled(page_of_registers.clone()), &guest);
        for policy in policies {
            let world = World::of(guest.clone(), machine.clone(), queue.clone(), policy);
            queue.flush_all().unwrap();
            let is_strict = [Policy::STRICT, Policy::STRICT_COMBINING].contains(&policy);
            thread::scope(|scope| {
                for id in 0..2u64 {
                    let (world, mut core) = (&world, world.core(id as usize));
                    scope.spawn(move || {
                        for i in 0..400 {
                            let number = 0x800 + id * 0x400 + i;
                            let segment = [page(number)];
                            let mapping = core.map(&segment, Direction::ToDevice).unwrap();
                            let iova = mapping.iova();
                            assert_eq!(world.access(iova), Ok(number << 12));
                            core.unmap(mapping).unwrap();
                            // Another core may have the IOVA by now, for a page of its own.
                            if is_strict {
                                assert_ne!(world.access(iova), Ok(number << 12), "{policy:?}");
                            }
                        }
                        core.park().unwrap();
                    });
                }
            });
            world.mapper.flush().unwrap();
            (0..2).for_each(|id| world.core(id).park().unwrap());
            let risk = world.mapper.risk();
            assert_eq!(
                (risk.stale_now, is_strict && risk.stale_max > 0),
                (0, false)
            );
            assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
            // No device of the domain holds the table when it goes.
            guest.raw_context(DISK, 0, 0);
            queue.flush_all().unwrap();
        }
    });
    assert_eq!(machine.owner().unit.stats().queue_errors, 0);
}

/// The unmap waits for the device's access in flight: CAP.DRD and DWD, through the whole stack.
#[test]
fn an_unmap_returns_when_accesses_in_flight_have_drained() {
    let world = World::trap(Policy::ASYNC);
    let mut core = world.core(0);
    let mapping = core.map(&[page(0x800)], Direction::ToDevice).unwrap();
    let iova = mapping.iova();
    let phys = world.access(iova).unwrap();
    let lease = {
        let unit = &mut world.machine.owner().unit;
        unit.leases_mut()
            .begin(DISK, iova, Gpa::new(phys), 64, Perm::Read)
            .unwrap()
    };
    core.unmap(mapping).unwrap();
    assert!(world.access(iova).is_err(), "no new access");
    assert_eq!(world.mapper.risk().stale_now, 1, "one that is not over");
    world.machine.works_in_pause.store(true, Ordering::Relaxed);
    thread::scope(|scope| {
        let parking = scope.spawn(move || core.park().unwrap());
        while world.machine.owner().unit.stats().waits_parked == 0 {
            thread::yield_now();
        }
        assert_eq!(world.mapper.risk().stale_now, 1);
        world.machine.owner().unit.leases_mut().end(lease);
        parking.join().unwrap();
    });
    assert_eq!(world.mapper.risk().stale_now, 0);
}

/// Three hundred batches where 85 fit: the unit is asleep until the driver waits for room.
#[test]
fn a_full_queue_is_waited_for() {
    let guest = Guest::new();
    let machine = machine(&guest);
    let invalidator = DomainInvalidator::new(boot(machine.clone(), &guest), DID);
    machine.is_prompt.store(false, Ordering::Relaxed);
    machine.works_in_pause.store(true, Ordering::Relaxed);
    let commands = [Command::Pages(range(8, 1)), Command::Pages(range(16, 1))];
    let tickets: Vec<_> = (0..300)
        .map(|_| invalidator.submit(&commands).unwrap())
        .collect();
    assert!(machine.owner().unit.stats().waits > 200);
    assert!(!invalidator.poll(tickets[299]).unwrap());
    invalidator.wait(tickets[299]).unwrap();
    // In any order, and repeatedly.
    for ticket in tickets.iter().rev().chain(&tickets) {
        assert!(invalidator.poll(*ticket).unwrap());
    }
    assert_eq!(machine.owner().unit.stats().queue_errors, 0);
}

#[test]
fn a_unit_that_does_not_work_is_waited_for_no_longer_than_said() {
    let guest = Guest::new();
    let machine = machine(&guest);
    let config = QueueConfig {
        timeout_ns: 1_000_000,
        ..config()
    };
    let queue = InvalidationQueue::enable(machine.clone(), guest.mem.clone(), clock(), config);
    let invalidator = DomainInvalidator::new(queue.unwrap().into(), DID);
    machine.is_prompt.store(false, Ordering::Relaxed);
    let late = |error| {
        matches!(
            error,
            Err(InvalidateError::TimedOut {
                waited_ns: 1_000_000..
            })
        )
    };
    assert!(late(invalidator.flush(&[Command::Domain])));
    let mut submitted = 1;
    let full = loop {
        match invalidator.submit(&[Command::Domain]) {
            Ok(_) => submitted += 1,
            Err(error) => break Err(error),
        }
    };
    assert!(late(full));
    // One of the 256 places stays free, and each batch has two descriptors.
    assert_eq!(submitted, 127);
    // It wakes up, and everything continues.
    machine.works_in_pause.store(true, Ordering::Relaxed);
    machine.is_prompt.store(true, Ordering::Relaxed);
    machine.owner().settle();
    invalidator.flush(&[Command::Domain]).unwrap();
}

/// A descriptor is overwritten: IQE. The batches in flight fail, the mapper keeps their ranges, and
/// the next flush covers them.
#[test]
fn a_stopped_queue_fails_what_is_in_flight_and_starts_again() {
    let world = World::trap(Policy::STRICT);
    let mut core = world.core(0);
    let machine = &world.machine;
    for round in 1..5 {
        let mapping = core.map(&[page(0x800)], Direction::ToDevice).unwrap();
        let iova = mapping.iova();
        world.access(iova).unwrap();
        machine.is_prompt.store(false, Ordering::Relaxed);
        // The unit is asleep: the batch written next gets a reserved type, wherever it lies.
        let early = world
            .mapper
            .invalidator()
            .submit(&[Command::Domain])
            .unwrap();
        let tail = machine.read32(reg::IQT);
        let victim = (tail + 0x1000 - 32) % 0x1000;
        world
            .guest
            .mem
            .put_u64(Gpa::new(QUEUE + u64::from(victim)), 0xf);
        machine.works_in_pause.store(true, Ordering::Relaxed);
        let error = core.unmap(mapping).unwrap_err();
        let DmaUnmapError::NotInvalidated { source, .. } = error else {
            panic!("{error:?}");
        };
        assert_eq!(source, InvalidateError::Stopped { status: 0x10 });
        assert!(world.mapper.invalidator().poll(early).is_err());
        assert_eq!(world.access(iova), Ok(0x80_0000), "stale, and said so");
        assert_eq!(world.mapper.risk().stale_now, 1);
        machine.is_prompt.store(true, Ordering::Relaxed);
        core.park().unwrap();
        assert!(world.access(iova).is_err());
        assert_eq!(world.mapper.risk().stale_now, 0);
        assert_eq!(machine.owner().unit.stats().queue_errors, round);
        // Void for ever.
        assert!(world.mapper.invalidator().poll(early).is_err());
    }
    assert_eq!(world.mapper.allocator_stats().live_ranges, 0);
}

#[test]
fn page_selective_invalidations_leave_other_pages_alone() {
    let world = World::trap(Policy::DEFERRED);
    let mut core = world.core(0);
    let list: Vec<_> = (0..7).map(|i| page(0x800 + 2 * i)).collect();
    let mut out = Vec::new();
    let mapping = core
        .map_list(
            &DeviceLimits::default(),
            &list,
            Direction::ToDevice,
            &mut out,
        )
        .unwrap();
    let first = mapping.range().first().raw();
    let iova = |i: u64| IovaPfn::new(first + i).start();
    let touch = |world: &World<Machine>| {
        (0..7).for_each(|i| assert_eq!(world.access(iova(i)), Ok((0x800 + 2 * i) << 12)));
    };
    touch(&world);
    let walks = |world: &World<Machine>| world.machine.owner().unit.stats().iotlb_misses;
    world
        .mapper
        .invalidator()
        .flush(&[Command::Pages(range(first + 2, 3))])
        .unwrap();
    let before = walks(&world);
    touch(&world);
    assert_eq!(walks(&world) - before, 3);
    let before = walks(&world);
    world
        .mapper
        .invalidator()
        .flush_tables(range(first, 1))
        .unwrap();
    touch(&world);
    assert_eq!(walks(&world) - before, 1);
    core.unmap(mapping).unwrap();
}

/// Submitters and pollers on four threads, each batch its own; the queue restarts under them now
/// and then.
#[test]
fn tickets_of_many_threads_do_not_mix() {
    let guest = Guest::new();
    let machine = machine(&guest);
    let queue = boot(machine.clone(), &guest);
    let failures = AtomicU32::new(0);
    thread::scope(|scope| {
        for id in 0..4u64 {
            let invalidator = DomainInvalidator::new(queue.clone(), DID);
            let (guest, failures) = (&guest, &failures);
            scope.spawn(move || {
                let mut held = std::collections::VecDeque::new();
                for i in 0..2_000u64 {
                    if id == 0 && i % 500 == 499 {
                        // A malformed descriptor at the tail, as from faulty software.
                        invalidator.queue().with_registers(|machine| {
                            let tail = machine.read32(reg::IQT);
                            guest.mem.put_u64(Gpa::new(QUEUE + u64::from(tail)), 0xf);
                            machine.write32(reg::IQT, (tail + 16) % 0x1000);
                        });
                    }
                    match invalidator.submit(&[Command::Pages(range(i, 1 + i % 5))]) {
                        Ok(ticket) => held.push_back(ticket),
                        Err(InvalidateError::Stopped { status: 0x10 }) => {}
                        Err(error) => panic!("{error:?}"),
                    }
                    if held.len() > 20 {
                        match invalidator.wait(held.pop_front().unwrap()) {
                            Ok(()) => {}
                            Err(InvalidateError::Stopped { status: 0x10 }) => {
                                failures.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(error) => panic!("{error:?}"),
                        }
                    }
                }
            });
        }
    });
    assert!(failures.load(Ordering::Relaxed) > 0);
    let invalidator = DomainInvalidator::new(queue, DID);
    // The last error may not have been reported to any thread yet.
    let _ = invalidator.flush(&[Command::Global]);
    invalidator.flush(&[Command::Global]).unwrap();
    assert_eq!(machine.owner().unit.stats().queue_errors, 4);
}

#[test]
fn a_queue_is_refused_where_it_cannot_be() {
    let guest = Guest::new();
    let machine = machine(&guest);
    let enable = |config: QueueConfig| {
        InvalidationQueue::enable(machine.clone(), guest.mem.clone(), clock(), config).map(drop)
    };
    let good = config();
    let bad = [
        QueueConfig { size: 8, ..good },
        QueueConfig {
            queue: Gpa::new(QUEUE + 16),
            ..good
        },
        QueueConfig {
            queue: Gpa::new(vtd_guest::RAM),
            ..good
        },
        QueueConfig {
            queue: Gpa::new(!0xfff),
            ..good
        },
        QueueConfig {
            size: 1,
            queue: Gpa::new(vtd_guest::RAM - 0x1000),
            ..good
        },
        QueueConfig {
            status: Gpa::new(STATUS + 2),
            ..good
        },
        QueueConfig {
            status: Gpa::new(vtd_guest::RAM - 4),
            ..good
        },
    ];
    for config in bad {
        assert_eq!(enable(config), Err(EnableError::Place { config }));
    }
    enable(QueueConfig {
        size: 7,
        queue: Gpa::new(0x20_0000),
        status: Gpa::new(0x30_0004),
        ..good
    })
    .unwrap();
    assert_eq!(enable(good), Err(EnableError::InUse));
    let shadowed = vtd::Config {
        caching_mode: true,
        ..vtd::Config::default()
    };
    machine.owner().unit = vtd::Unit::new(shadowed);
    assert!(matches!(enable(good), Err(EnableError::Unsupported { .. })));
    assert!(guest.mem.host(Gpa::new(0), 1, Intent::Read).is_ok());
    assert!(
        machine.access(Iova::new(0), Perm::Read).is_ok(),
        "translation was never on"
    );
}
