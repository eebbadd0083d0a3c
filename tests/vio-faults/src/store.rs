//! A swap store that fails once, at a request of a test's choice: what is asked is not done, or
//! what is read is not what was written.
//!
//! Requests are counted as they are submitted, from 1. One that fails does not reach the disk
//! below. One that is corrupted does, and has one bit of its first page flipped in memory behind
//! the read: the disk holds what it should, and who reads again reads it rightly. Only reads and
//! writes count, and everything else passes.

use std::num::NonZeroU64;
use std::os::fd::RawFd;

use guest_mem::{Gpa, GuestRam, Hva, PhysMem};
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece, Transfer};
use vio::pass_down;

/// Failure of a store, which happens once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreFault {
    /// This request, of reads and writes together, fails with EIO.
    Eio(NonZeroU64),
    /// This write fails with ENOSPC, as where storage is promised and not there.
    Enospc(NonZeroU64),
    /// This read brings one bit that was not written.
    Corrupt(NonZeroU64),
}

/// Countdown of requests to the one that fails.
#[derive(Debug)]
struct Countdown {
    left: u64,
}

impl Countdown {
    /// Whether this one is it.
    fn is_it(&mut self) -> bool {
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }
}

/// A store that fails once. See the head of the module.
pub struct FaultyStore {
    below: Box<dyn BlockIo>,
    ram: GuestRam,
    /// `None` once it has struck.
    fault: Option<(StoreFault, Countdown)>,
    /// The slot whose read is to be corrupted, and where its first page lies.
    corrupted: Option<(u32, Hva)>,
    /// Failed before they went down.
    failed: Vec<Completion>,
}

impl FaultyStore {
    /// `below`, which moves pages of `ram`, with this fault.
    ///
    /// # Panics
    /// If `below` moves data through buffers ([`Transfer::Direct`] it has to be): a builder's
    /// error.
    pub fn new(below: Box<dyn BlockIo>, ram: GuestRam, fault: StoreFault) -> Self {
        assert_eq!(below.transfer(), Transfer::Direct, "a store of pages");
        let (StoreFault::Eio(nth) | StoreFault::Enospc(nth) | StoreFault::Corrupt(nth)) = fault;
        Self {
            below,
            ram,
            fault: Some((fault, Countdown { left: nth.get() })),
            corrupted: None,
            failed: Vec::new(),
        }
    }

    /// The fault, if it strikes at this request.
    fn strikes(&mut self, op: Op) -> Option<StoreFault> {
        let is_read = matches!(op, Op::Read { .. });
        let is_write = matches!(op, Op::Write { .. });
        let (fault, countdown) = self.fault.as_mut()?;
        let fault = *fault;
        let counts = match fault {
            StoreFault::Eio(_) => is_read || is_write,
            StoreFault::Enospc(_) => is_write,
            StoreFault::Corrupt(_) => is_read,
        };
        let strikes = counts && countdown.is_it();
        strikes.then(|| {
            self.fault = None;
            fault
        })
    }

    fn fail(&mut self, slot: u32, errno: i32) {
        let outcome = Outcome::Failed(errno);
        self.failed.push(Completion { slot, outcome });
    }

    /// Flips the lowest bit at `hva`.
    fn flip(&self, hva: Hva) {
        let mut byte = [0];
        let gpa = self.gpa(hva).expect("a piece lies in memory");
        let there = "memory that is all there refuses nothing";
        self.ram.read(gpa, &mut byte).expect(there);
        byte[0] ^= 1;
        self.ram.write(gpa, &byte).expect(there);
    }

    fn gpa(&self, hva: Hva) -> Option<Gpa> {
        self.ram.regions().iter().find_map(|region| {
            let inside = hva.raw().checked_sub(region.hva.raw())?;
            (inside < region.len).then(|| Gpa::new(region.gpa.raw() + inside))
        })
    }
}

