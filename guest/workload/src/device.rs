//! Block devices (or files), without the page cache or through it: aligned buffers and whole-block
//! access.
//!
//! UNSAFETY: the standard library has no discard, no advice to the page cache and no question for a
//! device's sector; each takes one plain system call.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::BLOCK;

/// Alignment of buffers in memory, bytes: a page, so that one block is one DMA segment.
const ALIGN: usize = 4096;

/// A buffer whose content starts at a page.
#[derive(Debug, Clone)]
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// A zeroed buffer of `len` bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + ALIGN];
        let start = bytes.as_ptr().align_offset(ALIGN);
        Self { bytes, start, len }
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// Its bytes, to change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// Opens for direct I/O, or through the page cache where the file system has no direct I/O (tmpfs).
///
/// # Errors
/// The system's own.
pub fn open(path: &Path, writable: bool) -> io::Result<File> {
    match open_direct(path, writable)? {
        Some(file) => Ok(file),
        None => open_cached(path, writable),
    }
}

/// Opens for direct I/O; `None` where the file system has none.
///
/// # Errors
/// The system's own.
pub fn open_direct(path: &Path, writable: bool) -> io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    options.read(true).write(writable);
    match options.custom_flags(libc::O_DIRECT).open(path) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(None),
        other => other.map(Some),
    }
}

/// Opens for I/O through the page cache.
///
/// # Errors
/// The system's own.
pub fn open_cached(path: &Path, writable: bool) -> io::Result<File> {
    OpenOptions::new().read(true).write(writable).open(path)
}

/// Describes a device that cannot be opened or used: its name, the error, and advice.
#[must_use]
pub fn explain(path: &Path, error: &io::Error) -> String {
    let help = match error.kind() {
        io::ErrorKind::NotFound => {
            ": this machine has no such disk; `ls /dev/vd*` shows those it has"
        }
        io::ErrorKind::PermissionDenied => ": run this as root, on a disk that may be written",
        io::ErrorKind::ReadOnlyFilesystem => ": give the machine a disk that it may write",
        io::ErrorKind::InvalidInput => ": give the machine a larger disk",
        io::ErrorKind::ResourceBusy => ": unmount what lies on it",
        _ => "",
    };
    format!("{}: {error}{help}", path.display())
}

/// Returns the size of a block device or file in whole blocks.
///
/// # Errors
/// The system's own; `InvalidInput` if there is not one whole block.
pub fn blocks(file: &File) -> io::Result<u64> {
    use std::io::{Seek, SeekFrom};
    // A block device's metadata says 0; the position of its end is right.
    let mut file = file;
    let len = file.seek(SeekFrom::End(0))?;
    match len / BLOCK as u64 {
        0 => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("only {len} bytes"),
        )),
        blocks => Ok(blocks),
    }
}

/// Reads whole blocks from block `number` on.
///
/// # Errors
/// The system's own, with the block's number.
pub fn read(file: &File, number: u64, buffer: &mut Buffer) -> io::Result<()> {
    file.read_exact_at(buffer.bytes_mut(), number * BLOCK as u64)
        .map_err(|e| at("read", number, &e))
}

/// Writes whole blocks from block `number` on.
///
/// # Errors
/// The system's own, with the block's number.
pub fn write(file: &File, number: u64, buffer: &Buffer) -> io::Result<()> {
    file.write_all_at(buffer.bytes(), number * BLOCK as u64)
        .map_err(|e| at("write", number, &e))
}

/// Drops the page cache's copies of `count` whole blocks, as far as they are clean.
///
/// # Errors
/// The system's own.
#[expect(unsafe_code, reason = "no safe wrapper; see the module's head")]
pub fn forget(file: &File, number: u64, count: u64) -> io::Result<()> {
    let (start, len) = (
        signed(number * BLOCK as u64)?,
        signed(count * BLOCK as u64)?,
    );
    let advice = libc::POSIX_FADV_DONTNEED;
    // SAFETY: takes integers only and touches no memory of ours.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), start, len, advice) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Returns the smallest direct request of a block device, in bytes; a whole block for anything
/// else.
///
/// # Errors
/// The system's own.
#[expect(unsafe_code, reason = "no safe wrapper; see the module's head")]
pub fn sector(file: &File) -> io::Result<usize> {
    /// `_IO(0x12, 104)` of the kernel's `linux/fs.h`.
    const BLKSSZGET: libc::c_ulong = 0x1268;
    if !is_block_device(file)? {
        return Ok(BLOCK);
    }
    let mut len: libc::c_int = 0;
    // SAFETY: the descriptor is open; the request writes one `int`, which `len` is.
    done(unsafe { libc::ioctl(file.as_raw_fd(), BLKSSZGET, &raw mut len) })?;
    Ok(usize::try_from(len).map_or(BLOCK, |len| len.clamp(1, BLOCK)))
}

/// Returns whether it is a block device, not a regular file.
///
/// # Errors
/// The system's own.
pub fn is_block_device(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.file_type().is_block_device())
}

/// Kind of deallocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trim {
    /// Their content is undefined afterwards (virtio: DISCARD). Block devices only.
    Discard,
    /// They read as zeros afterwards and stay allocated (virtio: WRITE_ZEROES).
    Zero,
    /// They read as zeros afterwards, and their space may be freed (virtio: WRITE_ZEROES with
    /// UNMAP).
    ZeroAndUnmap,
}

/// Deallocates `count` whole blocks from block `number` on.
///
/// # Errors
/// The system's own; its number is `EOPNOTSUPP` where the device cannot.
#[expect(unsafe_code, reason = "no safe wrapper; see the module's head")]
pub fn trim(file: &File, number: u64, count: u64, how: Trim) -> io::Result<()> {
    /// `_IO(0x12, 119)` of the kernel's `linux/fs.h`.
    const BLKDISCARD: libc::c_ulong = 0x1277;
    let (start, len) = (number * BLOCK as u64, count * BLOCK as u64);
    let mode = match how {
        Trim::Discard => {
            let range = [start, len];
            // SAFETY: the descriptor is open; the request reads two 64-bit words, which `range`
            // has.
            let result = unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD, range.as_ptr()) };
            return done(result);
        }
        Trim::Zero => libc::FALLOC_FL_ZERO_RANGE,
        Trim::ZeroAndUnmap => libc::FALLOC_FL_PUNCH_HOLE,
    };
    let (start, len) = (signed(start)?, signed(len)?);
    let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: takes integers only and touches no memory of ours.
    done(unsafe { libc::fallocate(file.as_raw_fd(), mode, start, len) })
}

fn signed(value: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

fn done(result: libc::c_int) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn at(action: &str, number: u64, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{action} of block {number}: {error}"))
}

/// Polls every millisecond until `is_done` returns true.
///
/// # Errors
/// Those of `is_done`; `TimedOut`, with `what`, after `limit`.
pub fn wait_until(
    limit: Duration,
    what: &str,
    mut is_done: impl FnMut() -> io::Result<bool>,
) -> io::Result<()> {
    let deadline = Instant::now() + limit;
    while !is_done()? {
        if Instant::now() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_at_a_page() {
        for len in [BLOCK, 3 * BLOCK, 1] {
            let mut buffer = Buffer::new(len);
            assert_eq!(buffer.bytes().as_ptr().addr() % ALIGN, 0);
            assert_eq!(buffer.bytes_mut().len(), len);
        }
    }
}
