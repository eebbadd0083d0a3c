//! Calls that a file has for ranges: found out when it is opened, where that can be done without
//! changing anything.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use rustix::fs::{FallocateFlags, fallocate, ioctl_blksszget, major, minor};
use rustix::io::Errno;

use super::RangeSupport;
use crate::blk::SECTOR;

/// Assumed sector of a block device that does not say.
const LARGE_SECTOR: u32 = 4096;

/// Calls that `file`, which is open for writing and ends at `end`, has for ranges; writes to it are
/// multiples of `data_block`. Whether a regular file punches holes is tried behind its end, and
/// what cannot be tried is taken for possible.
pub fn probe(file: &File, end: u64, data_block: u32) -> RangeSupport {
    let kind = file.metadata().map(|about| about.file_type());
    if kind.is_ok_and(|kind| kind.is_block_device()) {
        let sector = ioctl_blksszget(file).unwrap_or(LARGE_SECTOR);
        let block = sector.max(SECTOR as u32).next_power_of_two();
        return RangeSupport {
            punches: gives_back(file),
            ..RangeSupport::new(block, data_block)
        };
    }
    RangeSupport {
        punches: !matches!(try_punch(file, end), Err(Errno::OPNOTSUPP | Errno::NOSYS)),
        ..RangeSupport::new(SECTOR as u32, data_block)
    }
}

/// Punches a hole behind the end of `file`, where nothing lies.
pub(crate) fn try_punch(file: &File, end: u64) -> Result<(), Errno> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, mode, end, SECTOR)
}

/// A limit of the queue of a block device, or of the disk that it is a part of.
pub(crate) fn queue_limit(device: u64, name: &str) -> Option<u64> {
    let (major, minor) = (major(device), minor(device));
    let said = ["queue", "../queue"].iter().find_map(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/{name}");
        std::fs::read_to_string(path).ok()
    });
    said?.trim().parse().ok()
}

/// Whether a block device gives blocks back. For that the kernel's fallocate needs a device that
/// zeroes ranges by itself; one that can discard but not zero them is not asked.
fn gives_back(file: &File) -> bool {
    let Ok(about) = file.metadata() else {
        return true;
    };
    ["discard_max_bytes", "write_zeroes_max_bytes"]
        .iter()
        .all(|limit| queue_limit(about.rdev(), limit) != Some(0))
}
