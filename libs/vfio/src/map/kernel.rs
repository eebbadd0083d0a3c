//! The calls of a container that map and unmap.

use dma_map::address::PAGE_SHIFT;
use dma_map::iova::{Access, IovaRange};
use thiserror::Error;

use crate::error::Errno;
use crate::group::Container;
use crate::limits::{Advice, HostLimits};
use crate::sys;
use crate::uapi::{DmaMap, DmaUnmap, IOMMU_UNMAP_DMA, MAP_READ, MAP_WRITE, Sized32};

/// Calls of a container, which tests answer themselves (`vfio::testing`).
///
/// # Safety
/// When [`unmap_dma`](Self::unmap_dma) has answered with as many bytes as were mapped in the range,
/// or [`detach_all`](Self::detach_all) with `Ok`, no device reaches what was mapped there before.
pub unsafe trait Kernel: Send + Sync {
    /// `VFIO_IOMMU_MAP_DMA`: `range` goes to the memory at `vaddr` in this process.
    ///
    /// # Errors
    /// [`Errno`]; nothing is mapped then.
    ///
    /// # Safety
    /// Until an [`unmap_dma`](Self::unmap_dma) of the range has answered with its bytes, or
    /// [`detach_all`](Self::detach_all) has succeeded, the memory stays mapped in this process, and
    /// is accessed in no way that its change by a device would break.
    unsafe fn map_dma(&self, range: IovaRange, vaddr: u64, access: Access) -> Result<(), Errno>;

    /// `VFIO_IOMMU_UNMAP_DMA`: unmaps every mapping in `range`, which cuts none. Returns the bytes
    /// unmapped: 0 where nothing was mapped.
    ///
    /// # Errors
    /// [`Errno`]; what is mapped then is not known.
    fn unmap_dma(&self, range: IovaRange) -> Result<u64, Errno>;

    /// `VFIO_GROUP_UNSET_CONTAINER` of every group: ends everything that is mapped.
    ///
    /// # Errors
    /// [`Errno`]: EBUSY while a device is open. What is mapped then is not known.
    fn detach_all(&self) -> Result<(), Errno>;
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

    fn detach_all(&self) -> Result<(), Errno> {
        self.take_groups_off().map_err(|(_, errno)| errno)
    }
}

/// Call to map that the kernel refused. Nothing is mapped by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("VFIO_IOMMU_MAP_DMA of {range} to {vaddr:#x}: {errno}{}", self.advice())]
pub struct MapRefused {
    /// Range to map.
    pub range: IovaRange,
    /// Address of the memory in this process.
    pub vaddr: u64,
    /// Reason.
    pub errno: Errno,
    /// Limits of the host, where one of them was hit.
    pub limits: Option<HostLimits>,
}

impl MapRefused {
    pub(super) fn new(range: IovaRange, vaddr: u64, errno: Errno) -> Self {
        let limits = is_full(errno).then(HostLimits::read);
        Self {
            range,
            vaddr,
            errno,
            limits,
        }
    }

    /// Whether a limit was hit, so that it may succeed after others are unmapped: of locked memory,
    /// or of mappings.
    pub fn is_full(&self) -> bool {
        is_full(self.errno)
    }

    fn advice(&self) -> Advice {
        Advice {
            errno: self.errno,
            bytes: self.range.len().unwrap_or(u64::MAX),
            limits: self.limits,
        }
    }
}

/// Whether this is the error of a limit.
pub fn is_full(errno: Errno) -> bool {
    [libc::ENOMEM, libc::ENOSPC].contains(&errno.0)
}

/// Calls made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// `VFIO_IOMMU_MAP_DMA`, those that were refused among them.
    pub maps: u64,
    /// `VFIO_IOMMU_UNMAP_DMA`, likewise.
    pub unmaps: u64,
}

/// Failure of a call to unmap. What lies in the range counts as within a device's reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UnmapFailed {
    /// The kernel refused.
    #[error("VFIO_IOMMU_UNMAP_DMA of {range}: {errno}")]
    Call {
        /// Range of the call.
        range: IovaRange,
        /// Reason.
        errno: Errno,
    },
    /// The kernel unmapped another number of bytes than were mapped.
    #[error(
        "VFIO_IOMMU_UNMAP_DMA of {range} unmapped {unmapped:#x} bytes of {mapped:#x}: the map and \
         the kernel disagree, and the \
         memory is kept until the devices are closed and the map after them"
    )]
    Bytes {
        /// Range of the call.
        range: IovaRange,
        /// Bytes that were mapped there.
        mapped: u64,
        /// Bytes that the kernel reports as unmapped.
        unmapped: u64,
    },
}

/// Has the kernel unmap `range`, in which `pages` pages are mapped. Fails unless the kernel reports
/// exactly these.
pub fn unmap_exactly(
    kernel: &impl Kernel,
    range: IovaRange,
    pages: u64,
) -> Result<(), UnmapFailed> {
    let unmapped = kernel.unmap_dma(range);
    let unmapped = unmapped.map_err(|errno| UnmapFailed::Call { range, errno })?;
    // Mapped pages of one call are fewer than the space has.
    let mapped = pages << PAGE_SHIFT;
    match unmapped == mapped {
        true => Ok(()),
        false => Err(UnmapFailed::Bytes {
            range,
            mapped,
            unmapped,
        }),
    }
}
