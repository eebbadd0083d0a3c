//! Calls against the running kernel. Features that it lacks are skipped with a message.

use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use guest_mem::Hva;
use guest_mem::SlotMapping;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pwrite;
use uffd::{Fault, FaultKind, Features, Modes, Protection, Source, Uffd, WriteGate};

const PAGE: u64 = 4096;

fn file() -> OwnedFd {
    let file = memfd_create("faults", MemfdFlags::CLOEXEC).expect("a file");
    ftruncate(&file, PAGE).expect("a page");
    file
}

/// Returns the first word of a page: the one that a guest would load and store.
fn word(page: &SlotMapping) -> &'static AtomicU64 {
    let at = std::ptr::with_exposed_provenance_mut(page.hva().raw() as usize);
    // SAFETY: aligned, mapped until the test drops `page` after its threads have ended, and only
    // used atomically.
    unsafe { AtomicU64::from_ptr(at) }
}

/// Maps a page whose faults of `modes` arrive at the descriptor; `None` where the kernel lacks the
/// feature.
fn watched(file: &OwnedFd, features: Features, modes: Modes) -> Option<(Uffd, SlotMapping)> {
    let uffd = match Uffd::open(Source::User, features) {
        Ok(uffd) => uffd,
        Err(error) => {
            eprintln!("skipped: {error}");
            return None;
        }
    };
    let page = SlotMapping::of_page(file.as_fd()).expect("a mapping");
    // SAFETY: the mapping is dropped after the descriptor by every test; only atomics reach into
    // it.
    unsafe { uffd.register(page.hva(), PAGE, modes) }.expect("registered");
    Some((uffd, page))
}

/// Waits until an access waits.
fn wait(fd: impl AsFd) {
    let limit = Timespec {
        tv_sec: 20,
        tv_nsec: 0,
    };
    let ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit));
    assert_eq!(ready, Ok(1), "no access has come");
}

fn fault(uffd: &Uffd) -> Fault {
    wait(uffd);
    uffd.next_fault().expect("a message").expect("readable")
}

#[test]
fn an_absent_page_holds_what_it_is_filled_with() {
    let fills: [fn(&Uffd, Hva) -> std::io::Result<u64>; 2] = [
        |uffd, at| uffd.copy(at, &[7; PAGE as usize], Protection::Writable),
        |uffd, at| uffd.zero(at, PAGE),
    ];
    for (fill, expected) in fills.into_iter().zip([0x0707_0707_0707_0707, 0]) {
        let file = file();
        let Some((uffd, page)) = watched(&file, Features::MISSING_SHARED, Modes::MISSING) else {
            return;
        };
        assert_eq!(uffd.next_fault().unwrap(), None);
        let load = thread::spawn({
            let word = word(&page);
            move || word.load(Ordering::Relaxed)
        });
        let fault = fault(&uffd);
        assert_eq!(
            (fault.address, fault.kind),
            (page.hva(), FaultKind::Missing)
        );
        assert!(!fault.is_write);
        assert_eq!(uffd.next_fault().unwrap(), None, "taken");
        assert_eq!(fill(&uffd, page.hva()).unwrap(), PAGE);
        assert_eq!(load.join().unwrap(), expected);
        // There is a page now: not filled twice.
        let again = fill(&uffd, page.hva()).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::AlreadyExists);
    }
}

#[test]
fn an_access_that_is_only_woken_comes_again() {
    let file = file();
    let Some((uffd, page)) = watched(&file, Features::MISSING_SHARED, Modes::MISSING) else {
        return;
    };
    let store = thread::spawn({
        let word = word(&page);
        move || word.store(1, Ordering::Relaxed)
    });
    assert!(fault(&uffd).is_write);
    uffd.wake(page.hva(), PAGE).unwrap();
    assert!(fault(&uffd).is_write);
    uffd.zero(page.hva(), PAGE).unwrap();
    store.join().unwrap();
    assert_eq!(word(&page).load(Ordering::Relaxed), 1);
}

#[test]
fn a_page_that_the_file_has_is_mapped_as_it_is() {
    let file = file();
    let features = Features::MINOR_SHARED;
    let Some((uffd, page)) = watched(&file, features, Modes::MINOR) else {
        return;
    };
    pwrite(&file, &5_u64.to_ne_bytes(), 0).unwrap();
    let load = thread::spawn({
        let word = word(&page);
        move || word.load(Ordering::Relaxed)
    });
    assert_eq!(fault(&uffd).kind, FaultKind::Minor);
    let mapped = uffd.map_present(page.hva(), PAGE, Protection::Writable);
    assert_eq!(mapped.unwrap(), PAGE);
    assert_eq!(load.join().unwrap(), 5);
}

#[test]
fn a_store_to_a_protected_page_waits_for_permission() {
    let file = file();
    let features =
        Features::WRITE_PROTECT | Features::WRITE_PROTECT_SHARED | Features::MISSING_SHARED;
    let modes = Modes::MISSING | Modes::WRITE_PROTECT;
    let Some((uffd, page)) = watched(&file, features, modes) else {
        return;
    };
    // Filled as protected: the first store is detected without a later call to protect the page.
    let bytes = [0; PAGE as usize];
    uffd.copy(page.hva(), &bytes, Protection::WriteProtected)
        .unwrap();
    for value in 1..=2 {
        let store = thread::spawn({
            let word = word(&page);
            move || word.store(value, Ordering::Relaxed)
        });
        let fault = fault(&uffd);
        assert_eq!(fault.kind, FaultKind::WriteProtected);
        assert!(fault.is_write && !store.is_finished());
        assert_eq!(word(&page).load(Ordering::Relaxed), value - 1);
        uffd.write_protect(page.hva(), PAGE, Protection::Writable)
            .unwrap();
        store.join().unwrap();
        assert_eq!(word(&page).load(Ordering::Relaxed), value);
        uffd.write_protect(page.hva(), PAGE, Protection::WriteProtected)
            .unwrap();
    }
}

#[test]
fn an_unregistered_range_is_refused() {
    let file = file();
    let Some((uffd, _page)) = watched(&file, Features::MISSING_SHARED, Modes::MISSING) else {
        return;
    };
    let other = SlotMapping::of_page(file.as_fd()).unwrap();
    assert!(uffd.zero(other.hva(), PAGE).is_err());
    let protected = uffd.write_protect(other.hva(), PAGE, Protection::WriteProtected);
    assert!(protected.is_err());
}

#[test]
fn the_gate_counts_the_stores_that_waited_and_lets_them_through() {
    let file = file();
    let mut gate = match WriteGate::new(SlotMapping::of_page(file.as_fd()).unwrap().into()) {
        Ok(gate) => gate,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let word = word(gate.mapping());
    assert_eq!(gate.unprotect().unwrap(), 0, "it is open");
    gate.protect().unwrap();
    let store = thread::spawn(move || word.store(9, Ordering::Relaxed));
    wait(&gate);
    assert!(!store.is_finished());
    assert_eq!(gate.unprotect().unwrap(), 1);
    store.join().unwrap();
    assert_eq!(word.load(Ordering::Relaxed), 9);
}
