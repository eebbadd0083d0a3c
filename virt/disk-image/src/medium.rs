//! What this crate asks of the file under an image: all that reads, changes and syncs it goes through [`Medium`].
//!
//! There is one implementation outside of tests, an open file. Tests put others in its place: one that records what
//! is written between syncs, to replay every state that a power cut could leave, and one whose sync fails.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use vio::blk::SECTOR;
use vio::blk::range::{self, RangeSupport};

/// A file, or what stands for one.
pub(crate) trait Medium: Send + Sync {
    /// Reads what is at `offset`, perhaps less than `buffer` holds; 0: the end of the file.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes all of `bytes`, and grows the file to their end.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Grows the file; what is new reads as zeroes.
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

/// Reads all of `buffer`; what lies beyond the end of the file reads as zero.
pub(crate) fn read_padded(
    file: &dyn Medium,
    mut buffer: &mut [u8],
    mut offset: u64,
) -> io::Result<()> {
    while !buffer.is_empty() {
        match file.read_at(buffer, offset) {
            Ok(0) => {
                buffer.fill(0);
                return Ok(());
            }
            Ok(count) => {
                buffer = &mut buffer[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Medium for File {
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
