//! Unmaps that the kernel does not carry out: the device is cut off, and the WAIT completes only
//! then.

use std::sync::{Arc, Mutex};

use guest_mem::GuestRam;
use vfio::Errno;
use vfio::testing::FakeCall;

use crate::world::{DATA, Options, RW, World, tell};

const EIO: Errno = Errno(5);

/// A device with three pages mapped.
fn mapped() -> (World<GuestRam>, u64) {
    let mut world = World::strict();
    let table = world.boot()[0];
    world.config_write(0, 4, 2, 6);
    assert_eq!(world.seats[0].hardware.device().command, (true, true));
    for at in 0..3 {
        world.map((table, 1), 32 + 2 * at, DATA + at, 1, RW);
    }
    (world, table)
}

/// Behaviour of the kernel at an unmap.
#[derive(Clone, Copy, Debug)]
enum How {
    Fails,
    DoesNothing,
    DoesLess,
    DoesMore,
}

/// Waits for the WAIT turn by turn; what must be so when it completes was so before.
fn complete_when_cut_off(world: &mut World<GuestRam>, wait: u32) {
    let seen = Arc::new(Mutex::new(false));
    let told = seen.clone();
    world.until("the WAIT completes", |world| {
        let is_complete = world.is_complete(wait);
        let is_stopped = world.seats[0].hardware.device().is_stopped;
        assert!(
            is_stopped || !is_complete,
            "the WAIT completes while the device is a bus master"
        );
        *told.lock().unwrap() |= is_stopped;
        assert!(
            !is_complete || world.seats[0].kernel.mappings() == 0,
            "the WAIT completes before the container is closed"
        );
        is_complete
    });
    assert!(*seen.lock().unwrap());
}

#[test]
fn an_unmap_that_fails_or_does_another_size_cuts_the_device_off_before_its_wait_completes() {
    for how in [How::Fails, How::DoesNothing, How::DoesLess, How::DoesMore] {
        let (mut world, table) = mapped();
        let kernel = world.seats[0].kernel.clone();
        match how {
            How::Fails => kernel.fail_nth(0, EIO),
            How::DoesNothing => kernel.ignore_unmap_nth(0, 0),
            How::DoesLess => kernel.ignore_unmap_nth(0, 0x800),
            How::DoesMore => kernel.ignore_unmap_nth(0, 0x2000),
        }
        world.set(table, 34, 0, 1, 0);
        let wait = world.submit(&[tell(1, 34, 1)]);
        complete_when_cut_off(&mut world, wait);
        assert!(!world.seats[0].hardware.device().command.1, "{how:?}");
        assert_eq!(world.reach.pages(), 0, "{how:?}");
        assert_eq!(
            world.config_read(0, 0, 4),
            u32::MAX,
            "the guest finds an empty slot: {how:?}"
        );
        // What the guest does with its domain from now on completes, and asks for nothing.
        let calls = world.calls(0);
        world.map((table, 1), 64, DATA, 1, RW);
        world.unmap((table, 1), 64, 1);
        world.translate(false);
        assert_eq!((world.calls(0), world.pages(0)), (calls, vec![]));
    }
}

/// The closing call fails as well: nothing completes, and what was mapped stays in use for good.
#[test]
fn pages_of_a_container_that_cannot_be_closed_stay_in_use() {
    let (mut world, table) = mapped();
    let kernel = world.seats[0].kernel.clone();
    kernel.fail_all(Some(EIO));
    world.set(table, 34, 0, 1, 0);
    let wait = world.submit(&[tell(1, 34, 1)]);
    world.until("the device is cut off", |world| {
        world.seats[0].hardware.device().is_stopped
    });
    world.until("the groups are asked for", |world| {
        let calls = world.seats[0].kernel.calls();
        calls.iter().any(|call| call.call == FakeCall::Detach)
    });
    world.settle();
    assert!(
        !world.is_complete(wait),
        "the device reaches the page still"
    );
    assert_eq!(world.in_use(&[DATA, DATA + 1, DATA + 2]).len(), 3);
}

