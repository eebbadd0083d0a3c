//! The format of a disk's file is given by the user, and never guessed from its contents: a guest
//! that may write its raw disk could make it look like an image that names any of the host's files.
//! The opposite mistake is caught here: an image without a given format would be shown to the guest
//! as raw blocks, tables and all.

use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt};

use anyhow::{Context, Result, bail};

/// Magic number of a qcow2 image: `QFI\xfb`, "qcow2 image format", header bytes 0 to 3.
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

/// Buffer aligned as O_DIRECT requires.
#[repr(align(4096))]
struct Aligned([u8; 4096]);

/// Refuses a file that begins as a qcow2 image does. For files of which no format was given; open
/// for reading, maybe with O_DIRECT.
///
/// # Errors
/// It does, or cannot be read. Does not name the file.
pub fn refuse_image(file: &File) -> Result<()> {
    let kind = file.metadata().context("it cannot be looked at")?;
    let kind = kind.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        // No disk at all: opening it reports the error.
        return Ok(());
    }
    let mut head = Aligned([0; 4096]);
    let len = file.read_at(&mut head.0, 0).context("it cannot be read")?;
    if head.0[..len].starts_with(&QCOW2_MAGIC) {
        bail!(
            "it begins as a qcow2 image, and its format is not said: write format=qcow2, or \
             format=raw if it is a raw disk \
             into which its guest has written that"
        );
    }
    Ok(())
}
