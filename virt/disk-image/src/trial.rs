//! Trial opening of an image. It fails where [`ImageDisk::open`](crate::ImageDisk::open) would
//! fail, by the same code, but locks nothing and changes no byte of a file.
//!
//! Files are opened for reading. Data that opening would write (a header, reference counts that a
//! power failure has left too low) are kept in memory, as an overlay of the file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, FallocateFlags};
use nix::unistd::{AccessFlags, faccessat};

use crate::file_io::FileIo;
use crate::lock::Access;

/// A file that would be in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileUse {
    /// Path as given by the caller, or as named by the image that this one backs.
    pub path: PathBuf,
    /// Device and inode, by which two paths to one file are recognized.
    pub identity: (u64, u64),
    /// Access with which the file would be opened.
    pub access: Access,
}

/// Checks whether this process may write to the file at `path`.
pub(crate) fn may_write(path: &Path) -> io::Result<()> {
    let may = |flags| faccessat(AT_FDCWD, path, AccessFlags::W_OK, flags);
    let asked = match may(AtFlags::AT_EACCESS) {
        // Old seccomp profiles answer faccessat2 with EPERM instead of ENOSYS. Without flags the
        // older call is used, which checks the real user id.
        Err(Errno::EPERM) => may(AtFlags::empty()),
        asked => asked,
    };
    Ok(asked?)
}

/// A file with an overlay in memory that has all writes.
pub(crate) struct Overlay {
    file: File,
    written: Mutex<Written>,
}

/// Written pieces with their offsets, in order, and the length that the file would have.
#[derive(Default)]
struct Written {
    pieces: Vec<(u64, Vec<u8>)>,
    len: u64,
}

impl Overlay {
    pub(crate) fn new(file: File) -> Self {
        Self {
            file,
            written: Mutex::default(),
        }
    }

    fn written(&self) -> std::sync::MutexGuard<'_, Written> {
        // Each change is one assignment or one push.
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileIo for Overlay {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let own = read(&self.file, buffer, offset)?;
        let written = self.written();
        let beyond = usize::try_from(written.len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let len = own.max(beyond.min(buffer.len()));
        buffer[own..len].fill(0);
        for (at, bytes) in &written.pieces {
            let start = offset.max(*at);
            let end = (offset + len as u64).min(at + bytes.len() as u64);
            if start < end {
                let from = (start - at) as usize..(end - at) as usize;
                let to = (start - offset) as usize..(end - offset) as usize;
                buffer[to].copy_from_slice(&bytes[from]);
            }
        }
        Ok(len)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut written = self.written();
        written.len = written.len.max(offset + bytes.len() as u64);
        written.pieces.push((offset, bytes.to_vec()));
        Ok(())
    }

    fn grow(&self, len: u64) -> io::Result<()> {
        let mut written = self.written();
        written.len = written.len.max(len);
        Ok(())
    }

    fn fallocate(&self, _: FallocateFlags, _: u64, _: u64) -> io::Result<()> {
        // The overlay allocates no space, and the callers do not depend on it.
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads up to the end of the file. Returns the number of bytes read.
fn read(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match FileExt::read_at(file, &mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn written_data_are_read_back_and_the_file_stays_as_it_was() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"abcdef").unwrap();
        let overlay = Overlay::new(File::open(file.path()).unwrap());
        let read = |offset: u64, len: usize| {
            let mut buffer = vec![b'?'; len];
            let len = overlay.read_at(&mut buffer, offset).unwrap();
            String::from_utf8(buffer[..len].to_vec()).unwrap()
        };
        overlay.write_all_at(b"XY", 1).unwrap();
        overlay.write_all_at(b"Z", 2).unwrap();
        assert_eq!(read(0, 9), "aXZdef");
        assert_eq!(read(2, 2), "Zd");
        overlay.write_all_at(b"end", 8).unwrap();
        assert_eq!(read(4, 20), "ef\0\0end");
        overlay.grow(12).unwrap();
        assert_eq!(read(10, 20), "d\0");
        assert_eq!(read(12, 20), "");
        assert_eq!(std::fs::read(file.path()).unwrap(), b"abcdef");
    }
}
