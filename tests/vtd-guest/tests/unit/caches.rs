//! Keys that the caches must not mix up: widths, buses, domains, and one epoch with another.

use fake_mem::ArrayMem;
use guest_mem::{DmaFault, Gpa, Perm, SourceId, Stop};
use vtd_guest::*;

fn blocked(answer: Result<guest_mem::Run, Stop>) -> bool {
    matches!(answer, Err(Stop::Fault(DmaFault::Blocked { .. })))
}

fn booted(guest: &Guest) -> Machine<ArrayMem> {
    let mut machine = Machine::trap(guest.mem.clone());
    machine.boot();
    machine
}

#[test]
fn two_widths_in_one_domain_share_nothing_that_one_may_not_address() {
    const HIGH: u64 = 1 << 39 | 0x1000;
    let mut guest = Guest::new();
    let (wide, narrow) = (guest.page(), guest.page());
    guest.context(DISK, wide, 1, 2);
    guest.context(NET, narrow, 1, 1);
    guest.map(wide, 4, HIGH, 0x5000 | RW);
    guest.map(wide, 4, 0x1000, 0x6000 | RW);
    guest.map(narrow, 3, 0x1000, 0x6000 | RW);
    for wide_first in [true, false] {
        let mut m = booted(&guest);
        if wide_first {
            assert_run(m.translate(DISK, HIGH, Perm::Read), 0x5000, 0x1000);
        }
        assert_run(m.translate(NET, 0x1000, Perm::Read), 0x6000, 0x1000);
        assert_run(m.translate(DISK, HIGH, Perm::Read), 0x5000, 0x1000);
        // Twice each: walked, and looked up where it is kept.
        for _ in 0..2 {
            assert!(blocked(m.translate(NET, HIGH, Perm::Read)));
            assert_run(m.translate(NET, 0x1000, Perm::Read), 0x6000, 0x1000);
            assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x6000, 0x1000);
        }
        // A flush of the domain reaches what either holds.
        guest.map(wide, 4, 0x1000, 0x7000 | RW);
        guest.map(narrow, 3, 0x1000, 0x7000 | RW);
        m.submit_wait(&[iotlb_pages(1, 0x1000, 0)]);
        assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x7000, 0x1000);
        assert_run(m.translate(NET, 0x1000, Perm::Read), 0x7000, 0x1000);
        guest.map(wide, 4, 0x1000, 0x6000 | RW);
        guest.map(narrow, 3, 0x1000, 0x6000 | RW);
    }
}

#[test]
fn a_context_that_another_bus_evicted_keeps_no_translation_alive() {
    // The same device and function, so the same slot of the context cache.
    let other = SourceId::new(1, 1, 0);
    assert_eq!(other.devfn(), DISK.devfn());
    let mut guest = Guest::new();
    let (table, contexts) = (guest.page(), guest.page());
    guest.context(DISK, table, 1, 2);
    guest.put(ROOT + 16, u128::from(contexts | 1));
    let entry = 0x202_u128 << 64 | u128::from(table | 1);
    guest.put(contexts + u64::from(other.devfn()) * 16, entry);
    guest.map(table, 4, 0x1000, 0x5000 | RW);
    let mut m = booted(&guest);
    assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x5000, 0x1000);
    assert_run(m.translate(other, 0x1000, Perm::Read), 0x5000, 0x1000);
    // The first one's context is not here any more: the flush of its domain must reach it all the
    // same.
    guest.map(table, 4, 0x1000, 0x6000 | RW);
    m.submit_wait(&[iotlb_domain(1)]);
    assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x6000, 0x1000);
    guest.map(table, 4, 0x1000, 0);
    m.submit_wait(&[iotlb_global()]);
    assert!(blocked(m.translate(DISK, 0x1000, Perm::Read)));
    assert!(blocked(m.translate(other, 0x1000, Perm::Read)));
}

#[test]
fn more_flushes_than_there_are_epochs_bring_no_old_translation_back() {
    let mut guest = Guest::new();
    let (first, second) = (guest.page(), guest.page());
    guest.context(DISK, first, 1, 2);
    guest.context(NET, second, 2, 2);
    let leaf = guest.entry(first, 4, 0x1000, 1);
    let other = guest.entry(second, 4, 0x1000, 1);
    let mut m = booted(&guest);
    guest.mem.put_u64(Gpa::new(other), 0xf000 | RW);
    for turn in 0..10_000_u64 {
        let page = 0x10_0000 + turn % 7 * 0x1000;
        guest.mem.put_u64(Gpa::new(leaf), page | RW);
        m.submit_wait(&[iotlb_domain(1)]);
        assert_run(m.translate(DISK, 0x1000, Perm::Write), page, 0x1000);
        // The neighbour's is kept under its own epoch, and under a new one when all has been
        // cleared.
        assert_run(m.translate(NET, 0x1000, Perm::Write), 0xf000, 0x1000);
    }
    let walks = m.unit.stats().iotlb_misses;
    assert!(
        walks < 10_100,
        "{walks} walks: the neighbour was flushed as well"
    );
}
