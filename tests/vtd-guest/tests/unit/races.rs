//! A guest that stores between any two of our loads of a shared page.
//!
//! Each test makes the same stores before the first load of a sweep, before the second, and so on,
//! so that every way in which a sweep can see half of them is tried.

use std::cell::{Cell, RefCell};

use guest_mem::{DmaFault, Gpa, Iommu, Iova, Leases, Perm, RegPage, RegisterPage, Stop};
use vtd::front::Shared;
use vtd::spec::registers as reg;
use vtd::{Config, Parked, Progress, Unit};
use vtd_guest::*;

type Stores = Box<dyn FnMut(&RegisterPage)>;

/// Makes the guest's stores just before our load number `at`.
struct Racing {
    page: RegisterPage,
    loads: Cell<usize>,
    at: Cell<Option<usize>>,
    stores: RefCell<Stores>,
}

impl Racing {
    fn new() -> Self {
        Self {
            page: RegisterPage::in_heap(),
            loads: Cell::new(0),
            at: Cell::new(None),
            stores: RefCell::new(Box::new(|_| {})),
        }
    }

    fn arm(&self, at: usize, stores: impl FnMut(&RegisterPage) + 'static) {
        self.loads.set(0);
        self.at.set(Some(at));
        *self.stores.borrow_mut() = Box::new(stores);
    }

    fn load(&self) {
        let load = self.loads.get();
        self.loads.set(load + 1);
        if self.at.get() == Some(load) {
            self.at.set(None);
            (self.stores.borrow_mut())(&self.page);
        }
    }

    fn has_fired(&self) -> bool {
        self.at.get().is_none()
    }
}

impl RegPage for Racing {
    fn load32(&self, offset: u16) -> u32 {
        self.load();
        self.page.load32(offset)
    }
    fn load64(&self, offset: u16) -> u64 {
        self.load();
        self.page.load64(offset)
    }
    fn store32(&self, offset: u16, value: u32) {
        self.page.store32(offset, value);
    }
    fn store64(&self, offset: u16, value: u64) {
        self.page.store64(offset, value);
    }
    fn compare_exchange32(&self, offset: u16, current: u32, new: u32) -> Result<u32, u32> {
        self.load();
        self.page.compare_exchange32(offset, current, new)
    }
    fn compare_exchange64(&self, offset: u16, current: u64, new: u64) -> Result<u64, u64> {
        self.load();
        self.page.compare_exchange64(offset, current, new)
    }
}

/// A booted unit in `shared` mode, its guest, and the disk's table with 0x1000 mapped to 0x5000.
struct Scene {
    guest: Guest,
    table: u64,
    tail: u64,
    unit: Unit,
    page: Racing,
    shared: Shared,
    out: RecordingSink,
}

impl Scene {
    fn new() -> Self {
        let mut guest = Guest::new();
        let table = guest.page();
        guest.context(DISK, table, 1, 2);
        guest.map(table, 4, 0x1000, 0x5000 | RW);
        let mut machine = Machine::new(Mode::Trap, Config::default(), guest.mem.clone());
        machine.boot();
        let Machine { mut unit, tail, .. } = machine;
        let page = Racing::new();
        let shared = Shared::enter(&mut unit, &page);
        Self {
            guest,
            table,
            tail,
            unit,
            page,
            shared,
            out: RecordingSink::default(),
        }
    }

    fn sweep(&mut self) -> Progress {
        self.shared.sweep(
            &mut self.unit,
            &self.page,
            &self.guest.mem,
            0,
            &mut self.out,
        )
    }

    fn settle(&mut self) -> Progress {
        let mut last = self.sweep();
        for _ in 0..10 {
            last = self.sweep();
        }
        last
    }

    fn lease(&mut self) -> guest_mem::LeaseId {
        let (unit, iova) = (&mut self.unit, Iova::new(0x1000));
        let run = unit.translate(&self.guest.mem, DISK, iova, Perm::Write);
        let gpa = run.expect("mapped").gpa;
        unit.leases_mut()
            .begin(DISK, iova, gpa, 512, Perm::Write)
            .expect("room")
    }

    fn status(&self) -> u32 {
        self.guest.mem.get_u32(Gpa::new(STATUS))
    }
}

/// Loads of a sweep that finds work are fewer than this; beyond, the stores come between sweeps.
const MOST_LOADS: usize = 40;

#[test]
fn a_new_root_table_is_in_force_before_the_flushes_behind_it_wherever_the_sweep_is() {
    let mut fired = 0;
    for at in 0..MOST_LOADS {
        let mut s = Scene::new();
        let lease = s.lease();
        // Another root table in which the disk has no context; RTPS is set, so nothing is waited
        // for.
        let root = s.guest.page();
        let (mem, tail) = (s.guest.mem.clone(), s.tail);
        s.page.arm(at, move |page| {
            page.store64(reg::RTADDR, root);
            page.store32(reg::GCMD, 0xc400_0000);
            for (index, descriptor) in [cc_global(), iotlb_global(), wait_status(STATUS, 2)]
                .into_iter()
                .enumerate()
            {
                let slot = Gpa::new(QUEUE + tail + 16 * index as u64);
                mem.put(slot, &descriptor.to_le_bytes());
            }
            page.store32(reg::IQT, tail as u32 + 48);
        });
        // Something to do, so that the sweep goes all its way.
        s.page.page.store32(reg::FECTL, 0);
        assert_eq!(s.settle(), Progress::Parked(Parked::Drain), "load {at}");
        fired += usize::from(s.page.has_fired());
        assert_eq!(
            s.status(),
            0,
            "load {at}: completed under the old table's access"
        );
        s.unit.leases_mut().end(lease);
        s.settle();
        assert_eq!(s.status(), 2, "load {at}");
        let answer = s
            .unit
            .translate(&s.guest.mem, DISK, Iova::new(0x1000), Perm::Read);
        assert!(matches!(answer, Err(Stop::Fault(DmaFault::Blocked { .. }))));
    }
    assert_eq!(fired, MOST_LOADS);
}

