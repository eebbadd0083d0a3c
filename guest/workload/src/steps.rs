//! `--step` and `--marker`: notification of the host, which counts by phase.

use std::fs;
use std::io;

use workload::marker::{self, Markers};

use crate::options::Options;

/// Notifier of phases: by lines on the console, by markers, or both.
pub struct Steps {
    command: String,
    is_in_steps: bool,
    markers: Option<Markers>,
}

impl Steps {
    /// Creates the notifier that the options ask for.
    ///
    /// # Errors
    /// Markers are asked for and cannot be opened.
    pub fn take(options: &mut Options) -> io::Result<Self> {
        Ok(Self {
            command: options.command.clone(),
            markers: options.flag("marker").then(Markers::open).transpose()?,
            is_in_steps: options.flag("step"),
        })
    }

    /// Notes that a phase begins, or that the last is over.
    pub fn mark(&self, value: u8) {
        if self.is_in_steps {
            let cache = fs::read_to_string("/proc/meminfo").map(|text| Cache::parse(&text));
            let Cache { pages, unwritten } = cache.unwrap_or_default();
            println!(
                "{} step={value} cached={pages} unwritten={unwritten}",
                self.command
            );
            // The end of the input is as good as a line: then the host does not count any more.
            let _ = io::stdin().read_line(&mut String::new());
        }
        if let Some(markers) = &self.markers {
            // A window of the ledger for each phase.
            markers.write(marker::END);
            markers.write(value);
            if value != marker::ALLOC_END && value != marker::OVER {
                markers.write(marker::BEGIN);
            }
        }
    }
}

/// The kernel's page cache, in pages of 4 KiB.
#[derive(Debug, Default, PartialEq, Eq)]
struct Cache {
    /// All pages: of files, disks and shared memory.
    pages: u64,
    /// Pages not yet written to the disk.
    unwritten: u64,
}

impl Cache {
    /// Parses `/proc/meminfo`; a line that is missing counts as 0.
    fn parse(meminfo: &str) -> Self {
        let kib = |key: &str| {
            let rest = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
            rest.split_whitespace().next()?.parse::<u64>().ok()
        };
        let sum = |keys: [&str; 2]| keys.iter().filter_map(|key| kib(key)).sum::<u64>() / 4;
        Self {
            pages: sum(["Buffers:", "Cached:"]),
            unwritten: sum(["Dirty:", "Writeback:"]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_cache_is_that_of_files_and_of_disks() {
        let meminfo = "MemTotal: 99 kB\nBuffers:   400 kB\nCached:  40 kB\nSwapCached: 7 kB\n\
             Dirty: 8 kB\nWriteback: 4 kB\nWritebackTmp: 9 kB\n";
        let want = Cache {
            pages: 110,
            unwritten: 3,
        };
        assert_eq!(Cache::parse(meminfo), want);
        assert_eq!(Cache::parse(""), Cache::default());
    }
}
