//! State shared by all threads of a run: the device, opened both ways, and the locks of operations
//! that must not overlap.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};

use crate::BLOCK;
use crate::device::{self, Trim};

/// Path of a request to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IoPath {
    /// Through the page cache.
    Cached,
    /// Direct I/O.
    Direct,
}

impl IoPath {
    pub fn name(self) -> &'static str {
        match self {
            Self::Cached => "read through the page cache",
            Self::Direct => "read by direct I/O",
        }
    }
}

pub(super) struct Shared {
    pub seed: u64,
    cached: File,
    /// Descriptor for direct I/O; `None` where the file system has none.
    direct: Option<File>,
    /// The smallest direct request, in bytes.
    pub sector: usize,
    is_device: bool,
    can_discard: AtomicBool,
    can_zero: AtomicBool,
    can_unmap: AtomicBool,
    /// Held by the thread that has a child: one at a time, so that copies on write need memory for
    /// one only.
    pub children: Mutex<()>,
    /// Held by direct requests; fork(2) excludes them, since open(2) forbids both at once on
    /// private memory.
    pub direct_requests: RwLock<()>,
    /// Comparisons so far, of all threads.
    pub operations: AtomicU64,
    /// Set when all threads are to end.
    pub stop: AtomicBool,
}

impl Shared {
    /// Opens a device or file.
    ///
    /// # Errors
    /// The system's own.
    pub fn open(path: &Path, seed: u64) -> io::Result<Self> {
        let cached = device::open_cached(path, true)?;
        let direct = device::open_direct(path, true)?;
        Self::of(cached, direct, seed)
    }

    fn of(cached: File, direct: Option<File>, seed: u64) -> io::Result<Self> {
        Ok(Self {
            seed,
            sector: device::sector(&cached)?,
            is_device: device::is_block_device(&cached)?,
            cached,
            direct,
            can_discard: AtomicBool::new(true),
            can_zero: AtomicBool::new(true),
            can_unmap: AtomicBool::new(true),
            children: Mutex::new(()),
            direct_requests: RwLock::new(()),
            operations: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        })
    }

    /// Opens the same file as if its file system had no direct I/O.
    #[cfg(test)]
    pub fn without_direct(&self) -> Self {
        let cached = self.cached.try_clone().expect("another descriptor");
        Self::of(cached, None, self.seed).expect("as before")
    }

    /// Returns the number of whole blocks.
    pub fn blocks(&self) -> io::Result<u64> {
        device::blocks(&self.cached)
    }

    pub fn has_direct(&self) -> bool {
        self.direct.is_some()
    }

    pub fn is_stopped(&self) -> bool {
        // Relaxed: the error itself is reported under a lock.
        self.stop.load(Ordering::Relaxed)
    }

    /// Reads from byte `at` on.
    pub fn read(&self, way: IoPath, at: u64, data: &mut [u8]) -> Result<(), String> {
        self.by(way, |file| file.read_exact_at(data, at))
            .map_err(|error| failed("read", way, at, &error))
    }

    /// Writes from byte `at` on.
    pub fn write(&self, way: IoPath, at: u64, data: &[u8]) -> Result<(), String> {
        self.by(way, |file| file.write_all_at(data, at))
            .map_err(|error| failed("write", way, at, &error))
    }

    fn by(&self, way: IoPath, request: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
        match (way, &self.direct) {
            (IoPath::Direct, Some(direct)) => {
                let _held = self
                    .direct_requests
                    .read()
                    .expect("who forks does not panic");
                request(direct)
            }
            _ => request(&self.cached),
        }
    }

    pub fn sync(&self) -> Result<(), String> {
        self.cached
            .sync_data()
            .map_err(|error| format!("flush: {error}"))
    }

    /// Writes back dirty pages, and drops the page cache's copies of these blocks.
    pub fn forget(&self, number: u64, count: u64) -> Result<(), String> {
        self.sync()?;
        device::forget(&self.cached, number, count)
            .map_err(|error| format!("advice to forget block {number}: {error}"))
    }

    /// Drops all of the kernel's caches. Returns false where that is not asked for: a run on a file
    /// is not in a guest.
    pub fn drop_caches(&self) -> Result<bool, String> {
        if !self.is_device {
            return Ok(false);
        }
        self.sync()?;
        let path = "/proc/sys/vm/drop_caches";
        // 4: no line in the kernel's log from then on.
        for word in ["4", "1"] {
            fs::write(path, word).map_err(|error| format!("{path}: {error}: run this as root"))?;
        }
        Ok(true)
    }

    /// Deallocates blocks. Returns false if the device cannot.
    pub fn trim(&self, number: u64, count: u64, how: Trim) -> Result<bool, String> {
        let can = match how {
            Trim::Discard => &self.can_discard,
            Trim::Zero => &self.can_zero,
            Trim::ZeroAndUnmap => &self.can_unmap,
        };
        // Relaxed: the flag orders nothing.
        if !can.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match device::trim(&self.cached, number, count, how) {
            Ok(()) => Ok(true),
            // ENOTTY: a regular file has no discard.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY)) => {
                can.store(false, Ordering::Relaxed);
                Ok(false)
            }
            Err(error) => Err(format!("{how:?} of block {number}: {error}")),
        }
    }
}

fn failed(what: &str, way: IoPath, at: u64, error: &io::Error) -> String {
    let block = at / BLOCK as u64;
    format!("{what} of block {block} ({way:?}): {error}")
}
