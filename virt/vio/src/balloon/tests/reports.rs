//! Reports of free pages: their buffers are the pages, at device addresses.

use fake_mem::PagedMem;
use guest_mem::{
    Access, DmaFault, Iommu, Iova, LeaseTable, NoIommu, Run, SourceId, View, left_in_span,
};

use super::*;
use crate::fake_driver::FakeDriver;

/// Offset of device addresses from guest-physical addresses.
const SHIFT: u64 = 0x40_0000_0000;
/// Of an absent table.
const TABLE: Ticket = Ticket(9);

/// Every page lies [`SHIFT`] above its guest-physical address.
struct Shifted {
    /// This page changes places with the next one.
    swapped: Option<u64>,
    /// The table that maps the pages from this one on is absent.
    absent: Option<u64>,
    leases: LeaseTable,
}

impl Iommu for Shifted {
    fn translate<M: PhysMem>(
        &mut self,
        _mem: &M,
        _source: SourceId,
        iova: Iova,
        _perm: Perm,
    ) -> Access<Run> {
        let at = iova.raw().checked_sub(SHIFT);
        let at = at.ok_or(DmaFault::Blocked { iova })?;
        let (page, inside) = (at / PAGE_SIZE, at % PAGE_SIZE);
        if self.absent.is_some_and(|first| page >= first) {
            return Err(Stop::Pending(TABLE));
        }
        let page = match self.swapped {
            Some(first) if page == first => first + 1,
            Some(first) if page == first + 1 => first,
            _ => page,
        };
        Ok(Run {
            gpa: Gpa::new(page * PAGE_SIZE + inside),
            len: PAGE_SIZE - inside,
        })
    }

    fn generation(&self, _source: SourceId) -> u64 {
        0
    }

    type Leases = LeaseTable;

    fn leases(&self) -> &LeaseTable {
        &self.leases
    }

    fn leases_mut(&mut self) -> &mut LeaseTable {
        &mut self.leases
    }
}

#[test]
fn reported_buffers_are_pages() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        let pages = [(0x40_0000, 0x3000), (0x10_0000, 0x1000)];
        guest.queues[REPORT].add(&[], &pages);
        guest.poll();
        assert_eq!(guest.used(REPORT), 1);
        let told = guest.recorder.told();
        assert_eq!(
            told,
            [BackEndCall::Reported(vec![0x400, 0x401, 0x402, 0x100])]
        );
        assert_eq!(guest.balloon.counts().reported, 4);
        assert_eq!(guest.balloon.stats().errors, 0);
        // Not a byte of them was written.
        assert_eq!(guest.mem.get::<16>(Gpa::new(0x40_0000)), [0; 16]);
    });
}

#[test]
fn nothing_but_whole_pages_of_ram_is_reported() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        // Not at a page's start, shorter than one, over the hole and its both ends, beyond RAM,
        // readable ones.
        for (readable, writable) in [
            (&[][..], &[(0x10_0800, 0x2000)][..]),
            (&[], &[(0x11_0000, 0xfff)]),
            (&[], &[(0x1f_f000, 0x20_2000)]),
            (&[], &[(0x100_0000, 0x2000), (0x12_0000, 0x1000)]),
            (&[(0x13_0000, 0x1000)], &[]),
            (&[(0x13_0000, 0x1000)], &[(0x14_0000, 0x1000)]),
        ] {
            guest.queues[REPORT].add(readable, writable);
        }
        guest.poll();
        assert_eq!(guest.used(REPORT), 6);
        let reported = |pages: &[u64]| BackEndCall::Reported(pages.to_vec());
        let told = guest.recorder.told();
        let want = [
            reported(&[0x101]),
            reported(&[0x1ff, 0x400]),
            reported(&[0x120]),
            reported(&[0x140]),
        ];
        assert_eq!(told, want);
        assert_eq!(guest.balloon.counts().outside, 0x200 + 2);
        assert_eq!(guest.balloon.stats().errors, 6);
        assert!(!guest.balloon.needs_reset());
    });
}

