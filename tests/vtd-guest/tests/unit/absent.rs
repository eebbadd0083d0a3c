//! Memory that may be absent, under everything that the unit reads and writes. The unit waits, and
//! goes on when the memory is there. Memory that could not be brought in is treated as no RAM.
//! Answers to requests from before a reset change nothing.

use fake_mem::PagedMem;
use guest_mem::{DmaFault, Gpa, Iommu, Iova, PAGE_SIZE, Perm, PhysMem, Stop, Ticket};
use vtd::spec::registers as reg;
use vtd::{Parked, Progress};
use vtd_guest::*;

/// An address that is mapped, and what to.
const MAPPED: u64 = 0x1000;
const TARGET: u64 = 0x9000;

/// A machine that has booted, and the pages of its tables from the root down.
fn machine() -> (Machine<PagedMem>, Vec<u64>) {
    let mut guest = Guest::new();
    let top = guest.page();
    guest.context(DISK, top, 1, 2);
    guest.map(top, 4, MAPPED, TARGET | RW);
    let mut pages = vec![ROOT, CONTEXTS];
    for level in (1..=4).rev() {
        pages.push(guest.entry(top, 4, MAPPED, level) & !(PAGE_SIZE - 1));
    }
    let mut m = Machine::trap(PagedMem::new(guest.mem.clone()));
    m.boot();
    (m, pages)
}

fn translate(m: &mut Machine<PagedMem>) -> Result<Gpa, Stop> {
    let run = m
        .unit
        .translate(&m.mem, DISK, Iova::new(MAPPED), Perm::Read)?;
    Ok(run.gpa)
}

#[track_caller]
fn pending<T: std::fmt::Debug>(answer: Result<T, Stop>) -> Ticket {
    match answer {
        Err(Stop::Pending(ticket)) => ticket,
        other => panic!("it is absent: {other:?}"),
    }
}

#[track_caller]
fn parked(m: &mut Machine<PagedMem>) -> Ticket {
    match m.unit.step(&m.mem, 0, &mut m.out) {
        Progress::Parked(Parked::Ticket(ticket)) => ticket,
        other => panic!("it is absent: {other:?}"),
    }
}

#[test]
fn a_table_that_is_absent_is_waited_for() {
    let (mut m, pages) = machine();
    for page in pages {
        m.mem.evict(Gpa::new(page), PAGE_SIZE);
    }
    for _ in 0..6 {
        let ticket = pending(translate(&mut m));
        m.mem.deliver(ticket);
    }
    assert_eq!(translate(&mut m), Ok(Gpa::new(TARGET)));
    assert_eq!(m.read4(reg::FSTS), 0, "no fault");
}

#[test]
fn a_table_that_cannot_be_brought_in_blocks_the_access() {
    for at in 0..6 {
        let (mut m, pages) = machine();
        m.mem.evict(Gpa::new(pages[at]), PAGE_SIZE);
        let ticket = pending(translate(&mut m));
        m.mem.fail(ticket);
        let blocked = translate(&mut m);
        assert!(
            matches!(blocked, Err(Stop::Fault(DmaFault::Blocked { .. }))),
            "table {at}: {blocked:?}"
        );
        assert_ne!(m.read4(reg::FSTS) & 2, 0, "table {at}: a fault is recorded");
    }
}

#[test]
fn a_queue_that_is_absent_is_waited_for_and_one_that_is_lost_stops_with_iqe() {
    for is_lost in [false, true] {
        let (mut m, _) = machine();
        let mem = m.mem.clone();
        m.fill(&[wait_status(STATUS, 9)]);
        mem.evict(Gpa::new(QUEUE), PAGE_SIZE);
        m.unit.write(reg::IQT, vtd::AccessLen::B8, m.tail);
        let ticket = parked(&mut m);
        assert_eq!(parked(&mut m), ticket, "and not asked for again");
        match is_lost {
            true => mem.fail(ticket),
            false => mem.deliver(ticket),
        }
        m.unit.ticket_done(ticket);
        assert_eq!(m.settle(), Progress::Idle);
        assert_eq!(m.read4(reg::FSTS) & 0x10 != 0, is_lost, "IQE");
        assert_eq!(m.status() == 9, !is_lost);
    }
}

#[test]
fn a_status_word_that_is_absent_is_waited_for_and_comes_behind_nothing() {
    for is_lost in [false, true] {
        let (mut m, _) = machine();
        let mem = m.mem.clone();
        mem.evict(Gpa::new(STATUS), PAGE_SIZE);
        m.fill(&[wait_status(STATUS, 9), iotlb_global()]);
        m.unit.write(reg::IQT, vtd::AccessLen::B8, m.tail);
        let ticket = parked(&mut m);
        let head = m.unit.read(reg::IQH, vtd::AccessLen::B8);
        match is_lost {
            true => mem.fail(ticket),
            false => mem.deliver(ticket),
        }
        m.unit.ticket_done(ticket);
        assert_eq!(m.settle(), Progress::Idle);
        let after = m.unit.read(reg::IQH, vtd::AccessLen::B8);
        if is_lost {
            assert_eq!(m.read4(reg::FSTS) & 0x10, 0x10, "IQE");
            assert_eq!(after, head, "at the wait");
        } else {
            assert_eq!(m.status(), 9);
            assert_eq!(after, m.tail, "all of it");
        }
    }
}

#[test]
fn a_reset_forgets_what_the_unit_waits_for() {
    let (mut m, _) = machine();
    let mem = m.mem.clone();
    m.fill(&[wait_status(STATUS, 9)]);
    mem.evict(Gpa::new(QUEUE), PAGE_SIZE);
    m.unit.write(reg::IQT, vtd::AccessLen::B8, m.tail);
    let old = parked(&mut m);
    m.unit.reset();
    assert_eq!(m.unit.step(&mem, 0, &mut m.out), Progress::Idle);
    m.tail = 0;
    m.unit.write(reg::IQA, vtd::AccessLen::B8, QUEUE);
    m.unit.write(reg::GCMD, vtd::AccessLen::B4, 0x0400_0000);
    m.unit.write(reg::IQT, vtd::AccessLen::B8, 0x10);
    let new = parked(&mut m);
    assert_ne!(old, new);
    m.unit.ticket_done(old);
    assert_eq!(parked(&mut m), new, "another life's ticket");
    mem.deliver(new);
    m.unit.ticket_done(new);
    assert_eq!(m.settle(), Progress::Idle);
    assert!(mem.read_u64(Gpa::new(QUEUE)).is_ok());
}
