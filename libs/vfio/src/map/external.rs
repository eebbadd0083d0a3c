//! A container as a plain table of memory that others own: a virtual machine's.
//!
//! [`ExternalMap`] has no policy and no allocator: its caller says what is mapped where, and when
//! it goes. What the map adds is that no memory goes while a device may reach it: each mapping
//! holds its memory from before the call that maps it until the kernel has said that exactly the
//! bytes that were mapped are unmapped. An unmap that did nothing is no error to the kernel; here
//! it is one.
//!
//! **Threads.** Any. Calls take turns, as they do in the kernel; a look at the map
//! ([`ExternalMap::mappings`]) waits for no call. Lock order: `calls`, then `index`. Memory is
//! released with neither held.

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dma_map::address::PAGE_SIZE;
use dma_map::iova::{Access, IovaRange};
use thiserror::Error;

use super::index::{MappingIndex, extent};
use super::kernel::{Calls, Kernel, MapRefused, UnmapFailed, unmap_exactly};
use crate::error::Errno;
use crate::group::Container;
use crate::memory::DmaBuffer;

/// Memory that another part of this process owns, and that devices are to reach.
///
/// # Safety
/// For as long as the value lives, [`address`](Self::address) and [`len`](Self::len) answer the
/// same, the bytes from one on stay mapped in this process to the same shared memory, and this
/// process accesses them in no way that their change by a device would break: as atomics or by raw
/// copies only.
pub unsafe trait ExternalMemory: Send + Sync + 'static {
    /// Address in this process.
    fn address(&self) -> u64;

    /// Bytes.
    fn len(&self) -> u64;

    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

// SAFETY: a buffer's pages stay mapped where they are until its last clone goes, and are reached as
// atomics only.
unsafe impl ExternalMemory for DmaBuffer {
    fn address(&self) -> u64 {
        self.0.address()
    }

    fn len(&self) -> u64 {
        self.0.len() as u64
    }
}

/// Reason why memory was not mapped. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ExternalMapError {
    /// The memory begins inside a page.
    #[error("memory at {vaddr:#x} begins inside a page of 4 KiB")]
    Misaligned {
        /// Address in this process.
        vaddr: u64,
    },
    /// The range is longer than the memory behind the offset.
    #[error("{pages} pages at byte {offset:#x} do not lie in memory of {len:#x} bytes")]
    Outside {
        /// First byte.
        offset: u64,
        /// Pages.
        pages: u64,
        /// Bytes of the memory.
        len: u64,
    },
    /// A page of the range is mapped. The kernel was not asked.
    #[error("{range} overlaps {mapped}, which is mapped: unmap it first")]
    Overlaps {
        /// Range to map.
        range: IovaRange,
        /// Mapping in its way.
        mapped: IovaRange,
    },
    /// The kernel refused.
    #[error(transparent)]
    Call(#[from] MapRefused),
}

/// Reason why not all of a range was unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ExternalUnmapError {
    /// A mapping lies in the range in part: type 1 unmaps whole ones. The kernel was not asked,
    /// nothing has changed.
    #[error("{range} cuts the mapping of {mapped}: mappings are unmapped whole")]
    Cuts {
        /// Range to unmap.
        range: IovaRange,
        /// Mapping that it cuts.
        mapped: IovaRange,
    },
    /// The call failed, or the bytes unmapped are not those that were mapped. All that was mapped
    /// in the range counts as within reach and is kept: it can be tried again, or the devices
    /// closed and then the map ([`ExternalMap::close`]).
    #[error(transparent)]
    Unmapped(#[from] UnmapFailed),
}

/// Reason why memory is lost: a device may reach it, so it is kept until the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{mappings} mappings of {pages} pages are within a device's reach until the process ends: \
     {unmap}; taking the groups off the \
     container: {detach} (devices, and mappings of their BARs, have to be closed before)"
)]
pub struct CloseError {
    /// Mappings.
    pub mappings: usize,
    /// Pages of them.
    pub pages: u64,
    /// Failure of the call that unmaps all.
    pub unmap: UnmapFailed,
    /// Failure of the calls that take the groups off.
    pub detach: Errno,
}

/// Container as a table of memory that others own.
///
/// ```no_run
/// use std::sync::Arc;
/// use dma_map::iova::{Access, IovaPfn, IovaRange};
/// # fn f(ram: Arc<dyn vfio::ExternalMemory>) -> Result<(), Box<dyn std::error::Error>> {
/// use vfio::{Container, Group, ExternalMap};
///
/// let group = Group::of_device("0000:01:00.0")?;
/// let container = Container::open()?;
/// container.attach(&group)?;
/// let device = group.device("0000:01:00.0")?;
/// let map = ExternalMap::over(container);
/// let range = IovaRange::new(IovaPfn::new(0x10), 4).ok_or("a range")?;
/// map.map(range, ram, 0x8000, Access::ReadWrite)?; // from byte 0x8000 of `ram` on
/// assert_eq!(map.unmap(range)?, 4 << 12);
/// drop(device); // before the map, so that nothing can be left within its reach
/// map.close()?;
/// # Ok(()) }
/// ```
pub struct ExternalMap<K: Kernel = Container> {
    kernel: K,
    /// Held during each call.
    calls: Mutex<Calls>,
    /// Mappings that a device may reach: from before a call maps it until after one has unmapped
    /// it. Held for a moment.
    index: Mutex<MappingIndex<Arc<dyn ExternalMemory>>>,
}

impl<K: Kernel> fmt::Debug for ExternalMap<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mappings = self.mappings();
        f.debug_struct("ExternalMap")
            .field("mappings", &mappings)
            .finish_non_exhaustive()
    }
}

