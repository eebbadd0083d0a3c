//! A device and an IOTLB for tests, which cache everything until it is invalidated.
//!
//! [`ModelDevice`] walks the real tables through [`ModelMemory`]. Its [`ModelIotlb`] keeps every
//! translation and every table pointer that a walk has found, and answers from them first: real
//! hardware may do so, this one always does. A walk through a table page that was freed is a fault
//! of its own ([`DeviceFault::FreedTable`]): the memory keeps the pages for ever and knows which
//! are free.
//!
//! Walk and insertion are one step with respect to an invalidation (one lock), as in hardware whose
//! invalidations wait for the walks in flight. Commands take effect when their ticket is polled,
//! not before: a caller that does not wait is served stale translations.
//!
//! Left out: capacity (a real IOTLB evicts by itself, which makes it kinder than this one), speed.
#![expect(
    unsafe_code,
    reason = "implements the unsafe trait TableMemory, by indexing only"
)]

use alloc::{boxed::Box, collections::BTreeMap, sync::Arc, vec::Vec};
use core::marker::PhantomData;

use address::{Iova, PAGE_SHIFT, PAGE_SIZE, PhysAddr};
use iova::{Access, IovaPfn};
use lines::{AtomicBool, AtomicU64, Lock, Ordering};
use thiserror::Error;

use crate::invalidate::{Command, InvalidateError, Invalidator, Ticket};
use crate::table::{ENTRIES, Entry, Format, Table, TableMemory, format::INDEX_BITS};

/// Address at which the first page of a [`ModelMemory`] seems to lie.
const BASE: u64 = 0x10_0000;

struct Page {
    entries: Table,
    is_used: AtomicBool,
}

/// A fixed number of table pages that are never really freed.
pub struct ModelMemory {
    pages: Box<[Page]>,
    free: Lock<Vec<usize>>,
}

impl ModelMemory {
    /// `pages` pages of 4 KiB.
    pub fn new(pages: usize) -> Self {
        Self {
            pages: (0..pages)
                .map(|_| Page {
                    entries: core::array::from_fn(|_| AtomicU64::new(0)),
                    is_used: AtomicBool::new(false),
                })
                .collect(),
            free: Lock::new((0..pages).rev().collect()),
        }
    }

    /// Pages in use.
    pub fn used(&self) -> usize {
        self.pages.len() - self.free.lock().len()
    }

    fn index(&self, page: PhysAddr) -> Option<usize> {
        let offset = page.raw().checked_sub(BASE)?;
        let index = (offset >> PAGE_SHIFT) as usize;
        (index < self.pages.len()).then_some(index)
    }

    /// Reads an entry of a table page as a device does; an error where the page is free.
    fn device_read(&self, page: PhysAddr, index: usize) -> Result<u64, DeviceFault> {
        let slot = self.index(page).ok_or(DeviceFault::FreedTable { page })?;
        if !self.pages[slot].is_used.load(Ordering::Acquire) {
            return Err(DeviceFault::FreedTable { page });
        }
        Ok(self.pages[slot].entries[index].load(Ordering::Acquire))
    }
}

// SAFETY: an address names one page of the slice, given to one caller at a time by the list of free
// pages and zeroed then; `entries` indexes the slice, which neither grows nor moves while `self` is
// borrowed.
unsafe impl TableMemory for ModelMemory {
    fn alloc(&self) -> Option<PhysAddr> {
        let slot = self.free.lock().pop()?;
        let page = &self.pages[slot];
        for entry in &page.entries {
            entry.store(0, Ordering::Relaxed);
        }
        page.is_used.store(true, Ordering::Release);
        Some(PhysAddr::new(BASE + slot as u64 * PAGE_SIZE))
    }

    unsafe fn free(&self, page: PhysAddr) {
        let slot = self.index(page).expect("a page of this memory");
        let was = self.pages[slot].is_used.swap(false, Ordering::AcqRel);
        assert!(was, "table page {page:#x} was freed twice");
        self.free.lock().push(slot);
    }

    unsafe fn entries(&self, page: PhysAddr) -> &Table {
        &self.pages[self.index(page).expect("a page of this memory")].entries
    }
}

/// Reason why an access failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DeviceFault {
    /// Nothing is mapped there.
    #[error("nothing is mapped at {iova:#x}")]
    NotMapped {
        /// Address of the access.
        iova: Iova,
    },
    /// The mapping does not allow this.
    #[error("{iova:#x} allows {allowed:?}")]
    Denied {
        /// Address of the access.
        iova: Iova,
        /// The access that is allowed.
        allowed: Access,
    },
    /// The walk went through a page that was freed: the code that freed it did not wait for the
    /// invalidation.
    #[error("the walk went through the freed table page {page:#x}")]
    FreedTable {
        /// The page.
        page: PhysAddr,
    },
}

#[derive(Default)]
struct Cached {
    /// By page number: where, and what is allowed.
    translations: BTreeMap<u64, (PhysAddr, Access)>,
    /// By level and page number shifted to it: the table at that level.
    tables: BTreeMap<(u32, u64), PhysAddr>,
    /// Submitted and not carried out.
    pending: BTreeMap<u64, Vec<Command>>,
    issued: u64,
    /// Submissions from now on that will time out.
    dead: u32,
    commands: u64,
}

