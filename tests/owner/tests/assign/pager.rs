//! Memory whose pages come and go, under devices that reach some of them.

use guest_mem::{GuestRam, Intent};
use machine::Request;
use vtd_guest::iotlb_domain;

use crate::memory::{Memory, Paged};
use crate::world::{DATA, Options, R, RW, TABLES, W, World, tell};

fn world() -> (World<Paged>, u64) {
    let mut world = World::<Paged>::with(Options::default());
    let table = world.boot()[0];
    (world, table)
}

/// The pager brings in what is waited for, until a WAIT completes; how many tickets that were.
fn complete_with_tickets(world: &mut World<Paged>, wait: u32) -> usize {
    for tickets in 0..10_000 {
        world.settle();
        if world.is_complete(wait) {
            return tickets;
        }
        let ticket = world.mem.ticket().expect("it waits for memory");
        world.mem.mem.deliver(ticket);
        world.message(Request::TicketDone(ticket, Ok(())));
    }
    panic!("it waits for ever");
}

#[test]
fn mapped_pages_stay_and_those_beside_them_go() {
    let (mut world, table) = world();
    world.map((table, 1), 16, DATA + 1, 2, RW);
    world.map((table, 1), 18, DATA + 5, 1, R);
    let pages: Vec<_> = (DATA..DATA + 8).collect();
    assert_eq!(
        world.evict(&pages),
        [DATA, DATA + 3, DATA + 4, DATA + 6, DATA + 7]
    );
    world.unmap((table, 1), 16, 2);
    assert_eq!(
        world.evict(&[DATA + 1, DATA + 2, DATA + 5]),
        [DATA + 1, DATA + 2]
    );
}

#[test]
fn a_page_stays_while_the_call_that_maps_it_and_the_one_that_unmaps_it_are_under_way() {
    let (mut world, table) = world();
    let kernel = world.seats[0].kernel.clone();
    for perm in [RW, 0] {
        kernel.hold();
        world.set(table, 16, DATA, 1, perm);
        let wait = world.submit(&[tell(1, 16, 1)]);
        world.until("the call", |world| world.seats[0].kernel.held() == 1);
        world.settle();
        assert_eq!(
            world.evict(&[DATA, DATA + 1]),
            [DATA + 1],
            "a page is evicted under a device"
        );
        kernel.release();
        world.complete(wait);
    }
    assert_eq!(world.evict(&[DATA]), [DATA]);
}

#[test]
fn a_page_whose_map_was_refused_goes() {
    let (mut world, table) = world();
    world.seats[0].kernel.fail_nth(0, vfio::Errno(14));
    world.map((table, 1), 16, DATA, 1, RW);
    assert_eq!(
        world.evict(&[DATA]),
        [DATA],
        "a map that was refused is in use"
    );
}

/// A page that is out is mapped when it has come in, not before.
#[test]
fn a_map_of_a_page_that_is_out_waits_for_it_and_reaches_what_it_held() {
    let (mut world, table) = world();
    for page in [DATA, DATA + 2] {
        world.mem.evict(page);
    }
    world.set(table, 16, DATA, 4, RW);
    let wait = world.submit(&[tell(1, 16, 4)]);
    world.settle();
    assert!(
        !world.is_complete(wait),
        "the WAIT completes before the page has come in"
    );
    assert_eq!(
        (world.calls(0), world.in_use(&[DATA, DATA + 1])),
        (0, vec![]),
        "a hole was mapped"
    );
    let tickets = complete_with_tickets(&mut world, wait);
    assert!(tickets > 0);
    let wanted: Vec<_> = (0..4).map(|at| (16 + at, DATA + at)).collect();
    assert_eq!(world.pages(0), wanted);
    assert_eq!(world.evict(&[DATA, DATA + 2, DATA + 4]), [DATA + 4]);
}

/// A page that is lost is refused, and the rest is mapped.
#[test]
fn a_page_that_cannot_be_brought_in_is_refused() {
    let (mut world, table) = world();
    world.mem.evict(DATA);
    world.set(table, 16, DATA, 1, RW);
    world.set(table, 18, DATA + 9, 1, RW);
    let wait = world.submit(&[tell(1, 16, 4)]);
    world.settle();
    let ticket = world.mem.ticket().expect("it waits");
    world.mem.mem.fail(ticket);
    world.message(Request::TicketDone(ticket, Err(machine::Absent)));
    world.complete(wait);
    assert_eq!(world.pages(0), [(18, DATA + 9)]);
    assert_eq!(world.in_use(&[DATA]), [0_u64; 0]);
}