#[test]
fn holes_of_any_size_divide_a_buffer() {
    both(|mask| {
        // Pages 0x110 to 0x113 and 0x115 are no RAM.
        let ram = [(0, 0x11_0000), (0x11_4000, 0x1000), (0x11_6000, 0x1_0000)];
        let ram = ram.map(|(at, len)| (Gpa::new(at), len));
        let mut guest = Guest::with_ram(mask, &ram);
        guest.queues[REPORT].add(&[], &[(0x10_f000, 0x8000)]);
        guest.poll();
        assert_eq!(guest.used(REPORT), 1);
        let told = guest.recorder.told();
        assert_eq!(told, [BackEndCall::Reported(vec![0x10f, 0x114, 0x116])]);
        assert_eq!(guest.balloon.counts().outside, 5);
    });
}

/// A guest behind [`Shifted`].
struct Behind {
    mem: ArrayMem,
    recorder: Recorder,
    balloon: Balloon,
    drivers: Vec<FakeDriver<ArrayMem>>,
    iommu: Shifted,
    irq: CountIrq,
}

impl Behind {
    fn new() -> Self {
        let mem = ArrayMem::with_regions(&RAM);
        let recorder = Recorder::default();
        let mut balloon = balloon(&recorder, &RAM);
        let features = balloon.features() & !feature::RING_PACKED;
        let driver = |index| {
            let base = Gpa::new(0x1_0000 + 0x4000 * u64::from(index));
            let mut driver = FakeDriver::new(mem.clone(), base, index, SIZE);
            driver.set_iova_offset(SHIFT);
            driver
        };
        let drivers: Vec<_> = (0..4).map(driver).collect();
        let configs: Vec<_> = drivers.iter().map(FakeDriver::config).collect();
        balloon
            .activate(features, &configs, mem.keep_alive())
            .unwrap();
        recorder.told();
        Self {
            mem,
            recorder,
            balloon,
            drivers,
            iommu: Shifted {
                swapped: None,
                absent: None,
                leases: LeaseTable::new(1),
            },
            irq: CountIrq::default(),
        }
    }

    fn poll(&mut self) {
        for _ in 0..100 {
            let mut view = View::new(&mut self.iommu, &self.mem, SourceId::new(0, 1, 0));
            if self.balloon.poll(&mut view, &mut self.irq, 0) == Activity::Idle {
                return;
            }
        }
        panic!("it is busy for ever");
    }
}

#[test]
fn reported_addresses_go_through_the_iommu_and_page_numbers_do_not() {
    let mut guest = Behind::new();
    guest.iommu.swapped = Some(0x401);
    // The second one is not mapped.
    let report = [(SHIFT + 0x40_0000, 0x4000), (0x10_0000, 0x1000)];
    guest.drivers[REPORT].add(&[], &report);
    guest.drivers[INFLATE].put(DATA, &0x123_u32.to_le_bytes());
    guest.drivers[INFLATE].add(&[(SHIFT + DATA, 4)], &[]);
    guest.poll();
    let told = guest.recorder.told();
    // Page by page, two of them the other way round.
    let want = [
        BackEndCall::Inflated(vec![0x123]),
        BackEndCall::Reported(vec![0x400, 0x401, 0x402, 0x403]),
    ];
    assert_eq!(told, want);
    let ranges = guest.recorder.record().ranges.pop().unwrap();
    let sizes: Vec<u64> = ranges.iter().map(|range| range.pages).collect();
    assert_eq!(sizes, [1, 3], "{ranges:x?}");
    assert_eq!(guest.balloon.stats().errors, 1);
    assert!(guest.drivers[REPORT].used().is_some());
    assert!(guest.drivers[INFLATE].used().is_some());
    assert!(guest.iommu.leases.is_empty());
}

