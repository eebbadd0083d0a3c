//! Mode of the disks' reports as pages come and the limit changes, with a clock that is set to the
//! time of the checks.

use guest_mem::{Gpa, GuestRam, HugePages, PAGE_SIZE};

use super::*;
use crate::residency::{
    Block, Command, CommandOutcome, Op, Page, PageExamination, ReadAhead, Span,
};

const PAGES: u32 = 64;
const LIMIT: usize = 32;

/// A watermark, its book and memory, and a clock that is set to the time of its checks.
struct Fixture {
    watermark: Watermark,
    residency: Residency,
    ram: SwappedRam,
    now: Nanos,
}

impl Fixture {
    fn new() -> Self {
        let size = u64::from(PAGES) * PAGE_SIZE;
        let ram = GuestRam::with_pages(&[(Gpa::new(0), size)], HugePages::Never).unwrap();
        Self {
            watermark: Watermark::default(),
            residency: Residency::new(PAGES, LIMIT, 0),
            ram: SwappedRam::new(ram),
            now: Nanos(0),
        }
    }

    fn rise(&mut self) {
        self.watermark.rise(&mut self.residency, &self.ram);
    }

    /// Makes the next check, which is due.
    fn look(&mut self) {
        self.now = after(self.now, LOOK);
        self.watermark
            .look(self.now, &mut self.residency, &self.ram);
    }

    /// Makes a disk's next request: returns its mode, and reports that the disk has seen the
    /// change.
    fn reports(&mut self) -> Reports {
        let reports = self.ram.reports();
        self.watermark.seen(self.watermark.asked);
        reports
    }

    /// Makes a disk read a block for each of these pages.
    fn read(&mut self, pages: std::ops::Range<u32>) {
        for page in pages {
            let first = Block {
                disk: 0,
                number: page,
            };
            let span = Span {
                first,
                count: 1,
                pages: vec![Page(page)],
                is_whole: true,
            };
            self.residency.begin_read(Op(page.into()), &span);
            self.residency.end_read(Op(page.into()), true);
        }
    }

    /// Makes `count` of the pages that came first leave for their blocks.
    fn leave(&mut self, count: usize) {
        let present = self.residency.present();
        self.residency.set_limit(present - count);
        while self.residency.present() > present - count {
            self.residency.ask();
            for command in self.residency.take_commands() {
                match command {
                    Command::Ask(_) => self.residency.answered(u32::MAX, 0),
                    Command::Examine(page) => {
                        let seen = PageExamination {
                            is_clean: true,
                            is_zero: false,
                            crc: 1,
                        };
                        self.residency.examined(page, seen);
                    }
                    Command::Stop(reason) => panic!("{reason:?}"),
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn a_raised_limit_ends_reports_once_nothing_is_on_a_disk_alone_and_a_lowered_one_begins_them() {
    let mut own = Fixture::new();
    own.rise();
    assert_eq!(own.reports(), Reports::Off);
    own.read(0..25);
    assert_eq!(own.reports(), Reports::Off, "not before the turn after");
    own.rise();
    assert_eq!(own.reports(), Reports::On);
    own.leave(5);
    own.look();
    assert_eq!(own.reports(), Reports::On);

    // Memory is plentiful until pages leave again.
    own.residency.set_limit(2 * PAGES as usize);
    assert_eq!(own.ram.reports(), Reports::On, "a look decides it");
    own.look();
    assert_eq!(own.ram.reports(), Reports::Draining);
    // The disks have not reported that they have seen it.
    own.look();
    assert_eq!(
        (own.ram.reports(), own.residency.tracked()),
        (Reports::Draining, 25)
    );
    assert_eq!(own.reports(), Reports::Draining);
    // Five pages are on the disk alone.
    own.look();
    assert_eq!(
        (own.reports(), own.residency.tracked()),
        (Reports::Draining, 25)
    );
    for page in 0..5 {
        own.residency.fault(Page(page), ReadAhead::InOrder);
    }
    let fetches = own.residency.take_commands().into_iter();
    for command in fetches {
        if let Command::Fetch(page, _) = command {
            own.residency.ended(CommandOutcome::Fetched(page, Ok(1)));
        }
    }
    own.look();
    assert_eq!(own.reports(), Reports::Off);
    assert!(own.residency.knows_no_disk());
    assert_eq!(own.watermark.deadline(), None);

    // Not by a timed check, but by the first turn that finds memory short.
    own.look();
    assert_eq!(own.reports(), Reports::Off);
    own.residency.set_limit(LIMIT);
    own.rise();
    assert_eq!(own.reports(), Reports::On);
    assert!(own.watermark.deadline().is_some());
}

#[test]
fn a_late_answer_to_an_earlier_draining_is_ignored() {
    let mut own = Fixture::new();
    own.read(0..25);
    own.rise();
    own.residency.set_limit(2 * PAGES as usize);
    own.look();
    let first = own.watermark.asked;
    assert_eq!(own.reports(), Reports::Draining);
    own.residency.set_limit(LIMIT);
    own.look();
    assert_eq!(own.ram.reports(), Reports::On);
    own.residency.set_limit(2 * PAGES as usize);
    own.look();
    assert_eq!(own.ram.reports(), Reports::Draining);
    // Requests that began in between make blocks back pages. Another disk's answer says no more
    // than the first one's.
    own.watermark.seen(first);
    own.look();
    assert_eq!(
        (own.ram.reports(), own.residency.tracked()),
        (Reports::Draining, 25)
    );
    own.watermark.seen(own.watermark.asked);
    own.look();
    assert_eq!(own.ram.reports(), Reports::Off);
    assert!(own.residency.knows_no_disk());
}

#[test]
fn where_all_pages_may_be_in_memory_disks_are_not_asked() {
    let mut own = Fixture::new();
    own.residency.set_limit(PAGES as usize);
    own.read(0..PAGES);
    own.rise();
    own.look();
    assert_eq!(own.reports(), Reports::Off);
}

#[test]
fn disks_go_on_while_a_request_is_under_way() {
    let mut own = Fixture::new();
    own.read(0..25);
    own.rise();
    let op = Op(100);
    let change = Span {
        first: Block { disk: 0, number: 3 },
        count: 1,
        pages: Vec::new(),
        is_whole: true,
    };
    own.residency.begin_write(op, &change);
    own.residency.set_limit(2 * PAGES as usize);
    own.look();
    assert_eq!(own.reports(), Reports::Draining);
    own.look();
    assert_eq!(
        (own.reports(), own.residency.tracked()),
        (Reports::Draining, 0)
    );
    own.residency.end_write(op, true);
    own.look();
    assert_eq!(own.reports(), Reports::Off);
}
