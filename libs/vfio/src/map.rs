//! A container as what a mapper maps in, and as what makes the device forget.
//!
//! **The book.** The kernel cannot be asked what is mapped where, so [`VfioMap`] keeps a list: mappings that are *open*, and those
//! that are *closed*, unmapped by the mapper and within the device's reach until it invalidates. Map makes a call and an entry; unmap
//! moves entries from one list to the other; an invalidation makes the calls for closed ones, neighbours together. Each entry
//! keeps its memory alive, so that is given back only after the call has succeeded, whatever becomes of the buffer.
//!
//! **Why one call may cover several.** Type 1, version 2, unmaps every mapping that lies in a range, as long as the range begins
//! and ends with one. So a run of closed mappings, with IOVAs between them where nothing is mapped, goes in one call; an open one
//! between them ends the run.
//!
//! **Threads.** Any; a lock around the book is held while the kernel is called. The kernel has one such lock for each container itself.
//!
//! **Cost.** A call for each map (it pins memory), and one for each run that is invalidated; a look in a tree beside them.
//!
//! UNSAFETY: after a map the device reaches memory that this process names, which no type can express: the module answers
//! for the memory being known, and alive.
#![expect(
    unsafe_code,
    reason = "it answers for the memory that a device reaches"
)]

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dma_map::IoMap;
use dma_map::address::{Iova, PAGE_SHIFT, PAGE_SIZE, PhysAddr};
use dma_map::invalidate::{Command, InvalidateError, Invalidator, Ticket};
use dma_map::iova::{Access, IovaPfn, IovaRange};
use dma_map::table::{MapError, Translation, UnmapError};
use thiserror::Error;

use crate::error::{Errno, VfioError};
use crate::group::Container;
use crate::memory::DmaBuffer;
use crate::sys::{self, Pages};
use crate::uapi::{DmaMap, DmaUnmap, IOMMU_UNMAP_DMA, MAP_READ, MAP_WRITE, Sized32};

/// The two calls, so that tests can do without an IOMMU.
///
/// # Safety
/// When `unmap_dma` has answered `Ok`, no device reaches what was mapped in the range before.
pub unsafe trait Kernel: Send + Sync {
    /// `VFIO_IOMMU_MAP_DMA`: `range` goes to the memory at `vaddr` in this process.
    ///
    /// # Errors
    /// [`Errno`]; nothing is mapped then.
    ///
    /// # Safety
    /// Until an [`unmap_dma`](Self::unmap_dma) of the range has succeeded, the memory stays mapped in this process, and is accessed in
    /// no way that its change by somebody else would break.
    unsafe fn map_dma(&self, range: IovaRange, vaddr: u64, access: Access) -> Result<(), Errno>;

    /// `VFIO_IOMMU_UNMAP_DMA`: unmaps every mapping in `range`, which begins and ends with one. Gives the bytes unmapped.
    ///
    /// # Errors
    /// [`Errno`]; what is mapped then is not known.
    fn unmap_dma(&self, range: IovaRange) -> Result<u64, Errno>;
}

// SAFETY: the kernel clears the entries, invalidates, and unpins the memory before it answers.
unsafe impl Kernel for Container {
    unsafe fn map_dma(&self, range: IovaRange, vaddr: u64, access: Access) -> Result<(), Errno> {
        let flags = match access {
            Access::Read => MAP_READ,
            Access::Write => MAP_WRITE,
            Access::ReadWrite => MAP_READ | MAP_WRITE,
        };
        let argument = DmaMap {
            flags,
            vaddr,
            iova: range.start().raw(),
            size: range.len().ok_or(Errno(libc::EINVAL))?,
            ..DmaMap::zeroed()
        };
        // SAFETY: the caller's promise is the same.
        unsafe { sys::map_dma(&self.file, &argument) }
    }

    fn unmap_dma(&self, range: IovaRange) -> Result<u64, Errno> {
        let mut argument = DmaUnmap {
            iova: range.start().raw(),
            size: range.len().ok_or(Errno(libc::EINVAL))?,
            ..DmaUnmap::zeroed()
        };
        sys::with_struct(&self.file, &IOMMU_UNMAP_DMA, &mut argument)?;
        Ok(argument.size)
    }
}