impl Cached {
    fn obey(&mut self, command: Command) {
        self.commands += 1;
        match command {
            Command::Pages(range) => {
                let (first, last) = (range.first().raw(), range.last().raw());
                let pages: Vec<u64> = self
                    .translations
                    .range(first..=last)
                    .map(|(page, _)| *page)
                    .collect();
                for page in pages {
                    self.translations.remove(&page);
                }
            }
            Command::Domain | Command::Global => {
                self.translations.clear();
                self.tables.clear();
            }
        }
    }
}

/// An IOTLB and page-walk cache that serve what they remember.
#[derive(Default)]
pub struct ModelIotlb {
    cached: Lock<Cached>,
}

impl ModelIotlb {
    /// Empty.
    pub fn new() -> Self {
        Self::default()
    }

    /// The next `submissions` time out, and nothing is forgotten.
    pub fn die_for(&self, submissions: u32) {
        self.cached.lock().dead = submissions;
    }

    /// Commands carried out so far.
    pub fn commands(&self) -> u64 {
        self.cached.lock().commands
    }
}

impl Invalidator for ModelIotlb {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        let mut cached = self.cached.lock();
        cached.issued += 1;
        let ticket = cached.issued;
        if cached.dead > 0 {
            cached.dead -= 1;
            // No entry in `pending`; the top bit marks the reason.
            return Ok(Ticket(ticket | 1 << 63));
        }
        cached.pending.insert(ticket, commands.to_vec());
        Ok(Ticket(ticket))
    }

    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        if ticket.0 >> 63 == 1 {
            return Err(InvalidateError::TimedOut {
                waited_ns: 1_000_000_000,
            });
        }
        let mut cached = self.cached.lock();
        for command in cached.pending.remove(&ticket.0).unwrap_or_default() {
            cached.obey(command);
        }
        Ok(true)
    }

    /// Returns whether no batch is still to be polled: so that cores under test meet.
    fn is_idle(&self) -> bool {
        self.cached.lock().pending.is_empty()
    }
}

/// A device that emits IOVAs.
pub struct ModelDevice<F> {
    memory: Arc<ModelMemory>,
    iotlb: Arc<ModelIotlb>,
    root: PhysAddr,
    levels: u32,
    format: PhantomData<fn() -> F>,
}

impl<F: Format> ModelDevice<F> {
    /// A device behind the table at `root`, whose pages come from `memory`, and behind `iotlb`.
    pub fn new(
        memory: Arc<ModelMemory>,
        iotlb: Arc<ModelIotlb>,
        root: PhysAddr,
        levels: u32,
    ) -> Self {
        Self {
            memory,
            iotlb,
            root,
            levels,
            format: PhantomData,
        }
    }

    /// Returns the memory that an access to `iova` for `access` reaches, by a cached translation,
    /// else by a walk, which is cached.
    ///
    /// # Errors
    /// [`DeviceFault`].
    pub fn access(&self, iova: Iova, access: Access) -> Result<PhysAddr, DeviceFault> {
        let cached = &mut *self.iotlb.cached.lock();
        let page = IovaPfn::of(iova).raw();
        let (phys, allowed) = match cached.translations.get(&page) {
            Some(found) => *found,
            None => {
                let found = self.walk(iova, &mut cached.tables)?;
                cached.translations.insert(page, found);
                found
            }
        };
        if allowed as u8 & access as u8 != access as u8 {
            return Err(DeviceFault::Denied { iova, allowed });
        }
        Ok(PhysAddr::new(phys.raw() | iova.raw() & (PAGE_SIZE - 1)))
    }

    /// From the lowest table that is remembered down to the page.
    fn walk(
        &self,
        iova: Iova,
        tables: &mut BTreeMap<(u32, u64), PhysAddr>,
    ) -> Result<(PhysAddr, Access), DeviceFault> {
        let pfn = IovaPfn::of(iova).raw();
        let shift = |level: u32| INDEX_BITS * level;
        let (mut level, mut table) = (1..self.levels)
            .find_map(|level| {
                let table = tables.get(&(level, pfn >> shift(level)))?;
                Some((level, *table))
            })
            .unwrap_or((self.levels, self.root));
        if pfn >> shift(self.levels) != 0 {
            return Err(DeviceFault::NotMapped { iova });
        }
        loop {
            let index = (pfn >> shift(level - 1)) as usize & (ENTRIES - 1);
            match F::decode(self.memory.device_read(table, index)?, level) {
                Entry::Empty => return Err(DeviceFault::NotMapped { iova }),
                Entry::Table(next) => {
                    level -= 1;
                    table = next;
                    tables.insert((level, pfn >> shift(level)), table);
                }
                Entry::Leaf(leaf) => {
                    let inside = pfn & ((1 << shift(level - 1)) - 1);
                    let phys = PhysAddr::new(leaf.phys.raw() + (inside << PAGE_SHIFT));
                    return Ok((phys, leaf.access));
                }
            }
        }
    }
}
