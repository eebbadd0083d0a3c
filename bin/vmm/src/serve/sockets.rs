//! The sockets that front ends connect to.

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{Access as Permission, Mode, OFlags};

use super::access::{self, Access};
use super::purpose::Purpose;
use crate::lacks;

/// A place for a socket: its folder's device and inode, and its name in it.
pub type SocketPlace = ((u64, u64), OsString);

/// The sockets that were made, removed with this. Device and inode number distinguish ours from one
/// that another process has made in its place.
#[derive(Default)]
pub struct Sockets(Vec<(PathBuf, (u64, u64))>);

/// Checks that a socket could be made at `path`, as far as can be seen before one is made. Returns
/// where it would be.
///
/// # Errors
/// Its folder is absent or cannot be written, or something else is there.
pub fn check(path: &Path) -> Result<SocketPlace> {
    let folder = folder(path);
    let about = fs::metadata(folder)
        .with_context(|| format!("the folder of the socket {}", path.display()))?;
    let Some(name) = path.file_name().filter(|_| about.is_dir()) else {
        bail!("the socket {} is not in a folder", path.display());
    };
    let wanted = Permission::WRITE_OK | Permission::EXEC_OK;
    lacks::may_access(folder, wanted).with_context(|| {
        let socket = path.display();
        format!("the folder of the socket {socket} cannot be written")
    })?;
    occupant(path)?;
    Ok(((about.dev(), about.ino()), name.to_owned()))
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Returns the socket that is there already.
fn occupant(path: &Path) -> Result<Option<Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            bail!("{} exists and is no socket", path.display());
        }
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("the socket {}", path.display())),
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

impl Sockets {
    /// Listens at `path`, for those that `access` admits. A socket that no process serves any more
    /// (its daemon was killed) is replaced. In a check the socket is made beside it, under a name
    /// of its own, and is gone at once; the stale one stays.
    ///
    /// # Errors
    /// Names the path.
    pub fn listen(
        &mut self,
        path: &Path,
        access: Access,
        purpose: Purpose,
    ) -> Result<UnixListener> {
        let is_stale = occupant(path)?.is_some() && is_stale(path)?;
        let made = || format!("the socket {} cannot be made", path.display());
        if purpose == Purpose::Check {
            return listen_in_trial(path, access, &made);
        }
        if is_stale {
            fs::remove_file(path).with_context(|| {
                format!("the stale socket {} cannot be removed", path.display())
            })?;
        }
        let socket = access.bind(path).with_context(made)?;
        // One that has gone already is not ours to remove.
        self.0
            .extend(identity(path).map(|own| (path.to_owned(), own)));
        access.apply(path)?;
        access::listen(socket).with_context(made)
    }
}

/// Opens a socket in the folder of `path`, under a name of its own, that is gone when this returns.
fn listen_in_trial(path: &Path, access: Access, made: &dyn Fn() -> String) -> Result<UnixListener> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder(path), flags, Mode::empty()).with_context(made)?;
    // A short path, however long the folder's own is.
    let short = format!("/proc/self/fd/{}", folder.as_raw_fd());
    let trial = tempfile::Builder::new()
        .prefix(".exitless-")
        .make_in(short, |path| access.bind(path))
        .with_context(made)?;
    access.apply(trial.path())?;
    let (socket, _removed) = trial.into_parts();
    access::listen(socket).with_context(made)
}

/// Returns whether no process has the socket `path` any more. Asked by a socket of another type,
/// whose connection is refused in another way if a process has it; that process does not notice.
///
/// # Errors
/// A process has it, or may have it: it may keep us out.
fn is_stale(path: &Path) -> Result<bool> {
    let asked = UnixDatagram::unbound().and_then(|socket| socket.connect(path));
    let error = match asked {
        Ok(()) => io::ErrorKind::AddrInUse.into(),
        Err(error) if error.raw_os_error() == Some(libc::EPROTOTYPE) => {
            bail!("{} is served by another process", path.display())
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => error,
    };
    Err(error).with_context(|| {
        let socket = path.display();
        format!("the socket {socket} may be served by another process, and cannot be replaced")
    })
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for (path, own) in &self.0 {
            if identity(path) == Some(*own) {
                // Another process may have removed it.
                let _ = fs::remove_file(path);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_socket_that_cannot_be_connected_to_is_not_taken_for_a_stale_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        // As one of which we have no permission, but root has that.
        let _other = UnixDatagram::bind(&path).unwrap();
        let own = identity(&path);
        let error = Sockets::default()
            .listen(&path, Access::default(), Purpose::Start)
            .unwrap_err();
        assert!(error.to_string().contains("cannot be replaced"), "{error}");
        assert_eq!(identity(&path), own, "it was removed");
    }

    #[test]
    fn a_stale_socket_is_replaced_by_one_that_goes_with_its_listener() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut sockets = Sockets::default();
        let stale = UnixListener::bind(&path).unwrap();
        drop(stale);
        let access = Access {
            mode: Some(0o660),
            group: Some(rustix::process::getegid().as_raw()),
        };
        let listener = sockets.listen(&path, access, Purpose::Start).unwrap();
        UnixStream::connect(&path).unwrap();
        drop((listener, sockets));
        assert!(!path.exists());
    }
}
