//! A container as the table of a mapper, and as its invalidator.
//!
//! **Record.** The kernel has no query for mappings, so [`VfioMap`] keeps a record: mappings that
//! are *open*, and those that are *closed*, unmapped by the mapper and within the device's reach
//! until it invalidates. Map makes a call and an entry; unmap moves entries from one list to the
//! other; an invalidation makes the calls for closed ones, neighbours together. Each entry keeps
//! its memory alive, so that is given back only after the call has succeeded, even if the buffer is
//! dropped.
//!
//! **One call for several mappings.** Type 1, version 2, unmaps every mapping that lies in a range,
//! as long as the range begins and ends with one. So a run of closed mappings, with IOVAs between
//! them where nothing is mapped, goes in one call; an open one between them ends the run.
//!
//! **Threads.** Any; a lock around the record is held while the kernel is called. The kernel has
//! one such lock for each container itself.
//!
//! **Cost.** A call for each map (it pins memory), and one for each run that is invalidated; beside
//! them, a lookup in a tree.
//!
//! UNSAFETY: after a map the device reaches memory that this process names, which no type can
//! express: the module ensures that the memory is known, and alive.
#![expect(
    unsafe_code,
    reason = "it answers for the memory that a device reaches"
)]

mod external;
mod index;
mod kernel;

pub use external::{CloseError, ExternalMap, ExternalMapError, ExternalMemory, ExternalUnmapError};
pub use kernel::{Calls, Kernel, MapRefused, UnmapFailed};

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dma_map::IoMap;
use dma_map::address::{Iova, PAGE_SIZE, PhysAddr};
use dma_map::invalidate::{Command, InvalidateError, Invalidator, Ticket};
use dma_map::iova::{Access, IovaPfn, IovaRange};
use dma_map::table::{MapError, Translation, UnmapError};
use thiserror::Error;

use crate::error::VfioError;
use crate::group::Container;
use crate::memory::DmaBuffer;
use crate::sys::Pages;
use index::{MappingIndex, extent};
use kernel::{is_full, unmap_exactly};

/// Reason why memory was not mapped: the source of a mapper's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// It lies in no buffer of this map, or past the end of one.
    #[error("{pages} pages at {phys:#x} lie in no buffer of this map (`VfioMap::allocate`)")]
    Unknown {
        /// The address given.
        phys: PhysAddr,
        /// Pages.
        pages: u64,
    },
    /// The kernel refused.
    #[error(transparent)]
    Call(#[from] MapRefused),
}

/// Mappings that the kernel has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mappings {
    /// Of the mapper.
    pub open: usize,
    /// That the mapper has ended, and a device may still reach.
    pub closed: usize,
}

/// The table of a mapper that is a VFIO container, and its invalidator: give it a clone for each.
/// Its "physical" addresses are those of this process.
///
/// Only memory that it knows is mapped, so that no caller can expose other memory to a device.
/// Mappings that are left when the last clone is dropped are unmapped; memory that the kernel will
/// not unmap is never given back.
pub struct VfioMap<K: Kernel = Container>(Arc<Shared<K>>);

impl<K: Kernel> Clone for VfioMap<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K: Kernel> fmt::Debug for VfioMap<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("VfioMap").field(&self.mappings()).finish()
    }
}

struct Shared<K: Kernel> {
    kernel: K,
    book: Mutex<MappingState>,
}

/// Record of the mappings. `open` and `closed` have no page in common.
#[derive(Default)]
struct MappingState {
    /// Buffers by address; some may be gone.
    memory: BTreeMap<u64, Weak<Pages>>,
    /// Mapped.
    open: MappingIndex<Entry>,
    /// Unmapped by the mapper, not by the kernel.
    closed: MappingIndex<Entry>,
    calls: Calls,
}

struct Entry {
    phys: PhysAddr,
    access: Access,
    /// Keeps the memory alive while the device may reach it.
    memory: Arc<Pages>,
}

