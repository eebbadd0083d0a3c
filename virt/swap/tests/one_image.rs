//! Two machines over one image that neither writes: the pages of each leave for the same blocks,
//! and come back from there.

mod support;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use guest_mem::GuestRam;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use seeded::Random;
use support::{Files, Machine, Shape};
use swap::frames::PAGE;
use vio::blk::Op;

const PAGES: usize = 256;
const LIMIT: usize = 96;
const ROUNDS: usize = 6;
const WORDS: usize = PAGE / 8;
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns word `at` of a block.
fn word(block: usize, at: usize) -> u64 {
    Random::new((block * WORDS + at) as u64).bits()
}

/// Blocks that differ, in a file that is open for reading alone.
fn image() -> File {
    let image = memfd_create("image", MemfdFlags::CLOEXEC).expect("a file");
    ftruncate(&image, (PAGES * PAGE) as u64).expect("its blocks");
    let image = File::from(image);
    for block in 0..PAGES {
        let words = (0..WORDS).flat_map(|at| word(block, at).to_ne_bytes());
        let bytes: Vec<u8> = words.collect();
        let offset = (block * PAGE) as u64;
        image.write_all_at(&bytes, offset).expect("a block");
    }
    let fd = image.as_raw_fd();
    File::open(format!("/proc/self/fd/{fd}")).expect("the same file")
}

/// Creates a machine; `None`, with a message, where the test cannot run.
fn machine(image: &File) -> Option<Machine> {
    let shape = Shape {
        pages: PAGES as u32,
        limit: LIMIT,
    };
    let files = |_: &GuestRam| {
        Ok(Files {
            store: support::store(PAGES as u32)?,
            slots: PAGES,
            trims: false,
            disks: vec![support::read_only_disk(image)?],
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

/// One of several guests. It has the blocks in another order than the others, and stores to some
/// pages, which then differ from all other guests' pages.
struct Guest {
    machine: Machine,
    number: usize,
}

impl Guest {
    fn block_of(&self, page: usize) -> usize {
        (page + 37 * self.number) % PAGES
    }

    /// Returns whether a page differs from its block in a round.
    fn is_stored_to(&self, page: usize, round: usize) -> bool {
        (page + round) % 8 == 3 * self.number
    }

    /// Returns a word that no other guest stores.
    fn mark(&self, page: usize, round: usize) -> u64 {
        ((self.number + 1) << 48 | round << 32 | page) as u64
    }

    fn op(&self, is_write: bool, page: usize) -> Op {
        let (offset, len) = ((self.block_of(page) * PAGE) as u64, PAGE as u32);
        match is_write {
            false => Op::Read { offset, len },
            true => Op::Write {
                offset,
                len,
                durable: false,
            },
        }
    }

    fn run(&self) {
        // So many that disks are asked to report.
        (0..PAGES).for_each(|page| self.machine.store(page, 0, 1));
        for round in 0..ROUNDS {
            for page in 0..PAGES {
                let is_done = self.machine.request(self.op(false, page), page);
                assert!(is_done, "the disk is good");
                if self.is_stored_to(page, round) {
                    self.machine.store(page, round, self.mark(page, round));
                }
            }
            // A refused write has no effect, on the image or on the page.
            let refused = (round * 31) % PAGES;
            let is_done = self.machine.request(self.op(true, refused), refused);
            assert!(!is_done, "the image is only read");
            for page in (0..PAGES).rev() {
                self.check(page, round);
            }
        }
    }

    fn check(&self, page: usize, round: usize) {
        for at in 0..WORDS {
            let wanted = match self.is_stored_to(page, round) && at == round {
                true => self.mark(page, round),
                false => word(self.block_of(page), at),
            };
            let found = self.machine.load(page, at);
            let number = self.number;
            assert_eq!(found, wanted, "guest {number}, page {page}, word {at}");
        }
    }
}

#[test]
fn two_machines_drop_pages_to_one_image_and_each_finds_its_own() {
    let image = image();
    let mut guests = Vec::new();
    for number in 0..2 {
        let Some(machine) = machine(&image) else {
            return;
        };
        guests.push(Arc::new(Guest { machine, number }));
    }
    let (done, is_done) = channel();
    for guest in &guests {
        // Not scoped: a thread that waits for a page for ever must not keep the test from reporting
        // that.
        thread::spawn({
            let (guest, done) = (guest.clone(), done.clone());
            move || {
                guest.run();
                drop(guest);
                done.send(()).expect("the test waits");
            }
        });
    }
    drop(done);
    for _ in &guests {
        // It finds the contents that it read and stored.
        let outcome = is_done.recv_timeout(PATIENCE);
        let reports = || guests.iter().map(|guest| guest.machine.report());
        assert!(outcome.is_ok(), "{:?}", reports().collect::<Vec<_>>());
    }
    for guest in guests {
        let guest = Arc::into_inner(guest).expect("its thread has let go");
        let report = guest.machine.stop();
        println!("{report:?}");
        assert_eq!(report.pauses, 0);
        // In each round all pages except the limit, and those stored to.
        let fewest = (ROUNDS * (PAGES - LIMIT) / 2) as u64;
        assert!(report.counts.dropped_to_disk > fewest, "{report:?}");
        assert!(report.counts.fetched_from_disk > fewest, "{report:?}");
    }
}
