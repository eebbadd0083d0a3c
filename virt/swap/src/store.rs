//! The swap store: a file or a block device with slots of one page each.
//!
//! Its content is of use only to the process that wrote it, and only during its lifetime: the
//! [`residency`](crate::residency), which maps pages to slots, is in memory. So a file is created
//! anew, readable by its owner only, with all its blocks allocated (no write meets a full file
//! system, unless blocks have been trimmed). Its name is removed at once, so the file is deleted
//! when the process ends in any way. It can grow while it is used ([`Growth`]), and never shrinks.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    FallocateFlags, OFlags, SeekFrom, fallocate, fcntl_getfl, fcntl_setfl, ftruncate, seek,
};
use rustix::io::Errno;

use crate::frames::PAGE;

/// Reason why the store cannot be opened or grown.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file of that name exists, and may have another use.
    #[error(
        "{}: there is a file of this name; the swap store makes one of its own: remove it, or name \
         another",
        .0.display()
    )]
    Exists(PathBuf),
    /// Too few or too many bytes.
    #[error("{}: a swap store of {bytes} bytes; it takes 4096 to 16 TiB", path.display())]
    Size {
        /// Path of the store.
        path: PathBuf,
        /// Bytes that were requested, or that the device has.
        bytes: u64,
    },
    /// The store is already larger.
    #[error("{}: the swap store has {has} bytes and can only grow, not to {bytes}", path.display())]
    Smaller {
        /// Path of the store.
        path: PathBuf,
        /// Bytes that were asked for.
        bytes: u64,
        /// Bytes that it has.
        has: u64,
    },
    /// A block device cannot hold that much.
    #[error("{}: the block device has {has} bytes, so the swap store on it cannot have \
         {bytes}", path.display())]
    Device {
        /// Path of the device.
        path: PathBuf,
        /// Bytes that were asked for.
        bytes: u64,
        /// Bytes that the device has.
        has: u64,
    },
    /// A system call failed.
    #[error("{}: {what}", path.display())]
    Io {
        /// Path of the store.
        path: PathBuf,
        /// Operation that failed.
        what: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
}

/// An open store.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    file: File,
    slots: u32,
    is_device: bool,
}

impl Store {
    /// Creates a file of `bytes`, or opens a block device that no other process uses, and uses at
    /// most `bytes` of it.
    ///
    /// # Errors
    /// See [`StoreError`]. Nothing is left behind, and existing files are not changed.
    pub fn open(path: &Path, bytes: u64) -> Result<Self, StoreError> {
        let failed = |what| failed(path, what);
        let is_device = match std::fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => true,
            Ok(_) => return Err(StoreError::Exists(path.to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(failed("looking at it")(error)),
        };
        if is_device {
            let file = options(OFlags::EXCL).open(path);
            let file = file.map_err(failed("opening a block device that nobody else may use"))?;
            let has = seek(&file, SeekFrom::End(0)).map_err(io::Error::from);
            let has = has.map_err(failed("asking for its size"))?;
            let slots = slots_of(path, bytes.min(has))?;
            pass_the_page_cache(&file).map_err(failed(DIRECT))?;
            return Ok(Self {
                path: path.to_owned(),
                file,
                slots,
                is_device,
            });
        }
        let slots = slots_of(path, bytes)?;
        let file = options(OFlags::empty())
            .create_new(true)
            .mode(0o600)
            .open(path);
        let file = file.map_err(failed("making a file"))?;
        let name = std::fs::remove_file(path);
        name.map_err(failed("removing its name"))?;
        pass_the_page_cache(&file).map_err(failed(DIRECT))?;
        let len = u64::from(slots) * PAGE as u64;
        allocate(&file, 0, len).map_err(failed("allocating its blocks"))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            slots,
            is_device,
        })
    }

    /// Returns the number of slots, one page each.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns a handle that enlarges the store, also while the reader and writer of
    /// [`into_file`](Self::into_file) use it.
    ///
    /// # Errors
    /// The kernel's error: no descriptor is free.
    pub fn growth(&self) -> io::Result<Growth> {
        Ok(Growth {
            path: self.path.clone(),
            file: self.file.try_clone()?,
            slots: self.slots,
            is_device: self.is_device,
        })
    }

    /// Returns the file, for the code that reads and writes pages.
    pub fn into_file(self) -> File {
        self.file
    }
}

/// Handle that enlarges a store while others read and write it. The content of its slots stays in
/// place.
#[derive(Debug)]
pub struct Growth {
    path: PathBuf,
    file: File,
    slots: u32,
    is_device: bool,
}

