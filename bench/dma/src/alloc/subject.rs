//! What the loops allocate from: our allocators through the traits of `iova`, their peers through as little more.

use address::{PAGE_SHIFT, PhysAddr};
use anyhow::{Context, Result, ensure};
use dma_peers::{IdentityAllocator, IdentityCore};
use iova::{Access, CoreAllocator, CoreId, IovaAllocator, IovaPfn, IovaRange, Request, Stats};

/// One core's way to ranges.
pub trait Worker: Send + 'static {
    /// What stands for a range until it is freed.
    type Range: Copy + Send + 'static;

    /// A range of `pages` pages, aligned to the power of two that holds them where the allocator can align.
    fn alloc(&mut self, pages: u64) -> Self::Range;

    /// Takes it back.
    fn free(&mut self, range: Self::Range);
}

/// A worker whose ranges of one page can be handed to another core as a word.
pub trait OnePage: Worker {
    /// The word.
    fn page(range: Self::Range) -> u64;

    /// The range again.
    fn at(page: u64) -> Self::Range;
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

    /// What it says about itself, if it does.
    fn stats(&self) -> Option<Stats> {
        None
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
        let core = self
            .0
            .claim(CoreId(id))
            .with_context(|| format!("core {id}"))?;
        Ok(Core(core))
    }

    fn stats(&self) -> Option<Stats> {
        Some(self.0.stats())
    }
}

/// A core's handle.
pub struct Core<C>(C);

/// The range of one page.
#[inline]
fn one_page(page: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(page), 1).expect("it was a range")
}

impl<C: CoreAllocator + 'static> Worker for Core<C> {
    type Range = IovaRange;

    // As the allocator's own: what is measured is a caller that has it inlined.
    #[inline(always)]
    fn alloc(&mut self, pages: u64) -> IovaRange {
        // Not `expect`: it takes the error by reference, so that the range goes through memory with it.
        match self.0.alloc(Request::pages(pages)) {
            Ok(range) => range,
            Err(_) => panic!("the space is far larger than the window"),
        }
    }

    #[inline(always)]
    fn free(&mut self, range: IovaRange) {
        self.0.free(range).expect("it was allocated");
    }
}

impl<C: CoreAllocator + 'static> OnePage for Core<C> {
    #[inline]
    fn page(range: IovaRange) -> u64 {
        range.first().raw()
    }

    #[inline]
    fn at(page: u64) -> IovaRange {
        one_page(page)
    }
}

/// Several spaces of the same kind, so that threads share nothing: thread `t` is core `t / n` of space `t % n`.
pub struct Apart<S>(pub Vec<S>);

impl<S: Subject> Subject for Apart<S> {
    type Worker = S::Worker;

    fn worker(&self, id: usize) -> Result<Self::Worker> {
        let spaces = self.0.len();
        ensure!(spaces > 0, "no space, no worker");
        self.0[id % spaces].worker(id / spaces)
    }
}

/// The identity allocator wants memory to name: every allocation is of other pages than those still mapped.
pub struct Identity(pub IdentityAllocator);

impl Subject for Identity {
    type Worker = IdentityWorker;

    fn worker(&self, id: usize) -> Result<IdentityWorker> {
        let core = self
            .0
            .claim(CoreId(id))
            .with_context(|| format!("core {id}"))?;
        Ok(IdentityWorker {
            core,
            base: id as u64 * IDENTITY_PAGES,
            next: 0,
        })
    }

    fn stats(&self) -> Option<Stats> {
        Some(self.0.stats())
    }
}

/// Physical pages that one core's buffers lie in, 16 GiB: a window of 65,536 has long let go of a page when its turn
/// comes again.
const IDENTITY_PAGES: u64 = 1 << 22;

/// A core's handle and the memory its buffers lie in.
pub struct IdentityWorker {
    core: IdentityCore,
    base: u64,
    next: u64,
}

impl Worker for IdentityWorker {
    type Range = IovaRange;

    #[inline]
    fn alloc(&mut self, pages: u64) -> IovaRange {
        let size = pages.next_power_of_two();
        let start = (self.next + size - 1) & !(size - 1);
        self.next = (start + size) & (IDENTITY_PAGES - 1);
        let page = self.base + (start & (IDENTITY_PAGES - 1));
        let phys = PhysAddr::new(page << PAGE_SHIFT);
        let range = self
            .core
            .alloc_for(Request::pages(pages), phys, Access::ReadWrite);
        range.expect("the space is far larger than the window")
    }

    #[inline]
    fn free(&mut self, range: IovaRange) {
        self.core.free(range).expect("it was allocated");
    }
}

impl OnePage for IdentityWorker {
    #[inline]
    fn page(range: IovaRange) -> u64 {
        range.first().raw()
    }

    #[inline]
    fn at(page: u64) -> IovaRange {
        one_page(page)
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
    type Range = u64;

    #[inline]
    fn alloc(&mut self, _: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        self.0
    }

    #[inline]
    fn free(&mut self, range: u64) {
        std::hint::black_box(range);
    }
}

impl OnePage for NoWorker {
    #[inline]
    fn page(range: u64) -> u64 {
        range
    }

    #[inline]
    fn at(page: u64) -> u64 {
        page
    }
}
