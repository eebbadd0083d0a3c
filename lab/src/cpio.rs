//! A writer of `newc` archives, the format of a Linux initramfs.
//!
//! Source: the kernel's `Documentation/driver-api/early-userspace/buffer-format.rst`: per entry a
//! 110-byte header of ASCII hexadecimal fields, the name with its NUL, padding to 4 bytes, the
//! data, padding to 4 bytes; an entry `TRAILER!!!` ends the archive.
//!
//! Deterministic: entries are sorted by path, owned by root, dated 1 January 1970, with inode
//! numbers in order, so that the same input gives the same bytes on every machine. Parent
//! directories are added automatically. Left out: hard links, extended attributes, checksums
//! (`070702`).

use std::collections::BTreeMap;
use std::io::{self, Write};

const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;
const S_IFCHR: u32 = 0o020_000;

/// An initramfs under construction.
#[derive(Debug, Default)]
pub struct Archive {
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Entry {
    Directory,
    File { mode: u32, data: Vec<u8> },
    Symlink { target: String },
    CharDevice { mode: u32, major: u32, minor: u32 },
}

impl Archive {
    /// Creates an empty archive.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory and its parents.
    pub fn dir(&mut self, path: &str) -> &mut Self {
        let path = normal(path);
        for (at, _) in path.match_indices('/') {
            self.entries
                .entry(path[..at].to_owned())
                .or_insert(Entry::Directory);
        }
        if !path.is_empty() {
            self.entries.entry(path).or_insert(Entry::Directory);
        }
        self
    }

    /// Adds a regular file with permission bits `mode` (0o755 for programs); a second file of the
    /// same path replaces the first.
    pub fn file(&mut self, path: &str, mode: u32, data: impl Into<Vec<u8>>) -> &mut Self {
        self.put(
            path,
            Entry::File {
                mode: mode & 0o7777,
                data: data.into(),
            },
        )
    }

    /// Adds a symbolic link at `path` to `target`.
    pub fn symlink(&mut self, path: &str, target: &str) -> &mut Self {
        self.put(
            path,
            Entry::Symlink {
                target: target.to_owned(),
            },
        )
    }

    /// Adds a character device.
    pub fn char_device(&mut self, path: &str, mode: u32, major: u32, minor: u32) -> &mut Self {
        self.put(
            path,
            Entry::CharDevice {
                mode: mode & 0o7777,
                major,
                minor,
            },
        )
    }

    /// Returns whether an entry of this path exists.
    #[must_use]
    pub fn contains(&self, path: &str) -> bool {
        self.entries.contains_key(&normal(path))
    }

    fn put(&mut self, path: &str, entry: Entry) -> &mut Self {
        let path = normal(path);
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.dir(parent);
        }
        self.entries.insert(path, entry);
        self
    }

    /// Returns the finished archive.
    ///
    /// # Panics
    /// Never: writing into memory cannot fail, and no entry reaches 4 GiB (see [`Archive::write`]).
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(&mut out)
            .expect("entries below 4 GiB written to memory");
        out
    }

    /// Writes the finished archive.
    ///
    /// # Errors
    /// The writer's own, and `InvalidInput` for a file of 4 GiB or more, which `newc` cannot hold.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut at = 0_usize;
        for (inode, (path, entry)) in (1_u32..).zip(&self.entries) {
            let (mode, links, data, rdev): (u32, u32, &[u8], (u32, u32)) = match entry {
                Entry::Directory => (S_IFDIR | 0o755, 2, &[], (0, 0)),
                Entry::File { mode, data } => (S_IFREG | mode, 1, data, (0, 0)),
                Entry::Symlink { target } => (S_IFLNK | 0o777, 1, target.as_bytes(), (0, 0)),
                Entry::CharDevice { mode, major, minor } => {
                    (S_IFCHR | mode, 1, &[], (*major, *minor))
                }
            };
            at += write_entry(out, path, [inode, mode, links], data, rdev)?;
        }
        at += write_entry(out, "TRAILER!!!", [0, 0, 1], &[], (0, 0))?;
        // Whole 512-byte blocks, as cpio itself writes; the kernel skips the zeros.
        out.write_all(&vec![0; at.next_multiple_of(512) - at])
    }
}

fn write_entry(
    out: &mut impl Write,
    path: &str,
    [inode, mode, links]: [u32; 3],
    data: &[u8],
    (rmajor, rminor): (u32, u32),
) -> io::Result<usize> {
    let too_large = |_| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{path}: 4 GiB or more"),
        )
    };
    let size = u32::try_from(data.len()).map_err(too_large)?;
    let name_size = u32::try_from(path.len() + 1).map_err(too_large)?;
    // Order of the fields: ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor
    // rdevminor namesize check.
    let fields = [
        inode, mode, 0, 0, links, 0, size, 0, 0, rmajor, rminor, name_size, 0,
    ];
    let mut head = String::from("070701");
    for field in fields {
        head.push_str(&format!("{field:08X}"));
    }
    head.push_str(path);
    head.push('\0');
    let head_len = head.len().next_multiple_of(4);
    let data_len = data.len().next_multiple_of(4);
    out.write_all(head.as_bytes())?;
    out.write_all(&[0; 3][..head_len - head.len()])?;
    out.write_all(data)?;
    out.write_all(&[0; 3][..data_len - data.len()])?;
    Ok(head_len + data_len)
}

/// Strips leading and doubled slashes: archive paths are relative to the root.
fn normal(path: &str) -> String {
    path.split('/')
        .filter(|part| !part.is_empty() && *part != ".")
        .collect::<Vec<_>>()
        .join("/")
}

#[cfg(test)]
mod tests;
