//! Checks of memory files from another process, made before one is mapped.
//!
//! UNSAFETY: the system calls that ask about a descriptor.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::addr::PAGE_SIZE;
use crate::map_error::MapError;
use crate::sigbus::MAX_MAPPINGS;

/// Reason why a piece of a memory file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// No bytes were asked for.
    #[error("len is 0")]
    Empty,
    /// The piece does not start on a page.
    #[error("file offset {offset:#x} is not a multiple of {PAGE_SIZE}")]
    Misaligned {
        /// Its start in the file, in bytes.
        offset: u64,
    },
    /// The piece is not all in the file.
    #[error("{len:#x} bytes at file offset {offset:#x}, but the file has {size:#x}")]
    PastEnd {
        /// Its start in the file, in bytes.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// Size of the file in bytes.
        size: u64,
    },
    /// The descriptor's properties could not be read.
    #[error("cannot inspect the file")]
    Inspect(#[source] io::Error),
    /// A device, a socket, a directory.
    #[error("not a regular file: mode {mode:#o}")]
    NotRegular {
        /// `st_mode`.
        mode: u32,
    },
    /// The descriptor does not allow both reading and writing.
    #[error("the descriptor is not open for reading and writing")]
    NotReadWrite,
    /// A file whose pages some other process or machine provides when it pleases (FUSE, network):
    /// an access could take for ever, and all guests of a core with it.
    #[error("file system type {magic:#x} is neither memory nor a local disk")]
    FileSystem {
        /// `f_type`.
        magic: u64,
    },
    /// The host refused the mapping (a write seal, no address space, no huge page).
    #[error("cannot map {len:#x} bytes at file offset {offset:#x}")]
    Map {
        /// Its start in the file, in bytes.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// Too many foreign mappings in this process.
    #[error("all {MAX_MAPPINGS} slots for foreign mappings are taken")]
    TooManyMappings,
    /// The handler of `SIGBUS` could not be installed.
    #[error("cannot handle SIGBUS")]
    Handler(#[source] io::Error),
    /// No new memory file could be made.
    #[error("cannot make a memory file")]
    Create(#[from] MapError),
}

/// Properties of the file behind a descriptor that passed [`inspect`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// Device and inode: unique as long as the file is mapped or open.
    pub(crate) identity: (u64, u64),
    /// Size in bytes at the time of the inspection.
    pub(crate) size: u64,
    /// Size of its pages in bytes: offsets and lengths of mappings are multiples of it.
    pub(crate) block: u64,
}

/// File systems whose pages come from memory or from a disk of this machine. Not overlayfs, which
/// may have any of the others below it.
const LOCAL: [u64; 6] = [
    0x0102_1994, // tmpfs, and memfd
    HUGETLBFS,
    0x8584_58f6, // ramfs
    0xef53,      // ext4
    0x5846_5342, // XFS
    0x9123_683e, // btrfs
];
const HUGETLBFS: u64 = 0x9584_58f6;

/// Checks that `file` may be mapped shared and writable, and returns its properties.
pub(crate) fn inspect(file: BorrowedFd<'_>) -> Result<Facts, FileError> {
    let fd = file.as_raw_fd();
    let refused = || FileError::Inspect(io::Error::last_os_error());
    // SAFETY: all bits zero are a value of both structures, plain integers; the calls fill them and
    // touch nothing else of ours; the descriptor is borrowed, hence open.
    let (flags, stat, fs) = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        if flags < 0 {
            return Err(refused());
        }
        let mut stat: libc::stat64 = std::mem::zeroed();
        if libc::fstat64(fd, &mut stat) < 0 {
            return Err(refused());
        }
        let mut fs: libc::statfs64 = std::mem::zeroed();
        if libc::fstatfs64(fd, &mut fs) < 0 {
            return Err(refused());
        }
        (flags, stat, fs)
    };
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
        let mode = stat.st_mode;
        return Err(FileError::NotRegular { mode });
    }
    if flags & libc::O_ACCMODE != libc::O_RDWR || flags & libc::O_PATH != 0 {
        return Err(FileError::NotReadWrite);
    }
    // The type's width differs between machines; magic numbers have 32 bits.
    let magic = fs.f_type as u64 & 0xffff_ffff;
    if !LOCAL.contains(&magic) {
        return Err(FileError::FileSystem { magic });
    }
    let block = match magic {
        HUGETLBFS => (fs.f_bsize as u64).max(PAGE_SIZE),
        _ => PAGE_SIZE,
    };
    assert!(block.is_power_of_two(), "the kernel's huge pages are");
    Ok(Facts {
        identity: (stat.st_dev, stat.st_ino),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        block,
    })
}

/// Whether `[offset, offset + len)` is a piece of a file of `size` bytes that can be mapped.
pub(crate) fn check_piece(offset: u64, len: u64, size: u64) -> Result<(), FileError> {
    if len == 0 {
        return Err(FileError::Empty);
    }
    if !offset.is_multiple_of(PAGE_SIZE) {
        return Err(FileError::Misaligned { offset });
    }
    if offset.checked_add(len).is_none_or(|end| end > size) {
        return Err(FileError::PastEnd { offset, len, size });
    }
    Ok(())
}
