//! Attachments of a device, from power on: as stock Linux 6.1 makes them, and as other guests
//! might.

use assign::shadow::Mode;
use dma_map::iova::Access;
use guest_mem::{GuestRam, PAGE_SIZE};
use vtd_guest::{cc_global, iotlb_domain, iotlb_global};

use crate::memory::REGIONS;
use crate::world::{DATA, Options, R, RW, W, World};

/// SRTP; per device `Source` and `Domain` while translation is off; then TE. Linux does not
/// invalidate again for mappings made before TE.
#[test]
fn a_mapping_from_before_te_is_reached_once_te_is_on_and_not_before() {
    let mut world = World::strict();
    world.start_unit();
    let table = world.table();
    world.set(table, 0xfff00, DATA, 3, RW);
    world.set(table, 0xfff08, DATA + 9, 1, R);
    world.attach(0, table, 1);
    world.settle();
    assert_eq!((world.calls(0), world.mode(0)), (0, Mode::Nothing));
    world.ask_translation(true);
    world.until("TE shows", World::is_translating);
    assert_eq!(
        world.reached(0),
        [
            (0xfff00, DATA, Access::ReadWrite),
            (0xfff01, DATA + 1, Access::ReadWrite),
            (0xfff02, DATA + 2, Access::ReadWrite),
            (0xfff08, DATA + 9, Access::Read),
        ]
    );
    assert_eq!(world.mode(0), Mode::Domain(1));
    world.set(table, 0xfff10, DATA + 16, 1, W);
    world.flush(&[crate::world::tell(1, 0xfff10, 1)]);
    assert_eq!(
        world.reached(0)[4],
        (0xfff10, DATA + 16, Access::Write),
        "a device that may write only"
    );
}

/// TE does not show as on before the replay's calls are over, nor as off before all is torn down.
#[test]
fn te_shows_when_its_calls_are_over() {
    let mut world = World::strict();
    world.start_unit();
    let table = world.table();
    world.set(table, 16, DATA, 4, RW);
    world.attach(0, table, 1);
    let kernel = world.seats[0].kernel.clone();
    kernel.hold();
    world.ask_translation(true);
    world.until("the call", |world| world.seats[0].kernel.held() == 1);
    world.settle();
    assert!(!world.is_translating(), "TE shows while a map is under way");
    kernel.release();
    world.until("TE shows", World::is_translating);

    kernel.hold();
    world.ask_translation(false);
    world.until("the call", |world| world.seats[0].kernel.held() == 1);
    world.settle();
    assert!(
        world.is_translating(),
        "TE shows as off while a mapping is in reach"
    );
    kernel.release();
    world.until("TE is off", |world| !world.is_translating());
    assert_eq!((world.pages(0), world.mode(0)), (vec![], Mode::Nothing));
    // On again: what the tables have now.
    world.set(table, 17, 0, 1, 0);
    world.translate(true);
    assert_eq!(world.pages(0), [(16, DATA), (18, DATA + 2), (19, DATA + 3)]);
}

#[test]
fn a_new_domain_without_a_detach_ends_what_only_the_old_one_maps() {
    let mut world = World::strict();
    let old = world.boot()[0];
    world.set(old, 32, DATA, 4, RW);
    world.set(old, 64, DATA + 8, 1, RW);
    world.flush(&[iotlb_domain(1)]);
    let new = world.table();
    // One page stays as it is, one goes elsewhere.
    world.set(new, 64, DATA + 8, 1, RW);
    world.set(new, 32, DATA + 100, 1, RW);
    world.attach(0, new, 9);
    assert_eq!(world.pages(0), [(32, DATA + 100), (64, DATA + 8)]);
    assert_eq!(world.mode(0), Mode::Domain(9));
    // Invalidations of the old domain have no effect any more.
    world.set(old, 128, DATA, 1, RW);
    world.flush(&[iotlb_domain(1), crate::world::tell(1, 128, 1)]);
    assert_eq!(world.pages(0), [(32, DATA + 100), (64, DATA + 8)]);
}

/// Linux tells `Source` and then `Domain`; others tell only one, or everything.
#[test]
fn an_attachment_is_found_after_every_kind_of_invalidation() {
    let global: &[u128] = &[cc_global()];
    let all: &[u128] = &[iotlb_global()];
    let domain: &[u128] = &[iotlb_domain(5)];
    for told in [global, all, domain] {
        let mut world = World::strict();
        world.start_unit();
        world.translate(true);
        let table = world.table();
        world.set(table, 16, DATA, 1, RW);
        world.context(0, table | 1, 5);
        world.flush(told);
        assert_eq!(world.pages(0), [(16, DATA)], "{told:x?}");
        world.context(0, 0, 0);
        world.flush(told);
        let is_told = told != domain;
        if is_told {
            assert_eq!(world.pages(0), [], "{told:x?}");
        }
    }
}

