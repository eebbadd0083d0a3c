//! Guest RAM: one sealed memory file, mapped shared, or anonymous memory, behind a short list of
//! guest-physical regions.
//!
//! Made by the VMM, which gives the regions' host addresses to KVM and the memory file to other
//! processes; read by the IOMMU through [`PhysMem`]; never handed to a device. Nothing here is
//! `unsafe`: offsets are checked against regions here and against the mapping in `mapping`.
//!
//! Cost of a lookup in the first region: a subtraction and two comparisons on fields of the handle
//! itself; other regions are a linear search (machines have two or three).

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::access::{Access, DmaFault, Intent};
use crate::addr::{Gpa, Hva, PAGE_SIZE};
use crate::keep::MappingSet;
use crate::map_error::MapError;
use crate::mapping::{HugePages, Mapping};
use crate::phys::{KeepAlive, PhysMem};
use crate::slot::SlotMapping;

/// Reason why guest RAM could not be made. The first five name a mistake in the list of regions.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The list of regions is empty.
    #[error("a machine needs at least one region of RAM")]
    NoRegions,
    /// A region has no bytes.
    #[error("the region at {gpa:#x} is empty")]
    Empty {
        /// Its start.
        gpa: Gpa,
    },
    /// A region does not start and end on 4 KiB boundaries.
    #[error("the region at {gpa:#x}, {len:#x} bytes, is not aligned to {PAGE_SIZE} bytes")]
    Misaligned {
        /// Its start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
    },
    /// A region runs past the end of the address space, or the sum of all exceeds the host's
    /// address space.
    #[error("the region at {gpa:#x}, {len:#x} bytes, does not fit the address space")]
    TooLong {
        /// Its start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
    },
    /// A region starts below the end of the one before it: they overlap or are not sorted.
    #[error("the region at {gpa:#x} starts below {previous_end:#x}, where the one before it ends")]
    Overlap {
        /// Its start.
        gpa: Gpa,
        /// Exclusive end of the region before.
        previous_end: Gpa,
    },
    /// The host refused the memory.
    #[error("the host has no memory for the guest")]
    Host(#[from] MapError),
}

/// One contiguous region of guest RAM. Regions that touch in guest-physical space are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// First guest-physical address.
    pub gpa: Gpa,
    /// Length in bytes, a multiple of 4096.
    pub len: u64,
    /// Its address in this process.
    pub hva: Hva,
    /// Its start in the memory file, in bytes.
    pub fd_offset: u64,
}

impl Region {
    /// Returns the offset of `[gpa, gpa + len)` in this region, if all of it lies in it; `len` at
    /// least 1.
    #[inline]
    fn inside(&self, gpa: Gpa, len: u64) -> Option<u64> {
        // A `gpa` below the region wraps to an offset beyond any region's length: lengths are
        // bounded by the host's address space.
        let inside = gpa.raw().wrapping_sub(self.gpa.raw());
        let room = self.len.checked_sub(inside)?;
        // Wraps for an empty range, which so has no room anywhere.
        (len.wrapping_sub(1) < room).then_some(inside)
    }
}

/// The RAM of one virtual machine. A clone is another handle to the same memory.
///
/// No device can be given this by mistake: device models take [`Dma`](crate::Dma), which it does
/// not implement.
///
/// ```compile_fail,E0277
/// use guest_mem::{Dma, Gpa, GuestRam};
/// fn device(dma: &mut impl Dma) {}
/// let mut ram = GuestRam::new(&[(Gpa::new(0), 4096)]).unwrap();
/// device(&mut ram);
/// ```
///
/// Threads: any; all accesses are atomic or tear. The IOMMU's accesses come from the VM's owner.
#[derive(Clone, Debug)]
pub struct GuestRam {
    /// Copy of `regions[0]`: nearly every access falls there.
    first: Region,
    regions: Arc<[Region]>,
    mapping: Arc<Mapping>,
    /// Of `mapping` alone.
    keep: Arc<MappingSet>,
    huge_pages: HugePages,
}

impl GuestRam {
    /// RAM at the given `(start, bytes)` regions: sorted, not overlapping, aligned to 4096. Zeroed,
    /// and without host memory until first touched.
    pub fn new(regions: &[(Gpa, u64)]) -> Result<GuestRam, RamError> {
        Self::with_pages(regions, HugePages::Advise)
    }

