//! All parts in one model: allocator, tables, mapper and a device, in every order that loom knows
//! as far as time allows. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p dma-map --lib --release model`.
//!
//! One core maps, unmaps, parks, so that the leaf table goes, and maps something else at the same
//! address. Beside it another translates that address; or one flushes, and there is a **device**,
//! which reads entries as hardware does, remembers a translation and the address of a leaf table,
//! and forgets them only when it sees an invalidation, which it then acknowledges. All code is the
//! real one; an allocation is a word of 64 pages, which [`Small`] makes one page of a table of two
//! entries.
//!
//! Pages of tables hold a mark before their first use and after they are given back. A walker that
//! finds one was let in too early or left in too long.

use core::convert::Infallible;
use std::boxed::Box;
use std::sync::Mutex;

use address::{Iova, PAGE_SIZE, PhysAddr};
use iova::{Access, Aperture, ChunkAllocator, ChunkConfig, CoreId, IovaPfn, IovaRange};
use lines::{AtomicBool, AtomicU64, Ordering};
use loom::thread;

use super::{DeviceLimits, Direction, DmaMapper, Domain, MapperCore, Policy, Segment};
use crate::clock::ManualClock;
use crate::invalidate::{Command, InvalidateError, Invalidator, Ticket};
use crate::table::IoMap;
use crate::table::model::{CONFIG, ModelMemory, ModelTable, load};
use crate::table::{MapError, PageTable, RetiredTable, TableStats, Translation, UnmapError};

/// One model at a time: each has a time, and all of the processor in it.
static ALONE: Mutex<()> = Mutex::new(());

/// Chunks of two words, as the allocator has under loom, over leaf tables of two entries.
struct Small(ModelTable);

fn small(range: IovaRange) -> IovaRange {
    let first = range.first().raw();
    let page = first / 512 * 2 + first % 512 / 64;
    let pages = if range.pages() == 512 { 2 } else { 1 };
    IovaRange::new(IovaPfn::new(page), pages).expect("a small range")
}

impl IoMap for Small {
    type Error = Infallible;

    fn map(&self, range: IovaRange, phys: PhysAddr, access: Access) -> Result<(), MapError> {
        self.0.map(small(range), phys, access)
    }

    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError> {
        self.0.unmap(small(range))
    }

    fn lookup(&self, iova: Iova) -> Option<Translation> {
        let range = IovaRange::new(IovaPfn::of(iova), 1).expect("a page");
        self.0.lookup(small(range).start())
    }
}

#[expect(unsafe_code, reason = "promises of the caller, passed on")]
impl PageTable for Small {
    fn root(&self) -> PhysAddr {
        self.0.root()
    }

    fn stats(&self) -> TableStats {
        self.0.stats()
    }

    unsafe fn retire_leaf(&self, chunk: IovaRange) -> Option<RetiredTable> {
        // SAFETY: no walk is in the chunk, so none is in the small chunk that represents it.
        unsafe { self.0.retire_leaf(small(chunk)) }
    }

    unsafe fn release(&self, retired: RetiredTable) {
        // SAFETY: what no device holds, no device holds.
        unsafe { self.0.release(retired) }
    }
}

/// State shared by the mapper and the device.
#[derive(Default)]
struct Iommu {
    requested: AtomicU64,
    /// The last request for the whole domain.
    domain: AtomicU64,
    done: AtomicU64,
    /// There is no device: every request is done.
    is_unused: bool,
    /// No more requests follow.
    is_over: AtomicBool,
    /// `A` was unmapped, and the barrier that ends the device's reach has returned.
    is_gone: AtomicBool,
}

impl Invalidator for &'static Iommu {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        if commands.contains(&Command::Domain) {
            let next = self.requested.load(Ordering::Relaxed) + 1;
            self.domain.fetch_max(next, Ordering::Relaxed);
        }
        // Release: the device that sees this sees the cleared entries.
        Ok(Ticket(self.requested.fetch_add(1, Ordering::AcqRel) + 1))
    }

    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        Ok(self.is_unused || self.done.load(Ordering::Acquire) >= ticket.0)
    }
}

const PAGES: u64 = 64;
const A: PhysAddr = PhysAddr::new(0xa_0000);
const B: PhysAddr = PhysAddr::new(0xb_0000);
const fn memory(phys: PhysAddr) -> Segment {
    Segment::new(phys, PAGES * PAGE_SIZE)
}

/// The first word of the higher chunk, which is given out first.
const WHERE: Iova = Iova::new(512 * PAGE_SIZE);

/// The hardware, for that address.
struct Device {
    memory: &'static ModelMemory,
    root: PhysAddr,
    table: Option<PhysAddr>,
    translation: Option<PhysAddr>,
}

impl Device {
    fn access(&mut self) -> Option<PhysAddr> {
        let address = |entry: u64| (entry != 0).then(|| PhysAddr::new(entry & !3));
        if self.translation.is_none() {
            if self.table.is_none() {
                self.table = address(load(&self.memory.table(self.root)[1]));
            }
            self.translation = address(load(&self.memory.table(self.table?)[0]));
        }
        self.translation
    }

