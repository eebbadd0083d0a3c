//! Locks on image files, the same as QEMU's, so that a writer has an image to itself whichever
//! program it is.
//!
//! QEMU (`block/file-posix.c`) takes shared OFD locks on single bytes: byte 100 + n by a process
//! that *uses* permission n, byte 200 + n by one that *does not share* it; then it tests that no
//! process holds the counterpart. The bytes need not exist. OFD locks belong to the open file
//! description, so two opens by one process exclude each other too.
//!
//! | | uses | does not share |
//! |---|---|---|
//! | [`Access::Read`]: a read-only image, a backing file | consistent read | write, resize |
//! | [`Access::Write`] | consistent read, write, resize | write, resize |
//!
//! These are the bytes that QEMU takes for a backing file and for a qcow2 image. So readers share
//! an image, a writer shares it with no other, and QEMU's programs with `-U` read it all the same.
//! Those that share everything read a raw image even without `-U` (`qemu-io -r`, `qemu-img info`),
//! beside a machine of QEMU's as beside us.
//!
//! **A predecessor that was killed** releases its lock only when the kernel has finished what it
//! had in flight: the lock lives as long as the open file description, which an operation of
//! io_uring and a thread in a system call hold. So the process that has the lock knows that no
//! write of the predecessor is still to come, which could otherwise overtake the next one; and
//! waiting for it is part of taking over. For how long: [`LIVE_PATIENCE`], [`PATIENCE`]. While it
//! waits it holds no lock, so that a holder that asks for more is not disturbed.
//!
//! **Block devices** are locked at the inode of the node that was opened, as QEMU does. A second
//! node of the same device has another inode, and a file system mounted from it has no lock at all.
//! A writer therefore also claims the device (`O_EXCL`), which excludes file systems, RAID and LVM,
//! and other writers of ours whatever node they use; but not QEMU, nor a reader, that uses another
//! node.
//!
//! **Not done:** locks of another kind (`flock`, POSIX) are neither taken nor seen.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

mod holders;

pub use holders::Holder;

/// Duration for which a process that can be seen to use the image is waited for: long enough for a
/// predecessor that was asked to end. The same holds for a block device that the kernel itself
/// uses.
pub const LIVE_PATIENCE: Duration = Duration::from_secs(2);
/// Duration for which a lock is waited for whose holder cannot be seen, because it was killed and
/// only the kernel still works for it (or because it belongs to another user): about as long as
/// Linux waits for a disk that does not answer.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Time after which the wait is reported to the user.
const TELL_AFTER: Duration = Duration::from_millis(500);
/// Interval between tries of a lock that is waited for, and between searches for its holders.
const RETRY: Duration = Duration::from_millis(5);
const LOOK: Duration = Duration::from_secs(1);

/// First byte of the locks for permissions in use, and for permissions not shared.
const USED: i64 = 100;
const UNSHARED: i64 = 200;
/// More than there are permissions.
const PERMISSIONS: i64 = 64;

/// Numbers of permissions, as QEMU counts them.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;
/// Neither readers nor writers share these.
const UNSHARED_BY_ALL: [i64; 2] = [WRITE, RESIZE];

/// Use for which an image is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading, beside other readers.
    Read,
    /// Reading and writing, beside no other.
    Write,
}

impl Access {
    /// Returns the access that a disk needs: writing, unless it is `read_only`.
    pub fn of_disk(read_only: bool) -> Self {
        match read_only {
            true => Self::Read,
            false => Self::Write,
        }
    }

    fn used(self) -> &'static [i64] {
        match self {
            Self::Read => &[CONSISTENT_READ],
            Self::Write => &[CONSISTENT_READ, WRITE, RESIZE],
        }
    }
}

/// Locking of images, and the means to end the wait for a lock.
#[derive(Clone, Copy, Debug)]
pub struct Locking {
    /// False: no lock is taken, and none is looked at. Nothing keeps two writers apart then.
    pub is_on: bool,
    /// Asked every few milliseconds during a wait: true ends it with [`LockError::GivenUp`].
    pub give_up: fn() -> bool,
}

impl Default for Locking {
    /// On, and waiting as long as the constants say.
    fn default() -> Self {
        Self {
            is_on: true,
            give_up: || false,
        }
    }
}

/// Use by another process that excludes ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// Another process may write to the image.
    Written,
    /// Another process reads the image and admits no writer.
    Read,
    /// Another process admits no reader.
    Exclusive,
}

