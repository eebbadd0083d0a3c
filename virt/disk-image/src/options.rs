//! Options for opening an image, and the errors of opening one.

use std::io;
use std::path::PathBuf;

use crate::lock::{LockError, Locking};

/// Format of an image file. Never guessed from its contents: a guest can write a qcow2 header to a
/// raw disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The bytes of the file are the bytes of the disk.
    Raw,
    /// QEMU's copy-on-write format, version 2 or 3.
    Qcow2,
}

/// Policy for an image that has a backing file, that is, holds only the difference to another file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Refuse it. An image names its backing file itself, so the maker of the image chooses a file
    /// that the guest can then read.
    #[default]
    Refuse,
    /// Open the file it names (a path, absolute or relative to the image; no protocol), read-only.
    /// The image must say the file's format too: it is not guessed.
    Follow,
}

/// Options for opening an image.
#[derive(Clone, Copy, Debug)]
pub struct ImageOptions {
    /// Format of the file.
    pub format: ImageFormat,
    /// Refuse writing. Several readers may have an image open at a time, but only one writer and no
    /// reader beside it.
    pub read_only: bool,
    /// Operations in flight, 1 to 1024.
    pub depth: u32,
    /// Threads that carry operations out, 1 to 64.
    pub threads: u32,
    /// Policy for a backing file.
    pub backing: Backing,
    /// Locks on the image and on the files behind it.
    pub locking: Locking,
    /// Keep writes apart that a power cut must not reorder, by syncing the file where the format
    /// needs it.
    /// A write that needs new clusters then waits for the disk once, together with those that are
    /// served with it, and so does a discard; other operations do not. Without it a power cut may
    /// lose older data that were flushed, with the cluster that took their place, or make the image
    /// corrupt. The death of the process needs no barriers.
    pub barriers: bool,
}

impl Default for ImageOptions {
    fn default() -> Self {
        Self {
            format: ImageFormat::Qcow2,
            read_only: false,
            depth: 256,
            threads: 4,
            backing: Backing::Refuse,
            locking: Locking::default(),
            barriers: true,
        }
    }
}

/// Reason why an image cannot be served: the file, and what is wrong with it.
#[derive(Debug, thiserror::Error)]
#[error("cannot serve the disk image {}", path.display())]
pub struct ImageError {
    /// The file at fault: the image, or one of the files behind it.
    pub path: PathBuf,
    /// Kind of the fault.
    #[source]
    pub kind: ImageErrorKind,
}

impl ImageError {
    /// Returns a command that repairs the fault, and what it does, where there is one. Its words
    /// are quoted for a shell.
    pub fn advice(&self) -> Option<String> {
        let image = quoted(&self.path.to_string_lossy());
        match &self.kind {
            ImageErrorKind::Marked(mark) => Some(format!(
                "`qemu-img check -r all {image}` mends what can be mended, and takes the mark \
                 \"{mark}\" away"
            )),
            // Without `-b` it would forget the backing file.
            ImageErrorKind::BackingFormat(name) => Some(format!(
                "`qemu-img rebase -u -f qcow2 -b {} -F raw {image}` says that it is raw; write \
                 qcow2 if it is that",
                quoted(name)
            )),
            _ => None,
        }
    }
}

/// Fault of an image or of its options.
#[derive(Debug, thiserror::Error)]
pub enum ImageErrorKind {
    /// A value of the options.
    #[error("{0}")]
    Options(&'static str),
    /// The file cannot be opened or read.
    #[error("the file cannot be opened or read")]
    Io(#[source] io::Error),
    /// Neither a regular file nor a block device.
    #[error("neither a regular file nor a block device")]
    Kind,
    /// Another process has it open in a way that excludes ours.
    #[error(transparent)]
    Locked(#[from] LockError),
    /// A disk has a positive multiple of 512 bytes.
    #[error("the disk has {0} bytes, no positive multiple of 512")]
    Size(u64),
    /// It does not have the format that the options name.
    #[error("not a qcow2 image")]
    NotQcow2,
    /// It needs something we do not have.
    #[error("{0} not supported")]
    Unsupported(String),
    /// It contradicts itself or the specification.
    #[error("corrupt: {0}")]
    Corrupt(String),
    /// A mark in its header, and `qemu-img check` takes it away: "dirty" (its reference counts are
    /// out of date, which hinders writing alone) or "corrupt".
    #[error("marked {0}")]
    Marked(&'static str),
    /// It has a backing file, and the options refuse those.
    #[error("has the backing file {0:?}, and backing files are not allowed")]
    BackingRefused(String),
    /// It does not name its backing file's format.
    #[error("does not say the format of its backing file {0:?}")]
    BackingFormat(String),
    /// Too many files behind each other, or a file behind itself.
    #[error("more than {0} files behind each other, or one behind itself")]
    Chain(usize),
    /// The library gave up.
    #[error("the image library panicked: {0}")]
    Panicked(String),
}

/// A word of a shell's command line.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}