impl VfioMap {
    /// The map of a container, to which its groups are attached.
    ///
    /// # Errors
    /// [`VfioError`]: the IOMMU cannot map pages of 4 KiB, or does not say what it reserves.
    pub fn new(container: Container) -> Result<Self, VfioError> {
        container.info()?.aperture()?;
        Ok(Self::over(container))
    }
}

impl<K: Kernel> VfioMap<K> {
    /// The map over a kernel that answers the calls.
    pub fn over(kernel: K) -> Self {
        let book = Mutex::default();
        Self(Arc::new(Shared { kernel, book }))
    }

    /// New memory of at least so many bytes that can be mapped here, zeroed.
    ///
    /// # Errors
    /// [`VfioError::Call`] of `mmap`.
    pub fn allocate(&self, bytes: usize) -> Result<DmaBuffer, VfioError> {
        let buffer = DmaBuffer::new(bytes)?;
        let mut book = self.0.book();
        book.memory.retain(|_, pages| pages.strong_count() > 0);
        let known = Arc::downgrade(&buffer.0);
        book.memory.insert(buffer.0.address(), known);
        Ok(buffer)
    }

    /// Calls made so far.
    pub fn calls(&self) -> Calls {
        self.0.book().calls
    }

    /// Mappings there are now.
    pub fn mappings(&self) -> Mappings {
        let book = self.0.book();
        Mappings {
            open: book.open.len(),
            closed: book.closed.len(),
        }
    }

    /// The container, or its substitute.
    pub fn kernel(&self) -> &K {
        &self.0.kernel
    }
}

impl<K: Kernel> IoMap for VfioMap<K> {
    type Error = Refused;

    /// [`MapError::Full`] where there are as many mappings as may be, or as much locked memory.
    fn map(
        &self,
        range: IovaRange,
        phys: PhysAddr,
        access: Access,
    ) -> Result<(), MapError<Refused>> {
        let mut book = self.0.book();
        if !phys.is_aligned(PAGE_SIZE) {
            return Err(MapError::PhysMisaligned { phys });
        }
        let in_the_way = book.open.overlapping(range);
        let in_the_way = in_the_way.or_else(|| book.closed.overlapping(range));
        if let Some(other) = in_the_way {
            return Err(MapError::AlreadyMapped {
                iova: other.range.start().max(range.start()),
                leaf_pages: other.range.pages(),
            });
        }
        let pages = range.pages();
        let memory = book.memory_at(phys, pages);
        let memory = memory.ok_or(MapError::Backend(Refused::Unknown { phys, pages }))?;
        let kernel = &self.0.kernel;
        let map = |calls: &mut Calls| {
            calls.maps += 1;
            // SAFETY: the memory is mapped as long as `memory` lives, which `Entry` keeps until the
            // range is unmapped, or `Shared::drop` for ever. It is seen as atomics only (`Pages`).
            unsafe { kernel.map_dma(range, phys.raw(), access) }
        };
        let mut mapped = map(&mut book.calls);
        // Closed mappings of any core count for both limits. So do idle ones, which the mapper
        // tears down.
        if mapped.is_err_and(is_full)
            && !book.closed.is_empty()
            && book.invalidate(kernel, 0, u64::MAX).is_ok()
        {
            mapped = map(&mut book.calls);
        }
        mapped.map_err(|errno| {
            let refused = MapRefused::new(range, phys.raw(), errno);
            match refused.is_full() {
                true => MapError::Full(refused.into()),
                false => MapError::Backend(refused.into()),
            }
        })?;
        let entry = Entry {
            phys,
            access,
            memory,
        };
        book.open.insert(range, entry);
        Ok(())
    }

    /// Takes the mappings of which `range` consists out of the record: the device reaches them
    /// until they are invalidated.
    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError<Refused>> {
        let mut book = self.0.book();
        let book = &mut *book;
        let mut next = range.first().raw();
        while next <= range.last().raw() {
            let page = IovaRange::new(IovaPfn::new(next), 1).expect("a page of a range");
            let iova = page.start();
            let entry = book.open.overlapping(page);
            let entry = entry.ok_or(UnmapError::NotMapped { iova })?;
            if !range.contains(entry.range) {
                let leaf_pages = entry.range.pages();
                return Err(UnmapError::InsideHugeLeaf { iova, leaf_pages });
            }
            next = entry.range.last().raw() + 1;
        }
        let mut next = range.first().raw();
        while next <= range.last().raw() {
            let entry = book.open.remove(IovaPfn::new(next));
            let entry = entry.expect("it was seen");
            next = entry.range.last().raw() + 1;
            book.closed.insert(entry.range, entry.content);
        }
        Ok(())
    }

