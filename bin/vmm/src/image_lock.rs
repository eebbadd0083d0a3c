//! Locks of disk images that this program uses itself: the crate `disk-image` takes them, and this
//! module gives the advice about one that cannot be had.

use std::fs::File;
use std::path::Path;

use anyhow::{Result, anyhow};
use disk_image::lock::{self, Access, LockError, Locking};
use disk_image::{ImageError, ImageErrorKind};

/// Locks an open raw image; see [`lock::lock`].
///
/// # Errors
/// Names the holder of the lock, and what to do. Does not name the file.
pub fn raw(file: File, path: &Path, read_only: bool, locking: &Locking) -> Result<File> {
    lock::lock(file, path, Access::of_disk(read_only), locking)
        .map_err(|error| with(hint(&error), error))
}

/// Checks whether [`raw`] would get its lock at once; see [`lock::probe`].
///
/// # Errors
/// As [`raw`].
pub fn probe(file: &File, access: Access, locking: &Locking) -> Result<()> {
    lock::probe(file, access, locking).map_err(|error| with(hint(&error), error))
}

/// Returns the error of opening the image at `path`, with what to do about it where that is known.
/// Names a file only if it is not the image but one behind it.
pub fn explain(error: ImageError, path: &Path) -> anyhow::Error {
    let hint = match &error.kind {
        ImageErrorKind::Locked(LockError::InUse { .. }) if error.path != path => {
            " (nobody may write to a backing file while a disk that stands on it is in use)"
                .to_owned()
        }
        ImageErrorKind::Locked(error) => hint(error).to_owned(),
        ImageErrorKind::BackingRefused(_) => " (backing=on follows it)".to_owned(),
        _ => error
            .advice()
            .map_or_else(String::new, |advice| format!(" ({advice})")),
    };
    let file = match error.path == path {
        true => String::new(),
        false => format!("backing file {}: ", error.path.display()),
    };
    anyhow!("{file}{:#}{hint}", anyhow::Error::from(error.kind))
}

fn hint(error: &LockError) -> &'static str {
    match error {
        LockError::InUse { .. } => " (an image can be shared if all who use it have readonly=on)",
        LockError::Unsupported(_) => {
            " (locking=off goes without, and then nothing keeps two writers apart)"
        }
        _ => "",
    }
}

fn with(hint: &str, error: impl Into<anyhow::Error>) -> anyhow::Error {
    match hint {
        "" => error.into(),
        hint => anyhow!("{:#}{hint}", error.into()),
    }
}