/// A device that may write makes its pages dirty: the pager learns so when they are lent.
#[test]
fn pages_that_a_device_may_write_are_asked_for_as_written() {
    let (mut world, table) = world();
    for (page, perm) in [(0, R), (1, W), (2, RW)] {
        world.map((table, 1), 32 + 2 * page, DATA + page, 1, perm);
    }
    let heard = |page: u64| world.mem.intents(DATA + page);
    assert_eq!(heard(0), [Intent::Read], "as a device that only reads");
    for page in [1, 2] {
        assert_eq!(
            heard(page),
            [Intent::Write],
            "the pager was not told that a device may write"
        );
    }
}

/// The same where the map has to be asked for again: the container was full of what is stale.
#[test]
fn a_map_that_is_asked_for_again_says_again_that_it_writes() {
    let mut world = World::<Paged>::with(Options {
        policy: crate::policies::optimistic(4),
        ..Options::default()
    });
    let table = world.boot()[0];
    world.seats[0].kernel.limit_entries(1);
    world.map((table, 1), 16, DATA, 1, RW);
    world.unmap((table, 1), 16, 1);
    world.map((table, 1), 32, DATA + 1, 1, RW);
    assert_eq!(world.pages(0), [(32, DATA + 1)]);
    let heard = world.mem.intents(DATA + 1);
    assert!(
        heard.iter().all(|intent| *intent == Intent::Write),
        "the pager was not told that a device may write: {heard:?}"
    );
}

/// Tables, contexts and the root that are out are waited for as well.
#[test]
fn tables_that_are_out_are_waited_for() {
    let (mut world, table) = world();
    world.set(table, 16, DATA, 2, RW);
    world.set(table, 1024, DATA + 8, 2, RW);
    let tables: Vec<_> = (TABLES / 4096..TABLES / 4096 + 8).collect();
    for out in [crate::world::ROOT / 4096, crate::world::CONTEXTS / 4096] {
        world.mem.evict(out);
    }
    tables.iter().for_each(|page| world.mem.evict(*page));
    let wait = world.submit(&[iotlb_domain(1)]);
    assert!(complete_with_tickets(&mut world, wait) >= 3);
    assert_eq!(
        world.pages(0),
        [
            (16, DATA),
            (17, DATA + 1),
            (1024, DATA + 8),
            (1025, DATA + 9)
        ]
    );
    // And while it checks.
    world.set(table, 17, 0, 1, 0);
    tables.iter().for_each(|page| world.mem.evict(*page));
    let wait = world.submit(&[iotlb_domain(1)]);
    assert!(complete_with_tickets(&mut world, wait) >= 2);
    assert_eq!(
        world.pages(0),
        [(16, DATA), (1024, DATA + 8), (1025, DATA + 9)]
    );
}

/// Between the answer to `host` and the call no page goes: an eviction is asked for at every turn,
/// of every page.
#[test]
fn a_page_is_never_evicted_between_the_question_and_the_call() {
    let (mut world, table) = world();
    let pages: Vec<_> = (DATA..DATA + 16).collect();
    for round in 0..8 {
        let perm = if round % 2 == 0 { RW } else { 0 };
        for at in 0..16 {
            world.set(table, 32 + 2 * at, DATA + at, 1, perm);
        }
        let wait = world.submit(&[tell(1, 32, 32)]);
        for _ in 0..100_000 {
            if world.is_complete(wait) {
                break;
            }
            let gone = world.evict(&pages);
            // `check` has seen that nothing of it is reached.
            world.check();
            assert!(world.in_use(&gone).is_empty());
            if let Some(ticket) = world.mem.ticket() {
                world.mem.mem.deliver(ticket);
                world.message(Request::TicketDone(ticket, Ok(())));
            }
            world.poll();
        }
        world.complete(wait);
        let count = if perm == 0 { 0 } else { 16 };
        assert_eq!(world.pages(0).len(), count);
        let _ = world.evict(&pages);
    }
}

/// The other device's pages are in use as well, whichever function is asked.
#[test]
fn pages_of_each_device_stay() {
    let mut world = World::<Paged>::empty();
    world.assign(Options::default());
    world.assign(Options::default());
    let tables = world.boot();
    world.map((tables[0], 1), 16, DATA, 1, RW);
    world.map((tables[1], 2), 16, DATA + 1, 1, RW);
    assert_eq!(world.evict(&[DATA, DATA + 1, DATA + 2]), [DATA + 2]);
    let gone = world.remove(0);
    world.until("the first is gone", |_| gone.try_recv().is_ok());
    assert_eq!(world.evict(&[DATA, DATA + 1]), [DATA]);
}

/// RAM that is always there releases no page, mapped or not.
#[test]
fn memory_that_stays_is_not_released() {
    let mut world = World::<GuestRam>::strict();
    world.boot();
    assert_eq!(world.evict(&[DATA]), [0_u64; 0]);
    assert!(world.mem.gpa_of(0).is_none());
}
