//! Linux's allocator and table through the interface, where `EXITLESS_LINUX_IOVA` names them
//! (`scripts/linux-iova.sh`).
#![expect(
    unsafe_code,
    reason = "Linux's table trusts its callers to keep to pages of their own"
)]

use std::collections::BTreeSet;
use std::env;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use dma_linux::{Domain, Linux};

const LAST: u64 = (1 << 36) - 1;

fn linux() -> Option<&'static Linux> {
    let path = env::var_os("EXITLESS_LINUX_IOVA").filter(|path| !path.is_empty());
    if path.is_none() {
        println!("skipped: EXITLESS_LINUX_IOVA names no library");
    }
    path.map(|path| Linux::load(Path::new(&path)).expect("it loads"))
}

#[test]
fn a_library_that_is_not_there_is_an_error() {
    assert!(Linux::load(Path::new("/nonexistent.so")).is_err());
}

#[test]
fn ranges_are_aligned_below_their_limit_and_given_once() {
    let Some(linux) = linux() else { return };
    linux.enter(0);
    let domain = Domain::new(linux, 1).expect("memory");
    let mut pages = BTreeSet::new();
    for round in 0..1000 {
        let size = 1 + round % 32;
        let first = domain.alloc(size, 0xf_ffff, true);
        assert!(first > 0 && first.is_multiple_of(size.next_power_of_two()));
        assert!(first + size - 1 <= 0xf_ffff);
        assert!((first..first + size).all(|page| pages.insert(page)));
        if round % 3 == 0 {
            domain.free(first, size);
            (first..first + size).for_each(|page| assert!(pages.remove(&page)));
        }
    }
}

#[test]
fn a_full_space_has_nothing_and_then_what_was_freed() {
    let Some(linux) = linux() else { return };
    linux.enter(0);
    let domain = Domain::new(linux, 1).expect("memory");
    let all: Vec<_> = (0..63).map(|_| domain.alloc(1, 63, true)).collect();
    assert!(all.iter().all(|page| (1..=63).contains(page)));
    assert_eq!(domain.alloc(1, 63, true), 0);
    domain.free(all[7], 1);
    linux.enter(1);
    // It lies in the other CPU's cache, which is emptied first.
    assert_eq!(domain.alloc(1, 63, false), 0);
    assert_eq!(domain.alloc(1, 63, true), all[7]);
}

#[test]
fn mapped_pages_are_unmapped_once_and_their_tables_freed() {
    let Some(linux) = linux() else { return };
    linux.enter(0);
    let domain = Domain::new(linux, 1).expect("memory");
    // SAFETY: one thread.
    unsafe {
        assert_eq!(domain.map(512, 0x20_0000, 4096, 3), Ok(()));
        assert!(domain.map(514, 0x20_0000, 4096, 1).is_err());
        assert_eq!(domain.unmap(512, 4096, 3), 3 * 4096);
        assert_eq!(domain.unmap(512, 4096, 1), 0);
    }
    for size in [4096, 2 << 20] {
        let first = domain.dma_map(0x4000_0000, size, 1, LAST);
        assert!(first > 0 && (first << 12).is_multiple_of(size as u64));
        // SAFETY: it was mapped just so.
        unsafe { domain.dma_unmap(first, size, 1) }
    }
}

#[test]
fn cpus_share_a_domain() {
    let Some(linux) = linux() else { return };
    let domain = Arc::new(Domain::new(linux, 1).expect("memory"));
    let work = |cpu| {
        let domain = Arc::clone(&domain);
        thread::spawn(move || {
            domain.linux().enter(cpu);
            for round in 0..20_000_u64 {
                let first = domain.dma_map(round << 12, 4096, 1, LAST);
                assert_ne!(first, 0);
                // SAFETY: it was mapped just so, by this thread.
                unsafe { domain.dma_unmap(first, 4096, 1) }
            }
        })
    };
    for thread in [work(0), work(1)] {
        thread.join().expect("no panic");
    }
}