/// Why memory was not mapped: what a mapper's error has in it.
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
    #[error("VFIO_IOMMU_MAP_DMA of {range} to {phys:#x}: {errno}{}", advice_on_map(*errno))]
    Call {
        /// What was to be mapped.
        range: IovaRange,
        /// Where to.
        phys: PhysAddr,
        /// Why.
        errno: Errno,
    },
}

fn advice_on_map(errno: Errno) -> &'static str {
    match errno.0 {
        libc::ENOMEM => {
            ": mapped memory is locked, and no more may be: raise `ulimit -l`, or give the process CAP_IPC_LOCK"
        }
        libc::ENOSPC => {
            ": there are as many mappings as may be: map larger pieces, or raise dma_entry_limit of vfio_iommu_type1"
        }
        libc::EINVAL => ": the IOVA is none that the IOMMU allows (`IommuInfo::aperture`)",
        libc::EEXIST => ": something that this map has not made is mapped there",
        _ => "",
    }
}

/// Calls made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// `VFIO_IOMMU_MAP_DMA`, those that were refused among them.
    pub maps: u64,
    /// `VFIO_IOMMU_UNMAP_DMA`, likewise.
    pub unmaps: u64,
}

/// Mappings that the kernel has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mappings {
    /// Of the mapper.
    pub open: usize,
    /// That the mapper has ended, and a device may still reach.
    pub closed: usize,
}

/// The table of a mapper that is a VFIO container, and its invalidator: give it a clone for each. Its "physical" addresses are those of
/// this process.
///
/// Only memory that it knows is mapped, so that no caller can give a device what was not meant for it. What is mapped when the last
/// clone goes is unmapped; memory that the kernel will not unmap is never given back.
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
    book: Mutex<Book>,
}

/// What is mapped where. `open` and `closed` have no page in common.
#[derive(Default)]
struct Book {
    /// Buffers by address; some may be gone.
    memory: BTreeMap<u64, Weak<Pages>>,
    /// Mapped, by first page.
    open: BTreeMap<u64, Entry>,
    /// Unmapped by the mapper, not by the kernel.
    closed: BTreeMap<u64, Entry>,
    calls: Calls,
}

struct Entry {
    range: IovaRange,
    phys: PhysAddr,
    access: Access,
    /// The device may reach it: it stays.
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
    /// The map of whoever answers the calls.
    pub fn over(kernel: K) -> Self {
        let book = Mutex::default();
        Self(Arc::new(Shared { kernel, book }))
    }

    /// New memory of at least so many bytes that can be mapped here, zeroed.
    ///
    /// # Errors
    /// [`VfioError::Call`] of `mmap`.
    pub fn allocate(&self, bytes: usize) -> Result<DmaBuffer, VfioError> {
        let buffer = DmaBuffer::new(bytes).map_err(|errno| VfioError::Call {
            call: "mmap",
            subject: format!("{bytes} bytes of memory"),
            errno,
        })?;
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

    /// Who answers the calls.
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
        let in_the_way = overlapping(&book.open, range).or(overlapping(&book.closed, range));
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
            // SAFETY: the memory is mapped as long as `memory` lives, which `Entry` keeps until the range is unmapped, or
            // `Shared::drop` for ever. It is seen as atomics only (`Pages`).
            unsafe { kernel.map_dma(range, phys.raw(), access) }
        };
        let is_full = |errno: &Errno| [libc::ENOMEM, libc::ENOSPC].contains(&errno.0);
        let mut mapped = map(&mut book.calls);
        // What is closed counts for both limits, any core's. What is idle as well, which the mapper sees to.
        if mapped.as_ref().is_err_and(is_full)
            && !book.closed.is_empty()
            && book.invalidate(kernel, 0, u64::MAX).is_ok()
        {
            mapped = map(&mut book.calls);
        }
        mapped.map_err(|errno| {
            let refused = Refused::Call { range, phys, errno };
            match is_full(&errno) {
                true => MapError::Full(refused),
                false => MapError::Backend(refused),
            }
        })?;
        let entry = Entry {
            range,
            phys,
            access,
            memory,
        };
        book.open.insert(range.first().raw(), entry);
        Ok(())
    }

    /// Takes the mappings of which `range` consists out of the book: the device reaches them until they are invalidated.
    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError<Refused>> {
        let mut book = self.0.book();
        let book = &mut *book;
        let mut next = range.first().raw();
        while next <= range.last().raw() {
            let page = IovaRange::new(IovaPfn::new(next), 1).expect("a page of a range");
            let iova = page.start();
            let entry = overlapping(&book.open, page).ok_or(UnmapError::NotMapped { iova })?;
            if !range.contains(entry.range) {
                let leaf_pages = entry.range.pages();
                return Err(UnmapError::InsideHugeLeaf { iova, leaf_pages });
            }
            next = entry.range.last().raw() + 1;
        }
        let mut next = range.first().raw();
        while next <= range.last().raw() {
            let entry = book.open.remove(&next).expect("it was seen");
            let start = mem::replace(&mut next, entry.range.last().raw() + 1);
            book.closed.insert(start, entry);
        }
        Ok(())
    }

    fn lookup(&self, iova: Iova) -> Option<Translation> {
        let book = self.0.book();
        let entry = overlapping(&book.open, IovaRange::new(IovaPfn::of(iova), 1)?)?;
        let offset = iova.offset_from(entry.range.start())?;
        Some(Translation {
            phys: entry.phys.checked_add(offset)?,
            access: entry.access,
            leaf_pages: 1,
        })
    }
}