impl<K: Kernel> ExternalMap<K> {
    /// The map of a container, or of what answers its calls, in which nothing is mapped.
    pub fn over(kernel: K) -> Self {
        Self {
            kernel,
            calls: Mutex::default(),
            index: Mutex::default(),
        }
    }

    /// The container.
    pub fn kernel(&self) -> &K {
        &self.kernel
    }

    /// Number of mappings that a device may reach, those among them whose call to map or to unmap
    /// is under way.
    pub fn mappings(&self) -> usize {
        self.index().len()
    }

    /// Calls made so far. Waits for the one under way.
    pub fn calls(&self) -> Calls {
        *self.turn()
    }

    /// Maps `range` to `memory` from its byte `offset` on, and holds `memory` until it is unmapped.
    ///
    /// # Errors
    /// [`ExternalMapError`]; nothing has changed.
    pub fn map(
        &self,
        range: IovaRange,
        memory: Arc<dyn ExternalMemory>,
        offset: u64,
        access: Access,
    ) -> Result<(), ExternalMapError> {
        let (vaddr, len) = (memory.address(), memory.len());
        let bytes = range.len().and_then(|bytes| offset.checked_add(bytes));
        let place = vaddr.checked_add(offset);
        let (Some(_), Some(vaddr)) = (bytes.filter(|end| *end <= len), place) else {
            let pages = range.pages();
            return Err(ExternalMapError::Outside { offset, pages, len });
        };
        if !vaddr.is_multiple_of(PAGE_SIZE) {
            return Err(ExternalMapError::Misaligned { vaddr });
        }
        let mut calls = self.turn();
        {
            let mut index = self.index();
            if let Some(mapping) = index.overlapping(range) {
                let mapped = mapping.range;
                return Err(ExternalMapError::Overlaps { range, mapped });
            }
            index.insert(range, memory);
        }
        calls.maps += 1;
        // SAFETY: `ExternalMemory` has the bytes stay mapped, and accessed as a device's, for as
        // long as `memory` lives, and they were seen to lie in it. The index holds it from before
        // the call on; it leaves the index only when the kernel has said that exactly what was
        // mapped is unmapped, when the groups are off the container, or when it is forgotten.
        let mapped = unsafe { self.kernel.map_dma(range, vaddr, access) };
        let refused = match mapped {
            Ok(()) => return Ok(()),
            Err(errno) => MapRefused::new(range, vaddr, errno),
        };
        // A refused call has mapped nothing.
        let memory = self.index().remove(range.first());
        drop(calls);
        drop(memory);
        Err(refused.into())
    }

    /// Unmaps the mappings that lie in `range`, in one call from the first to the last, and
    /// releases their memory. Gives the bytes unmapped: 0, without a call, where nothing is mapped.
    ///
    /// # Errors
    /// [`ExternalUnmapError`].
    pub fn unmap(&self, range: IovaRange) -> Result<u64, ExternalUnmapError> {
        let mut calls = self.turn();
        let found: Vec<IovaRange> = {
            let index = self.index();
            let found = index.touching(range.first().raw(), range.last().raw());
            found.map(|mapping| mapping.range).collect()
        };
        // The first and the last, if any, are the only ones that can reach beyond.
        if let Some(&mapped) = found.iter().find(|mapped| !range.contains(**mapped)) {
            return Err(ExternalUnmapError::Cuts { range, mapped });
        }
        let Some((whole, pages)) = extent(found.iter().copied()) else {
            return Ok(0);
        };
        calls.unmaps += 1;
        unmap_exactly(&self.kernel, whole, pages)?;
        let released: Vec<_> = {
            let mut index = self.index();
            let found = found.iter();
            found.map(|range| index.remove(range.first())).collect()
        };
        drop(calls);
        drop(released);
        Ok(pages * PAGE_SIZE)
    }

    /// Unmaps everything, and, where that fails, takes the groups off the container, which ends
    /// every mapping once the devices are closed: close them, and mappings of their BARs, before.
    ///
    /// The same happens where the map is dropped, without a word of what is lost.
    ///
    /// # Errors
    /// [`CloseError`]: neither could be done, and the memory is never released.
    pub fn close(self) -> Result<(), CloseError> {
        self.end()
    }

    fn end(&self) -> Result<(), CloseError> {
        let mut calls = self.turn();
        let (all, mappings) = {
            let index = self.index();
            let all = index.touching(0, u64::MAX).map(|mapping| mapping.range);
            (extent(all), index.len())
        };
        let Some((whole, pages)) = all else {
            return Ok(());
        };
        calls.unmaps += 1;
        let ended = unmap_exactly(&self.kernel, whole, pages)
            .or_else(|unmap| self.kernel.detach_all().map_err(|detach| (unmap, detach)));
        let memory = self.index().take();
        drop(calls);
        match ended {
            Ok(()) => {
                memory.for_each(drop);
                Ok(())
            }
            Err((unmap, detach)) => {
                memory.for_each(mem::forget);
                Err(CloseError {
                    mappings,
                    pages,
                    unmap,
                    detach,
                })
            }
        }
    }

    fn turn(&self) -> MutexGuard<'_, Calls> {
        // A call that panics leaves its mappings in the index, which keeps their memory.
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self) -> MutexGuard<'_, MappingIndex<Arc<dyn ExternalMemory>>> {
        // No call is made while it is held.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Kernel> Drop for ExternalMap<K> {
    fn drop(&mut self) {
        // The memory that cannot be released is lost in any case.
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests;
