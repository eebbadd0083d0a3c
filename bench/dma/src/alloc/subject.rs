//! The subjects of the loops: our allocators through the traits of `iova`, Linux's, and other
//! projects', all through one trait whose ranges are a word.
//!
//! Every allocator is one call that is not inlined ([`Called`]), with sizes and limits that the
//! compiler does not know. [`Core`] alone is inlined, as a caller in Rust may have it.

use std::sync::Arc;

use address::{PAGE_SHIFT, PhysAddr};
use anyhow::{Context, Result, ensure};
use dma_linux::{Domain, Linux};
use dma_peers::{IdentityAllocator, IdentityCore};
use iova::{Access, CoreAllocator, CoreId, IovaAllocator, IovaPfn, IovaRange, Request};

use super::FIRST_PAGE;

/// Position in a slot of the number of pages, in bits.
const PAGES_SHIFT: u32 = 48;

/// Returns the word that a range is in a window or a ring, of every allocator: its first page and,
/// above, the number of pages.
#[inline(always)]
pub fn slot(first: u64, pages: u64) -> u64 {
    first | pages << PAGES_SHIFT
}

/// First page and pages of a slot.
#[inline(always)]
pub fn parts(slot: u64) -> (u64, u64) {
    (slot & ((1 << PAGES_SHIFT) - 1), slot >> PAGES_SHIFT)
}

/// One core's way to ranges.
pub trait Worker: Send + 'static {
    /// Called by a thread before it goes on with what another one did.
    fn enter(&mut self) {}

    /// A range of `pages` pages, aligned to the power of two that holds them where the allocator
    /// can align, none above `last`, as a [`slot`]; 0 where there is none. Some give more pages
    /// than were asked for.
    fn alloc(&mut self, pages: u64, last: u64) -> u64;

    /// Takes it back.
    fn free(&mut self, slot: u64);
}

/// An allocator that several cores use.
pub trait Subject {
    /// One core's part.
    type Worker: Worker;

    /// The worker of core `id`.
    ///
    /// # Errors
    /// There is none for this core.
    fn worker(&self, id: usize) -> Result<Self::Worker>;
}

/// A worker behind calls that are not inlined.
pub struct Called<T>(pub T);

impl<S: Subject> Subject for Called<S> {
    type Worker = Called<S::Worker>;

    fn worker(&self, id: usize) -> Result<Self::Worker> {
        Ok(Called(self.0.worker(id)?))
    }
}

impl<W: Worker> Worker for Called<W> {
    fn enter(&mut self) {
        self.0.enter();
    }

    #[inline(never)]
    fn alloc(&mut self, pages: u64, last: u64) -> u64 {
        self.0.alloc(pages, last)
    }

    #[inline(never)]
    fn free(&mut self, slot: u64) {
        self.0.free(slot);
    }
}

/// One of our allocators.
pub struct Ours<A>(pub A);

impl<A: IovaAllocator> Subject for Ours<A>
where
    A::Core: 'static,
{
    type Worker = Core<A::Core>;

    fn worker(&self, id: usize) -> Result<Self::Worker> {
        let core = self.0.claim(CoreId(id));
        Ok(Core(core.with_context(|| format!("core {id}"))?))
    }
}

/// A core's handle.
pub struct Core<C>(pub C);

/// The slot of a range.
#[inline(always)]
fn slot_of(range: IovaRange) -> u64 {
    slot(range.first().raw(), range.pages())
}

/// The range of a slot.
#[inline(always)]
fn range(slot: u64) -> IovaRange {
    let (first, pages) = parts(slot);
    IovaRange::new(IovaPfn::new(first), pages).expect("it was a range")
}

impl<C: CoreAllocator + 'static> Worker for Core<C> {
    #[inline(always)]
    fn alloc(&mut self, pages: u64, last: u64) -> u64 {
        let request = Request::pages(pages).at_most(IovaPfn::new(last));
        self.0.alloc(request).map_or(0, slot_of)
    }

    #[inline(always)]
    fn free(&mut self, slot: u64) {
        self.0.free(range(slot)).expect("it was allocated");
    }
}

/// Linux's: the kernel's own functions, called through a pointer; caches are emptied before an
/// allocation fails, as the kernel's DMA API has it.
pub struct OfLinux(pub Arc<Domain>);

impl OfLinux {
    /// An empty space.
    ///
    /// # Errors
    /// No memory.
    pub fn new(linux: &'static Linux) -> Result<Self> {
        Ok(Self(Arc::new(Domain::new(linux, FIRST_PAGE)?)))
    }
}

