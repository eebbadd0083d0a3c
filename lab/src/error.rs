//! Errors of a lab, by the party that has to act.

use std::io;
use std::path::{Path, PathBuf};

/// A failure of the lab itself; a program that fails inside is an [`Output`](crate::Output)
/// instead.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A Debian package could not be fetched or unpacked; `hint` says what to do.
    #[error("cannot get {what} from Debian packages: {reason}; {hint}")]
    Package {
        /// Package or packages that were needed.
        what: String,
        /// Reason for the failure, with the end of the tool's own output.
        reason: String,
        /// Action that the user can take.
        hint: String,
    },
    /// There is not enough free space for a file or folder.
    #[error("the disk of {} is full: {free_mib} MiB are free; make room, or set EXITLESS_LAB_DIR \
         to a directory \
             elsewhere", path.display())]
    Full {
        /// A directory on that disk.
        path: PathBuf,
        /// Free space, MiB.
        free_mib: u64,
    },
    /// The workspace's own guest programs, or a module for the guest, could not be built.
    #[error("cannot build {what} for the lab: {reason}")]
    Build {
        /// The crate or module.
        what: String,
        /// End of the build tool's output, or the beginning of a compiler's.
        reason: String,
    },
    /// A file or process of this host failed.
    #[error("{action} {}", path.display())]
    Host {
        /// Action that failed ("read", "write", "start").
        action: &'static str,
        /// Object of the action.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// An argument makes no sense; nothing was started.
    #[error("{0}")]
    Config(String),
    /// The emulated host stopped: a panic, a kill, or QEMU refusing to start.
    #[error("the emulated host stopped while {during}; the end of its console:\n{console}")]
    Died {
        /// Event that the caller was waiting for.
        during: String,
        /// The last lines of console and emulator output.
        console: String,
    },
    /// The emulated host or a program in it took too long.
    #[error(
        "{during}: no end after {seconds} s (more on a busy machine); the end of the lab's \
         console:\n{console}"
    )]
    Timeout {
        /// Event that the caller was waiting for.
        during: String,
        /// The limit, seconds.
        seconds: u64,
        /// The last lines of console and emulator output.
        console: String,
    },
    /// The agent inside refused a request (no such file, no such program).
    #[error("in the lab: {0}")]
    Inside(String),
}

impl LabError {
    /// Makes a mapper from an I/O error: `fs::read(p).map_err(LabError::host("read", p))`.
    pub(crate) fn host(action: &'static str, path: impl AsRef<Path>) -> impl Fn(io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::Host {
            action,
            path: path.clone(),
            source,
        }
    }
}
