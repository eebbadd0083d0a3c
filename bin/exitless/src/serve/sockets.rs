//! The sockets that front ends connect to.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{Access, access};

/// The sockets that were made, removed with this. Device and inode number tell ours from one that somebody else has made in
/// its place.
#[derive(Default)]
pub struct Sockets(Vec<(PathBuf, (u64, u64))>);

/// Whether a socket could be made at `path`, as far as can be seen without making one.
///
/// # Errors
/// Its folder is absent or cannot be written, or something else is there.
pub fn check(path: &Path) -> Result<()> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let is_folder = fs::metadata(folder).map(|found| found.is_dir());
    if !is_folder.with_context(|| format!("the folder of the socket {}", path.display()))? {
        bail!("the socket {} is not in a folder", path.display());
    }
    access(folder, Access::WRITE_OK | Access::EXEC_OK).with_context(|| {
        let socket = path.display();
        format!("the folder of the socket {socket} cannot be written")
    })?;
    occupant(path).map(drop)
}

/// The socket that is there already.
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
    /// Listens at `path`. A socket that nobody serves any more (its daemon was killed) is replaced.
    ///
    /// # Errors
    /// Names the path.
    pub fn listen(&mut self, path: &Path) -> Result<UnixListener> {
        if occupant(path)?.is_some() {
            if UnixStream::connect(path).is_ok() {
                bail!("{} is served by another process", path.display());
            }
            fs::remove_file(path).with_context(|| {
                format!("the stale socket {} cannot be removed", path.display())
            })?;
        }
        let listener = UnixListener::bind(path)
            .with_context(|| format!("the socket {} cannot be made", path.display()))?;
        // One that has gone already is not ours to remove.
        self.0
            .extend(identity(path).map(|own| (path.to_owned(), own)));
        Ok(listener)
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for (path, own) in &self.0 {
            if identity(path) == Some(*own) {
                // Somebody else may have removed it.
                let _ = fs::remove_file(path);
            }
        }
    }
}
