//! A guest with more pages in memory than the limit when its pager begins, and one whose mappings
//! the host removes.

mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use guest_mem::{Gpa, GuestRam, PAGE_SIZE, PhysMem, SlotMapping};
use support::{Files, Machine, Shape};
use swap::frames::PAGE;

const PAGES: u32 = 320;
const PATIENCE: Duration = Duration::from_secs(60);

/// Creates a machine whose pages have their numbers as content, except page 0; `None`, with a
/// message, where the test cannot run.
fn loaded(limit: usize) -> Option<Machine> {
    let shape = Shape {
        pages: PAGES,
        limit,
    };
    let files = |ram: &GuestRam| {
        for page in 1..u64::from(PAGES) {
            ram.write(Gpa::new(page * PAGE_SIZE), &page.to_ne_bytes())
                .map_err(|stop| format!("{stop:?}"))?;
        }
        Ok(Files {
            store: support::store(PAGES)?,
            slots: PAGES as usize,
            trims: false,
            disks: Vec::new(),
        })
    };
    match Machine::over(&shape, files) {
        Ok(machine) => Some(machine),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

fn word(machine: &Machine, page: u32) -> &AtomicU64 {
    word_in(machine.mapping(), page)
}

fn word_in(mapping: &SlotMapping, page: u32) -> &AtomicU64 {
    let at = mapping.hva().raw() as usize + page as usize * PAGE;
    // SAFETY: aligned, inside the mapping, which lives as long as the reference to it, and only
    // used atomically.
    unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(at)) }
}

/// If the owner answered before the pager could receive it, no page would leave memory any more.
#[test]
fn pages_loaded_beyond_the_limit_leave() {
    const LIMIT: usize = 128;
    for _ in 0..20 {
        let Some(machine) = loaded(LIMIT) else { return };
        let end = Instant::now() + PATIENCE;
        while machine.report().present > LIMIT {
            assert!(Instant::now() < end, "{:?}", machine.report());
            thread::sleep(Duration::from_millis(1));
        }
        for page in 1..PAGES {
            let found = word(&machine, page).load(Ordering::Relaxed);
            assert_eq!(found, u64::from(page));
        }
        machine.stop();
    }
}

/// The host swaps the page's mapping out: the pager takes the page to be in memory, but no access
/// reaches it.
#[test]
fn a_page_whose_mapping_the_host_takes_away_comes_back() {
    let Some(machine) = loaded(PAGES as usize) else {
        return;
    };
    for page in [1, 2, PAGES - 1] {
        assert_eq!(
            word(&machine, page).load(Ordering::Relaxed),
            u64::from(page)
        );
        for round in 1..4 {
            let at = u64::from(page) * PAGE_SIZE;
            machine.mapping().unmap(at, PAGE_SIZE).expect("it is there");
            let (tell, told) = channel();
            // It may not return: a store that is only woken faults again for ever.
            let mapping = machine.mapping().clone();
            thread::spawn(move || {
                let found = word_in(&mapping, page).fetch_add(1, Ordering::Relaxed);
                // The receiver is gone if it took too long.
                let _ = tell.send(found);
            });
            let found = told.recv_timeout(PATIENCE).expect("it has come back");
            assert_eq!(found + 1, u64::from(page) + round);
        }
    }
    machine.stop();
}
