//! Counts of the emulated host's disks.

use std::iter::Sum;
use std::ops::Sub;

use anyhow::{Context, Result};

use crate::system::host::Host;

/// Counters of a disk, as in `/sys/block/*/stat`, in requests and pages of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    /// Read requests.
    pub reads: u64,
    /// Pages read.
    pub pages_read: u64,
    /// Write requests.
    pub writes: u64,
    /// Pages written.
    pub pages_written: u64,
}

impl Disk {
    /// Returns the pages, both ways.
    pub fn pages(self) -> u64 {
        self.pages_read + self.pages_written
    }

    /// Returns the requests, reads and writes.
    pub fn requests(self) -> u64 {
        self.reads + self.writes
    }

    /// Parses a line: I/Os, merges, sectors and ticks of reads; the same of writes; and more.
    fn parse(line: &str) -> Result<Self> {
        let numbers: Vec<u64> = line
            .split_whitespace()
            .map(|word| {
                word.parse()
                    .with_context(|| format!("{word:?} of {line:?}"))
            })
            .collect::<Result<_>>()?;
        let at = |index: usize| numbers.get(index).copied();
        let at = |index| at(index).with_context(|| format!("too short: {line:?}"));
        Ok(Self {
            reads: at(0)?,
            pages_read: at(2)? / 8,
            writes: at(4)?,
            pages_written: at(6)? / 8,
        })
    }
}

/// Counters of both disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disks {
    /// Disk of the swap area or store.
    pub store: Disk,
    /// Disk of the image.
    pub image: Disk,
}

impl Disks {
    /// Reads the counters: the store on `/dev/vda`, the image on `/dev/vdb`.
    pub fn now(host: &Host) -> Result<Self> {
        Self::with_stores(host, &["vda"])
    }

    /// Reads the counters, with the sum of several stores.
    pub fn with_stores(host: &Host, stores: &[&str]) -> Result<Self> {
        let names = ["vdb"].iter().chain(stores);
        let files = names.map(|name| format!("/sys/block/{name}/stat"));
        let script = format!("cat {}", files.collect::<Vec<_>>().join(" "));
        let text = host.script(&script)?;
        let disks: Vec<Disk> = text.lines().map(Disk::parse).collect::<Result<_>>()?;
        let (image, stores) = disks.split_first().context("no disk's counters")?;
        Ok(Self {
            store: stores.iter().copied().sum(),
            image: *image,
        })
    }
}

impl Sum for Disk {
    fn sum<I: Iterator<Item = Self>>(disks: I) -> Self {
        disks.fold(Self::default(), |a, b| Self {
            reads: a.reads + b.reads,
            pages_read: a.pages_read + b.pages_read,
            writes: a.writes + b.writes,
            pages_written: a.pages_written + b.pages_written,
        })
    }
}

impl Sub for Disks {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        let sub = |now: Disk, before: Disk| Disk {
            reads: now.reads - before.reads,
            pages_read: now.pages_read - before.pages_read,
            writes: now.writes - before.writes,
            pages_written: now.pages_written - before.pages_written,
        };
        Self {
            store: sub(self.store, before.store),
            image: sub(self.image, before.image),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disks_counters_are_in_requests_and_pages() {
        let line =
            "    1585      310    12680      442     2094   102    16752   1219    0  1400 1661";
        let disk = Disk::parse(line).expect("a line of the kernel's");
        let wanted = Disk {
            reads: 1585,
            pages_read: 1585,
            writes: 2094,
            pages_written: 2094,
        };
        assert_eq!(disk, wanted);
        assert_eq!(disk.pages(), 3679);
        assert_eq!([disk, disk].into_iter().sum::<Disk>().pages(), 2 * 3679);
        assert!(Disk::parse("1 2 3").is_err());
        assert!(Disk::parse("1 2 3 4 5 6 x 8").is_err());
    }
}
