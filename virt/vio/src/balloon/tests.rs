//! The balloon driven as a guest would, against a back end that records its calls.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use fake_mem::{ArrayMem, FlatDma};
use guest_mem::{Dma, Gpa, PAGE_SIZE, Perm, PhysMem, Stop, Ticket};

mod absent;
mod life;
mod model;
mod numbers;
mod reports;
mod statistics;

use super::pages::{MAX_PAGES, Numbers};
use super::*;
use crate::fake_driver::{AnyDriver, CountIrq};
use crate::poll_budget::{PollBudget, cost};
use crate::{Activity, QueueDevice};

const MIB: u64 = 1 << 20;
/// Two regions, with a hole of 2 MiB between them.
const RAM: [(Gpa, u64); 2] = [(Gpa::new(0), 2 * MIB), (Gpa::new(4 * MIB), 2 * MIB)];
/// Address of the buffers that the guest sends.
const DATA: u64 = 0x4_0000;
const SIZE: u16 = 64;
const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const STATISTICS: usize = 2;
const REPORT: usize = 3;

/// Call of the back end, page by page.
#[derive(Clone, Debug, PartialEq, Eq)]
enum BackEndCall {
    Inflated(Vec<u64>),
    Deflated(Vec<u64>),
    Reported(Vec<u64>),
    Reset,
}

#[derive(Debug, Default)]
struct Record {
    told: Vec<BackEndCall>,
    /// The ranges of each call.
    ranges: Vec<Vec<PageRange>>,
    in_balloon: BTreeSet<u64>,
    /// Calls that are to wait first.
    waits: u32,
    tickets: Vec<Ticket>,
    /// Tickets handed out.
    handed: u64,
}

/// Record everything, and drops nothing.
#[derive(Clone, Debug, Default)]
struct Recorder(Arc<Mutex<Record>>);

/// Above those of any memory.
const FIRST_TICKET: u64 = 1 << 32;

impl Recorder {
    fn record(&self) -> MutexGuard<'_, Record> {
        self.0.lock().unwrap()
    }

    fn told(&self) -> Vec<BackEndCall> {
        std::mem::take(&mut self.record().told)
    }

    fn wait(&self) -> Result<(), Ticket> {
        let mut record = self.record();
        if record.waits == 0 {
            return Ok(());
        }
        record.waits -= 1;
        record.handed += 1;
        let ticket = Ticket(FIRST_TICKET + record.handed);
        record.tickets.push(ticket);
        Err(ticket)
    }

    fn add(&self, pages: &[PageRange], told: fn(Vec<u64>) -> BackEndCall) -> Vec<u64> {
        let mut record = self.record();
        assert!(!pages.is_empty(), "a call about nothing");
        record.ranges.push(pages.to_vec());
        let numbers: Vec<u64> = pages.iter().copied().flat_map(numbers_of).collect();
        record.told.push(told(numbers.clone()));
        numbers
    }
}

fn numbers_of(range: PageRange) -> std::ops::Range<u64> {
    assert!(range.gpa.is_aligned(PAGE_SIZE) && range.pages != 0);
    let end = range.gpa.raw() + range.bytes();
    let inside = |(gpa, len): (Gpa, u64)| range.gpa >= gpa && end <= gpa.raw() + len;
    assert!(RAM.into_iter().any(inside), "{range:x?} is not RAM");
    range.gpa.raw() / PAGE_SIZE..end / PAGE_SIZE
}

impl BalloonIo for Recorder {
    fn inflated(&mut self, pages: &[PageRange]) -> Result<(), Ticket> {
        self.wait()?;
        let pages = self.add(pages, BackEndCall::Inflated);
        self.record().in_balloon.extend(pages);
        Ok(())
    }

    fn deflated(&mut self, pages: &[PageRange]) {
        let pages = self.add(pages, BackEndCall::Deflated);
        let mut record = self.record();
        for page in pages {
            record.in_balloon.remove(&page);
        }
    }

    fn reported(&mut self, pages: &[PageRange]) -> Result<(), Ticket> {
        self.wait()?;
        self.add(pages, BackEndCall::Reported);
        Ok(())
    }

    fn reset(&mut self) {
        let mut record = self.record();
        record.told.push(BackEndCall::Reset);
        record.in_balloon.clear();
    }
}

/// Runs a test over split and packed rings: it is given the features that the driver accepts.
fn both(test: impl Fn(u64)) {
    test(!feature::RING_PACKED);
    test(!0);
}

struct Guest {
    mem: ArrayMem,
    /// By number, as many as the features say.
    queues: Vec<AnyDriver<ArrayMem>>,
    balloon: Balloon,
    recorder: Recorder,
    irq: CountIrq,
}

fn balloon(recorder: &Recorder, ram: &[(Gpa, u64)]) -> Balloon {
    let config = BalloonConfig {
        queue_size: SIZE,
        packed: true,
        ..BalloonConfig::default()
    };
    Balloon::new(config, ram, Box::new(recorder.clone())).unwrap()
}

impl Guest {
    fn new(mask: u64) -> Self {
        Self::with_ram(mask, &RAM)
    }

