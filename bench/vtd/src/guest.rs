//! A guest's tables and driver, as little of them as the measurements need.

use anyhow::{Context, Result};
use guest_mem::{Gpa, GuestRam, PAGE_SIZE, PhysMem, SourceId};
use vtd::spec::registers;
use vtd::{AccessLen, Config, Event, Sink, Unit};

/// The one device.
pub const DISK: SourceId = SourceId::new(0, 1, 0);
/// Its domain.
pub const DID: u16 = 5;
/// First mapped IOVA.
pub const IOVA: u64 = 0x8000_0000;
/// Pages mapped from there.
pub const PAGES: u64 = 8192;
/// First IOVA of pages that lie in reverse order, so that no two follow each other.
pub const SCATTERED: u64 = IOVA + PAGES * PAGE_SIZE;
/// Number of these pages.
pub const SCATTERED_PAGES: u64 = 1024;
/// Address of the WAIT descriptors' status word.
pub const STATUS: u64 = 0x9000;

const ROOT: u64 = 0x1000;
const CONTEXT: u64 = 0x2000;
const QUEUE: u64 = 0x8000;
const TABLES: u64 = 0x10_0000;
const DATA: u64 = 0x200_0000;
/// Descriptors in one page of queue.
const ENTRIES: u64 = 256;

/// Interrupts go nowhere: nothing measured here raises one.
pub struct Quiet;

impl Sink for Quiet {
    fn msi(&mut self, _address: u64, _data: u32) {}
    fn event(&mut self, _event: Event) {}
}

/// RAM with a 48-bit second-level table for `DISK`, and the queue's software side.
pub struct Guest {
    /// Guest memory.
    pub ram: GuestRam,
    tail: u64,
}

impl Guest {
    /// Maps [`PAGES`] pages read-write.
    pub fn new() -> Result<Self> {
        let ram = GuestRam::new(&[(Gpa::new(0), 128 << 20)]).context("guest RAM")?;
        let this = Self { ram, tail: 0 };
        this.put(ROOT, CONTEXT | 1);
        let entry = CONTEXT + u64::from(DISK.devfn()) * 16;
        this.put(entry, TABLES | 1);
        this.put(entry + 8, 2 | u64::from(DID) << 8);
        for page in 0..PAGES {
            this.map(IOVA + page * PAGE_SIZE, DATA + page * PAGE_SIZE);
        }
        for page in 0..SCATTERED_PAGES {
            let target = SCATTERED_PAGES - 1 - page;
            this.map(SCATTERED + page * PAGE_SIZE, DATA + target * PAGE_SIZE);
        }
        Ok(this)
    }

    fn put(&self, at: u64, value: u64) {
        self.ram
            .write(Gpa::new(at), &value.to_le_bytes())
            .expect("inside RAM");
    }

    /// One leaf; the intermediate tables lie at fixed places, enough for IOVAs of one 1 GiB region.
    fn map(&self, iova: u64, gpa: u64) {
        let index = |level: u32| iova >> (12 + 9 * level) & 511;
        let (level3, level2, level1) = (TABLES + 0x1000, TABLES + 0x2000, TABLES + 0x3000);
        let leaf = level1 + index(1) * 0x1000;
        self.put(TABLES + index(3) * 8, level3 | 3);
        self.put(level3 + index(2) * 8, level2 | 3);
        self.put(level2 + index(1) * 8, leaf | 3);
        self.put(leaf + index(0) * 8, gpa | 3);
    }

    /// A unit with translation and the queue on.
    pub fn unit(&self) -> Unit {
        let mut unit = Unit::new(Config {
            max_leases: 65535,
            ..Config::default()
        });
        unit.write(registers::IQA, AccessLen::B8, QUEUE);
        unit.write(registers::GCMD, AccessLen::B4, 1 << 26);
        unit.write(registers::RTADDR, AccessLen::B8, ROOT);
        unit.write(registers::GCMD, AccessLen::B4, 1 << 26 | 1 << 30);
        unit.write(registers::GCMD, AccessLen::B4, 1 << 26 | 1 << 31);
        unit.step(&self.ram, 0, &mut Quiet);
        assert_eq!(
            unit.read(registers::GSTS, AccessLen::B4),
            0xc400_0000,
            "translation is on"
        );
        unit
    }

    /// Queues `pages` page-selective invalidations; answers the new tail, in bytes.
    pub fn invalidate_pages(&mut self, pages: u64) -> u64 {
        for page in 0..pages {
            self.push(2 | 3 << 4 | u64::from(DID) << 16, IOVA + page * PAGE_SIZE);
        }
        self.tail * 16
    }

    /// Queues a wait that writes `value` to the status word; answers the new tail, in bytes.
    pub fn wait(&mut self, value: u32) -> u64 {
        self.push(5 | 1 << 5 | u64::from(value) << 32, STATUS);
        self.tail * 16
    }

    fn push(&mut self, lo: u64, hi: u64) {
        let at = QUEUE + self.tail * 16;
        self.put(at, lo);
        self.put(at + 8, hi);
        self.tail = (self.tail + 1) % ENTRIES;
    }
}
