//! A guest that makes invalidations as dear as it can: 16,384 leases, and a full queue of
//! page-selective invalidations. Looks at leases are counted, so that nothing here depends on the
//! machine's speed.

use fake_mem::ArrayMem;
use guest_mem::{Budget, Gpa, Iommu, Iova, LEASE_SPAN, Leases, Perm};
use vtd::spec::registers as reg;
use vtd::{Config, Progress};
use vtd_guest::*;

const LEASES: u64 = 16384;
/// Most that a queue of 2^7 pages holds.
const DESCRIPTORS: u64 = 32767;
/// Its address.
const LONG_QUEUE: u64 = 0x80_0000;
/// Duration of a step, in ns: the value of `unit::STEP_BUDGET`.
const STEP_NS: u64 = 30_000;
/// A step finishes what it has begun: one table walk, or one flush of 256 pages.
const REST_NS: u64 = 300;

/// A disk with domain 1, `pages` pages mapped from 0 on to memory from 0 on, and a queue as long as
/// they can be.
fn machine(pages: u64) -> Machine<ArrayMem> {
    let mut guest = Guest::new();
    let table = guest.page();
    guest.context(DISK, table, 1, 2);
    for page in 0..pages {
        guest.map(table, 4, page * 0x1000, (page * 0x1000) | RW);
    }
    let config = Config {
        max_leases: guest_mem::MAX_LEASES,
        ..Config::default()
    };
    let mut machine = Machine::new(Mode::Trap, config, guest.mem.clone());
    machine.boot();
    machine.write4(reg::GCMD, 0x8000_0000);
    machine.write8(reg::IQT, 0);
    machine.write8(reg::IQA, LONG_QUEUE | 7);
    machine.write4(reg::GCMD, 0x8400_0000);
    machine.settle();
    machine
}

fn descriptor(machine: &Machine<ArrayMem>, at: u64, descriptor: u128) {
    let at = LONG_QUEUE + at * 16;
    machine.mem.put_u64(Gpa::new(at), descriptor as u64);
    machine
        .mem
        .put_u64(Gpa::new(at + 8), (descriptor >> 64) as u64);
}

/// Runs the queue up to `tail` descriptors: no step may look at more leases than its budget pays
/// for, and all of it is reported as cost. Answers how many looks, and how many steps.
fn drain(machine: &mut Machine<ArrayMem>, tail: u64) -> (u64, u64) {
    let first = machine.unit.leases().visits();
    machine.unit.take_cost();
    machine.unit.write(reg::IQT, vtd::AccessLen::B4, tail * 16);
    let mut steps = 0;
    loop {
        let before = machine.unit.leases().visits();
        let progress = machine.unit.step(&machine.mem, 0, &mut machine.out);
        steps += 1;
        let visits = machine.unit.leases().visits() - before;
        let cost = machine.unit.take_cost();
        assert!(cost <= STEP_NS + REST_NS, "a step of {cost} ns");
        assert!(
            cost >= visits * Budget::VISIT,
            "{visits} looks at leases are not charged"
        );
        if progress != Progress::Busy {
            assert_eq!(progress, Progress::Idle);
            assert_eq!(machine.read8(reg::IQH), tail * 16);
            return (machine.unit.leases().visits() - first, steps);
        }
    }
}

#[test]
fn a_full_queue_of_page_invalidations_looks_at_the_leases_of_those_pages_only() {
    // 256 leases in each of 64 buckets; the guest goes through all of them with its invalidations.
    let mut machine = machine(LEASES);
    for page in 0..LEASES {
        let iova = page % 64 * LEASE_SPAN + page / 64 * 0x1000;
        machine.begin(DISK, iova & 0x3ff_ffff, 512, Perm::Write);
    }
    for at in 0..DESCRIPTORS {
        let page = at * 61 % LEASES * 0x1000;
        descriptor(&machine, at, iotlb_pages(1, page, 0));
    }
    let (visits, steps) = drain(&mut machine, DESCRIPTORS);
    // A pass over all of them for each would be 5 × 10^8; 512 pages of 2 MiB are all that one may
    // concern.
    let bound = LEASES + DESCRIPTORS * (512 + 2);
    assert!(visits <= bound, "{visits} looks");
    assert!(
        steps <= (bound * Budget::VISIT + DESCRIPTORS * 60) / STEP_NS + 1,
        "{steps} steps"
    );
    assert_eq!(machine.unit.leases().stale(), 0);
}

#[test]
fn leases_that_all_lie_on_one_page_cost_more_steps_and_no_longer_ones() {
    let mut machine = machine(8);
    for _ in 0..LEASES {
        machine.begin(DISK, 0x1000, 512, Perm::Write);
    }
    for at in 0..16 {
        descriptor(&machine, at, iotlb_pages(1, 0x1000, 0));
    }
    let (visits, steps) = drain(&mut machine, 16);
    assert!(
        (16 * LEASES..18 * LEASES).contains(&visits),
        "{visits} looks"
    );
    // Each look is a table walk besides.
    assert!(steps >= 16 * LEASES * 30 / STEP_NS, "{steps} steps");
    assert_eq!(machine.unit.stats().leases_rechecked, 16 * LEASES);
}

#[test]
fn the_walk_of_long_leases_goes_on_in_the_next_step_where_it_stopped() {
    let mut machine = machine(16 * 512);
    for lease in 0..16 {
        let iova = Iova::new(lease * LEASE_SPAN);
        let len = LEASE_SPAN as u32;
        let id =
            machine
                .unit
                .leases_mut()
                .begin(DISK, iova, Gpa::new(iova.raw()), len, Perm::Write);
        id.expect("there is room");
    }
    descriptor(&machine, 0, iotlb_domain(1));
    let (visits, steps) = drain(&mut machine, 1);
    assert!(steps >= 16 * 512 * 25 / STEP_NS, "{steps} steps");
    // Each page once, however often it stopped in the middle; and a look for each time.
    assert_eq!(machine.unit.stats().leases_rechecked, 16 * 512);
    assert!(visits <= 2 * 16 + 2 + steps, "{visits} looks");
}
