//! A driver's world: tables in guest memory, a `DmaMapper` whose invalidator is the queue of a real
//! unit, and a device that reaches memory through that unit alone.

use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use address::PhysAddr;
use dma_map::table::{
    IoPageTable, LeafSizes, PageTable, Table, TableConfig, TableMemory, VtdSecondLevel,
};
use dma_map::testing::RegionMemory;
use dma_map::{Clock, DeviceLimits, DmaMapper, Domain, MapperCore, Policy, Segment, TickClock};
use fake_mem::ArrayMem;
use guest_mem::{Gpa, Intent, Iommu, Iova, Perm, PhysMem, RegisterPage, Stop};
use iova::{Aperture, ChunkAllocator, CoreId, IovaPfn};
use vtd::front::Shared;
use vtd::spec::registers as reg;
use vtd::{AccessLen, Config, Progress, Unit};
use vtd_client::{DomainInvalidator, InvalidationQueue, QueueConfig, Registers};

use vtd_guest::{DISK, Guest, QUEUE, ROOT, RecordingSink, STATUS};

pub const DID: u16 = 7;
/// Table pages: 2 MiB of guest memory.
const TABLES: u64 = 0x40_0000;
const TABLE_PAGES: usize = 512;
/// Target of every entry of a freed table page.
pub const POISON: u64 = 0x7ff_f000;

/// Table pages in guest memory. Freed ones are poisoned until they are used again, so that a walk
/// of one is detected.
pub struct GuestTables(RegionMemory);

impl GuestTables {
    fn new(mem: &ArrayMem) -> Self {
        let len = TABLE_PAGES as u64 * 4096;
        let host = mem
            .host(Gpa::new(TABLES), len, Intent::Read)
            .expect("RAM")
            .raw();
        let memory = NonNull::new(with_exposed_provenance_mut(host as usize)).expect("mapped");
        // SAFETY: `World` keeps `mem`, whose memory this is, longer than the table; the tests put
        // nothing else there.
        Self(unsafe { RegionMemory::new(PhysAddr::new(TABLES), memory, TABLE_PAGES) })
    }

    pub fn used(&self) -> usize {
        self.0.pages_in_use()
    }
}

// SAFETY: every page is the region's, which keeps the contract; the content of a page at its return
// is overwritten when it is allocated again.
unsafe impl TableMemory for GuestTables {
    fn alloc(&self) -> Option<PhysAddr> {
        self.0.alloc()
    }

    unsafe fn free(&self, page: PhysAddr) {
        // SAFETY: the caller's page, not yet given back.
        for entry in unsafe { self.0.entries(page) } {
            entry.store(POISON | 3, Ordering::Release);
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.free(page) };
    }

    unsafe fn entries(&self, page: PhysAddr) -> &Table {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.entries(page) }
    }
}

/// The unit's owner.
pub struct Owner {
    pub unit: Unit,
    out: RecordingSink,
    mem: ArrayMem,
    since: Instant,
}

impl Owner {
    /// Works until there is nothing to do.
    pub fn settle(&mut self) {
        let now = self.since.elapsed().as_nanos() as u64;
        while self.unit.step(&self.mem, now, &mut self.out) == Progress::Busy {}
    }
}

/// The unit, owned by one at a time.
#[derive(Clone)]
pub struct Machine {
    owner: Arc<Mutex<Owner>>,
    /// In trap mode: whether the owner works as soon as a register is written, as it does while a
    /// vCPU waits.
    pub is_prompt: Arc<AtomicBool>,
    /// Whether the owner works when the driver waits.
    pub works_in_pause: Arc<AtomicBool>,
}

impl Machine {
    pub fn owner(&self) -> MutexGuard<'_, Owner> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the translation of the disk's access.
    pub fn access(&self, iova: Iova, perm: Perm) -> Result<Gpa, Stop> {
        let owner = &mut *self.owner();
        let run = owner.unit.translate(&owner.mem, DISK, iova, perm)?;
        Ok(run.gpa)
    }
}

/// Registers by exits.
impl Registers for Machine {
    fn read32(&self, offset: u16) -> u32 {
        self.owner().unit.read(offset, AccessLen::B4) as u32
    }

    fn read64(&self, offset: u16) -> u64 {
        self.owner().unit.read(offset, AccessLen::B8)
    }

    fn write32(&self, offset: u16, value: u32) {
        let mut owner = self.owner();
        owner.unit.write(offset, AccessLen::B4, u64::from(value));
        if self.is_prompt.load(Ordering::Relaxed) {
            owner.settle();
        }
    }

    fn write64(&self, offset: u16, value: u64) {
        let mut owner = self.owner();
        owner.unit.write(offset, AccessLen::B8, value);
        if self.is_prompt.load(Ordering::Relaxed) {
            owner.settle();
        }
    }

    fn pause(&self) {
        if self.works_in_pause.load(Ordering::Relaxed) {
            self.owner().settle();
        }
    }
}

/// Registers in a page that a sidecore polls.
pub struct Polled(pub RegisterPage);

