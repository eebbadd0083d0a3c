//! A store or an image that fails once, over real memory: the guest is paused with the reason, and
//! is resumed without loss once the limit has changed. The same holds for an image that another
//! program has changed, once it has its former content.
//!
//! The guest fills more pages than may be in memory, then checks each: with loads, and with a
//! disk's writes.

mod support;

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use guest_mem::GuestRam;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use seeded::Random;
use support::{Files, Machine, Shape};
use swap::frames::PAGE;
use swap::pager::{Message, Report};
use swap::residency::{self, Backing, Block, PauseReason};
use vio::blk::Op;
use vio_faults::{FaultyStore, StoreFault};

const PAGES: usize = 320;
const LIMIT: usize = 112;
const WORDS: usize = PAGE / 8;
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns word `at` of a page: no page is like another, and none has a word of zeroes.
fn word(page: usize, at: usize) -> u64 {
    Random::new((page * WORDS + at) as u64).bits() | 1
}

/// Failing file, and its fault.
#[derive(Clone, Copy, Debug)]
enum Fails {
    Store(StoreFault),
    /// Fails when the pager reads it.
    Image(StoreFault),
    Nothing,
}

struct Guest {
    machine: Machine,
    image: File,
    fails: Fails,
}

impl Guest {
    /// Creates it; `None`, with a message, where the test cannot run.
    fn new(fails: Fails) -> Option<Self> {
        let image = memfd_create("image", MemfdFlags::CLOEXEC).expect("a file");
        ftruncate(&image, (PAGES * PAGE) as u64).expect("its blocks");
        let image = File::from(image);
        let shape = Shape {
            pages: PAGES as u32,
            limit: LIMIT,
        };
        let files = |ram: &GuestRam| {
            let mut store = support::store(PAGES as u32)?;
            let mut disk = support::disk(&image)?;
            match fails {
                Fails::Store(fault) => {
                    store = Box::new(FaultyStore::new(store, ram.clone(), fault));
                }
                Fails::Image(fault) => {
                    disk.image = Box::new(FaultyStore::new(disk.image, ram.clone(), fault));
                }
                Fails::Nothing => {}
            }
            Ok(Files {
                store,
                slots: PAGES,
                trims: false,
                disks: vec![disk],
            })
        };
        match Machine::over(&shape, files) {
            Ok(machine) => Some(Self {
                machine,
                image,
                fails,
            }),
            Err(error) => {
                eprintln!("skipped: {error}");
                None
            }
        }
    }

