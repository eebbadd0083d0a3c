//! A guest that uses more memory than may be present, and two disks: it fills memory and disks,
//! changes parts of them, and clears them.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guest_mem::{Gpa, SlotMapping};
use seeded::Random;
use sidecore::Handle;
use swap::frames::PAGE;
use vio::blk::Op;

use crate::oracle::{Event, Id, SECTOR};
use crate::support::{Machine, Request, Transfer};

/// Pages of memory.
pub const PAGES: usize = 96;
/// Pages that may be present.
pub const LIMIT: usize = 40;
/// Blocks of each disk.
pub const BLOCKS: usize = 48;
pub const DISKS: usize = 2;
/// Number of threads.
pub const WORKERS: u64 = 3;

const SECTORS: usize = PAGE / SECTOR;
const WORDS: usize = SECTOR / 8;
const PATIENCE: Duration = Duration::from_secs(60);

/// Content of a page or a block, by sectors.
type Ids = [Id; SECTORS];

/// Recorder of the events.
pub trait Journal: Send + Sync {
    /// Appends an event.
    fn record(&self, event: &Event);

    /// Returns whether the machine has stopped: results that the guest sees from then on are not
    /// checked.
    fn is_over(&self) -> bool;
}

/// Error of an operation after the machine's stop.
pub struct Over;

pub struct Guest {
    mapping: Arc<SlotMapping>,
    requests: Handle<Request>,
    journal: Arc<dyn Journal>,
    pages: Vec<Mutex<Ids>>,
    disks: Vec<Vec<Mutex<Ids>>>,
    next: AtomicU64,
}

impl Guest {
    pub fn new(machine: &Machine, journal: Arc<dyn Journal>) -> Self {
        let zeroes = |count| (0..count).map(|_| Mutex::default()).collect();
        Self {
            mapping: machine.mapping().clone(),
            requests: machine.requests(),
            journal,
            pages: zeroes(PAGES),
            disks: (0..DISKS).map(|_| zeroes(BLOCKS)).collect(),
            next: AtomicU64::new(1),
        }
    }

    /// Runs worker `number` of [`WORKERS`].
    pub fn work(&self, seed: u64, number: u64) -> Result<(), Over> {
        let mut random = Random::new(seed * WORKERS + number);
        let own = (0..PAGES).filter(|page| page % WORKERS as usize == number as usize);
        // Fill: memory, and blocks of the disks.
        for page in own.clone() {
            self.fill(page)?;
            if random.chance(0.4) {
                self.write(page, page % DISKS, page / DISKS, 0..SECTORS, false)?;
            }
        }
        // Fragment.
        for _ in 0..40 {
            self.step(&mut random)?;
        }
        // Clear.
        for page in own {
            match random.below(4) {
                0 => self.store(page, &mut self.page(page), Ids::default())?,
                1 => self.zero(page % DISKS, page / DISKS)?,
                2 => self.check(page)?,
                _ => {}
            }
        }
        self.flush(number as usize % DISKS)
    }

    fn step(&self, random: &mut Random) -> Result<(), Over> {
        let page = random.below(PAGES as u64) as usize;
        let disk = random.below(DISKS as u64) as usize;
        let block = random.below(BLOCKS as u64) as usize;
        match random.below(100) {
            0..20 => self.fill(page),
            20..50 => self.read(page, disk, block),
            50..70 => self.write(page, disk, block, 0..SECTORS, random.chance(0.15)),
            70..80 => {
                let first = random.below(SECTORS as u64);
                let end = first + 1 + random.below(SECTORS as u64 - first);
                let sectors = first as usize..end as usize;
                self.write(page, disk, block, sectors, random.chance(0.15))
            }
            80..82 => self.zero(disk, block),
            82..88 => self.flush(disk),
            _ => self.check(page),
        }
    }

    fn page(&self, page: usize) -> impl std::ops::DerefMut<Target = Ids> {
        self.pages[page].lock().expect("no thread has failed")
    }