impl Registers for Polled {
    fn read32(&self, offset: u16) -> u32 {
        guest_mem::RegPage::load32(&self.0, offset)
    }
    fn read64(&self, offset: u16) -> u64 {
        guest_mem::RegPage::load64(&self.0, offset)
    }
    fn write32(&self, offset: u16, value: u32) {
        guest_mem::RegPage::store32(&self.0, offset, value);
    }
    fn write64(&self, offset: u16, value: u64) {
        guest_mem::RegPage::store64(&self.0, offset, value);
    }
    /// The sidecore may need this processor.
    fn pause(&self) {
        std::thread::yield_now();
    }
}

/// The sidecore's loop, until `stop`.
pub fn sidecore(machine: &Machine, page: &RegisterPage, mut front: Shared, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let owner = &mut *machine.owner();
        let now = owner.since.elapsed().as_nanos() as u64;
        front.sweep(&mut owner.unit, page, &owner.mem, now, &mut owner.out);
        std::thread::yield_now();
    }
}

pub type Time = Arc<dyn Clock>;
pub type Invalidation<R> = DomainInvalidator<R, ArrayMem, Time>;
pub type Tables = IoPageTable<VtdSecondLevel, Arc<GuestTables>>;
pub type Mapper<R> = DmaMapper<ChunkAllocator, Tables, Invalidation<R>, Time>;
pub type Core<R> = MapperCore<ChunkAllocator, Tables, Invalidation<R>, Time>;

pub fn clock() -> Time {
    let start = Instant::now();
    Arc::new(TickClock::new(move || start.elapsed().as_nanos() as u64))
}

pub fn machine(guest: &Guest) -> Machine {
    Machine {
        owner: Arc::new(Mutex::new(Owner {
            unit: Unit::new(Config::default()),
            out: RecordingSink::default(),
            mem: guest.mem.clone(),
            since: Instant::now(),
        })),
        is_prompt: Arc::new(AtomicBool::new(true)),
        works_in_pause: Arc::new(AtomicBool::new(false)),
    }
}

pub fn config() -> QueueConfig {
    QueueConfig {
        timeout_ns: 20_000_000_000,
        ..QueueConfig::new(Gpa::new(QUEUE), Gpa::new(STATUS))
    }
}

/// Queue on, tables latched, everything flushed, translation on: as a driver boots.
pub fn boot<R: Registers>(
    registers: R,
    guest: &Guest,
) -> Arc<InvalidationQueue<R, ArrayMem, Time>> {
    let mem = guest.mem.clone();
    let queue = InvalidationQueue::enable(registers, mem, clock(), config()).expect("a new unit");
    let command = |bit: u32| {
        queue.with_registers(|registers| {
            let levels = registers.read32(reg::GSTS) & 0x9680_0000;
            registers.write32(reg::GCMD, levels | bit);
            while registers.read32(reg::GSTS) & bit == 0 {
                registers.pause();
            }
        });
    };
    queue.with_registers(|registers| registers.write64(reg::RTADDR, ROOT));
    command(1 << 30);
    queue.flush_all().expect("the unit works");
    command(1 << 31);
    Arc::new(queue)
}

/// A mapper for the disk.
pub struct World<R: Registers> {
    pub mapper: Mapper<R>,
    pub memory: Arc<GuestTables>,
    pub machine: Machine,
    pub guest: Guest,
}

pub const CORES: usize = 3;

impl World<Machine> {
    /// Registers by exits.
    pub fn trap(policy: Policy) -> Self {
        let guest = Guest::new();
        let machine = machine(&guest);
        let queue = boot(machine.clone(), &guest);
        Self::of(guest, machine, queue, policy)
    }
}

impl<R: Registers> World<R> {
    pub fn of(
        guest: Guest,
        machine: Machine,
        queue: Arc<InvalidationQueue<R, ArrayMem, Time>>,
        policy: Policy,
    ) -> Self {
        let memory = Arc::new(GuestTables::new(&guest.mem));
        let levels = TableConfig {
            levels: 3,
            leaves: LeafSizes::FOUR_K,
        };
        let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(1 << 16), &[]).expect("pages");
        let domain = Domain {
            allocator: ChunkAllocator::retiring(aperture, CORES).expect("cores"),
            table: Tables::new(Arc::clone(&memory), levels).expect("memory"),
            invalidator: DomainInvalidator::new(queue, DID),
            clock: clock(),
        };
        guest.context(DISK, domain.table.root().raw(), DID, 1);
        // SAFETY: the allocator of `iova` keeps its contract; the queue of the unit keeps the
        // invalidator's, as this test checks; memory for tables is never unmapped here. The table
        // is the mapper's alone.
        let mapper = unsafe { DmaMapper::new_reclaiming(domain, policy, DeviceLimits::default()) };
        Self {
            mapper: mapper.expect("a policy in bounds"),
            memory,
            machine,
            guest,
        }
    }

    pub fn core(&self, core: usize) -> Core<R> {
        self.mapper.core(CoreId(core)).expect("free")
    }

    pub fn access(&self, iova: Iova) -> Result<u64, Stop> {
        self.machine.access(iova, Perm::Read).map(Gpa::raw)
    }
}

/// A page of memory.
pub fn page(number: u64) -> Segment {
    Segment::new(PhysAddr::new(number << 12), 4096)
}