    /// Whose device knows of these regions, which lie in [`RAM`].
    fn with_ram(mask: u64, ram: &[(Gpa, u64)]) -> Self {
        let mem = ArrayMem::with_regions(&RAM);
        let recorder = Recorder::default();
        let mut balloon = balloon(&recorder, ram);
        let features = balloon.features() & mask;
        let queues: Vec<_> = roles(features)
            .zip(0..)
            .map(|(_, index)| {
                let base = Gpa::new(0x1_0000 + 0x4000 * u64::from(index));
                AnyDriver::new(mem.clone(), base, index, SIZE, features)
            })
            .collect();
        let configs: Vec<_> = queues.iter().map(AnyDriver::config).collect();
        balloon
            .activate(features, &configs, mem.keep_alive())
            .unwrap();
        assert_eq!(recorder.told(), [BackEndCall::Reset], "a life begins empty");
        Self {
            mem,
            queues,
            balloon,
            recorder,
            irq: CountIrq::default(),
        }
    }

    fn dma(&self) -> FlatDma {
        FlatDma::new(self.mem.clone())
    }

    /// Writes an array of page numbers at `at`; its length in bytes.
    fn put_numbers(&self, at: u64, numbers: &[u32]) -> u32 {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.mem.put(Gpa::new(at), &bytes);
        bytes.len() as u32
    }

    /// Sends an array of page numbers, of less than 64 KiB, in one buffer.
    fn send(&mut self, queue: usize, numbers: &[u32]) {
        let at = DATA + 0x1_0000 * queue as u64;
        let len = self.put_numbers(at, numbers);
        self.queues[queue].add(&[(at, len)], &[]);
    }

    fn poll(&mut self) {
        self.poll_through(&mut self.dma());
    }

    fn poll_through(&mut self, dma: &mut impl Dma) {
        for _ in 0..10_000 {
            if self.balloon.poll(dma, &mut self.irq, 0) == Activity::Idle {
                return;
            }
        }
        panic!("it is busy for ever");
    }

    /// Counts the buffers that `queue` gives back now; the device has written nothing into any.
    fn used(&mut self, queue: usize) -> usize {
        let driver = &mut self.queues[queue];
        let used: Vec<_> = std::iter::from_fn(|| driver.used()).collect();
        assert!(used.iter().all(|(_, len)| *len == 0));
        used.len()
    }
}

#[test]
fn pages_go_in_and_come_back() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        // Cut inside a number.
        let len = guest.put_numbers(DATA, &[7, 0x111, 0x400, 3]);
        guest.queues[INFLATE].add(&[(DATA, 6), (DATA + 6, len - 6)], &[]);
        guest.poll();
        assert_eq!(guest.used(INFLATE), 1);
        let all = vec![7, 0x111, 0x400, 3];
        assert_eq!(guest.recorder.told(), [BackEndCall::Inflated(all)]);
        guest.send(DEFLATE, &[0x111, 7]);
        guest.poll();
        assert_eq!(guest.used(DEFLATE), 1);
        assert_eq!(
            guest.recorder.told(),
            [BackEndCall::Deflated(vec![0x111, 7])]
        );
        assert!(guest.recorder.record().in_balloon.iter().eq(&[3, 0x400]));
        let counts = guest.balloon.counts();
        assert_eq!(
            (counts.inflated, counts.deflated, counts.outside),
            (4, 2, 0)
        );
        let stats = guest.balloon.stats();
        assert_eq!((stats.requests, stats.errors), (2, 0));
    });
}

#[test]
fn numbers_that_follow_each_other_either_way_are_one_range() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        guest.send(INFLATE, &[20, 21, 22, 22, 21, 40, 39, 38, 60, 0x1ff, 0x400]);
        guest.poll();
        let range = |page, pages| PageRange {
            gpa: Gpa::new(page * PAGE_SIZE),
            pages,
        };
        let ranges = std::mem::take(&mut guest.recorder.record().ranges);
        let want = [
            range(20, 3),
            range(38, 3),
            range(60, 1),
            // The last page before the hole, and the first behind it.
            range(0x1ff, 1),
            range(0x400, 1),
        ];
        assert_eq!(ranges, [want]);
    });
}

#[test]
fn numbers_outside_ram_are_ignored_and_counted() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        guest.send(INFLATE, &[0x200, 5, 0x3ff, 0x600, u32::MAX, 0x5ff]);
        guest.send(DEFLATE, &[0x200, 0x600]);
        guest.poll();
        assert_eq!((guest.used(INFLATE), guest.used(DEFLATE)), (1, 1));
        assert_eq!(
            guest.recorder.told(),
            [BackEndCall::Inflated(vec![5, 0x5ff])]
        );
        assert_eq!(guest.balloon.counts().outside, 6);
        assert_eq!(guest.balloon.stats().errors, 2);
        assert!(!guest.balloon.needs_reset());
    });
}

