//! Search for the holders of an image's lock: for messages, and to distinguish a live holder from
//! one that was killed.
//!
//! `/proc/locks` does not say whose an OFD lock is, but `/proc/PID/fdinfo/FD` lists the locks held
//! through that descriptor. A process sees those of its own user, root sees all; a process that is
//! dying has no descriptors any more. Nothing but text of `/proc` is read: a look at the files
//! themselves (`stat`) would wait for a file system that does not answer.

use std::fmt;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{PERMISSIONS, UNSHARED, USED};

/// Longest search. On a machine with very many descriptors it may end before it has found a holder.
const SEARCH: Duration = Duration::from_millis(200);
/// Most holders that are named.
const MOST: usize = 3;

/// A process that has locks on an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its number.
    pub pid: u32,
    /// The name of its program, at most 15 bytes, printable. The process chooses it.
    pub name: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.pid == std::process::id() {
            return write!(f, "this process ({})", self.pid);
        }
        write!(f, "{} (process {})", self.name, self.pid)
    }
}

/// This process, if it holds locks on `file` through another open of it.
pub(super) fn in_this_process(file: &File) -> Vec<Holder> {
    let holds = Identity::of(file).is_some_and(|identity| identity.is_locked_by(Path::new("self")));
    match holds {
        true => vec![holder(std::process::id())],
        false => Vec::new(),
    }
}

/// All that can be seen, the first few.
pub(super) fn anywhere(file: &File) -> Vec<Holder> {
    let end = Instant::now() + SEARCH;
    let (Some(identity), Ok(processes)) = (Identity::of(file), fs::read_dir("/proc")) else {
        return Vec::new();
    };
    processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .take_while(|_| Instant::now() < end)
        .filter(|pid: &u32| identity.is_locked_by(Path::new(&pid.to_string())))
        .take(MOST)
        .map(holder)
        .collect()
}

fn holder(pid: u32) -> Holder {
    let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    let name = printable(name.trim_ascii_end());
    Holder { pid, name }
}

fn printable(name: &[u8]) -> String {
    String::from_utf8_lossy(name)
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// An open file as `/proc` writes it.
struct Identity {
    /// `MAJOR:MINOR:INODE`, the first two hexadecimal, as in a list of locks. Not on btrfs, where
    /// `stat` reports another device number than the kernel uses itself.
    place: String,
    /// The lines `mnt_id:` and `ino:`; not for a process with mounts of its own.
    mounted: Vec<String>,
}

impl Identity {
    fn of(file: &File) -> Option<Self> {
        let metadata = file.metadata().ok()?;
        let (major, minor) = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).ok()?;
        Some(Self {
            place: format!("{major:02x}:{minor:02x}:{}", metadata.ino()),
            mounted: mounted(&info).map(str::to_owned).collect(),
        })
    }

    /// `process`: a folder of `/proc`.
    fn is_locked_by(&self, process: &Path) -> bool {
        let folder = Path::new("/proc").join(process).join("fdinfo");
        let Ok(descriptors) = fs::read_dir(folder) else {
            return false;
        };
        descriptors
            .filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok())
            .any(|info| self.is_locked_through(&info))
    }

    /// Whether the descriptor that `info` describes is of this file and has locks of an image.
    fn is_locked_through(&self, info: &str) -> bool {
        let is_ours = self.mounted.len() == 2 && mounted(info).eq(&self.mounted);
        info.lines()
            .filter_map(image_lock)
            .any(|place| is_ours || place == self.place)
    }
}

fn mounted(info: &str) -> impl Iterator<Item = &str> {
    info.lines()
        .filter(|line| line.starts_with("mnt_id:") || line.starts_with("ino:"))
}

/// The place in a line such as `lock: 1: OFDLCK ADVISORY READ -1 fe:00:1234 100 101`, if it is the
/// lock of an image.
fn image_lock(line: &str) -> Option<&str> {
    let words: Vec<_> = line.strip_prefix("lock:")?.split_whitespace().collect();
    let [_, "OFDLCK", .., place, first, last] = words[..] else {
        return None;
    };
    let first: i64 = first.parse().ok()?;
    // The end may be "EOF".
    let last: i64 = last.parse().unwrap_or(i64::MAX);
    (first < UNSHARED + PERMISSIONS && last >= USED).then_some(place)
}

#[cfg(test)]
mod tests;