/// The groups come off although the unmap fails.
#[test]
fn a_container_is_closed_by_taking_its_groups_off() {
    let (mut world, table) = mapped();
    let kernel = world.seats[0].kernel.clone();
    // The unmap, and that of all when the container is closed.
    kernel.fail_nth(0, EIO);
    kernel.fail_nth(1, EIO);
    world.set(table, 34, 0, 1, 0);
    let wait = world.submit(&[tell(1, 34, 1)]);
    complete_when_cut_off(&mut world, wait);
    let calls = kernel.calls();
    assert_eq!(calls.last().unwrap().call, FakeCall::Detach);
    assert_eq!(world.reach.pages(), 0);
}

/// The call does not return: after the hold's limit and the call's the device is cut off, at once;
/// its WAIT waits until the container is closed.
#[test]
fn an_unmap_that_does_not_return_cuts_the_device_off_and_its_wait_waits() {
    let (mut world, table) = mapped();
    let kernel = world.seats[0].kernel.clone();
    kernel.hold();
    world.set(table, 34, 0, 1, 0);
    let wait = world.submit(&[tell(1, 34, 1)]);
    world.until("the call", |world| world.seats[0].kernel.held() == 1);
    world.settle();
    assert!(
        !world.seats[0].hardware.device().is_stopped,
        "it has time yet"
    );
    world.later(1100);
    world.later(1100);
    world.until("the device is cut off", |world| {
        world.seats[0].hardware.device().is_stopped
    });
    world.settle();
    assert!(
        !world.is_complete(wait),
        "the WAIT completes before the container is closed"
    );
    assert_eq!(world.in_use(&[DATA, DATA + 1, DATA + 2]).len(), 3);
    assert_eq!(world.owner.totals().hold_limits, 1);
    kernel.release();
    complete_when_cut_off(&mut world, wait);
    assert_eq!((world.reach.pages(), kernel.mappings()), (0, 0));
}

/// A map may take as long as it will: all of a guest's memory takes seconds.
#[test]
fn a_map_that_takes_long_is_waited_for() {
    let (mut world, table) = mapped();
    let kernel = world.seats[0].kernel.clone();
    kernel.hold();
    world.set(table, 64, DATA, 1, RW);
    let wait = world.submit(&[tell(1, 64, 1)]);
    world.until("the call", |world| world.seats[0].kernel.held() == 1);
    (0..20).for_each(|_| world.later(1000));
    assert!(!world.is_complete(wait));
    assert!(!world.seats[0].hardware.device().is_stopped);
    kernel.release();
    world.complete(wait);
    assert_eq!(world.pages(0).len(), 4);
}

/// A device that is cut off does not take the other one with it.
#[test]
fn the_failure_of_one_device_is_not_the_others() {
    let mut world = World::<GuestRam>::empty();
    world.assign(Options::default());
    world.assign(Options::default());
    let tables = world.boot();
    world.attach(1, tables[0], 1);
    world.map((tables[0], 1), 16, DATA, 2, RW);
    let first = world.seats[0].kernel.clone();
    first.hold();
    first.fail_nth(0, EIO);
    world.set(tables[0], 17, 0, 1, 0);
    let wait = world.submit(&[tell(1, 17, 1)]);
    // The second cuts, and maps the rest again.
    world.until("the second is done", |world| world.pages(1).len() == 1);
    world.settle();
    assert!(
        !world.is_complete(wait),
        "a hold of the first was released by the second"
    );
    first.release();
    world.complete(wait);
    assert!(world.seats[0].hardware.device().is_stopped);
    assert!(!world.seats[1].hardware.device().is_stopped);
    assert_eq!((world.pages(0), world.pages(1)), (vec![], vec![(16, DATA)]));
    world.map((tables[0], 1), 64, DATA + 7, 1, RW);
    assert_eq!(world.pages(1), [(16, DATA), (64, DATA + 7)]);
}