#[test]
fn a_queue_turned_on_goes_by_the_tail_that_the_guest_cleared_wherever_the_sweep_is() {
    for at in 0..MOST_LOADS {
        let mut s = Scene::new();
        // The queue goes off with its tail where it was.
        s.page.page.store32(reg::GCMD, 0x8000_0000);
        s.settle();
        assert_ne!(s.page.page.load32(reg::IQT), 0);
        for slot in 0..256 {
            s.guest.put(QUEUE + slot * 16, 0xf);
        }
        s.page.arm(at, |page| {
            page.store32(reg::IQT, 0);
            page.store64(reg::IQA, QUEUE);
            page.store32(reg::GCMD, 0x8400_0000);
        });
        s.page.page.store32(reg::FECTL, 0);
        s.settle();
        assert_eq!(
            s.page.page.load32(reg::GSTS) & 0x0400_0000,
            0x0400_0000,
            "load {at}"
        );
        assert_eq!(
            s.page.page.load32(reg::FSTS),
            0,
            "load {at}: went by the old tail"
        );
    }
}

#[test]
fn a_status_clear_is_not_lost_beside_a_new_fault_wherever_the_sweep_is() {
    for at in 0..MOST_LOADS {
        let mut s = Scene::new();
        s.page.page.store32(reg::FECTL, 0);
        let fault = |s: &mut Scene, iova: u64| {
            let answer = s
                .unit
                .translate(&s.guest.mem, DISK, Iova::new(iova), Perm::Read);
            assert!(answer.is_err());
        };
        fault(&mut s, 0x9000);
        s.settle();
        assert_eq!(s.out.messages.len(), 1);
        // The handler's stores, while the next fault is being shown.
        fault(&mut s, 0xa000);
        s.page.arm(at, |page| {
            page.store32(FRCD + 12, 0x8000_0000);
            page.store32(reg::FSTS, 0x83);
        });
        s.settle();
        // Record 0 is free again and record 1 shows. The guest was notified of record 1 after its
        // clear, or saw it before it cleared.
        assert_eq!(s.page.page.load32(FRCD + 12) & 0x8000_0000, 0, "load {at}");
        assert_eq!(
            s.page.page.load32(FRCD + 16 + 12) & 0x8000_0000,
            0x8000_0000
        );
        assert_eq!(s.page.page.load32(reg::FSTS), 0x8000_0102, "load {at}");
    }
}

#[test]
fn iqe_cleared_and_a_submission_behind_it_are_seen_in_that_order_wherever_the_sweep_is() {
    for at in 0..MOST_LOADS {
        let mut s = Scene::new();
        let bad = s.tail;
        s.guest.put(QUEUE + bad, 0xf);
        s.page.page.store32(reg::IQT, bad as u32 + 16);
        s.settle();
        assert_eq!(s.page.page.load32(reg::FSTS), 0x8000_0010);
        let mem = s.guest.mem.clone();
        s.page.arm(at, move |page| {
            mem.put(Gpa::new(QUEUE + bad), &cc_global().to_le_bytes());
            page.store32(reg::FSTS, 0x10);
            let wait = wait_status(STATUS, 2);
            mem.put(Gpa::new(QUEUE + bad + 16), &wait.to_le_bytes());
            page.store32(reg::IQT, bad as u32 + 32);
        });
        s.page.page.store32(reg::FECTL, 0);
        s.settle();
        assert_eq!(s.status(), 2, "load {at}");
        assert_eq!(s.page.page.load32(reg::FSTS), 0, "load {at}");
        assert_eq!(s.page.page.load64(reg::IQH), bad + 32);
    }
}

#[test]
fn an_unmap_while_the_sweep_runs_is_not_lost() {
    for at in 0..MOST_LOADS {
        let mut s = Scene::new();
        let lease = s.lease();
        let leaf = s.guest.entry(s.table, 4, 0x1000, 1);
        let (mem, tail) = (s.guest.mem.clone(), s.tail);
        s.page.arm(at, move |page| {
            mem.put_u64(Gpa::new(leaf), 0);
            mem.put(
                Gpa::new(QUEUE + tail),
                &iotlb_pages(1, 0x1000, 0).to_le_bytes(),
            );
            let wait = wait_status(STATUS, 2);
            mem.put(Gpa::new(QUEUE + tail + 16), &wait.to_le_bytes());
            page.store32(reg::IQT, tail as u32 + 32);
        });
        s.page.page.store32(reg::FECTL, 0);
        assert_eq!(s.settle(), Progress::Parked(Parked::Drain), "load {at}");
        s.unit.leases_mut().end(lease);
        s.settle();
        assert_eq!(s.status(), 2);
    }
}