impl BlockIo for FaultyStore {
    pass_down!();

    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]) {
        match self.strikes(op) {
            Some(StoreFault::Eio(_)) => return self.fail(slot, libc::EIO),
            Some(StoreFault::Enospc(_)) => return self.fail(slot, libc::ENOSPC),
            Some(StoreFault::Corrupt(_)) => {
                self.corrupted = pieces.first().map(|piece| (slot, piece.hva));
            }
            None => {}
        }
        self.below.submit(slot, op, pieces);
    }

    fn flush(&mut self) {
        self.below.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.failed);
        let from = done.len();
        self.below.poll(done);
        let Some((slot, hva)) = self.corrupted else {
            return;
        };
        let ended = done[from..].iter().find(|completion| {
            completion.slot == slot && completion.outcome != Outcome::NotCancellable
        });
        if let Some(completion) = ended {
            self.corrupted = None;
            if completion.outcome == Outcome::Done {
                self.flip(hva);
            }
        }
    }

    fn has_completions(&mut self) -> bool {
        !self.failed.is_empty() || self.below.has_completions()
    }

    fn cancel(&mut self, slot: u32) {
        // What has failed is said by the next poll.
        if !self.failed.iter().any(|failed| failed.slot == slot) {
            self.below.cancel(slot);
        }
    }

    fn arm(&mut self) {
        self.below.arm();
    }

    fn disarm(&mut self) {
        self.below.disarm();
    }

    fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        self.below.wake_fds(fds);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use guest_mem::PAGE_SIZE;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use vio::blk::{RawDisk, RawDiskOptions};

    use super::*;

    const PAGES: u64 = 4;
    /// Not at address 0, so that a wrong translation shows.
    const BASE: Gpa = Gpa::new(1 << 20);
    const WRITE: bool = true;
    const READ: bool = false;

    /// A store of four pages below memory of as many.
    struct Fixture {
        ram: GuestRam,
        store: FaultyStore,
    }

    /// `None`, with a printed reason, where the host cannot serve the file.
    fn fixture(fault: StoreFault) -> Option<Fixture> {
        let file: File = memfd_create("store", MemfdFlags::CLOEXEC).unwrap().into();
        ftruncate(&file, PAGES * PAGE_SIZE).unwrap();
        let below = match RawDisk::from_file(file, RawDiskOptions::default()) {
            Ok(below) => below,
            Err(error) => {
                println!("skipped: {error}");
                return None;
            }
        };
        let ram = GuestRam::new(&[(BASE, PAGES * PAGE_SIZE)]).unwrap();
        let mut store = FaultyStore::new(Box::new(below), ram.clone(), fault);
        store.attach(ram.keep_alive());
        Some(Fixture { ram, store })
    }

    impl Fixture {
        fn gpa(page: u64) -> Gpa {
            Gpa::new(BASE.raw() + page * PAGE_SIZE)
        }

        fn put(&self, page: u64, bytes: [u8; 2]) {
            self.ram.write(Self::gpa(page), &bytes).unwrap();
        }

        fn get(&self, page: u64) -> [u8; 2] {
            let mut bytes = [0; 2];
            self.ram.read(Self::gpa(page), &mut bytes).unwrap();
            bytes
        }

        /// `count` pages from `page` on, to or from where they lie in the store.
        fn run(&mut self, is_write: bool, page: u64, count: u64) -> Outcome {
            let (offset, len) = (page * PAGE_SIZE, (count * PAGE_SIZE) as u32);
            let op = match is_write {
                true => Op::Write {
                    offset,
                    len,
                    durable: false,
                },
                false => Op::Read { offset, len },
            };
            let hva = Hva::new(self.ram.regions()[0].hva.raw() + offset);
            self.store.submit(7, op, &[Piece { hva, len }]);
            self.store.flush();
            let mut done = Vec::new();
            while done.is_empty() {
                self.store.poll(&mut done);
            }
            assert_eq!((done.len(), done[0].slot), (1, 7));
            done[0].outcome
        }
    }

    fn nth(n: u64) -> NonZeroU64 {
        NonZeroU64::new(n).unwrap()
    }

    #[test]
    fn eio_counts_reads_and_writes_strikes_once_and_does_nothing() {
        let Some(mut own) = fixture(StoreFault::Eio(nth(3))) else {
            return;
        };
        own.put(0, [5, 6]);
        assert_eq!(own.run(WRITE, 0, 1), Outcome::Done);
        assert_eq!(own.run(READ, 0, 1), Outcome::Done);
        own.put(0, [7, 8]);
        assert_eq!(own.run(WRITE, 0, 1), Outcome::Failed(libc::EIO));
        assert_eq!(own.run(READ, 0, 1), Outcome::Done);
        assert_eq!(own.get(0), [5, 6], "what failed was not written");
        for _ in 0..5 {
            assert_eq!(own.run(WRITE, 0, 1), Outcome::Done);
        }
    }

    #[test]
    fn enospc_counts_writes_alone() {
        let Some(mut own) = fixture(StoreFault::Enospc(nth(2))) else {
            return;
        };
        assert_eq!(own.run(READ, 0, 2), Outcome::Done);
        assert_eq!(own.run(WRITE, 0, 2), Outcome::Done);
        assert_eq!(own.run(READ, 0, 2), Outcome::Done);
        assert_eq!(own.run(WRITE, 0, 2), Outcome::Failed(libc::ENOSPC));
        assert_eq!(own.run(WRITE, 0, 2), Outcome::Done);
    }

    #[test]
    fn a_corrupted_read_differs_in_one_bit_of_its_first_page_and_the_next_one_is_right() {
        let Some(mut own) = fixture(StoreFault::Corrupt(nth(2))) else {
            return;
        };
        own.put(1, [5, 6]);
        own.put(2, [7, 8]);
        assert_eq!(own.run(WRITE, 1, 2), Outcome::Done);
        for first in [[5, 6], [4, 6], [5, 6]] {
            own.put(1, [0; 2]);
            own.put(2, [0; 2]);
            assert_eq!(own.run(READ, 1, 2), Outcome::Done);
            assert_eq!((own.get(1), own.get(2)), (first, [7, 8]));
        }
    }

    #[test]
    fn one_that_sleeps_is_told_of_a_failure() {
        let Some(mut own) = fixture(StoreFault::Eio(nth(1))) else {
            return;
        };
        let op = Op::Read {
            offset: 0,
            len: PAGE_SIZE as u32,
        };
        own.store.submit(0, op, &[]);
        own.store.arm();
        assert!(own.store.has_completions());
        own.store.disarm();
    }
}