impl Subject for OfLinux {
    type Worker = LinuxCore;

    fn worker(&self, id: usize) -> Result<LinuxCore> {
        ensure!(id < dma_linux::CPUS, "no core {id}");
        let mut core = LinuxCore {
            domain: Arc::clone(&self.0),
            id,
        };
        core.enter();
        Ok(core)
    }
}

/// A CPU's part of it.
pub struct LinuxCore {
    domain: Arc<Domain>,
    id: usize,
}

impl Worker for LinuxCore {
    fn enter(&mut self) {
        self.domain.linux().enter(self.id);
    }

    #[inline(always)]
    fn alloc(&mut self, pages: u64, last: u64) -> u64 {
        match self.domain.alloc(pages, last, true) {
            0 => 0,
            first => slot(first, pages),
        }
    }

    #[inline(always)]
    fn free(&mut self, slot: u64) {
        let (first, pages) = parts(slot);
        self.domain.free(first, pages);
    }
}

/// Several spaces of the same kind, so that threads share nothing: thread `t` is core `t / n` of
/// space `t % n`.
pub struct Apart<S>(pub Vec<S>);

impl<S: Subject> Subject for Apart<S> {
    type Worker = S::Worker;

    fn worker(&self, id: usize) -> Result<Self::Worker> {
        let spaces = self.0.len();
        ensure!(spaces > 0, "no space, no worker");
        self.0[id % spaces].worker(id / spaces)
    }
}

/// The identity allocator wants memory to name: every allocation is of other pages than those still
/// mapped.
pub struct Identity(pub IdentityAllocator);

impl Subject for Identity {
    type Worker = IdentityWorker;

    fn worker(&self, id: usize) -> Result<IdentityWorker> {
        let core = self.0.claim(CoreId(id));
        Ok(IdentityWorker {
            core: core.with_context(|| format!("core {id}"))?,
            base: id as u64 * IDENTITY_PAGES,
            next: 0,
        })
    }
}

/// Physical pages that one core's buffers lie in, 16 GiB: a window of 65,536 has long released a
/// page when its turn comes again.
const IDENTITY_PAGES: u64 = 1 << 22;

/// A core's handle and the memory its buffers lie in.
pub struct IdentityWorker {
    core: IdentityCore,
    base: u64,
    next: u64,
}

impl Worker for IdentityWorker {
    #[inline]
    fn alloc(&mut self, pages: u64, _: u64) -> u64 {
        let size = pages.next_power_of_two();
        let start = (self.next + size - 1) & !(size - 1);
        self.next = (start + size) & (IDENTITY_PAGES - 1);
        let page = self.base + (start & (IDENTITY_PAGES - 1));
        let phys = PhysAddr::new(page << PAGE_SHIFT);
        let request = Request::pages(pages);
        let range = self.core.alloc_for(request, phys, Access::ReadWrite);
        range.map_or(0, slot_of)
    }

    #[inline]
    fn free(&mut self, slot: u64) {
        let freed = self.core.free(range(slot));
        freed.expect("it was allocated");
    }
}

/// The least that an allocator of single pages can be: one core's own stack, which checks nothing
/// and knows no limits.
pub struct Unchecked;

/// The stack, and the last page that was never in it.
pub struct Stack {
    free: Vec<u64>,
    last: u64,
}

impl Subject for Unchecked {
    type Worker = Stack;

    fn worker(&self, _: usize) -> Result<Stack> {
        Ok(Stack {
            free: Vec::with_capacity(1 << 12),
            last: 0,
        })
    }
}

impl Worker for Stack {
    #[inline(always)]
    fn alloc(&mut self, pages: u64, _: u64) -> u64 {
        let page = self.free.pop().unwrap_or_else(|| {
            self.last += 1;
            self.last
        });
        slot(page, pages)
    }

    #[inline(always)]
    fn free(&mut self, slot: u64) {
        self.free.push(parts(slot).0);
    }
}

/// No allocator: what the loop itself costs.
pub struct Nothing;

/// A worker that does nothing.
pub struct NoWorker(u64);

impl Subject for Nothing {
    type Worker = NoWorker;

    fn worker(&self, id: usize) -> Result<NoWorker> {
        Ok(NoWorker(id as u64))
    }
}

impl Worker for NoWorker {
    #[inline]
    fn alloc(&mut self, _: u64, _: u64) -> u64 {
        self.0 = (self.0 + 1) & 0xffff_ffff;
        self.0 | 1
    }

    #[inline]
    fn free(&mut self, slot: u64) {
        std::hint::black_box(slot);
    }
}