#[test]
fn malformed_parts_of_a_chain_are_ignored_and_the_chain_is_used() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        guest.put_numbers(DATA, &[9, 10, 11]);
        for (readable, writable) in [
            // A rest that is no number; less than one; the wrong direction beside the right one;
            // and alone.
            (&[(DATA, 11)][..], &[][..]),
            (&[(DATA, 3)], &[]),
            (&[(DATA, 4)], &[(DATA + 0x100, 64)]),
            (&[], &[(DATA, 8)]),
        ] {
            guest.queues[INFLATE].add(readable, writable);
        }
        guest.poll();
        assert_eq!(guest.used(INFLATE), 4);
        let told = guest.recorder.told();
        assert_eq!(
            told,
            [
                BackEndCall::Inflated(vec![9, 10]),
                BackEndCall::Inflated(vec![9])
            ]
        );
        assert_eq!(guest.balloon.stats().errors, 4);
        assert!(!guest.balloon.needs_reset());
    });
}

#[test]
fn an_array_that_is_out_of_reach_ends_there() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        let mut dma = guest.dma();
        let denied = guest_mem::Iova::new(DATA + 0x1000);
        dma.iommu.deny(denied, 4096, Perm::Read);
        let numbers: Vec<u32> = (0x400..0x440).collect();
        guest.put_numbers(DATA, &numbers);
        guest.queues[INFLATE].add(&[(DATA, 4), (DATA + 0x1000, 8)], &[]);
        guest.queues[INFLATE].add(&[(DATA + 4, 4)], &[]);
        guest.poll_through(&mut dma);
        assert_eq!(guest.used(INFLATE), 2);
        // The two buffers are one row of bytes, and are read together.
        assert_eq!(guest.recorder.told(), [BackEndCall::Inflated(vec![0x401])]);
        assert_eq!(guest.balloon.stats().errors, 1);
        assert_eq!(dma.iommu.faults().len(), 1);
        assert!(!guest.balloon.needs_reset());
    });
}

#[test]
fn a_long_array_is_worked_off_in_bounded_steps() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        // Each page on its own, so that nothing is joined: 40,000 numbers in as many bytes as the
        // guest likes.
        let numbers: Vec<u32> = (0..10_000).map(|at| at % 250 * 2).collect();
        let len = guest.put_numbers(DATA, &numbers);
        let row = vec![(DATA, len); 4];
        guest.queues[INFLATE].add(&row, &[]);
        guest.send(DEFLATE, &[1]);
        let mut dma = guest.dma();
        let mut visits = 0;
        let mut is_deflated_at = None;
        while guest.used(INFLATE) == 0 {
            let mut visit = PollBudget::alone(0);
            let _ = guest.balloon.visit(&mut dma, &mut guest.irq, &mut visit);
            visits += 1;
            assert!(visits < 10_000, "it gets no further");
            let one = MAX_RANGES as u64 * (cost::REQUEST + cost::PAGE);
            assert!(visit.spent() < 2 * one, "{}", visit.spent());
            if guest.used(DEFLATE) != 0 {
                is_deflated_at = Some(visits);
            }
        }
        assert_eq!(guest.balloon.counts().inflated, 40_000);
        assert!(visits >= 40_000 / MAX_RANGES as u64, "{visits}");
        let at = is_deflated_at.expect("it had its turn");
        assert!(at < 5, "in visit {at}");
        let record = guest.recorder.record();
        assert!(
            record
                .ranges
                .iter()
                .all(|ranges| ranges.len() <= MAX_RANGES)
        );
    });
}

#[test]
fn a_chain_that_changes_while_it_is_worked_off_harms_nobody() {
    let mut guest = Guest::new(!feature::RING_PACKED);
    let numbers: Vec<u32> = (0..100).map(|at| at * 2).collect();
    guest.send(INFLATE, &numbers);
    let mut dma = guest.dma();
    let _ = guest.balloon.poll(&mut dma, &mut guest.irq, 0);
    assert_eq!(guest.recorder.told().len(), 1, "the first step");
    let AnyDriver::Split(driver) = &mut guest.queues[INFLATE] else {
        panic!("a split ring");
    };
    // Shorter than what has been worked off.
    driver.put_descriptor(
        0,
        crate::ring::RawDescriptor {
            addr: DATA,
            len: 40,
            flags: 0,
            next: 0,
        },
    );
    guest.poll();
    assert_eq!((guest.used(INFLATE), guest.recorder.told()), (1, vec![]));
    guest.send(INFLATE, &[3]);
    guest.poll();
    assert_eq!(guest.recorder.told(), [BackEndCall::Inflated(vec![3])]);
    assert!(!guest.balloon.needs_reset());
}

#[test]
fn ring_violation_needs_a_reset() {
    both(|mask| {
        for queue in [INFLATE, DEFLATE, STATISTICS, REPORT] {
            let mut guest = Guest::new(mask);
            // Of no length.
            guest.queues[queue].add(&[(DATA, 4), (DATA, 0)], &[]);
            guest.poll();
            assert!(guest.balloon.needs_reset());
            assert_eq!(guest.irq.config, 1);
            guest.send(INFLATE, &[1]);
            guest.poll();
            assert_eq!(guest.recorder.told(), []);
            assert_eq!(guest.irq.config, 1, "it is told once");
        }
    });
}
