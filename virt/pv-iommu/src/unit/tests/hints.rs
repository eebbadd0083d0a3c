//! Hints of MAPs: the pages requested; no answer waits for them, and they are bounded.

use std::sync::Arc;

use fake_mem::PagedMem;
use guest_mem::PAGE_SIZE;

use super::*;
use crate::populate::PopulateWindows;
use crate::unit::hints::{PAGES, TICKETS};

/// A unit over memory of which all is absent, with a disk attached to domain 1.
struct Paged {
    unit: PvIommu,
    mem: PagedMem,
    ear: Ear,
    asked: u64,
}

impl Paged {
    fn new(hints: Hints, bytes: u64) -> Self {
        let mem = PagedMem::new(ArrayMem::new(bytes));
        mem.evict(Gpa::new(0), bytes);
        let config = Config {
            endpoints: vec![2 << 3..=0xff],
            ..Config::default()
        };
        let mut paged = Self {
            unit: PvIommu::new(config).with_hints(hints),
            mem,
            ear: Ear::default(),
            asked: 0,
        };
        paged.ask(attach(DISK, 1, 0));
        paged
    }

    /// Sends a request; returns the answer, which comes within the call.
    fn ask(&mut self, what: Request) -> CommandResult {
        self.asked += 1;
        let command = Command {
            id: CommandId(self.asked),
            source: OWN,
            what,
        };
        self.unit.command(command, &self.mem, 0, &mut self.ear);
        let (id, result) = self.ear.done.pop().expect("an answer at once");
        assert_eq!((id, self.ear.done.len()), (self.asked, 0));
        result
    }

    /// Maps pages of RAM, each to the I/O virtual address that is as far behind 1 GiB.
    fn map(&mut self, page: u64, pages: u64, flags: u32) {
        let (phys, first) = (page * PAGE_SIZE, (1 << 30) + page * PAGE_SIZE);
        let last = first + pages * PAGE_SIZE - 1;
        let result = self.ask(map(1, first, last, phys, flags));
        assert_eq!(result, CommandResult::Done);
    }

    fn unmap(&mut self, page: u64, pages: u64) {
        let first = (1 << 30) + page * PAGE_SIZE;
        let what = Request::Unmap {
            domain: 1,
            first,
            last: first + pages * PAGE_SIZE - 1,
        };
        assert_eq!(self.ask(what), CommandResult::Done);
    }

    /// The pager brings in the requested pages.
    fn deliver(&mut self) {
        for ticket in self.mem.tickets() {
            self.mem.deliver(ticket);
            self.unit.ticket_done(ticket, Ok(()));
        }
        assert!(self.unit.has_work());
        let _ = RemappingUnit::<Request>::poll(&mut self.unit, &self.mem, 0, &mut self.ear);
        assert!(!self.unit.has_work());
    }

    fn is_there(&self, page: u64) -> bool {
        self.mem.read_u64(Gpa::new(page * PAGE_SIZE)).is_ok()
    }
}

#[test]
fn a_map_asks_for_absent_pages_that_a_device_may_read() {
    let mut paged = Paged::new(Hints::new(true, None), 1 << 20);
    paged.map(3, 2, MAP_READ);
    paged.map(8, 1, MAP_READ | MAP_WRITE);
    paged.map(9, 1, MAP_WRITE);
    assert_eq!(paged.mem.tickets().len(), 2);
    paged.deliver();
    // A read of an absent page would request it.
    let there: Vec<_> = [3, 4, 8].map(|page| paged.is_there(page)).into();
    assert_eq!(there, [true; 3]);
    assert!(!paged.is_there(9));
    // Present pages are not requested again.
    paged.unmap(3, 2);
    paged.map(3, 2, MAP_READ);
    let counts = paged.unit.hint_counts();
    assert_eq!((counts.gathered, counts.unasked), (2, 0));
}

/// Memory keeps a page that came in for a ticket until it is accessed. The next poll accesses it,
/// so that a guest which maps and never uses holds nothing.
#[test]
fn page_brought_in_by_a_hint_can_be_evicted_unused() {
    let mut paged = Paged::new(Hints::new(true, None), 1 << 20);
    paged.map(3, 1, MAP_READ);
    let page = guest_mem::Pages::new(&[Gpa::new(3 * PAGE_SIZE)]).expect("a page");
    for ticket in paged.mem.tickets() {
        paged.mem.deliver(ticket);
        assert_eq!(paged.mem.let_go(&page, 1), 0, "it is kept for the ticket");
        paged.unit.ticket_done(ticket, Ok(()));
    }
    let _ = RemappingUnit::<Request>::poll(&mut paged.unit, &paged.mem, 0, &mut paged.ear);
    let left = paged.mem.let_go(&page, 1);
    assert_eq!(left, 1, "the answer to a hint keeps the page");
    assert_eq!(paged.mem.tickets(), []);
}

#[test]
fn without_the_switch_nothing_is_asked_for() {
    let mut paged = Paged::new(Hints::default(), 1 << 20);
    paged.map(3, 2, MAP_READ);
    assert_eq!(paged.mem.tickets(), []);
    assert_eq!(paged.unit.hint_counts(), HintCounts::default());
}

#[test]
fn refused_map_or_no_ram_gives_no_hint() {
    let mut paged = Paged::new(Hints::new(true, None), 1 << 20);
    let refused = paged.ask(map(7, 0, 4095, 0, MAP_READ));
    assert_eq!(refused, CommandResult::Refused(NOENT));
    let mmio = paged.ask(map(1, 0, 4095, 0, MAP_READ | wire::MAP_MMIO));
    assert_eq!(mmio, CommandResult::Done);
    // Behind the end of RAM, and across it.
    paged.map(256, 1, MAP_READ);
    assert_eq!(paged.mem.tickets(), []);
}

/// Millions of maps and unmaps of pages that never come in: the number of requests is bounded.
#[test]
fn a_flood_of_maps_asks_for_so_many_pages_and_no_more() {
    const BYTES: u64 = 64 << 20;
    const MAPS: u64 = 1_000_000;
    let windows = Arc::new(PopulateWindows::new([(Gpa::new(0), BYTES)].into_iter()));
    let mut paged = Paged::new(Hints::new(true, Some(windows)), BYTES);
    for turn in 0..MAPS {
        let page = turn * 67 % (BYTES / PAGE_SIZE);
        paged.map(page, 1, MAP_READ);
        paged.unmap(page, 1);
    }
    let counts = paged.unit.hint_counts();
    assert_eq!(paged.mem.tickets().len(), TICKETS);
    assert_eq!(counts.gathered, TICKETS as u64);
    assert_eq!(counts.unasked, MAPS - TICKETS as u64);
    // One that is all of memory asks for no more than another.
    paged.deliver();
    paged.map(0, BYTES / PAGE_SIZE, MAP_READ);
    assert_eq!(paged.mem.tickets().len(), 1);
    paged.deliver();
    let pages = 0..BYTES / PAGE_SIZE;
    let there = pages.filter(|&page| paged.is_there(page)).count() as u64;
    assert!(there <= PAGES + TICKETS as u64, "{there}");
}
