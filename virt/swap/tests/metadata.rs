//! Memory that the swapper keeps for each page, counted by the allocator: not the sizes of types,
//! but the bytes held after pages have been in all states.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use guest_mem::{Gpa, GuestRam, HugePages, PAGE_SIZE};
use swap::ram::SwappedRam;
use swap::residency::{Command, CommandOutcome, Page, PageExamination, ReadAhead, Residency, Slot};

/// Limit of the bytes kept for a page.
const BOUND: usize = 24;

thread_local! {
    /// Bytes that this thread has allocated and not freed.
    static HELD: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: all calls are passed on unchanged. The counter is thread-local, has no destructor, and
// allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.set(HELD.get() + layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.set(HELD.get() - layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the result of `make`, and the bytes that it holds.
fn held_by<T>(make: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    let made = make();
    let held = usize::try_from(HELD.get() - before).expect("it gives back nothing of others");
    (made, held)
}

/// Carries out commands successfully, until there are none left except saves, which are collected.
fn carry_out(residency: &mut Residency, saves: &mut Vec<(Page, Slot)>) {
    loop {
        let commands = residency.take_commands();
        if commands.is_empty() {
            return;
        }
        for command in commands {
            match command {
                Command::Ask(_) => residency.answered(u32::MAX, 0),
                Command::Examine(page) => {
                    let seen = PageExamination {
                        is_clean: false,
                        is_zero: false,
                        crc: page.0,
                    };
                    residency.examined(page, seen);
                }
                Command::Save(page, slot) => saves.push((page, slot)),
                Command::Fetch(page, _) => {
                    residency.ended(CommandOutcome::Fetched(page, Ok(page.0)))
                }
                Command::Stop(reason) => panic!("{reason:?}"),
                _ => {}
            }
        }
        residency.balance();
    }
}

/// Makes as many pages leave as the book asks for; none is saved before all are asked for.
fn shrink(residency: &mut Residency, limit: usize) {
    let mut saves = Vec::new();
    residency.set_limit(limit);
    carry_out(residency, &mut saves);
    loop {
        while residency.wants_to_ask() {
            residency.ask();
            carry_out(residency, &mut saves);
        }
        if saves.is_empty() {
            return;
        }
        for (page, slot) in std::mem::take(&mut saves) {
            residency.ended(CommandOutcome::Saved(page, slot, Ok(())));
        }
        residency.balance();
        carry_out(residency, &mut saves);
    }
}

/// Brings all pages into memory, unmaps some and brings them back, evicts all and brings them back.
fn everywhere(residency: &mut Residency, pages: u32) {
    let all = pages as usize;
    let fill = |residency: &mut Residency| {
        residency.set_limit(2 * all);
        for page in 0..pages {
            residency.fault(Page(page), ReadAhead::InOrder);
            carry_out(residency, &mut Vec::new());
        }
        assert_eq!(residency.present(), all);
    };
    fill(residency);
    shrink(residency, all);
    fill(residency);
    shrink(residency, 0);
    assert_eq!(residency.present(), 0);
    fill(residency);
    let counts = residency.counts();
    assert!(counts.saved >= all as u64, "{counts:?}");
    assert!(counts.rescued > all as u64 / 20, "{counts:?}");
}

#[test]
fn no_more_is_kept_of_a_page_than_was_said() {
    // A power of two, and slightly more, for which tables of a power of two are largest.
    for pages in [1 << 14, (1 << 14) + 4] {
        let slots = pages as usize;
        let (mut residency, held) = held_by(|| Residency::new(pages, 0, slots));
        assert_eq!(held, residency.page_bytes() + residency.slot_bytes());
        assert_eq!(residency.slot_bytes(), 4 * slots);
        let ((), grown) = held_by(|| everywhere(&mut residency, pages));
        // Memory for the pages that are on their way, a few batches.
        assert!(grown < 32 << 10, "{grown} bytes more than at the start");
        let size = u64::from(pages) * PAGE_SIZE;
        let ram = GuestRam::with_pages(&[(Gpa::new(0), size)], HugePages::Never).expect("memory");
        let (ram, flags) = held_by(|| SwappedRam::new(ram));
        assert!((ram.page_bytes()..ram.page_bytes() + 1024).contains(&flags));
        let kept = (residency.page_bytes() + ram.page_bytes()) as f64 / f64::from(pages);
        println!("{pages} pages: {kept:.2} bytes each, {grown} in all beside");
        assert!(kept <= BOUND as f64, "{kept} bytes a page");
    }
}
