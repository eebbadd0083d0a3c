//! The table of memory regions.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{RequestError, SharedFd};
use crate::wire::{MemRegion, RequestId};

/// A region of guest memory, checked: not empty, and no end overflows.
#[derive(Clone, Debug)]
pub struct Region {
    /// Its addresses, size and offset in the file.
    pub place: MemRegion,
    /// Its file, whose length is not checked: it may be shorter than the region, or become so.
    pub fd: SharedFd,
}

/// Whether two ranges of a first address and a size share one; neither overflows nor is empty.
const fn overlap((a, a_size): (u64, u64), (b, b_size): (u64, u64)) -> bool {
    a <= b + (b_size - 1) && b <= a + (a_size - 1)
}

/// Adds a region to a sorted table.
pub(super) fn add(
    table: &mut Vec<Region>,
    request: RequestId,
    place: MemRegion,
    fd: OwnedFd,
    max: usize,
) -> Result<(), RequestError> {
    let MemRegion {
        guest_addr,
        size,
        user_addr,
        mmap_offset,
    } = place;
    let range = |field| RequestError::RegionRange {
        request,
        guest_addr,
        size,
        field,
    };
    let more = size.checked_sub(1).ok_or_else(|| range("size"))?;
    guest_addr
        .checked_add(more)
        .ok_or_else(|| range("guest address"))?;
    user_addr
        .checked_add(more)
        .ok_or_else(|| range("user address"))?;
    // Offsets in files are signed.
    let file_end = mmap_offset
        .checked_add(size)
        .filter(|&end| i64::try_from(end).is_ok());
    file_end.ok_or_else(|| range("mmap offset"))?;

    if table.len() >= max {
        return Err(RequestError::TooManyRegions {
            request,
            regions: table.len() + 1,
            max,
        });
    }
    for Region { place: there, .. } in &*table {
        let space = if overlap((guest_addr, size), (there.guest_addr, there.size)) {
            "guest"
        } else if overlap((user_addr, size), (there.user_addr, there.size)) {
            // A ring address could mean either.
            "user"
        } else {
            continue;
        };
        let other = there.guest_addr;
        return Err(RequestError::RegionOverlap {
            request,
            guest_addr,
            other,
            space,
        });
    }
    let at = table.partition_point(|region| region.place.guest_addr < guest_addr);
    table.insert(
        at,
        Region {
            place,
            fd: Arc::new(fd),
        },
    );
    Ok(())
}

/// Removes a region, named by guest address, user address and size.
pub(super) fn remove(
    table: &mut Vec<Region>,
    request: RequestId,
    place: MemRegion,
) -> Result<(), RequestError> {
    let is_it = |region: &Region| {
        let there = region.place;
        (there.guest_addr, there.user_addr, there.size)
            == (place.guest_addr, place.user_addr, place.size)
    };
    let at = table.iter().position(is_it);
    let guest_addr = place.guest_addr;
    table.remove(at.ok_or(RequestError::NoSuchRegion {
        request,
        guest_addr,
    })?);
    Ok(())
}

/// Whether the user addresses `first..=last` are all inside regions (one or several that touch).
pub(super) fn covers_user(table: &[Region], first: u64, last: u64) -> bool {
    let mut at = first;
    // Each turn leaves one region behind for good, because user ranges do not overlap.
    for _ in 0..table.len() {
        let Some(region) = table.iter().find(|region| {
            at.checked_sub(region.place.user_addr)
                .is_some_and(|off| off < region.place.size)
        }) else {
            return false;
        };
        let end = region.place.user_addr + (region.place.size - 1);
        if end >= last {
            return true;
        }
        at = end + 1;
    }
    false
}