#[test]
fn a_detach_ends_everything_and_an_attach_brings_it_back() {
    let mut world = World::strict();
    let table = world.boot()[0];
    world.set(table, 16, DATA, 2, RW);
    world.flush(&[iotlb_domain(1)]);
    world.context(0, 0, 0);
    world.tell_context(0, 1);
    assert_eq!((world.pages(0), world.mode(0)), (vec![], Mode::Nothing));
    assert_eq!(world.in_use(&[DATA, DATA + 1]), [0_u64; 0]);
    world.attach(0, table, 1);
    assert_eq!(world.pages(0), [(16, DATA), (17, DATA + 1)]);
}

/// A root table elsewhere, as after a kexec: contexts are looked at anew once the guest has
/// invalidated.
#[test]
fn another_root_table_is_followed() {
    let mut world = World::strict();
    let table = world.boot()[0];
    world.map((table, 1), 16, DATA, 1, RW);
    let contexts = world.table();
    world.put(crate::world::ROOT, contexts | 1);
    world.latch_root();
    assert_eq!((world.pages(0), world.mode(0)), (vec![], Mode::Nothing));
    world.put(crate::world::ROOT, 0);
    world.flush(&[cc_global(), iotlb_global()]);
    assert_eq!(world.pages(0), []);
}

#[test]
fn each_of_two_devices_reaches_what_its_domain_maps() {
    let mut world = World::<GuestRam>::empty();
    world.assign(Options::default());
    world.assign(Options::default());
    let tables = world.boot();
    world.map((tables[0], 1), 16, DATA, 1, RW);
    world.map((tables[1], 2), 16, DATA + 1, 1, RW);
    world.map((tables[1], 2), 17, DATA, 1, R);
    assert_eq!(world.pages(0), [(16, DATA)]);
    assert_eq!(world.pages(1), [(16, DATA + 1), (17, DATA)]);
    // Both reach a page: it is in use until neither does.
    world.unmap((tables[0], 1), 16, 1);
    assert_eq!(world.in_use(&[DATA]), [DATA]);
    world.unmap((tables[1], 2), 17, 1);
    assert_eq!(world.in_use(&[DATA, DATA + 1]), [DATA + 1]);
    // In one domain.
    world.attach(0, tables[1], 2);
    assert_eq!(world.pages(0), [(16, DATA + 1)]);
    world.map((tables[1], 2), 18, DATA + 5, 2, RW);
    for seat in 0..2 {
        assert_eq!(
            world.pages(seat),
            [(16, DATA + 1), (18, DATA + 5), (19, DATA + 6)]
        );
    }
    // The WAIT waits for both.
    let second = world.seats[1].kernel.clone();
    second.hold();
    world.set(tables[1], 16, 0, 1, 0);
    let wait = world.submit(&[crate::world::tell(2, 16, 1)]);
    world.until("the first is done", |world| world.pages(0).len() == 2);
    world.settle();
    assert!(
        !world.is_complete(wait),
        "the other device reaches the page still"
    );
    second.release();
    world.complete(wait);
    assert_eq!(world.pages(1).len(), 2);
}

fn all_of_ram() -> Vec<(u64, u64)> {
    let regions = REGIONS.into_iter();
    let pages = regions.flat_map(|(at, len)| at / PAGE_SIZE..(at + len) / PAGE_SIZE);
    pages.map(|page| (page, page)).collect()
}

#[test]
fn a_pass_through_context_reaches_all_of_memory_or_nothing() {
    for allows_pass_through in [true, false] {
        let mut world = World::<GuestRam>::with(Options {
            allows_pass_through,
            ..Options::default()
        });
        let table = world.boot()[0];
        world.map((table, 1), 16, DATA, 1, RW);
        // Translation type 2, in bits 3:2.
        world.context(0, 0b1001, 1);
        world.tell_context(0, 1);
        let wanted = if allows_pass_through {
            all_of_ram()
        } else {
            vec![]
        };
        assert_eq!(world.pages(0), wanted);
        assert!(world.counts(0).pass_through > 0);
        world.attach(0, table, 1);
        assert_eq!(world.pages(0), [(16, DATA)]);
    }
}

#[test]
fn dma_before_te_reaches_all_of_memory_until_te_is_on() {
    let mut world = World::<GuestRam>::with(Options {
        maps_while_off: true,
        ..Options::default()
    });
    world.settle();
    assert_eq!(world.pages(0), all_of_ram());
    let table = world.boot()[0];
    assert_eq!((world.pages(0), world.mode(0)), (vec![], Mode::Domain(1)));
    world.map((table, 1), 16, DATA, 1, RW);
    assert_eq!(world.pages(0), [(16, DATA)]);
    world.translate(false);
    assert_eq!(world.pages(0), all_of_ram());
}