    fn block(&self, disk: usize, block: usize) -> impl std::ops::DerefMut<Target = Ids> {
        self.disks[disk][block]
            .lock()
            .expect("no thread has failed")
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn at(&self, page: usize, index: usize) -> &AtomicU64 {
        let at = self.mapping.hva().raw() as usize + page * PAGE + index * 8;
        // SAFETY: aligned, inside the mapping, which lives as long as the guest, and only used
        // atomically.
        unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(at)) }
    }

    /// Returns an error once the machine has stopped: later results are not checked.
    fn go_on(&self) -> Result<(), Over> {
        match self.journal.is_over() {
            true => Err(Over),
            false => Ok(()),
        }
    }

    fn fill(&self, page: usize) -> Result<(), Over> {
        let ids = std::array::from_fn(|_| self.number());
        self.store(page, &mut self.page(page), ids)
    }

    fn store(&self, number: usize, page: &mut Ids, ids: Ids) -> Result<(), Over> {
        for index in 0..SECTORS * WORDS {
            let word = ids[index / WORDS].to_le();
            self.at(number, index).store(word, Ordering::Relaxed);
        }
        *page = ids;
        self.go_on()
    }

    fn check(&self, number: usize) -> Result<(), Over> {
        let page = self.page(number);
        for (index, id) in page.iter().enumerate() {
            let found = u64::from_le(self.at(number, index * WORDS).load(Ordering::Relaxed));
            self.go_on()?;
            assert_eq!(found, *id, "page {number}, sector {index}");
        }
        Ok(())
    }

    fn read(&self, number: usize, disk: usize, block: usize) -> Result<(), Over> {
        let mut page = self.page(number);
        let own = self.block(disk, block);
        let (offset, len) = ((block * PAGE) as u64, PAGE as u32);
        self.request(disk, Op::Read { offset, len }, number * PAGE)?;
        *page = *own;
        Ok(())
    }

    fn write(
        &self,
        number: usize,
        disk: usize,
        block: usize,
        sectors: Range<usize>,
        is_durable: bool,
    ) -> Result<(), Over> {
        let page = self.page(number);
        let mut own = self.block(disk, block);
        let first = block * SECTORS + sectors.start;
        let op = Op::Write {
            offset: (first * SECTOR) as u64,
            len: (sectors.len() * SECTOR) as u32,
            durable: is_durable,
        };
        let ids = &page[sectors.clone()];
        let from = number * PAGE + sectors.start * SECTOR;
        self.change(disk, first, ids, op, from)?;
        own[sectors].copy_from_slice(ids);
        Ok(())
    }

    fn zero(&self, disk: usize, block: usize) -> Result<(), Over> {
        let mut own = self.block(disk, block);
        let op = Op::WriteZeroes {
            offset: (block * PAGE) as u64,
            len: PAGE as u64,
            unmap: true,
        };
        let ids = Ids::default();
        self.change(disk, block * SECTORS, &ids, op, 0)?;
        *own = ids;
        Ok(())
    }

    /// Makes the request `op`, after which the sectors from `first` on have the contents `ids`.
    fn change(
        &self,
        disk: usize,
        first: usize,
        ids: &[Id],
        op: Op,
        memory: usize,
    ) -> Result<(), Over> {
        let number = self.number();
        self.journal.record(&Event::Write {
            number,
            disk,
            first: first as u64,
            ids: ids.to_vec(),
        });
        self.request(disk, op, memory)?;
        let is_durable = matches!(op, Op::Write { durable: true, .. });
        self.journal.record(&Event::Written { number, is_durable });
        Ok(())
    }

    fn flush(&self, disk: usize) -> Result<(), Over> {
        let number = self.number();
        self.journal.record(&Event::Flush { number, disk });
        self.request(disk, Op::Flush, 0)?;
        self.journal.record(&Event::Flushed { number });
        Ok(())
    }

    fn request(&self, disk: usize, op: Op, memory: usize) -> Result<(), Over> {
        let (done, wait) = channel();
        let transfer = Transfer {
            disk,
            op,
            gpa: Some(Gpa::new(memory as u64)),
            done,
        };
        let start = Instant::now();
        // An owner that has ended has crashed.
        let _ = self.requests.send(Request::Transfer(transfer));
        loop {
            match wait.recv_timeout(Duration::from_millis(5)) {
                Ok(is_good) => {
                    assert!(is_good, "the disk is good");
                    return Ok(());
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.go_on()?;
                    assert!(start.elapsed() < PATIENCE, "{op:?} does not end");
                }
                Err(RecvTimeoutError::Disconnected) => return Err(Over),
            }
        }
    }
}
