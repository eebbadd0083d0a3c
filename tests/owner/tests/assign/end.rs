//! Ends: a device is taken away, the machine ends.

use std::sync::mpsc::channel;

use assign::policy::HostPolicy;
use dma_map::mapper::Window;
use guest_mem::GuestRam;
use machine::Request;

use crate::world::{DATA, Options, RW, World, tell};

#[test]
fn a_device_is_removed_when_nothing_is_in_its_reach() {
    let mut world = World::strict();
    let table = world.boot()[0];
    world.map((table, 1), 16, DATA, 2, RW);
    let (kernel, hardware) = (
        world.seats[0].kernel.clone(),
        world.seats[0].hardware.clone(),
    );
    kernel.hold();
    let gone = world.remove(0);
    assert!(hardware.device().is_stopped, "it stops at once");
    world.until("the call", |world| world.seats[0].kernel.held() == 1);
    world.settle();
    assert!(gone.try_recv().is_err(), "its mappings are in reach");
    assert_eq!(world.in_use(&[DATA, DATA + 1]), [DATA, DATA + 1]);
    kernel.release();
    let mut source = None;
    world.until("it is gone", |_| true);
    while source.is_none() {
        world.poll();
        source = gone.try_recv().ok();
    }
    assert_eq!(source, Some(world.seats[0].source));
    assert_eq!((kernel.mappings(), world.reach.pages()), (0, 0));
    assert_eq!(world.config_read(0, 0, 4), u32::MAX);
    // The guest goes on.
    world.flush(&[tell(1, 16, 1)]);
}

/// An invalidation that a device holds completes when the device has gone, and not before.
#[test]
fn a_wait_that_a_removed_device_holds_completes_with_it() {
    let mut world = World::strict();
    let table = world.boot()[0];
    world.map((table, 1), 16, DATA, 1, RW);
    let kernel = world.seats[0].kernel.clone();
    kernel.hold();
    world.set(table, 16, 0, 1, 0);
    let wait = world.submit(&[tell(1, 16, 1)]);
    world.until("the call", |world| world.seats[0].kernel.held() == 1);
    let gone = world.remove(0);
    world.settle();
    assert!(!world.is_complete(wait), "its call is under way");
    assert!(gone.try_recv().is_err());
    kernel.release();
    world.complete(wait);
    world.until("it is gone", |_| gone.try_recv().is_ok());
    assert_eq!((kernel.mappings(), world.reach.pages()), (0, 0));
}

#[test]
fn the_machine_ends_when_nothing_is_in_reach() {
    let mut world = World::<GuestRam>::empty();
    world.assign(Options::default());
    world.assign(Options::default());
    let tables = world.boot();
    world.map((tables[0], 1), 16, DATA, 1, RW);
    world.map((tables[1], 2), 16, DATA, 1, RW);
    let held = world.seats[1].kernel.clone();
    held.hold();
    let (told, ended) = channel();
    world.message(Request::End(told));
    for seat in &world.seats {
        assert!(seat.hardware.device().is_stopped);
    }
    let first = world.seats[0].number;
    let mut numbers = Vec::new();
    world.until("the first ends", |world| world.pages(0).is_empty());
    world.settle();
    numbers.extend(ended.try_iter());
    assert_eq!(numbers, [first], "the second is in reach of memory");
    held.release();
    world.until("the second ends", |world| world.reach.pages() == 0);
    world.settle();
    numbers.extend(ended.try_iter());
    assert_eq!(numbers.len(), 2);
}

/// Stale mappings whose age is over while the container is being closed are in the closing call's
/// hands.
#[test]
fn stale_mappings_of_a_device_that_ends_are_released_with_it() {
    let mut world = World::<GuestRam>::with(Options {
        policy: HostPolicy::Deferred(Window::DEFAULT),
        ..Options::default()
    });
    let table = world.boot()[0];
    world.map((table, 1), 16, DATA, 1, RW);
    world.unmap((table, 1), 16, 1);
    assert_eq!(world.pages(0), [(16, DATA)]);
    let kernel = world.seats[0].kernel.clone();
    kernel.hold();
    let gone = world.remove(0);
    world.until("the call", |world| world.seats[0].kernel.held() == 1);
    world.later(50);
    world.settle();
    let deadline = world.assigned(0).shadow().deadline();
    assert_eq!(deadline, None, "it would be woken for nothing");
    kernel.release();
    world.until("it is gone", |_| gone.try_recv().is_ok());
    assert_eq!(kernel.mappings(), 0);
    assert_eq!(
        world.reach.pages(),
        0,
        "pages of a device that is gone stay in use"
    );
}

/// An owner that is dropped closes its containers.
#[test]
fn an_owner_that_is_dropped_leaves_nothing_in_reach() {
    let mut world = World::strict();
    let table = world.boot()[0];
    world.map((table, 1), 16, DATA, 2, RW);
    let kernel = world.seats[0].kernel.clone();
    drop(world);
    assert_eq!(kernel.mappings(), 0);
}
