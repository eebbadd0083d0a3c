//! Regions of a device: its BARs, its ROM, its configuration space.

use std::ops::Range;

use dma_map::address::PAGE_SIZE;
use zerocopy::FromBytes;

use crate::chain::{Capability, Reader};
use crate::error::InfoError;
use crate::uapi::{
    CAP_MSIX_MAPPABLE, CAP_SPARSE_MMAP, REGION_CAN_MMAP, REGION_CAN_READ, REGION_CAN_WRITE,
    REGION_CAPS, RegionInfo,
};

/// Region of a device, as `struct vfio_region_info` has it with its capabilities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Index: BARs are 0 to 5, the ROM is 6, the configuration space 7.
    pub index: u32,
    /// First byte in the device's file.
    pub offset: u64,
    /// Bytes; 0 where the device has no such region.
    pub size: u64,
    /// [`Device::read`](crate::Device::read) works.
    pub can_read: bool,
    /// [`Device::write`](crate::Device::write) works.
    pub can_write: bool,
    /// The region can be mapped, or the `sparse` areas of it.
    pub can_mmap: bool,
    /// The kernel allows the pages of the MSI-X table to be mapped (Linux 4.16 and newer).
    pub msix_mappable: bool,
    /// Areas that can be mapped, as bytes of the region, where that is not all of it.
    pub sparse: Option<Vec<Range<u64>>>,
}

impl Region {
    /// Reads the answer to `VFIO_DEVICE_GET_REGION_INFO`, all of its bytes.
    ///
    /// # Errors
    /// [`InfoError`]: it is not what a kernel writes.
    pub fn parse(bytes: &[u8]) -> Result<Self, InfoError> {
        let reader = Reader(bytes);
        let (head, _) =
            RegionInfo::read_from_prefix(bytes).map_err(|_| reader.short("the structure", 0))?;
        let RegionInfo {
            flags,
            index,
            cap_offset,
            size,
            offset,
            ..
        } = head;
        let has = |bit| flags & bit != 0;
        // Offsets in files are signed.
        if offset
            .checked_add(size)
            .is_none_or(|end| i64::try_from(end).is_err())
        {
            return Err(InfoError::PastFile { offset, size });
        }
        let mut region = Self {
            index,
            offset,
            size,
            can_read: has(REGION_CAN_READ),
            can_write: has(REGION_CAN_WRITE),
            can_mmap: has(REGION_CAN_MMAP),
            msix_mappable: false,
            sparse: None,
        };
        let first = if has(REGION_CAPS) { cap_offset } else { 0 };
        for capability in reader.capabilities(size_of::<RegionInfo>(), first) {
            let Capability { id, version, body } = capability?;
            match (id, version) {
                (CAP_SPARSE_MMAP, 1) => region.sparse = Some(areas(reader, body, size)?),
                (CAP_MSIX_MAPPABLE, 1) => region.msix_mappable = true,
                // Another version of the list may allow less than is known here: nothing is mapped
                // then.
                (CAP_SPARSE_MMAP, _) => region.sparse = Some(Vec::new()),
                _ => {}
            }
        }
        Ok(region)
    }

    /// The byte ranges that may be mapped, ascending, of whole pages and with no page that has a
    /// byte of `except`: the MSI-X table and its pending bits, which a virtual machine must not
    /// reach.
    ///
    /// ```
    /// # let region = vfio::Region { index: 0, offset: 0, size: 0x4000, can_read: true,
    /// #     can_write: true, can_mmap: true, msix_mappable: true, sparse: None };
    /// // An NVMe drive of 16 KiB: the table of 65 vectors at 0x2000, the pending bits at 0x3000.
    /// assert_eq!(region.mappable(&[0x2000..0x2410, 0x3000..0x3010]), [0..0x2000]);
    /// ```
    pub fn mappable(&self, except: &[Range<u64>]) -> Vec<Range<u64>> {
        if !self.can_mmap {
            return Vec::new();
        }
        let whole = 0..self.size;
        let areas = self.sparse.clone().unwrap_or_else(|| vec![whole]);
        // Together before they are cut to pages: two may share one.
        let areas = joined(areas);
        let except = joined(except.iter().map(widened).collect());
        let mut found = Vec::new();
        for area in areas {
            let Some(mut at) = area.start.checked_next_multiple_of(PAGE_SIZE) else {
                continue;
            };
            let end = area.end - area.end % PAGE_SIZE;
            for hole in &except {
                if at < hole.start.min(end) {
                    found.push(at..hole.start.min(end));
                }
                at = at.max(hole.end);
            }
            if at < end {
                found.push(at..end);
            }
        }
        found
    }
}

/// Whole pages around a range; no page of an empty one.
fn widened(range: &Range<u64>) -> Range<u64> {
    if range.is_empty() {
        return 0..0;
    }
    let end = range.end.checked_next_multiple_of(PAGE_SIZE);
    range.start - range.start % PAGE_SIZE..end.unwrap_or(u64::MAX)
}

/// The same bytes as ascending ranges with bytes between them, none empty.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// `vfio_region_info_cap_sparse_mmap` behind its header: offset and size of each area.
fn areas(reader: Reader<'_>, body: usize, region: u64) -> Result<Vec<Range<u64>>, InfoError> {
    let areas = reader.pairs(body, "the mappable areas")?;
    let areas = areas.map(|[offset, size]| {
        let end = offset.checked_add(size).filter(|end| *end <= region);
        end.map(|end| offset..end).ok_or(InfoError::PastRegion {
            offset,
            size,
            region,
        })
    });
    areas.collect()
}

#[cfg(test)]
mod tests;
