//! Maps and unmaps of the guest, and its ways to invalidate.

use dma_map::iova::Access;
use guest_mem::PAGE_SIZE;
use vfio::testing::FakeCall;
use vtd_guest::{PS, cc_device, iotlb_domain, iotlb_global};

use crate::world::{DATA, R, RW, World, tell};

/// A page of 2 MiB of guest memory, in the second region.
const LARGE: u64 = (18 << 20) / PAGE_SIZE;

#[test]
fn a_wait_completes_when_the_map_and_when_the_unmap_has_returned() {
    let mut world = World::strict();
    let table = world.boot()[0];
    let kernel = world.seats[0].kernel.clone();
    for perm in [RW, 0] {
        kernel.hold();
        world.set(table, 16, DATA, 2, perm);
        let wait = world.submit(&[tell(1, 16, 2)]);
        world.until("the call", |world| world.seats[0].kernel.held() == 1);
        world.settle();
        assert!(
            !world.is_complete(wait),
            "the guest believes in what has not happened: {perm}"
        );
        assert_eq!(world.in_use(&[DATA, DATA + 1, DATA + 2]), [DATA, DATA + 1]);
        kernel.release();
        world.complete(wait);
    }
    assert_eq!(world.pages(0), []);
    assert_eq!(world.in_use(&[DATA, DATA + 1]), [0_u64; 0]);
}

/// Linux frees an IOVA and gives it out again at once.
#[test]
fn an_iova_that_is_used_again_reaches_the_other_page() {
    let mut world = World::strict();
    let table = world.boot()[0];
    for turn in 0..20 {
        world.map((table, 1), 0xfff00, DATA + turn, 1, RW);
        assert_eq!(world.pages(0), [(0xfff00, DATA + turn)]);
        world.unmap((table, 1), 0xfff00, 1);
        assert_eq!(world.pages(0), []);
    }
    // Told once for both: another page, another permission.
    world.map((table, 1), 0xfff00, DATA, 1, RW);
    world.map((table, 1), 0xfff00, DATA + 1, 1, RW);
    assert_eq!(
        world.reached(0),
        [(0xfff00, DATA + 1, Access::ReadWrite)],
        "the page that the guest maps now is not reached"
    );
    world.map((table, 1), 0xfff00, DATA + 1, 1, R);
    assert_eq!(world.reached(0), [(0xfff00, DATA + 1, Access::Read)]);
}

#[test]
fn a_large_page_is_one_mapping_and_half_of_it_can_go() {
    let mut world = World::strict();
    let table = world.boot()[0];
    let entry = world.entry(table, 512, 2);
    world.put(entry, (LARGE * PAGE_SIZE) | RW | PS);
    world.flush(&[tell(1, 512, 512)]);
    assert_eq!((world.pages(0).len(), world.calls(0)), (512, 1));
    // The guest splits it, with a half that is gone.
    let below = world.table();
    for at in 256..512 {
        world.put(below + at * 8, ((LARGE + at) * PAGE_SIZE) | RW);
    }
    world.put(entry, below | RW);
    let kernel = world.seats[0].kernel.clone();
    let before = world.calls(0);
    // Its invalidation names the half that has changed.
    world.flush(&[tell(1, 512, 256)]);
    let wanted: Vec<_> = (256..512).map(|at| (512 + at, LARGE + at)).collect();
    assert_eq!(world.pages(0), wanted, "the half that stands came back");
    assert_eq!(world.counts(0).cut, 1);
    let first = kernel.calls()[before].call;
    assert!(matches!(first, FakeCall::Unmap { range } if range.pages() == 512));
    let gone: Vec<_> = (LARGE..LARGE + 256).step_by(50).collect();
    assert_eq!(world.in_use(&gone), [0_u64; 0]);
    // From now on each page is one of its own: the next cut costs nothing else.
    world.unmap((table, 1), 512 + 300, 1);
    assert_eq!((world.pages(0).len(), world.counts(0).cut), (255, 1));
}

