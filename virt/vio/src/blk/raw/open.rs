//! Opening: the checks of a file and of the host, once, before anything is served.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::align::Alignment;
use super::engine::Engine;
use super::now::{self, Now};
use super::start::ALONE;
use super::sync::Syncs;
use super::threads::Threads;
use super::turns::Turns;
use super::uring::{UringRefusal, UringShare, try_io_uring};
use super::zeroes::WRITERS;
use super::{RawDisk, SECTOR, Transfer};
use crate::blk::range::{self, RangeSupport};

/// Options for opening a file.
#[derive(Clone, Copy, Debug)]
pub struct RawDiskOptions {
    /// Refuse writing.
    pub read_only: bool,
    /// O_DIRECT: past the page cache.
    pub o_direct: bool,
    /// Method of data transfer.
    pub transfer: Transfer,
    /// Operations in flight, 1 to 1024.
    pub depth: u32,
}

impl Default for RawDiskOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            o_direct: false,
            transfer: Transfer::Direct,
            depth: 256,
        }
    }
}

/// Reason why a file cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum RawDiskError {
    /// It cannot be opened, or its size not be found.
    #[error("cannot open the disk image")]
    Open(#[source] io::Error),
    /// It is neither a regular file nor a block device.
    #[error("the disk image is neither a regular file nor a block device")]
    Kind,
    /// Its size is zero or no multiple of 512 bytes.
    #[error("the disk image has {0} bytes, no positive multiple of 512")]
    Size(u64),
    /// A depth outside 1 to 1024.
    #[error("a queue depth of 1 to 1024, not {0}")]
    Depth(u32),
    /// The host refuses io_uring, and the threads that would take its place as well.
    #[error("cannot start the threads that serve a disk without io_uring ({why})")]
    Threads {
        /// The refusal of io_uring.
        why: UringRefusal,
        /// The error of starting threads.
        source: io::Error,
    },
}

impl RawDisk {
    /// Opens `path`.
    pub fn open(path: &Path, options: RawDiskOptions) -> Result<Self, RawDiskError> {
        let file = OpenOptions::new()
            .read(true)
            .write(!options.read_only)
            .custom_flags(if options.o_direct { libc::O_DIRECT } else { 0 })
            .open(path)
            .map_err(RawDiskError::Open)?;
        Self::from_file(file, options)
    }

    /// Serves an open file, whose flags must fit the options; O_NONBLOCK is taken from it. By
    /// threads, which this starts, where the host refuses io_uring.
    pub fn from_file(file: File, options: RawDiskOptions) -> Result<Self, RawDiskError> {
        Self::new(try_io_uring().err(), file, options)
    }

    /// Serves an open file by threads, since `why` keeps it from using io_uring.
    pub fn with_threads(
        file: File,
        options: RawDiskOptions,
        why: UringRefusal,
    ) -> Result<Self, RawDiskError> {
        Self::new(Some(why), file, options)
    }

    /// Serves `file`, by threads if io_uring is refused.
    fn new(
        refusal: Option<UringRefusal>,
        file: File,
        options: RawDiskOptions,
    ) -> Result<Self, RawDiskError> {
        if options.depth == 0 || options.depth > 1024 {
            return Err(RawDiskError::Depth(options.depth));
        }
        let kind = file.metadata().map_err(RawDiskError::Open)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(RawDiskError::Kind);
        }
        // Metadata of a block device say 0; its end does not.
        let capacity = (&file).seek(SeekFrom::End(0)).map_err(RawDiskError::Open)?;
        if capacity == 0 || !capacity.is_multiple_of(SECTOR) {
            return Err(RawDiskError::Size(capacity));
        }
        clear_nonblock(&file).map_err(RawDiskError::Open)?;
        let alignment = match options.o_direct {
            true => Alignment::direct(&file, kind.is_block_device()).map_err(RawDiskError::Open)?,
            false => Alignment::CACHED,
        };
        let mut support = match options.read_only {
            true => RangeSupport::default(),
            false => range::probe(&file, capacity, alignment.block),
        };
        // io_uring does what the host forbids as a system call.
        if refusal.is_some() && support.punches {
            let refused = range::try_punch(&file, capacity).err();
            support.punches = !matches!(refused, Some(Errno::NOSYS | Errno::PERM | Errno::ACCESS));
        }
        let file = Arc::new(file);
        let engine = match refusal {
            None => Engine::Uring(UringShare::default()),
            Some(why) => match Threads::start(&file) {
                Ok(threads) => Engine::Threads(threads, why),
                Err(source) => return Err(RawDiskError::Threads { why, source }),
            },
        };
        Ok(Self {
            engine,
            now: Now::new(&file, kind.is_file() && !options.o_direct),
            waits: now::may_wait(&file),
            file,
            capacity,
            alignment,
            support,
            options,
            slots: Vec::new(),
            pool: None,
            keep: None,
            in_flight: 0,
            early: Vec::new(),
            answers: Vec::new(),
            scratch: Vec::new(),
            syncs: Syncs::default(),
            changes: Turns::new(ALONE),
            zero_writers: Turns::new(WRITERS),
            refused: Vec::new(),
        })
    }
}

/// Takes O_NONBLOCK from an open file, with which it may have been opened so that a FIFO is not
/// waited for. io_uring takes the flag for a promise that no operation waits, and begins all of
/// them in the thread that enters the ring.
fn clear_nonblock(file: &File) -> io::Result<()> {
    let flags = fcntl_getfl(file)?;
    Ok(fcntl_setfl(file, flags - OFlags::NONBLOCK)?)
}
