//! The guest: tables in RAM, a queue of descriptors, and registers that are a page of memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use anyhow::{Context, Result};
use guest_mem::{Gpa, GuestRam, PAGE_SIZE, PhysMem, RegPage, RegisterPage, SlotMapping, SourceId};
use report::clock::cycles;
use vtd::spec::registers;

/// The device.
pub const DEVICE: SourceId = SourceId::new(0, 3, 0);
/// Bytes of RAM.
pub const RAM: u64 = 128 << 20;
/// Pages that can be mapped.
pub const PAGES: u64 = 8192;

const ROOT: u64 = 0x1000;
const CONTEXTS: u64 = 0x2000;
const QUEUE: u64 = 0x3000;
const STATUS: u64 = 0x4000;
const TABLES: u64 = 0x10_0000;
const DATA: u64 = 64 << 20;
const IOVA: u64 = 0x8000_0000;
const DOMAIN: u64 = 5;
/// Descriptors of the queue's page.
const ENTRIES: u64 = 256;
const READ_WRITE: u64 = 3;

/// A guest; its processor is the thread that calls.
pub struct Guest {
    /// Its memory.
    pub ram: GuestRam,
    /// Waiting gives its CPU to others: there are more threads that work than CPUs.
    pub yields: bool,
    page: RegisterPage,
    /// Way of its stores to registers: the mapping that is protected while the owner sleeps.
    mapping: Arc<SlotMapping>,
    tail: u64,
    waits: u32,
}

impl Guest {
    /// Tables without a page; the unit is off.
    pub fn new(page: RegisterPage, mapping: Arc<SlotMapping>) -> Result<Self> {
        let ram = GuestRam::new(&[(Gpa::new(0), RAM)]).context("guest memory")?;
        let guest = Self {
            ram,
            yields: false,
            page,
            mapping,
            tail: 0,
            waits: 0,
        };
        guest.put(ROOT, CONTEXTS | 1);
        let entry = CONTEXTS + u64::from(DEVICE.devfn()) * 16;
        guest.put(entry, TABLES | 1);
        // Three levels.
        guest.put(entry + 8, 1 | DOMAIN << 8);
        let (level2, level1) = (TABLES + PAGE_SIZE, TABLES + 2 * PAGE_SIZE);
        guest.put(TABLES + (IOVA >> 30) * 8, level2 | READ_WRITE);
        for table in 0..PAGES / 512 {
            guest.put(
                level2 + table * 8,
                (level1 + table * PAGE_SIZE) | READ_WRITE,
            );
        }
        // Memory that exists, as a guest's has been used before.
        for page in 0..PAGES {
            guest.put(DATA + page * PAGE_SIZE, 1);
        }
        Ok(guest)
    }

    fn put(&self, at: u64, value: u64) {
        let written = self.ram.write(Gpa::new(at), &value.to_le_bytes());
        written.expect("inside RAM");
    }

    /// Sets or clears the entries of pages, without an invalidation.
    pub fn set(&self, first: u64, pages: u64, is_mapped: bool) {
        for page in first..first + pages {
            let entry = match is_mapped {
                true => (DATA + page * PAGE_SIZE) | READ_WRITE,
                false => 0,
            };
            self.put(TABLES + 2 * PAGE_SIZE + page * 8, entry);
        }
    }

    #[expect(unsafe_code, reason = "the mapping is the guest's way to the register")]
    fn store(&self, offset: u16, value: u32) {
        let register = self.mapping.hva().raw() + u64::from(offset);
        let register = std::ptr::with_exposed_provenance_mut::<u32>(register as usize);
        // SAFETY: an aligned word of the mapping, which `mapping` keeps; all other accesses of it
        // are atomic.
        unsafe { AtomicU32::from_ptr(register) }.store(value, Ordering::Release);
    }

    fn wait_until(&self, is_so: impl Fn() -> bool) {
        while !is_so() {
            match self.yields {
                true => thread::yield_now(),
                false => std::hint::spin_loop(),
            }
        }
    }

    fn command(&self, bits: u32, shows: u32) {
        self.store(registers::GCMD, bits);
        self.wait_until(|| self.page.load32(registers::GSTS) & shows == shows);
    }

    /// Turns the queue and translation on, as Linux does.
    pub fn boot(&mut self) {
        self.store(registers::IQA, QUEUE as u32);
        self.command(1 << 26, 1 << 26);
        self.store(registers::RTADDR, ROOT as u32);
        self.command(1 << 26 | 1 << 30, 1 << 30);
        // All contexts, all translations.
        self.submit(0x11);
        self.submit(0xd2);
        self.command(1 << 26 | 1 << 31, 1 << 31);
    }

    /// Tells of pages, a power of two of them that lie at a multiple of it: cycles from before the
    /// descriptors until the wait's status is seen.
    pub fn tell(&mut self, first: u64, pages: u64) -> u64 {
        let address = (IOVA + first * PAGE_SIZE) | u64::from(pages.trailing_zeros());
        // Both drains, as Linux asks for them.
        self.submit(u128::from(0xf2 | DOMAIN << 16) | u128::from(address) << 64)
    }

    fn submit(&mut self, descriptor: u128) -> u64 {
        self.waits += 1;
        let value = self.waits;
        let wait = 0x25 | u128::from(value) << 32 | u128::from(STATUS) << 64;
        let begin = cycles();
        for descriptor in [descriptor, wait] {
            let at = Gpa::new(QUEUE + self.tail * 16);
            let written = self.ram.write(at, &descriptor.to_le_bytes());
            written.expect("inside RAM");
            self.tail = (self.tail + 1) % ENTRIES;
        }
        self.store(registers::IQT, (self.tail * 16) as u32);
        let ram = &self.ram;
        self.wait_until(|| ram.read_u64(Gpa::new(STATUS)) == Ok(u64::from(value)));
        cycles().wrapping_sub(begin)
    }
}