    /// Makes RAM as [`new`](Self::new) does, with or without huge pages.
    pub fn with_pages(regions: &[(Gpa, u64)], huge_pages: HugePages) -> Result<GuestRam, RamError> {
        let (plan, bytes) = layout(regions)?;
        let mapping = Mapping::memfd(c"guest-ram", bytes, huge_pages)?;
        Ok(Self::over(plan, mapping, huge_pages))
    }

    /// Makes RAM in anonymous memory: no other process can map it, huge pages do not depend on the
    /// host's setting for shared memory, and the host's own swap treats it as any program's.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn anonymous(regions: &[(Gpa, u64)], huge_pages: HugePages) -> Result<GuestRam, RamError> {
        let (plan, bytes) = layout(regions)?;
        let mapping = Mapping::anonymous(bytes, huge_pages)?;
        Ok(Self::over(plan, mapping, huge_pages))
    }

    /// Makes RAM in heap memory: for tests, which need no system call then and run under Miri.
    pub fn in_heap(regions: &[(Gpa, u64)]) -> Result<GuestRam, RamError> {
        let (plan, bytes) = layout(regions)?;
        Ok(Self::over(plan, Mapping::heap(bytes), HugePages::Never))
    }

    fn over(plan: Vec<Region>, mapping: Mapping, huge_pages: HugePages) -> Self {
        let regions: Arc<[Region]> = plan
            .into_iter()
            .map(|region| Region {
                // Inside the mapping: `layout` summed the offsets up to its size, a `usize`.
                hva: mapping.hva(region.fd_offset as usize),
                ..region
            })
            .collect();
        let mapping = Arc::new(mapping);
        Self {
            first: regions[0],
            regions,
            keep: Arc::new(MappingSet::new([mapping.clone()])),
            mapping,
            huge_pages,
        }
    }

    /// The regions, sorted by address: one KVM memory slot each.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Returns the memory that a memory slot for `region`, one of [`regions`](Self::regions),
    /// shows: a separate mapping of the memory file with the same page size, or the memory itself
    /// where there is no file.
    ///
    /// # Errors
    /// The kernel's, of mmap(2).
    pub fn slot_mapping(&self, region: &Region) -> io::Result<SlotMapping> {
        let (offset, len) = (region.fd_offset, region.len);
        match self.memfd() {
            Some(file) => SlotMapping::new(file, offset, len, self.huge_pages),
            None => SlotMapping::shared(&self.mapping, offset, len),
        }
    }

    /// The memory file behind all regions, for other processes to map. Its size is sealed. `None`
    /// if the memory has none.
    pub fn memfd(&self) -> Option<BorrowedFd<'_>> {
        self.mapping.fd()
    }

    /// Returns the memory of `[gpa, gpa + len)` (multiples of 4096, in one region) to the host: it
    /// holds zeroes from then on, in all mappings of it. A transfer that is under way with such a
    /// page keeps the former page.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` for a range that is not RAM, or not whole pages.
    pub fn discard(&self, gpa: Gpa, len: u64) -> io::Result<()> {
        let offset = self.offset_of_pages(gpa, len)?;
        self.mapping.discard(offset, len as usize)
    }

    /// Populates the pages of `[gpa, gpa + len)` (multiples of 4096, in one region), and maps them
    /// in this process: accesses to them raise no page fault then. Their content stays. Takes some
    /// hundred nanoseconds a page, and waits for the host's memory.
    ///
    /// # Errors
    /// The kernel's (`EINVAL` before Linux 5.14); `InvalidInput` for a range that is not RAM, or
    /// not whole pages.
    pub fn populate(&self, gpa: Gpa, len: u64) -> io::Result<()> {
        let offset = self.offset_of_pages(gpa, len)?;
        self.mapping.populate(offset, len as usize)
    }

    /// Offset in the mapping of whole pages.
    fn offset_of_pages(&self, gpa: Gpa, len: u64) -> io::Result<usize> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        if !gpa.is_aligned(PAGE_SIZE) || !len.is_multiple_of(PAGE_SIZE) {
            return Err(invalid());
        }
        self.offset(gpa, len).map_err(|_| invalid())
    }

    /// The region that `[gpa, gpa + len)` lies in, and where it starts in there; `len` at least 1.
    #[inline]
    pub(crate) fn find(&self, gpa: Gpa, len: u64) -> Access<(&Region, u64)> {
        match self.first.inside(gpa, len) {
            Some(inside) => Ok((&self.first, inside)),
            None => self.find_elsewhere(gpa, len),
        }
    }

    /// Offset in the mapping of `[gpa, gpa + len)`, `len` at least 1.
    #[inline]
    fn offset(&self, gpa: Gpa, len: u64) -> Access<usize> {
        let (region, inside) = self.find(gpa, len)?;
        Ok((region.fd_offset + inside) as usize)
    }

    #[cold]
    #[inline(never)]
    fn find_elsewhere(&self, gpa: Gpa, len: u64) -> Access<(&Region, u64)> {
        if len == 0 || gpa.checked_add(len - 1).is_none() {
            return Err(DmaFault::BadRange.into());
        }
        for region in self.regions.iter() {
            if let Some(inside) = region.inside(gpa, len) {
                return Ok((region, inside));
            }
            if region.inside(gpa, 1).is_some() {
                // Starts here and runs out: the region's end is not RAM, or it would be one region.
                let gpa = Gpa::new(region.gpa.raw() + region.len);
                return Err(DmaFault::NotRam { gpa }.into());
            }
        }
        Err(DmaFault::NotRam { gpa }.into())
    }
}

