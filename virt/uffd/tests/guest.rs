//! Operations of a pager, page by page, against the running kernel. Features that it lacks are
//! skipped with a message.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use guest_mem::{HugePages, SlotMapping};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};
use uffd::{FaultKind, GuestMapping, PageFault, Protection, Source, Stores};

const PAGE: u64 = 4096;
const PAGES: u64 = 8;

struct Guest {
    // Before the mapping that loads and stores go to.
    pages: GuestMapping,
    mapping: Arc<SlotMapping>,
    file: std::os::fd::OwnedFd,
}

impl Guest {
    /// Maps the second half of a file of twice as many pages.
    fn new() -> Option<Self> {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a file");
        ftruncate(&file, 2 * PAGES * PAGE).expect("its pages");
        let offset = PAGES * PAGE;
        let mapping = SlotMapping::new(file.as_fd(), offset, offset, HugePages::Never);
        let mapping = Arc::new(mapping.expect("a mapping"));
        let parts = [(offset, mapping.clone())];
        match GuestMapping::new(parts, Source::User, Stores::Traced) {
            Ok(pages) => Some(Self {
                pages,
                mapping,
                file,
            }),
            Err(error) => {
                eprintln!("skipped: {error}");
                None
            }
        }
    }

    /// Returns the first word of a page: the one that a guest would load and store.
    fn word(&self, page: u64) -> &'static AtomicU64 {
        let at = self.mapping.hva().raw() + (page - PAGES) * PAGE;
        let at = std::ptr::with_exposed_provenance_mut(at as usize);
        // SAFETY: aligned, mapped until the test drops the guest after its threads have ended, and
        // only used atomically.
        unsafe { AtomicU64::from_ptr(at) }
    }

    fn fault(&self) -> PageFault {
        let limit = Timespec {
            tv_sec: 20,
            tv_nsec: 0,
        };
        let fds = &mut [PollFd::new(&self.pages, PollFlags::IN)];
        assert_eq!(poll(fds, Some(&limit)), Ok(1), "no access has come");
        let fault = self.pages.next_fault().expect("a message");
        fault.expect("readable")
    }

    fn put(&self, page: u64, value: u64) {
        assert_eq!(pwrite(&self.file, &value.to_ne_bytes(), page * PAGE), Ok(8));
    }

    fn held(&self, page: u64) -> u64 {
        let mut bytes = [0; 8];
        assert_eq!(pread(&self.file, &mut bytes, page * PAGE), Ok(8));
        u64::from_ne_bytes(bytes)
    }

    fn punch(&self, page: u64) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, hole, page * PAGE, PAGE).expect("a hole");
    }

    fn is_protected(&self, page: u64) -> bool {
        self.pages.is_protected(page).expect("the page's word")
    }
}

#[test]
fn an_unmapped_page_is_a_minor_fault_and_a_punched_one_is_missing() {
    let Some(guest) = Guest::new() else { return };
    let page = PAGES + 3;
    for value in [1, 2] {
        guest.put(page, value);
        let kinds = [FaultKind::Minor, FaultKind::Missing];
        for kind in kinds {
            let load = thread::spawn({
                let word = guest.word(page);
                move || word.load(Ordering::Relaxed)
            });
            let fault = guest.fault();
            assert_eq!(
                (fault.page, fault.kind, fault.is_write),
                (page, kind, false)
            );
            if kind == FaultKind::Missing {
                guest.put(page, value);
            }
            guest.pages.map(page, 1, Protection::Writable).unwrap();
            assert_eq!(load.join().unwrap(), value);
            guest.pages.unmap(page, 1).unwrap();
            assert_eq!(guest.held(page), value);
            guest.punch(page);
            assert_eq!(guest.held(page), 0);
        }
    }
}

#[test]
fn the_first_store_removes_the_protection_and_does_not_wait() {
    let Some(guest) = Guest::new() else { return };
    let page = PAGES;
    guest.put(page, 7);
    guest
        .pages
        .map(page, 1, Protection::WriteProtected)
        .unwrap();
    assert_eq!(guest.word(page).load(Ordering::Relaxed), 7);
    assert!(guest.is_protected(page), "a load is none");
    for value in [8, 9] {
        guest.word(page).store(value, Ordering::Relaxed);
        assert!(!guest.is_protected(page));
        assert_eq!(guest.held(page), value);
        guest.pages.protect(page).unwrap();
        assert!(guest.is_protected(page));
    }
    assert_eq!(guest.pages.next_fault().unwrap(), None);
}