/// A lazy guest: many unmaps, one flush of the domain.
#[test]
fn a_flush_of_the_domain_finds_all_that_has_changed() {
    let mut world = World::strict();
    let table = world.boot()[0];
    world.set(table, 0x1000, DATA, 64, RW);
    world.flush(&[iotlb_domain(1)]);
    for at in (0..64).step_by(2) {
        world.set(table, 0x1000 + at, 0, 1, 0);
    }
    world.set(table, 0x2000, DATA + 200, 1, RW);
    world.settle();
    assert_eq!(world.pages(0).len(), 64, "no invalidation has come");
    world.flush(&[iotlb_domain(1)]);
    let mut wanted: Vec<_> = (1..64)
        .step_by(2)
        .map(|at| (0x1000 + at, DATA + at))
        .collect();
    wanted.push((0x2000, DATA + 200));
    assert_eq!(world.pages(0), wanted);
    let global: &[u128] = &[iotlb_global()];
    let source: &[u128] = &[cc_device(1, world.seats[0].source, 0)];
    for told in [global, source] {
        let gone = wanted.pop().unwrap();
        world.set(table, gone.0, 0, 1, 0);
        world.flush(told);
        assert_eq!(world.pages(0), wanted, "{told:x?}");
    }
}

/// A guest's mistake: nothing tells of the map, so it is not reached until something does.
#[test]
fn a_map_without_invalidation_is_found_at_the_next_flush() {
    let mut world = World::strict();
    let table = world.boot()[0];
    world.map((table, 1), 16, DATA, 1, RW);
    world.set(table, 17, DATA + 1, 1, RW);
    world.settle();
    assert_eq!(world.pages(0), [(16, DATA)]);
    // Neither of another range, nor of another domain.
    world.flush(&[tell(1, 32, 16)]);
    world.flush(&[iotlb_domain(77)]);
    assert_eq!(world.pages(0), [(16, DATA)]);
    world.flush(&[iotlb_domain(1)]);
    assert_eq!(world.pages(0), [(16, DATA), (17, DATA + 1)]);
}

/// A guest writes its tables while they are walked: what comes is one of what was there, and the
/// next invalidation mends it.
#[test]
fn tables_that_change_during_a_walk_do_no_harm() {
    let mut world = World::strict();
    let table = world.boot()[0];
    let data = |at: u64| DATA + at % 512;
    for round in 0..4 {
        world.set(table, 0, data(round), 512, RW);
        for at in (0..512).step_by(3) {
            world.set(table, at, data(at + round), 1, RW);
        }
        let wait = world.submit(&[iotlb_domain(1)]);
        let mut turn = 0;
        while !world.is_complete(wait) {
            // Entries go, come, and are no tables any more.
            world.set(
                table,
                turn % 512,
                data(turn),
                1,
                [0, R, RW][turn as usize % 3],
            );
            let entry = world.entry(table, (turn % 4) * 512, 2);
            let old = world.get(entry);
            world.put(entry, 0xffff_ffff_f000 | RW);
            world.poll();
            world.put(entry, old);
            turn += 1;
            assert!(turn < 1_000_000, "it does not complete");
        }
    }
    world.set(table, 0, DATA, 512, RW);
    world.flush(&[iotlb_domain(1)]);
    let wanted: Vec<_> = (0..512).map(|at| (at, DATA + at)).collect();
    assert_eq!(world.pages(0), wanted);
    world.translate(false);
    assert_eq!((world.pages(0), world.reach.pages()), (vec![], 0));
}

/// More than fits into the calls under way, into the tasks that are kept apart, and into a slice.
#[test]
fn many_mappings_and_many_invalidations_are_all_carried_out() {
    let mut world = World::strict();
    let table = world.boot()[0];
    // Each a run of its own.
    for at in 0..1024 {
        world.set(table, 2 * at, DATA + at % 512, 1, RW);
    }
    world.flush(&[iotlb_domain(1)]);
    assert_eq!(world.pages(0).len(), 1024);
    let kernel = world.seats[0].kernel.clone();
    kernel.hold();
    let mut told = Vec::new();
    for at in 0..100 {
        world.set(table, 4 * at, 0, 1, 0);
        told.push(tell(1, 4 * at, 1));
    }
    let wait = world.submit(&told);
    world.settle();
    assert!(!world.is_complete(wait));
    kernel.release();
    world.complete(wait);
    assert_eq!(world.pages(0).len(), 924);
    world.translate(false);
    assert_eq!((world.pages(0), world.reach.pages()), (vec![], 0));
}
