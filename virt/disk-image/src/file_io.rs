//! Calls of this crate on the file under an image: all that reads, changes and syncs it goes
//! through [`FileIo`].
//!
//! There is one implementation outside of tests, an open file. Tests put others in its place: one
//! that records what is written between syncs, to replay every state that a power cut could leave,
//! and one whose sync fails.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use vio::blk::SECTOR;
use vio::blk::range::{self, RangeSupport};

/// A file, or what stands for one.
pub(crate) trait FileIo: Send + Sync {
    /// Reads bytes at `offset`, perhaps fewer than `buffer` holds; 0: the end of the file.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes all of `bytes`, and grows the file to their end.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Grows the file; the new part reads as zeroes.
    fn grow(&self, len: u64) -> io::Result<()>;

    /// fallocate, for ranges inside the file.
    fn fallocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> io::Result<()>;

    /// Calls that it has for ranges, if it is open for writing and ends at `end`.
    fn range_support(&self, end: u64) -> RangeSupport {
        let _ = end;
        RangeSupport::default()
    }

    /// Returns when everything written before is on the disk (fdatasync).
    fn sync_data(&self) -> io::Result<()>;
}

/// Reads all of `buffer` from a file that has `len` bytes: what lies beyond them reads as zero, and
/// what lies before has to be there.
pub(crate) fn read_known(
    file: &dyn FileIo,
    buffer: &mut [u8],
    offset: u64,
    len: u64,
) -> io::Result<()> {
    let done = read_some(file, buffer, offset)?;
    let rest = &mut buffer[done..];
    if offset + (done as u64) < len && !rest.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!(
                "the file ends at {:#x} and had {len:#x} bytes: it was cut while in use",
                offset + done as u64
            ),
        ));
    }
    rest.fill(0);
    Ok(())
}

/// Reads up to the end of the file. Returns the number of bytes read.
pub(crate) fn read_some(file: &dyn FileIo, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

impl FileIo for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, offset)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }

    fn grow(&self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }

    fn fallocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
        let too_large = |_| io::Error::from_raw_os_error(libc::EFBIG);
        let (offset, len) = (
            i64::try_from(offset).map_err(too_large)?,
            i64::try_from(len).map_err(too_large)?,
        );
        loop {
            match fallocate(self, mode, offset, len) {
                Ok(()) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn range_support(&self, end: u64) -> RangeSupport {
        range::probe(self, end, SECTOR as u32)
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }
}