    /// Fills all pages, and makes each come back from the failing file.
    fn work(&self) {
        self.fill();
        match self.fails {
            Fails::Store(_) | Fails::Nothing => self.look_at_all(),
            Fails::Image(_) => {
                (0..PAGES).for_each(|page| self.write_to_the_disk(page));
                (0..PAGES).for_each(|page| self.load(page));
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
        self.assert_block_holds(page, page);
    }

    fn assert_block_holds(&self, block: usize, page: usize) {
        let mut found = vec![0; PAGE];
        self.image
            .read_exact_at(&mut found, (block * PAGE) as u64)
            .expect("a block");
        let words = (0..WORDS).flat_map(|index| word(page, index).to_ne_bytes());
        assert!(found.into_iter().eq(words), "block {block}");
    }
}

/// Runs a guest with this fault: it is paused once, for this reason, and has lost nothing. Returns
/// the time that it took to be resumed after a new limit; `None` where the test cannot run.
fn pause(fails: Fails, is_right: impl Fn(PauseReason) -> bool) -> Option<Duration> {
    let guest = Arc::new(Guest::new(fails)?);
    let (done, all_is_there) = channel();
    // Not scoped: a thread that waits for a page for ever must not keep the test from reporting
    // that.
    let worker = thread::spawn({
        let guest = guest.clone();
        move || {
            guest.work();
            drop(guest);
            done.send(()).expect("the test waits");
        }
    });
    let reason = guest.machine.wait_for_pause();
    assert!(reason.is_some_and(&is_right), "{fails:?}: {reason:?}");
    assert!(!worker.is_finished(), "{fails:?}: nobody waits");
    let start = Instant::now();
    guest.machine.tell(Message::SetLimit(LIMIT + 32));
    assert_eq!(guest.machine.wait_for_pause(), None, "{fails:?}");
    let took = start.elapsed();
    let outcome = all_is_there.recv_timeout(PATIENCE);
    outcome.expect("the guest finds all that it stored");
    let guest = Arc::into_inner(guest).expect("the worker has let go");
    let report = guest.machine.stop();
    assert_eq!(report.pauses, 1, "{fails:?}");
    assert!(report.last_pause.is_some_and(is_right), "{fails:?}");
    assert!(!report.is_paused, "{fails:?}");
    Some(took)
}

/// Runs guests with faults at several requests. A new limit is one of two causes of a retry; the
/// other comes after a second, so the quickest shows which it was.
fn pauses(faults: impl IntoIterator<Item = Fails>, is_right: impl Fn(PauseReason) -> bool) {
    let took = faults.into_iter().map(|fails| pause(fails, &is_right));
    let took: Option<Vec<Duration>> = took.collect();
    if let Some(took) = took {
        let quickest = took.iter().min().expect("there are faults");
        assert!(*quickest < Duration::from_millis(800), "{took:?}");
    }
}

fn nth(n: u64) -> NonZeroU64 {
    NonZeroU64::new(n).expect("counted from 1")
}

const EIO: residency::Errno = residency::Errno(Errno::IO.raw_os_error());
const ENOSPC: residency::Errno = residency::Errno(Errno::NOSPC.raw_os_error());

#[test]
fn a_request_that_fails_pauses_the_guest_until_it_has_been_done() {
    let early = [1, 3].map(|n| Fails::Store(StoreFault::Eio(nth(n))));
    pauses(early, |reason| {
        matches!(reason, PauseReason::CannotSave(_, EIO))
    });
    // Reads or writes.
    let late = [20, 60, 120].map(|n| Fails::Store(StoreFault::Eio(nth(n))));
    pauses(late, |reason| {
        matches!(
            reason,
            PauseReason::CannotSave(_, EIO) | PauseReason::CannotFetch(Backing::Slot(_), EIO)
        )
    });
}

#[test]
fn a_store_without_room_behind_it_pauses_the_guest_until_there_is() {
    let faults = [1, 3, 6].map(|n| Fails::Store(StoreFault::Enospc(nth(n))));
    pauses(faults, |reason| {
        matches!(reason, PauseReason::CannotSave(_, ENOSPC))
    });
}

#[test]
fn a_slot_that_comes_back_wrong_is_not_shown_and_is_read_again() {
    let faults = [1, 2, 25].map(|n| Fails::Store(StoreFault::Corrupt(nth(n))));
    pauses(faults, |reason| {
        matches!(reason, PauseReason::Changed(Backing::Slot(_)))
    });
}

#[test]
fn an_image_that_cannot_be_read_pauses_the_guest_until_it_can() {
    let faults = [1, 4].map(|n| Fails::Image(StoreFault::Eio(nth(n))));
    pauses(faults, |reason| {
        matches!(reason, PauseReason::CannotFetch(Backing::Block(_), EIO))
    });
    let faults = [1, 4].map(|n| Fails::Image(StoreFault::Corrupt(nth(n))));
    pauses(faults, |reason| {
        matches!(reason, PauseReason::Changed(Backing::Block(_)))
    });
}

/// Block that another program changes.
const CHANGED: usize = 40;

/// Changes, as another program, a block that backs a page, and then runs `act`, which needs the
/// page's content. `act` ends when the block has its former content, and not before.
fn change_behind_its_back(guest: &Arc<Guest>, act: impl FnOnce(&Guest) + Send + 'static) {
    guest.machine.empty(LIMIT);
    let offset = (CHANGED * PAGE) as u64;
    let block = |guest: &Guest| {
        let mut bytes = vec![0; PAGE];
        let read = guest.image.read_exact_at(&mut bytes, offset);
        read.map(|()| bytes).expect("a block")
    };
    let put = |bytes: &[u8]| guest.image.write_all_at(bytes, offset).expect("a block");
    let old = block(guest);
    let mut new = old.clone();
    new[PAGE / 2] ^= 1;
    put(&new);

    let (done, is_done) = channel();
    thread::spawn({
        let guest = guest.clone();
        move || {
            act(&guest);
            drop(guest);
            done.send(()).expect("the test waits");
        }
    });
    let number = CHANGED as u32;
    let named = PauseReason::Changed(Backing::Block(Block { disk: 0, number }));
    assert_eq!(guest.machine.wait_for_pause(), Some(named));
    // After a new limit failed operations are retried, unless they are under way.
    let retry_until = |holds: &dyn Fn(Report) -> bool| {
        let deadline = Instant::now() + PATIENCE;
        while !holds(guest.machine.report()) {
            assert!(Instant::now() < deadline, "{:?}", guest.machine.report());
            guest.machine.tell(Message::SetLimit(LIMIT));
        }
    };
    // Once the second try has begun the first one has ended.
    let reads = |report: Report| report.traffic.image_reads.requests;
    let before = reads(guest.machine.report());
    retry_until(&|report| reads(report) >= before + 2);
    assert!(guest.machine.report().is_paused);
    assert_eq!(is_done.try_recv(), Err(TryRecvError::Empty));
    assert!(block(guest) == new, "nothing goes down meanwhile");

    put(&old);
    retry_until(&|report| !report.is_paused);
    assert_eq!(guest.machine.wait_for_pause(), None);
    let outcome = is_done.recv_timeout(PATIENCE);
    outcome.expect("it goes on with what the page held");
}

#[test]
fn an_image_changed_by_another_program_pauses_the_guest_until_it_is_restored() {
    /// Page whose memory is written to the block.
    const OTHER: usize = 200;
    let Some(guest) = Guest::new(Fails::Nothing) else {
        return;
    };
    let guest = Arc::new(guest);
    guest.fill();
    (0..PAGES).for_each(|page| guest.write_to_the_disk(page));
    guest.machine.empty(LIMIT);
    assert_eq!(guest.machine.report().tracked, PAGES);

    change_behind_its_back(&guest, |guest| guest.load(CHANGED));
    // It is read ahead with a block that has not changed.
    change_behind_its_back(&guest, |guest| {
        guest.load(CHANGED - 3);
        guest.load(CHANGED);
    });
    // The guest changes the block as well.
    change_behind_its_back(&guest, |guest| {
        let op = Op::Write {
            offset: (CHANGED * PAGE) as u64,
            len: PAGE as u32,
            durable: false,
        };
        assert!(guest.machine.request(op, OTHER), "the disk is good");
    });
    guest.assert_block_holds(CHANGED, OTHER);
    (0..PAGES).for_each(|page| guest.load(page));
    let guest = Arc::into_inner(guest).expect("the others have let go");
    let report = guest.machine.stop();
    assert_eq!(report.pauses, 3);
    assert_eq!(report.counts.fetched_before_a_write, 1);
}