/// Reason why an image cannot be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process uses it in a way that excludes ours.
    #[error("in use: {}", Users(.by, *.conflict))]
    InUse {
        /// In which way.
        conflict: Conflict,
        /// Its holders, as far as this process may see them; often none.
        by: Vec<Holder>,
    },
    /// A block device that a mount or another process has claimed.
    #[error(
        "in use: the block device is claimed (by a mounted file system, RAID, LVM, or another \
         process)"
    )]
    Claimed,
    /// The file's system has no locks.
    #[error("its file system refuses locks")]
    Unsupported(#[source] io::Error),
    /// [`Locking::give_up`] has ended the wait.
    #[error("in use; waiting for it was given up")]
    GivenUp,
    /// Something else failed.
    #[error("it cannot be locked")]
    Io(#[source] io::Error),
}

/// Subject and predicate of a conflict.
struct Users<'a>(&'a [Holder], Conflict);

impl fmt::Display for Users<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(holders, conflict) = self;
        match holders {
            [] => f.write_str(
                "somebody who cannot be seen (another user's process, or requests of a killed one \
                 that are still in flight)",
            )?,
            [first, others @ ..] => {
                write!(f, "{first}")?;
                for other in others {
                    write!(f, " or {other}")?;
                }
            }
        }
        f.write_str(match conflict {
            Conflict::Written => " writes to it",
            Conflict::Read => " reads it and lets nobody write",
            Conflict::Exclusive => " lets nobody read it",
        })
    }
}

/// Locks the open image `file`. The lock lasts until all descriptors of the returned file are
/// closed and operations started through them have ended.
///
/// It is the same open file, except for a block device that is to be written to, which is opened
/// again with the same flags and `O_EXCL`. `path` is for messages. Descriptors should be
/// close-on-exec, as those of `std` are: a child that inherits one keeps the lock.
///
/// Blocks up to [`PATIENCE`] if the image is in use, and says so in the log after half a second. If
/// this very process holds it, that is answered at once.
///
/// # Errors
/// See [`LockError`].
pub fn lock(file: File, path: &Path, access: Access, locking: &Locking) -> Result<File, LockError> {
    if !locking.is_on {
        return Ok(file);
    }
    let is_block = file
        .metadata()
        .map_err(LockError::Io)?
        .file_type()
        .is_block_device();
    let mut attempt = Attempt {
        file,
        access,
        needs_claim: is_block && access == Access::Write,
    };
    let start = Instant::now();
    let mut next_look = TELL_AFTER;
    let mut is_first = true;
    loop {
        let Some(obstacle) = attempt.run()? else {
            return Ok(attempt.file);
        };
        let waited = start.elapsed();
        if is_first {
            is_first = false;
            let own = holders::in_this_process(&attempt.file);
            if !own.is_empty() {
                return Err(obstacle.error(own));
            }
        }
        if waited >= next_look {
            let by = holders::anywhere(&attempt.file);
            let is_over = match obstacle {
                AcquireError::Claimed => waited >= LIVE_PATIENCE,
                AcquireError::Lock(_) => {
                    waited >= LIVE_PATIENCE && !by.is_empty() || waited >= PATIENCE
                }
            };
            if is_over {
                return Err(obstacle.error(by));
            }
            if next_look == TELL_AFTER {
                tracing::warn!("waiting for {}: {}", path.display(), obstacle.error(by));
                next_look = LIVE_PATIENCE;
            } else {
                next_look = waited + LOOK;
            }
        }
        if (locking.give_up)() {
            return Err(LockError::GivenUp);
        }
        std::thread::sleep(RETRY);
    }
}

/// Whether [`lock`] would get its lock at once. Takes none, not even for a moment, and does not
/// wait: users of the image do not notice. Only a block device that is to be written to is claimed,
/// and released at once.
///
/// # Errors
/// Finds what would keep [`lock`] from succeeding now; see [`LockError`].
pub fn probe(file: &File, access: Access, locking: &Locking) -> Result<(), LockError> {
    if !locking.is_on {
        return Ok(());
    }
    let attempt = Attempt {
        file: file.try_clone().map_err(LockError::Io)?,
        access,
        needs_claim: false,
    };
    if let Some(conflict) = attempt.conflict()? {
        return Err(AcquireError::Lock(conflict).error(holders::anywhere(file)));
    }
    let kind = file.metadata().map_err(LockError::Io)?.file_type();
    if kind.is_block_device() && access == Access::Write {
        let claimed = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_EXCL | libc::O_NONBLOCK)
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        claimed.map_err(|error| match error.raw_os_error() {
            Some(libc::EBUSY) => LockError::Claimed,
            _ => LockError::Io(error),
        })?;
    }
    Ok(())
}

