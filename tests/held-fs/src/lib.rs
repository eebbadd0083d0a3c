//! A FUSE file system whose reads, writes and flushes a test can hold, fail and count.
//!
//! A fake disk that holds requests *before* they reach the kernel says nothing about the kernel:
//! whether io_uring can cancel a direct read in flight, what an fsync in a worker thread returns,
//! what `close` waits for. Here the kernel itself waits, in FUSE, for a reply that the test
//! withholds.
//!
//! ```no_run
//! use held_fs::{HeldFs, Kind};
//!
//! let Some(fs) = HeldFs::mount_or_skip() else { return };
//! let gate = fs.create("disk.raw", 1 << 20);
//! gate.hold(&[Kind::Sync]);
//! let path = fs.path("disk.raw");
//! let flusher = std::thread::spawn(move || std::fs::File::open(path).unwrap().sync_data());
//! gate.wait_until_held(1); // the thread waits in the kernel
//! gate.release();
//! flusher.join().unwrap().unwrap();
//! ```
//!
//! There is one flat directory. The bytes of each file are in a memfd, which [`Gate::contents`]
//! accesses directly. Pages are cached as on any file system (writes go through the cache);
//! O_DIRECT bypasses the cache, and the kernel completes it asynchronously. Locks are the kernel's
//! own. Each file of a mount has its own gate; files do not wait for each other.
//!
//! **What is held** is an operation as the kernel sends it: read-ahead may merge several reads, a
//! large write may be split, and reads that the page cache answers never arrive here. A held fsync
//! or buffered write holds the inode's lock, as on a local file system, so writes behind it wait in
//! the kernel and are not counted as held. An operation of an io_uring may arrive only after its
//! owner has entered the kernel a few more times.
//!
//! io_uring's threads execute buffered writes of different files one after the other if the files
//! share one of 64 hash buckets, so a held write may delay another.
//!
//! **Ends.** Dropping [`HeldFs`] releases everything for good and unmounts, also while a panic
//! unwinds. A process that is killed with operations held could not end: they are not
//! interruptible, and its io_uring waits for them while it keeps the file system's own descriptor
//! open. So a child process waits until the threads of this process have ended, and then aborts the
//! connection.

mod gate;
mod server;

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;

pub use gate::{Gate, Kind};
use server::{Direct, Files, Server};
use tempfile::TempDir;

/// Shell script: aborts the connection and unmounts once the thread `$2` of process `$1` has ended.
/// `$3` is the connection, `$4` the mount point. Aborting needs /sys/fs/fuse/connections, umount
/// needs root, the last line fusermount.
const WATCH: &str = r#"
while [ -d "/proc/$1/task/$2" ]; do sleep 0.2; done
echo 1 >"/sys/fs/fuse/connections/$3/abort"
umount -f "$4"
umount -l "$4" || fusermount3 -u -z "$4" || fusermount -u -z "$4"
"#;

/// A mounted file system, empty at first. Unmounted when dropped.
pub struct HeldFs {
    // Fields are dropped in this order: the mount before the directory that it is mounted on.
    session: Option<fuser::BackgroundSession>,
    watch: Option<Watch>,
    files: Arc<Files>,
    directory: TempDir,
}

impl fmt::Debug for HeldFs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldFs")
            .field("at", &self.directory.path())
            .finish_non_exhaustive()
    }
}

impl HeldFs {
    /// Mounts a file system on a new directory.
    ///
    /// # Errors
    /// FUSE cannot be used here: no `/dev/fuse`, or neither root nor fusermount.
    pub fn mount() -> io::Result<Self> {
        Self::mount_with(Direct::Asynchronous)
    }

    fn mount_with(direct: Direct) -> io::Result<Self> {
        let directory = tempfile::Builder::new().prefix("held-fs-").tempdir()?;
        let files = Arc::new(Files::default());
        let mut config = fuser::Config::default();
        config.mount_options = vec![fuser::MountOption::FSName("held-fs".to_owned())];
        let server = Server {
            files: Arc::clone(&files),
            direct,
        };
        let session = fuser::Session::new(server, directory.path(), &config)?;
        // From here on, dropping `fs` unmounts.
        let mut fs = Self {
            session: Some(session.spawn()?),
            watch: None,
            files,
            directory,
        };
        let device = fs.directory.path().metadata()?.dev();
        fs.watch = Some(Watch::start(
            rustix::fs::minor(device),
            fs.directory.path(),
        )?);
        Ok(fs)
    }

