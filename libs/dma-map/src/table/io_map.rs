//! Interface through which a mapper changes translations: a page table of its own, or one in a
//! kernel.
//!
//! | back end | `map`, `unmap` | `phys` is | invalidator |
//! |---|---|---|---|
//! | [`IoPageTable`](crate::table::IoPageTable) | write entries | an address that the IOMMU puts on the bus | the unit's queue |
//! | VFIO type 1 (crate `vfio`) | `VFIO_IOMMU_MAP_DMA`; a record | a virtual address of this process | `VFIO_IOMMU_UNMAP_DMA` |
//! | iommufd | `IOMMU_IOAS_MAP`; a record | a virtual address of this process | `IOMMU_IOAS_UNMAP` |
//!
//! A kernel's unmap returns after the kernel has invalidated. If `unmap` called it, nothing would
//! be left to defer; so the invalidator calls it, for neighbours at once, and `unmap` only records
//! the range. A kernel has no query for mappings: the record is for [`lookup`](IoMap::lookup) as
//! well.

use address::{Iova, PhysAddr};
use iova::{Access, IovaRange};

use super::{MapError, Translation, UnmapError};

/// The translations of one IOVA space, shared by all cores.
///
/// The caller that maps or unmaps a range **owns** its IOVAs for the time of the call: they are
/// allocated to it, or pinned, and no other thread maps or unmaps them. Calls for different IOVAs
/// run side by side. A caller that breaks this may find a mapping lost or doubled; errors are exact
/// only for owners. A lookup may be for IOVAs that no caller owns, and finds what was true at some
/// moment.
///
/// Ranges are whole pages of 4 KiB. Neither `map` nor `unmap` need invalidate anything: that is the
/// [`Invalidator`](crate::invalidate::Invalidator)'s part. The writes of `unmap` are visible to a
/// device or core that sees a store that the caller makes later (the tail of an invalidation
/// queue).
///
/// ```
/// use dma_map::IoMap;
/// use dma_map::address::{Iova, PhysAddr};
/// use dma_map::iova::{Access, IovaRange};
/// use dma_map::table::{MapError, Translation, UnmapError};
///
/// /// An errno.
/// #[derive(Debug, thiserror::Error)]
/// #[error("errno {0}")]
/// struct Errno(i32);
/// const ENOSPC: i32 = 28;
///
/// struct Kernel;
///
/// impl IoMap for Kernel {
///     type Error = Errno;
///
///     fn map(
///         &self,
///         range: IovaRange,
///         phys: PhysAddr,
///         access: Access,
///     ) -> Result<(), MapError<Errno>> {
///         match ioctl_map(range, phys, access) {
///             0 => Ok(()),
///             ENOSPC => Err(MapError::Full(Errno(ENOSPC))), // `dma_entry_limit`
///             errno => Err(MapError::Backend(Errno(errno))),
///         }
///     }
///
///     fn unmap(&self, range: IovaRange) -> Result<(), UnmapError<Errno>> {
///         // ...
/// #       Ok(())
///     }
///
///     fn lookup(&self, iova: Iova) -> Option<Translation> {
///         // ... from a record of what was mapped
/// #       None
///     }
/// }
/// # fn ioctl_map(_: IovaRange, _: PhysAddr, _: Access) -> i32 { ENOSPC }
/// # use dma_map::iova::IovaPfn;
/// # let range = IovaRange::new(IovaPfn::new(1), 1).expect("a page");
/// # assert!(matches!(Kernel.map(range, PhysAddr::new(0), Access::Read), Err(MapError::Full(_))));
/// ```
pub trait IoMap: Send + Sync {
    /// Error of the back end, an ioctl's errno for instance;
    /// [`Infallible`](core::convert::Infallible) where only the caller's mistakes cause errors.
    type Error: core::error::Error + Send + Sync + 'static;

    /// Maps all of `range` to the memory from `phys` on, which begins a page. All or nothing.
    ///
    /// # Errors
    /// [`MapError`]; nothing is mapped then.
    fn map(
        &self,
        range: IovaRange,
        phys: PhysAddr,
        access: Access,
    ) -> Result<(), MapError<Self::Error>>;

    /// Unmaps all of `range`. All or nothing.
    ///
    /// A mapper unmaps only **whole** mappings: the ranges of one or several calls of
    /// [`map`](Self::map), one behind the other, never a part of one. (VFIO type 1 version 2 and
    /// iommufd refuse parts.) It may include pages behind a mapping's last that are not mapped,
    /// where its own caller has given a wrong length: that has to be refused.
    ///
    /// # Errors
    /// [`UnmapError`]; nothing is unmapped then.
    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError<Self::Error>>;

    /// Returns the translation of `iova` now. The caller owns it, or holds it pinned.
    fn lookup(&self, iova: Iova) -> Option<Translation>;
}
