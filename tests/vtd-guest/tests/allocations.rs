//! No store of the guest's makes the unit allocate, counted by the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use guest_mem::{Iommu, Iova, Perm, RegPage, RegisterPage};
use vtd::front::Shared;
use vtd::spec::registers as reg;
use vtd::{AccessLen, Config, Event, Sink, Unit};
use vtd_guest::*;

thread_local! {
    /// Number of allocations of this thread.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: all is passed on as it came. The counter is a thread's own, has no destructor, and
// allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Sink that ignores everything, so that only the unit's allocations are counted.
struct NullSink;

impl Sink for NullSink {
    fn msi(&mut self, _address: u64, _data: u32) {}
    fn event(&mut self, _event: Event) {}
}

fn allocations(act: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    act();
    ALLOCATIONS.get() - before
}

/// A guest whose disk has an empty table.
fn guest() -> Guest {
    let mut guest = Guest::new();
    let table = guest.page();
    guest.context(DISK, table, 1, 2);
    guest
}

/// A booted unit that has recorded two faults.
fn faulted(guest: &Guest) -> Unit {
    let mut machine = Machine::new(Mode::Trap, Config::default(), guest.mem.clone());
    machine.boot();
    for iova in [0x9000, 0xa000] {
        let answer = machine
            .unit
            .translate(&guest.mem, DISK, Iova::new(iova), Perm::Read);
        assert!(answer.is_err());
    }
    machine.settle();
    machine.unit
}

/// Values that are stored: nothing, everything, the bit that clears a fault, a small number.
const VALUES: [u32; 4] = [0, u32::MAX, 1 << 31, 0x40];

#[test]
fn no_store_to_a_register_allocates() {
    let guest = guest();
    for offset in (0..reg::PAGE_LEN).step_by(4) {
        for value in VALUES {
            let mut unit = faulted(&guest);
            let count = allocations(|| {
                unit.write(offset, AccessLen::B4, value.into());
                let _ = unit.step(&guest.mem, 0, &mut NullSink);
            });
            assert_eq!(count, 0, "trapped: {value:#x} at {offset:#x}");

            let mut unit = faulted(&guest);
            let page = RegisterPage::in_heap();
            let mut shared = Shared::enter(&mut unit, &page);
            let _ = shared.sweep(&mut unit, &page, &guest.mem, 0, &mut NullSink);
            page.store32(offset, value);
            let count = allocations(|| {
                let _ = shared.sweep(&mut unit, &page, &guest.mem, 0, &mut NullSink);
            });
            assert_eq!(count, 0, "shared: {value:#x} at {offset:#x}");
        }
    }
}

#[test]
fn clearing_all_records_at_once_allocates_nothing_and_clears_them() {
    let guest = guest();
    let mut unit = faulted(&guest);
    let page = RegisterPage::in_heap();
    let mut shared = Shared::enter(&mut unit, &page);
    let highest = [FRCD + 12, FRCD + 16 + 12];
    assert!(highest.iter().all(|at| page.load32(*at) >> 31 == 1));
    let cleared = 1 << 31 | 1;
    highest.iter().for_each(|at| page.store32(*at, cleared));
    let count = allocations(|| {
        let _ = shared.sweep(&mut unit, &page, &guest.mem, 0, &mut NullSink);
    });
    assert_eq!(count, 0);
    assert!(highest.iter().all(|at| page.load32(*at) >> 31 == 0));
}