    /// Mounts as [`mount`](Self::mount) does. If FUSE cannot be used, prints the reason and returns
    /// `None`: the test is skipped.
    pub fn mount_or_skip() -> Option<Self> {
        Self::or_skip(Self::mount())
    }

    /// Mounts as [`mount_or_skip`](Self::mount_or_skip) does, but a direct operation blocks the
    /// thread that makes it, as on a file system without asynchronous direct I/O.
    pub fn mount_waiting_or_skip() -> Option<Self> {
        Self::or_skip(Self::mount_with(Direct::Waiting))
    }

    fn or_skip(mounted: io::Result<Self>) -> Option<Self> {
        match mounted {
            Ok(fs) => Some(fs),
            Err(error) => {
                println!(
                    "skipped: no FUSE file system to be had here (root or fusermount3, /dev/fuse): \
                     {error}"
                );
                None
            }
        }
    }

    /// Returns the path of file `name`, which need not exist.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Creates file `name` with `len` bytes of zeroes. Files may as well be created through the
    /// path.
    ///
    /// # Panics
    /// If it exists, or memory is short.
    pub fn create(&self, name: &str, len: u64) -> Gate {
        let file = self.files.create(name.as_ref(), 0o644);
        let file = file.expect("a new name, and memory for it");
        file.gate
            .contents()
            .set_len(len)
            .expect("a memfd takes any length");
        file.gate.clone()
    }

    /// Returns a guard for tests with an object whose drop waits for held operations, for example a
    /// thread with an io_uring. Declared after that object, the guard is dropped first, and
    /// releases the operations even if the test panics.
    #[must_use]
    pub fn release_at_end(&self) -> ReleaseAtEnd {
        ReleaseAtEnd(Arc::clone(&self.files))
    }

    /// Returns the gate of file `name`.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn gate(&self, name: &str) -> Gate {
        let file = self.files.find(name.as_ref());
        file.unwrap_or_else(|| panic!("no file {name} in this file system"))
            .gate
            .clone()
    }
}

/// Guard that releases everything for good when it is dropped; see [`HeldFs::release_at_end`].
#[derive(Debug)]
pub struct ReleaseAtEnd(Arc<Files>);

impl Drop for ReleaseAtEnd {
    fn drop(&mut self) {
        self.0.open_for_ever();
    }
}

impl Drop for HeldFs {
    fn drop(&mut self) {
        self.files.open_for_ever();
        // This fails while a process has a file open. Its calls are then served until this process
        // ends, but the mount is removed now.
        drop(self.session.take());
        drop(self.watch.take());
        let at = self.directory.path();
        let is_mounted = match (at.metadata(), at.parent().map(|parent| parent.metadata())) {
            (Ok(own), Some(Ok(parent))) => own.dev() != parent.dev(),
            _ => true,
        };
        if is_mounted {
            let lazily = r#"umount -l "$1" || fusermount3 -u -z "$1" || fusermount -u -z "$1""#;
            let _ = quiet_shell(lazily).arg(at).status();
        }
    }
}

/// The child process that unmounts if this process is killed, and the thread whose end it waits
/// for. That thread never uses an io_uring, so it ends at once when the process is killed, even
/// while other threads wait.
struct Watch {
    child: Child,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn start(connection: u32, at: &std::path::Path) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("held-fs watch".to_owned())
            .spawn(move || {
                let _ = tell.send(rustix::thread::gettid());
                let _ = stopped.recv();
            })?;
        let tid = told.recv().expect("the thread's first act");
        let child = quiet_shell(WATCH)
            .arg(std::process::id().to_string())
            .arg(tid.as_raw_nonzero().to_string())
            .arg(connection.to_string())
            .arg(at)
            .process_group(0) // not ended with us by Ctrl-C
            .spawn()?;
        Ok(Self {
            child,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn quiet_shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", script, "held-fs"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}