/// The first entry that has a page of `range`.
fn overlapping(entries: &BTreeMap<u64, Entry>, range: IovaRange) -> Option<&Entry> {
    let (_, entry) = entries.range(..=range.last().raw()).next_back()?;
    entry.range.overlaps(range).then_some(entry)
}

impl Book {
    /// The buffer in which all of that lies.
    fn memory_at(&self, phys: PhysAddr, pages: u64) -> Option<Arc<Pages>> {
        let (start, memory) = self.memory.range(..=phys.raw()).next_back()?;
        let memory = memory.upgrade()?;
        let end = pages.checked_mul(PAGE_SIZE)?.checked_add(phys.raw())?;
        (end <= start + memory.len() as u64).then_some(memory)
    }

    /// Has the kernel unmap whatever is closed and touches the pages `first` to `last`.
    fn invalidate(&mut self, kernel: &impl Kernel, first: u64, last: u64) -> Result<(), Errno> {
        let before = self.closed.range(..first).next_back();
        let from = match before {
            Some((start, entry)) if entry.range.last().raw() >= first => *start,
            _ => first,
        };
        let found = self.closed.range(from..=last);
        let found: Vec<IovaRange> = found.map(|(_, entry)| entry.range).collect();
        let open = &self.open;
        let has_none_between = |one: &IovaRange, other: &IovaRange| {
            let between = one.last().raw() + 1..other.first().raw();
            open.range(between).next().is_none()
        };
        for run in found.chunk_by(has_none_between) {
            let (start, end) = (run[0].first(), run[run.len() - 1].last());
            let whole = IovaRange::new(start, end.raw() - start.raw() + 1);
            self.calls.unmaps += 1;
            let unmapped = kernel.unmap_dma(whole.expect("from one mapping to another"))?;
            let pages: u64 = run.iter().map(|range| range.pages()).sum();
            debug_assert_eq!(unmapped, pages << PAGE_SHIFT, "the book is right");
            for range in run {
                self.closed.remove(&range.first().raw());
            }
        }
        Ok(())
    }
}

impl<K: Kernel> Shared<K> {
    fn book(&self) -> MutexGuard<'_, Book> {
        // Every critical section leaves the book whole, even if it panics.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Kernel> Drop for Shared<K> {
    fn drop(&mut self) {
        let book = self.book.get_mut().unwrap_or_else(PoisonError::into_inner);
        book.closed.append(&mut book.open);
        if book.invalidate(&self.kernel, 0, u64::MAX).is_err() {
            // The device may reach it: better lost than somebody else's.
            mem::take(&mut book.closed)
                .into_values()
                .for_each(|entry| mem::forget(entry.memory));
        }
    }
}

/// The call that unmaps is the invalidation: when it returns, both are done. So nothing is submitted that would have to be waited for.
impl<K: Kernel> Invalidator for VfioMap<K> {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        let mut book = self.0.book();
        for command in commands {
            let (first, last) = match command {
                Command::Pages(range) => (range.first().raw(), range.last().raw()),
                Command::Domain | Command::Global => (0, u64::MAX),
            };
            let done = book.invalidate(&self.0.kernel, first, last);
            done.map_err(|Errno(errno)| InvalidateError::Stopped {
                status: errno.unsigned_abs().into(),
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