/// The trace is all that is known of a page that can no longer be stored to.
#[test]
fn the_trace_outlives_the_mapping() {
    let Some(guest) = Guest::new() else { return };
    for (page, is_stored) in [(PAGES + 1, false), (PAGES + 2, true)] {
        guest.put(page, 7);
        guest
            .pages
            .map(page, 1, Protection::WriteProtected)
            .unwrap();
        if is_stored {
            guest.word(page).store(8, Ordering::Relaxed);
        }
        guest.pages.unmap(page, 1).unwrap();
        assert_eq!(guest.is_protected(page), !is_stored);
        // A page that is mapped unprotected afterwards leaves no trace.
        guest.pages.map(page, 1, Protection::Writable).unwrap();
        assert!(!guest.is_protected(page));
        guest.pages.unmap(page, 1).unwrap();
        assert!(!guest.is_protected(page));
    }
}

/// Mapped and unmapped ones, stored to or not, and some that have never been there.
#[test]
fn pages_are_told_apart_together() {
    let Some(guest) = Guest::new() else { return };
    let (clean, stored, unmapped) = (0b0110_1011, 0b0001_0010, 0b0010_0110);
    let of = |pattern: u64| (0..PAGES).filter(move |nth| pattern >> nth & 1 != 0);
    for nth in of(clean) {
        let page = PAGES + nth;
        guest.put(page, 7);
        let protection = Protection::WriteProtected;
        guest.pages.map(page, 1, protection).unwrap();
    }
    for nth in of(stored) {
        guest.put(PAGES + nth, 7);
        let _ = guest.pages.map(PAGES + nth, 1, Protection::Writable);
        guest.word(PAGES + nth).store(8, Ordering::Relaxed);
    }
    for nth in of(unmapped) {
        guest.pages.unmap(PAGES + nth, 1).unwrap();
    }
    for (first, count) in [(0, PAGES), (1, 3), (3, 5), (7, 1), (2, 0)] {
        let found = guest.pages.protected(PAGES + first, count).unwrap();
        let expected = (clean & !stored) >> first & ((1 << count) - 1);
        assert_eq!(found, expected, "{count} from {first}: {found:#b}");
    }
}

#[test]
fn a_page_that_is_mapped_stays_as_it_is() {
    let Some(guest) = Guest::new() else { return };
    let page = PAGES + PAGES - 1;
    guest.put(page, 1);
    guest
        .pages
        .map(page, 1, Protection::WriteProtected)
        .unwrap();
    guest.pages.map(page, 1, Protection::Writable).unwrap();
    assert!(guest.is_protected(page));
    guest.pages.wake(page).unwrap();
}

#[test]
fn a_range_beyond_the_mapping_is_refused() {
    let Some(guest) = Guest::new() else { return };
    for (offset, len) in [(PAGES * PAGE, PAGE), (0, (PAGES + 1) * PAGE), (u64::MAX, 2)] {
        assert!(guest.mapping.unmap(offset, len).is_err());
    }
}

/// Memory below and above the hole under 4 GiB: side by side in the file, apart in the address
/// space.
#[test]
fn pages_across_two_mappings_are_handled_together() {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a file");
    ftruncate(&file, 2 * PAGES * PAGE).expect("its pages");
    let half = |offset| {
        let mapping = SlotMapping::new(file.as_fd(), offset, PAGES * PAGE, HugePages::Never);
        (offset, Arc::new(mapping.expect("a mapping")))
    };
    // The later one is mapped first, or lies beyond it, but not right behind it.
    let parts = [half(PAGES * PAGE), half(0)];
    let pages = match GuestMapping::new(parts, Source::User, Stores::Traced) {
        Ok(pages) => pages,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let (first, count) = (PAGES - 2, 4);
    for page in first..first + count {
        assert_eq!(pwrite(&file, &(page + 1).to_ne_bytes(), page * PAGE), Ok(8));
    }
    pages.map(first, count, Protection::WriteProtected).unwrap();
    assert_eq!(pages.protected(first, count).unwrap(), 0b1111);
    assert_eq!(pages.protected(first - 1, 3).unwrap(), 0b110);
    assert_eq!(pages.protected(0, 2 * PAGES).unwrap(), 0b1111 << first);
    pages.unmap(first, count).unwrap();
    assert_eq!(pages.protected(first, count).unwrap(), 0b1111, "the trace");
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, hole, first * PAGE, count * PAGE).expect("a hole");
    assert_eq!(pages.zero(first, count).unwrap(), count);
    assert_eq!(
        pages.protected(first, count).unwrap(),
        0,
        "zeroes, writable"
    );
}