#[test]
fn a_report_behind_absent_tables_waits_for_them() {
    let mut guest = Behind::new();
    guest.iommu.absent = Some(0x500);
    let report = [(SHIFT + 0x40_0000, 0x1000), (SHIFT + 0x50_0000, 0x1000)];
    guest.drivers[REPORT].add(&[], &report);
    guest.poll();
    assert_eq!(guest.recorder.told(), [BackEndCall::Reported(vec![0x400])]);
    assert_eq!(guest.drivers[REPORT].used(), None);
    assert_eq!(guest.balloon.in_flight(), 0, "nothing is being dropped");
    guest.balloon.ticket_done(TABLE);
    guest.poll();
    assert_eq!(guest.drivers[REPORT].used(), None, "it has not come");
    guest.iommu.absent = None;
    guest.balloon.ticket_done(TABLE);
    guest.poll();
    assert_eq!(guest.recorder.told(), [BackEndCall::Reported(vec![0x500])]);
    assert!(guest.drivers[REPORT].used().is_some());
}

#[test]
fn a_buffer_that_may_not_be_written_is_not_reported_and_faults_once() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        let mut dma = guest.dma();
        dma.iommu.deny(Iova::new(0x40_1000), 0x2000, Perm::Write);
        guest.queues[REPORT].add(&[], &[(0x40_0000, 0x8000), (0x42_0000, 0x1000)]);
        guest.poll_through(&mut dma);
        assert_eq!(guest.used(REPORT), 1);
        let told = guest.recorder.told();
        assert_eq!(told, [BackEndCall::Reported(vec![0x400, 0x420])]);
        let fault = (Iova::new(0x40_1000), Perm::Write);
        assert_eq!(dma.iommu.faults(), [fault]);
        assert_eq!(guest.balloon.stats().errors, 1);
    });
}

#[test]
fn a_large_report_is_worked_off_in_bounded_steps() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        // All RAM again and again: 64 MiB in one chain.
        let row = [(0, 2 << 20), (4 << 20, 2 << 20)].repeat(16);
        guest.queues[REPORT].add(&[], &row);
        let mut dma = guest.dma();
        let mut visits = 0;
        while guest.used(REPORT) == 0 {
            let mut visit = PollBudget::alone(0);
            let _ = guest.balloon.visit(&mut dma, &mut guest.irq, &mut visit);
            visits += 1;
            assert!(visits < 1_000, "it gets no further");
        }
        assert_eq!(guest.balloon.counts().reported, 16 * 1024);
        assert_eq!(visits, 32);
        let record = guest.recorder.record();
        let pages = |ranges: &Vec<PageRange>| ranges.iter().map(|range| range.pages).sum::<u64>();
        let mut sums = record.ranges.iter().map(pages);
        assert!(sums.all(|pages| pages <= 2 * MAX_PAGES));
    });
}

#[test]
fn a_report_in_small_pieces_is_looked_at_a_few_at_a_time() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        // Nothing of it is RAM, so that no batch is ever full.
        let row = vec![(0x100_0000, 0x1000); 60];
        guest.queues[REPORT].add(&[], &row);
        let mut dma = guest.dma();
        let mut visit = PollBudget::new(0, 1);
        let _ = guest.balloon.visit(&mut dma, &mut guest.irq, &mut visit);
        assert_eq!(guest.balloon.counts().outside, MAX_RANGES as u64);
        guest.poll();
        assert_eq!(guest.used(REPORT), 1);
        assert_eq!(guest.balloon.counts().outside, 60);
    });
}

#[test]
fn pages_that_are_absent_are_given_up_without_being_brought_in() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        let mem = PagedMem::new(guest.mem.clone());
        mem.evict(Gpa::new(0x40_0000), 0x20_0000);
        guest.queues[REPORT].add(&[], &[(0x40_0000, 0x10_0000)]);
        guest.send(INFLATE, &[0x500, 0x501]);
        let mut iommu = NoIommu::new(1);
        for _ in 0..10 {
            let mut view = View::new(&mut iommu, &mem, SourceId::new(0, 1, 0));
            let _ = guest.balloon.poll(&mut view, &mut guest.irq, 0);
        }
        assert_eq!(mem.tickets(), [], "nothing is asked for");
        assert_eq!((guest.used(REPORT), guest.used(INFLATE)), (1, 1));
        let counts = guest.balloon.counts();
        assert_eq!((counts.reported, counts.inflated), (0x100, 2));
        assert_eq!(left_in_span(Iova::new(0x40_0000)), 2 << 20, "one look");
    });
}
