//! Locks on image files that QEMU's tools understand.
//!
//! QEMU (`block/file-posix.c`) takes shared OFD locks on single bytes: byte 100 + n by whoever *uses* permission
//! n, byte 200 + n by whoever *does not share* it; then it tests that nobody holds the counterpart. The bytes need
//! not exist. OFD locks belong to the open file, so they end with the last descriptor of it, also when the process
//! is killed, and two opens by one process exclude each other.
//!
//! A reader uses "consistent read" and shares neither writing nor resizing; a writer uses those as well. So
//! readers get on with each other, and a writer with nobody.

use std::fs::File;
use std::io;

use nix::fcntl::{FcntlArg, fcntl};

use crate::options::ImageErrorKind;

/// First byte of the locks for permissions in use, and for permissions not shared.
const USED: i64 = 100;
const UNSHARED: i64 = 200;

/// A permission's bit number, and its name.
type Permission = (i64, &'static str);
const CONSISTENT_READ: Permission = (0, "read");
const WRITE: Permission = (1, "write");
const RESIZE: Permission = (3, "resize");

/// Locks `file` until all descriptors of this open file are closed.
pub(crate) fn lock(file: &File, read_only: bool) -> Result<(), ImageErrorKind> {
    let used: &[Permission] = if read_only {
        &[CONSISTENT_READ]
    } else {
        &[CONSISTENT_READ, WRITE, RESIZE]
    };
    let unshared = [WRITE, RESIZE];
    // First take, then look: of two that come at the same time one may see the other, or both may,
    // never neither.
    for (bit, name) in used {
        take(file, USED + bit, name)?;
    }
    for (bit, name) in unshared {
        take(file, UNSHARED + bit, name)?;
    }
    for (bit, name) in used {
        test(file, UNSHARED + bit, name)?;
    }
    for (bit, name) in unshared {
        test(file, USED + bit, name)?;
    }
    Ok(())
}

fn range(kind: i32, byte: i64) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: byte,
        l_len: 1,
        // OFD locks have no owner process, and the kernel insists on 0.
        l_pid: 0,
    }
}

fn take(file: &File, byte: i64, name: &'static str) -> Result<(), ImageErrorKind> {
    use nix::errno::Errno;
    match fcntl(file, FcntlArg::F_OFD_SETLK(&range(libc::F_RDLCK, byte))) {
        Ok(_) => Ok(()),
        Err(Errno::EAGAIN | Errno::EACCES) => Err(ImageErrorKind::Locked(name)),
        Err(errno) => Err(ImageErrorKind::Io(io::Error::from(errno))),
    }
}

/// Whether somebody else has the byte.
fn test(file: &File, byte: i64, name: &'static str) -> Result<(), ImageErrorKind> {
    let mut found = range(libc::F_WRLCK, byte);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))
        .map_err(|errno| ImageErrorKind::Io(io::Error::from(errno)))?;
    if i32::from(found.l_type) == libc::F_UNLCK {
        Ok(())
    } else {
        Err(ImageErrorKind::Locked(name))
    }
}
