//! Ranges given back and zeroed: fallocate, by one way or another.
//!
//! | | first | where the file system has not got that |
//! |---|---|---|
//! | discard | punch a hole | it fails; not offered where that is known |
//! | zeroes, blocks may be given back | punch a hole | zero the range |
//! | zeroes, blocks stay | zero the range | punch a hole, then reserve it again |
//!
//! A power cut in the middle of the last way leaves zeroes without blocks, as QEMU's file-posix does.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FallocateFlags, fallocate, major, minor};
use rustix::io::Errno;

use super::super::SECTOR;

/// How far a range has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Way {
    #[default]
    First,
    /// The file system has not got the first.
    Second,
    /// It is punched, and is to be reserved again.
    Reserve,
}

impl Way {
    /// What to do, in the mode of fallocate, to zero a range whose blocks may be given back or not.
    pub(super) fn mode(self, unmap: bool) -> i32 {
        match (self, unmap) {
            (Self::First, true) | (Self::Second, false) => libc::FALLOC_FL_PUNCH_HOLE,
            (Self::First, false) | (Self::Second, true) => libc::FALLOC_FL_ZERO_RANGE,
            (Self::Reserve, _) => 0,
        }
    }

    /// What comes after this one has ended with `result`; `None`: nothing.
    pub(super) fn next(self, unmap: bool, result: i32) -> Option<Self> {
        match (self, unmap, -result) {
            (Self::First, _, libc::EOPNOTSUPP) => Some(Self::Second),
            (Self::Second, false, ..=0) => Some(Self::Reserve),
            _ => None,
        }
    }
}

/// What a file can do with ranges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Abilities {
    /// Give them back.
    pub(super) discards: bool,
    /// Zero them.
    pub(super) zeroes: bool,
}

/// Those of `file`, which ends at `end`. Where that cannot be found out, it can.
pub(super) fn abilities(file: &File, end: u64, is_block_device: bool) -> Abilities {
    if is_block_device {
        return Abilities {
            discards: discards(file),
            // They are written by the kernel, if by nobody else.
            zeroes: true,
        };
    }
    // Nothing lies behind the end.
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let punched = fallocate(file, mode, end, SECTOR);
    let can = !matches!(punched, Err(Errno::OPNOTSUPP | Errno::NOSYS));
    Abilities {
        discards: can,
        zeroes: can,
    }
}

/// What the kernel says of a block device, or of the disk that it is a part of.
fn discards(file: &File) -> bool {
    let Ok(about) = file.metadata() else {
        return true;
    };
    let device = format!(
        "/sys/dev/block/{}:{}",
        major(about.rdev()),
        minor(about.rdev())
    );
    let said = ["queue", "../queue"].iter().find_map(|queue| {
        std::fs::read_to_string(format!("{device}/{queue}/discard_max_bytes")).ok()
    });
    said.is_none_or(|bytes| bytes.trim() != "0")
}