/// Checks the list, joins regions that touch, and assigns file offsets; returns the regions (host
/// addresses still 0) and the file's size.
fn layout(regions: &[(Gpa, u64)]) -> Result<(Vec<Region>, usize), RamError> {
    let mut plan: Vec<Region> = Vec::new();
    let mut previous_end = Gpa::new(0);
    let mut bytes: u64 = 0;
    for &(gpa, len) in regions {
        if len == 0 {
            return Err(RamError::Empty { gpa });
        }
        if !gpa.is_aligned(PAGE_SIZE) || len % PAGE_SIZE != 0 {
            return Err(RamError::Misaligned { gpa, len });
        }
        if gpa < previous_end {
            return Err(RamError::Overlap { gpa, previous_end });
        }
        let too_long = RamError::TooLong { gpa, len };
        let Some(end) = gpa.checked_add(len) else {
            return Err(too_long);
        };
        let total = bytes.checked_add(len);
        // `isize::MAX` bounds every allocation in Rust and lies within `off_t`.
        let Some(total) = total.filter(|total| isize::try_from(*total).is_ok()) else {
            return Err(too_long);
        };
        match plan.last_mut() {
            Some(last) if gpa == previous_end => last.len += len,
            _ => plan.push(Region {
                gpa,
                len,
                hva: Hva::new(0),
                fd_offset: bytes,
            }),
        }
        previous_end = end;
        bytes = total;
    }
    match plan.is_empty() {
        true => Err(RamError::NoRegions),
        false => Ok((plan, bytes as usize)),
    }
}

impl PhysMem for GuestRam {
    #[inline]
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        if !gpa.is_aligned(8) {
            return Err(DmaFault::BadRange.into());
        }
        let offset = self.offset(gpa, 8)?;
        // Acquire pairs with the guest's ordered store of a table entry (its write barrier before
        // linking a table): a load that sees the link also sees the entries of the linked table.
        Ok(self.mapping.load(offset, Ordering::Acquire))
    }

    #[inline]
    fn read_u128(&self, gpa: Gpa) -> Access<u128> {
        if !gpa.is_aligned(8) {
            return Err(DmaFault::BadRange.into());
        }
        let offset = self.offset(gpa, 16)?;
        let lo: u64 = self.mapping.load(offset, Ordering::Acquire);
        let hi: u64 = self.mapping.load(offset + 8, Ordering::Acquire);
        Ok(u128::from(hi) << 64 | u128::from(lo))
    }

    #[inline]
    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        if !gpa.is_aligned(4) {
            return Err(DmaFault::BadRange.into());
        }
        let offset = self.offset(gpa, 4)?;
        // Release pairs with the guest's read of a status word it polls: seeing it, it sees all
        // that was written to guest memory before.
        self.mapping.store(offset, value, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        if !buf.is_empty() {
            let offset = self.offset(gpa, buf.len() as u64)?;
            self.mapping.read(offset, buf);
        }
        Ok(())
    }

    #[inline]
    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        if !buf.is_empty() {
            let offset = self.offset(gpa, buf.len() as u64)?;
            self.mapping.write(offset, buf);
        }
        Ok(())
    }

    #[inline]
    fn host(&self, gpa: Gpa, len: u64, _intent: Intent) -> Access<Hva> {
        let (region, inside) = self.find(gpa, len)?;
        Ok(Hva::new(region.hva.raw() + inside))
    }

    #[inline]
    fn run(&self, gpa: Gpa) -> Access<u64> {
        let (region, inside) = self.find(gpa, 1)?;
        Ok(region.len - inside)
    }

    fn keep_alive(&self) -> KeepAlive {
        self.keep.clone()
    }
}
