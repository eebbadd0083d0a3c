//! A store that fails once, over real memory: the guest is paused with the reason, and goes on with all that it had once the limit
//! has changed.
//!
//! The guest fills more pages than may be in memory, then looks at each: with loads, and with a disk's writes.

mod support;

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use guest_mem::GuestRam;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use seeded::Random;
use support::{Files, Machine, Shape};
use swap::book::{self, Place, Trouble};
use swap::frames::PAGE;
use swap::pager::Message;
use vio::blk::Op;
use vio_faults::{FaultyStore, StoreFault};

const PAGES: usize = 320;
const LIMIT: usize = 112;
const WORDS: usize = PAGE / 8;
const PATIENCE: Duration = Duration::from_secs(60);

/// What word `at` of a page holds: no page is like another, and none has a word of zeroes.
fn word(page: usize, at: usize) -> u64 {
    Random::new((page * WORDS + at) as u64).bits() | 1
}

struct Guest {
    machine: Machine,
    image: File,
}

impl Guest {
    /// `None`, said, where that cannot be.
    fn new(fault: StoreFault) -> Option<Self> {
        let image = memfd_create("image", MemfdFlags::CLOEXEC).expect("a file");
        ftruncate(&image, (PAGES * PAGE) as u64).expect("its blocks");
        let image = File::from(image);
        let shape = Shape {
            pages: PAGES as u32,
            limit: LIMIT,
        };
        let files = |ram: &GuestRam| {
            let store = support::store(PAGES as u32)?;
            Ok(Files {
                store: Box::new(FaultyStore::new(store, ram.clone(), fault)),
                slots: PAGES,
                trims: false,
                disks: vec![support::disk(&image)?],
            })
        };
        match Machine::over(&shape, files) {
            Ok(machine) => Some(Self { machine, image }),
            Err(error) => {
                eprintln!("skipped: {error}");
                None
            }
        }
    }

    fn fill(&self) {
        for page in 0..PAGES {
            for index in 0..WORDS {
                let value = word(page, index);
                self.machine.store(page, index, value);
            }
        }
    }

    fn look_at_all(&self) {
        for page in 0..PAGES {
            match page % 2 {
                0 => self.load(page),
                _ => self.write_to_the_disk(page),
            }
        }
    }

    fn load(&self, page: usize) {
        for index in 0..WORDS {
            let found = self.machine.load(page, index);
            assert_eq!(found, word(page, index), "page {page}, word {index}");
        }
    }

    fn write_to_the_disk(&self, page: usize) {
        let (offset, len) = ((page * PAGE) as u64, PAGE as u32);
        let durable = false;
        let op = Op::Write {
            offset,
            len,
            durable,
        };
        assert!(self.machine.request(op, page), "the disk is good");
        let mut found = vec![0; PAGE];
        self.image
            .read_exact_at(&mut found, offset)
            .expect("a block");
        let words = (0..WORDS).flat_map(|index| word(page, index).to_ne_bytes());
        assert!(found.into_iter().eq(words), "block of page {page}");
    }
}

/// Runs a guest whose store has this fault: it is paused once, for this reason, and has lost nothing. How long it took to go on when
/// it was told a new limit; `None` where that cannot be.
fn pause(fault: StoreFault, is_right: impl Fn(Trouble) -> bool) -> Option<Duration> {
    let guest = Arc::new(Guest::new(fault)?);
    let (done, all_is_there) = channel();
    // Not scoped: one that waits for a page for ever must not hold up who says so.
    let worker = thread::spawn({
        let guest = guest.clone();
        move || {
            guest.fill();
            guest.look_at_all();
            drop(guest);
            done.send(()).expect("the test waits");
        }
    });
    let trouble = guest.machine.wait_for_trouble();
    assert!(trouble.is_some_and(&is_right), "{fault:?}: {trouble:?}");
    assert!(!worker.is_finished(), "{fault:?}: nobody waits");
    let start = Instant::now();
    guest.machine.tell(Message::SetLimit(LIMIT + 32));
    assert_eq!(guest.machine.wait_for_trouble(), None, "{fault:?}");
    let took = start.elapsed();
    let outcome = all_is_there.recv_timeout(PATIENCE);
    outcome.expect("the guest finds all that it stored");
    let guest = Arc::into_inner(guest).expect("the worker has let go");
    let report = guest.machine.stop();
    assert_eq!(report.pauses, 1, "{fault:?}");
    assert!(report.last_pause.is_some_and(is_right), "{fault:?}");
    assert!(!report.is_paused, "{fault:?}");
    Some(took)
}

/// The same with faults at several requests. A new limit is one of two reasons to try again; the other comes after a second, so the
/// quickest tells them apart.
fn pauses(faults: impl IntoIterator<Item = StoreFault>, is_right: impl Fn(Trouble) -> bool) {
    let took = faults.into_iter().map(|fault| pause(fault, &is_right));
    let took: Option<Vec<Duration>> = took.collect();
    if let Some(took) = took {
        let quickest = took.iter().min().expect("there are faults");
        assert!(*quickest < Duration::from_millis(800), "{took:?}");
    }
}

fn nth(n: u64) -> NonZeroU64 {
    NonZeroU64::new(n).expect("counted from 1")
}

const EIO: book::Errno = book::Errno(Errno::IO.raw_os_error());
const ENOSPC: book::Errno = book::Errno(Errno::NOSPC.raw_os_error());

#[test]
fn a_request_that_fails_pauses_the_guest_until_it_has_been_done() {
    let early = [1, 3].map(|n| StoreFault::Eio(nth(n)));
    pauses(early, |trouble| {
        matches!(trouble, Trouble::CannotSave(_, EIO))
    });
    // These read or write.
    let late = [20, 60, 120].map(|n| StoreFault::Eio(nth(n)));
    pauses(late, |trouble| {
        matches!(
            trouble,
            Trouble::CannotSave(_, EIO) | Trouble::CannotFetch(Place::Slot(_), EIO)
        )
    });
}

#[test]
fn a_store_without_room_behind_it_pauses_the_guest_until_there_is() {
    let faults = [1, 3, 6].map(|n| StoreFault::Enospc(nth(n)));
    pauses(faults, |trouble| {
        matches!(trouble, Trouble::CannotSave(_, ENOSPC))
    });
}

#[test]
fn a_slot_that_comes_back_wrong_is_shown_to_nobody_and_read_again() {
    let faults = [1, 2, 25].map(|n| StoreFault::Corrupt(nth(n)));
    pauses(faults, |trouble| {
        matches!(trouble, Trouble::Changed(Place::Slot(_)))
    });
}
