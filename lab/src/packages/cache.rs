//! Where the lab keeps what it fetched and built, and how much room is there.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

use crate::LabError;

/// Below this much free space, bytes, a failure is put down to the full disk.
const NEARLY_FULL: u64 = 1 << 20;

/// Where the lab keeps packages, built guest programs and images: `EXITLESS_LAB_DIR`, else
/// `exitless/lab` in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`), else in the
/// directory for temporary files.
#[must_use]
pub fn cache_dir() -> PathBuf {
    choose(
        env::var_os("EXITLESS_LAB_DIR"),
        env::var_os("XDG_CACHE_HOME"),
        env::home_dir(),
    )
}

fn choose(given: Option<OsString>, xdg: Option<OsString>, home: Option<PathBuf>) -> PathBuf {
    let set = |value: Option<OsString>| value.filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(dir) = set(given) {
        // QEMU and cargo are started elsewhere.
        return std::path::absolute(&dir).unwrap_or(dir);
    }
    let caches = set(xdg)
        // A relative path is to be ignored (XDG base directories).
        .filter(|dir| dir.is_absolute())
        .or_else(|| {
            let home = home.filter(|home| home.is_absolute() && home.is_dir());
            home.map(|home| home.join(".cache"))
        })
        .unwrap_or_else(env::temp_dir);
    caches.join("exitless/lab")
}

/// A name that no other scratch file of this machine has: process and count.
pub(crate) fn unique() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{}-{number}", std::process::id())
}

/// The source tree this was built from.
pub(crate) fn workspace_dir() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}

/// Bytes that may still be written below `dir`; `None` if the system does not say.
fn free(dir: &Path) -> Option<u64> {
    let is_there = dir.ancestors().find(|path| path.is_dir())?;
    let stat = rustix::fs::statvfs(is_there).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Why nothing could be made in `dir`, which need not be there yet; as far as this can be told
/// without trying.
pub(super) fn not_writable(dir: &Path) -> Option<String> {
    let above = dir.ancestors().find(|path| path.exists())?;
    let access = Access::WRITE_OK | Access::EXEC_OK;
    let refused: io::Error = match above.is_dir() {
        false => io::ErrorKind::NotADirectory.into(),
        true => match accessat(CWD, above, access, AtFlags::EACCESS).err()? {
            // What old seccomp profiles say to faccessat2; its predecessor goes by the real user.
            Errno::PERM => accessat(CWD, above, access, AtFlags::empty()).err()?.into(),
            error => error.into(),
        },
    };
    Some(format!(
        "nothing can be kept in {}: {}: {refused} (EXITLESS_LAB_DIR names another directory)",
        dir.display(),
        above.display()
    ))
}

/// Refuses to begin what will not fit.
pub(super) fn check_room(dir: &Path, needed: u64) -> Result<(), LabError> {
    match free(dir) {
        Some(free) if free < needed => Err(full(dir, free)),
        _ => Ok(()),
    }
}

/// `error`, unless the disk below `dir` is full: then that is what went wrong, whatever a tool says
/// of it.
pub(crate) fn full_or(dir: &Path, error: LabError) -> LabError {
    match free(dir) {
        Some(free) if free < NEARLY_FULL => full(dir, free),
        _ => error,
    }
}

fn full(dir: &Path, free: u64) -> LabError {
    LabError::Full {
        path: dir.to_path_buf(),
        free_mib: free >> 20,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_the_users_unless_said_otherwise() {
        let os = |text: &str| Some(OsString::from(text));
        let home = || Some(PathBuf::from("/tmp"));
        assert_eq!(choose(os("/x/y"), os("/c"), home()), Path::new("/x/y"));
        assert!(choose(os("y"), None, home()).is_absolute());
        assert_eq!(choose(None, os("/c"), home()), Path::new("/c/exitless/lab"));
        for xdg in [None, os(""), os("relative")] {
            let dir = choose(None, xdg, home());
            assert_eq!(dir, Path::new("/tmp/.cache/exitless/lab"));
        }
        let without = choose(None, None, Some(PathBuf::from("/nonexistent")));
        assert_eq!(without, env::temp_dir().join("exitless/lab"));
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let dir = env::temp_dir();
        assert!(check_room(&dir.join("not/there/yet"), 1).is_ok());
        let error = check_room(&dir, u64::MAX).expect_err("no disk is that large");
        assert!(matches!(&error, LabError::Full { path, .. } if *path == dir));
    }
}