    fn look(&mut self, iommu: &Iommu) {
        let is_gone = iommu.is_gone.load(Ordering::Acquire);
        let seen = self.access();
        assert!(
            seen.is_none() || seen == Some(B) || seen == Some(A) && !is_gone,
            "the device reaches {seen:?}"
        );
    }

    fn obey(mut self, iommu: &Iommu) {
        self.look(iommu);
        loop {
            let is_over = iommu.is_over.load(Ordering::Acquire);
            let requested = iommu.requested.load(Ordering::Acquire);
            let done = iommu.done.load(Ordering::Relaxed);
            if requested > done {
                self.look(iommu);
                self.translation = None;
                if iommu.domain.load(Ordering::Relaxed) > done {
                    self.table = None;
                }
                iommu.done.store(requested, Ordering::Release);
                self.look(iommu);
            } else if is_over {
                self.look(iommu);
                return;
            }
            thread::yield_now();
        }
    }
}

type Core = MapperCore<ChunkAllocator, Small, &'static Iommu, ManualClock>;
type Mapper = DmaMapper<ChunkAllocator, Small, &'static Iommu, ManualClock>;

/// On the heap: loom's stacks are small.
#[inline(never)]
fn claim(mapper: &Mapper, core: usize) -> Box<Core> {
    Box::new(mapper.core(CoreId(core)).expect("free"))
}

/// Leaked: what is dropped while a model fails would use loom after its end.
#[inline(never)]
fn mapper(iommu: &'static Iommu) -> &'static Mapper {
    let aperture = Aperture::new(IovaPfn::new(0), IovaPfn::new(1023), &[]).expect("pages");
    let config = ChunkConfig {
        zone_chunks: 2,
        retires: true,
        ..ChunkConfig::default()
    };
    let domain = Domain {
        allocator: ChunkAllocator::with_config(aperture, 2, config).expect("two cores"),
        table: Small(ModelTable::new(ModelMemory::new(4), CONFIG).expect("two levels")),
        invalidator: iommu,
        clock: ManualClock::new(),
    };
    // SAFETY: allocator, table and invalidator are this model's, and nothing else uses them. Pages
    // of a `ModelMemory` live on when they are freed: a mistake is found without undefined
    // behaviour.
    #[expect(unsafe_code, reason = "gives tables back, which is what is modelled")]
    let mapper =
        unsafe { DmaMapper::new_reclaiming(domain, Policy::DEFERRED, DeviceLimits::default()) };
    Box::leak(Box::new(mapper.expect("a valid policy")))
}

/// With a device, beside a core that flushes.
fn device_walks() {
    let iommu: &'static Iommu = Box::leak(Box::default());
    let mapper = mapper(iommu);
    let device = Device {
        memory: mapper.0.table.0.memory(),
        root: mapper.0.table.root(),
        table: None,
        translation: None,
    };
    let mut core = claim(mapper, 0);
    let device = thread::spawn(move || device.obey(iommu));
    let flushes = thread::spawn(move || mapper.flush().expect("the device answers"));
    let first = core.map(&[memory(A)], Direction::ToDevice).expect("room");
    assert_eq!(first.iova(), WHERE);
    core.unmap(first).expect("mapped");
    core.park().expect("the device answers");
    iommu.is_gone.store(true, Ordering::Release);
    let second = core.map(&[memory(B)], Direction::ToDevice).expect("room");
    assert_eq!(second.iova(), WHERE);
    flushes.join().expect("it ends");
    iommu.is_over.store(true, Ordering::Release);
    device.join().expect("it finds mappings");
    // What dropping it does is not what is explored.
    core::mem::forget((core, second));
}

/// Without a device, beside a core that translates.
fn core_walks() {
    let iommu: &'static Iommu = Box::leak(Box::new(Iommu {
        is_unused: true,
        ..Iommu::default()
    }));
    let mapper = mapper(iommu);
    let (mut core, mut other) = (claim(mapper, 0), claim(mapper, 1));
    let translates = thread::spawn(move || {
        let seen = other.translate(WHERE).map(|goes| goes.phys);
        let is_known = seen.is_none_or(|phys| phys == A || phys == B);
        assert!(is_known, "a core found {seen:?}");
        other
    });
    let first = core.map(&[memory(A)], Direction::ToDevice).expect("room");
    core.unmap(first).expect("mapped");
    core.park().expect("nothing fails");
    // Elsewhere where the table could not be given back, since the other was walking.
    let second = core.map(&[memory(B)], Direction::ToDevice).expect("room");
    let other = translates.join().expect("it finds mappings");
    core::mem::forget((core, other, second));
}

/// Explores a model as far as time allows.
fn explore(model: fn()) {
    let _alone = ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.max_branches = 100_000;
    builder.max_duration = Some(core::time::Duration::from_secs(15));
    builder.check(model);
}

#[test]
fn model_of_the_whole_lets_no_device_reach_what_is_unmapped() {
    explore(device_walks);
}

#[test]
fn model_of_the_whole_lets_no_core_walk_what_is_given_back() {
    explore(core_walks);
}