/// Obstacle that one try has met.
#[derive(Clone, Copy)]
enum AcquireError {
    Lock(Conflict),
    Claimed,
}

impl AcquireError {
    fn error(self, by: Vec<Holder>) -> LockError {
        match self {
            Self::Lock(conflict) => LockError::InUse { conflict, by },
            Self::Claimed => LockError::Claimed,
        }
    }
}

struct Attempt {
    file: File,
    access: Access,
    /// A block device that has to be opened with `O_EXCL`, and is not yet.
    needs_claim: bool,
}

impl Attempt {
    /// Takes the lock, or leaves nothing locked and returns the obstacle.
    fn run(&mut self) -> Result<Option<AcquireError>, LockError> {
        // Check first, so that a process that waits does not lock anything, not even for a moment:
        // QEMU would fail because of it.
        if let Some(conflict) = self.conflict()? {
            return Ok(Some(AcquireError::Lock(conflict)));
        }
        if self.needs_claim {
            match reopen(&self.file, libc::O_EXCL) {
                Ok(claimed) => self.file = claimed,
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    return Ok(Some(AcquireError::Claimed));
                }
                Err(error) => return Err(LockError::Io(error)),
            }
            self.needs_claim = false;
        }
        // Take, then re-check: of two processes that take their locks at the same time, at least
        // one sees the other's.
        let conflict = match self.take()? {
            None => self.conflict()?,
            refused => refused,
        };
        if conflict.is_some() {
            self.release()?;
        }
        Ok(conflict.map(AcquireError::Lock))
    }

    /// Whether another process holds a byte that excludes our use.
    fn conflict(&self) -> Result<Option<Conflict>, LockError> {
        for permission in UNSHARED_BY_ALL {
            if self.is_held(USED + permission)? {
                return Ok(Some(Conflict::Written));
            }
        }
        for &permission in self.access.used() {
            if self.is_held(UNSHARED + permission)? {
                return Ok(Some(match permission {
                    CONSISTENT_READ => Conflict::Exclusive,
                    _ => Conflict::Read,
                }));
            }
        }
        Ok(None)
    }

    fn is_held(&self, byte: i64) -> Result<bool, LockError> {
        // What a shared lock of another process conflicts with is an exclusive one.
        let mut found = range(libc::F_WRLCK, byte, 1);
        fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut found)).map_err(from_errno)?;
        Ok(i32::from(found.l_type) != libc::F_UNLCK)
    }

    fn take(&self) -> Result<Option<Conflict>, LockError> {
        let used = self
            .access
            .used()
            .iter()
            .map(|permission| USED + permission);
        let unshared = UNSHARED_BY_ALL
            .iter()
            .map(|permission| UNSHARED + permission);
        for byte in used.chain(unshared) {
            match fcntl(
                &self.file,
                FcntlArg::F_OFD_SETLK(&range(libc::F_RDLCK, byte, 1)),
            ) {
                Ok(_) => {}
                // A process has an exclusive lock on it, which QEMU never takes.
                Err(Errno::EAGAIN | Errno::EACCES) => return Ok(Some(Conflict::Exclusive)),
                Err(errno) => return Err(from_errno(errno)),
            }
        }
        Ok(None)
    }

    fn release(&self) -> Result<(), LockError> {
        let all = range(libc::F_UNLCK, USED, UNSHARED + PERMISSIONS - USED);
        fcntl(&self.file, FcntlArg::F_OFD_SETLK(&all))
            .map(drop)
            .map_err(from_errno)
    }
}

/// Error of `fcntl` where there are no locks: NFS without a lock daemon, FUSE, old kernels;
/// a host that forbids them.
fn from_errno(errno: Errno) -> LockError {
    let error = io::Error::from(errno);
    match errno {
        Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL | Errno::EPERM => {
            LockError::Unsupported(error)
        }
        _ => LockError::Io(error),
    }
}

/// Opens the same file again for reading and writing, with the same flags and `more`.
fn reopen(file: &File, more: i32) -> io::Result<File> {
    let flags = fcntl(file, FcntlArg::F_GETFL)?;
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags & !libc::O_ACCMODE | more)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn range(kind: i32, first: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: first,
        l_len: len,
        // OFD locks have no owner process, and the kernel insists on 0.
        l_pid: 0,
    }
}