    fn lookup(&self, iova: Iova) -> Option<Translation> {
        let book = self.0.book();
        let entry = book
            .open
            .overlapping(IovaRange::new(IovaPfn::of(iova), 1)?)?;
        let offset = iova.offset_from(entry.range.start())?;
        Some(Translation {
            phys: entry.content.phys.checked_add(offset)?,
            access: entry.content.access,
            leaf_pages: 1,
        })
    }
}

impl MappingState {
    /// Returns the buffer in which all of that memory lies.
    fn memory_at(&self, phys: PhysAddr, pages: u64) -> Option<Arc<Pages>> {
        let (start, memory) = self.memory.range(..=phys.raw()).next_back()?;
        let memory = memory.upgrade()?;
        let end = pages.checked_mul(PAGE_SIZE)?.checked_add(phys.raw())?;
        (end <= start + memory.len() as u64).then_some(memory)
    }

    /// Has the kernel unmap the closed mappings that have a page from `first` to `last`.
    fn invalidate(
        &mut self,
        kernel: &impl Kernel,
        first: u64,
        last: u64,
    ) -> Result<(), UnmapFailed> {
        let found = self.closed.touching(first, last);
        let found: Vec<IovaRange> = found.map(|entry| entry.range).collect();
        let open = &self.open;
        let has_none_between = |one: &IovaRange, other: &IovaRange| {
            let (end, start) = (one.last().raw() + 1, other.first().raw());
            end == start || open.touching(end, start - 1).next().is_none()
        };
        for run in found.chunk_by(has_none_between) {
            let (whole, pages) = extent(run.iter().copied()).expect("no run is empty");
            self.calls.unmaps += 1;
            unmap_exactly(kernel, whole, pages)?;
            for range in run {
                self.closed.remove(range.first());
            }
        }
        Ok(())
    }
}

impl<K: Kernel> Shared<K> {
    fn book(&self) -> MutexGuard<'_, MappingState> {
        // Every critical section leaves the book whole, even if it panics.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Kernel> Drop for Shared<K> {
    fn drop(&mut self) {
        let book = self.book.get_mut().unwrap_or_else(PoisonError::into_inner);
        book.closed.append(&mut book.open);
        if book.invalidate(&self.kernel, 0, u64::MAX).is_err() && self.kernel.detach_all().is_err()
        {
            // A device may reach the memory: it is leaked rather than reused.
            book.closed
                .take()
                .for_each(|entry| mem::forget(entry.memory));
        }
    }
}

/// The call that unmaps is the invalidation: when it returns, both are done. So nothing is
/// submitted that would have to be waited for.
impl<K: Kernel> Invalidator for VfioMap<K> {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        let mut book = self.0.book();
        for command in commands {
            let (first, last) = match command {
                Command::Pages(range) => (range.first().raw(), range.last().raw()),
                Command::Domain | Command::Global => (0, u64::MAX),
            };
            let done = book.invalidate(&self.0.kernel, first, last);
            done.map_err(|failed| InvalidateError::Stopped {
                status: match failed {
                    UnmapFailed::Call { errno, .. } => errno.0.unsigned_abs().into(),
                    UnmapFailed::Bytes { .. } => libc::EIO.unsigned_abs().into(),
                },
            })?;
        }
        Ok(Ticket(0))
    }

    fn poll(&self, _ticket: Ticket) -> Result<bool, InvalidateError> {
        Ok(true)
    }

    /// One by one, neighbours would take a call each.
    fn whole_domain_from(&self) -> usize {
        2
    }
}

#[cfg(test)]
mod tests;