impl Growth {
    /// Returns the number of slots, one page each.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Enlarges the store to `bytes`, 4096 to 16 TiB, rounded down to whole pages. Returns the
    /// number of slots added at the end; 0 if it has as many already. The blocks of a file are
    /// allocated before it returns, which may take long; existing slots can be read and written
    /// meanwhile.
    ///
    /// # Errors
    /// See [`StoreError`]: the store would shrink, the block device is too small, or the file
    /// system has no room. The store is unchanged then.
    pub fn grow(&mut self, bytes: u64) -> Result<u32, StoreError> {
        let failed = |what| failed(&self.path, what);
        let has = u64::from(self.slots) * PAGE as u64;
        let slots = slots_of(&self.path, bytes)?;
        let Some(added) = slots.checked_sub(self.slots) else {
            return Err(StoreError::Smaller {
                path: self.path.clone(),
                bytes,
                has,
            });
        };
        if added == 0 {
            return Ok(0);
        }
        let len = u64::from(slots) * PAGE as u64;
        if self.is_device {
            let has = seek(&self.file, SeekFrom::End(0)).map_err(io::Error::from);
            let has = has.map_err(failed("asking for its size"))?;
            if len > has {
                return Err(StoreError::Device {
                    path: self.path.clone(),
                    bytes,
                    has,
                });
            }
        } else if let Err(error) = allocate(&self.file, has, len - has) {
            // Blocks that were allocated before the file system was full are freed. A failure to do
            // so only wastes their space.
            let _ = ftruncate(&self.file, has);
            return Err(failed("allocating more blocks")(error));
        }
        self.slots = slots;
        Ok(added)
    }
}

/// Returns a function that converts the kernel's error into that of the failed operation `what`.
fn failed(path: &Path, what: &'static str) -> impl Fn(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io {
        path: path.clone(),
        what,
        source,
    }
}

/// Returns the number of slots in `bytes`.
fn slots_of(path: &Path, bytes: u64) -> Result<u32, StoreError> {
    // Below `u32::MAX`, which the residency uses for no page.
    match u32::try_from(bytes / PAGE as u64) {
        Ok(slots) if slots > 0 && slots < u32::MAX => Ok(slots),
        _ => Err(StoreError::Size {
            path: path.to_owned(),
            bytes,
        }),
    }
}

const DIRECT: &str = "its file system has no direct I/O (O_DIRECT): name a file on another";

/// Bypasses the page cache, which would keep evicted pages in memory.
fn pass_the_page_cache(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? | OFlags::DIRECT)?)
}

/// Allocates the blocks of `len` bytes from `offset` on, both multiples of a page. If the host
/// cannot allocate them, zeroes are written.
fn allocate(file: &File, offset: u64, len: u64) -> io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), offset, len) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM) => {}
        done => return Ok(done?),
    }
    /// Bytes of one write. Direct I/O also needs a buffer aligned to a page.
    const STEP: usize = 1 << 20;
    let buffer = vec![0; STEP + PAGE];
    let start = buffer.as_ptr().align_offset(PAGE);
    let zeroes = &buffer[start..start + STEP];
    for at in (offset..offset + len).step_by(STEP) {
        let step = (offset + len - at).min(STEP as u64) as usize;
        file.write_all_at(&zeroes[..step], at)?;
    }
    Ok(())
}

fn options(more: OFlags) -> OpenOptions {
    let mut options = OpenOptions::new();
    let flags = more.bits().cast_signed();
    options.read(true).write(true).custom_flags(flags);
    options
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

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
        let mode = file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "for its owner's eyes only");
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
    fn a_store_grows_behind_what_it_holds_and_never_shrinks() {
        let dir = tempfile::tempdir().unwrap();
        let store = match Store::open(&dir.path().join("swap"), 4 * PAGE as u64) {
            Err(error) if error.to_string().contains(DIRECT) => {
                return eprintln!("skipped: {error}");
            }
            store => store.unwrap(),
        };
        let mut growth = store.growth().unwrap();
        let file = store.into_file();
        file.write_all_at(&filled(9)[..], 3 * PAGE as u64).unwrap();
        // Bytes beyond the last whole page do not count.
        assert_eq!(growth.grow(6 * PAGE as u64 + 4095).unwrap(), 2);
        assert_eq!(growth.grow(6 * PAGE as u64).unwrap(), 0);
        assert_eq!(growth.slots(), 6);
        // All of the file has blocks.
        assert!(allocated(&file) >= 6 * PAGE as u64);
        file.write_all_at(&filled(7)[..], 5 * PAGE as u64).unwrap();
        let mut found = Content::default();
        file.read_exact_at(&mut found[..], 3 * PAGE as u64).unwrap();
        assert_eq!(found, filled(9));
        let error = growth.grow(4 * PAGE as u64).unwrap_err();
        assert!(
            matches!(
                error,
                StoreError::Smaller {
                    has: 24_576,
                    bytes: 16_384,
                    ..
                }
            ),
            "{error}"
        );
        for bytes in [0, 4095, 1 << 44, u64::MAX] {
            let error = growth.grow(bytes).unwrap_err();
            assert!(matches!(error, StoreError::Size { .. }), "{bytes}: {error}");
        }
        assert_eq!(growth.slots(), 6);
    }

    /// Returns the bytes of blocks that a file has.
    fn allocated(file: &File) -> u64 {
        use std::os::unix::fs::MetadataExt;
        file.metadata().unwrap().blocks() * 512
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
        // More than any disk of a machine that runs tests has.
        let error = Store::open(&path, (1 << 44) - PAGE as u64 * 4).unwrap_err();
        let said = error.to_string();
        assert!(
            said.contains("allocating") || said.contains(DIRECT),
            "{said}"
        );
        assert!(!path.exists());
    }
}
