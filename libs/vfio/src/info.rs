//! The kernel's information about an IOMMU: allowed IOVAs, page sizes, and the limit on mappings.
//!
//! `VFIO_IOMMU_GET_INFO` fills `struct vfio_iommu_type1_info` and a chain of capabilities behind it
//! (`chain`).

use dma_map::address::PAGE_SHIFT;
use dma_map::iova::{Aperture, ApertureError, IovaPfn, IovaRange};
use zerocopy::FromBytes;

use crate::chain::{Capability, Reader};
use crate::error::InfoError;
use crate::uapi::{CAP_DMA_AVAIL, CAP_IOVA_RANGE, INFO_CAPS, INFO_PGSIZES, IommuType1Info};

/// First and last byte that a device may be given, inclusive: `struct vfio_iova_range`, and
/// iommufd's `struct iommu_iova_range`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllowedRange {
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub last: u64,
}

/// The kernel's information about a container's IOMMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IommuInfo {
    /// A bit for each page size that the tables have; the lowest is the granule of mappings.
    pub page_sizes: u64,
    /// Allowed IOVAs, in the kernel's order. None before Linux 5.4.
    pub allowed: Option<Vec<AllowedRange>>,
    /// Number of further mappings (`dma_entry_limit` less those there are). None before Linux 5.10.
    pub mappings_left: Option<u32>,
}

impl IommuInfo {
    /// Parses all bytes that `VFIO_IOMMU_GET_INFO` wrote.
    ///
    /// # Errors
    /// [`InfoError`]: it is not what a kernel writes.
    pub fn parse(bytes: &[u8]) -> Result<Self, InfoError> {
        let reader = Reader(bytes);
        let (head, _) = IommuType1Info::read_from_prefix(bytes)
            .map_err(|_| reader.short("the structure", 0))?;
        let mut info = Self {
            page_sizes: match head.flags & INFO_PGSIZES {
                0 => 0,
                _ => head.iova_pgsizes,
            },
            allowed: None,
            mappings_left: None,
        };
        let first = match head.flags & INFO_CAPS {
            0 => 0,
            _ => head.cap_offset,
        };
        for capability in reader.capabilities(size_of::<IommuType1Info>(), first) {
            let Capability { id, version, body } = capability?;
            match (id, version) {
                (CAP_IOVA_RANGE, 1) => info.allowed = Some(ranges(reader, body)?),
                (CAP_DMA_AVAIL, 1) => {
                    info.mappings_left = Some(reader.u32(body, "the number of mappings left")?);
                }
                // Of others only the end is known.
                _ => {}
            }
        }
        Ok(info)
    }

    /// Whether pages of this size, a power of two, can be mapped by single table entries.
    pub fn has_page_size(&self, bytes: u64) -> bool {
        bytes.is_power_of_two() && self.page_sizes & bytes != 0
    }

    /// Whether the kernel allows every page of `range`: page 0 too, where it is not reserved. False
    /// where it does not say.
    pub fn allows(&self, range: IovaRange) -> bool {
        let allowed = self.allowed.as_deref().unwrap_or_default();
        let last = range.last().start().raw() | ((1 << PAGE_SHIFT) - 1);
        let mut next = range.start().raw();
        // Each step ends at the end of another allowed range.
        while let Some(one) = allowed
            .iter()
            .find(|one| (one.start..=one.last).contains(&next))
        {
            if one.last >= last {
                return true;
            }
            next = one.last + 1;
        }
        false
    }

    /// Bits of the highest allowed IOVA: the widest input address that all of the tables' mappings
    /// can have. 0 where none is known.
    pub fn address_bits(&self) -> u32 {
        let allowed = self.allowed.as_deref().unwrap_or_default();
        let last = allowed.iter().map(|range| range.last).max();
        last.map_or(0, |last| u64::BITS - last.leading_zeros())
    }

    /// The IOVAs for an allocator: those allowed, from the first page to the last, the gaps
    /// reserved.
    ///
    /// # Errors
    /// [`InfoError`]: they are not known, or are none, or pages of 4 KiB cannot be mapped.
    pub fn aperture(&self) -> Result<Aperture, InfoError> {
        let page_sizes = self.page_sizes;
        if page_sizes.trailing_zeros() > PAGE_SHIFT {
            return Err(InfoError::PageSize { page_sizes });
        }
        let allowed = self.allowed.as_ref().ok_or(InfoError::NoRanges)?;
        aperture_of(allowed).map_err(InfoError::Nothing)
    }
}

/// Makes an aperture of allowed ranges: from the first page to the last, the gaps between them
/// reserved (on x86 the interrupt window). Pages that are allowed only in part are not used; nor is
/// page 0, which devices take for "none".
///
/// ```
/// use vfio::{AllowedRange, aperture_of};
/// let ranges = [(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)];
/// let aperture = aperture_of(&ranges.map(|(start, last)| AllowedRange { start, last }))?;
/// assert_eq!(aperture, dma_map::iova::Aperture::of_bits(39)?);
/// # Ok::<(), dma_map::iova::ApertureError>(())
/// ```
///
/// # Errors
/// [`ApertureError`]: no page is left.
pub fn aperture_of(allowed: &[AllowedRange]) -> Result<Aperture, ApertureError> {
    let whole_pages = |range: &AllowedRange| {
        let first = range.start.div_ceil(1 << PAGE_SHIFT).max(1);
        // One past the last whole page; the last byte of the space ends one.
        let end = match range.last.checked_add(1) {
            Some(end) => end >> PAGE_SHIFT,
            None => IovaPfn::MAX.raw() + 1,
        };
        (first < end).then(|| (first, end - 1))
    };
    let mut pages: Vec<(u64, u64)> = allowed.iter().filter_map(whole_pages).collect();
    pages.sort_unstable();
    // Of none the first page lies behind the last.
    let first = pages.first().map_or(1, |(first, _)| *first);
    let mut next = first;
    let mut reserved = Vec::new();
    for (start, last) in pages {
        if start > next {
            reserved.extend(IovaRange::new(IovaPfn::new(next), start - next));
        }
        next = next.max(last + 1);
    }
    Aperture::new(IovaPfn::new(first), IovaPfn::new(next - 1), &reserved)
}

/// `vfio_iommu_type1_info_cap_iova_range` behind its header: first and last byte of each.
fn ranges(reader: Reader<'_>, body: usize) -> Result<Vec<AllowedRange>, InfoError> {
    let ranges = reader.pairs(body, "the allowed ranges")?;
    let ranges = ranges.map(|[start, last]| match start <= last {
        true => Ok(AllowedRange { start, last }),
        false => Err(InfoError::Inverted { start, last }),
    });
    ranges.collect()
}

#[cfg(test)]
mod tests;
