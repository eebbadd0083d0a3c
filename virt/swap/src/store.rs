//! The swap store: a file or a block device that holds pages, a slot each.
//!
//! What it holds is of use to nobody but the process that wrote it, and to that only while it lives: where a page is stands in
//! the [`book`](crate::book), in memory. So a file is made anew, for its owner's eyes only, with all its blocks allocated (a
//! write finds no full file system), and has no name from then on: it goes with the process, however that ends.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, fcntl_getfl, fcntl_setfl, seek};

use crate::frames::PAGE;

/// Why there is no store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is a file already, which may be anybody's.
    #[error(
        "{}: there is a file of this name; the swap store makes one of its own: remove it, or name another",
        .0.display()
    )]
    Exists(PathBuf),
    /// Too few or too many bytes.
    #[error("{}: a swap store of {bytes} bytes; it takes 4096 to 16 TiB", path.display())]
    Size {
        /// Which.
        path: PathBuf,
        /// How many were asked for, or the device has.
        bytes: u64,
    },
    /// The kernel's reason.
    #[error("{}: {what}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What could not be done.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// A store that is open.
#[derive(Debug)]
pub struct Store {
    file: File,
    slots: u32,
}

impl Store {
    /// Makes a file of `bytes`, or takes a block device that nobody else uses, as far as `bytes` go.
    ///
    /// # Errors
    /// See [`StoreError`]. Nothing is left behind, and nothing that was there is touched.
    pub fn open(path: &Path, bytes: u64) -> Result<Self, StoreError> {
        let failed = |what| {
            move |source: io::Error| StoreError::Io {
                path: path.to_owned(),
                what,
                source,
            }
        };
        let is_device = match std::fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => true,
            Ok(_) => return Err(StoreError::Exists(path.to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(failed("looking at it")(error)),
        };
        let slots_of = |bytes: u64| {
            let size = StoreError::Size {
                path: path.to_owned(),
                bytes,
            };
            // One less than there are numbers: the book's last one means none.
            let slots = u32::try_from(bytes / PAGE as u64).map_err(|_| ());
            match slots {
                Ok(slots) if slots > 0 && slots < u32::MAX => Ok(slots),
                _ => Err(size),
            }
        };
        if is_device {
            let file = options(OFlags::EXCL).open(path);
            let file = file.map_err(failed("opening a block device that nobody else may use"))?;
            let has = seek(&file, SeekFrom::End(0)).map_err(io::Error::from);
            let slots = slots_of(bytes.min(has.map_err(failed("asking for its size"))?))?;
            pass_the_page_cache(&file).map_err(failed(DIRECT))?;
            return Ok(Self { file, slots });
        }
        let slots = slots_of(bytes)?;
        let file = options(OFlags::empty())
            .create_new(true)
            .mode(0o600)
            .open(path);
        let file = file.map_err(failed("making a file"))?;
        let name = std::fs::remove_file(path);
        name.map_err(failed("removing its name"))?;
        pass_the_page_cache(&file).map_err(failed(DIRECT))?;
        let len = u64::from(slots) * PAGE as u64;
        let room = fallocate(&file, FallocateFlags::empty(), 0, len);
        room.map_err(|error| failed("allocating its blocks")(error.into()))?;
        Ok(Self { file, slots })
    }

    /// Pages that it has room for.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// The file, for who reads and writes it in a way of their own.
    pub fn into_file(self) -> File {
        self.file
    }
}

const DIRECT: &str = "its file system has no direct I/O (O_DIRECT): name a file on another";

/// The page cache would keep in memory what is to leave it.
fn pass_the_page_cache(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? | OFlags::DIRECT)?)
}

fn options(more: OFlags) -> OpenOptions {
    let mut options = OpenOptions::new();
    let flags = more.bits().cast_signed();
    options.read(true).write(true).custom_flags(flags);
    options
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::frames::Content;

    fn filled(byte: u8) -> Content {
        let mut content = Content::default();
        content.fill(byte);
        content
    }

    #[test]
    fn slots_hold_what_was_written_and_the_file_has_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("swap");
        let store = match Store::open(&path, 64 * PAGE as u64 + 100) {
            Err(error) if error.to_string().contains(DIRECT) => {
                return eprintln!("skipped: {error}");
            }
            store => store.unwrap(),
        };
        assert_eq!(store.slots(), 64);
        assert!(!path.exists());
        let file = store.into_file();
        for slot in [0, 63, 7] {
            let content = filled(slot as u8 + 1);
            file.write_all_at(&content[..], slot * PAGE as u64).unwrap();
        }
        let mut found = Content::default();
        for slot in [7, 0, 63] {
            file.read_exact_at(&mut found[..], slot * PAGE as u64)
                .unwrap();
            assert_eq!(found, filled(slot as u8 + 1));
        }
    }

    #[test]
    fn a_file_that_is_there_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        std::fs::write(&path, b"letters").unwrap();
        let error = Store::open(&path, 1 << 20).unwrap_err();
        assert!(
            error.to_string().contains("remove it, or name another"),
            "{error}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), b"letters");
    }

    #[test]
    fn a_size_without_room_for_a_page_is_refused_and_so_is_one_beyond_all_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("swap");
        for bytes in [0, 4095, 1 << 44, u64::MAX] {
            let error = Store::open(&path, bytes).unwrap_err();
            assert!(matches!(error, StoreError::Size { .. }), "{bytes}: {error}");
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = Store::open(Path::new("/no/such/swap"), 1 << 20).unwrap_err();
        assert!(error.to_string().starts_with("/no/such/swap: "), "{error}");
    }

    #[test]
    fn a_full_file_system_is_said_at_once_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("swap");
        // More than any disk of a machine that runs tests.
        let error = Store::open(&path, (1 << 44) - PAGE as u64 * 4).unwrap_err();
        let said = error.to_string();
        assert!(
            said.contains("allocating") || said.contains(DIRECT),
            "{said}"
        );
        assert!(!path.exists());
    }
}
