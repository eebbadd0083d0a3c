//! The cache directory of fetched and built parts, and its free space.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

use crate::LabError;

/// Free space, bytes, below which a failure is attributed to the full disk.
const NEARLY_FULL: u64 = 1 << 20;

/// Returns the directory of packages, built guest programs and images: `EXITLESS_LAB_DIR`, else
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
        // Absolute, since QEMU and cargo run in other directories.
        return std::path::absolute(&dir).unwrap_or(dir);
    }
    let caches = set(xdg)
        // A relative path must be ignored (XDG base directories).
        .filter(|dir| dir.is_absolute())
        .or_else(|| {
            let home = home.filter(|home| home.is_absolute() && home.is_dir());
            home.map(|home| home.join(".cache"))
        })
        .unwrap_or_else(env::temp_dir);
    caches.join("exitless/lab")
}

/// Returns a name that no other scratch file of this machine has: process and count.
pub(crate) fn unique() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{}-{number}", std::process::id())
}

/// Returns the source tree that this was built from.
pub(crate) fn workspace_dir() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}

/// Returns the bytes that may still be written below `dir`; `None` if the system does not report
/// it.
fn free(dir: &Path) -> Option<u64> {
    let is_there = dir.ancestors().find(|path| path.is_dir())?;
    let stat = rustix::fs::statvfs(is_there).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Returns the reason why no file can be created in `dir`, which need not exist yet, as far as can
/// be determined without trying.
pub(super) fn not_writable(dir: &Path) -> Option<String> {
    let above = dir.ancestors().find(|path| path.exists())?;
    let access = Access::WRITE_OK | Access::EXEC_OK;
    let refused: io::Error = match above.is_dir() {
        false => io::ErrorKind::NotADirectory.into(),
        true => match accessat(CWD, above, access, AtFlags::EACCESS).err()? {
            // Old seccomp profiles fail faccessat2 with this error; its predecessor uses the real
            // user.
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

/// Refuses to begin a write that will not fit.
pub(super) fn check_room(dir: &Path, needed: u64) -> Result<(), LabError> {
    match free(dir) {
        Some(free) if free < needed => Err(full(dir, free)),
        _ => Ok(()),
    }
}

/// Returns `error`, unless the disk below `dir` is full: then that is the cause, whatever a tool
/// reports.
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
    fn parts_that_do_not_fit_are_refused_with_the_path() {
        let dir = env::temp_dir();
        assert!(check_room(&dir.join("not/there/yet"), 1).is_ok());
        let error = check_room(&dir, u64::MAX).expect_err("no disk is that large");
        assert!(matches!(&error, LabError::Full { path, .. } if *path == dir));
    }
}
